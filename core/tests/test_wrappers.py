"""Wrappers forward everything, by construction (A9), and hooks by their own signatures (A8)."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from attnplug import (
    AttentionBackend,
    AttentionKind,
    BackendError,
    BackendId,
    Claims,
    ExtendPath,
    ForwardBatch,
    ForwardingBackend,
    ForwardMode,
    GraphLevel,
    HookError,
    LayerSpec,
    ModelSpec,
    PageSizes,
    Plan,
    PlanError,
    Role,
)
from attnplug.contract.backend import protocol_attributes, protocol_methods
from attnplug.declare.claims import weakest
from attnplug.host import HybridLinearBackend, SplitBackend, optional_hooks
from support.recorder import MEMBERS, PLANNERS, Recorder
from support.specs import GDN

LAYER = LayerSpec(0, AttentionKind.MHA, 1, 1, 8, 8, 1.0)


class Spy:
    """A backend that does nothing but remember what was asked of it. Answers every member of the protocol."""

    def __init__(self, name: str, claims: Claims | None = None) -> None:
        self.backend_id = BackendId(name)
        self.claims = claims or Claims()
        self.calls: list[tuple[str, tuple, dict]] = []

    def _note(self, member, result, *args, **kwargs):
        self.calls.append((member, args, kwargs))
        return result

    def init_forward_metadata(self, batch):
        return self._note(
            "init_forward_metadata", Plan(self.backend_id, batch.forward_mode, batch.num_tokens, None), batch
        )

    def forward_extend(self, q, k, v, layer, batch, *, save_kv_cache=True, extras=None):
        batch.plan_for(self.backend_id, q.shape[0], decode=False)
        return self._note("forward_extend", q, q, k, v, layer, batch, save_kv_cache=save_kv_cache, extras=extras)

    def forward_decode(self, q, k, v, layer, batch, *, save_kv_cache=True, extras=None):
        batch.plan_for(self.backend_id, q.shape[0], decode=True)
        return self._note("forward_decode", q, q, k, v, layer, batch, save_kv_cache=save_kv_cache, extras=extras)

    def init_mha_chunk_metadata(self, forward_batch, disable_flashinfer_ragged=False):
        plan = Plan(self.backend_id, forward_batch.forward_mode, 0, None, metadata=disable_flashinfer_ragged)
        return self._note("init_mha_chunk_metadata", plan, forward_batch, disable_flashinfer_ragged)

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        return self._note("init_cuda_graph_state", None, max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        plan = Plan(self.backend_id, forward_batch.forward_mode, forward_batch.num_tokens, None)
        return self._note("init_forward_metadata_out_graph", plan, forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch):
        return self._note("init_forward_metadata_in_graph", None, forward_batch)

    def get_cuda_graph_seq_len_fill_value(self):
        return self._note("get_cuda_graph_seq_len_fill_value", 3)


class Hookless:
    """Only what the protocol requires, as FlashAttention: no optional hook at all."""

    def __init__(self) -> None:
        self.backend_id, self.claims = BackendId("hookless"), Claims()

    init_forward_metadata = Spy.init_forward_metadata
    forward_extend = Spy.forward_extend
    forward_decode = Spy.forward_decode


def batch_in(mode: ForwardMode) -> ForwardBatch:
    return ForwardBatch(
        forward_mode=mode,
        input_ids=torch.zeros(2, dtype=torch.int64),
        page_table=torch.zeros(2, 1, dtype=torch.int32),
        seq_lens=torch.ones(2, dtype=torch.int32),
    )


def concrete_wrappers() -> list[type[ForwardingBackend]]:
    """Every wrapper class that exists in attnplug: a new one is tested without anybody remembering to."""
    found, waiting = [], list(ForwardingBackend.__subclasses__())
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if cls.__module__.startswith("attnplug."):
            found.append(cls)
    assert found
    return found


LINEAR = GDN
MODEL = ModelSpec("half", "test", (LINEAR, LayerSpec(1, AttentionKind.MHA, 1, 1, 8, 8, 1.0)), 64)
BUILD: dict[type, Any] = {
    SplitBackend: SplitBackend,
    HybridLinearBackend: lambda first, second: HybridLinearBackend(first, second, MODEL),
}
"""How each wrapper is made of two children."""


def arguments_for(member: str) -> dict[str, Any]:
    """One value a parameter of the protocol, told apart by identity; real ones only where a wrapper looks at them."""
    mode = ForwardMode.DECODE if member == "forward_decode" else ForwardMode.EXTEND
    batch = batch_in(mode)
    layer = MODEL.layers[0] if member in ("forward_conv", "forward_linear") else MODEL.layers[1]
    real = {"batch": batch, "forward_batch": batch, "layer": layer}
    return {name: real.get(name, object()) for name in MEMBERS[member].parameters}


class TestArguments:
    @pytest.mark.parametrize("wrapper", concrete_wrappers())
    @pytest.mark.parametrize("member", MEMBERS)
    def test_every_argument_of_every_member_reaches_a_child_and_its_answer_comes_back(
        self, wrapper, member, monkeypatch
    ):
        """A9: save_kv_cache, extras, lse, in_capture, silu, and whatever the protocol gains; A8: inspected before."""
        children = [Recorder("a"), Recorder("b")]
        built = BUILD[wrapper](*children)
        signature, arguments = MEMBERS[member], arguments_for(member)
        by_position = [v for name, v in arguments.items() if signature.parameters[name].kind is not KEYWORD_ONLY]
        by_name = {name: v for name, v in arguments.items() if signature.parameters[name].kind is KEYWORD_ONLY}
        with monkeypatch.context() as patch:
            patch.setattr(inspect, "signature", lambda *a, **k: pytest.fail("inspected again"))
            answer = getattr(built, member)(*by_position, **by_name)
        asked = [child for child in children if child.calls]
        assert asked
        for child in asked:
            assert [called for called, _ in child.calls] == [member]
            (given,) = child.given(member)
            assert given.keys() == arguments.keys()
            assert [name for name in given if given[name] is not arguments[name]] == []
        if member in PLANNERS:
            assert [answer.part_of(child.backend_id) for child in asked].count(None) == 0
        elif answer is not None and member != "get_cuda_graph_seq_len_fill_value":
            assert answer is asked[0].result
        else:
            assert signature.return_annotation in ("None", "int"), "a result was dropped"

    @pytest.mark.parametrize("change", [{"extras": "dropped"}, {"save_kv_cache": False}])
    def test_a_wrapper_whose_members_differ_from_the_protocols_cannot_be_created(self, change):
        """A9: by construction: another default, or a parameter that is not there."""
        members = {name: _stub(signature) for name, signature in MEMBERS.items()}
        type("Right", (ForwardingBackend,), dict(members))
        wrong = [
            parameter.replace(default=change.get(parameter.name, parameter.default))
            for parameter in MEMBERS["forward_extend"].parameters.values()
            if change.get(parameter.name) != "dropped"
        ]
        members["forward_extend"] = _stub(MEMBERS["forward_extend"].replace(parameters=wrong))
        with pytest.raises(TypeError, match=r"Wrong has forward_extend\(.*but the protocol has forward_extend\("):
            type("Wrong", (ForwardingBackend,), members)

    @pytest.mark.parametrize("member", ["init_forward_metadata", "init_forward_metadata_out_graph"])
    @pytest.mark.parametrize("wrapper", concrete_wrappers())
    def test_a_childs_plan_that_is_none_of_its_own_is_the_childs_fault(self, wrapper, member):
        """B5: the child is named, and not whoever asked the wrapper."""
        child = Recorder("careless")
        setattr(child, member, lambda forward_batch, in_capture=False: {"planned": True})
        built = BUILD[wrapper](child, Recorder("b"))
        with pytest.raises(PlanError, match=f"{member} of backend careless returned .*, not a Plan"):
            getattr(built, member)(batch_in(ForwardMode.EXTEND))

    @pytest.mark.parametrize("member", ["init_forward_metadata", "init_forward_metadata_out_graph"])
    @pytest.mark.parametrize("wrapper", concrete_wrappers())
    def test_its_plan_counts_the_rows_that_a_child_planned(self, wrapper, member):
        """B5: of a padded batch fewer than it has."""
        child = Recorder("a")
        plan = Plan(child.backend_id, ForwardMode.EXTEND, 1, 5)
        setattr(child, member, lambda forward_batch, in_capture=False: plan)
        made = getattr(BUILD[wrapper](child, Recorder("b")), member)(batch_in(ForwardMode.EXTEND))
        assert (made.query_rows, made.kv_rows) == (1, 5)


KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


def _stub(signature: inspect.Signature) -> Any:
    """A method with this signature."""

    def method(self, *args, **kwargs):
        return None

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
    return method


class TestForwardingBase:
    @pytest.mark.parametrize("wrapper", concrete_wrappers())
    @pytest.mark.parametrize("member", [*protocol_methods(), *optional_hooks()])
    def test_every_wrapper_defines_every_member(self, wrapper, member):
        """A9: a test enumerates the protocol and fails if a wrapper leaves one at its default."""
        own = getattr(wrapper, member)
        assert own is not getattr(AttentionBackend, member, None)
        assert own is not getattr(ForwardingBackend, member, None)

    def test_protocol_is_enumerated_from_itself(self):
        """A9: members of the protocol are enumerated, not listed by hand."""
        assert set(protocol_methods()) >= {"init_forward_metadata", "forward_extend", "forward_decode"}
        assert set(protocol_attributes()) >= {"backend_id", "claims"}
        assert optional_hooks()["init_mha_chunk_metadata"] == ("forward_batch", "disable_flashinfer_ragged")

    @pytest.mark.parametrize("left_out", [*protocol_methods(), *optional_hooks()])
    def test_wrapper_that_leaves_a_member_out_cannot_be_created(self, left_out):
        """A9: fails at class creation."""
        members = {name: _stub(signature) for name, signature in MEMBERS.items() if name != left_out}
        with pytest.raises(TypeError, match=f"Forgetful does not forward {left_out};"):
            type("Forgetful", (ForwardingBackend,), members)

    def test_inheriting_the_protocols_empty_bodies_does_not_count(self):
        """A9"""
        members = {name: _stub(MEMBERS[name]) for name in optional_hooks()}
        with pytest.raises(TypeError, match="does not forward init_forward_metadata, forward_extend, forward_decode;"):
            type("Hollow", (ForwardingBackend, AttentionBackend), members)

    def test_wrapper_is_a_backend(self):
        """A9"""
        assert isinstance(SplitBackend(Spy("a"), Spy("b")), AttentionBackend)


class TestClaims:
    def test_wrapper_takes_the_weaker_claim_and_says_who_forced_it(self):
        """A9: graph level the minimum, page sizes the intersection, CPU lengths either."""
        strong = Claims(GraphLevel.ALWAYS, PageSizes.of(16, 32, 64), needs_cpu_seq_lens=False)
        weak = Claims(GraphLevel.DECODE, PageSizes.of(32, 64), needs_cpu_seq_lens=True)
        split = SplitBackend(Spy("a", strong), Spy("b", weak))
        assert split.claims == Claims(GraphLevel.DECODE, PageSizes.of(32, 64), needs_cpu_seq_lens=True)
        assert dict(split.forced_by) == {
            "cuda_graph": ("decode",),
            "page_sizes": ("decode",),
            "needs_cpu_seq_lens": ("decode",),
        }

    def test_a_claim_that_one_child_decides_is_forced_by_nobody(self):
        """A9: how an extend runs is the prefill backend's affair; a decode backend that cannot weakens nothing."""
        every = Claims(mla_extend=frozenset(ExtendPath))
        split = SplitBackend(Spy("a", every), Spy("b", Claims(mla_extend=frozenset())))
        assert split.claims.mla_extend == frozenset(ExtendPath)
        assert not split.forced_by

    def test_children_that_agree_force_nothing(self):
        """A9"""
        assert not SplitBackend(Spy("a"), Spy("b")).forced_by

    def test_each_child_may_force_another_claim(self):
        """A9"""
        combined = weakest(
            {
                "prefill": Claims(GraphLevel.NEVER, PageSizes.of(64), needs_cpu_seq_lens=False),
                "decode": Claims(GraphLevel.UNIFORM, PageSizes(), needs_cpu_seq_lens=True),
            }
        )
        assert combined.claims == Claims(GraphLevel.NEVER, PageSizes.of(64), needs_cpu_seq_lens=True)
        assert combined.forced_by["cuda_graph"] == ("prefill",)
        assert combined.forced_by["needs_cpu_seq_lens"] == ("decode",)

    def test_two_children_with_the_same_weak_claim_are_both_named(self):
        """A9"""
        combined = weakest({"a": Claims(), "b": Claims(), "c": Claims(GraphLevel.ALWAYS)})
        assert combined.forced_by["cuda_graph"] == ("a", "b")

    def test_page_sizes_of_both_count_when_they_only_meet_in_a_multiple(self):
        """A9: 128 is two pages of 64 and four of 32."""
        common = PageSizes.of(32, 64).intersection(PageSizes.of(128))
        assert common.kernel_size(128) == 128
        assert common.kernel_size(64) is None

    def test_wrappers_nest(self):
        """A9"""
        inner = SplitBackend(Spy("a", Claims(GraphLevel.DECODE)), Spy("b", Claims(GraphLevel.ALWAYS)))
        assert SplitBackend(inner, Spy("c", Claims(GraphLevel.ALWAYS))).claims.cuda_graph is GraphLevel.DECODE


class TestSplit:
    def setup_method(self):
        self.prefill, self.decode = Spy("p"), Spy("d")
        self.split = SplitBackend(self.prefill, self.decode)

    @pytest.mark.parametrize("mode", ForwardMode)
    def test_mode_decides_who_plans(self, mode):
        plan = self.split.init_forward_metadata(batch_in(mode))
        decoding = mode in (ForwardMode.DECODE, ForwardMode.IDLE)
        assert plan.planner is self.split.backend_id
        assert [part.planner for part in plan.parts] == [(self.decode if decoding else self.prefill).backend_id]

    def test_verify_goes_where_it_is_told(self):
        split = SplitBackend(self.prefill, self.decode, verify=Role.DECODE)
        plan = split.init_forward_metadata(batch_in(ForwardMode.TARGET_VERIFY))
        assert [part.planner for part in plan.parts] == [self.decode.backend_id]

    def test_mode_decides_who_runs(self):
        """A9: and who keeps the states of linear layers, should it have some."""
        for mode, child in ((ForwardMode.DECODE, "decode"), (ForwardMode.EXTEND, "prefill")):
            children = {"prefill": Recorder("p"), "decode": Recorder("d")}
            split = SplitBackend(*children.values())
            batch = batch_in(mode)
            forward = split.forward_decode if mode.is_decode else split.forward_extend
            forward("q", "k", "v", LAYER, batch)
            split.forward_linear("inputs", LINEAR, batch)
            split.commit_states(batch, "accepted")
            assert len(children.pop(child).calls) == 3
            (other,) = children.values()
            assert other.calls == []

    def test_plan_of_the_other_child_is_refused(self):
        """B5: a batch whose mode changed after planning is not run by another's plan."""
        batch = batch_in(ForwardMode.EXTEND)
        batch.plan = self.split.init_forward_metadata(batch)
        batch.forward_mode = ForwardMode.DECODE
        with pytest.raises(PlanError, match=r"d was given a plan made by p"):
            self.split.forward_decode(torch.zeros(2, 1, 8), None, None, LAYER, batch)

    def test_chunk_hook_reaches_the_prefill_child_with_the_flag(self):
        """A8"""
        batch = batch_in(ForwardMode.EXTEND)
        assert self.split.init_mha_chunk_metadata(batch, True).metadata is True
        assert self.prefill.calls == [("init_mha_chunk_metadata", (batch, True), {})]

    def test_one_parameter_chunk_hook_is_called_without_the_flag(self):
        """A8: TRT-LLM's hook has one parameter; the original passed two and raised TypeError."""

        class OneParameter(Hookless):
            def init_mha_chunk_metadata(self, forward_batch):
                return forward_batch

        batch = batch_in(ForwardMode.EXTEND)
        assert SplitBackend(OneParameter(), self.decode).init_mha_chunk_metadata(batch, True) is batch

    def test_absent_chunk_hook_plans_nothing(self):
        """A8: absent means there is nothing to plan."""
        assert SplitBackend(Hookless(), self.decode).init_mha_chunk_metadata(batch_in(ForwardMode.EXTEND)) is None

    def test_hook_that_needs_what_nobody_offers_is_refused_when_the_wrapper_is_built(self):
        """A8"""

        class Demanding(Hookless):
            def init_mha_chunk_metadata(self, forward_batch, chunk_stream):
                raise AssertionError

        with pytest.raises(HookError, match=r"Demanding.*init_mha_chunk_metadata.*'chunk_stream'"):
            SplitBackend(Demanding(), self.decode)

    def test_hooks_stay_visible_through_nested_wrappers(self):
        """A8, A9: a split inside a split."""
        outer = SplitBackend(self.split, Spy("other"))
        assert outer.init_mha_chunk_metadata(batch_in(ForwardMode.EXTEND), True).planner is self.prefill.backend_id

    def test_graph_hooks_reach_the_child_that_runs_the_mode(self):
        """A9"""
        self.split.init_cuda_graph_state(8, 16)
        assert self.prefill.calls == self.decode.calls == [("init_cuda_graph_state", (8, 16), {})]
        batch = batch_in(ForwardMode.DECODE)
        self.split.init_forward_metadata_out_graph(batch, in_capture=True)
        self.split.init_forward_metadata_in_graph(batch)
        assert self.decode.calls[1:] == [
            ("init_forward_metadata_out_graph", (batch, True), {}),
            ("init_forward_metadata_in_graph", (batch,), {}),
        ]
        assert len(self.prefill.calls) == 1

    @pytest.mark.parametrize("fills", [(0, 3), (3, 0)])
    def test_the_larger_fill_value_is_taken(self, fills):
        """A9: one batch is padded once, and both children must be able to plan it."""
        prefill, decode = (Recorder("child", fill=fill) for fill in fills)
        assert SplitBackend(prefill, decode).get_cuda_graph_seq_len_fill_value() == 3

    def test_graph_hook_that_a_child_lacks_is_an_error_that_names_it(self):
        split = SplitBackend(self.prefill, Hookless())
        with pytest.raises(BackendError, match=r"init_cuda_graph_state of its decode backend hookless"):
            split.init_cuda_graph_state(8, 16)
