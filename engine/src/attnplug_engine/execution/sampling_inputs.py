"""How the tokens of a batch are chosen: the requests' parameters as tensors, and on the host as what one copy sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from attnplug_engine.kernels.sampling_metadata import SamplingMetadata, divide_sampling_fields
from attnplug_engine.request import Request

_SMALLEST_SHARE = 1e-30
_LARGEST_INT = 2**31 - 1
_LOWEST_HEAT, _HIGHEST_HEAT = 1e-37, 1e30
"""Temperatures below are greedy, and none is above: what float32 divides by."""

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
"""What a request's draws are seeded with, below 2**64."""


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """The host's side of a ``SamplingMetadata``: views of memory that one copy takes to the device."""

    ROW_BYTES: ClassVar[int] = 28

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    position: NDArray[np.int32]

    @staticmethod
    def over(memory: NDArray[np.uint8], rows: int) -> SamplingArrays:
        """Views of ``memory [bytes]``, at a multiple of 8; it takes ``ROW_BYTES`` a row."""
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
        """Write what the requests ask for into the first rows; rows that are left over become greedy.

        ``seed_of`` is asked once a request: what it asks for is packed then, and kept with it.
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
    heat = min(params.temperature, _HIGHEST_HEAT) if params.temperature >= _LOWEST_HEAT else 0.0
    share = max(params.top_p, _SMALLEST_SHARE)
    record = (seed_of(request), heat, share, params.min_p, min(params.top_k, _LARGEST_INT))
    request.sampling = np.array([record], _RECORD).tobytes()
    return request.sampling


def sampling_metadata(
    requests: Sequence[Request],
    seed_of: SeedOf,
    device: torch.device,
    positions: Sequence[int] | None = None,
) -> SamplingMetadata:
    """Of requests for one step, by one copy to the device.

    ``positions`` counts output tokens that are not known yet, too; without it, those that are known.
    """
    rows = len(requests)
    staging = torch.empty(SamplingArrays.ROW_BYTES * rows, dtype=torch.uint8, pin_memory=device.type == "cuda")
    if positions is None:
        positions = [len(request.output) for request in requests]
    SamplingArrays.over(staging.numpy(), rows).fill(requests, seed_of, positions)
    return SamplingMetadata.over(staging.to(device, non_blocking=True), rows)
