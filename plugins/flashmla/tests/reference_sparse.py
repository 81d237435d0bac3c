"""FlashMLA's sparse kernels in plain torch, as strict as these are: a result on them tests planning, and no kernel."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import AttentionKind, BackendContext, DType, ForwardMode, LayerSpec, MLAPool
from attnplug_flashmla.sparse_backend import SparseFlashMLABackend
from attnplug_sparse.plugin import FP8_DS_MLA
from attnplug_testing.batches import declaring
from attnplug_testing.kernel_scene import DEEPSEEK, KernelCase, Lengths
from attnplug_testing.sparse_scene import sparse

DECODE, EXTEND, VERIFY = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY
PACKED, ROWS = FP8_DS_MLA.name, DType.BFLOAT16


def case(
    lengths: Lengths, mode: ForwardMode, kv_dtype: DType = ROWS, page_size: int = 64, **changes: Any
) -> KernelCase:
    """A case in bfloat16 with pages and rows that the kernels take."""
    given = {"dims": DEEPSEEK, "dtype": DType.BFLOAT16, "kv_dtype": kv_dtype, "index": (8, 128), **changes}
    return sparse(lengths, mode, page_size, **given)


def build(context: BackendContext) -> SparseFlashMLABackend:
    """Real kernels with a GPU, otherwise reference kernels, and an index in Triton's interpreter."""
    context = declaring(context, "flashmla_sparse")
    if context.device.type != "cpu":
        return SparseFlashMLABackend(context)
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, for which Triton compiles: nothing is interpreted beside it in one process")
    os.environ["TRITON_INTERPRET"] = "1"  # for importers outside of this folder's conftest
    return SparseFlashMLABackend(context, kernels=ReferenceSparse(), index_multiprocessors=3)


@dataclass
class Made:
    """A schedule, with the shape for which it was first used."""

    shape: tuple[int, ...] | None = None


class ReferenceSparse:
    """Reference that takes only arguments that the real kernels take. A row of index -1 gives zero and +inf."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        """Rows of each call."""

    def schedule(self) -> Made:
        return Made()

    def attend_packed(
        self, q: Tensor, cache: Tensor, slots: Tensor, scale: float, schedule: Any
    ) -> tuple[Tensor, Tensor]:
        pages = len(cache)
        assert cache.shape == (pages, 64, 1, 656) and cache.dtype is torch.uint8 and cache.stride(1) == 656
        shape = (*q.shape[:2], slots.shape[1])
        assert schedule.shape in (None, shape), "a schedule for another shape"
        schedule.shape = shape
        layer = LayerSpec(0, AttentionKind.MLA, 1, 1, 192, 128, 1.0, mla=DEEPSEEK)
        pool = MLAPool.over(
            [layer],
            {0: cache.squeeze(2)},
            "pages tokens dim",
            page_size=64,
            dtype=FP8_DS_MLA,
        )
        return self._attend(q, slots, scale, pages * 64, lambda where: pool.read_rows(0, where))

    def attend_rows(self, q: Tensor, cache: Tensor, slots: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        assert cache.shape == (len(cache), 1, 576) and cache.dtype is torch.bfloat16
        return self._attend(q, slots, scale, len(cache), lambda where: cache[where, 0])

    def _attend(self, q: Tensor, slots: Tensor, scale: float, limit: int, read: Any) -> tuple[Tensor, Tensor]:
        rows, heads, dim = q.shape
        assert heads in (64, 128) and dim == 576 and q.dtype is torch.bfloat16 and q.is_contiguous()
        assert slots.dtype is torch.int32 and slots.is_contiguous()
        assert len(slots) == rows > 0 and slots.shape[1] % 128 == 0 and slots.shape[1] > 0
        assert bool(((slots >= -1) & (slots < limit)).all()), "the decode kernel checks no bound"
        self.calls.append(rows)
        out, lse = torch.zeros(rows, heads, 512, dtype=q.dtype), torch.full((rows, heads), float("inf"))
        for row, where in enumerate(slots.long()):
            if len(chosen := where[where >= 0]):
                keys = read(chosen).double()
                logits = q[row].double() @ keys.T * scale
                out[row], lse[row] = (logits.softmax(-1) @ keys[:, :512]).to(q.dtype), logits.logsumexp(-1).float()
        return out, lse
