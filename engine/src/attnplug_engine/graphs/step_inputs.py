"""Inputs of captured decode steps: a few numbers per request at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attnplug_engine import kernels
from attnplug_engine.execution.sampler import Sampler
from attnplug_engine.execution.sampling_inputs import SamplingArrays
from attnplug_engine.graphs.mailbox import Mailbox
from attnplug_engine.graphs.staging import Staging
from attnplug_engine.kernels.sampling_metadata import SamplingMetadata
from attnplug_engine.request import Request
from attnplug_engine.scheduling.step import Step


class StepInputs:
    """Inputs of captured decode steps of up to ``size`` requests.

    ``rows`` are the requests' rows of the slot table. A padded request has ``padding_row``, the length ``fill`` and the
    state slot -1. If Triton kernels are usable, the step itself reads the inputs from ``mailbox``; otherwise one copy
    per step sends them.
    """

    def __init__(self, size: int, padding_row: int, fill: int, device: torch.device) -> None:
        self._padding_row, self._fill = padding_row, fill
        self._channel: Mailbox[_StepHost] | Staging[_StepHost]
        self.mailbox: Mailbox[_StepHost] | None = None
        if kernels.usable(device):
            self._channel = self.mailbox = Mailbox(_nbytes(size), size, device, lambda memory: _StepHost(memory, size))
            for host in self.mailbox.host_slots:
                self._pad(host, 0, size)
            self.mailbox.memory.copy_(self.mailbox.input_slots[0])
        else:
            self._channel = Staging(_nbytes(size), device, lambda memory: _StepHost(memory, size))
            with self._channel.write() as host:
                self._pad(host, 0, size)
        self.rows, self.state_slots, self.seq_lens, sampling = _fields(self._channel.memory, size)
        self._sampling = SamplingMetadata.over(sampling, size)

    def sampling(self, size: int) -> SamplingMetadata:
        """Sampling parameters of the first ``size`` requests."""
        return self._sampling.rows(slice(0, size))

    def fill(self, step: Step, size: int, sampler: Sampler) -> None:
        """Send a decode step's requests, padded up to ``size``. Waits only for an older step."""
        count, starts = len(step.entries), np.array([entry.position for entry in step.entries], np.int32)
        with self._channel.write() as host:
            host.rows[:count] = step.rows
            host.seq_lens[:count] = starts + 1
            if step.state_slots:
                host.state_slots[:count] = step.state_slots
            requests = [entry.request for entry in step.entries]
            if requests != host.requests:  # requests compare by identity
                host.prompts = np.array([len(request.prompt) for request in requests], np.int32)
                host.sampling.fill(requests, sampler.seed_of, (starts + 1 - host.prompts).tolist())
                host.requests = requests
            else:
                host.sampling.position[:count] = starts + 1 - host.prompts
            self._pad(host, count, size)

    def _pad(self, host: _StepHost, count: int, size: int) -> None:
        host.rows[count:size] = self._padding_row
        host.seq_lens[count:size] = self._fill
        host.state_slots[count:size] = -1


class _StepHost:
    """Host view of the inputs, and the requests whose sampling parameters it holds."""

    def __init__(self, memory: Tensor, size: int) -> None:
        *fields, sampling = (field.numpy() for field in _fields(memory, size))
        self.rows, self.state_slots, self.seq_lens = fields
        self.sampling = SamplingArrays.over(sampling, size)
        self.requests: Sequence[Request] = ()
        self.prompts = np.zeros(0, np.int32)


def _nbytes(size: int) -> int:
    return size * (8 + 8 + SamplingArrays.ROW_BYTES + 4)


def _fields(memory: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the memory: rows and state slots in int64, lengths in int32, and the bytes of the sampling parameters,
    which precede the lengths because they are aligned to 8 bytes."""
    rows, slots = memory[: 16 * size].view(torch.int64).split(size)
    sampling = 16 * size + SamplingArrays.ROW_BYTES * size
    return rows, slots, memory[sampling:].view(torch.int32), memory[16 * size : sampling]
