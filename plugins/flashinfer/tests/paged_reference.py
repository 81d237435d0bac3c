"""FlashInfer's wrappers in plain torch, as strict as they are: a result on them tests planning, and no kernel.

They stand where the real ones do, behind the plugin's own adapters, take a call where the real signature does, and
compute in float64. Beside the library's types they take float32, so that nothing hides behind rounding.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnplug import BackendContext, DType
from attnplug.kernels import torch_dtype
from attnplug_flashinfer.backend import FlashInferBackend
from attnplug_flashinfer.kernels import FlashInferKernels, FlashInferLibrary, KernelDTypes
from attnplug_testing.batches import declaring
from attnplug_testing.kernel_scene import KernelCase, KernelScene, check_stored
from attnplug_testing.kernel_scene import check as check_scene
from attnplug_testing.signatures import installed, read_signature

PROCESSORS = 8
FP8_TOLERANCE = {"cpu": 1e-6, "cuda": 2e-2}
"""In float32, and in types of 16 bits."""
LN_2 = math.log(2.0)


def build(context: BackendContext) -> FlashInferBackend:
    """Real kernels with a GPU, otherwise reference kernels."""
    own = declaring(context, "flashinfer")
    return FlashInferBackend(own, kernels=reference(own) if own.device.type == "cpu" else None)


def scene(case: KernelCase, device: str, made: Callable[[BackendContext], FlashInferBackend] = build) -> KernelScene:
    """The case on a device: on a CPU in float32 rather than bfloat16."""
    exact = device == "cpu" and case.dtype is DType.BFLOAT16
    return KernelScene(replace(case, dtype=DType.FLOAT32) if exact else case, device, made)


def check(case: KernelCase, device: str) -> None:
    stage = scene(case, device)
    if case.kv_dtype is None:
        check_scene(stage)
    else:
        check_stored(stage, FP8_TOLERANCE[device])


def reference(context: BackendContext, home: Path | None = None) -> list[FlashInferKernels]:
    """Reference kernels for each lane, checked against the signatures of the FlashInfer in ``home``."""
    kind = KernelDTypes(context.page_size, context.dtype, torch_dtype(context.kv_dtype))
    library = recorded(home or installed("flashinfer"))

    def scratch(nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    prefill = "fa3" if kind.kv_dtype is kind.dtype else "fa2"
    return [FlashInferKernels(library, kind, scratch, PROCESSORS, prefill) for _ in range(context.limits.lanes)]


def recorded(home: Path) -> FlashInferLibrary:
    folder = home / "flashinfer"
    return FlashInferLibrary(lambda *a, **k: Prefill(folder, a, k), lambda *a, **k: Decode(folder, a, k), Event)


class Event:
    """A CUDA event that is always in the past."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


class Wrapper:
    """Base class of both wrappers. Every call is bound to the real signature first."""

    path: str
    plan_method = "plan"

    def __init__(self, folder: Path, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.file = folder / self.path.split(":")[0]
        self.made = self.bind("__init__", args, named)
        assert self.made["kv_layout"] == "NHD" and self.made["backend"] in ("fa2", "fa3")
        self.workspace: Tensor = self.made["float_workspace_buffer"]
        assert self.workspace.data_ptr() % 16 == 0

    def bind(self, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        signature = read_signature(self.file, f"{self.path.split(':')[1]}.{method}")
        assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
        return dict(signature.bind("self", *args, **named).arguments)

    def plan(self, *args: Any, **named: Any) -> None:
        self.planned = given = self.bind(self.plan_method, args, named)
        self.heads, self.kv_heads, self.page_size = (
            given[name] for name in ("num_qo_heads", "num_kv_heads", "page_size")
        )
        self.make_plan(given)

    def make_plan(self, given: dict[str, Any]) -> None:
        raise NotImplementedError

    def check_call(self, *args: Any, **named: Any) -> dict[str, Any]:
        given = self.bind("run", args, named)
        q, (keys, values), out = given["q"], given["paged_kv_cache"], given["out"]
        assert "args" not in given  # further arguments by position go to a kernel of the user's own
        assert q.dtype is self.planned["q_data_type"] and keys.dtype is values.dtype is self.planned["kv_data_type"]
        assert q.stride(2) == keys.stride(3) == values.stride(3) == 1
        assert out.shape == q.shape and out.is_contiguous() and out.dtype is q.dtype
        assert keys.shape[1] == self.page_size and keys.shape[2] == self.kv_heads and q.shape[1] == self.heads
        assert (given["lse"] is not None) == given["return_lse"]
        assert ("k_scale" in given) == ("v_scale" in given) == (keys.dtype is torch.float8_e4m3fn)
        return given

    def part(self, given: dict[str, Any], q: Tensor, pages: Tensor, span: range, own: Tensor, causal: bool) -> Any:
        """Queries ``[n, heads, dim]`` at the positions ``own`` over the keys ``span`` of a request's pages: values
        ``[n, heads, dim]`` and log-sum-exps in base 2."""
        planned, (keys, values) = self.planned, given["paged_kv_cache"]
        key = torch.arange(span.start, span.stop)
        page, place = pages[key // self.page_size].long(), key % self.page_size
        group = self.heads // self.kv_heads
        k, v = (_rows(memory, page, place).repeat_interleave(group, 1) for memory in (keys, values))
        scale = planned["sm_scale"] * given.get("k_scale", 1.0)
        logits = torch.einsum("qhd,khd->qhk", q.double(), k) * scale
        if cap := planned["logits_soft_cap"]:
            logits = cap * torch.tanh(logits / cap)
        hidden = torch.zeros(len(own), len(key), dtype=torch.bool)
        if causal:
            hidden |= key > own[:, None]
        if (left := planned["window_left"]) >= 0:
            hidden |= key < own[:, None] - left
        logits = logits.masked_fill(hidden[:, None], float("-inf"))
        sums = logits.logsumexp(-1) if len(key) else torch.full(logits.shape[:2], float("-inf")).double()
        weights = torch.where(sums[..., None] > float("-inf"), torch.exp(logits - sums[..., None]), 0.0)
        return torch.einsum("qhk,khd->qhd", weights, v), sums / LN_2


def _rows(memory: Tensor, page: Tensor, place: Tensor) -> Tensor:
    if memory.dtype is torch.float8_e4m3fn:  # torch has no index operations for it on the CPU
        return memory.view(torch.uint8)[page, place].view(memory.dtype).double()
    return memory[page, place].double()


def tile_of(rows: int, dim: int) -> int:
    """FA2DetermineCtaTileQ."""
    if rows > 64 and dim < 256:
        return 128
    return 64 if rows > 16 else 16


def lay_out_chunks(pages: list[int], tiles: list[int], most: int, page_size: int) -> int:
    """PrefillBinarySearchKVChunkSize: the pages of a chunk."""
    low, high = max(128 // page_size, 1), max([1, *pages])
    while low < high:
        middle = (low + high) // 2
        if sum(tile * -(-max(count, 1) // middle) for count, tile in zip(pages, tiles, strict=True)) > most:
            low = middle + 1
        else:
            high = middle
    return low


class Prefill(Wrapper):
    path = "prefill.py:BatchPrefillWithPagedKVCacheWrapper"

    def make_plan(self, given: dict[str, Any]) -> None:
        lengths = {"qo_indptr": 1, "paged_kv_indptr": 1, "paged_kv_last_page_len": 0, "seq_lens": 0}
        requests = len(given["seq_lens"])
        for name, more in lengths.items():
            array = given[name]
            assert array.device.type == "cpu" and array.dtype is torch.int32 and array.shape == (requests + more,), name
        new, pages = given["qo_indptr"].diff(), given["paged_kv_indptr"].diff()
        assert min(new) > 0 and max(new) == given["max_token_per_sequence"]
        assert given["qo_indptr"][0] == given["paged_kv_indptr"][0] == 0
        self.kv_lens = ((pages - 1) * self.page_size + given["paged_kv_last_page_len"]).tolist()
        assert self.kv_lens == given["seq_lens"].tolist()
        assert given["paged_kv_indices"].dtype is torch.int32 and len(given["paged_kv_indices"]) == int(pages.sum())
        if self.made["backend"] == "fa2":
            self.check_scratch((new * (self.heads // self.kv_heads)).tolist(), pages.tolist())

    def check_scratch(self, packed: list[int], pages: list[int]) -> None:
        """Check that the parts of a divided batch fit; the library raises otherwise."""
        dim = self.planned["head_dim_qk"]
        tile = tile_of(sum(packed) // len(packed), dim)
        tiles = [-(-rows // tile) for rows in packed]
        chunk = lay_out_chunks(pages, tiles, 2 * PROCESSORS // self.kv_heads, self.page_size)
        if chunk < max(pages):
            items = sum(count * -(-page // chunk) for count, page in zip(tiles, pages, strict=True))
            assert self.workspace.numel() >= 4 * self.heads * items * tile * (dim + 1) + 32

    def run(self, *args: Any, **named: Any) -> Tensor:
        given = self.check_call(*args, **named)
        q, out, lse = given["q"], given["out"], given["lse"]
        begins, firsts = self.planned["qo_indptr"].tolist(), self.planned["paged_kv_indptr"].tolist()
        assert q.shape[0] == begins[-1]
        if self.made["backend"] == "fa3":
            keys, values = given["paged_kv_cache"]
            assert keys.stride() == values.stride() and keys.dtype is q.dtype
        for request, kv_len in enumerate(self.kv_lens):
            rows = slice(begins[request], begins[request + 1])
            pages = self.planned["paged_kv_indices"][firsts[request] : firsts[request + 1]]
            own = torch.arange(rows.stop - rows.start) + kv_len - (rows.stop - rows.start)
            part, sums = self.part(given, q[rows], pages, range(kv_len), own, self.planned["causal"])
            out[rows] = (part * given.get("v_scale", 1.0)).to(out.dtype)
            if lse is not None:
                lse[rows] = sums.float()
        return out


class Decode(Wrapper):
    """Captured call that executes its schedule item by item and merges the partial results."""

    path = "decode.py:BatchDecodeWithPagedKVCacheWrapper"
    plan_method = "_plan_impl"

    def make_plan(self, given: dict[str, Any]) -> None:
        made = self.made
        assert made["use_cuda_graph"] and made["use_tensor_cores"] and made["backend"] == "fa2"
        kv_lens, self.queries, dim = given["seq_lens"].tolist(), given["q_len_per_req"], given["head_dim"]
        requests, group = len(kv_lens), self.heads // self.kv_heads
        assert len(made["paged_kv_indptr_buffer"]) == requests + 1
        assert len(made["paged_kv_last_page_len_buffer"]) == requests and min(kv_lens) >= self.queries
        made["paged_kv_indptr_buffer"].copy_(given["indptr"])
        made["paged_kv_last_page_len_buffer"].copy_(given["last_page_len"])
        packed = self.queries * group
        self.tile = tile_of(packed, dim)
        tiles = -(-packed // self.tile)
        most = requests * tiles if self.queries > 1 else -(-requests * group // self.tile) + requests - 1
        room = max(2 * PROCESSORS // self.kv_heads, most)
        pages = given["indptr"].diff().tolist()
        if (left := given["window_left"]) >= 0:
            pages = [min(-(-(left + self.tile) // self.page_size), count) for count in pages]
        chunk = lay_out_chunks(pages, [tiles] * requests, 2 * PROCESSORS // self.kv_heads, self.page_size)
        assert self.workspace.numel() >= 4 * self.heads * room * self.tile * (dim + 1) + 32, "the library has no room"
        rows = requests * self.queries
        sizes = {"request": 4 * room, "tile": 4 * room, "chunk": 4 * room, "parts": 4 * (requests + 1), "length": 4}
        sizes |= {"rows": 4, "merge": 4 * (rows + 1), "valid": room}
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end = -(-end // 16) * 16
            end += size
        self._int_workspace_buffer = torch.full((end + 64,), 77, dtype=torch.uint8)
        at = offsets
        self._plan_info = [
            *(room, rows, at["rows"], self.tile, at["request"], at["tile"], at["chunk"], at["merge"], at["parts"]),
            *(at["length"], 0, 0, at["valid"], True, True),
        ]
        self.fill(pages, tiles, chunk)

    def array(self, number: int, count: int) -> Tensor:
        offset = self._plan_info[number]
        return self._int_workspace_buffer[offset : offset + 4 * count].view(torch.int32)

    def fill(self, pages: list[int], tiles: int, chunk: int) -> None:
        """PrefillSplitQOKVIndptr."""
        items, parts, merge = [], [0], [0]
        for request, count in enumerate(pages):
            chunks = -(-max(count, 1) // chunk)
            items += [(request, tile, part) for tile in range(tiles) for part in range(chunks)]
            merge += [merge[-1] + chunks * (row + 1) for row in range(self.queries)]
            parts.append(parts[-1] + chunks * self.queries)
        for number, column in zip((4, 5, 6), zip(*items, strict=True), strict=True):
            self.array(number, len(items)).copy_(torch.tensor(column))
        self.array(8, len(parts)).copy_(torch.tensor(parts))
        self.array(7, len(merge)).copy_(torch.tensor(merge))
        self.array(9, 1).fill_(chunk * self.page_size)
        self.valid.copy_(torch.arange(self._plan_info[0]) < len(items))

    @property
    def valid(self) -> Tensor:
        return self._int_workspace_buffer[self._plan_info[12] : self._plan_info[12] + self._plan_info[0]]

    def run(self, *args: Any, **named: Any) -> Tensor:
        given = self.check_call(*args, **named)
        q, out, lse = given["q"], given["out"], given["lse"]
        queries, group, tile = self.queries, self.heads // self.kv_heads, self.tile
        indptr, last = (self.made[name] for name in ("paged_kv_indptr_buffer", "paged_kv_last_page_len_buffer"))
        room, rows = self._plan_info[:2]
        assert len(q) == rows
        length, window = int(self.array(9, 1)), self.planned["window_left"]
        most = room * tile  # rows of parts that the library makes room for, for every head
        values = torch.full((most, *q.shape[1:]), float("nan")).double()
        sums = torch.full((most, self.heads), float("nan")).double()
        for item in self.valid.bool().nonzero().flatten().tolist():
            request, tile_at, chunk = (int(self.array(number, room)[item]) for number in (4, 5, 6))
            first, stop = int(indptr[request]), int(indptr[request + 1])
            kv_len = (stop - first - 1) * self.page_size + int(last[request]) if stop > first else 0
            left = window if window >= 0 else kv_len
            start = max(kv_len + tile_at * tile // group - queries - left, 0)
            span = range(min(chunk * length + start, kv_len), min((chunk + 1) * length + start, kv_len))
            packed = torch.arange(tile_at * tile, min((tile_at + 1) * tile, queries * group))
            query = torch.arange(int(packed[0]) // group, int(packed[-1]) // group + 1)
            pages = self.made["paged_kv_indices_buffer"][first:stop]
            own = query + kv_len - queries
            part, part_sums = self.part(given, q[request * queries + query], pages, span, own, queries > 1)
            chunks = -(-min(max(kv_len, 1), left + tile) // length)
            for row in packed.tolist():
                place = int(self.array(8, request + 1)[request]) + row // group * chunks + chunk
                heads = torch.arange(self.kv_heads) * group + row % group
                assert sums[place, heads].isnan().all(), "two items write the same part"
                values[place, heads] = part[row // group - int(query[0])][heads]
                sums[place, heads] = part_sums[row // group - int(query[0])][heads]
        merge = self.array(7, rows + 1).tolist()
        for row in range(rows):
            where = slice(merge[row], merge[row + 1])
            some = where.stop > where.start
            merged = (sums[where] * LN_2).logsumexp(0) if some else torch.full((self.heads,), float("-inf")).double()
            weights = torch.exp(sums[where] * LN_2 - merged)
            out[row] = ((weights[..., None] * values[where]).sum(0) * given.get("v_scale", 1.0)).to(out.dtype)
            if lse is not None:
                lse[row] = (merged / LN_2).float()
        return out
