"""The batch of one forward step, and its own plan state (B1, B3, B4)."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnplug.contract.plan import BackendId, ForwardMode, Plan, PlanRecord, claim_plan
from attnplug.declare.errors import PlanError

_TOKEN, _REQUEST, _SHARED, _RESET = "token", "request", "shared", "reset"


def _split(by: str, **arguments: Any) -> Any:
    """A field that :meth:`ForwardBatch.split` knows how to divide."""
    return dataclasses.field(metadata={"split": by}, **arguments)


@dataclass(slots=True, eq=False)
class ForwardBatch:
    """The requests of one step.

    Rows of ``input_ids`` (and of q, k and v) are the requests' new tokens, one request after the other. Lengths
    count cache rows with this step's tokens included. The page table maps a request's logical page to a page of
    the pool; entries behind a request's last page mean nothing and are never read. Lengths on the CPU are a mirror:
    where they are given, planning copies nothing from the device.

    Pools and coordinators are not here: a backend captured its own when it was built (B6).
    """

    forward_mode: ForwardMode = _split(_SHARED)
    input_ids: Tensor = _split(_TOKEN)
    """``[tokens]``; may hold padding rows behind those of the requests."""
    page_table: Tensor = _split(_REQUEST)
    """``[requests, pages]`` int32."""
    seq_lens: Tensor = _split(_REQUEST)
    """``[requests]`` int32: cache rows of each request, its new tokens included."""
    seq_lens_cpu: Tensor | None = _split(_REQUEST, default=None)
    extend_seq_lens: Tensor | None = _split(_REQUEST, default=None)
    """``[requests]`` int32: new tokens of each request. Left out when decoding, where it is 1 for each."""
    extend_seq_lens_cpu: Tensor | None = _split(_REQUEST, default=None)
    positions: Tensor | None = _split(_TOKEN, default=None)
    """``[tokens]``: position of each new token in its request, for the model's embeddings."""
    state_slots: Tensor | None = _split(_REQUEST, default=None)
    """``[requests]`` int64: where each request's linear-attention state lies; -1 for padded requests."""
    captured: bool = _split(_SHARED, default=False)
    """Whether a CUDA graph captures, or replays, what runs this batch: then kernels take no lengths from the host."""
    plan: Plan | None = _split(_RESET, default=None)
    chunk_plan: Plan | None = _split(_RESET, default=None)
    """What ``init_mha_chunk_metadata`` planned, for those backends that have it."""
    mla_plan: Any = _split(_RESET, default=None)
    """The ``MLAExtendPlan`` of a batch whose model has MLA layers."""
    plan_record: PlanRecord | None = _split(_RESET, default=None)

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Rows of ``input_ids``, padding included."""
        return self.input_ids.shape[0]

    def query_lens_cpu(self) -> Tensor:
        """``[requests]`` on the CPU: new tokens of each request. Copies from the device only without a mirror."""
        if self.forward_mode is ForwardMode.DECODE:
            return torch.ones(self.batch_size, dtype=torch.int32)
        if self.extend_seq_lens_cpu is not None:
            return self.extend_seq_lens_cpu
        if self.extend_seq_lens is None:
            if self.batch_size == 0:
                return torch.zeros(0, dtype=torch.int32)
            raise PlanError(
                f"a batch in mode {self.forward_mode} needs extend_seq_lens, the new tokens of each request"
            )
        return self.extend_seq_lens.cpu()

    def kv_lens_cpu(self) -> Tensor:
        """``[requests]`` on the CPU: cache rows of each request. Copies from the device only without a mirror."""
        return self.seq_lens.cpu() if self.seq_lens_cpu is None else self.seq_lens_cpu

    def mark_forward_metadata_ready(self, replan_equivalent: bool = False) -> None:
        """Record that this batch was planned outside the forward path, for the shapes it has now.

        ``replan_equivalent`` says that planning again after a change of shape gives an equivalent plan, so that
        the forward path may do it; without it a marked batch is never planned again behind its planner's back.
        """
        self.plan_record = PlanRecord(self.batch_size, self.num_tokens, replan_equivalent)

    def needs_forward_metadata_init(self) -> bool:
        """Whether the forward path has to plan this batch: the only judge of it."""
        record = self.plan_record
        if record is None:
            return True
        if not record.replan_equivalent:
            return False
        return (record.batch_size, record.num_tokens) != (self.batch_size, self.num_tokens)

    def plan_for(self, planner: BackendId, rows: int, *, decode: bool | None = None) -> Plan:
        """The plan by which a backend's forward may run ``rows`` query rows; see :func:`claim_plan`.

        ``decode`` says which entry asks, ``forward_decode`` or ``forward_extend``, where the two differ.
        """
        if decode not in (None, self.forward_mode.is_decode) and self.forward_mode is not ForwardMode.IDLE:
            called, right = ("decode", "extend") if decode else ("extend", "decode")
            raise PlanError(
                f"forward_{called} of backend {planner.name} was called for a batch in mode {self.forward_mode}; "
                f"call forward_{right}"
            )
        return claim_plan(self.plan, planner, self.forward_mode, rows)

    def split(self, first_requests: int) -> tuple[ForwardBatch, ForwardBatch]:
        """Divide into two batches, the first with this many requests, for two-batch overlap.

        Both start unplanned. A field with a value that nobody said how to divide is refused by name: dropping
        it would be a wrong batch that runs.
        """
        if not 0 <= first_requests <= self.batch_size:
            raise PlanError(f"a batch of {self.batch_size} requests cannot be split after {first_requests}")
        query_lens = self.query_lens_cpu()
        tokens, first_tokens = int(query_lens.sum()), int(query_lens[:first_requests].sum())
        if self.num_tokens != tokens:
            raise PlanError(
                f"a batch of {self.num_tokens} rows for {tokens} tokens holds padding; split it before it is padded"
            )
        halves: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for field in dataclasses.fields(self):
            for half, value in zip(halves, self._divide(field, first_requests, first_tokens), strict=True):
                half[field.name] = value
        return type(self)(**halves[0]), type(self)(**halves[1])

    def _divide(self, field: dataclasses.Field[Any], requests: int, tokens: int) -> tuple[Any, Any]:
        value, by = getattr(self, field.name), field.metadata.get("split")
        if by == _RESET or value is None:
            return None, None
        if by == _SHARED:
            return value, value
        if by == _REQUEST:
            return value[:requests], value[requests:]
        if by == _TOKEN:
            return value[:tokens], value[tokens:]
        raise PlanError(f"field {field.name!r} of {type(self).__name__} has a value, but nobody said how to split it")


_warned = False


def apply_skip_attn_backend_init(batch: ForwardBatch, skip_attn_backend_init: bool | None) -> None:
    """Map the old flag of public entry points onto the marker; ``None`` means it was not given (B3).

    Warns once per process. ``False`` changes nothing: the marker alone decides.
    """
    global _warned
    if skip_attn_backend_init is None:
        return
    if not _warned:
        _warned = True
        warnings.warn(
            "skip_attn_backend_init is deprecated and goes away in contract 2.0; "
            "call batch.mark_forward_metadata_ready() where you plan the batch",
            DeprecationWarning,
            stacklevel=3,
        )
    if skip_attn_backend_init:
        batch.mark_forward_metadata_ready()
