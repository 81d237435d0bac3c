"""A backend with a Triton kernel, and kernels of a library that cannot run on fake tensors."""

import sys

import numpy as np
import torch
import triton
import triton.language as tl

from attnplug import AttentionKind, BackendError, Capabilities, DType, GraphLevel, Plan, PlannedAttention, Role
from attnplug.registry import registry
from attnplug_testing.plugins import bringing, entry_point, spec

torch.library.define("opaque::schedule", "(Tensor lens) -> Tensor")
torch.library.define("opaque::attend", "(Tensor q, Tensor schedule) -> Tensor")


@triton.jit
def double(source, target, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, 2 * tl.load(source + place))


class OpaqueBackend(PlannedAttention):
    """Schedules and attends by operators without a fake implementation, or by a library that reads host memory."""

    by_dlpack = False

    def plan(self, geometry):
        slots = geometry.new_slots()
        return Plan.of(self.backend_id, geometry, self._schedule(geometry), slots)

    def capture(self, geometry, memory):
        return self.plan(geometry)

    def refill(self, plan, geometry):
        rows = torch.empty(64, device=geometry.device)
        double[(1,)](rows, rows, BLOCK=64)
        plan.metadata.copy_(self._schedule(geometry))

    def _schedule(self, geometry):
        if self.by_dlpack:
            try:
                return np.from_dlpack(torch.zeros(4, dtype=torch.int32)).sum()
            except BufferError as error:
                raise BackendError(f"the library cannot plan: {error}") from error
        return torch.ops.opaque.schedule(geometry.seq_lens)

    def attend(self, q, layer, plan, new, extras):
        doubled = torch.empty_like(q)
        double[(1,)](q, doubled, BLOCK=16)
        return torch.ops.opaque.attend(doubled, plan.metadata)


def install(how: str) -> None:
    """Add the plugin, as if its package were installed."""
    OpaqueBackend.by_dlpack = how == "dlpack"
    capabilities = Capabilities(
        kinds=frozenset({AttentionKind.MHA}),
        devices=frozenset({"cuda"}),
        dtypes=frozenset({DType.BFLOAT16}),
        roles=frozenset({Role.PREFILL, Role.DECODE}),
        cuda_graph=GraphLevel.DECODE,
    )
    plugin = bringing(spec("opaque", factory="opaque_backend:OpaqueBackend", capabilities=capabilities))
    sys.modules["opaque_plugin"] = plugin
    find = registry.find_entry_points

    def find_all():
        points, broken = find()
        return [*points, entry_point("opaque", "opaque_plugin", "opaque-attention", "1.0")], broken

    registry.find_entry_points = find_all
