"""FlashInfer's CuTe DSL kernel as a ``DecodeKernel`` of ``trtllm_mla``'s backend."""

from __future__ import annotations

from torch import Tensor

from attnplug import MLAShape, Workspace
from attnplug_trtllm_mla.kernels import MAX_REQUESTS, LatentPages, TRTLLMLibrary, run_decode
from attnplug_trtllm_mla.planner import DecodeCall


class CuteDSLDecode:
    """``trtllm_batch_decode_with_kv_cache_mla`` with the CuTe DSL kernel.

    It takes up to 128 heads. ``scratch`` may contain anything. All versions return natural logarithms.
    """

    def __init__(self, library: TRTLLMLibrary, shape: MLAShape, scratch: Workspace) -> None:
        self._library, self._shape, self._scratch = library, shape, scratch
        self.heads = shape.heads

    def max_requests(self, queries: int, with_lse: bool) -> int:
        tiles = -(-queries * self.heads // 128)
        return min(MAX_REQUESTS, 65535 // tiles)  # limit of a CUDA grid's second dimension

    def run(self, q: Tensor, pages: LatentPages, call: DecodeCall, out: Tensor, lse: Tensor | None) -> None:
        run_decode(
            self._library,
            self._shape,
            q,
            pages,
            call,
            out,
            lse,
            workspace_buffer=self._scratch.buffer,
            backend="cute-dsl",
            cute_dsl_impl="monolithic",  # the implementation that returns a log-sum-exp
        )
