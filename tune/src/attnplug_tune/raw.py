"""Chains of direct calls of a backend's library, on the caches that the backend is measured on."""

from __future__ import annotations

from collections.abc import Callable

from attnplug.registry.loading import find_entry_points, guarded, load_entry_point
from attnplug_tune.clock import Chain
from attnplug_tune.raw_calls import RAW_GROUP, RawCalls, RawScene
from attnplug_tune.stage import Stage

RAW = "raw "
"""Prefix of the name of a side that is a backend's library."""


def raw_calls(backend: str) -> Callable[[RawScene], RawCalls | None] | None:
    """Load the entry point for direct calls of a backend's library; None if no package has one."""
    for point in find_entry_points(RAW_GROUP)[0]:
        if point.name == backend:
            with guarded():
                made: Callable[[RawScene], RawCalls | None] = load_entry_point(point)
            return made
    return None


def raw_chain(backend: str, side: str, stage: Stage) -> Chain | None:
    """Chain of a library's calls over the caches of a stage; None if the library has no such call."""
    make, point = raw_calls(backend), stage.task.point
    if make is None or point.decodes:
        return None
    scene = RawScene(
        stage.layers,
        stage.pools,
        stage.page_size,
        stage.page_table,
        stage.lengths,
        point.tokens,
        point.role == "prefill",
        stage.q,
        stage.captured,
    )
    calls = make(scene)
    if calls is None:
        return None

    def run() -> None:
        calls.begin()
        for number in range(stage.calls):
            stage.last = calls.run(number % len(stage.layers))
            if stage.captured:
                stage.link(stage.last)

    return Chain(side, stage.task, stage.calls, run, captured=stage.captured, host_counts=not scene.prefill)
