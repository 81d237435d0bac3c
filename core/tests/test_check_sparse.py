"""``attnplug check`` on sparse layers: what a backend selects is judged by scores, then what it attends to (A10)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attnplug import BackendContext, BackendError, DType, ModelSpec, SelectedPositions, SelectedSlots
from attnplug.cli.scene import CONTEXT, STEPS
from attnplug.cli.sparse_scene import SPARSE_LAYERS, SparseScene
from attnplug.host import HostContext, Limits, TorchNativeBackend
from support.batches import capabilities

Change = Callable[[TorchNativeBackend, SelectedPositions], SelectedPositions | SelectedSlots]


def staged(change: Change) -> tuple[SparseScene, TorchNativeBackend]:
    """A scene, and torch_native with another answer to what it selects."""

    class Changed(TorchNativeBackend):
        def choose(self, index, layer, dims, plan):
            self.plan_in_use = plan
            return change(self, super().choose(index, layer, dims, plan))

    (layer,) = SPARSE_LAYERS.values()
    scene = SparseScene(layer, DType.FLOAT32, DType.FLOAT32, 16, torch.device("cpu"), 0)
    host = HostContext(
        model=ModelSpec("m", "check", (layer,), CONTEXT),
        device=scene.device,
        dtype=scene.dtype,
        kv_dtype=DType.FLOAT32,
        page_size=16,
        limits=Limits(3, 256, CONTEXT),
        pools=scene.pools,
        workspace=scene.workspace,
    )
    context: BackendContext = host.for_backend("torch_native", capabilities("torch_native"))
    return scene, Changed(context)


def slots(backend: TorchNativeBackend, selected: SelectedPositions) -> SelectedSlots:
    rows = torch.full_like(selected.positions, -1)
    for group in backend.plan_in_use.metadata.groups:
        mine = slice(None) if group.rows is None else group.rows
        positions = selected.positions[mine].long()
        found = group.slots.repeat_interleave(group.extent.queries, 0).gather(1, positions.clamp(min=0))
        rows[mine] = found.masked_fill(positions < 0, -1).int()
    return SelectedSlots(rows)


@pytest.mark.parametrize("change", [lambda _, selected: selected, slots], ids=["positions", "slots"])
def test_the_best_rows_hold_by_positions_or_by_slots(change):
    scene, backend = staged(change)
    assert all(scene.run("sparse", step, backend, True).holds for step in STEPS)


def first_rows(_backend: TorchNativeBackend, selected: SelectedPositions) -> SelectedPositions:
    places = torch.arange(selected.positions.shape[1], dtype=torch.int32)
    return SelectedPositions(torch.where(selected.positions < 0, -1, places))


WRONG: dict[str, tuple[Change, str]] = {
    "the oldest": (first_rows, "scores fall short of the best by"),
    "none": (
        lambda _, selected: SelectedPositions(torch.full_like(selected.positions, -1)),
        "not 1 distinct ones from",
    ),
    "later ones": (lambda _, selected: SelectedPositions(selected.positions + 500), "not 1 distinct ones from 0 to 0"),
    "one twice": (lambda _, selected: SelectedPositions(selected.positions.clamp(max=7)), "distinct ones from 0 to"),
    "others' slots": (lambda _, selected: SelectedSlots(selected.positions), "distinct ones from 0 to"),
}


@pytest.mark.parametrize(("change", "problem"), WRONG.values(), ids=WRONG)
def test_other_rows_are_a_fault_that_says_whose(change, problem):
    scene, backend = staged(change)
    with pytest.raises(BackendError, match=problem):
        scene.run("sparse", STEPS[0], backend, False)


def test_a_layer_that_attends_to_all_rows_is_a_fault():
    scene, backend = staged(lambda _, selected: selected)
    backend._attend_selected = lambda q, slots, layer, softmax: (torch.zeros(*q.shape[:2], 512), None)
    assert not all(scene.run("sparse", step, backend, False).holds for step in STEPS)
