"""Long requests divided among multiprocessors: how many parts, which pages each has, and their results merged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug import BackendError, CacheLayout, ForwardMode
from attnplug.kernels import merge_partial
from attnplug_flashattention.kv_splits import KVSplits, pages_per_split
from attnplug_flashattention.merge import merge_splits
from attnplug_flashattention.options import FlashAttentionOptions
from attnplug_flashattention.planner import SplitHeuristic, split_call
from attnplug_flashattention.tables import fill_slots, fill_splits
from attnplug_flashattention.triton_kernels import launch_fill_slots, launch_fill_splits, launch_merge_splits
from attnplug_testing.devices import DEVICES
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelCase, KernelScene, check, mha
from attnplug_testing.references.flashattention import build, on_cpu, on_devices

H200 = SplitHeuristic(kv_heads=8, processors=132)
NAN, EMPTY = float("nan"), float("-inf")
on_every_device = pytest.mark.parametrize("device", DEVICES)


class TestHowMany:
    def test_one_long_request_fills_the_device(self):
        """Eight KV heads are eight of 132 multiprocessors; in 16 parts they are 128."""
        assert H200.num_splits(1, 16384) >= 16

    @pytest.mark.parametrize(("requests", "longest"), [(16, 4096), (17, 65536), (64, 8192), (256, 2048)])
    def test_a_full_device_is_left_alone(self, requests, longest):
        assert H200.num_splits(requests, longest) == 1

    @pytest.mark.parametrize("requests", [1, 4, 16])
    def test_short_requests_are_not_worth_a_merge(self, requests):
        assert H200.num_splits(requests, 512) == 1

    @given(st.integers(1, 300), st.integers(1, 1 << 17), st.sampled_from([1, 2, 8, 32]), st.integers(0, 40))
    def test_never_more_parts_than_tiles_or_than_allowed(self, requests, longest, kv_heads, most):
        parts = SplitHeuristic(kv_heads, 132, most).num_splits(requests, longest)
        assert 1 <= parts <= max(1, -(-longest // 128))
        assert not most or parts <= most
        assert parts == 1 or parts * requests * kv_heads <= 2 * 132

    def test_half_a_wave_too_many_is_cut_finer(self):
        """72 tiles would leave 60 multiprocessors idle; 3 parts each are two rounds of a third."""
        assert H200.num_splits(9, 65536) == 3


def table_of(requests: int, width: int, device: str = "cpu") -> torch.Tensor:
    pages = torch.randperm(requests * width, generator=torch.Generator().manual_seed(1))
    return pages.view(requests, width).int().to(device)


def rows_of(table: torch.Tensor, length: int, page_size: int) -> list[int]:
    """The slots of a request's first rows."""
    return [int(table[at // page_size]) * page_size + at % page_size for at in range(length)]


def check_parts(
    lens: list[int], count: int, page_size: int, kernel_page: int, device: str = "cpu", fill=fill_splits
) -> None:
    """Every row of every request is in exactly one of its parts, in order, and each part begins with a tile."""
    longest = max([*lens, 1])
    table = table_of(len(lens), -(-longest // page_size) + 1, device)
    for request, length in enumerate(lens):
        table[request, -(-length // page_size) :] = 1 << 29  # must not be read
    parts = KVSplits.empty(len(lens), longest, count, page_size, kernel_page, torch.device(device))
    fill(table, torch.tensor(lens, dtype=torch.int32, device=device), parts)
    kept, cut, part_lens = table.cpu(), parts.page_table.cpu(), parts.kv_lens.tolist()
    for request, length in enumerate(lens):
        mine = range(request * count, (request + 1) * count)
        found = [slot for part in mine for slot in rows_of(cut[part], part_lens[part], kernel_page)]
        assert found == rows_of(kept[request], length, page_size)
        begin = 0
        for part in mine:
            tile = 128 if count > 1 and 128 % kernel_page == 0 else kernel_page
            assert part_lens[part] == 0 or begin % tile == 0
            begin += part_lens[part]


class TestTables:
    @given(
        st.lists(st.one_of(st.just(0), st.integers(0, 700)), min_size=1, max_size=4),
        st.integers(1, 9),
        st.sampled_from([(1, 1), (16, 16), (64, 64), (128, 64), (256, 256), (256, 64), (48, 48), (144, 72)]),
    )
    def test_parts_cover_every_row_once(self, lens, count, sizes):
        check_parts(lens, count, *sizes)

    @on_every_device
    @pytest.mark.parametrize(
        ("count", "sizes"),
        [
            (1, (16, 16)),
            (1, (256, 64)),
            (2, (1, 1)),
            (2, (128, 64)),
            (2, (144, 72)),
            (5, (64, 64)),
            (5, (144, 72)),
            (16, (16, 16)),
            (16, (256, 64)),
        ],
    )
    def test_the_kernel_does_the_same(self, count, sizes, device):
        """On a CPU, it runs in Triton's interpreter."""
        longest = 700 if device == "cpu" else 5000
        check_parts([longest, 0, 1, 127, 128, 129, 300], count, *sizes, device, launch_fill_splits)

    def test_parts_are_equally_long(self):
        assert pages_per_split(256, 16, 64) == 16
        assert pages_per_split(257, 16, 64) == 18
        assert pages_per_split(3, 1, 64) == 3

    @on_every_device
    @pytest.mark.parametrize("fill", [fill_slots, launch_fill_slots])
    @pytest.mark.parametrize("queries", [1, 4])
    def test_slots_of_new_rows_and_of_padding(self, queries, fill, device):
        table = table_of(4, 3, device)
        lens = [queries + 20, 0, queries, 49]  # the last one has more rows than its table
        slots = torch.full((4 * queries,), 7, dtype=torch.int64, device=device)
        fill(table, torch.tensor(lens, dtype=torch.int32, device=device), 16, slots)
        kept = table.cpu()
        for request, length in enumerate(lens):
            positions = range(length - queries, length)
            wanted = [int(kept[request, p // 16]) * 16 + p % 16 if 0 <= p < 48 else -1 for p in positions]
            assert slots[request * queries : (request + 1) * queries].tolist() == wanted


class TestMerge:
    @on_every_device
    @pytest.mark.parametrize("merge", [merge_splits, launch_merge_splits])
    @pytest.mark.parametrize(("dim", "count"), [(64, 1), (96, 2), (256, 7), (64, 16), (96, 33)])
    def test_batched_parts_equal_parts_one_by_one(self, dim, count, merge, device):
        """C4: the same as core's merge; empty parts hold NaN, which is not looked at; all of them empty is zero."""
        random = torch.Generator(device).manual_seed(count)
        rows, heads = 4, 3
        out = torch.randn(rows * count, heads, dim, generator=random, device=device)
        lse = 4 * torch.randn(heads, rows * count, generator=random, device=device).T
        empty = torch.rand(rows * count, heads, generator=random, device=device) < 0.3
        empty[:count] = True
        lse[empty], out[empty] = EMPTY, NAN
        sums = torch.empty(rows, heads, device=device)
        merged = merge(out, lse, count, sums)
        parts, part_lse = out.unflatten(0, (rows, count)), lse.unflatten(0, (rows, count))
        wanted, wanted_lse = torch.zeros_like(merged), torch.full_like(sums, EMPTY)
        for number in range(count):
            wanted, wanted_lse = merge_partial(wanted, wanted_lse, parts[:, number], part_lse[:, number])
        torch.testing.assert_close(merged, wanted, atol=2e-6, rtol=2e-5)
        torch.testing.assert_close(sums, wanted_lse, atol=1e-5, rtol=1e-5)
        assert (merged[0] == 0).all() and (sums[0] == EMPTY).all()
        assert torch.equal(merge(out, lse, count, None), merged)


LONG = ((4000, 1), (0, 1), (900, 1))


def scene(case: KernelCase, kernel: str, device: str) -> KernelScene:
    return KernelScene(on_cpu(case) if device == "cpu" else case, device, build(kernel))


@on_devices("fa4")
@pytest.mark.parametrize(("page_size", "most"), [(1, 5), (16, 0), (64, 1), (128, 2), (256, 5)])
def test_divided_requests_give_the_same(page_size, most, kernel, device):
    """C4: results do not depend on the number of splits or on how unequal the requests are. Rows that must not be read
    are NaN."""
    lens = ((300, 1), (0, 1), (77, 1)) if device == "cpu" and page_size == 1 else LONG
    options = FlashAttentionOptions(most_parts=most)
    stage = scene(mha(lens, ForwardMode.DECODE, page_size, 8, 1, options=options), kernel, device)
    split = stage.backend.init_forward_metadata(stage.batch()).metadata.cached.split
    if lens is LONG:
        assert (1 if split is None else split.count) == (most or pytest.approx(30, abs=14))
    check(stage)


@on_devices("fa4")
def test_a_layer_with_a_window_is_not_divided(kernel, device):
    """It sees few keys, and the window would start again in every split."""
    stage = scene(mha(LONG, ForwardMode.DECODE, 64, 8, 1, window=150), kernel, device)
    split = stage.backend.init_forward_metadata(stage.batch()).metadata.cached.split
    assert split is not None  # the batch is: other layers may have no window
    check(stage)


def test_kernels_that_divide_by_themselves_are_left_to_it():
    stage = scene(mha(LONG, ForwardMode.DECODE, 256, 8, 1), "torch", "cpu")
    assert stage.backend.init_forward_metadata(stage.batch()).metadata.cached.split is None


def test_a_divided_call_is_as_wide_as_its_longest_part():
    parts = KVSplits.empty(2, 5000, 4, 64, 64, torch.device("cpu"))
    call = split_call(parts).call
    assert (call.longest, call.queries, call.causal) == (1280, 1, False)


def test_a_negative_number_of_parts_is_refused():
    with raises_naming(ValueError, "most_parts=-1"):
        replace(FlashAttentionOptions(), most_parts=-1)


def test_pages_that_cannot_be_cut_are_refused():
    """128 rows of one head together, and then those of the next: there are no pages of 64 in there."""
    case = mha(((20, 1),), ForwardMode.DECODE, 128, layout=CacheLayout.HEAD_MAJOR)
    with pytest.raises(Exception, match="64") as caught:
        scene(case, "fa4", "cpu")
    assert not isinstance(caught.value, BackendError)
