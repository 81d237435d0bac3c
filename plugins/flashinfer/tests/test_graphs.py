"""Planning around captured graphs: the protocol on a CPU, real captures on a GPU (B2's ground)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import paged_reference
from attnplug import BackendContext, BackendError, DType, ForwardBatch, ForwardMode
from attnplug_flashinfer.shapes import LayerShape
from paged_reference import TOLERANCE, build, scene
from support.devices import DEVICES, nothing_waits
from support.mha_capture import MHACapture
from support.mha_scene import MHACase, MHAScene
from support.mla_scene import relative_error

DECODE, VERIFY, DRAFT_EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
FP8 = {"kv_dtype": DType.FLOAT8_E4M3, "kv_scales": (0.5, 3.0)}
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])


def scenes(case: MHACase, new: int, device: str) -> tuple[MHAScene, list[MHAScene]]:
    """A large pool to capture on, and batches to replay: long and short, full and with fewer requests."""
    prefixes = [[300, 5, 64, 127], [63], [0, 1, 2, 3], [1000, 17, 1, 0]]
    if device != "cpu":
        prefixes += [[3000, 2900], [3900, 10, 3900, 200]]
    longest = max(max(some) for some in prefixes)
    stage = scene(replace(case, lengths=((longest, new),) * 4), device)
    others = [
        scene(replace(case, lengths=tuple((prefix, new) for prefix in some), seed=seed), device)
        for seed, some in enumerate(prefixes)
    ]
    return stage, others


@on_every_device
@pytest.mark.parametrize(
    ("mode", "new", "changes"),
    [
        (DECODE, 1, {}),
        (DECODE, 1, {"window": 200, "page_size": 16}),
        (DECODE, 1, FP8),
        (DECODE, 1, {"heads": 4, "kv_heads": 4, "head_dim": 128, "page_size": 1, "cap": 3.0}),
        (VERIFY, 4, {}),
        (VERIFY, 6, {"window": 40, "heads": 14, "page_size": 16}),
        (VERIFY, 5, {"heads": 32, "head_dim": 128}),
        (DRAFT_EXTEND, 2, {"layout": "head_major"}),
    ],
    ids=["decode", "window", "fp8", "pages-of-1", "verify", "verify-window", "tiles-of-128", "draft"],
)
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(mode, new, changes, device):
    """Replays give float64's result; padded requests read and write nothing; NaN is everywhere else."""
    stage, others = scenes(MHACase((), mode, **changes), new, device)
    capture = MHACapture(stage, requests=4, per_request=new).capture()
    for other in others:
        out = capture.replay(other)
        wanted = other.wanted()[0]
        assert relative_error(out[: len(wanted)], wanted) <= TOLERANCE[device]
        assert (out[len(wanted) :] == 0).all()
        assert stage.written() == sum(other.totals)


@on_every_device
def test_layers_of_different_windows_are_captured_each(device):
    """Their work lists differ, and their lengths and pages are the same memory."""

    def with_another(context: BackendContext):
        first, own = context.model.layers
        return build(replace(context, model=replace(context.model, layers=(replace(first, sliding_window=5), own))))

    case = MHACase(((1000, 1), (40, 1)), DECODE)
    stage = scene(case, device, with_another)
    capture = MHACapture(stage, requests=2, per_request=1).capture()
    found = capture.replay(stage)
    short, long = (call.schedule for call in capture.plan.metadata.calls.values())
    assert int(short.valid.sum()) < int(long.valid.sum())
    assert relative_error(found, stage.wanted()[0]) <= TOLERANCE[device]


@on_every_device
def test_replay_planning_waits_for_nothing(device):
    """Nothing is sent, nothing read back, and no length is needed on the host."""
    stage, others = scenes(MHACase((), DECODE), 1, device)
    captured = MHACapture(stage, requests=4, per_request=1).capture()
    captured.replay(others[0])
    assert captured.batch.geometry.host is None
    with nothing_waits(device):
        assert captured.backend.init_forward_metadata_out_graph(captured.batch) is captured.plan


def test_new_rows_go_where_the_host_says():
    """A host that owns its slots has them in the batch."""
    stage = scene(MHACase(((20, 1), (9, 1)), DECODE), "cpu")
    capture = MHACapture(stage, requests=2, per_request=1)
    slots = torch.tensor([5, -1])
    capture.batch = ForwardBatch(replace(capture.batch.geometry, slots=slots))
    capture.capture()
    slots.copy_(torch.tensor([7, 8]))
    capture.fill()
    assert capture.plan.new_slots.tolist() == [7, 8]


@pytest.mark.parametrize(
    ("requests", "queries", "tiles", "rows"), [(1, 1, 33, 16), (160, 1, 199, 16), (40, 9, 40, 64), (40, 33, 80, 128)]
)
def test_scratch_of_a_capture_holds_the_parts_of_all_tiles(requests, queries, tiles, rows):
    """As many as the library reserves: 32 heads over 8 of 128, on 132 multiprocessors."""
    parts = 4 * 32 * tiles * rows * 129
    found = LayerShape(32, 8, 128, 1.0, None, None).captured_scratch(132, requests, queries)
    assert parts < found <= parts + (1 << 20)


@on_a_gpu
@pytest.mark.parametrize("requests", [1, 40, 160])
def test_captures_of_many_requests_have_scratch_of_their_size(requests, device):
    """More than eager batches take. Graphs that hold memory which has grown since still run on their own."""
    case = MHACase(((700, 4),) * requests, VERIFY, heads=64, head_dim=128, kv_heads=8, lse=False)
    stage = scene(case, device)
    capture = MHACapture(stage, requests, 4).capture()
    assert relative_error(capture.replay(stage), stage.wanted()[0]) <= TOLERANCE[device]


@pytest.mark.parametrize("changed", ["order", "chunks", "numbers"])
def test_a_plan_laid_out_in_an_unknown_way_is_not_captured(monkeypatch, changed):
    """A later FlashInfer may lay its plans out differently: then there are no graphs, instead of wrong results."""
    real = paged_reference.Decode.make_plan

    def other(self, given):
        real(self, given)
        if changed == "order":  # of requests and parts
            self._plan_info[4], self._plan_info[6] = self._plan_info[6], self._plan_info[4]
        elif changed == "chunks":
            self.array(9, 1).fill_(100)
        else:
            self._plan_info.append(0)

    monkeypatch.setattr(paged_reference.Decode, "make_plan", other)
    stage = scene(MHACase(((20, 1), (9, 1)), DECODE), "cpu")
    with pytest.raises(BackendError, match=r"a way that this plugin does not know: .* run without CUDA graphs"):
        MHACapture(stage, requests=2, per_request=1).capture()


def test_page_indices_are_filled_after_the_work_lists(monkeypatch):
    """Attention kernels may read work lists before the previous kernel has ended, so another one comes between."""
    order = []
    for name in ("fill_schedule", "fill_indices"):
        monkeypatch.setattr(f"attnplug_flashinfer.graphs.{name}", lambda *_, name=name: order.append(name))
    stage = scene(MHACase(((20, 1), (9, 1)), DECODE), "cpu")
    capture = MHACapture(stage, requests=2, per_request=1)
    stage.backend.init_cuda_graph_state(2, 2)
    stage.backend.init_forward_metadata_out_graph(capture.batch, in_capture=True)
    capture.fill()
    assert order == ["fill_schedule", "fill_schedule", "fill_indices"]


@on_every_device
def test_two_lanes_share_nothing(device):
    """B5: the same shape captured in both; each replays with what it was given."""
    case = MHACase(((300, 1), (5, 1)), DECODE, lanes=2)
    stage = scene(case, device)
    captures = [MHACapture(stage, requests=2, per_request=1, lane=lane) for lane in (0, 1)]
    for capture in captures:
        capture.capture(reserve=capture is captures[0])
    held = [
        [capture.plan.new_slots, capture.plan.metadata.captured.buffers.kv_indices, *schedules.arrays()]
        for capture in captures
        for schedules in [next(iter(capture.plan.metadata.calls.values())).schedule]
    ]
    assert not {tensor.data_ptr() for tensor in held[0]} & {tensor.data_ptr() for tensor in held[1]}
    for capture in captures:
        assert relative_error(capture.replay(stage), stage.wanted()[0]) <= TOLERANCE[device]
        torch.testing.assert_close(capture.out, captures[0].out)
