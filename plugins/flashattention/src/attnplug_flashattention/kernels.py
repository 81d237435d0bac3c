"""Kernel protocol of the backend and its implementations. Only this module imports a kernel library.

Every implementation is a generation of FlashAttention. All of them return log-sum-exps in natural log (C4).
"""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from attnplug import BackendError, LayerSpec, RaggedCall
from attnplug_flashattention.options import KernelName
from attnplug_flashattention.planner import PagedCall
from attnplug_flashattention.plugin import FA2, FA4, KERNEL, TORCH, fa4_problem, kernel_refusal, key_tiles

AttentionOutput = tuple[Tensor, Tensor | None]
"""Output ``[rows, heads, v_dim]`` and, if requested, log-sum-exp ``[rows, heads]`` float32, of any strides."""


@dataclass(frozen=True, slots=True)
class SoftmaxParams:
    """Softmax parameters of a layer. ``window`` is the sliding window in keys, including the query's own."""

    scale: float
    window: int | None = None
    cap: float | None = None

    @classmethod
    def of(cls, layer: LayerSpec) -> SoftmaxParams:
        return cls(layer.scale, layer.sliding_window, layer.logit_cap)


class FlashAttentionKernels(Protocol):
    """Attention kernels of one library."""

    name: str
    supports_capture: bool
    """True if paged calls can be captured in a CUDA graph."""
    splits_kv: bool
    """True if the kernel splits long KV among multiprocessors itself."""

    def page_size(self, page_size: int, layers: Iterable[LayerSpec]) -> int | None:
        """Return the kernel's page size for a cache with ``page_size``; ``None`` if rows must be gathered instead."""
        ...

    def attend_ragged(
        self, q: Tensor, k: Tensor, v: Tensor, call: RaggedCall, softmax: SoftmaxParams, lse: bool
    ) -> AttentionOutput:
        """Attend with q ``[query_rows, heads, dim]`` to k and v ``[kv_rows, kv_heads, dim]``, without a cache."""
        ...

    def attend_paged(
        self, q: Tensor, k: Tensor, v: Tensor, call: PagedCall, softmax: SoftmaxParams, lse: bool
    ) -> AttentionOutput:
        """Attend with q ``[query_rows, heads, dim]`` to k and v ``[pages, page_size, kv_heads, dim]`` in kernel pages.

        Rows behind a sequence's last one may contain anything. A sequence without keys returns zeros and -inf.
        """
        ...


def choose_kernels(name: KernelName, sm: int, layers: Iterable[LayerSpec]) -> FlashAttentionKernels:
    """Import the requested kernels. Raises :class:`BackendError` with the reason if that fails."""
    layers = tuple(layers)
    capped = [layer.layer_id for layer in layers if layer.logit_cap is not None]
    if name == "auto":
        if fa4_problem(sm, layers) is None and _imports_fa4(load_fa4):
            name = "fa4"
        else:
            name = "fa2" if capped and import_error(load_fa2) is None else "torch"
    elif name != "torch" and (unfit := kernel_refusal(name, sm, layers)) is not None:
        raise BackendError(f"{unfit.message}; use {KERNEL}=auto, or leave it out", settings=[KERNEL])
    made: dict[str, Callable[[], FlashAttentionKernels]] = {"fa4": FA4Kernels, "fa2": FA2Kernels, "torch": TorchKernels}
    try:
        kernels = made[name]()
    except Exception as error:  # half-installed CuTe DSL raises AssertionError, CUDA libraries raise OSError
        raise BackendError(
            f"kernel={name} cannot be imported: {type(error).__name__}: {error}; {INSTALL[name]}, or use {KERNEL}=auto",
            settings=[KERNEL],
        ) from error
    if (unfit := kernel_refusal(name, sm, layers)) is not None:
        raise BackendError(f"{unfit.message}; {INSTALL['fa4']}, or {INSTALL['fa2']}")
    return kernels


INSTALL = {
    "fa4": f"pip install '{FA4}'",
    "fa2": f"pip install '{FA2}'",
    "torch": f"pip install '{TORCH}'",
}


def import_error(load: Callable[[], object]) -> BaseException | None:
    """Return the exception that ``load`` raises; ``None`` if it succeeds. Libraries raise anything, even SystemExit."""
    try:
        load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # half-installed CuTe DSL raises AssertionError, CUDA libraries raise OSError
        return error
    return None


@cache
def _imports_fa4(load: Callable[[], object]) -> bool:
    """Return True if flash-attn-4 can be imported. Warns once per process if it is installed and cannot."""
    error = import_error(load)
    absent = isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] == "flash_attn"
    if error is not None and not absent:
        warnings.warn(
            f"flash-attn-4 is installed but cannot be imported ({type(error).__name__}: {error}); flashattention uses "
            "torch's kernel",
            RuntimeWarning,
            stacklevel=2,
        )
    return error is None


@cache
def load_fa4() -> Callable[..., Any]:
    """Import flash-attn-4's function. Raises whatever its import raises."""
    from flash_attn.cute import flash_attn_varlen_func

    # The CuTe DSL warns about an argument inside flash-attn whenever it compiles a kernel. Users cannot change that.
    warnings.filterwarnings("ignore", "Argument aux_data .* cannot be converted to a JitArgument", UserWarning)

    function: Callable[..., Any] = flash_attn_varlen_func
    return function


def load_fa2() -> Callable[..., Any]:
    """Import flash-attn 2's function. Raises whatever its import raises."""
    from flash_attn import flash_attn_varlen_func

    function: Callable[..., Any] = flash_attn_varlen_func
    return function


class FA4Kernels:
    """flash-attn-4, written in the CuTe DSL. Each kernel variant is compiled at its first call.

    On SM 90 it does not support split-KV and raises an AssertionError for ``num_splits > 1``. So ``num_splits`` is
    always 1, and the planner splits KV instead.
    """

    name = "fa4"
    supports_capture = True
    splits_kv = False

    def __init__(self, attend: Callable[..., Any] | None = None) -> None:
        self._attend = attend or load_fa4()

    def page_size(self, page_size: int, layers: Iterable[LayerSpec]) -> int:
        """Return the largest divisor of ``page_size`` that is not a key tile size.

        Pages of a whole tile would be loaded by TMA, including all rows behind a sequence's last one: a NaN there would
        reach the result, and an empty sequence would read the page listed before its own. Other pages are loaded row by
        row, and decode twice as fast on an H200.
        """
        tiles = {tile for layer in layers for tile in key_tiles(layer)}
        return max(size for size in range(1, page_size + 1) if page_size % size == 0 and size not in tiles)

    def attend_ragged(
        self, q: Tensor, k: Tensor, v: Tensor, call: RaggedCall, softmax: SoftmaxParams, lse: bool
    ) -> AttentionOutput:
        out, sums = self._attend(
            q,
            k,
            v,
            cu_seqlens_q=call.query_indptr,
            cu_seqlens_k=call.kv_indptr,
            max_seqlen_q=max(call.query_lens),
            max_seqlen_k=max(call.kv_lens),
            causal=call.causal,
            return_lse=lse,
            **_fa4_softmax(softmax),
        )
        return out, sums.T if lse else None

    def attend_paged(
        self, q: Tensor, k: Tensor, v: Tensor, call: PagedCall, softmax: SoftmaxParams, lse: bool
    ) -> AttentionOutput:
        cached = {
            "seqused_k": call.kv_lens,
            "page_table": call.page_table,
            "max_seqlen_k": call.longest,
            "causal": call.causal,
            "return_lse": lse,
            **_fa4_softmax(softmax),
        }
        if call.queries is None:
            assert call.ragged is not None
            indptr, longest = call.ragged.query_indptr, max(call.ragged.query_lens)
            out, sums = self._attend(q, k, v, cu_seqlens_q=indptr, max_seqlen_q=longest, **cached)
            return out, sums.T if lse else None
        # A batch of sequences with equal query counts: the kernel needs no offsets.
        out, sums = self._attend(q.unflatten(0, (-1, call.queries)), k, v, **cached)
        return out.flatten(0, 1), sums.transpose(1, 2).flatten(0, 1) if lse else None


def _fa4_softmax(softmax: SoftmaxParams) -> dict[str, Any]:
    return {
        "softmax_scale": softmax.scale,
        "window_size": (None, None) if softmax.window is None else (softmax.window - 1, 0),
        "softcap": softmax.cap or 0.0,
        "num_splits": 1,
    }


class FlashAttention2(ABC):
    """FlashAttention 2, from torch or flash-attn. Keys and values have the same dim, pages a multiple of 256 rows."""

    supports_capture = False
    splits_kv = True
    reads_pages = True

    def page_size(self, page_size: int, layers: Iterable[LayerSpec]) -> int | None:
        even = all(layer.head_dim == layer.v_head_dim for layer in layers)
        return page_size if self.reads_pages and even and page_size % 256 == 0 else None

    def attend_ragged(
        self, q: Tensor, k: Tensor, v: Tensor, call: RaggedCall, softmax: SoftmaxParams, lse: bool
    ) -> AttentionOutput:
        width = v.shape[-1]
        padded = F.pad(v, (0, k.shape[-1] - width)) if width != k.shape[-1] else v
        out, sums = self._attend(q, k, padded, call, softmax, None)
        return out[..., :width], sums.T if lse else None

    def attend_paged(
        self, q: Tensor, k: Tensor, v: Tensor, call: PagedCall, softmax: SoftmaxParams, lse: bool
    ) -> AttentionOutput:
        assert call.ragged is not None
        out, sums = self._attend(q, k, v, call.ragged, softmax, call)
        return out, sums.T if lse else None

    @abstractmethod
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: RaggedCall, softmax: SoftmaxParams, paged: PagedCall | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output ``[rows, heads, dim]`` and the log-sum-exp ``[heads, rows]``."""

    @staticmethod
    def _window(call: RaggedCall, softmax: SoftmaxParams) -> tuple[int, int]:
        """Return the visible keys before and after the query's own; -1 for all."""
        if softmax.window is not None:
            return softmax.window - 1, 0
        return (-1, 0) if call.causal else (-1, -1)


class TorchKernels(FlashAttention2):
    """FlashAttention 2 in torch. From torch 2.12 on it reads pages; before, rows are gathered."""

    name = "torch"

    def __init__(self, attend: Callable[..., Any] | None = None) -> None:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        self._function, self._aux = attend or varlen_attn, AuxRequest(lse=True)
        known = inspect.signature(self._function).parameters
        if not {"scale", "window_size"} <= known.keys():
            raise ImportError("varlen_attn supports neither scale nor window before torch 2.11")
        self.reads_pages = "block_table" in known
        self._shared_heads: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: RaggedCall, softmax: SoftmaxParams, paged: PagedCall | None
    ) -> tuple[Tensor, Tensor]:
        pages: dict[str, Any] = {} if paged is None else {"block_table": paged.page_table, "seqused_k": paged.kv_lens}
        out, sums = self._function(
            q,
            k,
            v,
            call.query_indptr,
            call.kv_indptr,
            max(call.query_lens),
            max(call.kv_lens),
            return_aux=self._aux,
            scale=softmax.scale,
            window_size=self._window(call, softmax),
            **self._shared_heads,
            **pages,
        )
        return out, sums


class FA2Kernels(FlashAttention2):
    """flash-attn 2, if a user has built it. Calls are checked against its signature, but have never run on a GPU."""

    name = "fa2"

    def __init__(self, attend: Callable[..., Any] | None = None) -> None:
        self._function = attend or load_fa2()

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: RaggedCall, softmax: SoftmaxParams, paged: PagedCall | None
    ) -> tuple[Tensor, Tensor]:
        out, sums, _ = self._function(
            q,
            k,
            v,
            cu_seqlens_q=call.query_indptr,
            cu_seqlens_k=call.kv_indptr,
            max_seqlen_q=max(call.query_lens),
            max_seqlen_k=max(call.kv_lens),
            softmax_scale=softmax.scale,
            causal=call.causal,
            window_size=self._window(call, softmax),
            softcap=softmax.cap or 0.0,
            return_attn_probs=True,
            block_table=None if paged is None else paged.page_table,
        )
        return out, sums
