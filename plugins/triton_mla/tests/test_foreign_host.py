"""The backend driven by another engine: its caches, tables, lengths and slots, with upper bounds only.

Every memory layout and every tensor is made as vLLM or SGLang makes it, and no batch comes from our scheduler. All
memory outside of requests' rows is NaN, and all table entries outside of their pages are out of range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
    MLAPool,
    ModelSpec,
    PoolError,
)
from attnplug.host import HostContext, KVPools, Limits, MLADims, WorkspaceOwner, plan_forward
from attnplug.kernels import torch_dtype
from attnplug_conformance.arithmetic import relative_error, uninitialized_as_nan
from attnplug_conformance.reference import Rules, attention
from attnplug_testing.batches import capabilities
from attnplug_testing.devices import DEVICES
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import DEEPSEEK
from attnplug_testing.references.triton_mla import NARROW, build

DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND
HEADS, LAYERS, LAYER = 4, 3, 1
"""The layer under test, among others whose caches must not be read."""
NOWHERE = 1 << 30
NAN = float("nan")
BATCHES = {
    DECODE: ((90, 1), (0, 1), (64, 1), (33, 1)),
    VERIFY: ((90, 3), (0, 3), (61, 3)),
    EXTEND: ((50, 9), (0, 20), (33, 1), (64, 2)),
}
"""(Rows in the cache before, new tokens) of each request."""


@dataclass
class Step:
    """One step of a host, with padding: a request more in uniform batches, rows more in ragged ones."""

    mode: ForwardMode
    page_size: int
    dims: MLADims
    dtype: DType
    device: str

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(5)
        self.lengths = BATCHES[self.mode]
        self.uniform = self.mode is not EXTEND
        self.new = [new for _, new in self.lengths]
        self.totals = [before + new for before, new in self.lengths]
        self.tokens = sum(self.new)
        self.padding = self.new[0] if self.uniform else 3
        self.width = -(-max(self.totals) // self.page_size) + 2
        self.pages = len(self.lengths) * self.width + 2
        order = 1 + torch.randperm(self.pages - 1, generator=self.random)  # both hosts leave the first page alone
        self.table = order[: len(self.lengths) * self.width].view(len(self.lengths), self.width)
        self.kv = [self.normal(total, self.dims.row_dim) for total in self.totals]
        self.q = self.padded(self.normal(self.tokens, HEADS, self.dims.row_dim))
        starts = [before for before, _ in self.lengths]
        self.k = self.padded(torch.cat([rows[start:] for rows, start in zip(self.kv, starts, strict=True)])).unsqueeze(
            1
        )

    def normal(self, *shape: int) -> Tensor:
        return (torch.randn(*shape, generator=self.random) * 0.5).to(torch_dtype(self.dtype))

    def padded(self, rows: Tensor) -> Tensor:
        return torch.cat([rows, rows.new_full((self.padding, *rows.shape[1:]), NAN)]).to(self.device)

    def slots(self, request: int, start: int, stop: int) -> list[int]:
        size = self.page_size
        return [int(self.table[request, at // size]) * size + at % size for at in range(start, stop)]

    def new_slots(self, padding: int) -> Tensor:
        """Slots of new rows in int64, as in both hosts. ``padding`` is the host's slot for rows that are not stored."""
        spans = enumerate(self.lengths)
        found = [slot for request, (before, new) in spans for slot in self.slots(request, before, before + new)]
        return torch.tensor(found + [padding] * self.padding, device=self.device)

    def numbers(self, values: list[int]) -> Tensor:
        """int32 on the device, with 0 for the padded request of a uniform batch."""
        return torch.tensor(values + [0] * self.uniform, dtype=torch.int32, device=self.device)

    def geometry(self, page_table: Tensor, seq_lens: Tensor, slots: Tensor) -> Geometry:
        """Geometry with upper bounds only."""
        return Geometry(
            self.mode,
            page_table,
            seq_lens,
            self.page_size,
            rows=self.tokens + self.padding,
            max_seq_len=page_table.shape[1] * self.page_size,
            max_new=self.new[0] if self.uniform else 64,
            new_lens=None if self.uniform else self.numbers(self.new),
            slots=slots,
        )

    def fill(self, rows_at: Callable[[int], Tensor]) -> None:
        """The prefixes, row by row, into a cache of the host's; ``rows_at`` gives the place of a slot."""
        for request, (before, _) in enumerate(self.lengths):
            for position, slot in enumerate(self.slots(request, 0, before)):
                rows_at(slot).copy_(self.kv[request][position])


Made = tuple[list[Tensor], str, Geometry]


def vllm(step: Step, *, across_layers: bool = False, rows_apart: int = 0) -> Made:
    """``[blocks, block_size, width]`` a layer, also as a part of one tensor for all layers, or with rows apart;
    a block table that is a part of a larger one; ``slot_mapping`` with -1 for padding."""
    width, kept = step.dims.row_dim, {"dtype": step.q.dtype, "device": step.device}
    shape = (step.pages, step.page_size, width + rows_apart)
    if across_layers:
        caches = list(torch.full((shape[0], LAYERS, *shape[1:]), NAN, **kept).unbind(1))
    else:
        caches = [torch.full(shape, NAN, **kept)[..., :width] for _ in range(LAYERS)]
    step.fill(lambda slot: caches[LAYER][slot // step.page_size, slot % step.page_size])
    persistent = torch.full((16, step.width + 7), NOWHERE, dtype=torch.int32)
    for request, total in enumerate(step.totals):
        used = -(-total // step.page_size)
        persistent[request, :used] = step.table[request, :used]
    seq_lens = step.numbers(step.totals)
    block_table = persistent.to(step.device)[: len(seq_lens), : step.width]
    return caches, "pages tokens dim", step.geometry(block_table, seq_lens, step.new_slots(-1))


def sglang(step: Step) -> Made:
    """``[slots, 1, width]`` per layer, and a page table made of ``req_to_token``, which holds every token's slot.

    Padding writes to slot 0, which belongs to no request.
    """
    shape = (step.pages * step.page_size, 1, step.dims.row_dim)
    caches = [torch.full(shape, NAN, dtype=step.q.dtype, device=step.device) for _ in range(LAYERS)]
    step.fill(lambda slot: caches[LAYER][slot, 0])
    most = step.width * step.page_size
    req_to_token = torch.full((16, most), (1 << 31) - 1, dtype=torch.int32)
    pool_indices = [7, 2, 11, 5, 0][: len(step.totals) + step.uniform]
    for request, total in enumerate(step.totals):
        req_to_token[pool_indices[request], :total] = torch.tensor(step.slots(request, 0, total), dtype=torch.int32)
    rows = req_to_token.to(step.device)[torch.tensor(pool_indices, device=step.device)]
    page_table = rows[:, :: step.page_size] // step.page_size
    return caches, "slots heads dim", step.geometry(page_table, step.numbers(step.totals), step.new_slots(0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("host", "page_size", "mode"),
    [
        (vllm, 16, DECODE),
        (partial(vllm, across_layers=True), 64, EXTEND),
        (partial(vllm, rows_apart=1), 16, VERIFY),
        (sglang, 1, DECODE),
        (sglang, 16, EXTEND),
    ],
    ids=["vllm", "vllm across layers", "vllm with rows apart", "sglang", "sglang with pages"],
)
@pytest.mark.sample(3)
def test_another_engines_tensors_give_float64s_result(host, page_size, mode, device):
    dims, dtype = (NARROW, DType.FLOAT32) if device == "cpu" else (DEEPSEEK, DType.BFLOAT16)
    step = Step(mode, page_size, dims, dtype, device)
    caches, layout, geometry = host(step)
    width = dims.qk_nope_head_dim + dims.qk_rope_head_dim
    layers = [
        LayerSpec(number, AttentionKind.MLA, HEADS, HEADS, width, 16, width**-0.5, mla=dims) for number in range(LAYERS)
    ]
    pool = MLAPool.over(layers, dict(enumerate(caches)), layout, page_size=page_size, dtype=dtype)
    context = HostContext(
        model=ModelSpec("foreign", "foreign", tuple(layers), 4096),
        device=torch.device(device),
        dtype=torch_dtype(dtype),
        kv_dtype=dtype,
        page_size=page_size,
        limits=Limits(16, 256, 4096),
        pools=KVPools(mla=pool),
        workspace=WorkspaceOwner(),
    )
    backend = build(context.for_backend("triton_mla", capabilities("triton_mla")))
    assert not backend.claims.needs_cpu_seq_lens and geometry.host is None
    batch, lse = ForwardBatch(geometry), torch.full(step.q.shape[:2], NAN, device=device)
    out = torch.full((*step.q.shape[:2], dims.kv_lora_rank), NAN, dtype=step.q.dtype, device=device)
    forward = backend.forward_decode if mode.is_decode else backend.forward_extend
    with uninitialized_as_nan(torch.device(device)):
        plan_forward(backend, batch)
        forward(step.q, step.k, None, layers[LAYER], batch, extras=ForwardExtras(lse=lse, out=out))

    tolerance, tokens, at = 1e-5 if dtype is DType.FLOAT32 else 1.5e-2, step.tokens, 0
    for request, new in enumerate(step.new):
        keys = step.kv[request].to(device)[:, None]
        q, mine = step.q[at : at + new], slice(at, at + new)
        wanted, wanted_lse = attention(q, keys, keys[..., : dims.kv_lora_rank], Rules(layers[LAYER].scale))
        assert relative_error(out[mine], wanted) <= tolerance
        assert relative_error(lse[mine], wanted_lse) <= tolerance
        at += new
    assert (out[tokens:] == 0).all() and (lse[tokens:] == float("-inf")).all()
    rows = caches[LAYER].reshape(-1, dims.row_dim)
    for request, total in enumerate(step.totals):
        assert torch.equal(rows[step.slots(request, 0, total)].cpu(), step.kv[request])
    assert int((~rows.isnan()).any(-1).sum()) == sum(step.totals)
    assert all(caches[number].isnan().all() for number in range(LAYERS) if number != LAYER)


@pytest.mark.parametrize(
    ("dtype", "rows", "copied"),
    [
        (DType.FLOAT16, lambda cells: cells[:, :48], True),
        (DType.FLOAT16, lambda cells: cells[:, :50][:, 1:49], False),
        (DType.FLOAT16, lambda cells: cells.view(-1)[: 32 * 50].view(32, 50)[:, :48], False),
        (DType.FLOAT16, lambda cells: cells.T[:32, :48], None),
        (DType.FLOAT8_E4M3, lambda cells: cells.view(-1)[: 32 * 50].view(32, 50)[:, :48], False),
        (DType.FLOAT8_E4M3, lambda cells: cells.view(-1)[: 32 * 49].view(32, 49)[:, :48], None),
    ],
    ids=["apart", "not at 16 bytes", "not 16 bytes apart", "by columns", "fp8 pairs", "fp8 at odd addresses"],
)
def test_which_kernels_can_read_a_hosts_rows(dtype, rows, copied):
    """Gluon kernels copy 16 bytes at once, fp8 is read in pairs, and columns must be contiguous."""
    from attnplug_triton_mla.attention import LatentLayerCache

    layer = LayerSpec(0, AttentionKind.MLA, HEADS, HEADS, 32, 16, 1.0, mla=NARROW)
    cache = rows(torch.zeros(64, 64, dtype=torch_dtype(dtype))).unsqueeze(1)
    pool = MLAPool.over([layer], {0: cache}, "slots heads dim", page_size=16, dtype=dtype)
    if copied is None:
        with raises_naming(PoolError, "layer 0"):
            LatentLayerCache.of(pool, 0, 32, 16)
    else:
        assert LatentLayerCache.of(pool, 0, 32, 16).copied is copied
