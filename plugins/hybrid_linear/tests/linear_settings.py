"""Backends of this plugin on their devices: a test of one runs for all.

On a CPU our Triton kernels run in Triton's interpreter. Those of flash-linear-attention cannot, so the recurrence of
the torch backend stands in: planning tests. On a GPU all kernels are real.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import BackendContext, DType
from attnplug.linear import LinearInputs
from attnplug_hybrid_linear.fla_backend import FlaLinearBackend
from attnplug_hybrid_linear.fla_kernels import CHUNK, FlaChunks
from attnplug_hybrid_linear.recurrence import Tokens, advance
from attnplug_hybrid_linear.torch_backend import TorchLinearBackend
from attnplug_testing.devices import DEVICES
from linear_inputs import tokens_of
from linear_scene import LinearScene


class ReferenceChunks:
    """Reference of the library's chunk kernels, with all of their checks."""

    def chunked(self, inputs: LinearInputs, scale: float, chunks: FlaChunks, states: Tensor) -> tuple[Tensor, Tensor]:
        cu_seqlens = chunks.cu_seqlens.tolist()
        assert chunks.cu_seqlens.dtype is torch.int64 and chunks.rows == cu_seqlens[-1]
        assert states.shape[0] == len(cu_seqlens) - 1 and states.dtype is torch.float32 and states.is_contiguous()
        varlen = [slice(*pair) for pair in pairwise(cu_seqlens)]
        indices = [
            [number, place]
            for number, span in enumerate(varlen)
            for place in range(-(-(span.stop - span.start) // CHUNK))
        ]
        if chunks.cu_seqlens_cpu is None:  # captured: the others lie behind the last sequence's end
            self._check_surplus(chunks.indices[len(indices) :].tolist(), len(varlen) - 1, varlen[-1])
        else:
            assert chunks.cu_seqlens_cpu.tolist() == cu_seqlens and chunks.indices.shape[0] == len(indices)
        assert chunks.indices[: len(indices)].tolist() == indices
        outputs, after = [], torch.empty_like(states)
        for number, span in enumerate(varlen):
            if span.start == span.stop:  # a captured sequence may be empty
                after[number] = states[number]
                continue
            own = tokens_of(inputs, span)
            decay, beta = own.log_decay, own.beta
            tokens = Tokens.of(
                *(tensor.unsqueeze(0) for tensor in (own.q, own.k, own.v)),
                decay if decay.dim() == 1 else decay.unsqueeze(0),
                None if beta is None else beta.unsqueeze(0),
                scale=scale,
                normalize=own.normalize,
            )
            out, after[number : number + 1] = advance(tokens, states[number : number + 1])
            outputs.append(out.squeeze(0).to(inputs.v.dtype))
        return torch.cat(outputs), after

    @staticmethod
    def _check_surplus(indices: list[list[int]], last: int, span: slice) -> None:
        assert all(number == last and place * CHUNK >= span.stop - span.start for number, place in indices)


@dataclass(frozen=True)
class Setting:
    """A backend on a device, and how near it comes to float64."""

    name: str
    build: Callable[[BackendContext], Any]
    device: str
    dtype: DType = DType.FLOAT32
    tolerance: float = 1e-5
    state_tolerance: float = 1e-5

    def scene(self, requests: int = 4, **given: Any) -> LinearScene:
        own = {"name": self.name, "build": self.build, "device": self.device, "dtype": self.dtype}
        return LinearScene(requests, **own | given)


def interpreted(context: BackendContext) -> FlaLinearBackend:
    return FlaLinearBackend(context, ReferenceChunks())


TORCH = Setting("torch", TorchLinearBackend, "cpu")
INTERPRETED = Setting("fla", interpreted, "cpu")
_CUDA = DEVICES[1].marks
SETTINGS = [
    pytest.param(TORCH, id="torch-cpu"),
    pytest.param(Setting("torch", TorchLinearBackend, "cuda"), id="torch-cuda", marks=_CUDA),
    pytest.param(INTERPRETED, id="fla-planning-cpu"),
    # Inside a chunk the library multiplies in bfloat16, so states differ as well: on an H200 by up to 1.3e-2.
    pytest.param(Setting("fla", FlaLinearBackend, "cuda", DType.BFLOAT16, 2e-2, 2e-2), id="fla-cuda", marks=_CUDA),
]
ON_A_GPU = [setting for setting in SETTINGS if setting.id and setting.id.endswith("cuda")]
"""Settings on a GPU, for tests of synchronization, which a CPU cannot show."""
