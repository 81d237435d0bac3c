"""Batches against float64, by the kernels themselves: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attnplug import SCRATCH, DType, ForwardExtras, ForwardMode
from attnplug.host import MLADims
from attnplug_conformance.arithmetic import pad_rows, relative_error
from attnplug_conformance.case import LAYER
from attnplug_conformance.diagnosis import check_output
from attnplug_conformance.scene import Output
from attnplug_testing.batches import with_plan
from attnplug_testing.devices import DEVICES
from attnplug_testing.kernel_scene import KernelScene, lengths, mla, ragged
from attnplug_testing.references.triton_mla import MULTIPROCESSORS, check, scene, small
from attnplug_triton_mla.configurations import ENTRIES, MLAKernelConfig
from attnplug_triton_mla.scratch import COUNTERS

DECODE, VERIFY, DRAFT_EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
EXTEND, MIXED = ForwardMode.EXTEND, ForwardMode.MIXED
FP8, FP8_TOLERANCE = DType.FLOAT8_E4M3, 2e-2
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])
modes = pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3), (EXTEND, 5)])


class TestBatches:
    """Batches that the quick run of the conformance kit leaves out."""

    @on_every_device
    @pytest.mark.parametrize(("requests", "heads", "page_size"), [(1, 16, 64), (3, 8, 1), (5, 3, 16), (4, 24, 48)])
    @pytest.mark.sample(2)
    def test_decode(self, requests, heads, page_size, device):
        """C4; NaN in every row that must not be read."""
        longest = 90 if device == "cpu" else 3000
        check(mla(lengths(requests, longest, 1, seed=heads + requests), DECODE, page_size, heads), device)

    @on_every_device
    @pytest.mark.parametrize(("heads", "new"), [(4, 5), (24, 2)])
    @pytest.mark.sample(1)
    def test_verify_of_a_few_tokens(self, heads, new, device):
        """Causal: each of the new tokens sees those before it."""
        longest = 70 if device == "cpu" else 2500
        check(mla(lengths(3, longest, new, seed=new), VERIFY, 16, heads), device)

    @on_every_device
    def test_a_draft_extends_by_different_numbers_of_tokens(self, device):
        check(mla(((90, 4), (0, 1), (64, 2)), DRAFT_EXTEND, heads=4), device)

    @on_every_device
    @pytest.mark.parametrize(("mode", "page_size"), [(EXTEND, 48), (MIXED, 1)])
    def test_extend_by_different_numbers_of_tokens(self, mode, page_size, device):
        """Some requests bring many, some one, some none."""
        given = ((50, 9), (0, 20), (3, 1), (40, 0), (0, 0), (100, 5), (1, 1))
        check(mla(given, mode, page_size, heads=2, padding=3, pages="descending"), device)

    @on_every_device
    @modes
    @pytest.mark.sample(2)
    def test_lengths_that_differ_a_thousandfold(self, mode, new, device):
        longest = 2000 if device == "cpu" else 40000
        cut = (lambda *_, **__: MLAKernelConfig(16, 128, 4, 2, merge="last")) if device == "cpu" else None
        check(mla(((longest, new), (0, new), (7, new), (64, new)), mode, heads=2), device, cut)

    @on_every_device
    def test_float16(self, device):
        check(mla(lengths(4, 70, 3, seed=3), VERIFY, heads=2, dtype=DType.FLOAT16), device)

    @on_every_device
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (EXTEND, 5)])
    def test_an_fp8_cache_with_its_scale(self, mode, new, device):
        given = lengths(3, 70, new, seed=4)
        stage = scene(mla(given, mode, heads=2, dtype=DType.FLOAT16, kv_dtype=FP8, kv_scales=(0.37, 0.37)), device)
        assert stage.error() <= FP8_TOLERANCE

    @on_every_device
    def test_small_queries_over_a_large_fp8_cache(self, device):
        """Queries that are so small that fp16, in which fp8 rows are multiplied, would keep only a bit or two."""
        given = ((90, 1), (40, 1))
        stage = scene(mla(given, DECODE, heads=2, kv_dtype=FP8, kv_scales=(1e7, 1e7)), device)
        stage.keys = [rows * 1e7 for rows in stage.keys]
        stage.values = [rows[..., : stage.widths[1]] for rows in stage.keys]
        stage.store(LAYER, [(0, before) for before, _ in given])
        stage.q *= 1e-7
        assert stage.error() <= FP8_TOLERANCE

    @on_every_device
    @pytest.mark.parametrize(("rank", "rope"), [(512, 64), (512, 0), (256, 64), (256, 0)])
    @pytest.mark.sample(2)
    def test_every_width_that_is_claimed(self, rank, rope, device):
        check(mla(((90, 1), (5, 1)), DECODE, heads=8, dims=MLADims(rank, 128, rope)), device)

    @on_every_device
    @pytest.mark.parametrize("mode", [EXTEND, VERIFY])
    def test_an_upper_bound_of_the_rows(self, mode, device):
        """Planned rows that belong to no request come out as padding, found on the device."""
        stage = scene(mla(((70, 5), (3, 2)), mode, heads=4, padding=2, exact=False), device)
        batch = stage.batch()
        batch.geometry = replace(batch.geometry, rows=9)
        check_output(stage, Output(*stage.results(batch), 0.0, 0.0))
        assert batch.plan.attention.query_rows == 9 and stage.written() == sum(stage.totals)

    @on_every_device
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (EXTEND, 4)])
    @pytest.mark.sample(1)
    def test_memory_of_the_host_for_the_result(self, mode, new, device):
        """Kernels write to memory that they can address; otherwise the result is copied there."""
        stage = scene(mla(((70, new), (3, new)), mode, heads=4), device)
        wanted = stage.wanted()[0]
        plain = stage.q.new_empty(wanted.shape)
        for memory in (plain, plain.transpose(0, 1).contiguous().transpose(0, 1)):
            assert stage.forward(stage.plan(stage.batch()), extras=ForwardExtras(out=memory)) is memory
            assert relative_error(memory, wanted) <= stage.tolerance

    @on_every_device
    @pytest.mark.parametrize(
        ("heads", "kv_dtype", "mode", "new"), [(4, None, VERIFY, 3), (4, FP8, EXTEND, 5), (24, None, DECODE, 1)]
    )
    @pytest.mark.sample(2)
    def test_queries_in_two_parts(self, heads, kv_dtype, mode, new, device):
        """Queries of a host that absorbs itself: latent parts by head, rotary parts within wider rows."""
        given = lengths(3, 60, new, seed=heads)
        stage = scene(mla(given, mode, heads=heads, kv_dtype=kv_dtype, dtype=DType.FLOAT16, padding=2), device)
        joined, lse = stage.results()
        rank, q = stage.case.mla.kv_lora_rank, pad_rows(stage.q, len(joined))
        latent, rope = q[..., :rank].transpose(0, 1).contiguous().transpose(0, 1), q[..., rank:].contiguous()
        wider = torch.cat([torch.full_like(q[..., :rank], float("nan")), rope], -1)[..., rank:]
        again = torch.full_like(lse, float("nan"))
        extras = ForwardExtras(lse=again, q_rope=wider)
        out = stage.forward(stage.plan(stage.batch()), (latent, None, None), save=False, extras=extras)
        assert torch.equal(out, joined) and torch.equal(again, lse)

    @on_every_device
    def test_a_page_table_by_its_strides(self, device):
        """A page table is read in place by its strides, even if it is a view of a larger one."""
        stage = scene(mla(((130, 1), (64, 1), (1, 1)), DECODE, heads=4), device)
        batch = stage.batch()
        table = batch.geometry.page_table
        wide = torch.full((8, 3 * len(table)), 1 << 30, dtype=torch.int32, device=device)
        view = wide.T[::3, : table.shape[1]].copy_(table)
        batch.geometry = replace(batch.geometry, page_table=view)
        assert stage.error(batch) <= stage.tolerance


class TestConfigurations:
    """All tile and split configurations and ways to merge give the same result. Only the table says which is fast."""

    @on_every_device
    @pytest.mark.parametrize(
        ("mode", "new", "merge", "changes"),
        [
            (VERIFY, 3, "kernel", {}),
            (EXTEND, 5, "last", {}),
            (DECODE, 1, "last", {"programs": 3}),
            (EXTEND, 5, "last", {"least_steps": 3}),
            (VERIFY, 3, "kernel", {"part_cost": 2.0}),
            (VERIFY, 3, "kernel", {"tile": 32, "step": 32, "merge_columns": 16}),
            (EXTEND, 5, "last", {"tile": 32, "step": 32, "merge_columns": 16}),
            (DECODE, 1, "kernel", {"merge_parts": 2, "merge_columns": 16, "programs": 3}),
        ],
        ids=lambda value: ",".join(value) or "plain" if isinstance(value, dict) else None,
    )
    @pytest.mark.sample(5)
    def test_ways_to_cut_and_merge(self, mode, new, merge, changes, device):
        """Parts of long requests, several requests in one program, and both at once."""
        cut = replace(MLAKernelConfig(16, 16, 4, 2, merge=merge, merge_columns=64), **changes)
        given = ((70, new), (0, new), (3, new), (40, new))
        check(mla(given, mode, heads=2), device, lambda *_, **__: cut)

    @on_every_device
    @pytest.mark.parametrize(("mode", "new", "merge"), [(DECODE, 1, "kernel"), (VERIFY, 3, "last")])
    @pytest.mark.sample(1)
    def test_tiles_with_a_lead(self, mode, new, merge, device):
        """Among long and short requests, every tile's parts begin behind its lead, and the merge reads them there."""
        cut = MLAKernelConfig(16, 16, 4, 2, programs=4, start_steps=5, merge=merge, merge_columns=512)
        given = ((3, new), (300, new), (0, new), (90, new))
        stage = check(mla(given, mode, heads=2), device, lambda *_, **__: cut)
        assert stage.backend.init_forward_metadata(stage.batch()).metadata.schedule.numbers[2] == 5

    @on_every_device
    @pytest.mark.parametrize("merge_parts", [64, 32])
    @pytest.mark.sample(1)
    def test_a_tile_of_many_parts(self, merge_parts, device):
        """More than the shorter piece of code takes at once: by the longer one, or by the shorter one twice."""
        cut = MLAKernelConfig(16, 16, 4, 2, programs=14, merge_parts=merge_parts, merge_columns=512)
        stage = check(mla(((630, 1),), DECODE, heads=2), device, lambda *_, **__: cut)
        schedule = stage.backend.init_forward_metadata(stage.batch()).metadata.schedule
        stretch, line, *_ = schedule.numbers.tolist()
        assert line / stretch > 32

    @on_a_gpu
    @pytest.mark.parametrize("entry", sorted(set(ENTRIES), key=str), ids=str)
    def test_every_entry_of_the_table_serves_every_batch(self, entry, device):
        heads = 16 if entry.tile == 16 else 128
        for given, mode in ((lengths(5, 5000, 1, seed=1), DECODE), (lengths(3, 2000, 4, seed=2), VERIFY)):
            check(mla(given, mode, heads=heads), device, lambda *_, **__: entry)
        if entry.kernel == "triton":
            check(mla(ragged(6, 2000, 50, seed=3), EXTEND, heads=heads), device, lambda *_, **__: entry)

    @on_a_gpu
    @pytest.mark.parametrize(
        ("mode", "new", "heads", "prefixes"), [(VERIFY, 8, 24, (0, *[60] * 40)), (DRAFT_EXTEND, 100, 16, (0, 30, 70))]
    )
    def test_parts_that_see_no_row(self, mode, new, heads, prefixes, device):
        """A program may begin with the last step of a request, which early tokens do not see, and continue with the
        next tile."""
        check(mla(tuple((prefix, new) for prefix in prefixes), mode, heads=heads), device)

    @pytest.mark.parametrize(("kernel", "tile"), [("triton", 16), ("low", 16), ("wide", 64)])
    def test_queries_lie_as_the_kernels_read_them(self, kernel, tile, monkeypatch):
        """Gluon kernels copy 16 bytes at a time, and are compiled only for addresses and strides that are multiples of
        16."""
        from attnplug_triton_mla import attention

        given: list[torch.Tensor] = []
        launched = {(MULTIPROCESSORS,): lambda q, *_, **__: given.append(q)}
        for name in ("attend", "attend_low", "attend_wide"):
            monkeypatch.setattr(attention, name, launched)
        case, cut = mla(((9, 1), (3, 1)), DECODE, heads=4), MLAKernelConfig(tile, 64, 8, 2, kernel)
        stage = scene(case, "cpu", lambda *_, **__: cut)
        batch, rows = stage.batch(), torch.zeros(2, 1, 48)
        with_plan(batch, stage.backend.init_forward_metadata(batch))
        memory, multiple = torch.randn(2 * 4 * 49 + 1), 1 if kernel == "triton" else 16
        plain, by_column = torch.randn(2, 4, 48), torch.randn(48, 2, 4).permute(1, 2, 0)
        odd_strides, odd_address = memory[:-1].view(2, 4, 49)[..., :48], memory[1 : 1 + plain.numel()].view(2, 4, 48)
        for q in (plain, by_column, odd_strides, odd_address):
            stage.backend.forward_decode(q, rows, None, stage.layer, batch)
            assert torch.equal(given[-1], q) and given[-1].stride(2) == 1
            assert not any(number % multiple for number in (given[-1].data_ptr(), *given[-1].stride()[:2]))
        assert given[0] is plain, "nothing is copied without need"

    def test_heads_that_lie_further_apart_than_kernels_count(self):
        """Each head's queries in a block of their own, as a product by heads leaves them."""
        from attnplug_triton_mla.attention import aligned

        q = torch.empty(128, 40_000, 576, dtype=torch.bfloat16, device="meta").transpose(0, 1)
        assert 127 * q.stride(1) >= 1 << 31 and aligned(q).is_contiguous()
        assert aligned(q[:, :64]).stride() == q.stride()

    @on_a_gpu
    @pytest.mark.parametrize("entry", sorted({entry for entry in ENTRIES if entry.merge == "kernel"}, key=str), ids=str)
    def test_kernels_that_are_launched_early(self, entry, device):
        """New rows are written, read and merged by kernels that are launched before the one in front is done.

        The first one lets the others begin at once, and is late with queries and rows: all of them have to wait.
        """
        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("kernels wait for each other on the device from SM 90 on")
        from attnplug_testing.late_kernel import fill_late

        heads = 16 if entry.tile == 16 else 128
        stage = scene(mla(((20000, 1), (5, 1)), DECODE, heads=heads), device, lambda *_, **__: entry)
        memory = stage.pool.rows(LAYER)
        before, first = memory.clone(), stage.results()[0]
        assert relative_error(first, stage.wanted()[0]) <= stage.tolerance
        q, k = stage.q, stage.new_rows(stage.keys)
        given, late = (
            torch.cat([q.flatten(), k.flatten()]),
            torch.empty(q.numel() + k.numel(), dtype=q.dtype).to(device),
        )
        late_q, late_k = late[: q.numel()].view_as(q), late[q.numel() :].view_as(k)
        lse = torch.empty(q.shape[:2], device=device)
        for _ in range(3):
            batch = stage.batch()
            # A kernel that reads too soon finds NaN: in queries, in new rows, at their slots, and in partial results.
            late.fill_(float("nan"))
            memory.copy_(before)
            stage.workspace.request("test", stage.device, SCRATCH, 1).buffer.fill_(255)
            with_plan(batch, stage.backend.init_forward_metadata(batch))
            torch.cuda.synchronize()
            fill_late(late, given, milliseconds=20)
            out = stage.backend.forward_decode(late_q, late_k, None, stage.layer, batch, extras=ForwardExtras(lse=lse))
            assert torch.equal(out, first)


class TestBits:
    @on_every_device
    @pytest.mark.parametrize("merge", ["last", "kernel"])
    @pytest.mark.sample(1)
    def test_the_same_batch_gives_the_same_bits(self, merge, device):
        """The last program to finish merges the parts in their order and resets its counter to zero."""
        cut = replace(small(16, 4, 64), merge=merge)
        stage = scene(mla(((150, 1), (40, 1), (2, 1), (64, 1)), DECODE, heads=2), device, lambda *_, **__: cut)
        first, first_lse = stage.results()
        for _ in range(1 if device == "cpu" else 100):
            again, again_lse = stage.results()
            assert torch.equal(again, first) and torch.equal(again_lse, first_lse)
        counters = stage.workspace.request("test", stage.device, COUNTERS, 1).buffer
        assert counters.numel() > 1 and not counters.any()

    @on_a_gpu
    @pytest.mark.parametrize("heads", [16, 128])
    @pytest.mark.parametrize("requests", [1, 7, 60, 200])
    def test_the_same_bits_on_real_batches(self, requests, heads, device):
        stage = scene(mla(lengths(requests, 9000, 1, seed=requests), DECODE, heads=heads), device)
        first = stage.results()[0]
        assert all(torch.equal(stage.results()[0], first) for _ in range(20))

    @on_every_device
    def test_without_a_level_the_batch_decides(self, device):
        """Shows that tests of invariance can fail: with others in the batch, the same request is split elsewhere."""
        if device == "cpu":
            cut = small(16, 4, 64)  # the same for both
            alone = self.parts(scene(mla(((150, 1),), DECODE, heads=4), device, lambda *_, **__: cut))
            among = self.parts(scene(mla(((150, 1), (300, 1)), DECODE, heads=4), device, lambda *_, **__: cut))
        else:
            alone = self.parts(scene(mla(((9000, 1),), DECODE, heads=4), device))
            among = self.parts(scene(mla(((9000, 1), (90000, 1)), DECODE, heads=4), device))
        assert alone != among

    def parts(self, stage: KernelScene) -> int:
        """Steps that a program takes."""
        return int(stage.backend.init_forward_metadata(stage.batch()).metadata.schedule.numbers[0])


class TestOnAGPU:
    """Every number of heads and page size is a kernel to be compiled."""

    @on_a_gpu
    @pytest.mark.parametrize(("heads", "page_size"), [(8, 1), (16, 16), (24, 16), (32, 64), (126, 64), (128, 1)])
    def test_decode_of_many_requests(self, heads, page_size, device):
        check(mla(lengths(60, 3000, 1, seed=heads), DECODE, page_size, heads), device)

    @on_a_gpu
    @pytest.mark.parametrize("heads", [8, 16, 32, 128])
    @pytest.mark.parametrize("new", [2, 3, 5, 8, 9])
    def test_verify(self, new, heads, device):
        check(mla(lengths(4, 2500, new, seed=new), VERIFY, heads=heads), device)

    @on_a_gpu
    @pytest.mark.parametrize("heads", [8, 128])
    @pytest.mark.parametrize("seed", range(2))
    def test_extend(self, seed, heads, device):
        check(mla(ragged(9, 3000, 300, seed), EXTEND, 16, heads, padding=seed), device)

    @on_a_gpu
    @pytest.mark.parametrize(("rank", "rope"), [(512, 64), (512, 0), (256, 64), (256, 0)])
    @modes
    def test_widths_of_an_fp8_cache(self, mode, new, rank, rope, device):
        if torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("an fp8 cache is read on SM 89 or newer")
        case = mla(lengths(6, 2000, new, seed=rank), mode, dims=MLADims(rank, 128, rope), kv_dtype=FP8)
        assert scene(replace(case, kv_scales=(0.5, 0.5)), device).error() <= FP8_TOLERANCE

    @on_a_gpu
    @pytest.mark.parametrize("seed", range(4))
    def test_random_batches(self, seed, device):
        chance = random.Random(seed)
        new = chance.choice([1, 1, 2, 5, 8])
        levels = frozenset({"run", "batch"} if chance.random() < 0.3 else ())
        case = mla(
            lengths(chance.randint(1, 130), chance.choice([100, 3000, 9000]), new, seed),
            DECODE if new == 1 else VERIFY,
            heads=chance.choice([16, 128]),
            page_size=chance.choice([1, 64]),
            seed=seed,
            levels=levels,
        )
        check(case, device)


def test_the_imaginary_gpu_divides_and_shares():
    """The tests above rely on this: a long request is split, and several short ones share one program."""
    for given, cut in ((((300, 1),), True), (((3, 1),) * 12, False)):
        stage = scene(mla(given, DECODE, heads=4), "cpu")
        schedule = stage.backend.init_forward_metadata(stage.batch()).metadata.schedule
        steps = [-(-total // 16) for total in stage.totals]
        stretch = int(schedule.numbers[0])
        assert schedule.programs == MULTIPROCESSORS and int(schedule.numbers[1]) == sum(steps)
        assert (max(steps) > stretch) is cut and (stretch > max(steps)) is not cut
