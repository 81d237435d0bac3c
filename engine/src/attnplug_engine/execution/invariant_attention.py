"""Attention of a model with batch-invariant arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from attnplug.contract.backend import AttentionBackend
from attnplug.host import ExtendPolicy, ModelAttention
from attnplug.kv.pools import KVPools
from attnplug_engine.kernels.invariant import suspended


class InvariantAttention(ModelAttention):
    """Model attention whose backend runs outside of the model's arithmetic, with the operators that the kit checks."""

    def __init__(self, backend: AttentionBackend, pools: KVPools, policy: ExtendPolicy | None = None) -> None:
        super().__init__(backend, pools, policy)
        for name in ("attend", "attend_mla", "convolve", "attend_linear", "attend_delta"):
            setattr(self, name, _outside(getattr(self, name)))
        self.hooks = {name: hook if hook is None else _outside(hook) for name, hook in self.hooks.items()}


def _outside(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def outside(*args: Any, **kwargs: Any) -> Any:
        with suspended():
            return run(*args, **kwargs)

    return outside
