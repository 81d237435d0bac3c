"""Batches against float64, by the kernels themselves: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attnplug import SCRATCH, DType, ForwardExtras, ForwardMode
from attnplug.host import MLADims
from attnplug_triton_mla.configurations import ENTRIES, Configuration
from attnplug_triton_mla.options import TritonMLAOptions
from attnplug_triton_mla.scratch import COUNTERS
from interpreted_mla import MULTIPROCESSORS, check, scene, small
from support.batches import with_plan
from support.devices import DEVICES
from support.mla_scene import LAYER, MLACase, MLAScene, relative_error

DECODE, VERIFY, DRAFT_EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
EXTEND, MIXED = ForwardMode.EXTEND, ForwardMode.MIXED
FP8 = DType.FLOAT8_E4M3
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])
modes = pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3), (EXTEND, 5)])


def lengths(count: int, longest: int, new: int, seed: int) -> tuple[tuple[int, int], ...]:
    """Prefixes of every kind (none, one row, whole pages, long ones) with new tokens after them."""
    chance = random.Random(seed)
    prefixes = [chance.choice([0, 1, 63, 64, 65, chance.randint(2, longest)]) for _ in range(count)]
    return tuple((prefix, new) for prefix in prefixes)


def ragged(count: int, longest: int, most: int, seed: int) -> tuple[tuple[int, int], ...]:
    """The same with some new tokens each, or none."""
    chance, prefixes = random.Random(seed), lengths(count, longest, 1, seed)
    return tuple((prefix, chance.choice([0, 1, chance.randint(1, most)])) for prefix, _ in prefixes)


class TestBatches:
    @on_every_device
    @pytest.mark.parametrize(("requests", "heads"), [(1, 16), (3, 8), (5, 3), (7, 24)])
    def test_decode(self, requests, heads, device):
        """C4; NaN in every row that must not be read."""
        longest = 120 if device == "cpu" else 3000
        check(MLACase(lengths(requests, longest, 1, seed=heads + requests), DECODE, heads=heads), device)

    @on_every_device
    @pytest.mark.parametrize(("heads", "new"), [(8, 2), (4, 5), (24, 2), (2, 8)])
    def test_verify_of_a_few_tokens(self, heads, new, device):
        """Causal: each of the new tokens sees those before it."""
        longest = 100 if device == "cpu" else 2500
        check(MLACase(lengths(4, longest, new, seed=new), VERIFY, heads=heads), device)

    @on_every_device
    @pytest.mark.parametrize("uniform", [True, False])
    def test_draft_extend(self, uniform, device):
        given = ((90, 4), (0, 4), (64, 4)) if uniform else ((90, 4), (0, 1), (64, 2))
        check(MLACase(given, DRAFT_EXTEND, heads=4), device)

    @on_every_device
    @pytest.mark.parametrize("mode", [EXTEND, MIXED])
    def test_extend_by_different_numbers_of_tokens(self, mode, device):
        """Some requests bring many, some one, some none."""
        given = ((50, 9), (0, 20), (3, 1), (40, 0), (0, 0), (100, 5), (1, 1))
        check(MLACase(given, mode, heads=4, padding=3), device)

    @on_every_device
    @pytest.mark.parametrize(
        ("page_size", "mode", "new"),
        [(1, DECODE, 1), (48, DECODE, 1), (16, VERIFY, 3), (48, EXTEND, 5), (1, EXTEND, 5)],
    )
    def test_pages_of_any_size(self, page_size, mode, new, device):
        check(MLACase(lengths(3, 100, new, seed=page_size), mode, page_size, heads=2), device)

    @on_every_device
    @pytest.mark.parametrize(
        ("pages", "mode", "new"), [("descending", DECODE, 1), ("interleaved", VERIFY, 3), ("descending", EXTEND, 5)]
    )
    def test_pages_in_any_order(self, pages, mode, new, device):
        check(MLACase(((100, new), (64, new), (1, new)), mode, 16, heads=2, pages=pages), device)

    @on_every_device
    @modes
    def test_padding_after_the_planned_rows(self, mode, new, device):
        """B5: its output is zero and nothing is written; q and k hold NaN there."""
        check(MLACase(((70, new), (3, new)), mode, heads=4, padding=5), device)

    @on_every_device
    @modes
    def test_lengths_that_differ_a_thousandfold(self, mode, new, device):
        longest = 2000 if device == "cpu" else 40000
        cut = (lambda *_, **__: Configuration(16, 128, 4, 2, merge="last")) if device == "cpu" else None
        check(MLACase(((longest, new), (0, new), (7, new), (64, new)), mode, heads=2), device, cut)

    @on_every_device
    @pytest.mark.parametrize(("mode", "new"), [(VERIFY, 3)])
    def test_float16(self, mode, new, device):
        check(MLACase(lengths(4, 100, new, seed=3), mode, heads=2, dtype=DType.FLOAT16), device)

    @on_every_device
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (EXTEND, 5)])
    def test_an_fp8_cache_with_its_scale(self, mode, new, device):
        given = lengths(4, 100, new, seed=4)
        check(MLACase(given, mode, heads=2, dtype=DType.FLOAT16, kv_dtype=FP8, kv_scale=0.37), device)

    @on_every_device
    def test_small_queries_over_a_large_fp8_cache(self, device):
        """Queries that fp16, in which fp8 rows are multiplied, would hold with a bit or two."""
        given = ((90, 1), (40, 1))
        stage = scene(MLACase(given, DECODE, heads=2, kv_dtype=FP8, kv_scale=1e7), device)
        stage.rows = [rows * 1e7 for rows in stage.rows]
        stage.store(stage.rows, [(0, before) for before, _ in given])
        stage.q *= 1e-7
        out, _ = stage.absorbed()
        assert relative_error(out, stage.wanted_absorbed()[0]) <= 5e-3

    @on_every_device
    @pytest.mark.parametrize(("rank", "rope"), [(512, 64), (512, 0), (256, 64), (256, 0)])
    def test_every_width_that_is_claimed(self, rank, rope, device):
        check(MLACase(((90, 1), (5, 1)), DECODE, heads=8, dims=MLADims(rank, 128, rope)), device)

    @on_every_device
    @modes
    def test_batches_without_lengths_on_the_host(self, mode, new, device):
        check(MLACase(((70, new), (3, new)), mode, heads=4, padding=2, exact_lengths=False), device)

    @on_every_device
    @pytest.mark.parametrize("mode", [EXTEND, VERIFY])
    def test_an_upper_bound_of_the_rows(self, mode, device):
        """Planned rows that belong to no request come out as padding, found on the device."""
        stage = scene(MLACase(((70, 5), (3, 2)), mode, heads=4, padding=2, exact_lengths=False), device)
        batch = stage.batch()
        batch.geometry = replace(batch.geometry, rows=9)
        out, lse = stage.absorbed(batch)
        wanted, wanted_lse = stage.wanted_absorbed()
        assert batch.plan.attention.query_rows == 9 and (out[7:] == 0).all() and (lse[7:] == float("-inf")).all()
        assert relative_error(out[:7], wanted) <= 5e-3 and relative_error(lse[:7], wanted_lse) <= 5e-3
        assert int((~stage.pool.rows(LAYER).float().isnan()).any(-1).sum()) == sum(stage.totals)

    @on_every_device
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (EXTEND, 4)])
    def test_memory_of_the_host_for_the_result(self, mode, new, device):
        """What kernels can write to is written; else the result is copied there."""
        stage = scene(MLACase(((70, new), (3, new)), mode, heads=4), device)
        wanted, q, k = stage.wanted_absorbed()[0], stage.q, stage.new_rows().unsqueeze(1)
        plain = q.new_empty(wanted.shape)
        for memory in (plain, plain.transpose(0, 1).contiguous().transpose(0, 1)):
            batch = with_plan(stage.batch(), stage.backend.init_forward_metadata(stage.batch()))
            forward = stage.backend.forward_decode if mode is DECODE else stage.backend.forward_extend
            assert forward(q, k, None, stage.layer, batch, extras=ForwardExtras(out=memory)) is memory
            assert relative_error(memory, wanted) <= 5e-3

    @on_every_device
    @modes
    @pytest.mark.parametrize(("heads", "kv_dtype"), [(4, None), (4, FP8), (24, None)])
    def test_queries_in_two_parts(self, heads, kv_dtype, mode, new, device):
        """As a host has them that absorbs itself: latent parts head by head, rotary parts within wider rows."""
        given = lengths(3, 100, new, seed=heads)
        case = MLACase(given, mode, heads=heads, kv_dtype=kv_dtype, dtype=DType.FLOAT16, padding=2)
        stage = scene(case, device)
        joined, lse = stage.absorbed()
        rank, q = stage.case.dims.kv_lora_rank, stage.padded(stage.q)
        latent, rope = q[..., :rank].transpose(0, 1).contiguous().transpose(0, 1), q[..., rank:].contiguous()
        wider = torch.cat([torch.full_like(q[..., :rank], float("nan")), rope], -1)[..., rank:]
        batch, again = stage.batch(), torch.full_like(lse, float("nan"))
        with_plan(batch, stage.backend.init_forward_metadata(batch))
        forward = stage.backend.forward_decode if mode.is_decode else stage.backend.forward_extend
        extras = ForwardExtras(lse=again, q_rope=wider)
        out = forward(latent, None, None, stage.layer, batch, save_kv_cache=False, extras=extras)
        assert torch.equal(out, joined) and torch.equal(again, lse)

    @on_every_device
    def test_a_page_table_by_its_strides(self, device):
        """It is read where it lies, a part of a larger one as well."""
        stage = scene(MLACase(((130, 1), (64, 1), (1, 1)), DECODE, heads=4), device)
        batch = stage.batch()
        table = batch.geometry.page_table
        wide = torch.full((8, 3 * len(table)), 1 << 30, dtype=torch.int32, device=device)
        view = wide.T[::3, : table.shape[1]].copy_(table)
        batch.geometry = replace(batch.geometry, page_table=view)
        assert relative_error(stage.absorbed(batch)[0], stage.wanted_absorbed()[0]) <= 5e-3


class TestConfigurations:
    """Every way to cut and merge gives the result; which one is fast is the table's to say."""

    @on_every_device
    @pytest.mark.parametrize(
        ("mode", "new", "merge", "changes"),
        [
            (DECODE, 1, "last", {}),
            (DECODE, 1, "kernel", {}),
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
    def test_ways_to_cut_and_merge(self, mode, new, merge, changes, device):
        """Parts of long requests, several requests in one program, and both at once."""
        cut = replace(Configuration(16, 16, 4, 2, merge=merge, merge_columns=64), **changes)
        given = ((70, new), (0, new), (3, new), (40, new))
        check(MLACase(given, mode, heads=2), device, lambda *_, **__: cut)

    @on_every_device
    @pytest.mark.parametrize(("mode", "new", "merge"), [(DECODE, 1, "kernel"), (VERIFY, 3, "last")])
    def test_tiles_with_a_lead(self, mode, new, merge, device):
        """Long and short requests: every tile's parts lie after its lead, for whoever merges them too."""
        cut = Configuration(16, 16, 4, 2, programs=4, start_steps=5, merge=merge, merge_columns=512)
        given = ((3, new), (400, new), (0, new), (150, new))
        stage = check(MLACase(given, mode, heads=8), device, lambda *_, **__: cut)
        assert stage.backend.init_forward_metadata(stage.batch()).metadata.schedule.numbers[2] == 5

    @on_every_device
    @pytest.mark.parametrize("merge_parts", [64, 32])
    def test_a_tile_of_many_parts(self, merge_parts, device):
        """More than the shorter piece of code takes at once: by the longer one, or by the shorter one twice."""
        cut = Configuration(16, 16, 4, 2, programs=14, merge_parts=merge_parts, merge_columns=512)
        stage = check(MLACase(((630, 1),), DECODE, heads=2), device, lambda *_, **__: cut)
        schedule = stage.backend.init_forward_metadata(stage.batch()).metadata.schedule
        stretch, line, *_ = schedule.numbers.tolist()
        assert line / stretch > 32

    @on_a_gpu
    @pytest.mark.parametrize("entry", sorted(set(ENTRIES), key=str), ids=str)
    def test_every_entry_of_the_table_serves_every_batch(self, entry, device):
        heads = 16 if entry.tile == 16 else 128
        for given, mode in ((lengths(5, 5000, 1, seed=1), DECODE), (lengths(3, 2000, 4, seed=2), VERIFY)):
            check(MLACase(given, mode, heads=heads), device, lambda *_, **__: entry)
        if entry.kernel == "triton":
            check(MLACase(ragged(6, 2000, 50, seed=3), EXTEND, heads=heads), device, lambda *_, **__: entry)

    @on_a_gpu
    @pytest.mark.parametrize(
        ("mode", "new", "heads", "prefixes"), [(VERIFY, 8, 24, (0, *[60] * 40)), (DRAFT_EXTEND, 100, 16, (0, 30, 70))]
    )
    def test_parts_that_see_no_row(self, mode, new, heads, prefixes, device):
        """Early tokens of a request do not see its last step, with which a program may begin, and go on to a tile."""
        check(MLACase(tuple((prefix, new) for prefix in prefixes), mode, heads=heads), device)

    @pytest.mark.parametrize(("kernel", "tile"), [("triton", 16), ("low", 16), ("wide", 64)])
    def test_queries_lie_as_the_kernels_read_them(self, kernel, tile, monkeypatch):
        """Those in Gluon copy 16 bytes at once, and compile for an address and strides that are multiples alone."""
        from attnplug_triton_mla import attention

        given: list[torch.Tensor] = []
        launched = {(MULTIPROCESSORS,): lambda q, *_, **__: given.append(q)}
        for name in ("attend", "attend_low", "attend_wide"):
            monkeypatch.setattr(attention, name, launched)
        case, cut = MLACase(((9, 1), (3, 1)), DECODE, heads=4), Configuration(tile, 64, 8, 2, kernel)
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
        from attnplug_triton_mla.attention import readable

        q = torch.empty(128, 40_000, 576, dtype=torch.bfloat16, device="meta").transpose(0, 1)
        assert 127 * q.stride(1) >= 1 << 31 and readable(q).is_contiguous()
        assert readable(q[:, :64]).stride() == q.stride()

    @on_a_gpu
    @pytest.mark.parametrize("entry", sorted({entry for entry in ENTRIES if entry.merge == "kernel"}, key=str), ids=str)
    def test_kernels_that_are_launched_early(self, entry, device):
        """New rows are written, read and merged by kernels that are launched before the one in front is done.

        The first one lets the others begin at once, and is late with queries and rows: all of them have to wait.
        """
        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("kernels wait for each other on the device from SM 90 on")
        from support.late_kernel import fill_late

        heads = 16 if entry.tile == 16 else 128
        stage = scene(MLACase(((20000, 1), (5, 1)), DECODE, heads=heads), device, lambda *_, **__: entry)
        memory = stage.pool.rows(LAYER)
        before, first = memory.clone(), stage.absorbed()[0]
        assert relative_error(first, stage.wanted_absorbed()[0]) <= 5e-3
        q, k = stage.q, stage.new_rows().unsqueeze(1)
        given, late = (
            torch.cat([q.flatten(), k.flatten()]),
            torch.empty(q.numel() + k.numel(), dtype=q.dtype).to(device),
        )
        late_q, late_k = late[: q.numel()].view_as(q), late[q.numel() :].view_as(k)
        lse = torch.empty(q.shape[:2], device=device)
        for _ in range(3):
            batch = stage.batch()
            # Whoever reads too soon finds NaN: in queries and new rows, where new rows go, and in partial results.
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
    def test_the_same_batch_gives_the_same_bits(self, merge, device):
        """Whoever comes last merges in the order of the parts; and leaves its counter at zero."""
        cut = replace(small(16, 4, 64), merge=merge)
        stage = scene(MLACase(((150, 1), (40, 1), (2, 1), (64, 1)), DECODE, heads=2), device, lambda *_, **__: cut)
        first, first_lse = stage.absorbed()
        for _ in range(1 if device == "cpu" else 100):
            again, again_lse = stage.absorbed()
            assert torch.equal(again, first) and torch.equal(again_lse, first_lse)
        counters = stage.workspace.request("test", stage.device, COUNTERS, 1).buffer
        assert counters.numel() > 1 and not counters.any()

    @on_a_gpu
    @pytest.mark.parametrize("heads", [16, 128])
    @pytest.mark.parametrize("requests", [1, 7, 60, 200])
    def test_the_same_bits_on_real_batches(self, requests, heads, device):
        stage = scene(MLACase(lengths(requests, 9000, 1, seed=requests), DECODE, heads=heads), device)
        first = stage.absorbed()[0]
        assert all(torch.equal(stage.absorbed()[0], first) for _ in range(20))

    @on_every_device
    @pytest.mark.parametrize(
        ("mode", "new", "merge"),
        [(DECODE, 1, "kernel"), (VERIFY, 3, "last"), (EXTEND, 5, "last")],
    )
    def test_batch_invariance(self, mode, new, merge, device):
        """A request's bits are the same alone, among others, and wherever it stands."""
        mine, others = (70 if device == "cpu" else 9000, new), ((40, new), (0, new), (90, new))
        if mode is EXTEND:
            others = ((40, 2), (0, 7), (90, 1))
        cut = replace(small(16, 4, 64), merge=merge, least_steps=2)
        alone, rows = self.bits(mode, (mine,), 0, cut, device)
        for position in (0, 3):
            given = (*others[:position], mine, *others[position:])
            among, _ = self.bits(mode, given, position, cut, device, rows)
            assert torch.equal(among, alone)

    def bits(self, mode, given, position, cut, device, rows=None):
        """A request's output in a batch; its rows and queries are those of ``rows``, or what it brings."""
        options = TritonMLAOptions(batch_invariant=True)
        case = MLACase(given, mode, heads=2, options=options)
        stage = scene(case, device, lambda *_, **__: cut) if device == "cpu" else scene(case, device)
        begin, new = sum(stage.new[:position]), stage.new[position]
        if rows is not None:
            stage.rows[position], stage.q[begin : begin + new] = rows
            stage.store(stage.rows, [(0, before) for before, _ in given])
        out, _ = stage.absorbed()
        assert relative_error(out, stage.wanted_absorbed()[0]) <= 5e-3
        return out[begin : begin + new].clone(), (stage.rows[position], stage.q[begin : begin + new])

    @on_every_device
    def test_without_the_option_the_batch_decides(self, device):
        """Or the test above could not fail: with others in the batch, the same request is cut elsewhere."""
        if device == "cpu":
            cut = small(16, 4, 64)  # the same for both
            alone = self.parts(scene(MLACase(((150, 1),), DECODE, heads=4), device, lambda *_, **__: cut))
            among = self.parts(scene(MLACase(((150, 1), (300, 1)), DECODE, heads=4), device, lambda *_, **__: cut))
        else:
            alone = self.parts(scene(MLACase(((9000, 1),), DECODE, heads=4), device))
            among = self.parts(scene(MLACase(((9000, 1), (90000, 1)), DECODE, heads=4), device))
        assert alone != among

    def parts(self, stage: MLAScene) -> int:
        """Steps that a program takes."""
        return int(stage.backend.init_forward_metadata(stage.batch()).metadata.schedule.numbers[0])


class TestMatrix:
    """The whole of what the spec claims, on a GPU. Every number of heads and page size is a kernel to be compiled."""

    @on_a_gpu
    @pytest.mark.parametrize(
        ("heads", "page_size"),
        [(8, 1), (16, 1), (16, 16), (16, 64), (24, 16), (32, 64), (64, 16), (126, 64), (128, 1), (128, 64)],
    )
    @pytest.mark.parametrize("requests", [1, 5, 60])
    def test_decode(self, requests, heads, page_size, device):
        given = lengths(requests, 3000, 1, seed=heads + requests)
        check(MLACase(given, DECODE, page_size, heads), device)

    @on_a_gpu
    @pytest.mark.parametrize("heads", [8, 16, 32, 128])
    @pytest.mark.parametrize("new", range(1, 10))
    def test_verify(self, new, heads, device):
        check(MLACase(lengths(4, 2500, new, seed=new), VERIFY, heads=heads), device)

    @on_a_gpu
    @pytest.mark.parametrize("heads", [8, 16, 128])
    @pytest.mark.parametrize("seed", range(3))
    def test_extend(self, seed, heads, device):
        check(MLACase(ragged(9, 3000, 300, seed), EXTEND, 16, heads, padding=seed), device)

    @on_a_gpu
    @pytest.mark.parametrize(("rank", "rope"), [(512, 64), (512, 0), (256, 64), (256, 0)])
    @pytest.mark.parametrize("kv_dtype", [None, FP8])
    @modes
    def test_widths_and_types(self, mode, new, kv_dtype, rank, rope, device):
        if kv_dtype is FP8 and torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("an fp8 cache is read on SM 89 or newer")
        given, dims = lengths(6, 2000, new, seed=rank), MLADims(rank, 128, rope)
        for dtype in (DType.BFLOAT16, DType.FLOAT16)[: 2 if (rank, rope) == (512, 64) else 1]:
            case = MLACase(given, mode, heads=16, dims=dims, dtype=dtype, kv_dtype=kv_dtype)
            check(replace(case, kv_scale=0.5 if kv_dtype is FP8 else 1.0), device)

    @on_a_gpu
    @pytest.mark.parametrize("seed", range(8))
    def test_random_batches(self, seed, device):
        chance = random.Random(seed)
        new = chance.choice([1, 1, 2, 5, 8])
        options = TritonMLAOptions(batch_invariant=chance.random() < 0.3)
        case = MLACase(
            lengths(chance.randint(1, 130), chance.choice([100, 3000, 9000]), new, seed),
            DECODE if new == 1 else VERIFY,
            heads=chance.choice([16, 128]),
            page_size=chance.choice([1, 64]),
            seed=seed,
            options=options,
        )
        check(case, device)


def test_the_imaginary_gpu_divides_and_shares():
    """What the tests above rely on: a long request is cut, and several short ones fall to one program."""
    for given, cut in ((((300, 1),), True), (((3, 1),) * 12, False)):
        stage = scene(MLACase(given, DECODE, heads=4), "cpu")
        schedule = stage.backend.init_forward_metadata(stage.batch()).metadata.schedule
        steps = [-(-total // 16) for total in stage.totals]
        stretch = int(schedule.numbers[0])
        assert schedule.programs == MULTIPROCESSORS and int(schedule.numbers[1]) == sum(steps)
        assert (max(steps) > stretch) is cut and (stretch > max(steps)) is not cut
