"""Plugin for tests: ``torch_native`` with queries of absorbed MLA layers in two parts, and only so."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnplug import BackendSpec, ForwardExtras, LayerSpec, Plan, hookimpl
from attnplug.torch_native import plugin as native
from attnplug.torch_native.backend import TorchNativeBackend


class InParts(TorchNativeBackend):
    """Counts on the host to pass both parts."""

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: object, extras: ForwardExtras) -> Tensor:
        if layer.mla is not None:
            assert extras.q_rope is not None, "the host concatenated the queries"
            q = torch.cat((q, extras.q_rope), -1)
        return super().attend(q, layer, plan, None, extras)


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    (spec,) = native.attnplug_backends()
    own = spec.capabilities
    return [
        replace(
            spec, name="in_parts", factory="in_parts:InParts", capabilities=replace(own, extras=own.extras | {"q_rope"})
        )
    ]
