"""Limits of the index kernels, as refusals. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from attnplug import DType, Problem, Refusal, RefusalCode, Role, Setting

_FP8_SM = 89
"""First compute capability for which Triton converts from float8_e4m3fn."""
_LIMITS = {"heads": 128, "head_dim": 256, "topk": 8192}


def index_refusals(problem: Problem, role: Role | None) -> Iterator[Refusal]:
    """Yield every reason why a ``SparseIndex`` cannot serve the problem; for the ``check`` of a spec."""
    if problem.index_dtype == DType.FLOAT8_E4M3 and problem.sm is not None and problem.sm < _FP8_SM:
        message = f"fp8 index keys are read on SM {_FP8_SM} or newer, this is SM {problem.sm}"
        allowed = [DType.BFLOAT16.value, DType.FLOAT16.value]
        yield Refusal(RefusalCode.KV_DTYPE, message, str(problem.index_dtype), allowed, Setting.INDEX_DTYPE)
    indexes = () if problem.model is None else problem.model.index_layers
    for name, limit in _LIMITS.items():
        value = max((getattr(layer.indexer, name) for layer in indexes), default=0)
        if value > limit:
            message = f"an index with {name} {value} is not supported, only up to {limit}"
            yield Refusal(RefusalCode.FEATURE, message, value, limit, None if role is None else role.setting)
