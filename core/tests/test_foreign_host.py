"""A host that is not our engine: its own memory, page table, lengths and slots, no scheduler and no model of ours.

The cache is laid out as vLLM and SGLang lay theirs out, full of NaN where no request has a row. The reference is
float64 over the rows that this file wrote itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import (
    AttentionKind,
    DType,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    Geometry,
    LayerSpec,
    MHAPool,
    MLAPool,
    ModelSpec,
    PlanError,
    PoolError,
    Problem,
)
from attnplug.host import (
    BackendRequest,
    HostContext,
    KVPools,
    Limits,
    MLADims,
    MLAWeights,
    ModelAttention,
    SelectionError,
    WorkspaceOwner,
    build_selection,
    load_registry,
    select,
)
from attnplug_conformance.reference import Rules
from attnplug_conformance.reference import attention as float64
from attnplug_testing.errors import raises_naming

PAGE, PAGES, HEADS, KV_HEADS, DIM = 4, 24, 6, 2, 8
NAN = float("nan")
GQA = LayerSpec(5, AttentionKind.MHA, HEADS, KV_HEADS, DIM, DIM, DIM**-0.5)
MLA = LayerSpec(5, AttentionKind.MLA, HEADS, HEADS, 12, 8, 12**-0.5, mla=MLADims(16, 8, 4))

# (rows before, new tokens) of each request. The last of a decode is padded: it has a query row, and length 0.
EXTEND = ((9, 3), (0, 5), (4, 1), (7, 0))
DECODE = ((9, 1), (3, 1), (16, 1), (-1, 1))


@dataclass(frozen=True)
class Cache:
    """A host's cache layout: its tensors, their dimensions' names, and a function that returns row (page, offset)."""

    layout: str
    shape: tuple[int, ...]
    pair: bool = False

    def tensors(self) -> Any:
        make = lambda: torch.full(self.shape, NAN)  # noqa: E731
        return (make(), make()) if self.pair else make()


VLLM_AND_SGLANG = {
    "vllm [2, blocks], NHD": Cache("kv pages tokens heads dim", (2, PAGES, PAGE, KV_HEADS, DIM)),
    "vllm [blocks, 2], NHD": Cache("pages kv tokens heads dim", (PAGES, 2, PAGE, KV_HEADS, DIM)),
    "vllm [2, blocks], HND": Cache("kv pages heads tokens dim", (2, PAGES, KV_HEADS, PAGE, DIM)),
    "vllm halves of a row": Cache("pages heads tokens (kv dim)", (PAGES, KV_HEADS, PAGE, 2 * DIM)),
    "sglang slots": Cache("slots heads dim", (PAGES * PAGE, KV_HEADS, DIM), pair=True),
}


def host_rows(tensors: Any, cache: Cache, page: int, offset: int) -> tuple[Tensor, Tensor]:
    """Return a token's keys and values, ``[heads, dim]`` each, by the host's own arithmetic."""
    if cache.pair:
        return tensors[0][page * PAGE + offset], tensors[1][page * PAGE + offset]
    if cache.layout.startswith("kv"):
        keys, values = tensors[0], tensors[1]
    elif "(kv dim)" in cache.layout:
        keys, values = tensors[..., :DIM], tensors[..., DIM:]
    else:
        keys, values = tensors[:, 0], tensors[:, 1]
    at = (page, slice(None), offset) if "heads tokens" in cache.layout else (page, offset)
    return keys[at], values[at]


class Host:
    """Requests with scattered blocks. It knows lengths on the device and bounds of them, and owns the slots."""

    def __init__(self, lengths: tuple[tuple[int, int], ...], seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        self.totals = [max(before, 0) + new if before >= 0 else 0 for before, new in lengths]
        free = torch.randperm(PAGES, generator=random).tolist()
        self.blocks = [[free.pop() for _ in range(-(-total // PAGE))] for total in self.totals]
        self.block_table = torch.full((len(lengths), 7), 1 << 30, dtype=torch.int32)
        for request, blocks in enumerate(self.blocks):
            self.block_table[request, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)

    def place(self, request: int, position: int) -> tuple[int, int]:
        return self.blocks[request][position // PAGE], position % PAGE

    def slot_mapping(self) -> Tensor:
        slots = []
        for request, (before, new) in enumerate(self.lengths):
            for position in range(max(before, 0), max(before, 0) + new):
                page, offset = self.place(request, position) if self.totals[request] else (-1, PAGE - 1)
                slots.append(page * PAGE + offset)
        return torch.tensor(slots)

    def geometry(self, *, own_slots: bool, exact: bool) -> Geometry:
        decode = all(new == 1 for _, new in self.lengths)
        new = [count for _, count in self.lengths]
        made = Geometry(
            ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            self.block_table,
            torch.tensor(self.totals, dtype=torch.int32),
            PAGE,
            rows=sum(new),
            max_seq_len=28,
            max_new=max(new),
            new_lens=None if decode else torch.tensor(new, dtype=torch.int32),
            slots=self.slot_mapping() if own_slots else None,
        )
        return made.with_host_lengths() if exact else made


def attention(layer: LayerSpec, pools: KVPools) -> ModelAttention:
    """Attention chosen and built as by a host, before any batch is known."""
    problem = Problem(ModelSpec("hosted", "test", (layer,), 64), "cpu", None, DType.FLOAT32, DType.FLOAT32, PAGE)
    selection = select(load_registry(), BackendRequest("torch_native"), problem)
    context = HostContext(
        model=problem.model,
        device=torch.device("cpu"),
        dtype=torch.float32,
        kv_dtype=DType.FLOAT32,
        page_size=PAGE,
        limits=Limits(8, 64, 64),
        pools=pools,
        workspace=WorkspaceOwner(),
    )
    return ModelAttention(build_selection(selection, context), pools)


@pytest.mark.parametrize("lengths", [EXTEND, DECODE[:3]], ids=["extend", "decode"])
@pytest.mark.parametrize("own_slots", [True, False])
@pytest.mark.parametrize("name", VLLM_AND_SGLANG)
@pytest.mark.sample(9)
def test_gqa_over_a_hosts_cache(name, own_slots, lengths):
    host, cache = Host(lengths), VLLM_AND_SGLANG[name]
    tensors = cache.tensors()
    pool = MHAPool.over([GQA], {5: tensors}, cache.layout, page_size=PAGE, dtype=DType.FLOAT32)
    random = torch.Generator().manual_seed(1)
    keys, values = ([torch.randn(total, KV_HEADS, DIM, generator=random) for total in host.totals] for _ in "kv")
    for request, (before, _) in enumerate(lengths):
        for position in range(before):
            k, v = host_rows(tensors, cache, *host.place(request, position))
            k.copy_(keys[request][position])
            v.copy_(values[request][position])
    q = torch.randn(sum(new for _, new in lengths), HEADS, DIM, generator=random)
    k, v = (
        torch.cat([rows[before:] for rows, (before, _) in zip(each, lengths, strict=True)]) for each in (keys, values)
    )
    batch = ForwardBatch(host.geometry(own_slots=own_slots, exact=True))  # torch_native claims needs_cpu_seq_lens
    run = attention(GQA, KVPools(mha=pool))
    run.plan(batch)
    out = torch.full((len(q), HEADS, DIM), NAN)  # the host's own output memory
    found = run.attend(q, k, v, GQA, batch, extras=ForwardExtras(out=out))
    wanted = torch.cat(
        [
            float64(queries, keys[request], values[request], Rules(GQA.scale))[0]
            for request, (queries, (before, _)) in enumerate(
                zip(q.split([new for _, new in lengths]), lengths, strict=True)
            )
        ]
    )
    assert found is out
    torch.testing.assert_close(out.double(), wanted, rtol=2e-6, atol=2e-6)
    for request, total in enumerate(host.totals):
        for position in range(total):
            stored = host_rows(tensors, cache, *host.place(request, position))
            assert torch.equal(stored[0], keys[request][position])
            assert torch.equal(stored[1], values[request][position])
    flat = tensors if isinstance(tensors, tuple) else (tensors,)
    written = sum(int((~tensor.isnan()).sum()) for tensor in flat)
    assert written == 2 * sum(host.totals) * KV_HEADS * DIM, "nothing else was written"


@pytest.mark.parametrize("lengths", [EXTEND, DECODE[:3]], ids=["extend", "decode"])
@pytest.mark.parametrize(
    ("layout", "shape"),
    [("pages tokens dim", (PAGES, PAGE, 20)), ("slots heads dim", (PAGES * PAGE, 1, 20))],
    ids=["vllm", "sglang"],
)
def test_mla_over_a_hosts_cache(layout, shape, lengths):
    host, cache = Host(lengths), torch.full(shape, NAN)
    pool = MLAPool.over([MLA], {5: cache}, layout, page_size=PAGE, dtype=DType.FLOAT32)
    random = torch.Generator().manual_seed(2)
    rows = [torch.randn(total, 20, generator=random) for total in host.totals]
    by_slot = cache.view(PAGES * PAGE, 20)
    for request, (before, _) in enumerate(lengths):
        for position in range(before):
            page, offset = host.place(request, position)
            by_slot[page * PAGE + offset] = rows[request][position]
    q = torch.randn(sum(new for _, new in lengths), HEADS, 12, generator=random)
    weights = MLAWeights(torch.randn(HEADS, 8, 16, generator=random), torch.randn(HEADS, 16, 8, generator=random))
    batch = ForwardBatch(host.geometry(own_slots=True, exact=True))
    run = attention(MLA, KVPools(mla=pool))
    run.plan(batch)
    new = torch.cat([each[before:] for each, (before, _) in zip(rows, lengths, strict=True)])
    found = run.attend_mla(q, new, MLA, weights, batch)
    wanted = []
    for request, queries in enumerate(q.split([n for _, n in lengths])):
        latent, rope = rows[request].double().split([16, 4], -1)
        keys = torch.einsum("rl,hnl->rhn", latent, weights.w_kc.double())
        keys = torch.cat([keys, rope[:, None].expand(-1, HEADS, -1)], -1)
        values = torch.einsum("rl,hlv->rhv", latent, weights.w_vc.double())
        wanted.append(float64(queries, keys, values, Rules(MLA.scale))[0])
    torch.testing.assert_close(found.double(), torch.cat(wanted), rtol=2e-5, atol=2e-5)


def test_a_padded_request_has_length_0_and_is_neither_read_nor_written():
    """vLLM's decode graphs have such requests: a row of q, no row of the cache, a slot of -1."""
    host, cache = Host(DECODE), VLLM_AND_SGLANG["vllm [2, blocks], NHD"]
    tensors = cache.tensors()
    pool = MHAPool.over([GQA], {5: tensors}, cache.layout, page_size=PAGE, dtype=DType.FLOAT32)
    for request, (before, _) in enumerate(DECODE):
        for position in range(before):
            for row in host_rows(tensors, cache, *host.place(request, position)):
                row.fill_(0.5)
    geometry = host.geometry(own_slots=True, exact=False)
    assert geometry.new_slots()[-1] == -1 and replace(geometry, slots=None).new_slots()[-1] == -1
    batch = ForwardBatch(geometry.with_host_lengths())
    run = attention(GQA, KVPools(mha=pool))
    run.plan(batch)
    q, k, v = torch.zeros(4, HEADS, DIM), torch.ones(4, KV_HEADS, DIM), torch.ones(4, KV_HEADS, DIM)
    out = run.attend(q, k, v, GQA, batch)
    assert (out[3] == 0).all() and out[:3].isfinite().all()
    assert int((~tensors.isnan()).sum()) == 2 * sum(host.totals) * KV_HEADS * DIM


@pytest.mark.parametrize("other", [{"page_size": 2 * PAGE}, {"dtype": DType.BFLOAT16}], ids=["pages", "type"])
def test_a_pool_that_is_not_as_the_context_says_is_refused(other):
    """Backends count on one page size and one type of cache; slots of another would lead elsewhere."""
    like = {"page_size": PAGE, "dtype": DType.FLOAT32, **other}
    with raises_naming(PoolError, 4, "float32"):
        attention(GQA, KVPools(mha=MHAPool([GQA], num_pages=PAGES, device="cpu", **like)))


def test_bounds_alone_are_refused_before_anything_is_built():
    """A host without exact lengths is refused at selection. If it builds the backend anyway, planning refuses."""
    problem = Problem(ModelSpec("hosted", "test", (GQA,), 64), "cpu", exact_lengths=False)
    with pytest.raises(SelectionError) as refused:
        select(load_registry(), BackendRequest("torch_native"), problem)
    reasons = refused.value.selection.unserved[0].candidates[0].refusals
    assert [reason.code for reason in reasons] == ["lengths"]
    pool = MHAPool([GQA], num_pages=PAGES, page_size=PAGE, dtype=DType.FLOAT32, device="cpu")
    with raises_naming(PlanError, "exact"):
        attention(GQA, KVPools(mha=pool)).plan(ForwardBatch(Host(EXTEND).geometry(own_slots=True, exact=False)))
