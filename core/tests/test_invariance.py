"""Levels of invariance: declared, requested, refused, and combined by wrappers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnplug import Capabilities, Claims, ExtendPath, Problem, RefusalCode, Role, UsageError
from attnplug.auto.fastest import FastestBackend
from attnplug.declare.errors import PluginError
from attnplug.declare.problem import INVARIANCE
from attnplug.host import BackendRequest, SelectionError, select
from attnplug.wrappers.forwarding import HybridLinearBackend, SplitBackend
from attnplug_testing.errors import raises_naming
from support.board import INSTALLED, PROBLEM, chosen, crossing, decode
from support.recorder import Recorder
from support.selection import DEEPSEEK, HYBRID, LLAMA, PLAIN, backend, names, registry

pytestmark = pytest.mark.usefixtures("board")

LEVELS = frozenset(INVARIANCE)
ALL = replace(PLAIN, invariant=LEVELS)


def test_unknown_levels_are_refused_in_one_line() -> None:
    """E3, D2: in a spec and in a request."""
    with raises_naming(PluginError, "'btach'", "batch") as caught:
        Capabilities(kinds={"mha"}, devices={"cpu"}, dtypes={"float32"}, invariant={"run", "btach"})
    assert "\n" not in str(caught.value)
    with raises_naming(PluginError, "'batch'"):
        Claims(invariant="batch")  # type: ignore[arg-type]
    with raises_naming(UsageError, "'btach'", "batch"):
        Problem(invariant=frozenset({"btach"}))


def test_no_level_holds_without_run() -> None:
    assert any("run" in each for each in replace(PLAIN, invariant=frozenset({"batch"})).contradictions())
    assert not list(ALL.contradictions())


def test_a_backend_without_a_requested_level_is_refused_for_it() -> None:
    """E3"""
    spec = backend("some", replace(PLAIN, invariant={"run", "batch"})).spec
    assert not spec.refusals(Problem(LLAMA, invariant=frozenset({"batch"})), Role.DECODE)
    (refusal,) = spec.refusals(Problem(LLAMA, invariant=LEVELS), Role.DECODE)
    assert refusal.code == RefusalCode.INVARIANCE
    assert refusal.value == list(INVARIANCE) and refusal.allowed == ["run", "batch"]
    assert refusal.setting == "batch_invariant" and "graph, chunks, verify" in refusal.message


def test_auto_uses_one_backend_per_role_for_all_batches() -> None:
    """E3: no dispatch by batch, measured or not."""
    able = {name: replace(each, spec=replace(each.spec, capabilities=ALL)) for name, each in INSTALLED.backends.items()}
    installed = replace(INSTALLED, backends=able)
    assert len(decode(chosen(*crossing(), installed=installed, per_batch=True))) == 2
    problem = replace(PROBLEM, invariant=frozenset({"run"}))
    assert decode(chosen(*crossing(), installed=installed, problem=problem, per_batch=True)) == ["late"]


def test_auto_takes_one_backend_for_prefill_and_decode_if_rows_must_be_equal() -> None:
    """E3: kernels of two backends give a row other bits."""
    decodes = backend("decodes", replace(ALL, roles={"decode"}), preference=100)
    installed = registry(decodes, backend("both", ALL))
    found = {level: select(installed, BackendRequest(), Problem(LLAMA, invariant={level})) for level in INVARIANCE}
    assert {level: each.chosen(Role.DECODE).spec.name for level, each in found.items()} == {
        **dict.fromkeys(INVARIANCE, "decodes"),
        "chunks": "both",
    }
    refused = found["chunks"].choices[Role.DECODE].candidates[0].refusals
    assert [refusal.code for refusal in refused] == [RefusalCode.INVARIANCE]
    by_prefill = BackendRequest(verify=Role.PREFILL)
    assert select(installed, by_prefill, Problem(LLAMA, invariant={"verify"})).chosen(Role.DECODE).spec.name == "both"


def test_a_requested_backend_decides_both_roles_if_rows_must_be_equal() -> None:
    """E3"""
    installed = registry(backend("a", ALL), backend("b", ALL))
    problem = Problem(LLAMA, invariant=LEVELS)
    by_role = BackendRequest(roles={Role.PREFILL: "b"})
    assert names(select(installed, by_role, problem).choices) == {"prefill": "b", "decode": "b"}
    with pytest.raises(SelectionError) as caught:
        select(installed, BackendRequest("a", {Role.DECODE: "b"}), problem)
    reasons = {refusal.code for choice in caught.value.selection.unserved for refusal in choice.candidates[0].refusals}
    assert reasons == {RefusalCode.INVARIANCE}


def test_both_roles_are_ranked_together_if_rows_must_be_equal() -> None:
    """E3: 'late' decodes fastest; prefill was not measured, so preference would decide there."""
    able = {name: replace(each, spec=replace(each.spec, capabilities=ALL)) for name, each in INSTALLED.backends.items()}
    problem = replace(PROBLEM, invariant=LEVELS)
    selection = chosen(*crossing(), installed=replace(INSTALLED, backends=able), problem=problem)
    assert names(selection.choices) == {"prefill": "late", "decode": "late"}


def test_mla_extends_absorbed_if_levels_are_requested() -> None:
    """E3, C1: the other paths are chosen by the batch, and decode is absorbed."""
    assert Problem(DEEPSEEK, invariant={"run"}).extend_path is None
    assert Problem(DEEPSEEK, invariant={"batch"}).extend_path is ExtendPath.ABSORBED
    with raises_naming(UsageError, "chunked", "absorbed"):
        Problem(DEEPSEEK, invariant={"batch"}, mla_extend=ExtendPath.CHUNKED)
    as_mha = replace(PLAIN, kinds={"mla"}, mla_extend={ExtendPath.ONE_SHOT}, invariant=LEVELS)
    refusals = backend("as_mha", as_mha).spec.refusals(Problem(DEEPSEEK, invariant=LEVELS), Role.PREFILL)
    assert [refusal.code for refusal in refusals] == [RefusalCode.FEATURE]


def test_wrappers_keep_the_weakest_levels_without_those_they_break() -> None:
    """A9, E3"""

    def child(name: str, levels: frozenset[str]) -> Recorder:
        return Recorder(name, claims=Claims(invariant=levels))

    same = child("a", LEVELS), child("b", LEVELS)
    assert SplitBackend(*same).claims.invariant == LEVELS - {"chunks"}
    assert SplitBackend(*same, verify=Role.PREFILL).claims.invariant == LEVELS - {"chunks", "verify"}
    weak = SplitBackend(child("a", LEVELS), child("b", frozenset({"run"})))
    assert weak.claims.invariant == {"run"} and weak.limiting_children["invariant"] == (Role.DECODE,)
    hybrid = HybridLinearBackend(child("a", LEVELS), child("b", frozenset({"run", "batch"})), HYBRID)
    assert hybrid.claims.invariant == {"run", "batch"}
    roles = {Role.PREFILL: "a", Role.DECODE: "b"}
    by_batch = FastestBackend(dict(zip("ab", same, strict=True)), roles)
    assert by_batch.claims.invariant == {"run"}
