"""What captured steps read: a few numbers per request at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attnplug.kernels import to_device
from attnplug_engine import kernels
from attnplug_engine.letters import Letters
from attnplug_engine.request import PENDING, Request, Step
from attnplug_engine.sampler import Sampler
from attnplug_engine.sampling_batch import SamplingArrays, SamplingBatch
from attnplug_engine.staging import Staging


class StepInputs:
    """The inputs of captured decode steps of up to ``size`` requests.

    ``rows`` are the requests' rows of the slot table. A padded request has ``padding_row``, ``fill`` as its length and
    -1 as its state slot. Where kernels can run they are ``letters``, which the step itself takes; else one copy a step
    sends them.
    """

    def __init__(self, size: int, padding_row: int, fill: int, device: torch.device) -> None:
        self._padding_row, self._fill = padding_row, fill
        self._way: Letters[_Host] | Staging[_Host]
        self.letters: Letters[_Host] | None = None
        if kernels.usable(device):
            self._way = self.letters = Letters(_nbytes(size), size, device, lambda memory: _Host(memory, size))
            for host in self.letters.hosts:
                self._pad(host, 0, size)
            self.letters.memory.copy_(self.letters.inbox[0])
        else:
            self._way = Staging(_nbytes(size), device, lambda memory: _Host(memory, size))
            with self._way.sent() as host:
                self._pad(host, 0, size)
        self.rows, self.state_slots, self.seq_lens, sampling = _fields(self._way.memory, size)
        self._sampling = SamplingBatch.over(sampling, size)

    def sampling(self, size: int) -> SamplingBatch:
        """How the tokens of the first requests are chosen."""
        return self._sampling.rows(slice(0, size))

    def fill(self, step: Step, size: int, sampler: Sampler) -> None:
        """Send a decode step's requests, and padded ones up to ``size``. Waits for nothing but an older step."""
        count, starts = len(step.entries), np.array([entry.position for entry in step.entries], np.int32)
        with self._way.sent() as host:
            host.rows[:count] = step.rows
            host.seq_lens[:count] = starts + 1
            if step.state_slots:
                host.state_slots[:count] = step.state_slots
            requests = [entry.request for entry in step.entries]
            if requests != host.requests:  # each compares by identity
                host.prompts = np.array([len(request.prompt) for request in requests], np.int32)
                host.sampling.fill(requests, sampler.seed_of, (starts + 1 - host.prompts).tolist())
                host.requests = requests
            else:
                host.sampling.position[:count] = starts + 1 - host.prompts
            self._pad(host, count, size)

    def _pad(self, host: _Host, count: int, size: int) -> None:
        host.rows[count:size] = self._padding_row
        host.seq_lens[count:size] = self._fill
        host.state_slots[count:size] = -1


class _Host:
    """The host's side of the inputs, and whose they are."""

    def __init__(self, memory: Tensor, size: int) -> None:
        *fields, sampling = (field.numpy() for field in _fields(memory, size))
        self.rows, self.state_slots, self.seq_lens = fields
        self.sampling = SamplingArrays.over(sampling, size)
        self.requests: Sequence[Request] = ()
        self.prompts = np.zeros(0, np.int32)


def put_newest(ids: Tensor, step: Step, newest: Tensor) -> None:
    """Put the tokens of a step that the host does not know yet in their places of ``ids``. ``newest`` has them by the
    rows of the slot table."""
    places, rows, place = [], [], 0
    for row, entry in zip(step.rows, step.entries, strict=True):
        if entry.token_ids[0] == PENDING:
            places.append(place)
            rows.append(row)
        place += len(entry.token_ids)
    if places:
        where, who = to_device([places, rows], ids.device).unbind()
        ids.index_copy_(0, where, newest.index_select(0, who))


def _nbytes(size: int) -> int:
    return size * (8 + 8 + SamplingArrays.ROW_BYTES + 4)


def _fields(memory: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows and state slots in int64, lengths in int32, and the memory of sampling parameters, which comes before the
    lengths: it is aligned to 8 bytes."""
    rows, slots = memory[: 16 * size].view(torch.int64).split(size)
    sampling = 16 * size + SamplingArrays.ROW_BYTES * size
    return rows, slots, memory[sampling:].view(torch.int32), memory[16 * size : sampling]
