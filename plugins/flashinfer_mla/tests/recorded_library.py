"""The real FlashInfer with recorders for its wrappers, and small calls of our kernels to it. No GPU is needed: CUDA
events are replaced by stand-ins."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attnplug import MLAShape
from attnplug.host import MLADims
from attnplug_flashinfer_mla import kernels
from attnplug_flashinfer_mla.kernels import FlashInferMLAKernels, FlashInferMLALibrary, LatentCache, PagedKernel
from attnplug_flashinfer_mla.lengths import CallLengths
from attnplug_flashinfer_mla.planner import MLAPagedCall
from mla_scheduler import plan_info

SHAPE = MLAShape(
    pool=None,  # kernels take their rows by the call
    heads=128,
    dims=MLADims(512, 128, 64),
    v_head_dim=128,
    scale=192**-0.5,
    page_size=64,
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
)


class Call(NamedTuple):
    """A call: how many arguments it gave by position, and all of them by the names of the real signature."""

    method: str
    positional: int
    given: dict[str, Any]


class Recorder:
    """Stand-in for a class of FlashInfer. Accepts the calls that the real signature accepts, and records them."""

    def __init__(self, real: type) -> None:
        self.real, self.calls = real, list[Call]()

    def __call__(self, *args: Any, **named: Any) -> Wrapper:
        self.record("__init__", args, named)
        return Wrapper(self)

    def record(self, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        bound = inspect.signature(getattr(self.real, method)).bind("self", *args, **named)
        given = {name: value for name, value in bound.arguments.items() if name != "self"}
        self.calls.append(Call(method, len(args), given))

    def last(self, method: str) -> dict[str, Any]:
        return [call.given for call in self.calls if call.method == method][-1]


class Wrapper:
    """Wrapper made by a recorder, with the members of a planned wrapper of FlashInfer."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def plan(self, *args: Any, **named: Any) -> None:
        self._recorder.record("plan", args, named)
        self._plan_info = list(plan_info().values())
        self._int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)

    def run(self, *args: Any, **named: Any) -> Tensor | tuple[Tensor, Tensor]:
        self._recorder.record("run", args, named)
        out = named["out"] if named["out"] is not None else torch.empty(0)
        return (out, named["lse"]) if named.get("return_lse") else out


class Event:
    """A CUDA event that is always in the past."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FlashInferMLALibrary:
    """The real library, with recorders for its wrappers."""
    real = kernels.load_library()
    recording = replace(real, paged=Recorder(real.paged), ragged=Recorder(real.ragged))
    monkeypatch.setattr(kernels, "load_library", lambda: recording)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return recording


def make(kernel: str = "fa3", **changes: Any) -> FlashInferMLAKernels:
    return FlashInferMLAKernels(replace(SHAPE, **changes), torch.empty(1 << 10, dtype=torch.uint8), kernel)


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def paged_call(*, causal: bool) -> MLAPagedCall:
    """Two requests, of 70 and 5 rows, with three queries or one each."""
    queries = 3 if causal else 1
    lengths = CallLengths(int32(0, queries, 2 * queries), int32(0, 2, 3), int32(70, 5))
    table = torch.tensor([[4, 7], [2, -1]], dtype=torch.int32)
    return MLAPagedCall(slice(0, 2 * queries), SHAPE.heads, causal, lengths, int32(4, 7, 2), table, lengths.kv_lens)


def cache(dtype: torch.dtype = torch.bfloat16) -> LatentCache:
    return LatentCache.of(
        torch.zeros(8, SHAPE.page_size, SHAPE.dims.row_dim, dtype=dtype), SHAPE.dims.kv_lora_rank, 0.5
    )


def queries(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, out and lse of a paged call."""
    shape = (rows, SHAPE.heads)
    q = torch.zeros(*shape, SHAPE.dims.row_dim, dtype=SHAPE.dtype)
    return q, torch.zeros(*shape, SHAPE.dims.kv_lora_rank, dtype=SHAPE.dtype), torch.zeros(shape)


def planned_decode(factory: FlashInferMLAKernels) -> PagedKernel:
    kernel = factory.paged(decode=True)
    kernel.plan(paged_call(causal=False))
    return kernel
