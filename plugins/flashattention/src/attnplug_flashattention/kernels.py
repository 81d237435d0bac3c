"""The seam to the kernel libraries: what the backend asks of kernels, and the only code that imports one.

Every kernel here is FlashAttention in one of its generations. Log-sum-exps are natural logarithms in all of them (C4).
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
from attnplug_flashattention.plugin import FA2, FA4, KERNEL, TORCH, fa4_problem, kernel_unfit, key_tiles

Attended = tuple[Tensor, Tensor | None]
"""Output ``[rows, heads, v_dim]`` and, where asked for, log-sum-exp ``[rows, heads]`` float32, of any strides."""


@dataclass(frozen=True, slots=True)
class Softmax:
    """What a layer's softmax needs to know. ``window`` counts the keys that a query sees, itself included."""

    scale: float
    window: int | None = None
    cap: float | None = None

    @classmethod
    def of(cls, layer: LayerSpec) -> Softmax:
        return cls(layer.scale, layer.sliding_window, layer.logit_cap)


class Kernels(Protocol):
    """Attention by one library."""

    name: str
    captures: bool
    """Whether calls over pages can be captured in a graph."""
    divides: bool
    """Whether a call divides long requests among multiprocessors by itself."""

    def page_size(self, page_size: int, layers: Iterable[LayerSpec]) -> int | None:
        """The page size with which it reads a cache of pages of ``page_size``; ``None`` if rows must be gathered."""
        ...

    def at_hand(self, q: Tensor, k: Tensor, v: Tensor, call: RaggedCall, softmax: Softmax, lse: bool) -> Attended:
        """Attention over rows that are passed in: q ``[query rows, heads, dim]``, k, v ``[kv rows, kv_heads, …]``."""
        ...

    def over_pages(self, q: Tensor, k: Tensor, v: Tensor, call: PagedCall, softmax: Softmax, lse: bool) -> Attended:
        """The same over a cache: k and v ``[pages, page_size, kv_heads, …]`` in the kernel's pages.

        Rows after a sequence's last row may hold anything. A sequence without keys gives zeros and -inf.
        """
        ...


def choose_kernels(name: KernelName, sm: int, layers: Iterable[LayerSpec]) -> Kernels:
    """Import the kernels that the option asks for. Raises :class:`BackendError` with the reason if that fails."""
    layers = tuple(layers)
    capped = [layer.layer_id for layer in layers if layer.logit_cap is not None]
    if name == "auto":
        if fa4_problem(sm, layers) is None and _fa4_imports():
            name = "fa4"
        else:
            name = "fa2" if capped and import_error(load_fa2) is None else "torch"
    elif name != "torch" and (unfit := kernel_unfit(name, sm, layers)) is not None:
        raise BackendError(f"{unfit.message}; use {KERNEL}=auto, or leave it out", settings=[KERNEL])
    made: dict[str, Callable[[], Kernels]] = {"fa4": FA4Kernels, "fa2": FA2Kernels, "torch": TorchKernels}
    try:
        kernels = made[name]()
    except Exception as error:  # half-installed CuTe DSL raises AssertionError, CUDA libraries raise OSError
        raise BackendError(
            f"kernel={name} cannot be imported: {type(error).__name__}: {error}; {INSTALL[name]}, or use {KERNEL}=auto",
            settings=[KERNEL],
        ) from error
    if (unfit := kernel_unfit(name, sm, layers)) is not None:
        raise BackendError(f"{unfit.message}; {INSTALL['fa4']}, or {INSTALL['fa2']}")
    return kernels


INSTALL = {
    "fa4": f"pip install '{FA4}'",
    "fa2": f"pip install '{FA2}'",
    "torch": f"pip install '{TORCH}'",
}


def import_error(load: Callable[[], object]) -> BaseException | None:
    """What importing a library raises; ``None`` if it succeeds. Libraries raise anything, even SystemExit."""
    try:
        load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # half-installed CuTe DSL raises AssertionError, CUDA libraries raise OSError
        return error
    return None


def _fa4_imports() -> bool:
    error = import_error(load_fa4)
    absent = isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] == "flash_attn"
    if error is not None and not absent:
        warnings.warn(
            f"flash-attn-4 is installed but cannot be imported ({type(error).__name__}: {error}); flashattention runs "
            "on torch's kernel",
            RuntimeWarning,
            stacklevel=2,
        )
    return error is None


@cache
def load_fa4() -> Callable[..., Any]:
    """FlashAttention 4's function. Raises whatever its import raises."""
    from flash_attn.cute import flash_attn_varlen_func

    # The CuTe DSL warns about an argument inside flash-attn at every kernel it compiles. A user cannot change that.
    warnings.filterwarnings("ignore", "Argument aux_data .* cannot be converted to a JitArgument", UserWarning)

    function: Callable[..., Any] = flash_attn_varlen_func
    return function


def load_fa2() -> Callable[..., Any]:
    """FlashAttention 2's function. Raises whatever its import raises."""
    from flash_attn import flash_attn_varlen_func

    function: Callable[..., Any] = flash_attn_varlen_func
    return function


class FA4Kernels:
    """flash-attn-4, written in the CuTe DSL and compiled at the first call of each kind.

    On SM 90 it cannot divide a request among multiprocessors, and fails an assertion if asked to. So ``num_splits`` is
    always 1.
    """

    name = "fa4"
    captures = True
    divides = False

    def __init__(self, attend: Callable[..., Any] | None = None) -> None:
        self._attend = attend or load_fa4()

    def page_size(self, page_size: int, layers: Iterable[LayerSpec]) -> int:
        """A page size that is not a whole key tile.

        Pages of a whole tile would be loaded by TMA, with all of their rows. A NaN after a sequence's last row would
        get into its result, and a sequence without rows would read the page named before its own. Other pages are
        loaded row by row, and decode twice as fast on an H200.
        """
        tiles = {tile for layer in layers for tile in key_tiles(layer)}
        return max(size for size in range(1, page_size + 1) if page_size % size == 0 and size not in tiles)

    def at_hand(self, q: Tensor, k: Tensor, v: Tensor, call: RaggedCall, softmax: Softmax, lse: bool) -> Attended:
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

    def over_pages(self, q: Tensor, k: Tensor, v: Tensor, call: PagedCall, softmax: Softmax, lse: bool) -> Attended:
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
        # A batch of equally long sequences: no scheduler has to find out where they begin.
        out, sums = self._attend(q.unflatten(0, (-1, call.queries)), k, v, **cached)
        return out.flatten(0, 1), sums.transpose(1, 2).flatten(0, 1) if lse else None


def _fa4_softmax(softmax: Softmax) -> dict[str, Any]:
    return {
        "softmax_scale": softmax.scale,
        "window_size": (None, None) if softmax.window is None else (softmax.window - 1, 0),
        "softcap": softmax.cap or 0.0,
        "num_splits": 1,
    }


class FlashAttention2(ABC):
    """FlashAttention 2, from torch or from flash-attn: keys and values of one width, pages of 256 rows or multiples."""

    captures = False
    divides = True
    reads_pages = True

    def page_size(self, page_size: int, layers: Iterable[LayerSpec]) -> int | None:
        even = all(layer.head_dim == layer.v_head_dim for layer in layers)
        return page_size if self.reads_pages and even and page_size % 256 == 0 else None

    def at_hand(self, q: Tensor, k: Tensor, v: Tensor, call: RaggedCall, softmax: Softmax, lse: bool) -> Attended:
        width = v.shape[-1]
        padded = F.pad(v, (0, k.shape[-1] - width)) if width != k.shape[-1] else v
        out, sums = self._attend(q, k, padded, call, softmax, None)
        return out[..., :width], sums.T if lse else None

    def over_pages(self, q: Tensor, k: Tensor, v: Tensor, call: PagedCall, softmax: Softmax, lse: bool) -> Attended:
        assert call.ragged is not None
        out, sums = self._attend(q, k, v, call.ragged, softmax, call)
        return out, sums.T if lse else None

    @abstractmethod
    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: RaggedCall, softmax: Softmax, paged: PagedCall | None
    ) -> tuple[Tensor, Tensor]:
        """Output, and log-sum-exp ``[heads, rows]``."""

    @staticmethod
    def _window(call: RaggedCall, softmax: Softmax) -> tuple[int, int]:
        """How many keys before and after its own a query sees; -1 for all of them."""
        if softmax.window is not None:
            return softmax.window - 1, 0
        return (-1, 0) if call.causal else (-1, -1)


class TorchKernels(FlashAttention2):
    """The FlashAttention 2 inside torch. It reads pages from torch 2.12 on; before that, rows are gathered."""

    name = "torch"

    def __init__(self, attend: Callable[..., Any] | None = None) -> None:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        self._function, self._aux = attend or varlen_attn, AuxRequest(lse=True)
        known = inspect.signature(self._function).parameters
        if not {"scale", "window_size"} <= known.keys():
            raise ImportError("varlen_attn takes neither a scale nor a window before torch 2.11")
        self.reads_pages = "block_table" in known
        self._shared_heads: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: RaggedCall, softmax: Softmax, paged: PagedCall | None
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
    """flash-attn 2, where a user has built it. Its calls are checked against its signature; no GPU has run them."""

    name = "fa2"

    def __init__(self, attend: Callable[..., Any] | None = None) -> None:
        self._function = attend or load_fa2()

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: RaggedCall, softmax: Softmax, paged: PagedCall | None
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
