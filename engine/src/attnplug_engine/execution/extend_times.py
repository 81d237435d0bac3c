"""Measured attention times of prefill steps, captured and eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from attnplug import ExtendPath, ForwardMode, ModelSpec, Role
from attnplug.auto.ranking import Ranking
from attnplug.auto.schedule import ExtendSchedule
from attnplug.host import ForwardingBackend, ModelAttention
from attnplug.registry.selection import Selection
from attnplug_engine.scheduling.step import Step


class ExtendTimes:
    """Attention times of a step in all layers of a model, interpolated between measured batches.

    ``captured`` has the times of the backend of captured extends, on the path that it takes there, and ``eager`` those
    of the backends that share prefill, also for mixed batches that run whole unless ``mixed`` has other ones.
    ``decodes_apart`` is that of the model's attention: decodes apart take at most as long as captured ones.
    """

    def __init__(
        self,
        captured: ExtendSchedule,
        eager: ExtendSchedule,
        layers: int,
        decodes_apart: Callable[[Sequence[int], Sequence[int]], int],
        mixed: ExtendSchedule | None = None,
    ) -> None:
        self._captured, self._eager, self._mixed, self._layers = captured, eager, mixed or eager, layers
        self._decodes_apart = decodes_apart

    def seconds(self, step: Step) -> tuple[float, float]:
        """Seconds of a step's attention if it is captured, and if the fastest backends run it eagerly."""
        counts = [len(ids) for _, _, ids, _ in step.entries]
        lengths = [position + len(ids) for _, position, ids, _ in step.entries]
        is_mixed = step.mode is ForwardMode.MIXED
        first = self._decodes_apart(counts, lengths) if is_mixed else 0
        eagerly = self._mixed if is_mixed and not first else self._eager
        captured = self._time(self._captured, counts, lengths)
        eager = self._time(eagerly, counts[first:], lengths[first:])
        if first:
            eager += self._time(self._captured, counts[:first], lengths[:first])
        return captured, eager

    def _time(self, by: ExtendSchedule, counts: Sequence[int], lengths: Sequence[int]) -> float:
        return 1e-6 * self._layers * min(by.expected_extend(counts, lengths).values())


def measured_extends(
    ranking: Ranking, selection: Selection, attention: ModelAttention, model: ModelSpec
) -> ExtendTimes | None:
    """Return the times of a model's extends; None if those of captured or of eager ones were not measured.

    Captured extends of MLA run absorbed: other paths need exact lengths on the host. So do mixed batches that run
    whole, if the backend can.
    """
    backend = attention.backend
    if Role.PREFILL not in selection.choices:
        return None
    eager = selection.serving(Role.PREFILL)
    name = backend.captured_extends if isinstance(backend, ForwardingBackend) else None
    everyone = chain.from_iterable(map(selection.serving, selection.choices))
    capturing = eager if name is None else [each for each in everyone if each.spec.name == name][:1]
    path = ExtendPath.ABSORBED if any(layer.mla is not None for layer in model.full_layers) else None
    absorbed = replace(selection.problem, mla_extend=path)
    captured = ranking.measured(capturing, Role.PREFILL, absorbed)[1]
    measured = ranking.measured(eager, Role.PREFILL, selection.problem)[1]
    if not captured or not measured:
        return None
    mixed = ranking.measured(eager, Role.PREFILL, absorbed)[1] if path in backend.claims.mla_extend else {}
    layers = len(model.full_layers)
    whole = ExtendSchedule(mixed) if mixed else None
    return ExtendTimes(ExtendSchedule(captured), ExtendSchedule(measured), layers, attention.decodes_apart, whole)
