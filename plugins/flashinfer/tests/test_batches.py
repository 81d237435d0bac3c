"""Batches against float64: planning on a CPU, over stand-ins, and FlashInfer's kernels on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import BackendContext, CacheLayout, DType, ForwardExtras, ForwardMode, PoolError
from attnplug_conformance.arithmetic import relative_error
from attnplug_conformance.case import LAYER
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import mha
from paged_reference import build, check, scene

DECODE, VERIFY, EXTEND, MIXED = (
    ForwardMode.DECODE,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.EXTEND,
    ForwardMode.MIXED,
)
FP8 = {"kv_dtype": DType.FLOAT8_E4M3, "kv_scales": (0.5, 3.0)}
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])
CASES = {
    "decode": mha(((700, 1), (3, 1), (64, 1), (0, 1)), DECODE),
    "decode without groups": mha(((300, 1), (65, 1)), DECODE, 16, 4, 4, 128),
    "decode of an odd group": mha(((300, 1), (65, 1)), DECODE, 1, 14, 2, 64, padding=3),
    "decode in a window": mha(((700, 1), (30, 1)), DECODE, window=90),
    "decode from fp8": mha(((700, 1), (30, 1)), DECODE, head_dim=128, **FP8),
    "verify": mha(((700, 4), (3, 4), (64, 4)), VERIFY, 16),
    "verify in a window": mha(((700, 4), (3, 4)), VERIFY, window=50, cap=3.0),
    "a prompt": mha(((0, 200),), head_dim=128),
    "long extends": mha(((130, 130), (0, 70), (64, 64)), heads=4, layout=CacheLayout.HEAD_MAJOR),
    "long extends in a window": mha(((300, 130), (0, 70)), heads=4, window=77),
    "long extends from fp8": mha(((130, 130), (0, 70)), heads=4, **FP8),
    "short extends": mha(((500, 3), (0, 20), (64, 0), (7, 1)), padding=5),
    "wide heads": mha(((130, 70), (0, 9)), heads=2, kv_heads=1, head_dim=256),
    "mixed": mha(((500, 1), (0, 90), (64, 1)), MIXED, 16, heads=4),
}


@on_a_gpu
@pytest.mark.parametrize("name", CASES)
def test_batches_are_as_in_float64(name, device):
    check(CASES[name], device)


@pytest.mark.parametrize(
    "name", ["decode of an odd group", "decode from fp8", "verify in a window", "long extends in a window"]
)
@pytest.mark.sample(1)
def test_batches_that_the_conformance_kit_does_not_have(name):
    """The kit has each of their properties separately, and a much larger tolerance for fp8."""
    check(CASES[name], "cpu")


@on_a_gpu
@pytest.mark.parametrize("mode", [DECODE, EXTEND])
def test_many_requests_of_all_lengths(mode, device):
    """A batch is divided if its tiles do not fill the GPU."""
    new = 1 if mode is DECODE else 70
    for requests in (2, 40, 150):
        lengths = tuple(((37 * request * request) % 5000, new) for request in range(requests))
        check(mha(lengths, mode, heads=32, kv_heads=8, head_dim=128), device)


@on_every_device
@pytest.mark.parametrize(("name", "long"), [("long extends", True), ("short extends", False), ("mixed", False)])
def test_long_extends_run_on_the_kernel_for_prefill(name, long, device):
    """This kernel has no split-KV, so it needs many query rows."""
    stage = scene(CASES[name], device)
    plan = stage.backend.init_forward_metadata(stage.batch())
    (wrapper,) = {handle.kernel._wrapper for handle in list(plan.metadata.calls.values())[1:]}
    made = wrapper.made["backend"] if device == "cpu" else wrapper._backend
    sm_90 = device == "cpu" or torch.cuda.get_device_capability() == (9, 0)
    assert made == ("fa3" if long and sm_90 else "fa2")


@on_every_device
def test_layers_of_different_shapes_are_planned_each(device):
    """Scales, windows and caps are the plan's; new rows have one place for all layers."""

    def with_others(context: BackendContext):
        first, own, last = context.model.layers
        layers = (replace(first, sliding_window=5), own, replace(last, sliding_window=5))
        return build(replace(context, model=replace(context.model, layers=layers)))

    stage = scene(mha(((170, 1), (3, 1)), DECODE, 16), device, with_others)
    batch = stage.plan(stage.batch())
    assert [shape.window for shape in batch.plan.attention.metadata.calls] == [5, None]
    assert stage.error(batch) <= stage.tolerance


@on_every_device
def test_queries_that_the_kernels_cannot_read_are_copied(device):
    stage = scene(mha(((20, 1), (9, 1)), DECODE, 16), device)
    batch = stage.plan(stage.batch())
    q, k, v = stage.inputs(batch.num_tokens)
    apart = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert apart.stride(2) != 1
    assert relative_error(stage.forward(batch, (apart, k, v)), stage.wanted()[0]) <= stage.tolerance


@on_every_device
def test_the_result_goes_to_memory_with_gaps(device):
    stage = scene(mha(((20, 1), (9, 1)), DECODE, 16), device)
    out = torch.zeros(2, 8, 128, dtype=stage.dtype, device=device)[..., :64]
    assert stage.forward(stage.plan(stage.batch()), extras=ForwardExtras(out=out)) is out
    assert relative_error(out, stage.wanted()[0]) <= stage.tolerance


@on_a_gpu
def test_plans_that_live_at_the_same_time_have_wrappers_of_their_own(device):
    """B5: two batches are planned before either runs."""
    stage = scene(CASES["decode"], device)
    batches = [stage.plan(stage.batch()) for _ in range(2)]
    one, other = (batch.plan.attention.metadata.calls.values() for batch in batches)
    assert not {id(handle.kernel) for handle in one} & {id(handle.kernel) for handle in other}
    assert all(stage.error(batch) <= stage.tolerance for batch in batches)


@on_a_gpu
@pytest.mark.parametrize("name", ["decode", "verify", "long extends"])
def test_planning_and_running_wait_for_nothing(name, device):
    stage = scene(CASES[name], device)
    stage.results()  # compiles what there is to compile
    batch = stage.batch()
    inputs = stage.inputs(batch.num_tokens)
    with nothing_waits(device):
        out = stage.forward(stage.plan(batch), inputs)
    assert relative_error(out, stage.wanted()[0]) <= stage.tolerance


def test_a_cache_that_the_kernels_cannot_read_is_refused_when_it_is_built():
    """Rows at addresses that are no multiples of 16 bytes."""

    def misaligned(context: BackendContext):
        pool = context.pools.mha
        keys = pool.keys(LAYER)
        pool.keys = lambda layer_id: torch.zeros(keys.numel() + 1)[1:].view(keys.shape)
        return build(context)

    with raises_naming(PoolError, "keys"):
        scene(CASES["decode"], "cpu", misaligned)
