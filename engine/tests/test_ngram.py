"""N-gram drafts: the continuation of the latest earlier occurrence of the longest suffix."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from attnplug_engine.speculation.ngram import History
from attnplug_engine.speculation.tree import depths
from attnplug_testing.devices import nothing_waits

POISON = 10**6
CONTEXT = 64


def filled(texts: Sequence[Sequence[int]], device: str, context: int = CONTEXT) -> History:
    """History of these texts, with poison behind each."""
    history = History(len(texts), context, torch.device(device))
    history.tokens.fill_(POISON)
    for row, text in enumerate(texts):
        history.write_prompt(row, 0, text)
    return history


def proposed(
    texts: Sequence[Sequence[int]], device: str, steps: int, *, context: int = CONTEXT, topk: int = 1, **how: int
) -> list[list[list[int]]]:
    """The chains of each text."""
    history = filled(texts, device, context)
    rows, lengths = torch.arange(len(texts), device=device), torch.tensor([len(text) for text in texts], device=device)
    with nothing_waits(device):
        proposal = history.propose(rows, lengths, steps, topk=topk, **how)
    if topk == 1:
        assert proposal.parents is None
    else:
        assert proposal.parents is not None
        parents = [max(node - topk, 0) for node in range(1, 1 + steps * topk)]
        assert proposal.parents.tolist() == [parents] * len(texts)
        assert depths(proposal.parents)[0, 1:].tolist() == [1 + node // topk for node in range(steps * topk)]
    found: list[list[list[int]]] = proposal.tokens.view(-1, steps, topk).transpose(1, 2).tolist()
    return found


def naive(text: Sequence[int], steps: int, topk: int = 1, most: int = 5, least: int = 2) -> list[list[int]]:
    """Reference: search every position for the longest suffix, the latest position first."""
    chains: list[list[int]] = []
    for length in range(min(most, len(text) - 1), least - 1, -1):
        for after in range(len(text) - 1, length - 1, -1):  # the place of the token that follows
            if list(text[after - length : after]) != list(text[len(text) - length :]):
                continue
            if all(text[after] != chain[0] for chain in chains):
                chain = list(text[after:])
                while len(chain) < steps:
                    chain.append(chain[after - len(text)])
                chains.append(chain[:steps])
    return (chains + [[-1] * steps] * topk)[:topk]


@pytest.mark.parametrize(("most", "least", "topk"), [(5, 2, 1), (3, 1, 3), (1, 1, 3)])
@pytest.mark.sample(3)
def test_the_longest_suffix_and_then_the_latest_occurrence(
    kernel_device: str, topk: int, most: int, least: int
) -> None:
    """Random texts of few tokens; several chains begin by different tokens. Nothing past a text is read."""
    chance = random.Random(most)
    texts = [[chance.randrange(3 + row % 4) for _ in range(chance.randrange(CONTEXT + 1))] for row in range(40)]
    texts += [[], [1], [1, 1], [2] * CONTEXT, list(range(CONTEXT))]
    found = proposed(texts, kernel_device, 4, topk=topk, most=most, least=least)
    assert found == [naive(text, 4, topk, most, least) for text in texts]


def test_a_text_of_many_blocks(kernel_device: str) -> None:
    """The best of all blocks, and occurrences across the border of two."""
    chance = random.Random(1)
    texts = [[chance.randrange(200) for _ in range(5000)] for _ in range(3)]
    texts[1][2046:2051] = [*texts[1][-3:], 7, 8]
    texts[2][10:16], texts[2][4090:4095] = [*texts[2][-5:], 9], [*texts[2][-4:], 10]
    found = proposed(texts, kernel_device, 3, context=6000, topk=2)
    assert found == [naive(text, 3, 2) for text in texts]
    assert found[1][0][:2] == [7, 8] and [chain[0] for chain in found[2]] == [9, 10]


def test_a_repeated_text_goes_on(kernel_device: str) -> None:
    """A period shorter than the draft is proposed again and again."""
    assert proposed([[9, 1, 2, 1, 2, 1, 2]], kernel_device, 5) == [[[1, 2, 1, 2, 1]]]
    assert proposed([[4, 4, 4]], kernel_device, 3) == [[[4, 4, 4]]]


def test_a_text_longer_than_the_context_has_no_draft(kernel_device: str) -> None:
    history = filled([[1, 2] * (CONTEXT // 2)], kernel_device)
    rows, lengths = torch.tensor([0, 1], device=kernel_device), torch.tensor([CONTEXT + 1, 0], device=kernel_device)
    assert history.propose(rows, lengths, 2).tokens.tolist() == [[-1, -1]] * 2


def test_rows_and_lengths_of_a_batch(kernel_device: str) -> None:
    """Requests in any order, and lengths of 32 bits, which may be shorter than what was written."""
    history = filled([[1, 2, 3, 1, 2], [5, 6, 7, 5, 6, 8, 5, 6]], kernel_device)
    rows = torch.tensor([1, 0, 2, 1], device=kernel_device)
    lengths = torch.tensor([8, 5, 0, 5], device=kernel_device, dtype=torch.int32)
    assert history.propose(rows, lengths, 1).tokens.tolist() == [[8], [3], [-1], [7]]


def test_accepted_tokens_are_appended(kernel_device: str) -> None:
    """Only accepted tokens are appended, none past the context. A -1 becomes a valid token. Padding changes no row of a
    request."""
    texts = [[1] * 10, [2] * (CONTEXT - 2), [3] * 4, [4] * 5]
    history = filled(texts, kernel_device)
    rows = torch.tensor([2, 0, 1, 3, 4, 4], device=kernel_device)
    lengths = torch.tensor([4, 10, CONTEXT - 2, 5, 0, 0], device=kernel_device, dtype=torch.int32)
    accepted = [[31, 32, 33], [11, -1, -1], [21, 22, 23], [41, -1, 7], [7, 7, 7], [7, 7, 7]]
    tokens = torch.tensor(accepted, device=kernel_device)
    counts = torch.tensor([2, 1, 3, 2, 3, 3], device=kernel_device)
    with nothing_waits(kernel_device):
        history.append(rows, lengths, tokens, counts)
    expected = torch.full((4, CONTEXT), POISON)
    for row, text in enumerate([[*texts[0], 11], [*texts[1], 21, 22], [*texts[2], 31, 32], [*texts[3], 41, 0]]):
        expected[row, : len(text)] = torch.tensor(text)
    assert history.tokens[:4].tolist() == expected.tolist()


def test_prompts_are_written_in_parts(kernel_device: str) -> None:
    history = filled([[1, 2, 3]], kernel_device)
    history.write_prompt(0, 3, (4, 5))
    assert history.tokens[0, :6].tolist() == [1, 2, 3, 4, 5, POISON]
