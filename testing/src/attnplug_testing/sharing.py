"""CPU backends that share a role: one is chosen per batch by measured times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from attnplug_tune.table_writing import versions_of, write_tables

from attnplug import AttentionBackend, DType, Role
from attnplug.auto.schedule import BackendSchedule, BatchPoint
from attnplug.auto.table_store import table_path
from attnplug.declare.options import parse_options
from attnplug.host import HostContext, Selection, build_selection, load_model, load_registry
from attnplug.machine.hardware import CPU
from attnplug.tables import MeasuredShape, MeasuredTable, Measurement

LONGEST = 48
"""KV length from which on the fastest backend no longer changes."""

TOYS = """
import torch
from attnplug import BackendSpec, Capabilities, ExtendPath, Plan, PlannedAttention, hookimpl
from attnplug.declare.version import CONTRACT_VERSION
from attnplug.torch_native.backend import TorchNativeBackend


class Double(PlannedAttention):
    "Attends request by request, in float64."

    def plan(self, geometry):
        return Plan.of(self.backend_id, geometry, geometry, geometry.new_slots())

    def attend(self, q, layer, plan, new, extras):
        geometry, pools, out, end = plan.metadata, self.context.pools, [], 0
        for request, (count, total) in enumerate(zip(geometry.query_lens, geometry.kv_lens)):
            mine, end = q[end : end + count].double(), end + count
            slots = geometry.cache_slots([request])[0, :total]
            if layer.mla is None:
                k, v = pools.mha.read_keys(layer.layer_id, slots), pools.mha.read_values(layer.layer_id, slots)
            else:
                k = pools.mla.read_rows(layer.layer_id, slots)[:, None]
                v = k[..., : layer.mla.kv_lora_rank]
            k, v = (each.double().repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
            scores = torch.einsum("qhd,khd->hqk", mine, k) * layer.scale
            late = torch.arange(total)[None] > torch.arange(total - count, total)[:, None]
            weights = scores.masked_fill(late, float("-inf")).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(out).to(q.dtype)


class Other(TorchNativeBackend):
    pass


def spec(name, factory, **more):
    can = Capabilities(kinds={"mha", "mla"}, devices={"cpu"}, dtypes={"float32"}, max_speculative_tokens=8, **more)
    return BackendSpec(name=name, summary="of a test", contract=CONTRACT_VERSION, factory=f"{__name__}:{factory}",
                       capabilities=can)


@hookimpl
def attnplug_backends():
    return [spec("double", "Double"), spec("other", "Other", mla_extend=set(ExtendPath), trees=True,
                                           roles={"prefill", "decode", "draft"})]
"""


def alternating(*names: str, longest: int = LONGEST) -> BackendSchedule:
    """Return a schedule whose fastest backend changes with every length."""
    return BackendSchedule(
        {
            name: {BatchPoint(1, length, 1): 1.0 + (length % len(names) != number) for length in range(1, longest)}
            for number, name in enumerate(names)
        }
    )


def shared(selection: Selection, *names: str, longest: int = LONGEST) -> Selection:
    """Return the selection with these installed backends in every role for full attention."""
    choices, options = dict(selection.choices), dict(selection.options)
    for role in choices.keys() - {Role.LINEAR}:
        by_name = {candidate.backend.spec.name: candidate.backend for candidate in choices[role].candidates}
        schedule = alternating(*names, longest=longest)
        choices[role] = replace(choices[role], chosen=by_name[names[0]], schedule=schedule)
        options = {name: parse_options(name, by_name[name].spec.options, {}) for name in names} | options
    return replace(selection, choices=choices, options=options)


def share(monkeypatch: pytest.MonkeyPatch, *names: str, longest: int = LONGEST) -> None:
    """Let every engine run on these backends alternately, as a ranking of measured times would."""

    def build(selection: Selection, context: HostContext) -> AttentionBackend:
        return build_selection(shared(selection, *names, longest=longest), context)

    for module in ("execution.runner", "speculation.draft_runner"):
        monkeypatch.setattr(f"attnplug_engine.{module}.build_selection", build)


def tune(model: str, *names: str) -> None:
    """Write measured tables by which these backends alternate in decoding the model."""
    processor, registry = next(iter(CPU.detect())), load_registry()
    (shape,) = {
        MeasuredShape.of(layer, (DType.FLOAT32, DType.FLOAT32), 64, False) for layer in load_model(model).layers
    }
    tables = [
        MeasuredTable(
            processor.name,
            processor.sm,
            name,
            Role.DECODE,
            shape,
            tuple(Measurement(*point, time, time, time) for point, time in times.items()),
            versions_of(registry.backends[name], processor),
            "2026-11-16",
        )
        for name, times in alternating(*names).times.items()
    ]
    write_tables(table_path(processor), tables)
