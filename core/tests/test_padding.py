"""Data-parallel padding: a batch is brought to a common size before or after it is planned, and is never wrong (B1)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from attnplug import ForwardBatch, ForwardExtras, ForwardMode, Geometry, Plan, PlanError
from attnplug.host import ExtendPolicy, HostLengths, MLADims, ModelAttention, plan_forward
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug_conformance.padding import pad_batch, padded
from attnplug_testing.errors import raises_naming
from attnplug_testing.stage import Stage, error, small
from attnplug_testing.trees import tree_bits

NAN = float("nan")
LATENT = MLADims(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4)
DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND
LENGTHS = {
    DECODE: ((5, 1), (0, 1), (30, 1)),
    VERIFY: ((5, 3), (0, 3), (30, 3)),
    ForwardMode.DRAFT_EXTEND: ((5, 2), (1, 2)),
    EXTEND: ((5, 7), (0, 4), (17, 1)),
    ForwardMode.MIXED: ((5, 1), (0, 9)),
}


class Counting(TorchNativeBackend):
    """Backend that needs no host lengths and counts its plans."""

    planned = 0

    def plan(self, geometry: Geometry) -> Plan:
        self.planned += 1
        return super().plan(geometry.with_host_lengths())


class Rank:
    """One layer of a model on one of several ranks. Its batch is padded by ``requests`` requests and ``rows`` rows."""

    def __init__(self, mode: ForwardMode, *, mla: bool = False, exact: bool = True, page_size: int = 4) -> None:
        dims = {"mla": LATENT, "v_head_dim": 8} if mla else {"kv_heads": 2}
        self.stage = Stage(small(LENGTHS[mode], mode, page_size=page_size, **dims), "cpu", Counting)
        self.batch = self.stage.batch()
        self.rows = self.batch.num_tokens
        ids = torch.arange(self.rows)
        self.batch.input_ids, self.batch.positions = ids, ids.int()
        if mode is VERIFY:
            chains = [(-1, 0, 1)] * self.batch.batch_size
            self.batch.geometry = replace(self.batch.geometry, tree=tree_bits(chains, "cpu"))
        if not exact:
            self.batch.geometry = replace(self.batch.geometry, host=None)

    def plan(self) -> None:
        """Plan outside the forward path, as a caller that marks the batch."""
        plan_forward(self.stage.backend, self.batch)

    def pad(self, requests: int, rows: int) -> None:
        geometry = self.batch.geometry
        own = 0 if geometry.host is not None or geometry.new_lens is not None else requests * geometry.max_new
        pad_batch(self.batch, self.batch.batch_size + requests, self.batch.num_tokens + own + rows)

    def check(self) -> None:
        """Check that the forward path gives float64's result and zeros for padding, and writes only rows of
        requests."""
        stage, batch = self.stage, self.batch
        plan_forward(stage.backend, batch)
        more = batch.num_tokens - self.rows
        q, k, v = (
            torch.cat((rows, torch.full((more, *rows.shape[1:]), NAN)))
            for rows in (stage.q, stage.new_rows(stage.keys), stage.new_rows(stage.values))
        )
        lse = torch.full(q.shape[:2], NAN)
        run = stage.backend.forward_decode if batch.forward_mode.is_decode else stage.backend.forward_extend
        given = None if stage.case.mla is not None else v
        out = run(q, k, given, stage.layer, batch, extras=ForwardExtras(lse=lse))
        wanted, wanted_lse = stage.wanted()
        assert error(out[: self.rows], wanted) < 1e-5 and error(lse[: self.rows], wanted_lse) < 1e-5
        assert not out[self.rows :].any() and bool((lse[self.rows :] == -torch.inf).all())
        pools = stage.pools
        cache = pools.mha.keys(3) if pools.mha is not None else pools.mla.rows(3)
        written = (~cache.isnan()).flatten(3 if pools.mha is not None else 2).all(-1)
        per_row = cache.shape[2] if pools.mha is not None else 1
        assert int(written.sum()) == sum(stage.totals) * per_row


MODES = pytest.mark.parametrize("mode", LENGTHS)
SIZES = pytest.mark.parametrize(("requests", "rows"), [(0, 3), (2, 0), (2, 3)], ids=["rows", "requests", "both"])


def ranks(mode: ForwardMode) -> list[Rank]:
    return [
        Rank(mode, mla=mla, exact=exact, page_size=size)
        for mla, exact, size in product((False, True), (True, False), (1, 4))
    ]


@MODES
@SIZES
@pytest.mark.sample(5)
def test_padded_and_then_planned(mode, requests, rows):
    """B1, B5"""
    for rank in ranks(mode):
        rank.pad(requests, rows)
        rank.plan()
        rank.batch.mark_forward_metadata_ready()
        rank.check()
        assert rank.stage.backend.planned == 1


@pytest.mark.parametrize("mode", [DECODE, VERIFY])
@SIZES
@pytest.mark.sample(2)
def test_planned_as_equivalent_and_then_padded(mode, requests, rows):
    """B1: a single decode or verify depends on nothing but its geometry, so the forward path plans it again, once."""
    for rank in ranks(mode):
        rank.plan()
        rank.batch.mark_forward_metadata_ready(replan_equivalent=True)
        rank.pad(requests, rows)
        assert rank.batch.needs_forward_metadata_init()
        rank.check()
        assert rank.stage.backend.planned == 2


@MODES
@pytest.mark.sample(2)
def test_planned_and_then_padded_by_rows_alone(mode):
    """B5: the plan holds, and the tail is padding."""
    for rank in ranks(mode):
        rank.plan()
        rank.batch.mark_forward_metadata_ready()
        rank.pad(0, 3)
        rank.check()
        assert rank.stage.backend.planned == 1


@MODES
def test_planned_and_then_padded_by_requests_is_refused_if_it_may_not_be_planned_again(mode):
    """B1, B5: the plan is stale. It is neither replaced nor used."""
    for rank in ranks(mode):
        rank.plan()
        rank.batch.mark_forward_metadata_ready()
        rank.pad(2, 3)
        with raises_naming(PlanError, "under_test", "plan"):
            rank.check()
        assert rank.stage.backend.planned == 1


@MODES
@SIZES
@pytest.mark.sample(5)
def test_planned_without_a_mark_is_planned_again(mode, requests, rows):
    """B1: an unmarked batch, which the forward path planned itself, is planned again."""
    for rank in ranks(mode):
        rank.plan()
        rank.pad(requests, rows)
        rank.check()


@MODES
@SIZES
@pytest.mark.sample(5)
def test_padded_twice_is_as_padded_once(mode, requests, rows):
    for rank in ranks(mode):
        rank.pad(requests, rows)
        rank.pad(requests, rows)
        rank.plan()
        rank.check()


@pytest.mark.parametrize("mode", LENGTHS)
def test_a_padded_batch_is_split_like_any_other(mode):
    """B4: rows of padding are the second half's, and its padded requests have no rows of the first one."""
    rank = Rank(mode, exact=mode in (EXTEND, ForwardMode.MIXED))
    rank.pad(2, 1)
    halves = rank.batch.split(1)
    for half in halves:
        plan_forward(rank.stage.backend, half)
    assert sum(half.plan.attention.query_rows for half in halves) == rank.rows
    assert torch.equal(torch.cat([half.input_ids for half in halves]), rank.batch.input_ids)


@pytest.mark.parametrize("requests", [0, 2])
def test_an_mla_extend_that_runs_as_mha_is_padded_too(requests):
    """B5: planned before rows are added, or after requests are."""
    rank = Rank(EXTEND, mla=True)
    attention = ModelAttention(rank.stage.backend, rank.stage.pools, ExtendPolicy(chunk_threshold=0))
    attention.plan(rank.batch)
    assert rank.batch.geometry.calls
    rank.pad(requests, 3)
    assert bool(rank.batch.geometry.calls) is (requests == 0), "calls are planned anew with the requests"
    plan = attention.plan(rank.batch)
    assert plan.extend.query_rows == rank.rows


class TestFields:
    def test_padded_requests_have_no_length_no_slot_and_no_state(self):
        rank = Rank(VERIFY, exact=False)
        whole = replace(rank.batch.geometry, slots=torch.arange(9), state_slots=torch.tensor([4, 6, 5]))
        made = padded(whole, 5)
        assert (made.requests, made.rows, made.max_new) == (5, 15, 3)
        assert made.seq_lens[3:].tolist() == [0, 0] and made.state_slots.tolist() == [4, 6, 5, -1, -1]
        assert made.slots.tolist() == [*range(9), *[-1] * 6]
        assert made.tree.shape == (5, 3) and made.page_table.shape[0] == 5

    def test_with_exact_lengths_they_have_no_rows(self):
        made = padded(Rank(DECODE).batch.geometry, 4)
        assert made.host == HostLengths([1, 1, 1, 0], [6, 1, 31, 0])
        assert made.new_lens.tolist() == [1, 1, 1, 0] and made.rows == 3

    def test_an_idle_rank_is_padded(self):
        table = torch.zeros(0, 4, dtype=torch.int32)
        batch = ForwardBatch(Geometry.of_lengths(ForwardMode.IDLE, table, [], [], 4), torch.zeros(0, dtype=torch.int64))
        pad_batch(batch, 3, 8)
        assert (batch.batch_size, batch.num_tokens, batch.geometry.rows) == (3, 8, 0)
