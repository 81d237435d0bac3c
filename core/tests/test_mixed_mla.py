"""Mixed MLA batches: decodes run absorbed and the other requests as MHA (C1)."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug import ExtendPath, ForwardBatch, ForwardMode, Plan, PlanError
from attnplug.host import ExtendPolicy, MLADims, ModelAttention
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug.wrappers.forwarding import SplitBackend
from attnplug_conformance.checks.mla_paths import UpProjected
from attnplug_testing.errors import raises_naming
from attnplug_testing.stage import Stage, error, small

DIMS = MLADims(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8)
ALL = frozenset(ExtendPath)
AS_MHA = ALL - {ExtendPath.ABSORBED}
NOW = ExtendPolicy(split_threshold=0, query_threshold=0)
"""Policy that splits every mixed batch whose other requests would run as MHA."""
MIXED = ((20, 1), (7, 1), (0, 9), (30, 40))


def scene(lengths=MIXED, mode=ForwardMode.MIXED, **options) -> UpProjected:
    return UpProjected(Stage(small(tuple(lengths), mode=mode, mla=DIMS, **options), "cpu"))


def noted(calls: list, name: object, method):
    """The same method, with the signature that hooks are bound by."""

    @functools.wraps(method)
    def call(*arguments, **named):
        calls.append(name)
        return method(*arguments, **named)

    return call


def modes(batch: ForwardBatch) -> list[ForwardMode]:
    assert batch.plan is not None
    return [half.forward_mode for half in batch.plan.halves]


def apart(*lengths: tuple[int, int], policy: ExtendPolicy | None = None, abilities=ALL) -> int:
    new, totals = [n for _, n in lengths], [before + n for before, n in lengths]
    return (policy or ExtendPolicy()).decodes_apart(new, totals, abilities)


class TestPolicy:
    def test_decodes_leave_a_chunk_that_is_faster_as_mha(self):
        """C1"""
        decodes = [(4096, 1)] * 32
        assert apart(*decodes, (0, 8192)) == 32 and apart(*decodes, (8192, 512), (0, 5)) == 32

    def test_the_end_of_a_prompt_leaves_other_prompts_as_mha(self):
        """C1: as in an extend without decodes."""
        assert apart(*[(1500, 1)] * 250, (4137, 78), (0, 4000), (0, 3889)) == 250
        assert apart(*[(1500, 1)] * 250, (4137, 78), (0, 400)) == 0

    def test_few_prefill_tokens_stay_with_the_decodes(self):
        """Two parts are more launches than one."""
        assert apart((4096, 1), (0, 1024)) == 1 and apart((4096, 1), (0, 1023)) == 0
        assert apart((4096, 1), (9000, 64)) == 0, "each prefix row is up-projected for too few queries"
        assert apart((4096, 1), *[(0, 64)] * 64) == 0

    def test_decodes_behind_a_prefill_are_not_moved(self):
        assert apart((0, 8192), (4096, 1)) == 0 and apart((9, 1), (0, 8192), (4096, 1)) == 0
        assert apart((9, 1), (0, 8192), (4096, 0)) == 0, "a padded request"
        assert apart((9, 1), (5, 1)) == apart((0, 8192)) == 0

    def test_a_forced_path_and_abilities_decide_first(self):
        """C1: a backend that cannot extend absorbed would run the decodes as MHA."""
        assert apart((9, 1), (0, 2), policy=ExtendPolicy(forced=ExtendPath.CHUNKED)) == 1
        assert apart((9, 1), (0, 9999), policy=ExtendPolicy(forced=ExtendPath.ABSORBED)) == 0
        assert apart((9, 1), (0, 9999), policy=ExtendPolicy(disable_ragged=True)) == 0
        assert apart((9, 1), (0, 9999), abilities=frozenset({ExtendPath.ABSORBED})) == 0
        assert apart((9, 1), (8, 2), abilities=AS_MHA) == 1


class TestHalves:
    @pytest.mark.parametrize("path", sorted(AS_MHA))
    def test_random_batches_match_float64(self, path):
        """C1, B5: padding rows are zero; rows that nothing may read are NaN."""

        @settings(max_examples=12)
        @given(
            st.lists(st.integers(0, 60), min_size=1, max_size=4),
            st.lists(st.tuples(st.one_of(st.just(0), st.integers(1, 60)), st.integers(2, 20)), min_size=1, max_size=3),
            st.sampled_from([3, 64]),
            st.sampled_from([1, 16]),
            st.sampled_from([0, 3]),
        )
        def holds(decodes, extends, capacity, page_size, padding):
            model = scene([*((before, 1) for before in decodes), *extends], page_size=page_size, padding=padding)
            out, wanted = model.run(ExtendPolicy(forced=path, chunk_capacity=capacity)), model.wanted()
            assert modes(model.batch) == [ForwardMode.DECODE, ForwardMode.EXTEND]
            assert error(out[: len(wanted)], wanted) <= 2e-6 and (out[len(wanted) :] == 0).all()

        holds()

    def test_each_half_has_the_bounds_of_its_own_requests(self):
        """Kernels are tuned by them, and a decode has one row per request."""
        model = scene()
        model.run(NOW)
        decodes, extends = (half.geometry for half in model.batch.plan.halves)
        assert (decodes.max_new, decodes.max_seq_len, decodes.new_lens) == (1, 21, None)
        assert (extends.max_new, extends.max_seq_len) == (40, 70) and extends.new_lens.tolist() == [9, 40]
        assert extends.calls and not decodes.calls and not model.batch.geometry.calls
        alone = scene(((20, 1), (0, 9)))
        alone.run(NOW)
        assert alone.batch.plan.halves[1].geometry.new_lens is None

    def test_new_rows_of_both_halves_are_in_the_cache_afterwards(self):
        model = scene()
        model.run(NOW)
        cache = model.scene.pools.mla.rows(3)
        for request, rows in enumerate(model.scene.keys):
            for position, row in enumerate(rows):
                assert torch.equal(cache[model.scene.page_table[request, position // 16], position % 16], row)

    def test_the_plan_names_the_planners_of_both_halves(self):
        """It counts the backends that served a step."""
        model = scene()
        model.run(NOW)
        name = model.scene.backend.backend_id.name
        assert model.batch.plan.attention.planner_names() == [name, name]

    def test_a_stale_plan_is_refused(self):
        """B5: of a batch that changed or shrank after it was planned."""
        model = scene()
        attention, batch = ModelAttention(model.scene.backend, model.scene.pools, NOW), model.scene.batch()
        attention.plan(batch)
        rows = model.scene.new_rows(model.scene.keys).squeeze(1)
        with raises_naming(PlanError, 50, 51):
            attention.attend_mla(model.q[:50], rows[:50], model.scene.layer, model.weights, batch)
        batch.geometry = replace(batch.geometry)
        with raises_naming(PlanError, 51, "geometry"):
            attention.attend_mla(model.q, rows, model.scene.layer, model.weights, batch)

    def test_a_path_that_is_asked_for_is_that_of_the_whole_batch(self):
        """C1: as for the halves of two-batch overlap."""
        model = scene()
        attention = ModelAttention(model.scene.backend, model.scene.pools, NOW)
        for path in ExtendPath:
            assert not attention.plan(model.scene.batch(), path).halves

    @pytest.mark.parametrize("change", [{"host": None}, {"mode": ForwardMode.EXTEND}])
    def test_other_batches_run_whole(self, change, monkeypatch):
        model = scene()
        attention = ModelAttention(model.scene.backend, model.scene.pools, NOW)
        batch = ForwardBatch(replace(model.scene.batch().geometry, **change))
        plan = Plan.of(model.scene.backend.backend_id, batch.geometry)
        monkeypatch.setattr(model.scene.backend, "init_forward_metadata", lambda batch: plan)
        assert not attention.plan(batch).halves

    def test_each_half_runs_on_the_backend_of_its_role(self):
        """A9: decodes as in a decode step, and chunks as in a prefill."""
        calls: list[tuple[str, str]] = []

        def build(context):
            prefill, decode = TorchNativeBackend(context), TorchNativeBackend(context)
            for name, child in (("prefill", prefill), ("decode", decode)):
                for hook in ("forward_extend", "forward_decode", "forward_ragged"):
                    setattr(child, hook, noted(calls, (name, hook), getattr(child, hook)))
            return SplitBackend(prefill, decode)

        model = UpProjected(Stage(small(MIXED, mode=ForwardMode.MIXED, mla=DIMS), "cpu", build))
        out = model.run(NOW)
        assert error(out, model.wanted()) <= 2e-6
        assert calls == [("decode", "forward_decode"), ("prefill", "forward_ragged")]
