"""The wrapper. It defines a route and nothing else."""

from __future__ import annotations

from fossil_mha.backend import FossilMHA

from attnplug import BackendContext, ForwardBatch, LayerSpec
from attnplug.host import ForwardingBackend


class FossilWrapper(ForwardingBackend):
    def route(self, batch: ForwardBatch | None, layer: LayerSpec | None) -> tuple[str, ...]:
        return ("decode",) if batch is not None and batch.forward_mode.is_decode else ("prefill",)


def build(context: BackendContext) -> FossilWrapper:
    return FossilWrapper(context.name, {"prefill": FossilMHA(context), "decode": FossilMHA(context)})
