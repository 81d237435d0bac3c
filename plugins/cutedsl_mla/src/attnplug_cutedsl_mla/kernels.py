"""FlashInfer's CuTe DSL kernel, as a decode kernel of trtllm_mla's backend."""

from __future__ import annotations

from torch import Tensor

from attnplug import MLAShape, Workspace
from attnplug_trtllm_mla.kernels import MOST_REQUESTS, Library, Pages, run_decode
from attnplug_trtllm_mla.planner import DecodeCall


class CuteDSLDecode:
    """``trtllm_batch_decode_with_kv_cache_mla`` with the CuTe DSL kernel.

    It takes up to 128 heads, its scratch may hold anything, and every version returns natural logarithms.
    """

    def __init__(self, library: Library, shape: MLAShape, scratch: Workspace) -> None:
        self._library, self._shape, self._scratch = library, shape, scratch
        self.heads = shape.heads

    def most_requests(self, queries: int, with_lse: bool) -> int:
        tiles = -(-queries * self.heads // 128)
        return min(MOST_REQUESTS, 65535 // tiles)  # the second dimension of a CUDA grid has 16 bits

    def run(self, q: Tensor, pages: Pages, call: DecodeCall, out: Tensor, lse: Tensor | None) -> None:
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
            cute_dsl_impl="monolithic",  # the one that returns a log-sum-exp
        )
