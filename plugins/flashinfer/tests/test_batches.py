"""Batches against float64: planning on a CPU, over stand-ins, and FlashInfer's kernels on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import BackendContext, DType, ForwardExtras, ForwardMode, PoolError
from attnplug.host import plan_forward
from paged_reference import TOLERANCE, build, scene
from support.devices import DEVICES, nothing_waits
from support.mha_scene import LAYER, MHACase
from support.mla_scene import relative_error

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
    "decode": MHACase(((700, 1), (3, 1), (64, 1), (0, 1)), DECODE),
    "decode without groups": MHACase(((300, 1), (65, 1)), DECODE, 16, 4, 4, 128),
    "decode of an odd group": MHACase(((300, 1), (65, 1)), DECODE, 1, 14, 2, 64, padding=3),
    "decode in a window": MHACase(((700, 1), (30, 1)), DECODE, window=90),
    "decode from fp8": MHACase(((700, 1), (30, 1)), DECODE, head_dim=128, **FP8),
    "verify": MHACase(((700, 4), (3, 4), (64, 4)), VERIFY, 16),
    "verify in a window": MHACase(((700, 4), (3, 4)), VERIFY, window=50, cap=3.0),
    "a prompt": MHACase(((0, 200),), head_dim=128),
    "long extends": MHACase(((130, 130), (0, 70), (64, 64)), heads=4, layout="head_major"),
    "long extends in a window": MHACase(((300, 130), (0, 70)), heads=4, window=77),
    "long extends from fp8": MHACase(((130, 130), (0, 70)), heads=4, **FP8),
    "short extends": MHACase(((500, 3), (0, 20), (64, 0), (7, 1)), padding=5),
    "wide heads": MHACase(((130, 70), (0, 9)), heads=2, kv_heads=1, head_dim=256),
    "mixed": MHACase(((500, 1), (0, 90), (64, 1)), MIXED, 16, heads=4),
}


@on_every_device
@pytest.mark.parametrize("name", CASES)
def test_batches_are_as_in_float64(name, device):
    scene(CASES[name], device).check(TOLERANCE[device])


@on_a_gpu
@pytest.mark.parametrize("mode", [DECODE, EXTEND])
def test_many_requests_of_all_lengths(mode, device):
    """A batch whose tiles are more than the GPU holds at once is not divided; one of fewer is."""
    new = 1 if mode is DECODE else 70
    for requests in (2, 40, 150):
        lengths = tuple(((37 * request * request) % 5000, new) for request in range(requests))
        scene(MHACase(lengths, mode, heads=32, kv_heads=8, head_dim=128), device).check(TOLERANCE[device])


@on_every_device
@pytest.mark.parametrize(("name", "long"), [("long extends", True), ("short extends", False), ("mixed", False)])
def test_long_extends_run_on_the_kernel_for_prefill(name, long, device):
    """It does not divide a request's keys, which only many query rows make good."""
    case = CASES[name]
    stage = scene(case, device)
    plan = stage.backend.init_forward_metadata(stage.batch())
    (wrapper,) = {lease.kernel._wrapper for lease in list(plan.metadata.calls.values())[1:]}
    made = wrapper.made["backend"] if device == "cpu" else wrapper._backend
    sm_90 = device == "cpu" or torch.cuda.get_device_capability() == (9, 0)
    assert made == ("fa3" if long and sm_90 else "fa2")


@on_every_device
def test_layers_of_different_shapes_are_planned_each(device):
    """Scales, windows and caps are the plan's; new rows have one place for all layers."""

    def with_another(context: BackendContext):
        first, own = context.model.layers
        return build(replace(context, model=replace(context.model, layers=(replace(first, sliding_window=5), own))))

    case = MHACase(((170, 1), (3, 1)), DECODE, 16)
    stage = scene(case, device, with_another)
    batch = stage.batch()
    plan_forward(stage.backend, batch)
    assert [shape.window for shape in batch.plan.attention.metadata.calls] == [5, None]
    assert relative_error(stage.run(batch)[0], stage.wanted()[0]) <= TOLERANCE[device]


@on_every_device
def test_queries_that_the_kernels_cannot_read_are_copied(device):
    case = MHACase(((20, 1), (9, 1)), DECODE, 16)
    stage = scene(case, device)
    stage.padded = lambda tensor: tensor
    stage.q = stage.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert stage.q.stride(2) != 1
    assert relative_error(stage.run()[0], stage.wanted()[0]) <= TOLERANCE[device]


@on_every_device
@pytest.mark.parametrize("contiguous", [True, False])
def test_the_result_goes_where_the_host_says(contiguous, device):
    case = MHACase(((20, 1), (9, 1)), DECODE, 16)
    stage = scene(case, device)
    batch = stage.batch()
    plan_forward(stage.backend, batch)
    out = torch.zeros(2, 8, 64 if contiguous else 128, dtype=stage.dtype, device=device)[..., :64]
    found = stage.backend.forward_decode(stage.q, *stage.new_rows(), stage.layer, batch, extras=ForwardExtras(out=out))
    assert found is out
    assert relative_error(out, stage.wanted()[0]) <= TOLERANCE[device]


@on_every_device
def test_plans_that_live_at_the_same_time_have_wrappers_of_their_own(device):
    """B5: two batches are planned before either runs."""
    case = MHACase(((20, 1), (9, 1)), DECODE, 16)
    stage = scene(case, device)
    first, second = stage.batch(), stage.batch()
    for batch in (first, second):
        plan_forward(stage.backend, batch)
    one, other = (list(batch.plan.attention.metadata.calls.values()) for batch in (first, second))
    assert not {id(lease.kernel) for lease in one} & {id(lease.kernel) for lease in other}
    for batch in (first, second):
        assert relative_error(stage.run(batch)[0], stage.wanted()[0]) <= TOLERANCE[device]


@on_a_gpu
@pytest.mark.parametrize("name", ["decode", "verify", "long extends"])
def test_planning_and_running_wait_for_nothing(name, device):
    stage = scene(CASES[name], device)
    stage.run()  # compiles what there is to compile
    batch = stage.batch()
    with nothing_waits(device):
        stage.run(batch)


def test_a_cache_that_the_kernels_cannot_read_is_refused_when_it_is_built():
    """Rows at addresses that are no multiples of 16 bytes."""

    def misaligned(context: BackendContext):
        pool = context.pools.mha
        keys = pool.keys(LAYER)
        pool.keys = lambda layer_id: torch.zeros(keys.numel() + 1)[1:].view(keys.shape)
        return build(context)

    with pytest.raises(PoolError, match=r"the keys of layer .* FlashInfer reads rows with adjacent columns"):
        scene(CASES["decode"], "cpu", misaligned)
