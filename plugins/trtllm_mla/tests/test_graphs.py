"""Planning around captured graphs: the protocol on a CPU, real captures on a Blackwell GPU (B2's ground)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from attnplug import ForwardExtras, ForwardMode
from attnplug_conformance.arithmetic import relative_error
from attnplug_conformance.checks.graphs import Capture
from attnplug_testing.batches import with_plan
from attnplug_testing.devices import DEVICES
from attnplug_testing.kernel_scene import KernelScene, check_captured_lanes, check_replay, mla
from attnplug_testing.references.trtllm_mla import ReferenceFlashInfer, build_on, reference_trtllm
from attnplug_testing.trtllm_checks import FP8, TOLERANCE, scene
from attnplug_trtllm_mla.kernels import to_float8

DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("mode", "new", "heads", "page_size", "kv_dtype"), [(DECODE, 1, 24, 128, FP8), (VERIFY, 4, 24, 64, None)]
)
@pytest.mark.sample(1)
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(mode, new, heads, page_size, kv_dtype, device):
    """Replays give float64's result; padded requests are zero, and nothing is written for them."""
    case = mla(((300, new),) * 4, mode, page_size, heads, kv_dtype=kv_dtype)
    capture = Capture(KernelScene(case, device, build_on(device))).reserve().capture()
    assert capture.batch.geometry.host is None
    read = capture.plan.metadata.call
    addresses = [tensor.data_ptr() for tensor in (read.block_tables, read.seq_lens, capture.plan.new_slots)]
    for seed, prefixes in enumerate([[300, 5, 64, 127], [200, 17, 1, 0], [63], [90, 90]]):
        lengths = tuple((prefix, new) for prefix in prefixes)
        other = scene(replace(case, lengths=lengths, seed=seed), device, build_on(device))
        check_replay(capture, other)
        wanted = other.wanted()[0]
        assert relative_error(capture.out[: len(wanted)], wanted) <= TOLERANCE
        call = capture.plan.metadata.call
        assert addresses == [t.data_ptr() for t in (call.block_tables, call.seq_lens, capture.plan.new_slots)]


def test_a_padded_request_is_given_a_length_that_kernels_know():
    """The kernels do not support empty KV. So each query of a padded request sees a key of an arbitrary page, and its
    output and log-sum-exp are cleared."""
    stage = KernelScene(mla(((60, 4),) * 4, VERIFY), "cpu", reference_trtllm)
    capture = Capture(stage).reserve().capture()
    assert capture.plan.metadata.call.seq_lens.tolist() == [4] * 4
    lse = torch.zeros(16, 16)
    stage.forward(capture.batch, (capture.q, capture.k, None), extras=ForwardExtras(lse=lse))
    assert (lse == float("-inf")).all()


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 4)])
def test_captured_lanes_run_on_two_streams(mode, new, device):
    """B5, A2: plans of one shape share no scratch, no semaphores and no graph memory."""
    given = tuple((prefix, new) for prefix in (300, 5, 64, 127))
    check_captured_lanes(KernelScene(mla(given, mode, heads=24, lanes=2), device, build_on(device)))


@pytest.mark.parametrize("captured", [False, True])
def test_a_decode_runs_on_the_memory_of_its_lane(captured):
    """A2"""
    flashinfer = ReferenceFlashInfer()
    build = partial(reference_trtllm, flashinfer=flashinfer)
    stage = KernelScene(mla(((30, 1), (9, 1)), ForwardMode.DECODE, lanes=2), "cpu", build)
    stage.backend.init_cuda_graph_state(2, 2)
    batch = stage.batch()
    batch.geometry = replace(batch.geometry, lane=1, captured=captured, host=None if captured else batch.geometry.host)
    if captured:
        with_plan(batch, stage.backend.init_forward_metadata_out_graph(batch, in_capture=True))
        stage.backend.init_forward_metadata_in_graph(batch)
    stage.results(batch)
    own = stage.backend.lanes[1].decode
    for call in flashinfer.named("decode"):
        assert call["workspace_buffer"] is own.scratch.buffer
        assert call["multi_ctas_kv_counter_buffer"] is own.counters.buffer


def test_rounded_queries_are_what_the_kernel_gets():
    """The fp8 scenes above compare exactly because rounding them again changes nothing."""
    q = torch.randn(64, 576).to(torch.bfloat16)
    once = to_float8(q).to(torch.bfloat16)
    assert torch.equal(to_float8(once).to(torch.bfloat16), once)
