"""Paths of an MLA extend (C1), and the merge of partial results (C4)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attnplug import (
    ExtendPath,
    ForwardMode,
    PlanError,
    UsageError,
)
from attnplug.host import ExtendPolicy, MLADims
from attnplug.kernels import merge_partial
from attnplug_testing.errors import raises_naming

DIMS = MLADims(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8)
ALL = frozenset(ExtendPath)


def forced(path: ExtendPath, capacity: int = 1 << 17) -> ExtendPolicy:
    return ExtendPolicy(forced=path, chunk_capacity=capacity)


class TestPolicy:
    def choose(self, policy: ExtendPolicy, *lengths: tuple[int, int], abilities: Any = ALL) -> ExtendPath:
        new, total = [n for _, n in lengths], [b + n for b, n in lengths]
        return policy.choose(ForwardMode.EXTEND, new, total, abilities)

    def test_no_prefix_runs_in_one_shot(self):
        """C1"""
        assert self.choose(ExtendPolicy(), (0, 100)) is ExtendPath.ONE_SHOT

    def test_short_prefix_runs_absorbed(self):
        """C1: threshold of prefixes 8192."""
        assert self.choose(ExtendPolicy(), (8191, 100)) is ExtendPath.ABSORBED
        assert self.choose(ExtendPolicy(), (8192, 100)) is ExtendPath.ONE_SHOT
        assert self.choose(ExtendPolicy(), (4096, 5), (4096, 5)) is ExtendPath.ONE_SHOT

    def test_many_pairs_per_prefix_row_run_as_mha(self):
        """C1: the threshold is 192 attended pairs per prefix row, causal pairs among new tokens included: 176 tokens
        stay below it, 177 reach it."""
        assert self.choose(ExtendPolicy(), (1000, 176)) is ExtendPath.ABSORBED
        assert self.choose(ExtendPolicy(), (1000, 177)) is ExtendPath.ONE_SHOT
        assert self.choose(ExtendPolicy(), (1000, 100), (10, 100)) is ExtendPath.ABSORBED

    def test_the_end_of_a_prompt_leaves_other_prompts_as_mha(self):
        """C1: few tokens behind a long prefix have few pairs; the other prompts would take 3 times as long absorbed."""
        assert self.choose(ExtendPolicy(), (4137, 78)) is ExtendPath.ABSORBED
        assert self.choose(ExtendPolicy(), (4137, 78), (0, 4000), (0, 3889)) is ExtendPath.ONE_SHOT

    def test_a_threshold_of_0_lets_every_prefix_pay(self):
        """C1"""
        assert self.choose(ExtendPolicy(chunk_threshold=0), (1, 1)) is ExtendPath.ONE_SHOT

    def test_what_is_asked_for_beats_what_is_forced(self):
        """C1"""
        asked = forced(ExtendPath.CHUNKED).choose(ForwardMode.EXTEND, [3], [20], ALL, ExtendPath.ABSORBED)
        assert asked is ExtendPath.ABSORBED

    def test_what_does_not_fit_one_shot_is_chunked(self):
        """C1: capacity 131072."""
        assert self.choose(ExtendPolicy(), (131071, 1)) is ExtendPath.ONE_SHOT
        assert self.choose(ExtendPolicy(), (131072, 1)) is ExtendPath.CHUNKED
        assert self.choose(ExtendPolicy(), (0, 131072)) is ExtendPath.ONE_SHOT
        assert self.choose(ExtendPolicy(), (0, 131073)) is ExtendPath.CHUNKED

    def test_abilities_decide_and_not_names(self):
        """C1: a policy of the backend's declared abilities."""
        only = frozenset({ExtendPath.ABSORBED, ExtendPath.CHUNKED})
        assert self.choose(ExtendPolicy(), (0, 100), abilities=only) is ExtendPath.CHUNKED
        assert self.choose(ExtendPolicy(), (9000, 9), abilities=frozenset({ExtendPath.ABSORBED})) is ExtendPath.ABSORBED

    def test_disabled_chunked_prefix_leaves_prefixes_absorbed(self):
        """A3's switch"""
        policy = ExtendPolicy(disable_chunked_prefix_cache=True)
        assert self.choose(policy, (9000, 9)) is ExtendPath.ABSORBED
        assert self.choose(policy, (0, 9)) is ExtendPath.ONE_SHOT

    def test_disabled_ragged_leaves_everything_absorbed(self):
        """A3's switch"""
        assert self.choose(ExtendPolicy(disable_ragged=True), (0, 9)) is ExtendPath.ABSORBED

    def test_a_backend_that_cannot_extend_absorbed_never_does(self):
        """C1: this holds for every prefix, mode and capacity. Only decodes are absorbed, which another backend may
        run."""
        as_mha = frozenset({ExtendPath.ONE_SHOT, ExtendPath.CHUNKED})
        assert self.choose(ExtendPolicy(), (5, 9), abilities=as_mha) is ExtendPath.ONE_SHOT
        assert self.choose(ExtendPolicy(chunk_capacity=8), (5, 9), abilities=as_mha) is ExtendPath.CHUNKED
        off = ExtendPolicy(chunk_capacity=8, disable_chunked_prefix_cache=True)
        assert self.choose(off, (5, 9), abilities=as_mha) is ExtendPath.ONE_SHOT
        assert self.choose(off, (0, 9), abilities=as_mha) is ExtendPath.CHUNKED
        only_chunks = frozenset({ExtendPath.CHUNKED})
        assert self.choose(off, (5, 9), abilities=only_chunks) is ExtendPath.CHUNKED
        for mode in (ForwardMode.MIXED, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
            assert ExtendPolicy().choose(mode, [3], [20], as_mha) is ExtendPath.ONE_SHOT
            for prefix in (0, 17, 8192):
                assert ExtendPolicy().choose(mode, [3], [prefix + 3], ALL) is ExtendPath.ABSORBED
        assert ExtendPolicy().choose(ForwardMode.DECODE, [1], [20], as_mha) is ExtendPath.ABSORBED
        with raises_naming(PlanError, "chunked", "one_shot"):
            self.choose(ExtendPolicy(disable_ragged=True), (0, 9), abilities=as_mha)

    def test_one_shot_without_chunks_stops_at_the_capacity(self):
        """C1"""
        able = frozenset({ExtendPath.ABSORBED, ExtendPath.ONE_SHOT})
        assert self.choose(ExtendPolicy(), (0, 131073), abilities=able) is ExtendPath.ABSORBED

    def test_only_a_plain_extend_is_forced(self):
        """C1: other modes bring few queries a request."""
        assert forced(ExtendPath.CHUNKED).choose(ForwardMode.MIXED, [3, 1], [20, 9], ALL) is ExtendPath.ABSORBED

    def test_forcing_what_the_backend_cannot_is_refused(self):
        with raises_naming(PlanError, "chunked", "absorbed"):
            self.choose(forced(ExtendPath.CHUNKED), (0, 9), abilities=frozenset({ExtendPath.ABSORBED}))

    @pytest.mark.parametrize("wrong", [{"chunk_capacity": 0}, {"chunk_threshold": -1}])
    def test_nonsense_is_refused(self, wrong):
        with pytest.raises(UsageError):
            ExtendPolicy(**wrong)


class TestMerge:
    def test_two_halves_are_the_whole(self):
        """C4"""
        torch.manual_seed(0)
        scores, values = torch.randn(3, 2, 10, dtype=torch.float64) * 4, torch.randn(10, 5, dtype=torch.float64)
        halves = [(torch.softmax(s, -1) @ v, s.logsumexp(-1).float()) for s, v in
                  zip(scores.split(4, -1), values.split(4), strict=True)]  # fmt: skip
        out, lse = halves[0]
        for part, part_lse in halves[1:]:
            out, lse = merge_partial(out.float(), lse, part.float(), part_lse)
        torch.testing.assert_close(out, (torch.softmax(scores, -1) @ values).float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, scores.logsumexp(-1).float(), rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("empty", [-math.inf, math.inf])
    def test_a_part_without_keys_takes_no_share(self, empty):
        """C4: FlashMLA marks empty rows +inf, FA4 -inf. Their outputs are ignored."""
        out, lse = torch.ones(2, 1, 3), torch.full((2, 1), 0.5)
        garbage, nothing = torch.full((2, 1, 3), math.nan), torch.full((2, 1), empty)
        for merged, merged_lse in (
            merge_partial(out, lse, garbage, nothing),
            merge_partial(garbage, nothing, out, lse),
        ):
            assert torch.equal(merged, out) and torch.equal(merged_lse, lse)

    def test_two_empty_parts_are_empty(self):
        """C4"""
        nothing = torch.full((2, 1), -math.inf)
        merged, lse = merge_partial(torch.full((2, 1, 3), math.nan), nothing, torch.ones(2, 1, 3), nothing)
        assert (merged == 0).all() and torch.equal(lse, nothing)

    def test_large_sums_do_not_overflow(self):
        out, lse = merge_partial(
            torch.ones(1, 1, 1), torch.tensor([[500.0]]), torch.zeros(1, 1, 1), torch.tensor([[499.0]])
        )
        assert float(out) == pytest.approx(math.e / (math.e + 1)) and float(lse) == pytest.approx(
            500 + math.log1p(1 / math.e)
        )
