"""Draft trees: from SGLang's masks to the contract's bits, and attention over them against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import AttentionKind, LayerSpec
from attnplug.host import ModelAttention
from attnplug_sglang.kv_pools import PageTable
from attnplug_sglang.planning import (
    CapturedGroups,
    PlannedGroup,
    cells_of_new_rows,
    draft_trees,
    eager_step,
    fill_trees,
)
from attnplug_testing.trees import Parents, ancestors, random_trees, tree_attention, tree_bits
from sglang_fakes import Mode, attention, batch, mha_layer, slots_table
from test_captured import PAGE, triton_backends

WIDE = LayerSpec(0, AttentionKind.MHA, 4, 2, 16, 16, 0.25)


def cells(tree: Parents) -> Tensor:
    """A mask ``[new, new]`` of one request."""
    found = torch.zeros(len(tree), len(tree), dtype=torch.bool)
    for row in range(len(tree)):
        found[row, ancestors(tree, row)] = True
    return found


def info(trees: tuple[Parents, ...], **changes: Any) -> Any:
    """``EagleVerifyInput`` of a batch, with the mask that SGLang makes on a CPU."""
    mask = torch.cat([cells(tree).flatten() for tree in trees])
    return SimpleNamespace(**{"draft_token_num": len(trees[0]), "custom_mask": mask, "tree_topk": 2, **changes})


@pytest.mark.parametrize("rows", [1, 6, 64])
def test_bits_are_the_cells_of_the_mask(rows: int) -> None:
    trees = random_trees(3, rows)
    assert torch.equal(draft_trees(info(trees), torch.ones(3)), tree_bits(trees))


def test_a_mask_with_prefixes_has_the_new_rows_behind_them() -> None:
    """Mask in SGLang's layout on a GPU; the memory behind the last request is not read."""
    trees, prefixes = random_trees(3, 5), [7, 0, 12]
    whole = [
        torch.cat([torch.ones(5, prefix, dtype=torch.bool), cells(tree)], 1).flatten()
        for tree, prefix in zip(trees, prefixes, strict=True)
    ]
    mask = torch.cat([*whole, torch.zeros(100, dtype=torch.bool)])
    assert torch.equal(cells_of_new_rows(mask, torch.tensor(prefixes), 5), torch.stack([cells(tree) for tree in trees]))


def test_requests_that_pad_a_graph_read_nothing_outside_the_mask() -> None:
    (tree,) = random_trees(1, 4)
    mask = torch.cat([torch.ones(4, 3, dtype=torch.bool), cells(tree)], 1).flatten()
    found = cells_of_new_rows(mask, torch.tensor([3, 1, 1]), 4)
    assert found.shape == (3, 4, 4) and torch.equal(found[0], cells(tree))


@pytest.mark.parametrize("given", [None, SimpleNamespace(num_tokens_per_req=3), info(random_trees(1, 3), tree_topk=1)])
def test_a_chain_has_no_tree(given: Any) -> None:
    """A chain also comes with a mask, but kernels for chains are faster."""
    assert draft_trees(given, torch.ones(1)) is None


def expected(q: Tensor, cache: Any, slots: Tensor, tree: Parents, scale: float) -> Tensor:
    keys, values = (part[slots.long()].repeat_interleave(2, dim=1) for part in cache)
    return tree_attention(q, keys, values, scale, tree)[0]


@pytest.mark.parametrize("page_size", [1, 4])
def test_rows_attend_to_their_ancestors_and_the_prefix(page_size: int) -> None:
    torch.manual_seed(0)
    prefixes, trees, layer = [4, 12, 1], random_trees(3, 6), mha_layer()
    table = slots_table([prefix + 6 for prefix in prefixes], page_size)
    ours, caches = attention((layer,), 40, page_size)
    given = batch(table, prefixes, [6] * 3, Mode.TARGET_VERIFY, spec_info=info(trees))
    step = eager_step(given, [PlannedGroup(ours, PageTable(table, page_size))], 64)
    q, k, v = torch.randn(18, 4, 8), torch.randn(18, 2, 8), torch.randn(18, 2, 8)
    out = ours.attend(q, k, v, layer, step.batches[0])
    for number, (prefix, tree) in enumerate(zip(prefixes, trees, strict=True)):
        part = slice(number * 6, number * 6 + 6)
        want = expected(q[part], caches[0], table[1 + number, : prefix + 6], tree, layer.scale)
        torch.testing.assert_close(out[part].double(), want, atol=1e-5, rtol=1e-5)


def test_a_replay_attends_by_the_trees_of_its_own_step() -> None:
    """B2: three requests are captured, and two are replayed twice with other trees. The second time SGLang plans before
    the draft has written its mask, and reports the mask afterwards."""
    torch.manual_seed(0)
    (backend,), pools, cache = triton_backends(1)
    ours = ModelAttention(backend, pools)
    lengths, new = [13, 9, 22], 5
    table = slots_table(lengths, PAGE)
    steps = CapturedGroups([PlannedGroup(ours, PageTable(table, PAGE))], 4, 4 * new, 64)
    static = batch(
        table,
        [1] * 3,
        [new] * 3,
        Mode.TARGET_VERIFY,
        req_pool_indices=torch.zeros(3, dtype=torch.int64),
        out_cache_loc=torch.zeros(3 * new, dtype=torch.int64),
        spec_info=info(random_trees(3, new), custom_mask=None),
    )
    step = steps.capture(static)
    q, k, v = torch.randn(3 * new, 4, 16), torch.randn(3 * new, 2, 16), torch.randn(3 * new, 2, 16)

    def graph() -> Tensor:
        steps.refill(step, static)
        return ours.attend(q, k, v, WIDE, step.batches[0])

    graph()
    prefixes = [length - new for length in lengths]
    static.seq_lens.copy_(torch.tensor([*prefixes[:2], 1]))
    static.seq_lens_cpu.copy_(static.seq_lens)
    static.req_pool_indices.copy_(torch.tensor([1, 2, 0]))
    places = [table[1 + row, prefixes[row] : lengths[row]] for row in range(2)]
    static.out_cache_loc.copy_(torch.cat([*places, torch.zeros(new)]))
    for late in (False, True):
        drafted = info(random_trees(2, new, seed=1 + late))
        trees = random_trees(2, new, seed=1 + late)
        static.spec_info = info(random_trees(2, new, seed=9)) if late else drafted
        assert steps.replay(static) is step
        if late:
            assert step.prefix_lens is not None
            fill_trees(step, drafted, step.prefix_lens)
        out = graph()
        for number, tree in enumerate(trees):
            part = slice(number * new, number * new + new)
            want = expected(q[part], cache[0], table[1 + number, : lengths[number]], tree, WIDE.scale)
            torch.testing.assert_close(out[part].double(), want, atol=1e-5, rtol=1e-5)
