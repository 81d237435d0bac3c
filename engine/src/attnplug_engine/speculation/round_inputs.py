"""What captured rounds read: a few numbers per request at fixed addresses, sent by one copy a round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attnplug_engine.request import PENDING, Request, StepEntry
from attnplug_engine.sampling_batch import SamplingArrays, SamplingBatch, SeedOf
from attnplug_engine.speculation.state import Members

_NUMBERS = 5
"""int64 for each request: row, newest token, committed rows, prompt, state slot."""
_STAGES = 2
"""Copies of the host's side: one is filled while the other may still be on its way."""


class RoundInputs:
    """The inputs of captured rounds of up to ``size`` requests.

    A padded request has ``padding_row`` as its row of the slot table, and no state.
    """

    def __init__(self, size: int, padding_row: int, device: torch.device) -> None:
        self._size, self._padding_row = size, padding_row
        self._memory = torch.zeros(_nbytes(size), dtype=torch.uint8, device=device)
        self._numbers, sampling = _fields(self._memory, size)
        self._sampling = SamplingBatch.over(sampling, size)
        self._stages = [_Stage(size, pinned=device.type == "cuda") for _ in range(_STAGES)]
        self._pad(self._stages[0], 0)
        self._send(self._stages[0])

    def members(self, size: int, page_table: Tensor, longest: int, *, has_states: bool) -> Members:
        """The first ``size`` requests, where captured rounds read them."""
        rows, known, committed, prompts, slots = (numbers[:size] for numbers in self._numbers)
        sampling = self._sampling.rows(slice(0, size))
        return Members(
            rows, known, committed, prompts, sampling, page_table[:size], longest, slots if has_states else None
        )

    def fill(self, entries: Sequence[StepEntry], rows: Sequence[int], slots: Sequence[int], seed_of: SeedOf) -> None:
        """Send a round's requests, and padded ones after them. Waits for nothing but an older copy."""
        self._stages.append(stage := self._stages.pop(0))
        stage.wait()
        count = len(entries)
        stage.numbers[0, :count] = rows
        stage.numbers[1, :count] = [-1 if token == PENDING else token for _, _, (token,), _ in entries]
        stage.numbers[2, :count] = [entry.position for entry in entries]
        if slots:
            stage.numbers[4, :count] = slots
        requests = [entry.request for entry in entries]
        if requests != stage.requests:  # each compares by identity
            stage.numbers[3, :count] = [len(request.prompt) for request in requests]
            stage.sampling.fill(requests, seed_of, [0] * count)
            stage.requests = requests
        self._pad(stage, count)
        self._send(stage)

    def _pad(self, stage: _Stage, count: int) -> None:
        for number, value in enumerate((self._padding_row, 0, 0, 0, -1)):
            stage.numbers[number, count:] = value

    def _send(self, stage: _Stage) -> None:
        self._memory.copy_(stage.memory, non_blocking=True)
        stage.mark()


class _Stage:
    """The host's side of the inputs."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.memory = torch.zeros(_nbytes(size), dtype=torch.uint8, pin_memory=pinned)
        numbers, sampling = _fields(self.memory, size)
        self.numbers = numbers.numpy()
        self.sampling = SamplingArrays.over(sampling.numpy().view(np.uint8), size)
        self.requests: Sequence[Request] = ()
        self._sent = torch.cuda.Event() if pinned else None

    def mark(self) -> None:
        """What was asked of the device so far reads this memory."""
        if self._sent is not None:
            self._sent.record()

    def wait(self) -> None:
        """Until the device has read it; with at most one other round under way it has."""
        if self._sent is not None:
            self._sent.synchronize()


def _nbytes(size: int) -> int:
    return size * (8 * _NUMBERS + SamplingArrays.ROW_BYTES)


def _fields(memory: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Numbers ``[5, size]`` in int64, and the memory of sampling parameters."""
    end = 8 * _NUMBERS * size
    return memory[:end].view(torch.int64).view(_NUMBERS, size), memory[end:]
