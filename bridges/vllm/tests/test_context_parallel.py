"""Decode context parallelism over two ranks: threads that exchange tensors like vLLM's process group."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import ForwardMode, Geometry, RefusalCode, Role
from attnplug.declare.kv_format import as_format
from attnplug.host import BackendRequest, Registry, load_registry, select
from attnplug_testing.errors import naming
from attnplug_vllm import selection
from attnplug_vllm.context_parallel import CapturedShardedStep, LocalQueries, Shard, ShardedMHAStep
from attnplug_vllm.geometry import GeometryBuilder
from attnplug_vllm.kv_group import GroupAttention, mha_pools
from attnplug_vllm.mha_step import LayerCall
from attnplug_vllm.planner import GroupPlanner, PlannedBatch
from attnplug_vllm.selection import Refused, choose
from attnplug_vllm.specs import Machine, limits_of, mha_layer, model_of, problem_of
from vllm_stage import config, layer, metadata

RANKS, HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 2, 4, 1, 16, 16, 24
SCALE = 0.25


class Ranks:
    """Process group of threads. Collectives concatenate along a dimension, or sum and divide one."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self._barrier, self._given = ranks, Barrier(ranks, timeout=20), [torch.empty(0)] * ranks

    def _exchange(self, rank: int, given: Tensor) -> list[Tensor]:
        self._given[rank] = given.clone()
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def of(self, rank: int) -> Any:
        def reduce_scatter(given: Tensor, dim: int) -> Tensor:
            return torch.stack(self._exchange(rank, given)).sum(0).chunk(self.ranks, dim)[rank]

        return SimpleNamespace(
            all_gather=lambda given, dim: torch.cat(self._exchange(rank, given), dim), reduce_scatter=reduce_scatter
        )


def shard(rank: int, group: Any = None) -> Shard:
    return Shard(RANKS, rank, lambda: group)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("lengths", [([1], [1]), ([7], [7]), ([5, 1, 3], [9, 4, 3]), ([1, 1], [1, 2])])
def test_each_query_sees_its_rows_of_every_rank_once(ranks, lengths):
    """Counts rows: a query at position p sees rows 0 to p of its request, and row n is on rank n % ranks."""
    query_lens, kv_lens = lengths
    positions = [total - new + n for new, total in zip(query_lens, kv_lens, strict=True) for n in range(new)]
    for rank in range(ranks):
        found = LocalQueries.of(query_lens, kv_lens, Shard(ranks, rank, lambda: None))
        seen, rows = dict.fromkeys(range(len(positions)), 0), iter(found.order)
        for new, total in zip(found.query_lens, found.kv_lens, strict=True):
            for n in range(new):
                seen[next(rows)] = total - new + n + 1
        assert list(seen.values()) == [len(range(rank, position + 1, ranks)) for position in positions]


def planner(rank: int, cache: Tensor) -> GroupPlanner:
    settings = config(parallel_config__decode_context_parallel_size=RANKS)
    spec = mha_layer(0, heads=HEADS * RANKS, kv_heads=KV_HEADS, head_dim=DIM, scale=SCALE)
    model = model_of(settings, [spec])
    problem = problem_of(settings, model, Machine("cpu"), "auto")
    chosen = select(load_registry(), BackendRequest("torch_native"), problem)
    group = GroupAttention(
        settings,
        torch.device("cpu"),
        model,
        {0: layer(cache)},
        chosen,
        as_format("float32"),
        BLOCK,
        mha_pools,
        lambda one: (one._k_scale_float, one._v_scale_float),
    )
    return GroupPlanner(group, 16, 16)


def local_slots(lengths: list[tuple[int, int]], table: Tensor, rank: int) -> Tensor:
    """vLLM's slot mapping of the new rows on one rank: -1 for rows of the other."""
    slots = []
    for request, (past, new) in enumerate(lengths):
        for position in range(past, past + new):
            index = position // RANKS
            slot = int(table[request, index // BLOCK]) * BLOCK + index % BLOCK
            slots.append(slot if position % RANKS == rank else -1)
    return torch.tensor(slots)


def run(lengths: list[tuple[int, int]], *, captured: bool = False) -> tuple[Tensor, Tensor]:
    """Two ranks over random rows. Returns the results of all heads, and the expected ones in float64."""
    torch.manual_seed(0)
    whole = metadata(lengths, block_size=BLOCK)
    past = [torch.randn(before, 2, DIM) for before, _ in lengths]
    tokens = sum(new for _, new in lengths)
    q, k, v = torch.randn(tokens, HEADS * RANKS, DIM), torch.randn(tokens, 1, DIM), torch.randn(tokens, 1, DIM)
    group = Ranks(RANKS)

    def rank_result(rank: int) -> Tensor:
        cache = torch.full((BLOCKS, KV_HEADS, BLOCK, 2 * DIM), 9.0 if captured else float("nan"))
        for request, rows in enumerate(past):
            for index, row in enumerate(rows[rank::RANKS]):
                block = int(whole.block_table_tensor[request, index // BLOCK])
                cache[block, 0, index % BLOCK] = row.flatten()
        own = shard(rank, group.of(rank))
        local = torch.tensor([own.visible(before + new) for before, new in lengths], dtype=torch.int32)
        given = whole.replace(slot_mapping=local_slots(lengths, whole.block_table_tensor, rank))
        plans, geometries = planner(rank, cache), GeometryBuilder(BLOCK, 16)
        out = torch.full((tokens, HEADS, DIM), 7.0)
        spec = plans.group.model.layers[0]
        call = LayerCall(spec, q[:, rank * HEADS : (rank + 1) * HEADS], k, v, out, True)
        step: Any = ShardedMHAStep(plans, geometries, given, own)
        if captured:
            table, new = given.block_table_tensor, [1] * len(lengths)
            rows = [max(length, 1) for length in local.tolist()]  # a plan for the CPU has no padded requests
            geometry = Geometry.of_lengths(ForwardMode.DECODE, table, new, rows, BLOCK)
            step = CapturedShardedStep(plans, plans.plan(geometry), local, given.slot_mapping, own)
        step.attend(call)
        return out

    with ThreadPoolExecutor(RANKS) as pool:
        results = torch.cat(list(pool.map(rank_result, range(RANKS))), 1)
    expected, row = [], 0
    for rows, (before, new) in zip(past, lengths, strict=True):
        keys = torch.cat((rows[:, 0], k[row : row + new, 0])).double()
        values = torch.cat((rows[:, 1], v[row : row + new, 0])).double()
        for n in range(new):
            end = before + n + 1
            weights = torch.softmax(q[row + n].double() @ keys[:end].T * SCALE, -1)
            expected.append(weights @ values[:end])
        row += new
    return results.double(), torch.stack(expected)


@pytest.mark.parametrize(
    "lengths",
    [[(20, 1), (0, 1), (33, 1)], [(0, 7)], [(0, 1)], [(5, 4), (20, 1), (0, 18)]],
    ids=["decode", "prompt", "one row", "mixed"],
)
@pytest.mark.sample(2)
def test_two_ranks_attend_to_all_rows(lengths):
    found, expected = run(lengths)
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_captured_decode_ignores_ranks_without_rows(monkeypatch):
    """The second rank has no row of a request of length 1."""
    monkeypatch.setattr(PlannedBatch, "refill", lambda self: None)
    found, expected = run([(20, 1), (0, 1), (33, 1)], captured=True)
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_rank_plans_up_to_one_request_per_rank():
    assert limits_of(config(parallel_config__decode_context_parallel_size=2)).max_requests == 16


def with_and_without_lse() -> Registry:
    native = load_registry().get("torch_native")
    claims = replace(native.spec.capabilities, extras=frozenset())
    preferred = replace(native.spec, name="without", capabilities=claims, preference=10**6)
    named = replace(native.spec, name="with")
    return Registry({"with": replace(native, spec=named), "without": replace(native, spec=preferred)})


def test_backends_that_return_no_lse_are_left_out_or_refused_by_name(monkeypatch):
    monkeypatch.setattr(selection, "version_refusals", list)
    monkeypatch.setattr(selection, "registry", with_and_without_lse)
    spec = mha_layer(0, heads=8, kv_heads=1, head_dim=DIM, scale=SCALE)

    def chosen(backend: str, ranks: int) -> str:
        asked = config({"attnplug": {"backend": backend}}, parallel_config__decode_context_parallel_size=ranks)
        selection.forget()
        return choose(asked, model_of(asked, [spec]), "auto", Machine("cpu")).choices[Role.DECODE].chosen_name

    assert (chosen("auto", 1), chosen("auto", 2)) == ("without", "with")
    with pytest.raises(Refused, check=naming("without", "--decode-context-parallel-size")) as raised:
        chosen("without", 2)
    assert [(reason.code, reason.value) for reason in raised.value.refusals] == [(RefusalCode.FEATURE, "without")]
    selection.forget()
