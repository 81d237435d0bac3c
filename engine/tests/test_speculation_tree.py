"""Proposed chains and trees: their shape, what of them is accepted, what moves, and how trees grow."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from attnplug import UsageError
from attnplug_engine.execution.sampler import Sampler
from attnplug_engine.execution.sampling_inputs import sampling_metadata
from attnplug_engine.kernels.sampling_metadata import SamplingMetadata
from attnplug_engine.request import Request, SamplingParams
from attnplug_engine.speculation.acceptance import Accepted, accept, accept_and_commit, moves
from attnplug_engine.speculation.tree import Proposal, TreeGrowth, ancestors, depths
from attnplug_engine.speculation.verify_rows import verify_rows
from attnplug_testing.devices import nothing_waits
from attnplug_testing.errors import naming

SIZES = [1, 2, 3, 8, 17, 64]


def random_parents(chance: random.Random, requests: int, nodes: int) -> list[list[int]]:
    """Parents of random trees: bushy ones, long ones, and some between."""
    lean = [chance.choice([0.0, 0.5, 0.9]) for _ in range(requests)]
    return [
        [node - 1 if chance.random() < lean[request] else chance.randrange(node) for node in range(1, nodes)]
        for request in range(requests)
    ]


def lineage(parents: Sequence[int], node: int) -> list[int]:
    """A node and its ancestors, from the root on."""
    line = [node]
    while line[0]:
        line.insert(0, parents[line[0] - 1])
    return line


def whole(rows: Sequence[Sequence[int]], device: str, width: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), width).to(device)


@pytest.mark.parametrize("nodes", SIZES)
def test_depths_and_ancestors(kernel_device: str, nodes: int) -> None:
    parents = random_parents(random.Random(nodes), 7, nodes)
    given = whole(parents, kernel_device, nodes - 1)
    lines = [[lineage(tree, node) for node in range(nodes)] for tree in parents]
    bits = [[sum(1 << above for above in line) for line in tree] for tree in lines]
    signed = [[each - (1 << 64) * (each >> 63) for each in tree] for tree in bits]
    with nothing_waits(kernel_device):
        found = depths(given), ancestors(given)
    assert found[0].tolist() == [[len(line) - 1 for line in tree] for tree in lines]
    assert found[1].tolist() == signed


@pytest.mark.parametrize("tree", [False, True])
def test_the_rows_of_a_verify(kernel_device: str, tree: bool) -> None:
    """Roots first, at the committed length: the host's, if it knows them. A missing node is looked up as token 0, and
    the place of a row's output token is that of its depth."""
    chance, nodes, rows, device = random.Random(3), 6, [4, 0, 2], kernel_device
    parents = whole(random_parents(chance, 5, nodes), device, nodes - 1)
    drafts = whole([[chance.randrange(-1, 9) for _ in range(nodes - 1)] for _ in range(5)], device, nodes - 1)
    tokens, lengths = torch.arange(50, 55, device=device), torch.arange(10, 60, 10, device=device)
    known, committed, prompts = (torch.tensor(x, device=device) for x in ([-1, 77, -1], [0, 5, 0], [9, 3, 8]))
    requests = [Request(row, (1,), SamplingParams(9, temperature=0.5, top_k=2, top_p=0.7, min_p=0.1)) for row in rows]
    sampling = sampling_metadata(requests, Sampler(5).seed_of, torch.device(device))
    where = torch.tensor(rows, device=device)
    proposed = Proposal(drafts, parents if tree else None)
    with nothing_waits(device):
        found = verify_rows(where, known, committed, prompts, sampling, tokens, lengths, proposed)
    starts = [50, 5, 30]
    assert found.lengths.tolist() == starts and found.seq_lens.tolist() == [start + nodes for start in starts]
    assert (found.lengths.dtype, found.seq_lens.dtype) == (torch.int64, torch.int32)
    own = [drafts[row].tolist() for row in rows]
    ids = [[root, *(max(token, 0) for token in each)] for root, each in zip([54, 77, 52], own, strict=True)]
    assert found.ids.view(-1, nodes).tolist() == ids and found.proposal.tokens.tolist() == own
    depth = depths(parents[where]) if tree else torch.arange(nodes, device=device).expand(len(rows), -1)
    positions = torch.tensor(starts, device=device).unsqueeze(1) + depth
    assert found.positions.tolist() == positions.flatten().tolist()
    if tree:
        assert found.tree is not None and found.proposal.parents is not None
        assert found.tree.tolist() == ancestors(parents[where]).tolist()
        assert found.proposal.parents.tolist() == parents[where].tolist()
    else:
        assert found.tree is None and found.proposal.parents is None
    assert found.sampling.position.tolist() == (positions + 1 - prompts.unsqueeze(1)).flatten().tolist()
    for field in fields(SamplingMetadata):
        one, each = (getattr(batch, field.name) for batch in (sampling, found.sampling))
        assert one.dtype is each.dtype
        if field.name != "position":
            assert each.tolist() == one.repeat_interleave(nodes).tolist()


def walk(tokens: Sequence[int], parents: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The longest path on which each token was chosen at its parent; among equals, the one to the first node."""

    def followed(line: list[int]) -> bool:
        return all(tokens[node - 1] >= 0 and tokens[node - 1] == chosen[above] for above, node in pairwise(line))

    lines = [lineage(parents, node) for node in range(len(tokens) + 1)]
    return max(filter(followed, lines), key=len)  # max takes the first of equals


def checked(accepted: Accepted, paths: Sequence[Sequence[int]], chosen: Sequence[Sequence[int]]) -> None:
    nodes = len(chosen[0])
    assert accepted.counts.tolist() == [len(path) for path in paths]
    assert accepted.path.tolist() == [[*path, *[0] * (nodes - len(path))] for path in paths]
    tokens = [[row[node] for node in path] for row, path in zip(chosen, paths, strict=True)]
    assert accepted.tokens.tolist() == [[*each, *[-1] * (nodes - len(each))] for each in tokens]


@pytest.mark.parametrize("nodes", SIZES)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.sample(12)
def test_what_was_chosen_is_accepted(kernel_device: str, nodes: int, tree: bool) -> None:
    """The vocabulary is small: siblings are often equal, and some nodes are missing or have bad logits."""
    chance, requests = random.Random(nodes), 24
    chain = [list(range(nodes - 1))] * requests
    parents = random_parents(chance, requests, nodes) if tree else chain
    tokens = [[chance.choice([-1, 0, 0, 0, 1]) for _ in range(nodes - 1)] for _ in range(requests)]
    chosen = [[chance.choice([-1, 0, 0, 0, 0, 0, 1]) for _ in range(nodes)] for _ in range(requests)]
    proposal = Proposal(
        whole(tokens, kernel_device, nodes - 1), whole(parents, kernel_device, nodes - 1) if tree else None
    )
    given = whole(chosen, kernel_device, nodes)
    with nothing_waits(kernel_device):
        accepted = accept(proposal, given)
    checked(accepted, [walk(*each) for each in zip(tokens, parents, chosen, strict=True)], chosen)


@pytest.mark.parametrize("tree", [False, True])
def test_what_is_accepted_is_committed_by_row(kernel_device: str, tree: bool) -> None:
    """No other row is touched, and the newest token is one that can be looked up."""
    device = kernel_device
    proposal = Proposal(whole([[5, 6], [5, 6]], device, 2), whole([[0, 1], [0, 0]], device, 2) if tree else None)
    chosen, rows = whole([[5, 6, 8], [6, -1, -1]], device, 3), torch.tensor([3, 1], device=device)
    before = torch.tensor([100, 200], device=device)
    lengths, tokens = torch.arange(5, device=device), torch.arange(10, 15, device=device)
    with nothing_waits(device):
        accepted = accept_and_commit(proposal, chosen, rows, before, lengths, tokens)
    checked(accepted, [[0, 1, 2], [0, 2] if tree else [0]], chosen.tolist())
    assert lengths.tolist() == [0, 202 if tree else 201, 2, 103, 4]
    assert tokens.tolist() == [10, 0 if tree else 6, 12, 8, 14]


def test_bad_logits_are_never_matched(kernel_device: str) -> None:
    """Also if nodes are missing; the -1 is the last accepted token."""
    chosen = [[-1, 5, 5], [5, -1, 5]]
    for parents in (None, whole([[0, 1], [0, 1]], kernel_device, 2)):
        accepted = accept(
            Proposal(whole([[-1, -1], [5, -1]], kernel_device, 2), parents), whole(chosen, kernel_device, 3)
        )
        checked(accepted, [[0], [0, 1]], chosen)
        assert accepted.tokens.tolist() == [[-1, -1, -1], [5, -1, -1]]


def test_of_equal_siblings_the_one_that_leads_further(kernel_device: str) -> None:
    """Chains from the root may begin alike."""
    chosen = [[1, 2, 2, 9, 3, 7]]
    proposal = Proposal(whole([[1, 1, 8, 2, 3]], kernel_device, 5), whole([[0, 0, 1, 2, 4]], kernel_device, 5))
    checked(accept(proposal, whole(chosen, kernel_device, 6)), [[0, 2, 4, 5]], chosen)


def test_accepted_rows_move_to_the_front(kernel_device: str) -> None:
    """Requests do not touch each other's rows, nor does a padded one touch any."""
    chance, nodes, requests = random.Random(5), 9, 12
    parents = random_parents(chance, requests, nodes)
    tokens = [[0] * (nodes - 1)] * requests
    chosen = [[chance.choice([0, 0, 0, 1]) for _ in range(nodes)] for _ in range(requests)]
    proposal = Proposal(whole(tokens, kernel_device, nodes - 1), whole(parents, kernel_device, nodes - 1))
    accepted = accept(proposal, whole(chosen, kernel_device, nodes))
    places = chance.sample(range(128), requests * nodes)
    slots = whole([places[start : start + nodes] for start in range(0, len(places), nodes)], kernel_device, nodes)
    slots[-1] = -1
    with nothing_waits(kernel_device):
        sources, targets = moves(accepted, slots)
    cache, live = torch.arange(128, device=kernel_device), targets >= 0
    cache[targets[live]] = cache[sources[live]]
    assert targets[live].unique().numel() == int(live.sum())
    moved = {int(slot) for slot in targets[live]}
    assert all(int(cache[slot]) == slot for slot in range(128) if slot not in moved)
    for own, path, count in zip(
        slots[:-1].tolist(), accepted.path.tolist(), accepted.counts.tolist()[:-1], strict=False
    ):
        assert cache[own[:count]].tolist() == [own[node] for node in path[:count]]
        assert not moved & set(own[count:])
    assert moved and (targets.view(-1, nodes)[-1] == -1).all()


Level = tuple[list[list[int]], list[list[float]]]
"""For each living parent its children's tokens, and their log-probabilities."""


def expanded(topk: int, levels: Sequence[Level]) -> tuple[list[list[int]], list[tuple[list[int], list[int], float]]]:
    """Reference by enumeration, for one request: the surviving nodes by number, and every candidate as a path of
    numbers from the root, with its tokens and its score. Numbers count from 1, level by level."""
    candidates: list[tuple[list[int], list[int], float]] = []
    living: list[tuple[list[int], list[int], float]] = [([0], [], 0.0)]
    alive = []
    for tokens, logprobs in levels:
        level = []
        for (path, names, score), line, gains in zip(living, tokens, logprobs, strict=True):
            for token, gain in zip(line, gains, strict=True):
                number = len(candidates) + len(level) + 1
                level.append(([*path, number], [*names, token], score + gain))
        candidates += level
        living = sorted(level, key=lambda each: -each[2])[:topk]  # which keeps the order of equals
        alive += [each[0] for each in living]
    return alive, candidates


def random_level(chance: random.Random, parents: int, topk: int) -> Level:
    """Scores are eighths, so that sums are exact, and often equal; some are 0, as good as their parent's."""
    tokens = [chance.sample(range(1000), topk) for _ in range(parents)]
    return tokens, [[-chance.randrange(0, 12) / 8 for _ in range(topk)] for _ in range(parents)]


@pytest.mark.parametrize(("topk", "steps"), [(1, 4), (2, 1), (2, 4), (4, 3), (8, 3)])
@pytest.mark.sample(5)
def test_a_tree_grows_by_its_best(topk: int, steps: int, kernel_device: str) -> None:
    """Compares with the enumeration of all candidates: the tokens that a draft runs at every step, and the final tree
    of the best ones, in which parents precede children."""
    chance, requests, device = random.Random(topk * steps), 9, kernel_device
    levels = [[random_level(chance, 1, topk)] for _ in range(requests)]
    for each in levels:
        each += [random_level(chance, topk, topk) for _ in range(steps - 1)]
    growth = None
    for step in range(steps):
        tokens = torch.tensor([each[step][0] for each in levels], device=device).view(-1, topk)
        logprobs = torch.tensor([each[step][1] for each in levels], device=device).view(-1, topk)
        with nothing_waits(device):
            if growth is None:
                growth = TreeGrowth(tokens, logprobs)
            else:
                growth.grow(tokens, logprobs)
        assert growth.rows == topk * (step + 1)
        for request, each in enumerate(levels):
            alive, candidates = expanded(topk, each[: step + 1])
            own = [candidates[path[-1] - 1] for path in alive]
            assert growth.tokens[request].tolist() == [names[-1] for _, names, _ in own]
            assert growth.depths.tolist() == [len(names) for _, names, _ in own]
            row = {path[-1]: place for place, path in enumerate(alive)}
            bits = [sum(1 << row[number] for number in path[1:]) for path in alive]
            assert growth.ancestors[request].tolist() == bits
    assert growth is not None
    largest = topk + (steps - 1) * topk**2 + 1
    for nodes in {2, min(6, largest), largest}:
        with nothing_waits(device):
            proposal = growth.proposal(nodes)
        assert proposal.parents is not None
        for request, each in enumerate(levels):
            _, candidates = expanded(topk, each)
            best = sorted(candidates, key=lambda each: -each[2])[: nodes - 1]
            best.sort(key=lambda each: each[0][-1])
            place = {0: 0} | {path[-1]: place for place, (path, _, _) in enumerate(best, 1)}
            assert proposal.tokens[request].tolist() == [names[-1] for _, names, _ in best]
            parents = proposal.parents[request].tolist()
            assert parents == [place[path[-2]] for path, _, _ in best]  # a node that is there has its parent
            assert all(parent < node for node, parent in enumerate(parents, 1))


def test_scores_that_are_no_numbers_come_last(kernel_device: str) -> None:
    """A draft's bad logits make a bad proposal, never a broken tree."""
    nan, none = float("nan"), -float("inf")
    tokens, logprobs = torch.tensor([[1, 2]]), torch.tensor([[nan, -1.0]])
    growth = TreeGrowth(tokens.to(kernel_device), logprobs.to(kernel_device))
    assert growth.tokens.tolist() == [[2, 1]]
    tokens, logprobs = torch.tensor([[5, 6], [3, 4]]), torch.tensor([[-2.0, none], [0.0, nan]])
    growth.grow(tokens.to(kernel_device), logprobs.to(kernel_device))
    assert growth.tokens.tolist() == [[2, 1, 5, 6]]
    proposal = growth.proposal(4)
    assert proposal.parents is not None
    assert proposal.tokens.tolist() == [[1, 2, 5]] and proposal.parents.tolist() == [[0, 0, 2]]


def test_more_nodes_than_candidates_are_refused() -> None:
    growth = TreeGrowth(torch.tensor([[1, 2]]), torch.zeros(1, 2))
    growth.grow(torch.tensor([[3, 4], [5, 6]]), torch.zeros(2, 2))
    with pytest.raises(UsageError, check=naming(8, 2, 7)):
        growth.proposal(8)


def test_a_draft_of_more_rows_than_a_tree_has_is_refused() -> None:
    growth = TreeGrowth(torch.arange(40).view(1, 40), torch.zeros(1, 40))
    growth.grow(torch.zeros(40, 40, dtype=torch.int64), torch.zeros(40, 40))
    with pytest.raises(UsageError, check=naming(3, 40, 80, 64)):
        growth.grow(torch.zeros(40, 40, dtype=torch.int64), torch.zeros(40, 40))
