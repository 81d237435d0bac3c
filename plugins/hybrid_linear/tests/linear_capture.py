"""A captured batch of linear layers, for tests that replay it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attnplug import ForwardBatch, ForwardMode
from attnplug.linear import LinearInputs
from attnplug_testing.batches import with_plan
from linear_scene import PADDED, LinearScene, Step
from linear_settings import SETTINGS

in_every_graph_setting = pytest.mark.parametrize(
    "setting", [setting for setting in SETTINGS if setting.id.startswith("fla")]
)


def graph_of(device: torch.device, run: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
    """Run once, and capture it on a GPU. Without one a replay is the same calls again."""
    run()
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


class Capture:
    """A captured batch with fixed memory. All its requests are padded until the first replay."""

    def __init__(
        self, scene: LinearScene, mode: ForwardMode, requests: int, per_request: int, *, lane: int = 0
    ) -> None:
        self.scene = scene
        self.step = scene.step(mode, [PADDED] * requests, [per_request] * requests, lane=lane, captured=True)
        self.plan = scene.backend.init_forward_metadata_out_graph(self.step.batch, in_capture=True)
        with_plan(self.step.batch, self.plan)
        self.graph = graph_of(scene.device, self.run)

    def run(self) -> None:
        self.scene.backend.init_forward_metadata_in_graph(self.step.batch)
        self.scene.forward(self.step)

    def replay(self, members: list[int]) -> Step:
        """A step of these requests through the captured memory."""
        return self.launch(self.load(members))

    def load(self, members: list[int]) -> Step:
        """Plan a step of these requests, and copy it to the captured memory."""
        own = self.step
        step = self.scene.step(own.batch.forward_mode, members, own.new)
        own.batch.geometry.state_slots.copy_(step.batch.geometry.state_slots)
        self.put(step)
        assert self.scene.backend.init_forward_metadata_out_graph(own.batch) is self.plan
        return step

    def put(self, step: Step) -> None:
        """Copy a step's inputs to the captured memory."""
        own = self.step
        for layer_id, inputs in step.inputs.items():
            for target, source in zip(_tensors(own.inputs[layer_id]), _tensors(inputs), strict=True):
                target.copy_(source)
        for layer_id, x in step.conv_rows.items():
            own.conv_rows[layer_id].copy_(x)

    def launch(self, step: Step) -> Step:
        own = self.step
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        out, conv_out = ({key: each.clone() for key, each in outs.items()} for outs in (own.out, own.conv_out))
        return replace(step, batch=own.batch, out=out, conv_out=conv_out)


class CapturedExtend(Capture):
    """A captured extend of ``rows`` rows and up to ``requests`` requests, whose lengths differ from replay to replay.
    Rows behind the last request's are padding, and hold NaN."""

    def __init__(self, scene: LinearScene, requests: int, rows: int, *, lane: int = 0) -> None:
        self.scene = scene
        self.step = scene.step(ForwardMode.EXTEND, [PADDED] * requests, [0] * requests, lane=lane, padding=rows)
        geometry = self.step.batch.geometry
        new_lens = torch.zeros(requests, dtype=torch.int32, device=scene.device)
        whole = replace(geometry, rows=rows, max_new=rows, new_lens=new_lens, host=None, captured=True)
        self.step.batch = ForwardBatch(whole, self.step.batch.input_ids)
        self.plan = scene.backend.init_forward_metadata_out_graph(self.step.batch, in_capture=True)
        with_plan(self.step.batch, self.plan)
        self.graph = graph_of(scene.device, self.run)

    def replay_lengths(self, members: list[int], new: list[int]) -> Step:
        """A step of these requests with these new tokens through the captured memory."""
        own, requests = self.step.batch.geometry, self.step.batch.batch_size
        step = self.scene.step(ForwardMode.EXTEND, members, new, padding=own.rows - sum(new))
        own.state_slots.fill_(PADDED)
        own.new_lens.zero_()
        own.state_slots[: len(new)] = step.batch.geometry.state_slots
        own.new_lens[: len(new)] = torch.tensor(new, dtype=torch.int32)
        assert len(new) <= requests
        self.put(step)
        assert self.scene.backend.init_forward_metadata_out_graph(self.step.batch) is self.plan
        return self.launch(step)


def _tensors(inputs: LinearInputs) -> list[torch.Tensor]:
    given = (inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta)
    return [tensor for tensor in given if tensor is not None]
