"""Inputs of captured rounds: a few numbers per request at fixed addresses, sent by one copy per round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attnplug.host import TypicalLens
from attnplug_engine.execution.sampling_inputs import SamplingArrays, SeedOf
from attnplug_engine.graphs.staging import Staging
from attnplug_engine.kernels.sampling_metadata import SamplingMetadata
from attnplug_engine.request import Request
from attnplug_engine.scheduling.step import PENDING, StepEntry
from attnplug_engine.speculation.round_state import Members

_NUMBERS = 5
"""int64 numbers per request: row, newest token, committed rows, prompt length, state slot."""


class RoundInputs:
    """Inputs of captured rounds of up to ``size`` requests.

    A padded request has the slot table row ``padding_row``, and no state.
    """

    def __init__(self, size: int, padding_row: int, device: torch.device) -> None:
        self._padding_row = padding_row
        self._staging = Staging(_nbytes(size), device, lambda memory: _RoundHost(memory, size))
        self._numbers, sampling = _fields(self._staging.memory, size)
        self._sampling = SamplingMetadata.over(sampling, size)
        with self._staging.write() as host:
            self._pad(host, 0)

    def members(
        self, size: int, page_table: Tensor, longest: int, *, has_states: bool, typical: TypicalLens | None = None
    ) -> Members:
        """Return the first ``size`` requests, at the addresses that captured rounds read."""
        rows, known, committed, prompts, slots = (numbers[:size] for numbers in self._numbers)
        sampling = self._sampling.rows(slice(0, size))
        states = slots if has_states else None
        return Members(rows, known, committed, prompts, sampling, page_table[:size], longest, states, typical)

    def fill(self, entries: Sequence[StepEntry], rows: Sequence[int], slots: Sequence[int], seed_of: SeedOf) -> None:
        """Send a round's requests, followed by padded ones. Waits only for an older copy."""
        count, requests = len(entries), [entry.request for entry in entries]
        with self._staging.write() as host:
            host.numbers[0, :count] = rows
            host.numbers[1, :count] = [-1 if token == PENDING else token for _, _, (token,), _ in entries]
            host.numbers[2, :count] = [entry.position for entry in entries]
            if slots:
                host.numbers[4, :count] = slots
            if requests != host.requests:  # requests compare by identity
                host.numbers[3, :count] = [len(request.prompt) for request in requests]
                host.sampling.fill(requests, seed_of, [0] * count)
                host.requests = requests
            self._pad(host, count)

    def _pad(self, host: _RoundHost, count: int) -> None:
        for number, value in enumerate((self._padding_row, 0, 0, 0, -1)):
            host.numbers[number, count:] = value


class _RoundHost:
    """Host view of the inputs, and the requests whose sampling parameters it holds."""

    def __init__(self, memory: Tensor, size: int) -> None:
        numbers, sampling = _fields(memory, size)
        self.numbers = numbers.numpy()
        self.sampling = SamplingArrays.over(sampling.numpy().view(np.uint8), size)
        self.requests: Sequence[Request] = ()


def _nbytes(size: int) -> int:
    return size * (8 * _NUMBERS + SamplingArrays.ROW_BYTES)


def _fields(memory: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Split the memory: numbers ``[5, size]`` in int64, and the bytes of the sampling parameters."""
    end = 8 * _NUMBERS * size
    return memory[:end].view(torch.int64).view(_NUMBERS, size), memory[end:]
