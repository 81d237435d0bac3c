"""MLA extends: three paths with one result (C1), prepared once per batch (C2), merged by log-sum-exp (C4)."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug import BackendError, Claims, DType, ExtendPath, ForwardBatch, ForwardMode, Plan, PlanError, RaggedCall
from attnplug.contract.batch import BackendId
from attnplug.host import ExtendPolicy, HookError, MLADims, MLAWeights, ModelAttention
from attnplug.kernels import merge_partial
from attnplug.mla.attention import MLAAttention, plan_extend
from attnplug_conformance.checks.mla_paths import UpProjected
from attnplug_testing.devices import DEVICES
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelCase
from attnplug_testing.stage import Stage, error, small

DIMS = MLADims(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8)
ALL = frozenset(ExtendPath)


class Model(UpProjected):
    """One MLA layer with random up-projections over a stage's cache."""

    def __init__(self, case: KernelCase, device: str = "cpu") -> None:
        self.stage = Stage(case, device)
        super().__init__(self.stage)
        self.case, self.layer = case, self.stage.layer

    def run(self, policy: ExtendPolicy, batch: ForwardBatch | None = None) -> torch.Tensor:
        return super().run(policy, batch).cpu()

    @property
    def path(self) -> ExtendPath:
        """Path of the last batch, by its calls: those over a prefix are not causal, and read rows of the cache."""
        calls = self.batch.geometry.calls
        if not calls:
            return ExtendPath.ABSORBED
        return ExtendPath.ONE_SHOT if self.batch.plan.extend.metadata[0].slots is not None else ExtendPath.CHUNKED


def forced(path: ExtendPath, capacity: int = 1 << 17) -> ExtendPolicy:
    return ExtendPolicy(forced=path, chunk_capacity=capacity)


def plan_of(batch: ForwardBatch, mode: ForwardMode = ForwardMode.EXTEND, rows: int = 9) -> Plan:
    """Return the plan that a chunk hook makes."""
    return Plan(BackendId("chunks"), mode, rows, None)


class TestPaths:
    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("path", ExtendPath)
    @pytest.mark.sample(2)
    def test_random_batches_match_float64_on_every_path(self, path, device):
        """C1: three ways, one result; C3: chunks that split, pack, and leave requests without context."""

        @settings(max_examples=8)
        @given(
            st.lists(st.tuples(st.one_of(st.just(0), st.integers(1, 60)), st.integers(1, 20)), min_size=1, max_size=4),
            st.sampled_from([1, 3, 17, 64, 1 << 17]),
            st.sampled_from([1, 5, 16]),
            st.sampled_from([0, 3]),
            st.integers(0, 99),
        )
        def holds(lengths, capacity, page_size, padding, seed):
            case = small(tuple(lengths), mla=DIMS, page_size=page_size, padding=padding, seed=seed)
            model = Model(case, device)
            out = model.run(forced(path, capacity))
            wanted = model.wanted()
            assert error(out[: len(wanted)], wanted) <= 2e-6
            assert (out[len(wanted) :] == 0).all()
            assert model.path is path

        holds()

    @pytest.mark.parametrize("path", ExtendPath)
    def test_requests_without_new_tokens_are_in_no_call(self, path):
        """C3: kernels return garbage for empty spans. Results of the other requests do not change."""
        model = Model(small(((20, 0), (7, 4), (9, 0), (0, 3)), mla=DIMS))
        assert error(model.run(forced(path, 8)), model.wanted()) <= 2e-6
        assert all(min(call.query_lens) and min(call.kv_lens) for call in model.batch.geometry.calls)

    @pytest.mark.parametrize("path", ExtendPath)
    def test_new_rows_are_in_the_cache_afterwards(self, path):
        """A later step reads them, whichever path wrote them."""
        model = Model(small(((20, 9), (0, 5)), mla=DIMS))
        model.run(forced(path))
        cache = model.stage.pools.mla.rows(3)
        for request, rows in enumerate(model.stage.keys):
            for position, row in enumerate(rows):
                page = model.stage.page_table[request, position // 16]
                assert torch.equal(cache[page, position % 16], row)

    @pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.MIXED])
    def test_other_modes_run_absorbed_whatever_is_forced(self, mode):
        """C1: only a plain extend is worth up-projecting for."""
        model = Model(small(((20, 1), (7, 1)), mode=mode, mla=DIMS))
        assert error(model.run(forced(ExtendPath.CHUNKED)), model.wanted()) <= 2e-6
        assert model.path is ExtendPath.ABSORBED

    def test_up_projection_is_bounded_by_the_chunk_capacity(self, monkeypatch):
        """C1: a prefix of any length takes the memory of one chunk."""
        largest = []
        original = MLAWeights.up_project
        monkeypatch.setattr(MLAWeights, "up_project", lambda w, rows: largest.append(len(rows)) or original(w, rows))
        model = Model(small(((700, 4), (300, 6), (0, 9)), mla=DIMS))
        out = model.run(forced(ExtendPath.CHUNKED, capacity=64))
        assert max(largest) == 64 and len(largest) == 1 + math.ceil(1000 / 64)
        assert error(out, model.wanted()) <= 2e-6

    def test_fewer_rows_than_prepared_are_refused(self):
        """B5"""
        model = Model(small(((20, 9),), mla=DIMS))
        attention = ModelAttention(model.stage.backend, model.stage.pools, forced(ExtendPath.CHUNKED))
        batch, rows = model.stage.batch(), model.stage.new_rows(model.stage.keys).squeeze(1)
        attention.plan(batch)
        with raises_naming(PlanError, 5, 9):
            attention.attend_mla(model.q[:5], rows, model.layer, model.weights, batch)

    def test_the_path_is_an_argument_of_planning(self):
        """C1: an explicit path overrules the policy, and a path that the backend cannot run is refused."""
        model = Model(small(((20, 9),), mla=DIMS))
        attention, batch = ModelAttention(model.stage.backend, model.stage.pools), model.stage.batch()
        assert attention.plan(batch).extend is None
        assert attention.plan(batch, ExtendPath.CHUNKED).extend is not None and len(batch.geometry.calls) == 2
        assert attention.plan(batch).extend is None and batch.geometry.calls == ()
        model.stage.backend.claims = Claims()
        with raises_naming(PlanError, "chunked", "absorbed"):
            attention.plan(batch, ExtendPath.CHUNKED)

    def test_a_path_that_is_asked_for_holds_in_every_mode_that_extends(self):
        """C1"""
        model = Model(small(((20, 3),), mode=ForwardMode.MIXED, mla=DIMS))
        attention, batch = ModelAttention(model.stage.backend, model.stage.pools), model.stage.batch()
        assert attention.plan(batch, ExtendPath.CHUNKED).extend is not None

    def test_decoding_looks_at_no_length_of_the_host(self):
        """C1: this includes a backend that can extend as MHA only."""
        model = Model(small(((20, 1),), mode=ForwardMode.DECODE, mla=DIMS))
        model.stage.backend.claims = Claims(mla_extend=frozenset({ExtendPath.CHUNKED}))
        geometry = replace(model.stage.batch().geometry, host=None)
        assert MLAAttention(model.stage.backend, model.stage.pools.mla, ExtendPolicy()).plan(geometry) is None

    def test_new_rows_go_where_the_host_says(self):
        """This includes a prefill as MHA, where the facade writes the rows, not the backend."""
        model = Model(small(((0, 3),), mla=DIMS))
        slots = torch.tensor([5, -1, 2])
        geometry = replace(model.stage.batch().geometry, slots=slots)
        plan = MLAAttention(model.stage.backend, model.stage.pools.mla, ExtendPolicy()).plan(geometry)
        assert plan.new_slots is slots

    @pytest.mark.parametrize("path", [ExtendPath.ONE_SHOT, ExtendPath.CHUNKED])
    def test_calls_are_numbered_and_in_the_lane_of_their_batch(self, path):
        """A backend finds the call's plan by its number, and its scratch memory by the lane."""
        model = Model(small(((20, 3), (4, 2)), mla=DIMS))
        geometry = replace(model.stage.batch().geometry, lane=1)
        calls = [part.call for part in plan_extend(geometry, path, 16)]
        assert [(call.index, call.lane) for call in calls] == [(index, 1) for index in range(len(calls))]
        assert len(calls) == (1 if path is ExtendPath.ONE_SHOT else 3)

    @pytest.mark.parametrize("path", ExtendPath)
    def test_results_are_in_the_models_type_whatever_the_caches_is(self, path):
        model = Model(small(((20, 3), (0, 2)), mla=DIMS, dtype=DType.BFLOAT16, kv_dtype=DType.FLOAT8_E4M3))
        out = model.run(forced(path, 8))
        assert out.dtype is torch.bfloat16 and error(out, model.wanted()) <= 0.1

    def test_parts_are_merged_in_float32(self, monkeypatch):
        """C4: rounding once, and not with every chunk."""
        merged = []
        monkeypatch.setattr(
            "attnplug.mla.attention.merge_partial",
            lambda out, *parts: merged.append(out.dtype) or merge_partial(out, *parts),
        )
        Model(small(((20, 3), (0, 2)), mla=DIMS, dtype=DType.BFLOAT16)).run(forced(ExtendPath.CHUNKED, 8))
        assert merged == [torch.float32] * 3

    def test_a_batch_planned_by_another_facade_is_refused(self):
        """B5: how it runs as MHA is a plan like any other."""
        model, other = (Model(small(((20, 9),), mla=DIMS)) for _ in range(2))
        batch = model.stage.batch()
        ModelAttention(model.stage.backend, model.stage.pools).plan(batch, ExtendPath.CHUNKED)
        attention = ModelAttention(other.stage.backend, other.stage.pools)
        with raises_naming(PlanError, "under_test", "instance"):
            attention.attend_mla(model.q, model.q[:, 0], model.layer, model.weights, batch)

    def test_without_exact_lengths_a_backend_that_can_runs_absorbed(self):
        """C1: the thresholds are about lengths that the host does not know."""
        model = Model(small(((0, 9),), mla=DIMS))
        known = model.stage.batch().geometry
        mla = MLAAttention(model.stage.backend, model.stage.pools.mla, ExtendPolicy())
        assert mla.plan(known) is not None
        assert mla.plan(replace(known, host=None)) is None


class TestHook:
    def prepare(self, backend: Any, policy: ExtendPolicy, lengths=((20, 9),)) -> Any:
        model = Model(small(lengths, mla=DIMS))
        batch = model.stage.batch()
        ModelAttention(backend, model.stage.pools, policy).plan(batch)
        return batch

    def backend(self, hook: Any) -> Any:
        inner = Model(small(((1, 1),), mla=DIMS)).stage.backend
        members = {"init_mha_chunk_metadata": hook} if hook is not None else {}
        cls = type("Hooked", (type(inner),), members)
        backend = object.__new__(cls)
        vars(backend).update(vars(inner))
        return backend

    def test_hook_is_called_once_per_batch_with_chunks_prepared(self):
        """C2"""
        seen: list[Any] = []

        def hook(self, forward_batch, disable_flashinfer_ragged=False):
            seen.append((len(forward_batch.geometry.calls), disable_flashinfer_ragged))
            return plan_of(forward_batch)

        batch = self.prepare(self.backend(hook), forced(ExtendPath.CHUNKED, capacity=8))
        assert seen == [(4, False)]
        assert batch.plan.chunks.query_rows == 9

    def test_every_call_is_given_what_the_hook_planned(self):
        """A6, C2"""
        model = Model(small(((20, 9),), mla=DIMS))
        model.stage.backend = backend = self.backend(lambda self, forward_batch: plan_of(forward_batch))
        ragged, given = backend.forward_ragged, []
        backend.forward_ragged = lambda q, k, v, layer, call, plan, lse: (
            given.append(plan) or ragged(q, k, v, layer, call, lse=lse)
        )
        model.run(forced(ExtendPath.CHUNKED))
        assert given == [model.batch.plan.chunks] * 2 and given[0] is not None

    def test_hook_receives_that_ragged_attention_is_disabled(self):
        """A4, C2: the chunk hook of a backend that cannot extend absorbed is still called."""
        seen: list[bool] = []
        hook = lambda self, forward_batch, disable_flashinfer_ragged=False: seen.append(disable_flashinfer_ragged)  # noqa: E731
        policy = ExtendPolicy(forced=ExtendPath.CHUNKED, disable_ragged=True)
        assert self.prepare(self.backend(hook), policy).plan.chunks is None
        assert seen == [True]

    def test_a_batch_planned_again_keeps_no_chunk_plan(self):
        """C2: neither if the next path has none, nor if its hook plans nothing."""
        model = Model(small(((20, 9),), mla=DIMS))
        batch, plans = model.stage.batch(), [True, False]
        backend = self.backend(lambda self, forward_batch: plan_of(forward_batch) if plans.pop(0) else None)
        attention = ModelAttention(backend, model.stage.pools)
        for path, planned in ((ExtendPath.CHUNKED, True), (ExtendPath.ABSORBED, False), (ExtendPath.CHUNKED, False)):
            assert (attention.plan(batch, path).chunks is not None) == planned

    @pytest.mark.parametrize("path", [ExtendPath.ONE_SHOT, ExtendPath.CHUNKED])
    def test_a_batch_without_new_tokens_has_no_calls_to_plan(self, path):
        """C2, C3: kernels return garbage for empty spans."""
        hook = lambda self, forward_batch: pytest.fail("there is nothing to plan")  # noqa: E731
        assert self.prepare(self.backend(hook), forced(path), ((20, 0), (3, 0))).geometry.calls == ()

    @pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND])
    def test_modes_that_graphs_capture_are_planned_without_a_look_at_lengths(self, mode):
        """C1: these modes extend absorbed at any length, since reading lengths from the device would synchronize."""
        model = Model(small(((20, 1),), mode=mode, mla=DIMS))
        geometry = replace(model.stage.batch().geometry, host=None)
        assert MLAAttention(model.stage.backend, model.stage.pools.mla, ExtendPolicy()).plan(geometry) is None

    @pytest.mark.parametrize(
        ("wrong", "named"),
        [
            (lambda self, forward_batch: {"chunks": 4}, ["{'chunks': 4}", "Plan"]),
            (lambda self, forward_batch: plan_of(forward_batch, mode=ForwardMode.MIXED), ["mixed"]),
            (lambda self, forward_batch: plan_of(forward_batch, rows=10), [10, 9]),
        ],
    )
    def test_a_chunk_plan_that_is_none_of_this_batch_is_the_backends_fault(self, wrong, named):
        """B5, C2"""
        with raises_naming(PlanError, "init_mha_chunk_metadata", "under_test", *named):
            self.prepare(self.backend(wrong), forced(ExtendPath.CHUNKED))

    @pytest.mark.parametrize("hook", ["init_mha_chunk_metadata", "forward_ragged"])
    def test_a_hook_that_demands_what_nobody_offers_is_refused_when_built(self, hook):
        """A8: not in the middle of a prefill."""
        backend = self.backend(None)
        setattr(backend, hook, lambda forward_batch, cursor: None)
        with raises_naming(HookError, hook, "'cursor'"):
            ModelAttention(backend, Model(small(((1, 1),), mla=DIMS)).stage.pools)

    def test_a_ragged_hook_without_lse_is_refused_when_built(self):
        """A8, C4: without ``lse``, the merge would read uninitialized log-sum-exps."""
        backend = self.backend(None)
        backend.forward_ragged = lambda q, k, v, layer, call, plan: q
        with raises_naming(HookError, "forward_ragged", "'lse'"):
            ModelAttention(backend, Model(small(((1, 1),), mla=DIMS)).stage.pools)

    def test_a_log_sum_exp_that_is_never_filled_is_not_finite(self):
        """C4: it cannot pass for a result."""
        model = Model(small(((20, 9),), mla=DIMS))
        ragged = model.stage.backend.forward_ragged
        model.stage.backend.forward_ragged = lambda q, k, v, layer, call, plan, lse: ragged(q, k, v, layer, call)
        assert model.run(forced(ExtendPath.CHUNKED)).isnan().all()

    def test_hooks_are_inspected_when_built_and_never_again(self, monkeypatch):
        """A8"""
        model = Model(small(((20, 9),), mla=DIMS))
        backend = self.backend(lambda self, forward_batch: plan_of(forward_batch))
        attention, batch = ModelAttention(backend, model.stage.pools, forced(ExtendPath.CHUNKED)), model.stage.batch()
        monkeypatch.setattr(inspect, "signature", lambda *a, **k: pytest.fail("inspected again"))
        attention.plan(batch)
        rows = model.stage.new_rows(model.stage.keys).squeeze(1)
        attention.attend_mla(model.q, rows, model.layer, model.weights, batch)
        assert batch.plan.chunks is not None

    def test_one_parameter_hook(self):
        """A8, C2"""
        batch = self.prepare(
            self.backend(lambda self, forward_batch: plan_of(forward_batch)), forced(ExtendPath.ONE_SHOT)
        )
        assert batch.plan.chunks is not None

    def test_absorbed_extend_plans_no_chunks(self):
        """C2: before the first layer of a chunked or one-shot extend, and only then."""
        batch = self.prepare(
            self.backend(lambda self, forward_batch: pytest.fail("called")), forced(ExtendPath.ABSORBED)
        )
        assert batch.plan.chunks is None

    def test_absent_hook_plans_nothing(self):
        """A8"""
        assert self.prepare(self.backend(None), forced(ExtendPath.CHUNKED)).plan.chunks is None

    def test_claim_without_the_method_is_refused_when_built(self):
        class Boasting:
            claims = Claims(mla_extend=ALL)
            backend_id = Model(small(((1, 1),), mla=DIMS)).stage.backend.backend_id

        with raises_naming(BackendError, "chunked", "one_shot", "forward_ragged"):
            ModelAttention(Boasting(), Model(small(((1, 1),), mla=DIMS)).stage.pools)


class TestRowsOfACall:
    """A host that absorbs, chunks and merges itself calls forward_ragged with its own lengths."""

    @pytest.mark.parametrize("lens", [([4], [5]), ([5], [4])], ids=["queries", "keys"])
    def test_lengths_that_are_not_those_of_the_rows(self, lens):
        stage = Stage(small(((0, 5),), mla=DIMS), "cpu")
        q = torch.zeros(5, stage.layer.num_heads, stage.layer.head_dim)
        call = RaggedCall.of(0, *lens, causal=False, device=torch.device("cpu"))
        with raises_naming(PlanError, "5, 5 and 5"):
            stage.backend.forward_ragged(q, q, q, stage.layer, call)

    def test_as_many_lengths_of_queries_as_of_keys(self):
        with raises_naming(PlanError, 2, 1):
            RaggedCall.of(0, [1, 2], [3], causal=False, device=torch.device("cpu"))

    @pytest.mark.parametrize("path", ExtendPath)
    def test_queries_of_other_heads(self, path):
        model = Model(small(((20, 9),), mla=DIMS))
        model.q = model.q[:, 1:]
        with raises_naming(BackendError, "q", "[rows, "):
            model.run(forced(path))
