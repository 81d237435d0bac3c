"""What a user can set, as ``triton_mla.NAME=VALUE``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TritonMLAOptions:
    batch_invariant: bool = False
    """Divide every request by its own length alone: its result has the same bits whatever else is in the batch.

    Costs time where lengths differ or requests are few, and memory for partial results of every request.
    """
