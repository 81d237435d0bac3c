"""The wrapper that joins full and linear attention: routing, planning, and hooks by their own signatures (A7-A9)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnplug import (
    AttentionKind,
    BackendError,
    Claims,
    DType,
    ExtendPath,
    ForwardBatch,
    ForwardMode,
    Geometry,
    GraphLevel,
    LayerSpec,
    ModelSpec,
    Plan,
    PlanError,
)
from attnplug.contract.batch import BackendId
from attnplug.host import ExtendPolicy, HookError, KVPools, ModelAttention, active_attention
from attnplug.linear import LinearDims, LinearInputs, LinearStatePool
from attnplug.wrappers.forwarding import HybridLinearBackend, SplitBackend
from attnplug_testing.batches import with_plan
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelScene, mla

FULL = LayerSpec(1, AttentionKind.MHA, 1, 1, 8, 8, 1.0)
LINEAR = LayerSpec(0, AttentionKind.GDN, 2, 2, 4, 4, 0.5, linear=LinearDims(2, 2, 4, 4, 24, 4))
MODEL = ModelSpec("half", "test", (LINEAR, FULL), 64)
ROWS = torch.ones(2, 1, 8)


class Full:
    """A full-attention backend with a two-parameter chunk hook that records its calls."""

    def __init__(self, name: str = "full", claims: Claims | None = None) -> None:
        self.backend_id, self.claims = BackendId(name), claims or Claims(cuda_graph=GraphLevel.ALWAYS)
        self.calls: list[tuple[Any, ...]] = []

    def init_forward_metadata(self, batch):
        self.calls.append(("plan", batch.forward_mode))
        return Plan(self.backend_id, batch.forward_mode, batch.num_tokens, None)

    def forward_extend(self, q, k, v, layer, batch, *, save_kv_cache=True, extras=None):
        batch.plan_for(self.backend_id, q.shape[0], decode=False)
        self.calls.append(("extend", layer.layer_id, save_kv_cache, extras))
        return q

    def forward_decode(self, q, k, v, layer, batch, *, save_kv_cache=True, extras=None):
        batch.plan_for(self.backend_id, q.shape[0], decode=True)
        self.calls.append(("decode", layer.layer_id, save_kv_cache, extras))
        return q

    def init_mha_chunk_metadata(self, forward_batch, disable_flashinfer_ragged=False):
        self.calls.append(("chunks", disable_flashinfer_ragged))
        return Plan(self.backend_id, forward_batch.forward_mode, forward_batch.num_tokens, None)

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.calls.append(("graphs", max_bs, max_num_tokens))

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        self.calls.append(("out_graph", in_capture))
        return Plan(self.backend_id, forward_batch.forward_mode, forward_batch.num_tokens, None)

    def init_forward_metadata_in_graph(self, forward_batch):
        self.calls.append(("in_graph",))

    def get_cuda_graph_seq_len_fill_value(self):
        return 3


class Linear(Full):
    """A linear backend that plans like ``Full`` and runs the operations of linear layers."""

    def __init__(self, name: str = "linear", claims: Claims | None = None) -> None:
        super().__init__(name, claims or Claims(cuda_graph=GraphLevel.DECODE, needs_cpu_seq_lens=False))

    forward_extend = forward_decode = init_mha_chunk_metadata = None  # type: ignore[assignment] # it has none of these

    def forward_conv(self, x, weight, bias, layer, batch, silu):
        batch.plan_for(self.backend_id, x.shape[0])
        self.calls.append(("conv", layer.layer_id, silu))
        return x

    def forward_linear(self, inputs, layer, batch):
        batch.plan_for(self.backend_id, inputs.v.shape[0])
        self.calls.append(("linear", layer.layer_id))
        return inputs.v

    def commit_states(self, forward_batch, accepted):
        self.calls.append(("commit", accepted.tolist()))

    def get_cuda_graph_seq_len_fill_value(self):
        return 1


def batch_in(mode: ForwardMode) -> ForwardBatch:
    table = torch.zeros(2, 1, dtype=torch.int32)
    return ForwardBatch(Geometry.of_lengths(mode, table, [1, 1], [1, 1], 16, state_slots=torch.tensor([4, 5])))


def planned(hybrid: HybridLinearBackend, mode: ForwardMode) -> ForwardBatch:
    batch = batch_in(mode)
    return with_plan(batch, hybrid.init_forward_metadata(batch))


def with_states(backend: Any) -> ModelAttention:
    """A model's attention, with states for its linear layer."""
    return ModelAttention(
        backend, KVPools(linear=LinearStatePool([LINEAR], num_slots=6, dtype=DType.FLOAT32, device="cpu"))
    )


def inputs() -> LinearInputs:
    q = torch.ones(2, 2, 4)
    return LinearInputs(q, q, q, torch.zeros(2, 2))


class TestRouting:
    def test_each_layer_runs_on_its_own_backend(self):
        """A7"""
        full, linear = Full(), Linear()
        hybrid = HybridLinearBackend(full, linear, MODEL)
        batch = batch_in(ForwardMode.DECODE)
        with with_states(hybrid).running():
            attention = active_attention()
            attention.plan(batch)
            attention.convolve(torch.ones(2, 24), torch.ones(24, 4), None, LINEAR, batch)
            attention.attend_linear(inputs(), LINEAR, batch)
            attention.attend(ROWS, None, None, FULL, batch, save_kv_cache=False)
        assert full.calls == [("plan", "decode"), ("decode", 1, False, None)]
        assert linear.calls == [("plan", "decode"), ("conv", 0, True), ("linear", 0)]

    def test_a_layer_run_as_the_other_sort_is_refused(self):
        """A7"""
        hybrid = HybridLinearBackend(Full(), Linear(), MODEL)
        batch = planned(hybrid, ForwardMode.EXTEND)
        with raises_naming(BackendError, "linear", "forward_extend", "full"):
            hybrid.forward_extend(ROWS, None, None, LINEAR, batch)
        with raises_naming(BackendError, "full", "forward_linear", "linear"):
            hybrid.forward_linear(inputs(), FULL, batch)

    def test_a_layer_of_another_model_is_refused(self):
        hybrid = HybridLinearBackend(Full(), Linear(), MODEL)
        stranger = LayerSpec(7, AttentionKind.MHA, 1, 1, 8, 8, 1.0)
        with raises_naming(BackendError, "layer 7", [0, 1]):
            hybrid.forward_extend(ROWS, None, None, stranger, planned(hybrid, ForwardMode.EXTEND))

    def test_full_layers_need_a_full_backend_when_it_is_built(self):
        """A7: a layer id without a backend is an error at construction."""
        with raises_naming(BackendError, "layer 1", "half"):
            HybridLinearBackend(None, Linear(), MODEL)

    def test_a_model_of_linear_layers_alone_runs(self):
        linear = Linear()
        hybrid = HybridLinearBackend(None, linear, ModelSpec("all", "test", (LINEAR,), 64))
        batch = planned(hybrid, ForwardMode.EXTEND)
        hybrid.forward_linear(inputs(), LINEAR, batch)
        assert linear.calls[-1] == ("linear", 0)
        assert hybrid.get_cuda_graph_seq_len_fill_value() == 1

    def test_a_model_without_states_has_no_linear_layers(self):
        hybrid = HybridLinearBackend(Full(), Linear(), MODEL)
        with raises_naming(BackendError, "layer 0", "linear"):
            ModelAttention(hybrid, KVPools()).attend_linear(inputs(), LINEAR, planned(hybrid, ForwardMode.EXTEND))

    def test_a_backend_without_linear_attention_says_what_to_choose(self):
        with raises_naming(BackendError, "full", "forward_conv", "linear"):
            with_states(Full())


class TestPlanning:
    @pytest.mark.parametrize("mode", [mode for mode in ForwardMode if mode is not ForwardMode.DRAFT_EXTEND])
    def test_both_children_plan(self, mode):
        """A7: each finds its own plan in the wrapper's (B5)."""
        full, linear = Full(), Linear()
        plan = HybridLinearBackend(full, linear, MODEL).init_forward_metadata(batch_in(mode))
        assert plan.part_of(full.backend_id) is not None and plan.part_of(linear.backend_id) is not None
        assert plan.query_rows == 2

    def test_a_drafts_extend_is_planned_by_the_full_child_alone_eager_and_in_graphs(self):
        """A7"""
        full, linear = Full(), Linear()
        hybrid = HybridLinearBackend(full, linear, MODEL)
        batch = planned(hybrid, ForwardMode.DRAFT_EXTEND)
        hybrid.init_forward_metadata_out_graph(batch, True)
        hybrid.init_forward_metadata_in_graph(batch)
        assert [call[0] for call in full.calls] == ["plan", "out_graph", "in_graph"]
        assert linear.calls == []
        with raises_naming(PlanError, "linear"):
            hybrid.forward_linear(inputs(), LINEAR, batch)

    def test_a_drafts_extend_of_linear_layers_alone_is_refused(self):
        """A7: it touches no state."""
        hybrid = HybridLinearBackend(None, Linear(), ModelSpec("all", "test", (LINEAR,), 64))
        with raises_naming(PlanError, "state"):
            hybrid.init_forward_metadata(batch_in(ForwardMode.DRAFT_EXTEND))

    def test_graphs_are_planned_by_both(self):
        """A9"""
        full, linear = Full(), Linear()
        hybrid = HybridLinearBackend(full, linear, MODEL)
        hybrid.init_cuda_graph_state(4, 8)
        batch = batch_in(ForwardMode.DECODE)
        with_plan(batch, hybrid.init_forward_metadata_out_graph(batch, True))
        hybrid.init_forward_metadata_in_graph(batch)
        hybrid.forward_decode(ROWS, None, None, FULL, batch)
        hybrid.forward_linear(inputs(), LINEAR, batch)
        for child in (full, linear):
            assert child.calls[:3] == [("graphs", 4, 8), ("out_graph", True), ("in_graph",)]
        assert hybrid.get_cuda_graph_seq_len_fill_value() == 3

    def test_accepted_tokens_reach_the_linear_child(self):
        linear = Linear()
        HybridLinearBackend(Full(), linear, MODEL).commit_states(
            batch_in(ForwardMode.TARGET_VERIFY), torch.tensor([2, 0])
        )
        assert linear.calls == [("commit", [2, 0])]

    def test_the_weaker_claim_wins_but_for_extend_paths_and_extras(self):
        """A9"""
        full = Full(claims=Claims(cuda_graph=GraphLevel.ALWAYS, mla_extend=frozenset(ExtendPath), extras={"lse"}))
        hybrid = HybridLinearBackend(full, Linear(), MODEL)
        assert hybrid.claims.cuda_graph is GraphLevel.DECODE and hybrid.limiting_children["cuda_graph"] == ("linear",)
        assert hybrid.claims.needs_cpu_seq_lens and "mla_extend" not in hybrid.limiting_children
        assert hybrid.claims.mla_extend == frozenset(ExtendPath) and hybrid.claims.extras == {"lse"}


def _one(self, forward_batch):
    self.calls.append(("chunks",))
    return Plan(self.backend_id, forward_batch.forward_mode, forward_batch.num_tokens, None)


def _renamed(self, batch, *, disable_flashinfer_ragged):
    self.calls.append(("chunks", disable_flashinfer_ragged))


def _greedy(self, *arguments, **named):
    self.calls.append(("chunks", len(arguments), sorted(named)))


class TestChunkHook:
    @pytest.mark.parametrize(
        ("hook", "seen"),
        [
            (Full.init_mha_chunk_metadata, ("chunks", True)),
            (_one, ("chunks",)),
            (_renamed, ("chunks", True)),
            (_greedy, ("chunks", 1, ["disable_flashinfer_ragged"])),
        ],
        ids=["flashinfer", "trtllm", "keyword", "anything"],
    )
    @pytest.mark.parametrize("nested", [False, True])
    def test_it_is_called_by_its_own_signature(self, hook, seen, nested):
        """A8: also through a split inside the hybrid."""
        shape = type("Shape", (Full,), {"init_mha_chunk_metadata": hook})
        full = shape()
        child = SplitBackend(full, Full("decode")) if nested else full
        HybridLinearBackend(child, Linear(), MODEL).init_mha_chunk_metadata(batch_in(ForwardMode.EXTEND), True)
        assert full.calls == [seen]

    def test_absent_means_nothing_to_plan(self):
        """A6, A8: the wrapper has no such hook either."""
        hookless = type("Hookless", (Full,), {"init_mha_chunk_metadata": None})()
        assert HybridLinearBackend(hookless, Linear(), MODEL).init_mha_chunk_metadata is None

    def test_a_hook_that_wants_more_than_is_offered_is_refused_when_it_is_built(self):
        """A8"""
        demanding = type("Demanding", (Full,), {"init_mha_chunk_metadata": lambda self, batch, cursor: None})()
        with raises_naming(HookError, "cursor"):
            HybridLinearBackend(demanding, Linear(), MODEL)

    def test_a_linear_child_is_never_asked_for_chunks(self):
        """A7: even if it has the hook, and even if the full child has none."""
        linear = type("Odd", (Linear,), {"init_mha_chunk_metadata": Full.init_mha_chunk_metadata})()
        hookless = type("Hookless", (Full,), {"init_mha_chunk_metadata": None})()
        batch = batch_in(ForwardMode.EXTEND)
        assert HybridLinearBackend(hookless, linear, MODEL).init_mha_chunk_metadata(batch) is None
        alone = HybridLinearBackend(None, linear, ModelSpec("all", "test", (LINEAR,), 64))
        with raises_naming(PlanError, "full-attention"):
            alone.init_mha_chunk_metadata(batch)
        assert linear.calls == []

    def test_planning_a_batch_reaches_the_full_child_through_the_wrapper(self):
        """A8, C2: the bug that started it was a wrapper without the hook."""
        full = Full(claims=Claims(mla_extend=frozenset(ExtendPath)))
        full.forward_ragged = lambda q, k, v, layer, call, plan=None, lse=None: None  # type: ignore[attr-defined] # a hook
        scene = KernelScene(mla(((800, 8218),), page_size=16, heads=1), "cpu", lambda context: full)
        hybrid = HybridLinearBackend(full, Linear(), ModelSpec("mla", "test", (LINEAR, scene.layer), 1 << 20))
        batch = scene.batch()
        ModelAttention(hybrid, KVPools(mla=scene.pool), ExtendPolicy(forced=ExtendPath.CHUNKED)).plan(batch)
        assert ("chunks", False) in full.calls
        assert batch.plan.chunks.planner is full.backend_id and batch.plan.chunks.query_rows == 8218
