"""Selection of one backend per role, or an error with every reason: results, and contents of the error."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from attnplug import (
    DType,
    ExtendPath,
    GraphLevel,
    ModelSpec,
    PageSizes,
    Problem,
    Refusal,
    RefusalCode,
    Role,
    UsageError,
)
from attnplug.declare.errors import PluginError
from attnplug.host import BackendRequest, SelectionError, explain, select
from attnplug.registry.registry import Broken, Source
from attnplug.registry.selection import explanation
from attnplug_testing.errors import raises_naming
from support.selection import CPU_FLOAT32, DEEPSEEK, HYBRID, LINEAR, LINEAR_ONLY, LLAMA, PLAIN, backend, names, registry


def refusals(error: SelectionError) -> list[Refusal]:
    """Every refusal of every candidate for the roles that are not served."""
    candidates = [candidate for choice in error.selection.unserved for candidate in choice.candidates]
    return [refusal for candidate in candidates for refusal in candidate.refusals]


# ---- explicit requests ----


def test_the_backend_asked_for_is_taken_over_a_better_one() -> None:
    """D3"""
    installed = registry(backend("slow"), backend("fast", preference=100))
    selection = select(installed, BackendRequest("slow"), Problem(LLAMA))
    assert names(selection.choices) == {"prefill": "slow", "decode": "slow"}
    assert selection.choices[Role.PREFILL].candidates[0].backend.spec.name == "slow"
    assert "attention_backend" in selection.choices[Role.PREFILL].why()


def test_the_backend_asked_for_is_never_replaced() -> None:
    """D3: a usable one does not step in."""
    installed = registry(backend("fast"), backend("mla", replace(PLAIN, kinds={"mla"})))
    with pytest.raises(SelectionError) as caught:
        select(installed, BackendRequest("mla"), Problem(LLAMA))
    assert names(caught.value.selection.choices) == {"prefill": None, "decode": None}


def test_a_wrong_name_is_an_error_before_a_model_is_known() -> None:
    """D3: a host checks names when its plugins are registered. Nothing that depends on the model is refused then."""
    installed = registry(backend("fast"))
    for request in (BackendRequest("fats"), BackendRequest(roles={Role.DECODE: "fats"})):
        with raises_naming(UsageError, "'fats'"):
            select(installed, request, Problem())
    assert not select(installed, BackendRequest("fast", {Role.DECODE: "fast"}), Problem()).choices


def test_roles_can_differ() -> None:
    """D3"""
    installed = registry(*(backend(name) for name in "abc"), backend("lin", LINEAR))
    request = BackendRequest("a", {Role.DECODE: "b"})
    assert names(select(installed, request, Problem(HYBRID)).choices) == {
        "prefill": "a",
        "decode": "b",
        "linear": "lin",
    }


def test_all_four_roles_can_differ() -> None:
    """D3"""
    drafting = replace(PLAIN, roles={"prefill", "decode", "draft"}, max_speculative_tokens=8)
    installed = registry(
        *(backend(name, drafting) for name in "abc"), backend("lin", replace(LINEAR, max_speculative_tokens=8))
    )
    request = BackendRequest(roles=dict(zip(Role, ("a", "b", "lin", "c"), strict=True)))
    assert names(select(installed, request, Problem(HYBRID, speculative_tokens=4)).choices) == {
        "prefill": "a",
        "decode": "b",
        "linear": "lin",
        "draft": "c",
    }


def test_a_role_may_be_auto_where_another_is_asked_for() -> None:
    """D3"""
    installed = registry(backend("a"), backend("b", preference=1))
    request = BackendRequest("a", {Role.DECODE: "auto"})
    assert names(select(installed, request, Problem(LLAMA)).choices) == {"prefill": "a", "decode": "b"}


def test_a_request_for_full_attention_says_nothing_of_linear_layers() -> None:
    """D3"""
    installed = registry(backend("a"), backend("lin", LINEAR))
    assert names(select(installed, BackendRequest("a"), Problem(HYBRID)).choices)["linear"] == "lin"


def test_prefill_and_decode_fall_to_backends_that_claim_them() -> None:
    """D3"""
    installed = registry(
        backend("only_prefill", replace(PLAIN, roles={"prefill"}), preference=9),
        backend("only_decode", replace(PLAIN, roles={"decode"}), preference=9),
        backend("both"),
    )
    assert names(select(installed, BackendRequest(), Problem(LLAMA)).choices) == {
        "prefill": "only_prefill",
        "decode": "only_decode",
    }


def test_an_embedding_needs_no_backend_to_decode() -> None:
    """D3: one that only prefills serves it alone; one for the role decode would never run."""
    installed = registry(backend("filler", replace(PLAIN, roles={"prefill"})), backend("lin", LINEAR), backend("other"))
    problem = Problem(HYBRID, is_embedding=True)
    selection = select(installed, BackendRequest("filler"), problem)
    assert names(selection.choices) == {"prefill": "filler", "linear": "lin"}
    assert any("no decode" in line for line in explanation(selection))
    with pytest.raises(UsageError) as caught:
        select(installed, BackendRequest(roles={Role.DECODE: "other"}), problem)
    assert caught.value.settings == ("decode_attention_backend",)


def test_a_host_that_drafts_itself_needs_backends_that_verify() -> None:
    verifies = registry(backend("decodes", replace(PLAIN, roles={"prefill", "decode"}, max_speculative_tokens=4)))
    problem = Problem(LLAMA, speculative_tokens=4, drafts_by_host=True)
    assert set(select(verifies, BackendRequest("decodes"), problem).choices) == {Role.PREFILL, Role.DECODE}
    with pytest.raises(SelectionError) as caught:
        select(verifies, BackendRequest("decodes"), replace(problem, speculative_tokens=5))
    assert {refusal.code for refusal in refusals(caught.value)} == {RefusalCode.SPECULATION}


def test_a_draft_is_checked_in_its_role_and_by_the_requirements_of_all_roles() -> None:
    """D3"""
    drafts = replace(PLAIN, roles={"prefill", "decode", "draft"}, max_speculative_tokens=4)
    installed = registry(backend("drafts", drafts), backend("decodes", replace(drafts, roles={"prefill", "decode"})))
    problem = Problem(LLAMA, speculative_tokens=4, is_draft=True)
    assert names(select(installed, BackendRequest("drafts"), problem).choices) == {"draft": "drafts"}
    assert names(select(installed, BackendRequest(), problem).choices) == {"draft": "drafts"}
    asked = BackendRequest("decodes", {Role.DRAFT: "drafts"})
    assert names(select(installed, asked, problem).choices) == {"draft": "drafts"}
    with pytest.raises(SelectionError) as caught:
        select(installed, BackendRequest("decodes"), problem)
    assert {refusal.code for refusal in refusals(caught.value)} == {RefusalCode.ROLE}


class TestMLAByTheHost:
    """The host prefills MLA itself, as MHA (C1), unless a backend is requested for that role."""

    PROBLEM = Problem(DEEPSEEK, mla_by_host=True)
    ABSORBED = replace(PLAIN, kinds={"mla"}, mla_extend={"absorbed"})
    AS_MHA = replace(PLAIN, kinds={"mla"}, mla_extend={"one_shot", "chunked"})

    def test_no_backend_is_needed_to_prefill(self) -> None:
        installed = registry(backend("decodes", replace(self.ABSORBED, roles={"decode"})))
        assert names(select(installed, BackendRequest("decodes"), self.PROBLEM).choices) == {"decode": "decodes"}

    def test_a_backend_that_is_named_for_it_prefills(self) -> None:
        installed = registry(backend("decodes", self.ABSORBED), backend("mha", self.AS_MHA))
        request = BackendRequest("decodes", {Role.PREFILL: "mha"})
        assert names(select(installed, request, self.PROBLEM).choices) == {"prefill": "mha", "decode": "decodes"}

    def test_one_that_cannot_run_it_as_mha_is_refused(self) -> None:
        installed = registry(backend("decodes", self.ABSORBED))
        with pytest.raises(SelectionError) as caught:
            select(installed, BackendRequest(roles={Role.PREFILL: "decodes"}), self.PROBLEM)
        assert [refusal.code for refusal in refusals(caught.value)] == [RefusalCode.FEATURE]

    def test_layers_that_are_not_mla_are_prefilled_by_a_backend(self) -> None:
        both = replace(DEEPSEEK, layers=(*DEEPSEEK.layers, replace(LLAMA.layers[0], layer_id=len(DEEPSEEK.layers))))
        able = replace(self.AS_MHA, kinds={"mha", "mla"})
        for model in (LLAMA, both):
            selection = select(registry(backend("any", able)), BackendRequest(), Problem(model, mla_by_host=True))
            assert names(selection.choices) == {"prefill": "any", "decode": "any"}

    def test_a_model_without_softmax_layers_has_no_prefill_to_name(self) -> None:
        problem = Problem(LINEAR_ONLY, mla_by_host=True)
        with pytest.raises(UsageError) as caught:
            select(registry(backend("any")), BackendRequest(roles={Role.PREFILL: "any"}), problem)
        assert caught.value.settings == ("prefill_attention_backend",)


class TestAnExtendPathThatIsAskedFor:
    """C1, D3: backends that cannot prefill MLA by the requested path are refused, and auto takes another one."""

    PROBLEM = Problem(DEEPSEEK, mla_extend=ExtendPath.CHUNKED)
    ABSORBED = backend("absorbed", replace(PLAIN, kinds={"mla"}, mla_extend={"absorbed"}), preference=9)
    CHUNKED = backend("chunked", replace(PLAIN, kinds={"mla"}, mla_extend={"chunked"}))

    def test_auto_takes_one_that_can(self) -> None:
        selection = select(registry(self.ABSORBED, self.CHUNKED), BackendRequest(), self.PROBLEM)
        assert names(selection.choices)["prefill"] == "chunked"

    def test_one_that_cannot_is_refused_with_the_setting(self) -> None:
        with pytest.raises(SelectionError) as caught:
            select(registry(self.ABSORBED), BackendRequest("absorbed"), self.PROBLEM)
        assert [refusal.setting for refusal in refusals(caught.value)] == ["mla_extend"]

    def test_it_is_nothing_to_a_backend_that_decodes(self) -> None:
        request = BackendRequest("chunked", {Role.DECODE: "absorbed"})
        selection = select(registry(self.ABSORBED, self.CHUNKED), request, self.PROBLEM)
        assert names(selection.choices) == {"prefill": "chunked", "decode": "absorbed"}

    def test_a_model_without_mla_has_none(self) -> None:
        with pytest.raises(UsageError) as caught:
            Problem(LLAMA, mla_extend=ExtendPath.ABSORBED)
        assert caught.value.settings == ("mla_extend",)


def test_an_unknown_name_is_an_error_with_the_nearest() -> None:
    with raises_naming(UsageError, "'fats'", "fast"):
        explain(registry(backend("fast")), BackendRequest("fats"), Problem(LLAMA))


def test_a_broken_name_is_an_error_with_what_is_wrong() -> None:
    broken = Broken("odd", Source("odd", "nowhere", "odd-dist", "3.0"), "ImportError: no kernel")
    installed = replace(registry(backend("fast")), broken=(broken,))
    with raises_naming(PluginError, "odd-dist 3.0", "no kernel"):
        explain(installed, BackendRequest("odd"), Problem(LLAMA))


@pytest.mark.parametrize(
    ("model", "role"),
    [
        (LLAMA, Role.LINEAR),
        (LLAMA, Role.DRAFT),
        (LINEAR_ONLY, Role.PREFILL),
        (LINEAR_ONLY, Role.DECODE),
    ],
)
def test_a_backend_for_a_role_that_is_not_needed_is_an_error(model: ModelSpec, role: Role) -> None:
    """Nothing is dropped silently."""
    installed = registry(backend("fast"), backend("lin", LINEAR))
    with raises_naming(UsageError, "fast") as caught:
        explain(installed, BackendRequest(roles={role: "fast"}), Problem(model))
    assert caught.value.settings == (role.setting, *(["speculative_tokens"] if role is Role.DRAFT else []))


def test_auto_for_a_role_that_is_not_needed_asks_for_nothing() -> None:
    selection = explain(registry(backend("fast")), BackendRequest(roles={Role.LINEAR: "auto"}), Problem(LLAMA))
    assert names(selection.choices) == {"prefill": "fast", "decode": "fast"}


def test_an_unknown_name_for_a_role_that_is_not_needed_is_an_error_of_the_name() -> None:
    with raises_naming(UsageError, "'fats'"):
        explain(registry(backend("fast")), BackendRequest(roles={Role.LINEAR: "fats"}), Problem(LLAMA))


def test_why_names_the_option_that_was_given() -> None:
    """The user needs to know which of two options decided."""
    installed = registry(backend("a"), backend("b"))
    choices = select(installed, BackendRequest("a", {Role.DECODE: "b"}), Problem(LLAMA)).choices
    assert "prefill_attention_backend" not in choices[Role.PREFILL].why()
    assert "decode_attention_backend" in choices[Role.DECODE].why()


# ---- refusing ----


def test_the_error_holds_the_inputs_and_every_candidate_with_every_reason() -> None:
    """D3"""
    installed = registry(
        backend("mla_only", replace(PLAIN, kinds={"mla"}, min_sm=100)),
        backend("old", CPU_FLOAT32, requires=["no-such-distribution>=2"]),
    )
    problem = Problem(
        LLAMA,
        "cuda",
        90,
        DType.BFLOAT16,
        DType.BFLOAT16,
        16,
        GraphLevel.UNIFORM,
        speculative_tokens=3,
        tensor_parallel=2,
    )
    with pytest.raises(SelectionError) as caught:
        select(installed, BackendRequest(), problem)
    text = str(caught.value)
    for given in ("llama", "8/2", "cuda", "SM 90", "bfloat16", "16", "UNIFORM", "3 speculative", "2 tensor-parallel"):
        assert given in text
    for candidate in ("mla_only (mla_only-dist 1.2)", "old (old-dist 1.2)"):
        assert candidate in text
    for role, choice in caught.value.selection.choices.items():
        assert role in text
        assert all(candidate.refusals for candidate in choice.candidates)
        for candidate in choice.candidates:
            for refusal in candidate.refusals:
                assert refusal.message in text
                assert refusal.setting is None or refusal.setting in text
    codes = {r.code for c in caught.value.selection.choices[Role.PREFILL].candidates for r in c.refusals}
    assert codes == {"kind", "sm", "device", "dtype", "kv_dtype", "requirement", "cuda_graph", "speculation"}


def test_the_error_shows_the_nearest_candidates_first() -> None:
    """D3: reasons that no setting helps against do not bury those that a user can act on."""
    pages = replace(PLAIN, page_sizes=PageSizes.of(32))
    installed = registry(
        *(backend(f"gpu_{index}", replace(PLAIN, devices={"cuda"})) for index in range(6)),
        backend("new", replace(PLAIN, min_sm=100, devices={"cuda"})),
        backend("mla_only", replace(PLAIN, kinds={"mla"})),
        backend("two_reasons", replace(pages, dtypes={DType.FLOAT16})),
        *(backend(f"one_reason_{index}", pages) for index in range(2)),
    )
    with pytest.raises(SelectionError) as caught:
        select(installed, BackendRequest(), Problem(LLAMA, "cpu", dtype=DType.BFLOAT16, page_size=48))
    lines = str(caught.value).splitlines()
    shown = [line.split()[0] for line in lines if line.endswith("refused")]
    assert lines[0] == "prefill and decode: no installed backend can serve"
    assert shown == ["one_reason_0", "one_reason_1", "two_reasons"]
    others = [line for line in lines if "-dist 1.2): " in line and not line.endswith("refused")]
    assert len(others) == 8 and len(lines) < 24
    assert all(str(refusal) in "\n".join(lines) for refusal in refusals(caught.value))


def test_where_nothing_is_near_the_error_shows_one_candidate_in_full() -> None:
    """D3"""
    installed = registry(*(backend(name, replace(PLAIN, min_sm=100)) for name in "ab"), backend("linear", LINEAR))
    with pytest.raises(SelectionError) as caught:
        select(installed, BackendRequest(), Problem(LLAMA, "cuda", 90))
    lines = [line for line in str(caught.value).splitlines() if "): " in line]
    assert lines[0] == "  a (a-dist 1.2): refused" and [line.split()[0] for line in lines[:3]] == ["a", "b", "linear"]


def test_refusals_by_the_hardware_come_first() -> None:
    """D3: users should not install a library for a missing GPU."""
    spec = replace(CPU_FLOAT32, devices={"cuda"}, dtypes={DType.FLOAT16})
    with pytest.raises(SelectionError) as caught:
        select(
            registry(backend("gpu", spec, requires=["no-such-distribution"])),
            BackendRequest("gpu"),
            Problem(LLAMA, "cpu", dtype=DType.FLOAT32),
        )
    first = str(caught.value).splitlines()[1]
    assert first == "  - device cpu is not supported, only cuda (change device)"


def test_the_error_holds_only_roles_that_are_not_served() -> None:
    """D3"""
    with pytest.raises(SelectionError) as caught:
        select(registry(backend("a")), BackendRequest(), Problem(HYBRID))
    assert [choice.role for choice in caught.value.selection.unserved] == [Role.LINEAR]
    assert "linear:" in str(caught.value)
    assert "prefill:" not in str(caught.value)


def test_an_explicit_request_that_is_refused_begins_with_its_own_reasons_and_names_what_could_serve() -> None:
    """D3: reasons against other backends would hide those against the requested one."""
    decodes = backend("b", replace(CPU_FLOAT32, kinds={"mla"}, roles={"decode"}))
    installed = registry(backend("a"), decodes, backend("c"), backend("d", CPU_FLOAT32))
    with pytest.raises(SelectionError) as caught:
        select(installed, BackendRequest("b"), Problem(LLAMA, device="cuda", sm=90))
    assert str(caught.value).splitlines()[:6] == [
        "b (b-dist 1.2) was requested by attention_backend and cannot serve prefill and decode:",
        "  - device cuda is not supported, only cpu (change device)",
        "  - for prefill: role prefill is not supported, only decode (change attention_backend)",
        "  - attention kind mha is not supported, only mla (change attention_backend)",
        "usable instead: a, c; 'attnplug explain' gives every reason against every other backend",
        "",
    ]
    assert "SM 90" in str(caught.value)
    assert "d-dist" not in str(caught.value)


def test_one_that_serves_another_role_is_kept_beside_another_backend() -> None:
    """D3: not replaced."""
    decodes = backend("b", replace(PLAIN, roles={"decode"}))
    with pytest.raises(SelectionError) as caught:
        select(registry(backend("a"), decodes), BackendRequest("b"), Problem(LLAMA))
    assert str(caught.value).splitlines()[:3] == [
        "b (b-dist 1.2) was requested by attention_backend and cannot serve prefill:",
        "  - role prefill is not supported, only decode (change attention_backend)",
        "usable by prefill_attention_backend beside b: a; 'attnplug explain' gives every reason against every other "
        "backend",
    ]


def test_unserved_roles_are_explained_by_the_backend_requested_for_each() -> None:
    """D3"""
    mla = replace(PLAIN, kinds={"mla"})
    with pytest.raises(SelectionError) as caught:
        select(registry(backend("a", mla), backend("b", mla)), BackendRequest("a", {Role.DECODE: "b"}), Problem(LLAMA))
    for text in ("by attention_backend and cannot serve prefill:", "by decode_attention_backend and cannot serve"):
        assert text in str(caught.value)
    assert str(caught.value).count("usable instead: none") == 2


def test_with_nothing_installed_the_error_says_so() -> None:
    with pytest.raises(SelectionError, match="no backend is installed"):
        select(registry(), BackendRequest(), Problem(LLAMA))


def test_explaining_is_no_error_where_selecting_is() -> None:
    """D3: a refusal is an answer."""
    selection = explain(registry(), BackendRequest(), Problem(LLAMA))
    assert [choice.role for choice in selection.unserved] == [Role.PREFILL, Role.DECODE]
    assert selection.choices[Role.PREFILL].why() == "nothing can serve"


def test_a_check_that_raises_costs_its_own_backend_only() -> None:
    """D2"""

    def check(problem: Problem, role: Role | None, options: object) -> list[Refusal]:
        raise RuntimeError("no driver")

    installed = registry(backend("bad", check=check, preference=100), backend("good"))
    selection = select(installed, BackendRequest(), Problem(LLAMA))
    assert names(selection.choices)["prefill"] == "good"
    (refusal,) = selection.choices[Role.PREFILL].candidates[0].refusals
    assert refusal.code == RefusalCode.CHECK_FAILED


def test_a_factory_that_is_not_there_costs_its_own_backend_only() -> None:
    """D2: however high its preference."""
    installed = registry(backend("bad", factory="no_such_module:build", preference=100), backend("good"))
    selection = select(installed, BackendRequest(), Problem(LLAMA))
    assert names(selection.choices)["prefill"] == "good"
    (refusal,) = selection.choices[Role.PREFILL].candidates[0].refusals
    assert refusal.code == RefusalCode.FACTORY
    assert "no_such_module:build" in refusal.message


def test_in_strict_mode_every_check_that_raises_is_an_error() -> None:
    """D2: a check that fails for this model alone is found here, not when plugins are loaded."""

    def check(problem: Problem, role: Role | None, options: object) -> list[Refusal]:
        raise RuntimeError("no driver")

    bad = [backend(name, check=check) for name in ("bad", "worse")]
    installed = replace(registry(*bad, backend("good")), strict=True)
    with raises_naming(PluginError, "ATTNPLUG_STRICT") as caught:
        explain(installed, BackendRequest(), Problem(LLAMA))
    for name in ("bad", "worse"):
        assert str(caught.value).count(f"{name} ({name}-dist 1.2): its check failed: RuntimeError") == 1


def test_hardware_that_is_not_here_can_be_explained() -> None:
    """D3: nothing is built and nothing is looked for."""
    blackwell = backend("blackwell", replace(PLAIN, devices={"cuda"}, min_sm=100), preference=100)
    assert names(explain(registry(blackwell), BackendRequest(), Problem(LLAMA, "cuda", 100)).choices) == {
        "prefill": "blackwell",
        "decode": "blackwell",
    }


def test_every_reason_of_an_explanation_survives_json() -> None:
    """D3"""
    installed = registry(backend("a", replace(PLAIN, head_dims={(128, 128)})), backend("lin", LINEAR))
    selection = explain(installed, BackendRequest(), Problem(HYBRID, "cuda", 90, page_size=5, tensor_parallel=3))
    reasons = [r.as_json() for choice in selection.choices.values() for c in choice.candidates for r in c.refusals]
    assert reasons
    for reason in json.loads(json.dumps(reasons)):
        assert set(reason) == {"code", "message", "value", "allowed", "setting", "advice"}


def test_the_explanation_shows_what_is_chosen_and_why() -> None:
    text = "\n".join(explanation(explain(registry(backend("a")), BackendRequest(), Problem(LLAMA, "cpu"))))
    assert "prefill: a (auto" in text
    assert "64 (chosen)" in text


def test_a_model_without_layers_needs_nothing() -> None:
    assert select(registry(), BackendRequest(), Problem(ModelSpec("empty", "x", (), 1))).choices == {}


def test_beside_one_that_serves_those_made_for_something_else_are_only_named() -> None:
    """D3: with a dozen plugins installed, reasons that matter would drown."""
    installed = registry(backend("a"), backend("old", replace(PLAIN, min_sm=100)), backend("linear", LINEAR))
    text = "\n".join(explanation(explain(installed, BackendRequest(), Problem(LLAMA, "cuda", 90))))
    assert "requires SM 100" in text
    assert "for another role or kind of attention: linear" in text
    assert "role prefill is not supported" not in text


def test_a_host_spells_settings_in_a_refusal_and_in_an_explanation() -> None:
    """D3: the contract knows no command line."""
    spelled = {"attention_backend": "backend=", "device": "target", "page_size": "block_size"}
    installed, problem = registry(backend("a", CPU_FLOAT32), backend("b")), Problem(LLAMA, "cuda")
    with pytest.raises(SelectionError) as caught:
        select(installed, BackendRequest("a"), problem)
    text = caught.value.format(spelled.get)
    assert "a (a-dist 1.2) was requested by backend= and cannot serve" in text
    assert "only cpu (change target)" in text and "(change device)" in str(caught.value)
    shown = "\n".join(explanation(explain(installed, BackendRequest("b"), problem), spelled.get))
    assert "prefill: b (requested by backend=)" in shown
