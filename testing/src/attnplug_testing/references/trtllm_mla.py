"""FlashInfer's two functions in plain torch, as strict as the real ones. They test planning, not a kernel.

Each takes exactly the calls that the real signature takes, and asserts every limit that the library states: in its
Python, in its launcher, or in its documentation. The library does not check the latter; its kernel would go wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import Signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import BackendContext
from attnplug_testing.batches import declaring
from attnplug_testing.references.blackwell import pretend
from attnplug_testing.references.flashinfer_mla import attend
from attnplug_testing.signatures import installed, read_signature, unpacked
from attnplug_testing.trtllm_checks import Build, skip_unless_served
from attnplug_trtllm_mla.backend import TRTLLMMLABackend
from attnplug_trtllm_mla.build import trtllm_mla
from attnplug_trtllm_mla.kernels import TRTLLMLibrary
from attnplug_trtllm_mla.options import TRTLLMMLAOptions
from attnplug_trtllm_mla.plugin import attnplug_backends

PROCESSORS = 4
SCRATCH_MIB = 8
"""Small, so that calls with a log-sum-exp are split."""
NEWEST = "0.7.2.post1"
TYPES = (torch.bfloat16, torch.float8_e4m3fn)


def flashinfer_folder(version: str | None) -> Path | None:
    """Return the folder of a FlashInfer version; ``None`` is the installed one."""
    return installed("flashinfer") if version is None else unpacked("flashinfer", version)


class ReferenceFlashInfer:
    """The functions of one version, with its signatures; records the calls."""

    def __init__(self, version: str | None = None) -> None:
        folder = flashinfer_folder(version)
        assert folder is not None, f"flashinfer {version} is not unpacked; make test does it"
        self.decode_signature = read_signature(
            folder / "flashinfer" / "mla" / "_core.py", "trtllm_batch_decode_with_kv_cache_mla"
        )
        self.ragged_signature = read_signature(folder / "flashinfer" / "prefill.py", "trtllm_ragged_attention_deepseek")
        self.calls: list[tuple[str, dict[str, Any]]] = []

    @property
    def library(self) -> TRTLLMLibrary:
        return TRTLLMLibrary("test", self.decode, self.ragged, "return_lse_base" in self.decode_signature.parameters)

    def named(self, kind: str) -> list[dict[str, Any]]:
        return [given for name, given in self.calls if name == kind]

    def _bind(self, kind: str, signature: Signature, given: dict[str, Any]) -> dict[str, Any]:
        bound = signature.bind(**given).arguments
        self.calls.append((kind, bound))
        return bound

    # ---- decode ----

    def decode(self, **given: Any) -> Any:
        call = self._bind("decode", self.decode_signature, given)
        query, out, lse = call["query"], call["out"], call["lse"]
        requests, queries, heads, width = query.shape
        pages = call["kv_cache"]
        assert pages.dim() == 3 and pages.is_contiguous()
        assert (call["kv_lora_rank"], call["qk_rope_head_dim"], width, pages.shape[2]) == (512, 64, 576, 576)
        assert query.dtype is pages.dtype and query.dtype in TYPES  # words: the query-compatible type
        assert query.stride(-1) == 1 and query.stride(1) == heads * query.stride(2)  # cute-dsl would copy it
        assert out.shape == (requests, queries, heads, 512) and out.dtype is torch.bfloat16  # Python
        assert out.is_contiguous()  # cute-dsl's Python; TRT-LLM's launcher takes it for granted
        assert all(isinstance(call[name], float) for name in ("bmm1_scale", "bmm2_scale"))  # cute-dsl's Python
        assert call["return_lse"] == (lse is not None)
        if lse is not None:
            assert lse.shape == (requests * queries, heads) and lse.dtype is torch.float32 and lse.is_contiguous()
        check_tables(call["block_tables"], call["seq_lens"], call["max_seq_len"], queries, pages)
        if call["backend"] == "trtllm-gen":
            self._check_trtllm(call, requests, queries, heads, pages.shape[1])
        else:
            assert call["backend"] == "cute-dsl"
            self._check_cute_dsl(call, requests, queries, heads, pages.shape[1])
        base_2 = call["backend"] == "trtllm-gen" and call.get("return_lse_base") != "basee"
        scales = call["bmm1_scale"], call["bmm2_scale"]
        run_decode(query, pages, call["block_tables"], call["seq_lens"], *scales, out, lse, base_2)
        return out if lse is None else (out, lse)

    def _check_trtllm(self, call: dict[str, Any], requests: int, queries: int, heads: int, page_size: int) -> None:
        assert page_size in (32, 64)  # Python
        assert not 64 < heads < 128  # Python
        assert heads >= 8 and heads & (heads - 1) == 0  # 0.6's kernels by number of heads; 0.7 pads by itself
        assert requests <= 8192  # words: "kernel-hardcoded ceiling"
        counters, scratch = call["multi_ctas_kv_counter_buffer"], call["workspace_buffer"]
        assert counters.is_contiguous() and counters.data_ptr() % 16 == 0  # Python, launcher
        needed = -(-max(requests * heads, PROCESSORS) // 8) * 8 * 4
        assert counters.numel() * counters.element_size() >= needed  # launcher
        assert not counters.any(), "semaphores must be zero when a call begins"  # words
        assert disjoint(counters, scratch), "zeroed memory was handed out as scratch"
        partial = PROCESSORS * 256 * (512 + 2) * 4
        stats = 8 * heads * requests * -(-queries // 256) * 256 + (1 << 20) if call["return_lse"] else 0
        assert scratch.numel() * scratch.element_size() >= partial + stats  # launcher
        scratch.fill_(0xFF)

    def _check_cute_dsl(self, call: dict[str, Any], requests: int, queries: int, heads: int, page_size: int) -> None:
        assert call.get("multi_ctas_kv_counter_buffer") is None  # Python
        assert call["cute_dsl_impl"] == "monolithic"  # the other gives no log-sum-exp
        assert 128 % page_size == 0 and page_size != 1 and 0 < heads <= 128  # can_implement
        tiles = -(-queries * heads // 128)
        assert requests * tiles <= 65535  # grid
        check_cute_dsl_scratch(call["workspace_buffer"], (torch.int8, torch.uint8), requests * tiles, 128)

    # ---- ragged ----

    def ragged(self, **given: Any) -> Any:
        call = self._bind("ragged", self.ragged_signature, given)
        query, key, value, out, lse = (call[name] for name in ("query", "key", "value", "out", "lse"))
        assert query.dim() == key.dim() == value.dim() == out.dim() == 3  # launcher
        assert (query.shape[2], key.shape[2], value.shape[2]) == (192, 192, 128)  # Python
        assert query.dtype is key.dtype is value.dtype is out.dtype is torch.bfloat16
        assert query.is_contiguous() and out.is_contiguous()  # the launcher takes it for granted
        assert key.stride(-1) == value.stride(-1) == 1
        assert out.shape == (*query.shape[:2], 128)  # Python
        assert call["skip_all_rows_active_check"] is True  # nothing is read back; so there must be no empty row
        assert call.get("q_seq_lens_cpu") is None and call.get("kv_seq_lens_cpu") is None  # Python, before 0.7
        assert (call["window_left"], call["bmm2_scale"], call["o_sf_scale"]) == (-1, 1.0, 1.0)
        queries, keys = check_ragged(
            call["cum_seq_lens_q"], call["cum_seq_lens_kv"], call["max_q_len"], call["max_kv_len"], query, key, value
        )
        assert call["batch_size"] == len(queries)
        assert call["seq_lens"].dtype is torch.int32 and call["seq_lens"].tolist() == keys
        scratch = call["workspace_buffer"]
        if lse is not None:
            assert lse.shape == query.shape[:2] and lse.dtype is torch.float32 and call["return_lse"]
            stats = 8 * query.shape[1] * len(queries) * -(-call["max_q_len"] // 256) * 256 + (1 << 20)
            assert scratch.numel() * scratch.element_size() >= stats  # launcher
        scratch.fill_(0xFF)
        run_ragged(query, key, value, queries, keys, call["bmm1_scale"], call["is_causal"], out, lse, base_2=True)
        return out if lse is None else (out, lse)


def check_tables(tables: Tensor, lens: Tensor, longest: int, queries: int, pages: Tensor) -> None:
    """Check the limits that decode kernels state for page tables and lengths; launchers check few of them."""
    assert tables.dim() == 2 and tables.dtype is torch.int32 and tables.is_contiguous()
    assert lens.dtype is torch.int32 and lens.is_contiguous() and lens.shape == tables.shape[:1]
    page_size = pages.shape[1]
    assert tables.shape[1] % (128 // page_size) == 0  # Python, unless TRT-LLM's kernel is requested by name
    assert int(tables.min()) >= 0 and int(tables.max()) < pages.shape[0], "whole tiles are fetched"
    assert int(lens.min()) >= queries, "a query without a key"
    assert int(lens.max()) <= longest and int(lens.max()) <= tables.shape[1] * page_size


def check_cute_dsl_scratch(scratch: Tensor, types: tuple[torch.dtype, ...], tiles: int, rows: int) -> None:
    """Check that the scratch memory holds partial results of all splits, and fill it with garbage.

    The kernel splits tiles as long as multiprocessors are left, in pairs or alone.
    """
    splits = max(1, PROCESSORS // (tiles * rows // 64))
    needed = 0 if splits == 1 else tiles * rows * splits * (512 + 1) * 4
    assert scratch.dtype in types and scratch.is_contiguous() and scratch.numel() >= needed
    scratch.fill_(-1 if scratch.dtype is torch.int8 else 0xFF)


def check_ragged(
    query_indptr: Tensor, kv_indptr: Tensor, max_queries: int, max_keys: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[list[int], list[int]]:
    for indptr, rows in ((query_indptr, q.shape[0]), (kv_indptr, k.shape[0])):
        assert indptr.dtype is torch.int32 and indptr.is_contiguous() and indptr.shape == query_indptr.shape
        assert indptr[0] == 0 and indptr[-1] == rows
    assert v.shape[0] == k.shape[0] and q.shape[1] == k.shape[1] == v.shape[1]
    queries, keys = query_indptr.diff().tolist(), kv_indptr.diff().tolist()
    assert min(queries) > 0 and min(keys) > 0, "kernels return garbage for empty spans"
    assert max_queries >= max(queries) and max_keys >= max(keys)
    return queries, keys


def disjoint(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors share no memory."""
    starts = [tensor.data_ptr() for tensor in (one, other)]
    ends = [tensor.data_ptr() + tensor.numel() * tensor.element_size() for tensor in (one, other)]
    return max(starts) >= min(ends)


def run_decode(
    query: Tensor, pages: Tensor, tables: Tensor, lens: Tensor, scale: float, v_scale: float,
    out: Tensor, lse: Tensor | None, base_2: bool,
) -> None:  # fmt: skip
    requests, queries = query.shape[:2]
    cells = pages.view(torch.uint8) if pages.dtype is torch.float8_e4m3fn else pages  # no indexing on a CPU
    for request in range(requests):
        count = int(lens[request])
        used = tables[request, : -(-count // pages.shape[1])].long()
        keys = cells[used].flatten(0, 1)[:count].view(pages.dtype).double()[:, None]
        result, sums = torch.empty(out.shape[1:]).double(), torch.empty(query.shape[1:3]).double()
        attend(query[request], keys, keys[..., :512] * v_scale, scale, True, result, sums)
        out[request] = result.to(out.dtype)
        if lse is not None:
            lse[request * queries : (request + 1) * queries] = sums / (torch.tensor(2.0).log() if base_2 else 1.0)


def run_ragged(
    q: Tensor, k: Tensor, v: Tensor, queries: list[int], keys: list[int], scale: float, causal: bool,
    out: Tensor, lse: Tensor | None, base_2: bool,
) -> None:  # fmt: skip
    row = key = 0
    for count, width in zip(queries, keys, strict=True):
        queries_slice, keys_slice = slice(row, row + count), slice(key, key + width)
        sums = torch.empty(count, q.shape[1]).double()
        attend(q[queries_slice], k[keys_slice], v[keys_slice], scale, causal, out[queries_slice], sums)
        if lse is not None:
            lse[queries_slice] = sums / (torch.tensor(2.0).log() if base_2 else 1.0)
        row, key = row + count, key + width


# ---- backends on them ----


def reference_trtllm(context: BackendContext, flashinfer: ReferenceFlashInfer | None = None) -> TRTLLMMLABackend:
    """Build trtllm_mla by its own factory, over the reference library."""
    options = TRTLLMMLAOptions(SCRATCH_MIB) if context.options is None else context.options
    library = (flashinfer or ReferenceFlashInfer()).library
    return on_blackwell(trtllm_mla, library, replace(context, options=options))


def on_blackwell(
    factory: Callable[[BackendContext], TRTLLMMLABackend], library: object, context: BackendContext
) -> TRTLLMMLABackend:
    """Build a backend by the plugin's factory on a simulated GPU of few multiprocessors, over ``library``.

    A factory of this family has the name of its backend.
    """
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, processors=PROCESSORS)
        patch.setattr(f"{factory.__module__}.load_library", lambda: library)
        return factory(declaring(context, factory.__name__))


def build_on(device: str) -> Build:
    """Return a factory of trtllm_mla on a device; skips a GPU that it does not serve."""
    skip_unless_served(attnplug_backends()[0], device)
    return reference_trtllm if device == "cpu" else lambda context: trtllm_mla(declaring(context, "trtllm_mla"))
