"""Sampling parameters of a batch, packed on the host for one copy to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from attnplug.machine.runtime import runtime_of
from attnplug_engine.kernels.sampling_metadata import SamplingMetadata, divide_sampling_fields
from attnplug_engine.request import Request

_SMALLEST_TOP_P = 1e-30
_LARGEST_INT = 2**31 - 1
_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 1e-37, 1e30
"""Range of temperatures that float32 can divide by. Lower ones are greedy, higher ones are clamped."""

_RECORD = np.dtype(
    [
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
    ]
)

SeedOf = Callable[[Request], int]
"""Returns the seed of a request, below 2**64."""


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """Host view of ``SamplingMetadata``: arrays over memory that one copy sends to the device."""

    ROW_BYTES: ClassVar[int] = 28

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    position: NDArray[np.int32]

    @staticmethod
    def over(memory: NDArray[np.uint8], rows: int) -> SamplingArrays:
        """Return views of ``memory [bytes]``, which is 8-byte aligned and has ``ROW_BYTES`` per row."""
        seed, temperature, top_p, min_p, top_k, position = divide_sampling_fields(memory, rows)
        return SamplingArrays(
            temperature.view(np.float32),
            top_k.view(np.int32),
            top_p.view(np.float32),
            min_p.view(np.float32),
            seed.view(np.uint64),
            position.view(np.int32),
        )

    def fill(self, requests: Sequence[Request], seed_of: SeedOf, positions: Sequence[int]) -> None:
        """Write the requests' parameters to the first rows; the remaining rows become greedy.

        ``seed_of`` is called once per request: its packed parameters are kept in ``Request.sampling``.
        """
        rows = len(requests)
        self.temperature[rows:] = 0
        packed = b"".join([request.sampling or _pack(request, seed_of) for request in requests])
        records = np.frombuffer(packed, _RECORD)
        self.temperature[:rows] = records["temperature"]
        self.top_k[:rows] = records["top_k"]
        self.top_p[:rows] = records["top_p"]
        self.min_p[:rows] = records["min_p"]
        self.seed[:rows] = records["seed"]
        self.position[:rows] = positions


def _pack(request: Request, seed_of: SeedOf) -> bytes:
    params = request.params
    temperature = min(params.temperature, _HIGHEST_TEMPERATURE) if params.temperature >= _LOWEST_TEMPERATURE else 0.0
    top_p = max(params.top_p, _SMALLEST_TOP_P)
    record = (seed_of(request), temperature, top_p, params.min_p, min(params.top_k, _LARGEST_INT))
    request.sampling = np.array([record], _RECORD).tobytes()
    return request.sampling


def sampling_metadata(
    requests: Sequence[Request],
    seed_of: SeedOf,
    device: torch.device,
    positions: Sequence[int] | None = None,
) -> SamplingMetadata:
    """Return the sampling metadata of one step's requests, sent by one copy to the device.

    ``positions`` are the numbers of output tokens, pending ones included; by default those that are known.
    """
    rows = len(requests)
    staging = torch.empty(SamplingArrays.ROW_BYTES * rows, dtype=torch.uint8, pin_memory=runtime_of(device).pinned)
    if positions is None:
        positions = [len(request.output) for request in requests]
    SamplingArrays.over(staging.numpy(), rows).fill(requests, seed_of, positions)
    return SamplingMetadata.over(staging.to(device, non_blocking=True), rows)
