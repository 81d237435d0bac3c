"""User options, set as ``triton_mla.NAME=VALUE``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TritonMLAOptions:
    """Options of the ``triton_mla`` backend."""

    batch_invariant: bool = False
    """Split every request by its own length only: its result has the same bits whatever else is in the batch.

    Costs time if lengths differ or requests are few, and memory for partial results of every request.
    """
