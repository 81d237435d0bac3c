"""Plugin for tests: ``torch_native`` under two names. Each writes a line per planned batch to a file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from attnplug import BackendSpec, ForwardBatch, Plan, hookimpl
from attnplug.torch_native import plugin as native
from attnplug.torch_native.backend import TorchNativeBackend


class Twin(TorchNativeBackend):
    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        with Path(os.environ["TWINS_PLANS"]).open("a") as plans:
            plans.write(f"{batch.forward_mode} {self.backend_id.name}\n")
        return super().init_forward_metadata(batch)


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    (spec,) = native.attnplug_backends()
    return [replace(spec, name=name, factory="twins:Twin") for name in ("alpha", "beta")]
