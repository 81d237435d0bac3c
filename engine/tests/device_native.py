"""``torch_native`` as a backend that takes no lengths from the host: what its plan is made of, it reads on the device.

A plan keeps copies of the lengths and pages that it was made over, as the schedules of kernels do. Trees are read when
the batch runs, where the planned geometry has them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from refilled_native import RefilledNative, build
from torch import Tensor

from attnplug import ForwardBatch, ForwardExtras, Geometry, LayerSpec, Plan
from attnplug.torch_native.backend import TorchNativeBackend


class Read:
    """Record of a planner's reads on the device."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = replace(geometry, page_table=geometry.page_table.clone(), seq_lens=geometry.seq_lens.clone())
        self.groups: Any = None


class DeviceNative(RefilledNative):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.claims = replace(self.claims, needs_cpu_seq_lens=False)
        self.seen: list[str] = []

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        self.seen.append(str(batch.forward_mode))
        return super().init_forward_metadata(batch)

    def plan(self, geometry: Geometry) -> Plan:
        if geometry.host is not None:
            return super().plan(geometry)
        self.planned += 1
        return Plan.of(self.backend_id, geometry, Read(geometry), geometry.new_slots())

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: Any, extras: ForwardExtras) -> Tensor:
        read = plan.metadata
        if not isinstance(read, Read):
            return super().attend(q, layer, plan, new, extras)
        if read.groups is None:
            read.groups = TorchNativeBackend.plan(self, read.geometry.with_host_lengths()).metadata
        return super().attend(q, layer, replace(plan, metadata=read.groups), new, extras)


def on_device_lengths(monkeypatch: pytest.MonkeyPatch, kind: type[DeviceNative] = DeviceNative) -> None:
    """Build every ``torch_native`` as one that takes no lengths from the host."""
    for module in ("execution.runner", "speculation.draft_runner"):
        monkeypatch.setattr(f"attnplug_engine.{module}.build_selection", partial(build, kind=kind))
