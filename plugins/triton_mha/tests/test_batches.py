"""Batches against float64, by the kernels themselves: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import SCRATCH, BackendContext, ForwardExtras, ForwardMode
from attnplug_conformance.arithmetic import relative_error
from attnplug_conformance.case import LAYER
from attnplug_testing.batches import with_plan
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.kernel_scene import KernelScene, lengths, mha, ragged
from attnplug_triton_mha.configurations import ENTRIES, TABLE, MHAKernelConfig
from attnplug_triton_mha.plugin import COUNTERS
from interpreted_mha import build, check, on, scene, small

DECODE, VERIFY, DRAFT_EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
EXTEND, MIXED = ForwardMode.EXTEND, ForwardMode.MIXED
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])
modes = pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3), (EXTEND, 20)])


class TestBatches:
    @on_every_device
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (EXTEND, 20)])
    def test_a_cap_sinks_and_a_window_at_once(self, mode, new, device):
        check(mha(((90, new), (3, new)), mode, 16, 4, 2, 32, cap=2.0, sinks=True, window=30), device)

    @on_every_device
    @pytest.mark.parametrize("tile", [16, 64])
    def test_a_negative_scale(self, tile, device, monkeypatch):
        """Large tiles look for the largest product before they scale it."""
        monkeypatch.setattr("attnplug_conformance.case.SCALE", -1.5)
        config = MHAKernelConfig(tile, 16, 4, 2, programs=2, overlap=False)
        check(mha(((90, 40), (3, 20)), EXTEND, 16, 4, 2, 32), device, lambda *_: config)

    @on_every_device
    def test_the_page_table_is_read_where_it_lies(self, device):
        """A slice of a larger table, with strided columns."""
        stage = scene(mha(((130, 1), (64, 1), (1, 1)), DECODE, heads=4, head_dim=32), device)
        batch = stage.batch()
        table = batch.geometry.page_table
        wide = torch.full((8, 3 * len(table)), 1 << 30, dtype=torch.int32, device=device)
        view = wide.T[::3, : table.shape[1]].copy_(table)
        batch.geometry = replace(batch.geometry, page_table=view)
        assert stage.error(batch) <= stage.tolerance

    @on_every_device
    def test_queries_whose_columns_are_apart(self, device):
        stage = scene(mha(((20, 1), (9, 1)), DECODE, 16, 4, 2, 32), device)
        batch = stage.plan(stage.batch())
        q, k, v = stage.inputs(batch.num_tokens)
        apart = q.transpose(1, 2).contiguous().transpose(1, 2)
        assert apart.stride(2) != 1
        assert relative_error(stage.forward(batch, (apart, k, v)), stage.wanted()[0]) <= stage.tolerance

    @on_every_device
    def test_the_result_goes_to_memory_with_gaps(self, device):
        stage = scene(mha(((20, 1), (9, 1)), DECODE, 16, 4, 2, 32), device)
        out = torch.zeros(2, 4, 64, dtype=stage.dtype, device=device)[..., ::2]
        assert stage.forward(stage.plan(stage.batch()), extras=ForwardExtras(out=out)) is out
        assert relative_error(out, stage.wanted()[0]) <= stage.tolerance

    @on_a_gpu
    @pytest.mark.parametrize("mode", [DECODE, VERIFY, EXTEND])
    def test_planning_and_running_wait_for_nothing(self, mode, device):
        given = ((30, 1), (4, 1)) if mode is DECODE else ((30, 3), (4, 3)) if mode is VERIFY else ((30, 9), (0, 2))
        stage = scene(mha(given, mode, 16, 4, 2, 32), device)
        stage.results()  # compiles what there is to compile
        batch = stage.batch()
        with nothing_waits(device):
            out = stage.forward(stage.plan(batch))
        assert relative_error(out, stage.wanted()[0]) <= stage.tolerance


def test_layers_of_different_shapes_have_schedules_of_their_own():
    """Windows and heads may differ from layer to layer; each layer is planned for, and new rows once."""

    def with_another(context: BackendContext):
        first, *others = context.model.layers
        layers = (replace(first, sliding_window=5), *others)
        return build(replace(context, model=replace(context.model, layers=layers)))

    stage = KernelScene(on(mha(((70, 1), (3, 1)), DECODE, 16, 4, 2, 32), "cpu"), "cpu", with_another)
    batch = stage.plan(stage.batch())
    assert {shape.window for shape in batch.plan.attention.metadata.schedules} == {0, 5}
    assert stage.error(batch) <= stage.tolerance


class TestDivision:
    @on_every_device
    @pytest.mark.parametrize(
        ("mode", "new", "changes"),
        [
            (DECODE, 1, {"programs": 5}),
            (DECODE, 1, {"programs": 9, "single": True}),
            (VERIFY, 3, {"programs": 4, "single": True, "step": 64}),
            (VERIFY, 3, {"tile": 32, "step": 32}),
            (EXTEND, 50, {"tile": 64, "programs": 9}),
        ],
        ids=str,
    )
    @pytest.mark.sample(2)
    def test_ways_to_cut(self, mode, new, changes, device):
        """Requests of several parts and tiles, and of one, in one batch."""
        cut = replace(MHAKernelConfig(16, 16, 4, 2, programs=2, overlap=False), **changes)
        given = ((170, new), (0, new), (3, new), (40, new))
        check(mha(given, mode, 16, heads=4, head_dim=32), device, lambda *_: cut)

    @on_every_device
    def test_many_parts_are_merged_by_several_rounds(self, device):
        cut = MHAKernelConfig(16, 16, 4, 2, programs=15, overlap=False)
        case = mha(((600, 1),), DECODE, heads=8, kv_heads=1, head_dim=32, v_head_dim=32)
        stage = check(case, device, lambda *_: cut)
        ((schedule, _),) = stage.backend.init_forward_metadata(stage.batch()).metadata.schedules.values()
        assert schedule.records[0, 9] > 32, "more than are merged at once"

    @on_every_device
    def test_the_same_batch_gives_the_same_bits_and_leaves_counters_at_zero(self, device):
        """The last program to finish merges the parts in their order, not in the order in which they finished."""
        stage = scene(mha(((150, 1), (40, 1), (2, 1)), DECODE, heads=4, head_dim=32), device)
        first, first_lse = stage.results()
        for _ in range(1 if device == "cpu" else 100):
            again, again_lse = stage.results()
            assert torch.equal(again, first) and torch.equal(again_lse, first_lse)
        counters = stage.workspace.request("test", stage.device, COUNTERS, 1).buffer
        assert counters.numel() > 1 and not counters.any()


class TestOnAGPU:
    """Everything that the spec claims, on a GPU only, because every shape compiles a kernel."""

    @on_a_gpu
    @pytest.mark.parametrize("entry", sorted(set(ENTRIES), key=str), ids=str)
    @pytest.mark.parametrize("dim", [64, 128, 256])
    def test_every_entry_of_the_table_serves_every_batch(self, entry, dim, device):
        for given, mode in (
            (lengths(5, 5000, 1, seed=1), DECODE),
            (lengths(3, 2000, 4, seed=2), VERIFY),
            (ragged(6, 2000, 300, seed=3), EXTEND),
        ):
            check(mha(given, mode, heads=8, head_dim=dim), device, lambda *_: entry)

    @on_a_gpu
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "page_size", "requests"),
        [(32, 8, 64, 60), (8, 8, 16, 7), (16, 1, 1, 60), (14, 2, 16, 7), (71, 1, 64, 1)],
    )
    def test_decode(self, requests, page_size, heads, kv_heads, device):
        given = lengths(requests, 3000, 1, seed=heads + requests)
        check(mha(given, DECODE, page_size, heads, kv_heads), device)

    @on_a_gpu
    @pytest.mark.parametrize("new", [1, 2, 4, 8, 17])
    def test_verify(self, new, device):
        check(mha(lengths(4, 2500, new, seed=new), VERIFY, heads=32, kv_heads=8), device)

    @on_a_gpu
    @pytest.mark.parametrize("window", [None, 100])
    @pytest.mark.parametrize("seed", range(3))
    def test_extend(self, seed, window, device):
        given = ragged(9, 3000, 300, seed)
        check(mha(given, EXTEND, 16, 32, 8, 128, window=window, padding=seed), device)

    @on_a_gpu
    @pytest.mark.parametrize(
        ("dim", "changes"),
        [
            (64, {"page_size": 16, "window": 100, "cap": 5.0, "sinks": True}),
            (64, {"page_size": 256, "heads": 16, "kv_heads": 2}),
            (128, {"padding": 3}),
            (128, {"page_size": 32, "window": 1000}),
            (128, {"v_head_dim": 64, "heads": 8, "kv_heads": 8, "page_size": 128}),
            (64, {"heads": 64, "kv_heads": 1, "cap": 5.0}),
        ],
        ids=str,
    )
    def test_what_the_kernel_of_long_prompts_supports(self, dim, changes, device):
        """Prompts are short here, so that float64 is fast; many are split."""
        long = TABLE[-1][-1]
        case = mha(ragged(7, 5000, 200, seed=dim), EXTEND, **{"heads": 32, "kv_heads": 8, "head_dim": dim, **changes})
        stage = check(case, device, lambda *_: long)
        ((schedule, _),) = stage.backend._metadata(stage.geometry()).schedules.values()
        assert schedule.configuration.specialized == (torch.cuda.get_device_capability() == (9, 0))

    @on_a_gpu
    @pytest.mark.parametrize("dim", [64, 128])
    def test_a_long_prompt_has_the_same_bits_again(self, dim, device):
        case = mha(((100, 2100), (5000, 40)), EXTEND, heads=8, kv_heads=2, head_dim=dim)
        stage = scene(case, device, lambda *_: TABLE[-1][-1])
        first = stage.results()[0]
        assert relative_error(first, stage.wanted()[0]) <= stage.tolerance
        assert all(torch.equal(stage.results()[0], first) for _ in range(5))

    @on_a_gpu
    @pytest.mark.parametrize("requests", [1, 7, 60, 200])
    def test_the_same_bits_on_real_batches(self, requests, device):
        stage = scene(mha(lengths(requests, 9000, 1, seed=requests), DECODE, heads=32, kv_heads=8), device)
        first = stage.results()[0]
        assert all(torch.equal(stage.results()[0], first) for _ in range(20))

    @on_a_gpu
    @pytest.mark.parametrize("requests", [1, 30])
    @pytest.mark.parametrize(
        ("mode", "heads"),
        [
            (DECODE, {"heads": 32, "kv_heads": 8}),
            (DECODE, {"heads": 16, "kv_heads": 2, "head_dim": 256}),
            (EXTEND, {"heads": 32, "kv_heads": 8}),
        ],
    )
    def test_kernels_that_are_launched_early(self, mode, heads, requests, device):
        """Queries and new rows are made by a kernel that lets the next ones begin at once, and is late with both."""
        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("kernels wait for each other on the device from SM 90 on")
        from attnplug_testing.late_kernel import fill_late

        new, choose = (1, None) if mode is DECODE else (40, lambda *_: TABLE[-1][-1])
        stage = scene(mha(((5000, new),) * requests, mode, lse=False, **heads), device, choose)
        memory = stage.pool.keys(LAYER), stage.pool.values(LAYER)
        before, first = [pages.clone() for pages in memory], stage.results()[0]
        assert relative_error(first, stage.wanted()[0]) <= stage.tolerance
        given = list(stage.inputs(len(stage.q)))
        flat = torch.cat([tensor.flatten() for tensor in given])
        late = torch.empty_like(flat)
        parts = late.split([tensor.numel() for tensor in given])
        late_q, late_k, late_v = (part.view_as(tensor) for part, tensor in zip(parts, given, strict=True))
        for _ in range(3):
            batch = stage.batch()
            # A kernel that reads too soon finds NaN: in queries, in new rows, at their slots, and in partial results.
            late.fill_(float("nan"))
            for pages, old in zip(memory, before, strict=True):
                pages.copy_(old)
            stage.workspace.request("test", stage.device, SCRATCH, 1).buffer.fill_(255)
            with_plan(batch, stage.backend.init_forward_metadata(batch))
            torch.cuda.synchronize()
            fill_late(late, flat, milliseconds=20)
            run = stage.backend.forward_decode if mode is DECODE else stage.backend.forward_extend
            out = run(late_q, late_k, late_v, stage.layer, batch)
            assert torch.equal(out, first)


def test_the_imaginary_gpu_divides():
    """The tests above rely on this: a long request is split, and short ones are not."""
    for prefix, cut in ((150, True), (3, False)):
        stage = scene(mha(((prefix, 1), (3, 1)), DECODE, heads=4, head_dim=32), "cpu", small)
        ((schedule, _),) = stage.backend.init_forward_metadata(stage.batch()).metadata.schedules.values()
        assert (int(schedule.records[0, 9]) > 1) is cut
