"""What a backend keeps of the batches that CUDA graphs were captured for, and those that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Never, TypeVar

import torch

from attnplug.contract.batch import ForwardBatch
from attnplug.contract.plan import BackendId, ForwardMode
from attnplug.declare.errors import BackendError, PlanError
from attnplug.declare.problem import GraphLevel

_UNIFORM = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
_ANY = (*_UNIFORM, ForwardMode.EXTEND, ForwardMode.MIXED)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The most that memory for graphs was made for.

    ``pages`` is the width of a page table; ``None`` where no memory depends on it. At level ``ALWAYS`` an extend is
    captured too, whose ``extend_seq_lens`` say at each replay whose rows are whose.
    """

    max_bs: int
    max_num_tokens: int
    pages: int | None = None
    level: GraphLevel = GraphLevel.UNIFORM

    def check(self, batch: ForwardBatch) -> None:
        """Refuse a batch that cannot be captured."""
        mode, requests, tokens = batch.forward_mode, batch.batch_size, batch.num_tokens
        modes = _ANY if self.level is GraphLevel.ALWAYS else _UNIFORM
        if mode not in modes:
            raise PlanError(f"a batch in mode {mode} cannot be captured, only {', '.join(modes)}")
        read = {"seq_lens": batch.seq_lens, "page_table": batch.page_table}
        if mode not in _UNIFORM:
            if batch.extend_seq_lens is None:
                raise PlanError(f"a captured {mode} needs extend_seq_lens, the new tokens of each request")
            read["extend_seq_lens"] = batch.extend_seq_lens
        for name, tensor in read.items():
            if tensor.dtype is not torch.int32 or tensor.stride(-1) != 1:
                raise PlanError(
                    f"a captured batch has {name} in int32 and without gaps, not in {tensor.dtype} with strides "
                    f"{tensor.stride()}: kernels read it where it lies"
                )
        if mode in _UNIFORM and (not requests or tokens % requests or (mode.is_decode and tokens != requests)):
            raise PlanError(
                f"a captured batch has equally many rows of every request, not {tokens} rows for {requests} requests"
            )
        if not requests or not tokens:
            raise PlanError(f"a captured batch has requests and rows, not {requests} and {tokens}")
        if requests > self.max_bs or tokens > self.max_num_tokens:
            self._refuse_size(batch)
        if self.pages is not None and batch.page_table.shape[1] > self.pages:
            self._refuse_size(batch)

    def _refuse_size(self, batch: ForwardBatch) -> Never:
        pages = "" if self.pages is None else f" and {batch.page_table.shape[1]} pages a request"
        most = "" if self.pages is None else f" and {self.pages} pages"
        raise PlanError(
            f"a batch of {batch.batch_size} requests, {batch.num_tokens} rows{pages} does not fit the memory for "
            f"graphs, of {self.max_bs} requests, {self.max_num_tokens} rows{most}"
        )


class Captures(Generic[T]):
    """What a backend keeps of each captured shape of batch: made once, and found again at every replay."""

    def __init__(self, backend: BackendId) -> None:
        self._backend = backend
        self._limits: GraphLimits | None = None
        self._kept: dict[tuple[ForwardMode, int, int, int], T] = {}

    def reserve(self, limits: GraphLimits) -> None:
        """Say how much memory there is, before it is made; once."""
        if self._limits is not None:
            raise BackendError(
                f"backend {self._backend.name} has its memory for CUDA graphs already, and captured graphs hold its "
                "addresses; call init_cuda_graph_state once, with the most that will be captured"
            )
        self._limits = limits

    def find(self, batch: ForwardBatch, in_capture: bool, capture: Callable[[ForwardBatch], T]) -> T:
        """What ``capture`` made of a batch of this shape, or now makes of this one, if it is being captured."""
        if self._limits is None:
            raise BackendError(
                f"backend {self._backend.name} has no memory for CUDA graphs; call init_cuda_graph_state first"
            )
        shape = (batch.forward_mode, batch.batch_size, batch.num_tokens, batch.page_table.shape[1])
        if shape not in self._kept:
            self._limits.check(batch)
            if not in_capture:
                raise PlanError(
                    f"a {shape[0]} batch of {shape[1]} requests, {shape[2]} rows and {shape[3]} pages a request was "
                    "never captured; plan it with in_capture=True and capture it first"
                )
            self._kept[shape] = capture(batch)
        return self._kept[shape]
