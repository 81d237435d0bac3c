"""For kernel authors: a backend in thirty lines, checked by the conformance kit, and a bug that the kit names.

Needs attnplug-conformance. ``examples/acme_attention`` is a complete package; this script declares a backend without
installing one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnplug import (
    AttentionKind,
    BackendContext,
    BackendSpec,
    CacheLayout,
    Capabilities,
    DType,
    ForwardExtras,
    Geometry,
    LayerSpec,
    NewRows,
    Plan,
    PlannedAttention,
)
from attnplug.host import load_registry
from attnplug_conformance import Subject
from attnplug_conformance.report import lines
from attnplug_conformance.runner import run_checks
from attnplug_conformance.testing import claimed_checks


class Mine(PlannedAttention):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        assert context.pools.mha is not None
        self.pool = context.pools.mha

    def plan(self, geometry: Geometry) -> Plan:
        lens = enumerate(geometry.query_lens)
        requests = [(new, geometry.cache_slots([request])[0]) for request, new in lens if new]
        return Plan.of(self.backend_id, geometry, requests, geometry.new_slots())

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        queries = torch.split(q, [count for count, _ in plan.metadata])
        pairs = zip(queries, plan.metadata, strict=True)
        return torch.cat([self.kernel(q, slots, layer) for q, (_, slots) in pairs])

    def kernel(self, q: Tensor, slots: Tensor, layer: LayerSpec) -> Tensor:  # put your kernel here
        read = self.pool.read_keys(layer.layer_id, slots), self.pool.read_values(layer.layer_id, slots)
        keys, values = (rows.float().repeat_interleave(q.shape[1] // rows.shape[1], 1) for rows in read)
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * self.scale(layer)
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(slots) - len(q) + 1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)

    def scale(self, layer: LayerSpec) -> float:
        return layer.scale


class WrongScale(Mine):
    def scale(self, layer: LayerSpec) -> float:
        return float(layer.head_dim**-0.5)  # the model's scale may be another one


def check(factory: str, prefix: str = "mha.") -> list[str]:
    """Return the failures and the verdict of the kit's quick checks on a backend that is not installed."""
    capabilities = Capabilities(
        kinds=frozenset({AttentionKind.MHA}),
        devices=frozenset({"cpu"}),
        dtypes=frozenset({DType.FLOAT32}),
        layouts=frozenset(CacheLayout),
    )
    spec = BackendSpec("mine", "one request at a time", contract="1.0", factory=factory, capabilities=capabilities)
    registered = replace(load_registry().backends["torch_native"], spec=spec)
    subject = replace(Subject.installed(registered, "cpu"), budget=0)  # no random cases
    chosen = [each for each in claimed_checks(subject, quick=True) if each.name.startswith(prefix)]
    report = lines(run_checks(subject, chosen, quick=True, floors=False))
    return [line for line in report if line.startswith(("FAILED", "mine conforms", "mine does not"))]


def main() -> None:
    print(check(f"{__name__}:Mine", "mha.extend.")[-1])
    failures = check(f"{__name__}:WrongScale", "mha.extend.")
    print(failures[0])
    print(failures[-1])


if __name__ == "__main__":
    import write_kernels  # a factory is found by the name of its module

    write_kernels.main()
