"""torch_native against float64: random batches, scattered pages, and NaN in everything that must not be read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug import DType, ForwardMode, PoolError
from attnplug.host import MLADims
from attnplug.torch_native.attention import Softmax, attend
from attnplug.torch_native.planner import Extent
from attnplug_testing.devices import DEVICES
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelCase
from attnplug_testing.stage import Stage, error, small

# Measured against float64 as the largest difference over the largest magnitude (1 at least).
TOLERANCE = {DType.FLOAT32: 2e-6, DType.FLOAT16: 5e-3, DType.BFLOAT16: 2e-2}


def check(case: KernelCase, device: str = "cpu") -> None:
    stage = Stage(case, device)
    out, lse = stage.results()
    wanted, wanted_lse = stage.wanted()
    real = wanted.shape[0]
    if real:
        assert error(out[:real], wanted) <= TOLERANCE[case.dtype]
        assert lse is None or error(lse[:real], wanted_lse) <= TOLERANCE[case.dtype]
    assert (out[real:] == 0).all()
    assert out.dtype is stage.dtype


@st.composite
def cases(draw, mla: bool) -> KernelCase:
    mode = draw(st.sampled_from([m for m in ForwardMode if m is not ForwardMode.IDLE]))
    before = st.one_of(st.just(0), st.integers(1, 70))
    new = st.just(1) if mode is ForwardMode.DECODE else st.one_of(st.just(1), st.integers(1, 25))
    lengths = tuple(draw(st.lists(st.tuples(before, new), min_size=1, max_size=5)))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return small(
        lengths=lengths,
        mode=mode,
        page_size=draw(st.sampled_from([1, 2, 5, 16, 64])),
        heads=kv_heads * draw(st.sampled_from([1, 2, 4])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 64])),
        v_head_dim=draw(st.sampled_from([8, 16, 24, 64])),
        mla=draw(st.sampled_from([MLADims(32, 16, 8), MLADims(64, 8, 0), MLADims(512, 128, 64)])) if mla else None,
        window=draw(st.sampled_from([None, None, 1, 7, 1000])),
        cap=draw(st.sampled_from([None, None, 5.0, 50.0])),
        dtype=draw(st.sampled_from([DType.FLOAT32, DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16])),
        layout=draw(st.sampled_from(["token_major", "head_major"])),
        pages=draw(st.sampled_from(["shuffled", "interleaved", "descending"])),
        padding=draw(st.sampled_from([0, 0, 1, 5])),
        lse=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 16)),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_random_batches_of_mha_and_gqa_match_float64(device):
    """C4: log-sum-exp is natural, float32, [tokens, heads]. B5: padding rows give zeros."""

    @settings(max_examples=12)
    @given(cases(mla=False))
    def holds(case):
        check(case, device)

    holds()


@pytest.mark.parametrize("device", DEVICES)
def test_random_batches_of_mla_match_float64(device):
    """C4, absorbed MLA."""

    @settings(max_examples=8)
    @given(cases(mla=True))
    def holds(case):
        check(case, device)

    holds()


PAGE_EDGES = [
    ("page_size_1", ((2, 3), (4, 1)), 1),
    ("zero_prefix_exact_page", ((0, 16),), 16),
    ("zero_prefix_page_edges", ((0, 15), (0, 16), (0, 17)), 16),
    ("prefix_exact_page", ((16, 2),), 16),
    ("total_exact_page", ((8, 8),), 16),
    ("cross_page_boundary", ((15, 2),), 16),
    ("ragged_page_boundary", ((0, 15), (8, 8), (16, 1)), 16),
    ("page32_cross_boundary", ((31, 2),), 32),
]


@pytest.mark.parametrize("device", DEVICES)
def test_skewed_decode_batch_falls_into_groups(device):
    """One long and many short requests: padding all to the longest would read fifty times too much."""
    case = small(((5000, 1), *(((3, 1),) * 30), (4000, 1)), ForwardMode.DECODE, heads=2, kv_heads=1, head_dim=8)
    stage = Stage(case, device)
    batch = stage.batch()
    groups = stage.backend.init_forward_metadata(batch).metadata.groups
    assert sum(group.slots.numel() for group in groups) <= 2 * sum(stage.totals)
    check(case, device)


def test_decode_on_the_cpu_reads_few_rows_at_a_time(monkeypatch):
    """A group's copies fit into a core's cache; the groups cover the batch in its own order."""
    from attnplug.torch_native import planner

    monkeypatch.setattr(planner, "_CACHED_READ", 1000)
    case = small(tuple((90 + request % 5, 1) for request in range(40)), ForwardMode.DECODE, heads=4, kv_heads=2)
    stage = Stage(case, "cpu")
    groups = stage.backend.init_forward_metadata(stage.batch()).metadata.groups
    assert len(groups) > 1
    assert all(group.slots.numel() <= planner._CACHED_READ for group in groups)
    assert [row for group in groups for row in range(40)[group.rows]] == list(range(40))
    check(case)


def test_one_query_on_the_cpu_sees_its_own_keys_whatever_else_its_group_holds():
    """Lengths that differ are hidden by a bias that all layers share: for windows and for log-sum-exps, too."""
    lengths = ((0, 1), (70, 1), (15, 1), (16, 1))
    for window, lse, cap in ((None, False, None), (7, False, None), (None, True, None), (None, False, 5.0)):
        for mode in (ForwardMode.DECODE, ForwardMode.EXTEND):
            check(
                small(lengths, mode, heads=6, kv_heads=2, head_dim=16, v_head_dim=16, window=window, lse=lse, cap=cap)
            )


def test_decode_on_the_cpu_over_pages_in_place(monkeypatch):
    """NaN in every page that is not the batch's, and after each request's last row."""
    from attnplug.torch_native import backend

    monkeypatch.setattr(backend, "_MIN_SHARE", 0.0)
    monkeypatch.setattr(backend, "_MIN_PAGE_SIZE", 1)
    monkeypatch.setattr(backend, "_MIN_ROWS", 0)
    lengths = ((0, 1), (70, 1), (15, 1), (16, 1), (31, 1), (200, 1))
    for layout in ("token_major", "head_major"):
        for pages in ("shuffled", "interleaved", "descending"):
            for page_size in (1, 5, 16, 64):
                case = small(lengths, ForwardMode.DECODE, page_size=page_size, heads=6, kv_heads=2, head_dim=16,
                            v_head_dim=16, layout=layout, pages=pages, padding=1, lse=False)  # fmt: skip
                stage = Stage(case, "cpu")
                assert stage.backend.init_forward_metadata(stage.batch()).metadata.pages is not None
                check(case)


def test_decode_on_the_cpu_copies_rows_and_hides_what_comes_after_an_end():
    """The rest of each last page is NaN. Lengths have every remainder, equal and unequal."""
    for lengths in ((69, 70, 71, 72, 3, 8, 201), (70, 70), (71,)):
        for page_size, dtype in ((4, DType.FLOAT32), (16, DType.FLOAT32), (64, DType.FLOAT32), (16, DType.BFLOAT16)):
            for window, lse in ((None, False), (7, False), (None, True)):
                case = small(tuple((length, 1) for length in lengths), ForwardMode.DECODE, page_size=page_size, heads=6,
                            kv_heads=2, head_dim=16, v_head_dim=16, window=window, lse=lse, dtype=dtype,
                            pages="descending")  # fmt: skip
                check(case)


def test_rows_of_any_page_size_and_layout_are_copied():
    """Pages of 5 rows, a layout with gaps between rows, and a request of two rows."""
    for lengths, page_size, layout in (
        (((70, 1), (9, 1)), 5, "token_major"),
        (((70, 1), (9, 1)), 16, "head_major"),
        (((70, 1), (2, 1)), 16, "token_major"),
    ):
        check(
            small(lengths, ForwardMode.DECODE, page_size=page_size, heads=4, kv_heads=2, v_head_dim=16, layout=layout)
        )


def test_one_request_on_the_cpu_whose_pages_follow_each_other_is_read_without_a_copy(monkeypatch):
    """Pages in another order, and rows that are not adjacent in the layout, are copied."""
    from attnplug import MHAPool

    copies = []
    read = MHAPool.read
    monkeypatch.setattr(MHAPool, "read", lambda *of: copies.append(1) or read(*of))
    for pages, layout, copied in (
        ("interleaved", "token_major", False),
        ("descending", "token_major", True),
        ("interleaved", "head_major", True),
    ):
        copies.clear()
        check(small(((70, 1),), ForwardMode.DECODE, heads=4, kv_heads=2, v_head_dim=16, layout=layout, pages=pages))
        assert bool(copies) is copied


def test_rows_that_are_read_without_a_copy_are_attended_to_in_every_way():
    """Rows before and after the request are NaN. A window, a log-sum-exp and a cap take separate code paths."""
    for window, lse, cap in ((None, False, None), (7, False, None), (None, True, None), (None, False, 5.0)):
        case = small(((70, 1),), ForwardMode.DECODE, heads=4, kv_heads=2, head_dim=16, v_head_dim=16, window=window,
                    lse=lse, cap=cap, pages="interleaved")  # fmt: skip
        stage = Stage(case, "cpu")
        assert stage.backend.init_forward_metadata(stage.batch()).metadata.groups[0].run is not None
        check(case)


def test_rows_past_the_pool_are_refused_as_a_copy_of_them_would_be():
    """A slice of the pool would end with the pool and hide missing rows."""
    stage = Stage(small(((70, 1),), ForwardMode.DECODE, pages="interleaved"), "cpu")
    group = stage.backend.init_forward_metadata(stage.batch()).metadata.groups[0]
    past = stage.backend._mha.num_pages * stage.backend._mha.page_size - 1 - int(group.slots[0, 0])
    run = slice(group.run.start + past, group.run.stop + past)
    with raises_naming(PoolError, f"0 to {stage.backend._mha.num_pages * stage.backend._mha.page_size - 1}"):
        stage.backend._read(stage.layer, replace(group, slots=group.slots + past, run=run))


def test_rows_of_several_requests_past_the_pool_are_refused():
    stage = Stage(small(((70, 1), (30, 1)), ForwardMode.DECODE), "cpu")
    group = stage.backend.init_forward_metadata(stage.batch()).metadata.groups[0]
    past = stage.backend._mha.num_pages * stage.backend._mha.page_size
    with raises_naming(PoolError, f"0 to {past - 1}"):
        stage.backend._read(stage.layer, replace(group, slots=group.slots + past))


def test_pages_that_are_few_among_others_or_shared_are_copied(monkeypatch):
    """The gaps between a batch's pages would be attended to for nothing; a page in place has one request's query."""
    from attnplug import Geometry
    from attnplug.torch_native import backend

    def plan(table, new=(1, 1), length=130):
        mode = ForwardMode.DECODE if new == (1, 1) else ForwardMode.EXTEND
        return backend.PagesInPlace.of(
            Geometry.of_lengths(mode, torch.tensor(table).int(), list(new), [length, length], 64)
        )

    assert plan([[4, 5, 6], [7, 8, 99]]) is None, "256 rows are sooner copied than merged"
    monkeypatch.setattr(backend, "_MIN_ROWS", 256)
    assert plan([[4, 5, 6], [7, 8, 99]]) is not None, "last pages are copied, wherever they are"
    assert plan([[4, 5, 6], [7, 80, 9]]) is None
    assert plan([[4, 5, 6], [4, 7, 8]]) is None
    assert plan([[4, 5, 6], [7, 8, 9]], new=(0, 1)) is None, "there is not one query for each request"
    assert plan([[4, 5, 6], [7, 8, 9]], new=(1, 2)) is None
    assert plan([[4], [5]], length=64) is None, "last pages are all there is"


@pytest.mark.parametrize("device", DEVICES)
def test_long_prefill_is_cut_into_tiles(device, monkeypatch):
    """Scores never take more than a tile's memory, and the result does not depend on tiles."""
    from attnplug.torch_native import attention

    monkeypatch.setattr(attention, "_TILE_SCORES", 2000)
    for lse in (True, False):
        check(small(((100, 90), (0, 61)), heads=4, kv_heads=2, lse=lse), device)
        check(small(((100, 90),), heads=4, kv_heads=2, window=9, lse=lse), device)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("broken", ["query", "keys"])
def test_nan_is_not_hidden_by_the_fused_kernel_of_a_cpu(queries, broken):
    """torch's kernel returns 0 for rows with only NaN scores, which would hide a corrupt weight."""
    q, k, v = torch.randn(1, queries, 4, 16), torch.randn(1, 5, 2, 16), torch.randn(1, 5, 2, 16)
    (q if broken == "query" else k).fill_(float("nan"))
    extent = Extent.of(queries, [5 - queries], 5, torch.device("cpu"))
    out, _ = attend(q, k, v, extent, Softmax(0.25, None, None), lse=False)
    assert out.isnan().all()
