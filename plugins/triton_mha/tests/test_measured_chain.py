"""The chain of calls by which the backend is measured gives what torch_native gives on the same caches."""

from __future__ import annotations

import pytest
import torch
from attnplug_tune.clock import CudaClock
from attnplug_tune.points import Point
from attnplug_tune.shapes import Task
from attnplug_tune.stage import Build, Setup, Stage
from torch import Tensor

from attnplug import AttentionBackend, AttentionKind, DType, LayerSpec, Role
from attnplug.host import HostContext, load_registry
from attnplug.tables import MeasuredShape
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug_conformance.arithmetic import relative_error
from attnplug_testing.devices import DEVICES
from interpreted_mha import build

LAYER = LayerSpec(0, AttentionKind.MHA, 4, 2, 32, 32, 32**-0.5)
BOTH = frozenset({Role.PREFILL, Role.DECODE})


def built(name: str, context: HostContext) -> AttentionBackend:
    spec = load_registry().get(name).spec
    own = context.for_backend(name, spec.capabilities, roles=BOTH)
    return build(own) if name == "triton_mha" else TorchNativeBackend(own)


def last_result(task: Task, device: str, make: Build) -> tuple[Tensor, bool]:
    """Result of the last call of a chain, and True if it was captured."""
    torch.manual_seed(0)
    stage = Stage(task, Setup(torch.device(device), 512), make)
    torch.manual_seed(1)
    chain = stage.chain("measured")
    if device == "cuda" and chain.captured:
        clock = CudaClock(torch.device(device))
        clock.warm_up(chain)
        clock._graph(chain)()
        torch.cuda.synchronize()
    else:
        chain.run()
    assert stage.last is not None
    return stage.last, chain.captured


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.sample(1)
def test_a_captured_chain_gives_what_torch_native_gives(
    tokens: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the captured batch runs eagerly. Its page table is for the longest context, its lengths are on the
    device."""
    monkeypatch.setattr("attnplug_tune.stage.CALLS", 2)
    dtype = DType.FLOAT32 if device == "cpu" else DType.BFLOAT16
    task = Task(
        LAYER, MeasuredShape.of(LAYER, (dtype, dtype), 64, False), Point(Role.DECODE, 3, 130, tokens, ragged=True)
    )
    with torch.inference_mode():
        wanted, _ = last_result(task, device, lambda context: built("torch_native", context))
        if device == "cpu":
            monkeypatch.setattr(Stage, "captured", True)
        found, captured = last_result(task, device, lambda context: built("triton_mha", context))
    assert captured
    assert relative_error(found, wanted.double()) <= (1e-6 if device == "cpu" else 1e-2)
