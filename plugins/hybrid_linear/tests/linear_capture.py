"""A captured batch of linear layers, for tests that replay it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attnplug import ForwardMode
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
    """A captured batch of fixed memory. Nobody is in it until something is replayed: all its requests are padded."""

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
        for layer_id, inputs in step.inputs.items():
            for target, source in zip(_tensors(own.inputs[layer_id]), _tensors(inputs), strict=True):
                target.copy_(source)
        for layer_id, x in step.conv_rows.items():
            own.conv_rows[layer_id].copy_(x)
        assert self.scene.backend.init_forward_metadata_out_graph(own.batch) is self.plan
        return step

    def launch(self, step: Step) -> Step:
        own = self.step
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        out, conv_out = ({key: each.clone() for key, each in outs.items()} for outs in (own.out, own.conv_out))
        return replace(step, batch=own.batch, out=out, conv_out=conv_out)


def _tensors(inputs: LinearInputs) -> list[torch.Tensor]:
    given = (inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta)
    return [tensor for tensor in given if tensor is not None]
