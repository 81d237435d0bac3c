"""A backend's library, called directly on the caches that the backend is measured on.

A package names such calls by entry points of the group ``attnplug.raw``: name = the backend, target = a function that
takes a :class:`RawScene` and returns a :class:`RawCalls`, or ``None`` for a scene that the library has no call for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from attnplug.choose.loading import find_entry_points, guarded, load_entry_point
from attnplug.declare.model import LayerSpec
from attnplug.kv import KVPools
from attnplug.tune.clock import Chain
from attnplug.tune.stage import Stage

GROUP = "attnplug.raw"
RAW = "raw "
"""What the name of a side begins with that is a backend's library."""


@dataclass(frozen=True, slots=True, eq=False)
class RawScene:
    """What a library is called with. Its calls read the caches and write no rows.

    ``page_table`` ``[requests, pages]`` int32 and ``lengths``, the cache rows of each request with its ``tokens`` new
    ones, are of the whole batch. ``q`` ``[requests * tokens, heads, width]`` is absorbed for MLA. ``captured`` says
    whether the calls run in a CUDA graph.
    """

    layers: tuple[LayerSpec, ...]
    pools: KVPools
    page_size: int
    page_table: Tensor
    lengths: tuple[int, ...]
    tokens: int
    prefill: bool
    q: Tensor
    captured: bool


class RawCalls(Protocol):
    """A library, planned for a scene."""

    def begin(self) -> None:
        """What comes before the calls of a step, and is captured with them."""
        ...

    def run(self, layer_id: int) -> Tensor:
        """One layer's attention."""
        ...


def raw_calls(backend: str) -> Callable[[RawScene], RawCalls | None] | None:
    """What makes the calls of a backend's library; ``None`` if no package names any."""
    for point in find_entry_points(GROUP)[0]:
        if point.name == backend:
            with guarded():
                made: Callable[[RawScene], RawCalls | None] = load_entry_point(point)
            return made
    return None


def raw_chain(backend: str, side: str, stage: Stage) -> Chain | None:
    """The calls of a backend's library over the caches of a stage."""
    make = raw_calls(backend)
    if make is None:
        return None
    point = stage.task.point
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
