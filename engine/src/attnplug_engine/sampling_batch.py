"""How the tokens of a batch are chosen: the requests' parameters as tensors, and on the host as what one copy sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnplug_engine.request import Request

_SMALLEST_SHARE = 1e-30
_LARGEST_INT = 2**31 - 1
_LOWEST_HEAT, _HIGHEST_HEAT = 1e-37, 3e38
"""Temperatures below are greedy, and none is above: what float32 divides by."""

Buffer = TypeVar("Buffer", Tensor, NDArray[np.uint8])


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How the token of each row is chosen: tensors ``[rows]`` on the logits' device."""

    temperature: Tensor
    """float32; 0 is greedy, whatever the others say."""
    top_k: Tensor
    """int32; 0 keeps all."""
    top_p: Tensor
    """float32, above 0."""
    min_p: Tensor
    """float32."""
    seed: Tensor
    """int64."""
    position: Tensor
    """int32: the number of output tokens before this one."""

    @staticmethod
    def of(
        requests: Sequence[Request], seeds: Sequence[int], device: torch.device, positions: Sequence[int] | None = None
    ) -> SamplingBatch:
        """Of requests for one step, by one copy to the device.

        ``positions`` counts output tokens that are not known yet, too; without it, those that are known.
        """
        rows = len(requests)
        staging = torch.empty(SamplingArrays.ROW_BYTES * rows, dtype=torch.uint8, pin_memory=device.type == "cuda")
        if positions is None:
            positions = [len(request.output) for request in requests]
        SamplingArrays.over(staging.numpy(), rows).fill(requests, seeds, positions)
        return SamplingBatch.over(staging.to(device, non_blocking=True), rows)

    @staticmethod
    def over(memory: Tensor, rows: int) -> SamplingBatch:
        """Views of ``memory [bytes]``, of type uint8 and at a multiple of 8, as ``SamplingArrays.over`` divides it."""
        seed, temperature, top_p, min_p, top_k, position = _divided(memory, rows)
        return SamplingBatch(
            temperature.view(torch.float32),
            top_k.view(torch.int32),
            top_p.view(torch.float32),
            min_p.view(torch.float32),
            seed.view(torch.int64),
            position.view(torch.int32),
        )

    def rows(self, which: Tensor) -> SamplingBatch:
        return SamplingBatch(
            self.temperature[which],
            self.top_k[which],
            self.top_p[which],
            self.min_p[which],
            self.seed[which],
            self.position[which],
        )


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """The host's side of a ``SamplingBatch``: views of memory that one copy takes to the device."""

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
        seed, temperature, top_p, min_p, top_k, position = _divided(memory, rows)
        return SamplingArrays(
            temperature.view(np.float32),
            top_k.view(np.int32),
            top_p.view(np.float32),
            min_p.view(np.float32),
            seed.view(np.uint64),
            position.view(np.int32),
        )

    def fill(self, requests: Sequence[Request], seeds: Sequence[int], positions: Sequence[int]) -> None:
        """Write what the requests ask for into the first rows; rows that are left over become greedy.

        Where all are greedy only temperatures are written, since nothing reads the rest.
        """
        rows = len(requests)
        self.temperature[rows:] = 0
        every = [request.params for request in requests]
        heat = [params.temperature for params in every]
        if not any(heat):
            self.temperature[:rows] = 0
            return
        self.temperature[:rows] = [min(one, _HIGHEST_HEAT) if one >= _LOWEST_HEAT else 0.0 for one in heat]
        self.top_k[:rows] = [min(params.top_k, _LARGEST_INT) for params in every]
        self.top_p[:rows] = [max(params.top_p, _SMALLEST_SHARE) for params in every]
        self.min_p[:rows] = [params.min_p for params in every]
        self.seed[:rows] = np.array(seeds, dtype=np.uint64)
        self.position[:rows] = positions


def _divided(memory: Buffer, rows: int) -> list[Buffer]:
    """Seeds first, which need to lie at multiples of 8, then five fields of 4 bytes a row."""
    ends = [0, *(8 * rows + 4 * rows * field for field in range(6))]
    return [memory[start:end] for start, end in pairwise(ends)]
