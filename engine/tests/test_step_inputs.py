"""Inputs of captured steps: requests, padding and sampling parameters, at fixed addresses."""

from __future__ import annotations

from typing import Any

import torch

from attnplug import ForwardMode
from attnplug_engine.execution.sampler import Sampler
from attnplug_engine.graphs.step_inputs import StepInputs
from attnplug_engine.kernels.sampling_metadata import SamplingMetadata
from attnplug_engine.request import Request, SamplingParams
from attnplug_engine.scheduling.step import PENDING, Step, StepEntry

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [3, 1, 4, 1, 5]]


class TestInputs:
    """Inputs sent by one copy: the staging slots alternate."""

    @staticmethod
    def filled(
        inputs: StepInputs, requests: list[Request], outputs: int, slots: tuple[int, ...] = ()
    ) -> SamplingMetadata:
        entries = [StepEntry(one, len(one.prompt) + outputs - 1, (PENDING,), True) for one in requests]
        rows = tuple(range(5, 5 + len(requests)))
        inputs.fill(Step(ForwardMode.DECODE, tuple(entries), (), rows, slots), 4, Sampler())
        return inputs.sampling(4)

    @staticmethod
    def request(number: int, **sampling: Any) -> Request:
        return Request(number, tuple(PROMPTS[number]), SamplingParams(max_tokens=9, **sampling))

    def test_requests_and_padding(self):
        inputs = StepInputs(4, 9, 3, torch.device("cpu"))
        assert inputs.rows.tolist() == [9] * 4 and inputs.seq_lens.tolist() == [3] * 4
        self.filled(inputs, [self.request(0), self.request(1)], 1, slots=(6, 2))
        assert inputs.rows.tolist() == [5, 6, 9, 9]
        assert inputs.seq_lens.tolist() == [4, 8, 3, 3]
        assert inputs.state_slots.tolist() == [6, 2, -1, -1]

    def test_a_draws_place_moves_on_with_its_request(self):
        inputs, requests = StepInputs(4, 9, 0, torch.device("cpu")), [self.request(0), self.request(1)]
        places = [self.filled(inputs, requests, outputs).position[:2].tolist() for outputs in range(1, 7)]
        assert places == [[outputs, outputs] for outputs in range(1, 7)]

    def test_other_requests_bring_their_own_parameters(self):
        inputs = StepInputs(4, 9, 0, torch.device("cpu"))
        for number in (0, 1, 2, 3) * 2:
            sampling = self.filled(inputs, [self.request(number, temperature=1.0 + number, seed=number)], 2)
            assert sampling.temperature.tolist() == [1.0 + number, 0, 0, 0]
            assert sampling.seed[0] == number and sampling.position[0] == 2
