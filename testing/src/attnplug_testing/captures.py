"""What a captured batch must bear, for the tests of any plugin: other batches in its place, and other captures."""

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
    """A pool for four requests of up to ``room`` cached rows to capture on, and a batch to replay for each of
    ``prefixes``: its requests' cached rows."""
    stage = make(replace(case, lengths=((room, new),) * 4))
    others = [
        make(replace(case, lengths=tuple((prefix, new) for prefix in some), seed=seed))
        for seed, some in enumerate(prefixes)
    ]
    return stage, others


def full(others: Sequence[KernelScene]) -> list[KernelScene]:
    """The batches of as many requests as are captured."""
    return [other for other in others if len(other.totals) == 4]


def check_replays(stage: KernelScene, others: Sequence[KernelScene], most: float | None = None) -> None:
    """One capture serves all the others."""
    capture = Capture(stage).reserve().capture()
    for other in others:
        check_replay(capture, other, most)


def check_two_shapes(stage: KernelScene, others: Sequence[KernelScene]) -> None:
    """Two shapes captured side by side do not disturb each other: they share memory, and each is planned in its own
    graph."""
    large = Capture(stage).reserve().capture()
    small = Capture(stage, 0, large.attention, requests=2).capture()
    alone = [replayed(large, other).clone() for other in full(others)]
    for other, wanted in zip(full(others), alone, strict=True):
        replayed(small, next(other for other in others if len(other.totals) <= 2))
        assert torch.equal(replayed(large, other), wanted)


def check_second_capture(stage: KernelScene, other: KernelScene) -> None:
    """Two captures of a shape share a plan, and each graph reads the memory that it was captured with."""
    first = Capture(stage).reserve().capture()
    second = Capture(stage, 0, first.attention).capture()
    assert first.plan is second.plan
    first.batch.geometry.page_table.fill_(1 << 30)
    check_replay(second, other)


def check_host_slots(stage: KernelScene, other: KernelScene) -> None:
    """New rows go where a host that owns its slots says, from wherever the batch has them when the graph runs."""
    capture = Capture(stage).reserve()
    slots = torch.full((4,), -1, dtype=torch.int64, device=stage.device)
    capture.batch.geometry = replace(capture.batch.geometry, slots=slots)
    capture.capture()
    replayed(capture, other)
    assert stage.written() == sum(other.totals) - 4
    slots.copy_(other.batch().geometry.new_slots())
    check_replay(capture, other)


def check_copied_slots(stage: KernelScene) -> None:
    """A host's slots are copied inside the graph."""
    capture = Capture(stage).reserve()
    slots = torch.tensor([64, -1, 7, -1], device=stage.device)
    capture.batch.geometry = replace(capture.batch.geometry, slots=slots)
    capture.capture()
    assert capture.plan.new_slots.tolist() == slots.tolist() and capture.plan.new_slots is not slots
    slots.copy_(torch.tensor([-1, 3, -1, 9]))
    capture.attention.refill(capture.batch)
    assert capture.plan.new_slots.tolist() == [-1, 3, -1, 9]


def check_overtaking(stage: KernelScene, others: Sequence[KernelScene]) -> None:
    """On a GPU: replays are queued one after the other, each with lengths of its own, while the device is busy."""
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
    """A batch made ready on the device; call it to replay it there."""
    copies = capture.copies(other)

    def replay() -> Tensor:
        for target, source in copies:
            target.copy_(source)
        return capture.replay().clone()

    return replay
