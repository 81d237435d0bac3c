"""What captured steps read: a few numbers per request at fixed addresses, sent by one copy a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attnplug_engine.request import Request, Step
from attnplug_engine.sampler import Sampler
from attnplug_engine.sampling_batch import SamplingArrays, SamplingBatch

_STAGES = 2
"""Copies of the host's side: one is filled while the other may still be on its way."""


class StepInputs:
    """The inputs of captured decode steps of up to ``size`` requests.

    ``rows`` are the requests' rows of the slot table. A padded request has ``padding_row``, ``fill`` as its length and
    -1 as its state slot.
    """

    def __init__(self, size: int, padding_row: int, fill: int, device: torch.device) -> None:
        self._padding_row, self._fill = padding_row, fill
        memory = torch.zeros(_nbytes(size), dtype=torch.uint8, device=device)
        self._memory = memory
        self.rows, self.state_slots, self.seq_lens, sampling = _fields(memory, size)
        self._sampling = SamplingBatch.over(sampling, size)
        self._stages = [_Stage(size, pinned=device.type == "cuda") for _ in range(_STAGES)]
        self._pad(self._stages[0], 0, size)
        self._send(self._stages[0])

    def sampling(self, size: int) -> SamplingBatch:
        """How the tokens of the first requests are chosen."""
        return self._sampling.rows(slice(0, size))

    def fill(self, step: Step, size: int, sampler: Sampler) -> None:
        """Send a decode step's requests, and padded ones up to ``size``. Waits for nothing but an older copy."""
        self._stages.append(stage := self._stages.pop(0))
        stage.wait()
        count, starts = len(step.entries), np.array([entry.position for entry in step.entries], np.int32)
        stage.rows[:count] = step.rows
        stage.seq_lens[:count] = starts + 1
        if step.state_slots:
            stage.state_slots[:count] = step.state_slots
        requests = [entry.request for entry in step.entries]
        if requests != stage.requests:  # each compares by identity
            stage.prompts = np.array([len(request.prompt) for request in requests], np.int32)
            stage.sampling.fill(requests, sampler.seed_of, (starts + 1 - stage.prompts).tolist())
            stage.requests = requests
        else:
            stage.sampling.position[:count] = starts + 1 - stage.prompts
        self._pad(stage, count, size)
        self._send(stage)

    def _pad(self, stage: _Stage, count: int, size: int) -> None:
        stage.rows[count:size] = self._padding_row
        stage.seq_lens[count:size] = self._fill
        stage.state_slots[count:size] = -1

    def _send(self, stage: _Stage) -> None:
        self._memory.copy_(stage.memory, non_blocking=True)
        stage.mark()


class _Stage:
    """The host's side of the inputs."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.memory = torch.zeros(_nbytes(size), dtype=torch.uint8, pin_memory=pinned)
        *fields, sampling = (field.numpy() for field in _fields(self.memory, size))
        self.rows, self.state_slots, self.seq_lens = fields
        self.sampling = SamplingArrays.over(sampling, size)
        self.requests: Sequence[Request] = ()
        self.prompts = np.zeros(0, np.int32)
        self._sent = torch.cuda.Event() if pinned else None

    def mark(self) -> None:
        """What was asked of the device so far reads this memory."""
        if self._sent is not None:
            self._sent.record()

    def wait(self) -> None:
        """Until the device has read it; with at most one other step under way it has."""
        if self._sent is not None:
            self._sent.synchronize()


def _nbytes(size: int) -> int:
    return size * (8 + 8 + SamplingArrays.ROW_BYTES + 4)


def _fields(memory: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows and state slots in int64, lengths in int32, and the memory of sampling parameters, which comes before the
    lengths: it is aligned to 8 bytes."""
    rows, slots = memory[: 16 * size].view(torch.int64).split(size)
    sampling = 16 * size + SamplingArrays.ROW_BYTES * size
    return rows, slots, memory[sampling:].view(torch.int32), memory[16 * size : sampling]
