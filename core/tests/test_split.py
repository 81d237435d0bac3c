"""One backend for prefill and another for decode: which of them plans, runs and answers (A8, A9)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import AttentionKind, BackendError, ForwardMode, GraphLevel, LayerSpec, PlanError, Role
from attnplug.host import HookError
from attnplug.wrappers.forwarding import SplitBackend
from attnplug_testing.batches import with_plan
from attnplug_testing.errors import raises_naming
from attnplug_testing.specs import GDN as LINEAR
from support.recorder import Hookless, Recorder, batch_in

FULL = LayerSpec(1, AttentionKind.MHA, 1, 1, 8, 8, 1.0)


class TestSplit:
    def setup_method(self):
        self.prefill, self.decode = Recorder("p"), Recorder("d")
        self.split = SplitBackend(self.prefill, self.decode)

    @pytest.mark.parametrize("mode", ForwardMode)
    def test_mode_decides_who_plans(self, mode):
        plan = self.split.init_forward_metadata(batch_in(mode))
        decoding = mode in (ForwardMode.DECODE, ForwardMode.IDLE, ForwardMode.TARGET_VERIFY)
        assert plan.planner is self.split.backend_id
        assert [part.planner for part in plan.parts] == [(self.decode if decoding else self.prefill).backend_id]

    def test_verify_goes_to_the_configured_backend(self):
        """A9: planning, running and committing, eager and in graphs."""
        split = SplitBackend(self.prefill, self.decode, verify=Role.PREFILL)
        batch = batch_in(ForwardMode.TARGET_VERIFY)
        split.init_forward_metadata(batch)
        split.init_forward_metadata_out_graph(batch, in_capture=True)
        split.init_forward_metadata_in_graph(batch)
        split.forward_extend("q", "k", "v", FULL, batch)
        split.commit_states(batch, "accepted")
        assert len(self.prefill.calls) == 5 and self.decode.calls == []

    def test_verify_goes_to_prefill_or_decode_only(self):
        with raises_naming(ValueError, "verify", "prefill", "decode", "linear"):
            SplitBackend(self.prefill, self.decode, verify=Role.LINEAR)

    def test_mode_decides_who_runs(self):
        """A9: the batch's mode selects the child. That child also runs linear layers and commits their states."""
        for mode, child in ((ForwardMode.DECODE, self.decode), (ForwardMode.EXTEND, self.prefill)):
            batch = batch_in(mode)
            forward = self.split.forward_decode if mode.is_decode else self.split.forward_extend
            forward("q", "k", "v", FULL, batch)
            self.split.forward_linear("inputs", LINEAR, batch)
            self.split.commit_states(batch, "accepted")
            assert len(child.calls) == 3 == len(self.prefill.calls + self.decode.calls)
            child.calls.clear()

    def test_a_ragged_call_goes_to_the_prefill_backend(self):
        """C1: it has no batch; only an extend makes one."""
        assert self.split.forward_ragged("q", "k", "v", FULL, "call", "plan", "lse") is self.prefill.result
        assert self.decode.calls == []

    def test_plan_of_the_other_child_is_refused(self):
        """B5: a batch whose mode changed after planning is not run by another's plan."""
        split = SplitBackend(Hookless("p"), Hookless("d"))
        batch = batch_in(ForwardMode.EXTEND)
        with_plan(batch, split.init_forward_metadata(batch))
        batch.geometry = replace(batch.geometry, mode=ForwardMode.DECODE)
        with raises_naming(PlanError, "d", "p"):
            split.forward_decode(torch.zeros(2, 1, 8), None, None, FULL, batch)

    def test_chunk_hook_reaches_the_prefill_child_with_the_flag(self):
        """A8: also for a decode batch, because chunks belong to prefill."""
        for mode in (ForwardMode.EXTEND, ForwardMode.DECODE):
            batch = batch_in(mode)
            assert self.split.init_mha_chunk_metadata(batch, True).planner is self.prefill.backend_id
            (given,) = self.prefill.given("init_mha_chunk_metadata")
            assert given == {"forward_batch": batch, "disable_flashinfer_ragged": True}
            self.prefill.calls.clear()

    def test_one_parameter_chunk_hook_is_called_without_the_flag(self):
        """A8: TRT-LLM's hook has one parameter; the original passed two and raised TypeError."""

        class OneParameter(Hookless):
            def init_mha_chunk_metadata(self, forward_batch):
                return forward_batch

        batch = batch_in(ForwardMode.EXTEND)
        assert SplitBackend(OneParameter(), self.decode).init_mha_chunk_metadata(batch, True) is batch

    def test_a_prefill_child_without_the_chunk_hook_plans_nothing(self):
        """A8: the decode child's hook is not used instead."""
        assert SplitBackend(Hookless(), self.decode).init_mha_chunk_metadata(batch_in(ForwardMode.EXTEND)) is None

    def test_hook_that_needs_what_nobody_offers_is_refused_when_the_wrapper_is_built(self):
        """A8"""

        class Demanding(Hookless):
            def init_mha_chunk_metadata(self, forward_batch, chunk_stream):
                raise AssertionError

        with raises_naming(HookError, "Demanding", "init_mha_chunk_metadata", "chunk_stream"):
            SplitBackend(Demanding(), self.decode)

    def test_hooks_stay_visible_through_nested_wrappers(self):
        """A8, A9: a split inside a split; and absent ones stay absent."""
        outer = SplitBackend(self.split, Recorder("other"))
        assert outer.init_mha_chunk_metadata(batch_in(ForwardMode.EXTEND), True).planner is self.prefill.backend_id
        bare = SplitBackend(SplitBackend(Hookless(), Hookless()), Hookless())
        assert bare.init_mha_chunk_metadata is None

    def test_memory_for_graphs_is_asked_of_both_and_plans_of_the_child_that_runs_the_mode(self):
        """A9"""
        self.split.init_cuda_graph_state(8, 16)
        assert (
            self.prefill.calls == self.decode.calls == [("init_cuda_graph_state", {"max_bs": 8, "max_num_tokens": 16})]
        )
        batch = batch_in(ForwardMode.DECODE)
        self.split.init_forward_metadata_out_graph(batch, in_capture=True)
        self.split.init_forward_metadata_in_graph(batch)
        assert [member for member, _ in self.decode.calls[1:]] == [
            "init_forward_metadata_out_graph",
            "init_forward_metadata_in_graph",
        ]
        assert len(self.prefill.calls) == 1

    def test_a_child_that_takes_no_part_in_graphs_reserves_no_memory_and_says_nothing_of_padding(self):
        """A9: a prefill backend without graphs and a decode backend with graphs."""
        prefill, decode = Hookless(), Recorder("decode", fill=2)
        split = SplitBackend(prefill, decode)
        assert split.claims.cuda_graph is GraphLevel.DECODE
        split.init_cuda_graph_state(8, 16)
        assert split.get_cuda_graph_seq_len_fill_value() == 2

    @pytest.mark.parametrize("fills", [(0, 3), (3, 0)])
    def test_the_larger_fill_value_is_taken(self, fills):
        """A9: one batch is padded once, and both children must be able to plan it."""
        prefill, decode = (Recorder("child", fill=fill) for fill in fills)
        assert SplitBackend(prefill, decode).get_cuda_graph_seq_len_fill_value() == 3

    def test_graph_hook_that_a_child_lacks_is_an_error_that_names_it(self):
        split = SplitBackend(self.prefill, Hookless())
        with raises_naming(BackendError, "init_cuda_graph_state", "decode", "hookless"):
            split.init_cuda_graph_state(8, 16)
