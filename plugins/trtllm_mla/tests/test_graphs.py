"""Planning around captured graphs: the protocol on a CPU, real captures on a Blackwell GPU (B2's ground)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from attnplug import DType, ForwardExtras, ForwardMode
from attnplug_trtllm_mla.kernels import to_float8
from generation_checks import FP8, TOLERANCE, scene
from support.batches import with_plan
from support.devices import DEVICES, nothing_waits
from support.mla_capture import MLACapture
from support.mla_lanes import check_lanes
from support.mla_scene import LAYER, MLACase, MLAScene, relative_error
from trtllm_reference import ReferenceFlashInfer, build_on, reference_trtllm

on_every_device = pytest.mark.parametrize("device", DEVICES)


def scenes(mode: ForwardMode, new: int, device: str, heads: int, page_size: int, kv_dtype: DType | None):
    """A large pool to capture on, and batches to replay: long and short, full and with fewer requests."""
    prefixes = [[300, 5, 64, 127], [1000, 17, 1, 0], [63], [900, 90], [0, 1, 2, 3]]
    cases = [
        MLACase(tuple((prefix, new) for prefix in some), mode, page_size, heads, kv_dtype=kv_dtype, seed=seed)
        for seed, some in enumerate(prefixes)
    ]
    build = build_on(device)
    stage = MLAScene(replace(cases[0], lengths=((4000, new),) * 4), device, build)
    return stage, [scene(case, device, build) for case in cases]


@on_every_device
@pytest.mark.parametrize(
    ("mode", "new", "heads", "page_size", "kv_dtype"),
    [
        (ForwardMode.DECODE, 1, 16, 64, None),
        (ForwardMode.DECODE, 1, 24, 128, FP8),
        (ForwardMode.TARGET_VERIFY, 4, 8, 32, FP8),
        (ForwardMode.TARGET_VERIFY, 4, 24, 64, None),
    ],
)
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(mode, new, heads, page_size, kv_dtype, device):
    """Replays give float64's result; padded requests are zero, and nothing is written for them."""
    stage, others = scenes(mode, new, device, heads, page_size, kv_dtype)
    captured = MLACapture(stage, requests=4, per_request=new)
    captured.capture()
    read = captured.plan.metadata.call
    addresses = [tensor.data_ptr() for tensor in (read.tables, read.lens, captured.plan.new_slots)]
    for other in others:
        out = captured.replay(other)
        wanted = other.wanted_absorbed()[0]
        assert relative_error(out[: len(wanted)], wanted) <= TOLERANCE
        assert (out[len(wanted) :] == 0).all()
        written = (~stage.pool.rows(LAYER).float().isnan()).any(-1).sum()
        assert int(written) == sum(other.totals)
        call = captured.plan.metadata.call
        assert addresses == [t.data_ptr() for t in (call.tables, call.lens, captured.plan.new_slots)]


@on_every_device
def test_replay_planning_waits_for_nothing(device):
    """Nothing is sent, nothing read back, and no length is needed on the host."""
    stage, others = scenes(ForwardMode.DECODE, 1, device, 16, 64, None)
    captured = MLACapture(stage, requests=4, per_request=1)
    captured.capture()
    captured.replay(others[0])
    assert captured.batch.geometry.host is None
    with nothing_waits(device):
        assert captured.backend.init_forward_metadata_out_graph(captured.batch) is captured.plan


def test_a_padded_request_is_given_a_length_that_kernels_know():
    """No empty KV rows: each of its queries sees a key, of whatever page, and its output and sums are cleared."""
    stage, _ = scenes(ForwardMode.TARGET_VERIFY, 4, "cpu", 16, 64, None)
    captured = MLACapture(stage, requests=4, per_request=4)
    captured.capture()
    assert captured.plan.metadata.call.lens.tolist() == [4] * 4
    lse = torch.zeros(16, 16)
    stage.backend.forward_extend(
        captured.q, captured.k, None, stage.layer, captured.batch, extras=ForwardExtras(lse=lse)
    )
    assert (lse == float("-inf")).all()


@on_every_device
@pytest.mark.parametrize(("mode", "new"), [(ForwardMode.DECODE, 1), (ForwardMode.TARGET_VERIFY, 4)])
def test_two_lanes_run_at_the_same_time(mode, new, device):
    """B5, A2: plans of one shape, eager and captured, share no scratch, no semaphores and no graph memory."""
    case = MLACase(tuple((prefix, new) for prefix in (300, 5, 64, 127)), mode, heads=24)
    check_lanes(case, device, build_on(device), TOLERANCE)


@pytest.mark.parametrize("captured", [False, True])
def test_a_decode_runs_on_the_memory_of_its_lane(captured):
    """A2"""
    flashinfer = ReferenceFlashInfer()
    build = partial(reference_trtllm, flashinfer=flashinfer)
    stage = MLAScene(MLACase(((30, 1), (9, 1)), ForwardMode.DECODE, lanes=2), "cpu", build)
    stage.backend.init_cuda_graph_state(2, 2)
    batch = stage.batch()
    batch.geometry = replace(batch.geometry, lane=1, captured=captured, host=None if captured else batch.geometry.host)
    if captured:
        with_plan(batch, stage.backend.init_forward_metadata_out_graph(batch, in_capture=True))
        stage.backend.init_forward_metadata_in_graph(batch)
    stage.absorbed(batch)
    own = stage.backend.lanes[1].decode
    for call in flashinfer.named("decode"):
        assert call["workspace_buffer"] is own.scratch.buffer
        assert call["multi_ctas_kv_counter_buffer"] is own.counters.buffer


def test_rounded_queries_are_what_the_kernel_gets():
    """The fp8 scenes above compare exactly because rounding them again changes nothing."""
    q = torch.randn(64, 576).to(torch.bfloat16)
    once = to_float8(q).to(torch.bfloat16)
    assert torch.equal(to_float8(once).to(torch.bfloat16), once)
