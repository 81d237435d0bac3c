"""Backends without optional hooks, as children of wrappers."""

from __future__ import annotations

from attnplug import Claims, GraphLevel, Plan
from attnplug.contract.batch import BackendId


class Hookless:
    """A backend with the required members only."""

    def __init__(self, name: str = "hookless") -> None:
        self.backend_id, self.claims = BackendId(name), Claims()

    def init_forward_metadata(self, batch):
        return Plan.of(self.backend_id, batch.geometry)

    def forward_extend(self, q, k, v, layer, batch, *, save_kv_cache=True, extras=None):
        raise NotImplementedError

    forward_decode = forward_extend


class Linear:
    """A linear-attention backend that is planned and never run."""

    def __init__(self) -> None:
        self.backend_id, self.claims = BackendId("linear"), Claims(cuda_graph=GraphLevel.ALWAYS)

    def init_forward_metadata(self, batch):
        return Plan.of(self.backend_id, batch.geometry)

    def forward_conv(self, x, weight, bias, layer, batch, silu):
        raise NotImplementedError

    def forward_linear(self, inputs, layer, batch):
        raise NotImplementedError
