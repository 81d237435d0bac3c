"""flashinfer_mla's kernels in plain torch, as strict as FlashInfer's. They test planning, not a kernel."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attnplug import BackendContext, DType, MLAShape, RaggedCall
from attnplug.host import MLADims
from attnplug_flashinfer_mla.backend import FlashInferMLABackend
from attnplug_flashinfer_mla.kernels import LatentCache, MLAGraphBuffers
from attnplug_flashinfer_mla.planner import MLAPagedCall
from attnplug_flashinfer_mla.work_list import MAX_WORK_ITEMS, MLAWorkList
from attnplug_testing.batches import declaring
from attnplug_testing.kernel_scene import KernelCase

NARROW = MLADims(kv_lora_rank=64, qk_nope_head_dim=128, qk_rope_head_dim=64)


def on_cpu(case: KernelCase) -> KernelCase:
    """Return the case with narrower rows, in float32, so that no error hides behind rounding."""
    narrow = replace(case, mla=NARROW)
    return replace(narrow, dtype=DType.FLOAT32) if case.dtype is DType.BFLOAT16 else narrow


@dataclass
class ReferenceKernels:
    """Factory of one lane's reference kernels; ``made`` records their names."""

    shape: MLAShape
    made: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, context: BackendContext) -> list[ReferenceKernels]:
        """Return one factory per lane."""
        return [cls(MLAShape.of(context)) for _ in range(context.limits.lanes)]

    def paged(self, *, decode: bool, graph: MLAGraphBuffers | None = None) -> ReferencePaged:
        self.made.append(("graph " if graph else "") + ("decode" if decode else "paged"))
        return ReferencePaged(self.shape, graph)

    def ragged(self) -> ReferenceRagged:
        self.made.append("ragged")
        return ReferenceRagged(self.shape)


def build(context: BackendContext) -> FlashInferMLABackend:
    """Build the backend with real kernels on a GPU, else with reference kernels."""
    own = declaring(context, "flashinfer_mla")
    return FlashInferMLABackend(own, kernels=ReferenceKernels.of(own) if own.device.type == "cpu" else None)


class ReferencePaged:
    """A call over pages. A captured call executes its schedule, work item by work item and merge by merge."""

    ready = True

    def __init__(self, shape: MLAShape, graph: MLAGraphBuffers | None) -> None:
        self.shape, self.graph = shape, graph

    def plan(self, call: MLAPagedCall) -> None:
        lengths, page_size = call.lengths, self.shape.page_size
        for part in (lengths.qo_indptr, lengths.kv_indptr, lengths.kv_lens):
            assert part.device.type == "cpu" and part.dtype is torch.int32 and part.is_contiguous()
        assert lengths.qo_indptr[0] == lengths.kv_indptr[0] == 0
        assert len(lengths.qo_indptr) == len(lengths.kv_indptr) == len(lengths.kv_lens) + 1
        pages = (lengths.kv_lens + page_size - 1) // page_size
        assert torch.equal(lengths.kv_indptr.diff(), pages), "pages of a request are as many as its rows need"
        assert call.kv_indices.dtype is torch.int32 and call.kv_indices.numel() == int(lengths.kv_indptr[-1])
        new = lengths.qo_indptr.diff()
        tiles = (new * call.heads + 63) // 64
        assert int(tiles.sum()) + 132 <= MAX_WORK_ITEMS, "the scheduler's arrays overflow"
        if call.causal:
            # The library's own rule for the rows of a tile; see padded_heads for what goes wrong otherwise.
            tile = 128 if int(new.sum()) * call.heads // len(new) > 64 else 64
            assert tile % call.heads == 0, "a tile ends between the heads of a token"
        else:
            assert int(new.max()) <= 1
        self.call, self.lengths = call, lengths
        if self.graph is not None:
            self._schedule = library_schedule(call)

    def work_list(self) -> MLAWorkList:
        return self._schedule

    def run(self, q: Tensor, q_rope: Tensor | None, cache: LatentCache, out: Tensor, lse: Tensor | None) -> None:
        lengths, shape = self.lengths, self.shape
        if q_rope is not None:
            assert (q.shape[2], q_rope.shape[2]) == (shape.dims.kv_lora_rank, shape.dims.qk_rope_head_dim)
            q = torch.cat((q, q_rope), -1)
        assert q.shape == (int(lengths.qo_indptr[-1]), self.call.heads, shape.dims.row_dim)
        assert q.dtype is shape.dtype and cache.rows.dtype is shape.kv_dtype
        assert bool(cache.scales) == (shape.kv_dtype is torch.float8_e4m3fn)
        assert out.shape == (*q.shape[:2], shape.dims.kv_lora_rank) and out.dtype is q.dtype and out.is_contiguous()
        if self.graph is not None:
            self._run_schedule(q, cache, out, q.new_empty(q.shape[:2]) if lse is None else lse)
            return
        for request, kv_len in enumerate(lengths.kv_lens.tolist()):
            rows = slice(*lengths.qo_indptr[request : request + 2].tolist())
            keys = self._keys(cache, self.call.kv_indices, int(lengths.kv_indptr[request]), kv_len)
            attend(q[rows], keys[:, None], keys[:, None, : shape.dims.kv_lora_rank], shape.scale, self.call.causal,
                   out[rows], None if lse is None else lse[rows])  # fmt: skip

    def _keys(self, cache: LatentCache, kv_indices: Tensor, first: int, kv_len: int) -> Tensor:
        pages = kv_indices[first : first + -(-kv_len // self.shape.page_size)].long()
        memory = cache.rows if cache.rows.dtype is not torch.float8_e4m3fn else cache.rows.view(torch.uint8)
        return memory[pages].flatten(0, 1)[:kv_len].view(cache.rows.dtype).double() * cache.scales.get("ckv_scale", 1.0)

    def _run_schedule(self, q: Tensor, cache: LatentCache, out: Tensor, lse: Tensor) -> None:
        assert self.graph is not None
        todo, heads, rank = self._schedule, self.call.heads, self.shape.dims.kv_lora_rank
        rows = 2 * todo.clusters * todo.tile_rows  # what the library makes room for
        part, part_lse = torch.full((rows, rank), float("nan")).double(), torch.full((rows,), float("nan")).double()
        final, final_lse = out.view(-1, rank), lse.view(-1)
        for at in range(int(todo.work_indptr[0]), int(todo.work_indptr[-1])):
            first, q_len, kv_len = (int(array[at]) for array in (todo.q_indptr, todo.q_len, todo.kv_len))
            start, end = int(todo.kv_start[at]), int(todo.kv_end[at])
            assert start % 64 == 0, "keys are loaded in steps of 64"
            row = torch.arange(int(todo.q_start[at]), min(int(todo.q_start[at]) + todo.tile_rows, q_len * heads))
            keys = self._keys(cache, self.graph.kv_indices, int(todo.kv_indptr[at]), kv_len)[start:end]
            logits = q[first : first + q_len].reshape(q_len * heads, -1)[row].double() @ keys.T * self.shape.scale
            if self.call.causal:
                later = torch.arange(start, end) > (kv_len - q_len + row // heads)[:, None]
                logits = logits.masked_fill(later, float("-inf"))
            sums = logits.logsumexp(-1)
            weights = torch.where(sums[:, None] > float("-inf"), torch.exp(logits - sums[:, None]), 0.0)
            if (target := int(todo.partial_indptr[at])) < 0:
                final[first * heads + row] = (weights @ keys[:, :rank]).to(out.dtype)
                final_lse[first * heads + row] = sums.to(lse.dtype)
            else:
                place = slice(target, target + len(row))
                assert part_lse[place].isnan().all(), "two items write the same part"
                part[place], part_lse[place] = weights @ keys[:, :rank], sums
        for entry in range(len(todo.merge_start)):
            for number, row_ in enumerate(range(int(todo.merge_start[entry]), int(todo.merge_end[entry]))):
                begin = int(todo.merge_partial_start[entry]) + number
                where = range(begin, int(todo.merge_partial_end[entry]), int(todo.merge_stride[entry]))
                weights = torch.softmax(part_lse[where], 0)
                final[row_] = (weights[:, None] * part[where]).sum(0).to(out.dtype)
                final_lse[row_] = part_lse[where].logsumexp(0)


def library_schedule(call: MLAPagedCall) -> MLAWorkList:
    """A valid schedule of a captured call as the library might make it, in memory laid out as the library does it."""
    new, heads = int(call.lengths.qo_indptr[1]), call.heads
    cluster_size, clusters = (2 if new * heads > 64 else 1), 7
    counts = [MAX_WORK_ITEMS] * 3 + [clusters * cluster_size] * 5 + [MAX_WORK_ITEMS] * 5 + [clusters + 1]
    offsets = [sum(4 * -(-count // 4) * 4 for count in counts[:number]) for number in range(len(counts))]
    memory = torch.zeros(offsets[-1] + 4 * counts[-1], dtype=torch.uint8)
    work_list = MLAWorkList.of([cluster_size, clusters, *offsets, 0, 0], memory)
    works = []
    for request, kv_len in enumerate(call.lengths.kv_lens.tolist()):
        tiles = -(-new * heads // work_list.tile_rows)
        for tile in range(tiles):
            seen = min(-(-(tile + 1) * work_list.tile_rows // heads), new) if call.causal else new
            end = max(kv_len - new + seen, 0)
            works.append((request * new, int(call.lengths.kv_indptr[request]), -1, new, kv_len,
                          tile * work_list.tile_rows, 0, end))  # fmt: skip
    arrays = (work_list.q_indptr, work_list.kv_indptr, work_list.partial_indptr, work_list.q_len, work_list.kv_len,
              work_list.q_start, work_list.kv_start, work_list.kv_end)  # fmt: skip
    for array, numbers in zip(arrays, zip(*works, strict=True), strict=True):
        array[: len(works)] = torch.tensor(numbers)
    work_list.work_indptr.copy_(torch.tensor([min(cluster * -(-len(works) // clusters), len(works))
                                             for cluster in range(clusters + 1)]))  # fmt: skip
    return work_list


class ReferenceRagged:
    ready = True

    def __init__(self, shape: MLAShape) -> None:
        self.shape = shape

    def plan(self, call: RaggedCall) -> None:
        assert min(call.query_lens) > 0 and min(call.kv_lens) > 0, "kernels return garbage for empty spans"
        self.call = call

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        call = self.call
        assert q.shape[0] == call.query_rows, f"{q.shape[0]} does not match qo_indptr[-1] ({call.query_rows})"
        assert k.shape[0] == v.shape[0] == call.kv_rows and q.shape[1] == k.shape[1] == self.shape.heads
        assert (k.shape[2], v.shape[2]) == self.shape.ragged_dims
        query = row = 0
        for queries, rows in zip(call.query_lens, call.kv_lens, strict=True):
            queries_slice, keys_slice = slice(query, query + queries), slice(row, row + rows)
            attend(q[queries_slice], k[keys_slice], v[keys_slice], self.shape.scale, call.causal, out[queries_slice],
                   None if lse is None else lse[queries_slice])  # fmt: skip
            query, row = query + queries, row + rows


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, out: Tensor, lse: Tensor | None) -> None:
    """Attention of one request; the last query sees the last key. k and v may have a single head."""
    queries, keys = q.shape[0], k.shape[0]
    logits = torch.einsum("qhd,khd->hqk", q.double(), k.double().expand(-1, q.shape[1], -1)) * scale
    if causal:
        later = torch.arange(keys) > (keys - queries + torch.arange(queries))[:, None]
        logits = logits.masked_fill(later, float("-inf"))
    sums = logits.logsumexp(-1)
    weights = torch.where(sums[..., None] > float("-inf"), torch.exp(logits - sums[..., None]), 0.0)
    out.copy_(torch.einsum("hqk,khd->qhd", weights, v.double().expand(-1, q.shape[1], -1)))
    if lse is not None:
        lse.copy_(sums.T)
