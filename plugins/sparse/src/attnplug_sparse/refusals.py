"""Limits of the index kernels, as refusals. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from attnplug import Problem, Refusal, RefusalCode, Role

_LIMITS = {"heads": 128, "head_dim": 256, "topk": 8192}


def index_refusals(problem: Problem, role: Role | None) -> Iterator[Refusal]:
    """Yield every reason why a ``SparseIndex`` cannot serve the problem; for the ``check`` of a spec."""
    indexes = () if problem.model is None else problem.model.index_layers
    for name, limit in _LIMITS.items():
        value = max((getattr(layer.indexer, name) for layer in indexes), default=0)
        if value > limit:
            message = f"an index with {name} {value} is not supported, only up to {limit}"
            yield Refusal(RefusalCode.FEATURE, message, value, limit, None if role is None else role.setting)
