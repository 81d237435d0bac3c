"""Conversion of SGLang's batches to geometries, and attention over its caches, with stand-ins for SGLang's objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnplug import BackendError, ForwardMode, PlanError
from attnplug_sglang.kv_pools import KVGroup, PageTable, kv_groups, pools_over
from attnplug_sglang.planning import CapturedGroups, PlannedGroup, eager_step, lengths_of, mode_of
from attnplug_testing.errors import having, naming
from sglang_fakes import Mode, attention, batch, mha_layer, reference, slots_table

PAGES = 40


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    ("mode", "prefixes", "new"),
    [
        (Mode.EXTEND, [0, 7, 16], [5, 1, 9]),
        (Mode.MIXED, [3, 11], [6, 1]),
        (Mode.DECODE, [4, 12, 1], [1, 1, 1]),
        (Mode.TARGET_VERIFY, [4, 12], [3, 3]),
    ],
)
@pytest.mark.sample(3)
def test_every_batch_attends_to_its_own_rows(page_size: int, mode: Mode, prefixes: list[int], new: list[int]) -> None:
    torch.manual_seed(0)
    lengths = [before + more for before, more in zip(prefixes, new, strict=True)]
    table, layer = slots_table(lengths, page_size), mha_layer()
    ours, caches = attention((layer,), PAGES, page_size)
    step = eager_step(batch(table, prefixes, new, mode), [PlannedGroup(ours, PageTable(table, page_size))], 64)
    rows = sum(new)
    q, k, v = torch.randn(rows, 4, 8), torch.randn(rows, 2, 8), torch.randn(rows, 2, 8)
    out = ours.attend(q, k, v, layer, step.batches[0])
    start = 0
    for row, (length, more) in enumerate(zip(lengths, new, strict=True), start=1):
        slots = table[row, :length]
        torch.testing.assert_close(caches[0][0][slots[-more:].long()], k[start : start + more])
        expected = reference(q[start : start + more], caches[0], slots, layer)
        torch.testing.assert_close(out[start : start + more].double(), expected, atol=1e-5, rtol=1e-5)
        start += more


def test_rows_past_the_planned_ones_are_padding() -> None:
    """B5: data-parallel padding adds rows; their output is zero and nothing is written for them."""
    table, layer = slots_table([6], 1), mha_layer()
    ours, caches = attention((layer,), PAGES, 1)
    given = batch(table, [2], [4])
    given.out_cache_loc = torch.cat([given.out_cache_loc, torch.zeros(3, dtype=torch.int64)])
    step = eager_step(given, [PlannedGroup(ours, PageTable(table, 1))], 64)
    before = caches[0][0][0].clone()
    out = ours.attend(torch.randn(7, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8), layer, step.batches[0])
    assert not out[4:].any()
    assert torch.equal(caches[0][0][0], before)


def test_fewer_rows_than_planned_are_an_error() -> None:
    """B5."""
    table, layer = slots_table([6], 1), mha_layer()
    ours, _ = attention((layer,), PAGES, 1)
    step = eager_step(batch(table, [2], [4]), [PlannedGroup(ours, PageTable(table, 1))], 64)
    with pytest.raises(PlanError, check=naming(3, 4)):
        ours.attend(torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8), layer, step.batches[0])


def test_a_verify_counts_its_new_tokens_which_sglang_leaves_out() -> None:
    table = slots_table([8, 15], 4)
    group = PlannedGroup(attention((mha_layer(),), PAGES, 4)[0], PageTable(table, 4))
    step = eager_step(batch(table, [5, 12], [3, 3], Mode.TARGET_VERIFY), [group], 64)
    geometry = step.batches[0].geometry
    assert geometry.seq_lens.tolist() == [8, 15]
    assert (geometry.rows, geometry.max_new, geometry.new_lens) == (6, 3, None)


def test_a_decode_without_lengths_on_the_host_plans_by_the_context() -> None:
    table = slots_table([8, 15], 4)
    given = batch(table, [7, 14], [1, 1], Mode.DECODE, seq_lens_cpu=None)
    planned = lengths_of(given, ForwardMode.DECODE, 64, exact=False)
    assert (planned.max_seq_len, planned.host) == (64, None)
    group = PlannedGroup(attention((mha_layer(),), PAGES, 4)[0], PageTable(table, 4))
    (ours,) = eager_step(given, [group], 64).batches
    assert ours.geometry.host is not None and list(ours.geometry.kv_lens) == [8, 15], "torch_native needs them"


def test_lengths_on_the_host_are_read_for_backends_that_need_them() -> None:
    given = batch(slots_table([8, 15], 4), [5, 12], [3, 3], Mode.TARGET_VERIFY)
    needed, spared = (lengths_of(given, ForwardMode.TARGET_VERIFY, 64, exact=exact) for exact in (True, False))
    assert needed.host is not None and (needed.host.query_lens, needed.host.kv_lens) == ([3, 3], [8, 15])
    assert spared.host is None and spared.max_seq_len == 15


def test_an_extend_of_drafts_is_one() -> None:
    assert mode_of(SimpleNamespace(forward_mode=Mode.DRAFT_EXTEND_V2)) is ForwardMode.DRAFT_EXTEND


def test_a_verify_of_requests_with_different_numbers_of_tokens_is_refused() -> None:
    given = batch(slots_table([8], 4), [5], [3], Mode.TARGET_VERIFY)
    given.spec_info.ragged_verify_layout = object()
    with pytest.raises(BackendError):
        lengths_of(given, ForwardMode.TARGET_VERIFY, 64, exact=False)


@pytest.mark.parametrize("mode", [Mode.SPLIT_PREFILL, Mode.DLLM_EXTEND, Mode.PREBUILT])
def test_a_mode_that_the_contract_lacks_is_refused_by_name(mode: Mode) -> None:
    with pytest.raises(BackendError, check=naming(mode.name)):
        mode_of(SimpleNamespace(forward_mode=mode))


def test_pages_come_from_the_table_on_the_device() -> None:
    table = slots_table([9, 3], 4)
    pages = PageTable(table, 4).gather(torch.tensor([2, 1, 0]), 9)
    assert pages.dtype is torch.int32
    assert pages.tolist() == [
        [int(table[2, 0]) // 4, 0, 0],
        [int(table[1, position]) // 4 for position in (0, 4, 8)],
        [0, 0, 0],
    ]


def test_a_window_pool_has_its_own_slots() -> None:
    """Rows that left the window have no slot there; they point to page 0, which no request has."""
    table = slots_table([8], 4)
    mapping = torch.full((PAGES * 4 + 1,), -1, dtype=torch.int64)
    mapping[table[1, 4:8].long()] = torch.arange(12, 16)
    own = PageTable(table, 4, lambda slots: mapping[slots.long()])
    assert own.gather(torch.tensor([1]), 8).tolist() == [[0, 3]]
    assert own.slots(table[1, 6:8].long()).tolist() == [14, 15]


def test_layers_with_a_window_are_a_group_of_their_own() -> None:
    layers = (mha_layer(0), mha_layer(1, window=4))
    pool = SimpleNamespace(layers_mapping={0: (0, False), 1: (0, True)}, translate_loc_from_full_to_swa=abs)
    whole, windowed = kv_groups(pool, layers)
    assert (whole.layers, whole.translate) == ((layers[0],), None)
    assert (windowed.layers, windowed.translate) == ((layers[1],), abs)
    assert kv_groups(SimpleNamespace(), layers) == (KVGroup(layers),)
    pool.layers_mapping[0] = (1, True)
    (only,) = kv_groups(pool, (mha_layer(0, window=4), layers[1]))
    assert only.translate is abs and len(only.layers) == 2


def test_a_full_layer_in_a_window_pool_is_refused() -> None:
    pool = SimpleNamespace(layers_mapping={0: (0, True)}, translate_loc_from_full_to_swa=abs)
    with pytest.raises(BackendError, check=naming(0, "--disable-hybrid-swa-memory")):
        kv_groups(pool, (mha_layer(0),))


def test_pools_are_sglangs_own_memory_up_to_the_last_whole_page() -> None:
    keys, values = torch.zeros(10, 2, 8), torch.zeros(10, 2, 8)
    pool = SimpleNamespace(
        dtype=torch.float32, get_key_buffer=lambda layer: keys, get_value_buffer=lambda layer: values
    )
    found = pools_over(pool, KVGroup((mha_layer(),)), 4, {}).mha
    assert found is not None
    assert found.num_pages == 2
    assert found.keys(0).data_ptr() == keys.data_ptr()


def test_a_type_of_cache_that_the_contract_lacks_is_refused_by_name() -> None:
    pool = SimpleNamespace(dtype=torch.float8_e5m2)
    with pytest.raises(BackendError, check=having("float8_e5m2", settings=("kv_dtype",))):
        pools_over(pool, KVGroup((mha_layer(),)), 4, {})


class Recorder:
    """Attention that records calls made for graphs."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def reserve(self, requests: int, rows: int) -> None:
        self.events.append(("reserve", requests, rows))

    def capture(self, batch: Any, *, in_capture: bool = False) -> None:
        self.events.append(("plan", in_capture, batch.geometry))

    def refill(self, batch: Any) -> None:
        self.events.append(("refill", batch.geometry.seq_lens.tolist()))


def captured(table: torch.Tensor, translate: Any = None) -> tuple[CapturedGroups, Recorder]:
    recorder = Recorder()
    return CapturedGroups([PlannedGroup(recorder, PageTable(table, 4, translate))], 4, 12, 64), recorder  # type: ignore[arg-type]


def test_a_replay_reads_the_tensors_that_were_captured() -> None:
    """B2: one plan per captured shape; its tensors never move, and are filled before each replay."""
    table = slots_table([9, 3], 4)
    steps, recorder = captured(table)
    static = batch(table, [0, 0], [1, 1], Mode.DECODE, req_pool_indices=torch.zeros(2, dtype=torch.int64))
    step = steps.capture(static)
    geometry = step.batches[0].geometry
    assert geometry.captured and geometry.slots is not None
    assert geometry.slots.data_ptr() == static.out_cache_loc.data_ptr()
    replayed = steps.replay(batch(table, [8, 2], [1, 1], Mode.DECODE))
    assert replayed is step
    assert geometry.page_table[:, :3].tolist()[0] == [int(table[1, place]) // 4 for place in (0, 4, 8)]
    static.seq_lens.copy_(torch.tensor([9, 3]))
    steps.refill(step, static)
    assert recorder.events[0] == ("reserve", 4, 12)
    assert [entry[:2] for entry in recorder.events[1:3]] == [("plan", True), ("plan", False)]
    assert recorder.events[-1] == ("refill", [9, 3])


def test_a_captured_verify_adds_its_tokens_inside_the_graph() -> None:
    table = slots_table([9, 6], 4)
    steps, recorder = captured(table)
    static = batch(table, [6, 3], [3, 3], Mode.TARGET_VERIFY)
    steps.refill(steps.capture(static), static)
    assert recorder.events[-1] == ("refill", [9, 6])


def test_slots_of_a_window_pool_are_translated_before_the_graph() -> None:
    """The mapping belongs to the scheduler, which may change it as soon as the replay is prepared."""
    table = slots_table([9, 3], 4)
    steps, _ = captured(table, lambda slots: slots + 4)
    static = batch(table, [0, 0], [1, 1], Mode.DECODE)
    step = steps.capture(static)
    given = batch(table, [8], [1], Mode.DECODE, batch_size=2, req_pool_indices=torch.tensor([1, 0]))
    steps.replay(given)
    slots = step.batches[0].geometry.slots
    assert slots is not None
    assert slots.tolist() == [int(given.out_cache_loc[0]) + 4, 0]


def test_a_shape_that_was_never_captured_is_an_error_with_the_captured_ones() -> None:
    table = slots_table([9, 3], 4)
    steps, _ = captured(table)
    steps.capture(batch(table, [0], [1], Mode.DECODE))
    with pytest.raises(PlanError, check=naming(2, 1)):
        steps.replay(batch(table, [8, 2], [1, 1], Mode.DECODE))
