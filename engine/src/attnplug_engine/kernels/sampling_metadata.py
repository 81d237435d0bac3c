"""Sampling parameters per row, as the sampling kernels read them. Imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Buffer = TypeVar("Buffer", Tensor, NDArray[np.uint8])


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Sampling parameters of each row: tensors ``[rows]`` on the logits' device."""

    temperature: Tensor
    """float32; 0 is greedy, whatever the others are."""
    top_k: Tensor
    """int32; 0 keeps all."""
    top_p: Tensor
    """float32, above 0."""
    min_p: Tensor
    """float32."""
    seed: Tensor
    """int64."""
    position: Tensor
    """int32: number of output tokens before this one."""

    @staticmethod
    def over(memory: Tensor, rows: int) -> SamplingMetadata:
        """Return views of ``memory [bytes]`` uint8, 8-byte aligned, divided by ``divide_sampling_fields``."""
        seed, temperature, top_p, min_p, top_k, position = divide_sampling_fields(memory, rows)
        return SamplingMetadata(
            temperature.view(torch.float32),
            top_k.view(torch.int32),
            top_p.view(torch.float32),
            min_p.view(torch.float32),
            seed.view(torch.int64),
            position.view(torch.int32),
        )

    def rows(self, which: Tensor | slice) -> SamplingMetadata:
        return SamplingMetadata(
            self.temperature[which],
            self.top_k[which],
            self.top_p[which],
            self.min_p[which],
            self.seed[which],
            self.position[which],
        )

    def cpu(self) -> SamplingMetadata:
        return SamplingMetadata(*(getattr(self, each.name).cpu() for each in fields(self)))


def divide_sampling_fields(memory: Buffer, rows: int) -> list[Buffer]:
    """Divide memory into seeds, which need 8-byte alignment and come first, and five fields of 4 bytes per row."""
    ends = [0, *(8 * rows + 4 * rows * field for field in range(6))]
    return [memory[start:end] for start, end in pairwise(ends)]
