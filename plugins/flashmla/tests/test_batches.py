"""Batches against float64: planning through the reference kernels on a CPU, FlashMLA itself on a GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attnplug import BackendContext, DType, ForwardMode, MLAPool, PlanError
from attnplug.host import KVPools
from reference_flashmla import build, on, scene
from support.batches import with_plan
from support.devices import DEVICES, nothing_waits
from support.mla_scene import LAYER, MLACase, MLAScene, relative_error

DECODE, VERIFY, DRAFT_EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
INF = float("inf")
on_every_device = pytest.mark.parametrize("device", DEVICES)


def lengths(count: int, longest: int, new: int, seed: int) -> tuple[tuple[int, int], ...]:
    """Prefixes of every kind (none, one row, whole pages, long ones) with new tokens after them."""
    chance = random.Random(seed)
    prefixes = [chance.choice([0, 1, 63, 64, 65, chance.randint(2, longest)]) for _ in range(count)]
    return tuple((prefix, new) for prefix in prefixes)


def check(case: MLACase, device: str) -> MLAScene:
    """Output and log-sum-exp are float64's, padding gives zero and -inf, and nothing but new rows was written."""
    stage = scene(case, device)
    out, lse = stage.absorbed()
    wanted, wanted_lse = stage.wanted_absorbed()
    tokens = len(wanted)
    tolerance = 1e-6 if device == "cpu" else 5e-3
    assert relative_error(out[:tokens], wanted) <= tolerance
    assert (out[tokens:] == 0).all()
    assert lse is not None
    assert relative_error(lse[:tokens], wanted_lse) <= tolerance
    assert (lse[tokens:] == -INF).all()
    assert int((~stage.pool.rows(LAYER).float().isnan()).any(-1).sum()) == sum(stage.totals)
    return stage


@on_every_device
def test_a_cache_of_a_host_that_has_no_dimension_of_heads(device):
    """As vLLM's is. The GPU is told the strides, and takes no stride of one element."""
    pools = []

    def over_a_hosts(context: BackendContext):
        layers, made = context.model.layers, context.pools.mla
        memory = {layer.layer_id: made.rows(layer.layer_id).flatten(2).clone() for layer in layers}
        dtype = context.kv_dtype
        pools.append(MLAPool.over(layers, memory, "pages tokens dim", page_size=made.page_size, dtype=dtype))
        return build(replace(context, pools=KVPools(mla=pools[0])))

    case = on(MLACase(lengths(5, 150, 1, seed=3), DECODE, heads=16), device)
    stage = MLAScene(case, device, over_a_hosts)
    (stage.pool,) = pools
    stage.store(stage.rows, [(0, before) for before, _ in case.lengths])
    assert relative_error(stage.absorbed()[0], stage.wanted_absorbed()[0]) <= (1e-6 if device == "cpu" else 5e-3)


class TestBatches:
    @on_every_device
    @pytest.mark.parametrize("heads", [1, 16, 32, 64, 126, 128])
    @pytest.mark.parametrize("requests", [1, 5, 40])
    def test_decode(self, requests, heads, device):
        """C4; NaN in every row that must not be read."""
        longest = 200 if device == "cpu" else 3000
        check(MLACase(lengths(requests, longest, 1, seed=heads + requests), DECODE, heads=heads), device)

    @on_every_device
    @pytest.mark.parametrize("new", range(1, 10))
    @pytest.mark.parametrize("heads", [16, 32, 64, 128])
    def test_verify_of_a_few_tokens(self, heads, new, device):
        """Causal: each of the new tokens sees those before it."""
        longest = 150 if device == "cpu" else 2500
        check(MLACase(lengths(4, longest, new, seed=new), VERIFY, heads=heads), device)

    @on_every_device
    def test_draft_extend_by_equally_many_tokens(self, device):
        check(MLACase(lengths(3, 200, 4, seed=1), DRAFT_EXTEND), device)

    @on_every_device
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3)])
    @pytest.mark.parametrize("page_size", [64, 128, 192])
    def test_a_manager_with_larger_pages(self, page_size, mode, new, device):
        """Its pages are several of the kernel's."""
        check(MLACase(lengths(5, 500, new, seed=page_size), mode, page_size), device)

    @on_every_device
    @pytest.mark.parametrize("pages", ["permuted", "interleaved", "descending"])
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 4)])
    def test_pages_in_any_order(self, pages, mode, new, device):
        check(MLACase(((130, new), (64, new), (1, new)), mode, pages=pages), device)

    @on_every_device
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 4)])
    def test_padding_after_the_planned_rows(self, mode, new, device):
        """B5: its output is zero and nothing is written; q and k hold NaN there."""
        check(MLACase(((70, new), (3, new)), mode, padding=5), device)

    @on_every_device
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 2)])
    def test_lengths_that_differ_a_thousandfold(self, mode, new, device):
        longest = 2000 if device == "cpu" else 40000
        check(MLACase(((longest, new), (0, new), (7, new), (64, new)), mode), device)

    @pytest.mark.parametrize("device", DEVICES[1:])
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3)])
    def test_float16(self, mode, new, device):
        check(MLACase(lengths(6, 900, new, seed=3), mode, dtype=DType.FLOAT16), device)

    @pytest.mark.parametrize("device", DEVICES[1:])
    @pytest.mark.parametrize("seed", range(8))
    def test_random_batches(self, seed, device):
        chance = random.Random(seed)
        new = chance.choice([1, 1, 2, 5, 8])
        case = MLACase(
            lengths(chance.randint(1, 130), chance.choice([100, 3000, 9000]), new, seed),
            DECODE if new == 1 else VERIFY,
            heads=chance.choice([16, 32, 64, 128]),
            page_size=chance.choice([64, 128]),
            seed=seed,
        )
        check(case, device)


class TestPlans:
    @on_every_device
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3)])
    def test_a_plan_needs_no_length_on_the_host(self, mode, new, device):
        """``needs_cpu_seq_lens`` is false, and planning waits for nothing."""
        stage = scene(MLACase(((90, new), (5, new)), mode, exact_lengths=False), device)
        assert not stage.backend.claims.needs_cpu_seq_lens
        stage.absorbed()  # compiles
        batch = stage.batch()
        with nothing_waits(device):
            with_plan(batch, stage.backend.init_forward_metadata(batch))
        assert (batch.plan.attention.query_rows, batch.plan.attention.kv_rows) == (2 * new, None)
        out, _ = stage.absorbed(batch)
        assert relative_error(out, stage.wanted_absorbed()[0]) <= 5e-3

    @pytest.mark.parametrize("device", DEVICES[1:])
    def test_planning_and_running_wait_for_nothing(self, device):
        stage = scene(MLACase(lengths(4, 300, 2, seed=4), VERIFY, padding=2), device)
        stage.absorbed()
        batch = stage.batch()
        with nothing_waits(device):
            stage.absorbed(batch)

    @on_every_device
    def test_two_plans_live_at_the_same_time(self, device):
        """B5: a plan is a value; what is planned later does not change it, nor do the batch's own numbers."""
        stage = scene(MLACase(((100, 1), (30, 1)), DECODE, exact_lengths=False), device)
        first, second = stage.batch(), stage.batch()
        with_plan(first, stage.backend.init_forward_metadata(first))
        first.geometry.seq_lens.fill_(1)
        first.geometry.page_table.fill_(0)
        second.geometry.seq_lens.sub_(7)
        stage.backend.init_forward_metadata(second)
        out, _ = stage.absorbed(first)
        assert relative_error(out, stage.wanted_absorbed()[0]) <= 5e-3

    @on_every_device
    def test_a_request_of_length_0_gives_zero(self, device):
        """C4: -inf where FlashMLA says +inf. Lengths are the device's: the host would have refused this one."""
        stage = scene(MLACase(((100, 1), (30, 1), (70, 1)), DECODE, exact_lengths=False), device)
        batch = stage.batch()
        batch.geometry.seq_lens[1] = 0
        batch.geometry.page_table[1] = 1 << 30
        out, lse = stage.absorbed(batch)
        assert relative_error(out[::2], stage.wanted_absorbed()[0][::2]) <= 5e-3
        assert (out[1] == 0).all() and (lse[1] == -INF).all() and lse[::2].isfinite().all()
        assert int((~stage.pool.rows(LAYER).float().isnan()).any(-1).sum()) == sum(stage.totals) - 1

    @on_every_device
    def test_new_rows_go_where_the_host_says(self, device):
        """-1 is padding: nothing is written of it. The cache is read by the page table all the same."""
        stage = scene(MLACase(((100, 1), (30, 1)), DECODE), device)
        stage.store(stage.rows, [(0, total) for total in stage.totals])
        batch = stage.batch()
        nowhere = int(stage.pool.rows(LAYER).isnan().all(-1).flatten().nonzero()[0])  # an unused slot
        slots = torch.tensor([nowhere, -1], device=device)
        batch.geometry = replace(batch.geometry, slots=slots)
        before = stage.pool.rows(LAYER).clone()
        out, _ = stage.absorbed(batch)
        assert relative_error(out, stage.wanted_absorbed()[0]) <= 5e-3
        changed = (stage.pool.rows(LAYER).nan_to_num(7) != before.nan_to_num(7)).any(-1).flatten()
        assert changed.nonzero().flatten().tolist() == [nowhere]


class TestWrongUse:
    @pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
    def test_prefill_is_another_backends(self, mode):
        """D3 says so before anything is built; a caller who goes on anyway is told again."""
        stage = scene(MLACase(((20, 1), (9, 1)), mode), "cpu")
        with pytest.raises(PlanError, match=rf"in mode {mode}; let the prefill backend take it"):
            stage.backend.init_forward_metadata(stage.batch())

    def test_new_tokens_must_be_equally_many(self):
        stage = scene(MLACase(((20, 2), (9, 3)), VERIFY), "cpu")
        with pytest.raises(PlanError, match=r"mode target_verify with new_lens, .* let the prefill backend take it"):
            stage.backend.init_forward_metadata(stage.batch())
