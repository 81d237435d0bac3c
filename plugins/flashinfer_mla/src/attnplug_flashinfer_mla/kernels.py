"""The seam to FlashInfer: what the backend asks of kernels, and the only code that imports the library.

A kernel is planned for one call and then run once per layer; planning it again forgets the call before.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from attnplug import BackendError, MLAShape, RaggedCall
from attnplug.kernels import on_host
from attnplug_flashinfer_mla.lengths import Lengths
from attnplug_flashinfer_mla.planner import PagedCall
from attnplug_flashinfer_mla.schedule import Schedule

_LN_2 = math.log(2.0)


@dataclass(frozen=True, slots=True, eq=False)
class Cache:
    """One layer's rows ``[pages, page_size, row_dim]``, split into latent and rope once, not at every call."""

    rows: Tensor
    latent: Tensor
    rope: Tensor
    scales: Mapping[str, float] = field(default_factory=dict)
    """Additional arguments of a call over an fp8 cache."""

    @classmethod
    def of(cls, rows: Tensor, kv_lora_rank: int, scale: float) -> Cache:
        scales = {"ckv_scale": scale, "kpe_scale": scale} if rows.dtype is torch.float8_e4m3fn else {}
        return cls(rows, rows[..., :kv_lora_rank], rows[..., kv_lora_rank:], scales)


@dataclass(frozen=True, slots=True, eq=False)
class GraphBuffers:
    """Memory at fixed addresses for a captured call: ``lengths`` as the library wants them, and its page indices."""

    lengths: Lengths
    kv_indices: Tensor


class PagedKernel(Protocol):
    """Latent attention over a paged cache."""

    @property
    def ready(self) -> bool:
        """Whether it can be planned without waiting for what an earlier plan sent to the device."""
        ...

    def plan(self, call: PagedCall) -> None: ...

    def schedule(self) -> Schedule:
        """The planned call's work list in memory, for callers that fill it themselves."""
        ...

    def run(self, q: Tensor, q_rope: Tensor | None, cache: Cache, out: Tensor, lse: Tensor | None) -> None:
        """q ``[rows, heads, row_dim]`` → ``out`` ``[rows, heads, kv_lora_rank]``; ``lse`` natural log.

        With ``q_rope`` ``[rows, heads, qk_rope_head_dim]``, q is ``[rows, heads, kv_lora_rank]``.
        """
        ...


class RaggedKernel(Protocol):
    """Plain attention over rows that are passed in."""

    @property
    def ready(self) -> bool: ...

    def plan(self, call: RaggedCall) -> None: ...

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None: ...


class Kernels(Protocol):
    """Makes the kernels of one lane. ``decode`` says that every request has one query."""

    def paged(self, *, decode: bool, graph: GraphBuffers | None = None) -> PagedKernel: ...

    def ragged(self) -> RaggedKernel: ...


@dataclass(frozen=True, slots=True)
class Library:
    """The parts of FlashInfer in use, probed by feature and not by version.

    ``metadata`` is the class in which newer versions take a plan's arrays; passing them one by one is deprecated there.
    ``reads_fp8`` says whether a paged call takes an fp8 cache with its scales. ``ragged_natural_log`` says whether a
    ragged call can return natural logarithms.
    """

    version: str
    paged: Any
    ragged: Any
    metadata: Any
    reads_fp8: bool
    ragged_natural_log: bool


@cache
def load_library() -> Library:
    """Import FlashInfer. Raises whatever its import raises."""
    import flashinfer
    from flashinfer import mla
    from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper as Ragged

    paged = mla.BatchMLAPagedAttentionWrapper
    return Library(
        version=str(flashinfer.__version__),
        paged=paged,
        ragged=Ragged,
        metadata=getattr(mla, "MLAPlanMetadata", None),
        reads_fp8="ckv_scale" in inspect.signature(paged.run).parameters,
        ragged_natural_log="lse_base" in inspect.signature(Ragged.run).parameters,
    )


class FlashInferKernels:
    """FlashInfer's wrappers for one model on one device, over the scratch buffer of one lane."""

    def __init__(self, shape: MLAShape, workspace: Tensor, kernel: str) -> None:
        self._library, self._shape, self._workspace = load_library(), shape, workspace
        self._kernel = kernel
        if kernel == "cutlass" and self._library.metadata is None:
            raise BackendError(
                f"kernel=cutlass needs flashinfer-python 0.7 or newer, this is {self._library.version}; use kernel=auto"
            )

    def paged(self, *, decode: bool, graph: GraphBuffers | None = None) -> PagedKernel:
        if self._kernel == "cutlass" and decode:
            return CutlassPaged(self._library, self._shape, self._workspace)
        return FlashInferPaged(self._library, self._shape, self._workspace, self._without_cutlass(), graph)

    def ragged(self) -> RaggedKernel:
        return FlashInferRagged(self._library, self._shape, self._workspace, self._without_cutlass())

    def _without_cutlass(self) -> str:
        return "fa2" if self._kernel == "cutlass" else self._kernel


class FlashInferPaged:
    """``BatchMLAPagedAttentionWrapper``, with the calling convention that is not deprecated."""

    def __init__(
        self,
        library: Library,
        shape: MLAShape,
        workspace: Tensor,
        kernel: str,
        graph: GraphBuffers | None,
    ) -> None:
        self._library, self._shape = library, shape
        reserved: dict[str, Any] = {}
        if graph is not None:
            reserved = {
                "use_cuda_graph": True,
                "qo_indptr": graph.lengths.qo_indptr,
                "kv_indptr": graph.lengths.kv_indptr,
                "kv_indices": graph.kv_indices,
                "kv_len_arr": graph.lengths.kv_lens,
            }
        self._wrapper = library.paged(workspace, backend=kernel, **reserved)
        # A plan's arrays stay in page-locked memory until the stream has copied them. With lengths on the device,
        # planning would wait for the device and could not overwrite arrays that are still to be copied. With lengths on
        # the host it could.
        self._sent = torch.cuda.Event()

    @property
    def ready(self) -> bool:
        return bool(self._sent.query())

    def plan(self, call: PagedCall) -> None:
        lengths = call.lengths
        arrays: dict[str, Any] = {
            "qo_indptr": lengths.qo_indptr,
            "kv_indptr": lengths.kv_indptr,
            "kv_indices": call.kv_indices,
            "kv_len_arr": lengths.kv_lens,
        }
        if self._library.metadata is not None:
            arrays = {
                "metadata": self._library.metadata.csr(**arrays),
                "query_layout": "split",  # parts of one tensor are as good as two tensors
                "kv_cache_layout": "packed",
                "lse_mode": "basee",
            }
        with naming(f"a paged call of {len(lengths.kv_lens)} requests and {int(lengths.qo_indptr[-1])} rows"):
            self._plan(call, arrays)
        self._sent.record()

    def _plan(self, call: PagedCall, arrays: dict[str, Any]) -> None:
        shape = self._shape
        self._wrapper.plan(
            **arrays,
            num_heads=call.heads,
            head_dim_ckv=shape.dims.kv_lora_rank,
            head_dim_kpe=shape.dims.qk_rope_head_dim,
            page_size=shape.page_size,
            causal=call.causal,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
        )

    def schedule(self) -> Schedule:
        return Schedule.of(list(self._wrapper._plan_info), self._wrapper._int_workspace_buffer)

    def run(self, q: Tensor, q_rope: Tensor | None, cache: Cache, out: Tensor, lse: Tensor | None) -> None:
        query = self._parts(q) if q_rope is None else (_readable(q), _readable(q_rope))
        if self._library.metadata is not None:
            if lse is None:  # the call must ask for what was planned
                lse = q.new_empty(q.shape[:2], dtype=torch.float32)
            self._wrapper.run(
                query=query,
                kv_cache=cache.rows,
                out=out,
                lse=lse,
                return_lse=True,
                return_lse_base_on_e=True,
                **cache.scales,
            )
        else:
            self._wrapper.run(
                q_nope=query[0],
                q_pe=query[1],
                ckv_cache=cache.latent,
                kpe_cache=cache.rope,
                out=out,
                lse=lse,
                return_lse=lse is not None,
                return_lse_base_on_e=True,
                **cache.scales,
            )

    def _parts(self, q: Tensor) -> tuple[Tensor, Tensor]:
        dims = self._shape.dims
        return q.narrow(2, 0, dims.kv_lora_rank), q.narrow(2, dims.kv_lora_rank, dims.qk_rope_head_dim)


def _readable(part: Tensor) -> Tensor:
    """A part of q, or a copy where the kernels cannot read it: they copy 16 bytes at once, and take every column to be
    next to the one before, without looking."""
    row, head, column = part.stride()
    size = part.element_size()
    if column == 1 and not any(place % 16 for place in (part.data_ptr(), row * size, head * size)):
        return part
    return part.clone(memory_format=torch.contiguous_format)


class CutlassPaged:
    """Decode by the wrapper's CUTLASS kernel, which reads the page table itself and returns no log-sum-exp.

    Only for a FlashInfer that plans it (0.7 or newer). Older ones copied the whole layer's cache at every call.
    """

    ready = True

    def __init__(self, library: Library, shape: MLAShape, workspace: Tensor) -> None:
        self._library, self._shape = library, shape
        self._wrapper = library.paged(workspace, backend="cutlass")

    def plan(self, call: PagedCall) -> None:
        shape = self._shape
        wanted = 128 // shape.page_size
        page_table = torch.nn.functional.pad(call.page_table, (0, -call.page_table.shape[1] % wanted))
        self._wrapper.plan(
            metadata=self._library.metadata.dense(
                cum_seq_lens_q=call.lengths.qo_indptr,
                block_tables=page_table,
                seq_lens=call.lengths.kv_lens,
                max_q_len=1,
            ),
            num_heads=shape.heads,
            head_dim_ckv=shape.dims.kv_lora_rank,
            head_dim_kpe=shape.dims.qk_rope_head_dim,
            page_size=shape.page_size,
            causal=False,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
        )

    def schedule(self) -> Schedule:
        raise BackendError("kernel=cutlass decodes outside of CUDA graphs only; use kernel=auto")

    def run(self, q: Tensor, q_rope: Tensor | None, cache: Cache, out: Tensor, lse: Tensor | None) -> None:
        if lse is not None:
            raise BackendError("kernel=cutlass gives no log-sum-exp; use kernel=auto")
        if q_rope is not None:  # the only kernel here that wants one tensor
            q = torch.cat((q, q_rope), -1)
        self._wrapper.run(query=q, kv_cache=cache.rows, out=out)


class FlashInferRagged:
    """``BatchPrefillWithRaggedKVCacheWrapper``: MLA as MHA, keys and values of different widths."""

    def __init__(self, library: Library, shape: MLAShape, workspace: Tensor, kernel: str) -> None:
        self._library, self._shape, self._device = library, shape, workspace.device
        self._wrapper = library.ragged(workspace, kv_layout="NHD", backend=kernel)
        self._sent = torch.cuda.Event()

    @property
    def ready(self) -> bool:
        return bool(self._sent.query())

    def plan(self, call: RaggedCall) -> None:
        width, v_width = self._shape.ragged_dims
        with naming(f"a ragged call of {call.query_rows} query rows and {call.kv_rows} keys"):
            self._plan(call, width, v_width)
        self._sent.record()

    def _plan(self, call: RaggedCall, width: int, v_width: int) -> None:
        shape = self._shape
        self._wrapper.plan(
            qo_indptr=on_host(tuple(accumulate(call.query_lens, initial=0)), self._device, np.int32),
            kv_indptr=on_host(tuple(accumulate(call.kv_lens, initial=0)), self._device, np.int32),
            num_qo_heads=shape.heads,
            num_kv_heads=shape.heads,
            head_dim_qk=width,
            head_dim_vo=v_width,
            causal=call.causal,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        if lse is None:
            self._wrapper.run(q, k, v, out=out)
        elif self._library.ragged_natural_log:
            self._wrapper.run(q, k, v, out=out, lse=lse, return_lse=True, lse_base="ln")
        else:
            self._wrapper.run(q, k, v, out=out, lse=lse, return_lse=True)
            lse.mul_(_LN_2)  # it counts in powers of two (C4)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Say what was being planned when FlashInfer refused; its own errors name its buffers and no more."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise BackendError(f"flashinfer cannot plan {what}: {error}") from error
