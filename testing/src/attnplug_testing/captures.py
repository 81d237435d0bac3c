"""Checks of captured batches for any plugin: replays with other batches, and several captures side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnplug_conformance.checks.graphs import Capture
from attnplug_testing.devices import nothing_waits
from attnplug_testing.kernel_scene import KernelCase, KernelScene, check_replay, replayed


def replay_scenes(
    make: Callable[[KernelCase], KernelScene], case: KernelCase, new: int, prefixes: Sequence[Sequence[int]], room: int
) -> tuple[KernelScene, list[KernelScene]]:
    """Return a scene to capture on and the scenes to replay.

    The first has a pool for four requests of up to ``room`` cached rows. Each item of ``prefixes`` holds the cached
    rows of one replayed batch's requests.
    """
    stage = make(replace(case, lengths=((room, new),) * 4))
    others = [
        make(replace(case, lengths=tuple((prefix, new) for prefix in some), seed=seed))
        for seed, some in enumerate(prefixes)
    ]
    return stage, others


def full(others: Sequence[KernelScene]) -> list[KernelScene]:
    """Return the scenes with as many requests as the capture."""
    return [other for other in others if len(other.totals) == 4]


def check_replays(stage: KernelScene, others: Sequence[KernelScene], most: float | None = None) -> None:
    """Replay one capture for every other scene."""
    capture = Capture(stage).reserve().capture()
    for other in others:
        check_replay(capture, other, most)


def check_two_shapes(stage: KernelScene, others: Sequence[KernelScene]) -> None:
    """Check that captures of two batch sizes, which share memory, do not disturb each other."""
    large = Capture(stage).reserve().capture()
    small = Capture(stage, 0, large.attention, requests=2).capture()
    alone = [replayed(large, other).clone() for other in full(others)]
    for other, wanted in zip(full(others), alone, strict=True):
        replayed(small, next(other for other in others if len(other.totals) <= 2))
        assert torch.equal(replayed(large, other), wanted)


def check_second_capture(stage: KernelScene, other: KernelScene) -> None:
    """Check that two captures of one shape share a plan while each graph reads its own batch's memory."""
    first = Capture(stage).reserve().capture()
    second = Capture(stage, 0, first.attention).capture()
    assert first.plan is second.plan
    first.batch.geometry.page_table.fill_(1 << 30)
    check_replay(second, other)


def check_host_slots(stage: KernelScene, other: KernelScene) -> None:
    """Check that a replay writes new rows to the slot mapping that the host has filled in by then."""
    capture = Capture(stage).reserve()
    slots = torch.full((4,), -1, dtype=torch.int64, device=stage.device)
    capture.batch.geometry = replace(capture.batch.geometry, slots=slots)
    capture.capture()
    replayed(capture, other)
    assert stage.written() == sum(other.totals) - 4
    slots.copy_(other.batch().geometry.new_slots())
    check_replay(capture, other)


def check_copied_slots(stage: KernelScene) -> None:
    """Check that the host's slot mapping is copied inside the graph."""
    capture = Capture(stage).reserve()
    slots = torch.tensor([64, -1, 7, -1], device=stage.device)
    capture.batch.geometry = replace(capture.batch.geometry, slots=slots)
    capture.capture()
    planned = capture.plan.new_slots
    assert planned is not None and planned.tolist() == slots.tolist() and planned is not slots
    slots.copy_(torch.tensor([-1, 3, -1, 9]))
    capture.attention.refill(capture.batch)
    refilled = capture.plan.new_slots
    assert refilled is not None and refilled.tolist() == [-1, 3, -1, 9]


def check_overtaking(stage: KernelScene, others: Sequence[KernelScene]) -> None:
    """Check, on a GPU, replays with different lengths that are queued while the device is busy."""
    capture = Capture(stage).reserve().capture()
    ready = [_ready(capture, other) for other in full(others)]
    alone = [replay() for replay in ready]
    busy = torch.randn(8192, 8192, device=stage.device)
    for _ in range(20):
        busy = busy @ busy / 8192
    assert not torch.cuda.current_stream().query()
    with nothing_waits("cuda"):
        queued = [replay() for replay in ready * 3]
    for found, wanted in zip(queued, alone * 3, strict=True):
        assert torch.equal(found, wanted)


def _ready(capture: Capture, other: KernelScene) -> Callable[[], Tensor]:
    """Copy a batch's inputs to the device; return a function that replays the capture with them."""
    copies = capture.copies(other)

    def replay() -> Tensor:
        for target, source in copies:
            target.copy_(source)
        return capture.replay().clone()

    return replay
