"""Choices of ``auto``, the rule behind each, and its explanation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest

from attnplug import GraphLevel, PageSizes, Problem, Refusal, RefusalCode, Role
from attnplug.auto.ranking import Ranked
from attnplug.auto.schedule import BackendSchedule
from attnplug.declare.spec import Registered
from attnplug.host import BackendRequest, explain, select
from attnplug.registry.selection import explanation
from support.selection import HYBRID, LINEAR, LLAMA, PLAIN, backend, names, registry


def test_auto_takes_the_highest_preference() -> None:
    """D3"""
    installed = registry(backend("slow"), backend("fast", preference=100), backend("middle", preference=50))
    chosen = select(installed, BackendRequest(), Problem(LLAMA)).choices
    assert names(chosen) == {"prefill": "fast", "decode": "fast"}


def test_auto_leaves_out_what_is_refused() -> None:
    """D3"""
    fast = backend("fast", replace(PLAIN, min_sm=100), preference=100)
    installed = registry(backend("slow"), fast)
    assert names(select(installed, BackendRequest(), Problem(LLAMA, "cuda", 90)).choices)["prefill"] == "slow"
    assert names(select(installed, BackendRequest(), Problem(LLAMA, "cuda", 100)).choices)["prefill"] == "fast"


def test_a_tie_is_settled_by_name_whatever_the_order() -> None:
    """D3"""
    for order in permutations([backend("b"), backend("a"), backend("c")]):
        selection = select(registry(*order), BackendRequest(), Problem(LLAMA))
        assert names(selection.choices)["prefill"] == "a"
        assert [each.backend.spec.name for each in selection.choices[Role.PREFILL].candidates] == ["a", "b", "c"]


@pytest.mark.parametrize("preference", [100, 0, -100])
def test_the_embedded_default_comes_last(preference: int) -> None:
    """D3: auto puts the embedded backend last because it is embedded, not because of its name or preference."""
    installed = registry(backend("default", target="attnplug.default"), backend("zzz", preference=preference))
    selection = select(installed, BackendRequest(), Problem(LLAMA))
    assert names(selection.choices) == {"prefill": "zzz", "decode": "zzz"}
    assert selection.choices[Role.PREFILL].candidates[-1].backend.spec.name == "default"


EAGER = backend("eager", replace(PLAIN, devices={"cuda"}), preference=100)
CAPTURED = backend("captured", replace(PLAIN, devices={"cuda"}, cuda_graph=GraphLevel.DECODE))


def test_where_a_host_captures_auto_decodes_with_what_can_be_captured() -> None:
    """D3: prefills are not captured, so the preferred backend runs them. ``explain`` shows the captured modes."""
    installed = registry(EAGER, CAPTURED)
    plain = Problem(LLAMA, "cuda", 90)
    assert names(select(installed, BackendRequest(), plain).choices) == {"prefill": "eager", "decode": "eager"}
    selection = select(installed, BackendRequest(), replace(plain, wants_graphs=True))
    assert names(selection.choices) == {"prefill": "eager", "decode": "captured"}
    assert selection.choices[Role.DECODE].why() == "auto: runs in CUDA graphs, unlike eager"
    assert list(explanation(selection))[-1] == "CUDA graphs: DECODE"


def test_explain_says_who_takes_short_prefills_in_graphs() -> None:
    """D3: a backend that decodes and can capture any batch, if ``auto`` chose the prefill backend and the host wants
    prefill graphs."""
    anything = backend("anything", replace(PLAIN, devices={"cuda"}, cuda_graph=GraphLevel.ALWAYS))
    wants = Problem(LLAMA, "cuda", 90, wants_graphs=True, wants_prefill_graphs=True)
    asked = BackendRequest(roles={Role.PREFILL: "eager"})
    for installed, request, problem, printed in (
        (registry(EAGER, anything), BackendRequest(), wants, "DECODE, by eager (no more is declared)"),
        (registry(EAGER, anything), asked, wants, ""),
        (registry(EAGER, anything), BackendRequest(), replace(wants, wants_prefill_graphs=False), ""),
        (registry(EAGER, CAPTURED), BackendRequest(), wants, ""),
        (registry(anything), BackendRequest(), wants, ""),
    ):
        line = list(explanation(select(installed, request, problem)))[-1]
        if printed:
            assert line == f"CUDA graphs: {printed}; short prefills by anything"
        else:
            assert line.startswith("CUDA graphs: ") and "short prefills" not in line


def test_where_nothing_can_be_captured_auto_takes_what_there_is_and_explain_says_so() -> None:
    """D3"""
    wants = Problem(LLAMA, "cuda", 90, wants_graphs=True)
    selection = select(registry(EAGER), BackendRequest(), wants)
    assert names(selection.choices)["decode"] == "eager"
    assert list(explanation(selection))[-1] == "CUDA graphs: NEVER, by eager (none are declared)"
    mixed = select(registry(EAGER, CAPTURED), BackendRequest("captured", {Role.DECODE: "eager"}), wants)
    assert list(explanation(mixed))[-1] == "CUDA graphs: NEVER, by eager (none are declared)"


def test_explain_gives_a_backends_own_reason_for_running_outside_of_graphs() -> None:
    """D3"""

    def in_a_capture(problem: Problem, role: Role | None, options: object) -> list[Refusal]:
        return [Refusal(RefusalCode.CUDA_GRAPH, "its tuner runs in every step")] if problem.cuda_graph else []

    capabilities = replace(PLAIN, devices={"cuda"}, cuda_graph=GraphLevel.ALWAYS)
    tuned = backend("tuned", capabilities, check=in_a_capture)
    selection = select(registry(tuned), BackendRequest(), Problem(LLAMA, "cuda", 90, wants_graphs=True))
    assert list(explanation(selection))[-1] == "CUDA graphs: NEVER, by tuned (its tuner runs in every step)"


def test_a_linear_layer_is_captured_with_the_rest_of_a_decode() -> None:
    """D3"""
    able = replace(LINEAR, devices={"cuda"})
    installed = registry(
        CAPTURED,
        backend("eager_states", able, preference=100),
        backend("captured_states", replace(able, cuda_graph=GraphLevel.DECODE)),
    )
    selection = select(installed, BackendRequest(), Problem(HYBRID, "cuda", 90, wants_graphs=True))
    assert names(selection.choices)["linear"] == "captured_states"


def test_on_a_cpu_nothing_is_captured_whatever_the_host_wants() -> None:
    """D3"""
    installed = registry(
        backend("eager", preference=100), backend("able", replace(PLAIN, cuda_graph=GraphLevel.DECODE))
    )
    chosen = select(installed, BackendRequest(), Problem(LLAMA, "cpu", wants_graphs=True)).choices
    assert names(chosen)["decode"] == "eager"


DEFAULT = backend("default", target="attnplug.default")
REFUSED = backend("gpu", replace(PLAIN, devices={"cuda"}), preference=1000)


@pytest.mark.parametrize(
    ("installed", "why"),
    [
        ([DEFAULT], "the only usable one"),
        ([DEFAULT, REFUSED], "the only usable one; 1 refused"),
        ([backend("a"), REFUSED], "the only usable one; 1 refused"),
        ([backend("a", preference=7), DEFAULT], "preference 7, the highest of 2 usable, before default"),
        ([backend("a", preference=7), backend("b")], "preference 7, the highest of 2 usable, before b"),
        ([backend("a"), DEFAULT], "the only usable one; the embedded default default comes last"),
        ([backend("a"), backend("b")], "preference 0, equal with b, first by name"),
        (
            [backend("a"), backend("b"), backend("c"), DEFAULT, REFUSED],
            "preference 0, equal with b, c, first by name; the embedded default default comes last; 1 refused",
        ),
        (
            [backend("a"), backend("b", preference=-1), DEFAULT],
            "preference 0, the highest of 2 usable, before b; the embedded default default comes last",
        ),
        (
            [backend("a", preference=7), backend("b", preference=7), DEFAULT],
            "preference 7, equal with b, first by name",
        ),
    ],
)
def test_auto_says_by_which_rule(installed: list[Registered], why: str) -> None:
    """D3: what decided, and nothing that did not."""
    choice = explain(registry(*installed), BackendRequest(), Problem(LLAMA, "cpu")).choices[Role.PREFILL]
    assert choice.chosen is installed[0]
    assert choice.why() == f"auto: {why}"


def test_every_installed_backend_is_a_candidate() -> None:
    """D3"""
    installed = registry(backend("fast"), backend("linear", LINEAR), backend("mla", replace(PLAIN, kinds={"mla"})))
    candidates = explain(installed, BackendRequest(), Problem(LLAMA)).choices[Role.DECODE].candidates
    assert {each.backend.spec.name: bool(each.refusals) for each in candidates} == {
        "fast": False,
        "linear": True,
        "mla": True,
    }


class _Measured:
    """Ranks by a table of times for each role; a host's or a plugin's measurements would be one."""

    def rank(self, usable: Sequence[Registered], role: Role, problem: Problem) -> Ranked:
        times = {"slow": {Role.PREFILL: 1, Role.DECODE: 9}, "fast": {Role.PREFILL: 5, Role.DECODE: 2}}
        ordered = sorted(usable, key=lambda backend: times[backend.spec.name][role])
        return Ranked(tuple(ordered), f"{times[ordered[0].spec.name][role]} ms")

    def failures(self, usable: Sequence[Registered], role: Role, problem: Problem) -> dict[str, Refusal]:
        return {}


def test_another_ranking_orders_what_is_usable_and_says_why() -> None:
    """D3: without another ranking, the fixed preference decides."""
    refused = backend("gone", replace(PLAIN, min_sm=100), preference=1000)
    installed = registry(backend("slow"), backend("fast", preference=100), refused)
    choices = select(installed, BackendRequest(), Problem(LLAMA, "cuda", 90), ranking=_Measured()).choices
    assert names(choices) == {"prefill": "slow", "decode": "fast"}
    assert choices[Role.PREFILL].why() == "auto: 1 ms; 1 refused"


def test_a_ranking_is_not_asked_about_a_backend_that_was_asked_for() -> None:
    """D3"""
    installed = registry(backend("slow"), backend("fast"))
    choices = select(installed, BackendRequest("fast"), Problem(LLAMA), ranking=_Measured()).choices
    assert names(choices) == {"prefill": "fast", "decode": "fast"}


class _Scheduled:
    """Ranks by preference, and has every usable backend take some of the batches."""

    def rank(self, usable: Sequence[Registered], role: Role, problem: Problem) -> Ranked:
        times = {each.spec.name: {(1, 64, 1): float(rank + 1)} for rank, each in enumerate(usable)}
        return Ranked(tuple(usable), "by batch", BackendSchedule(times))

    def failures(self, usable: Sequence[Registered], role: Role, problem: Problem) -> dict[str, Refusal]:
        return {}


def test_a_schedule_gives_a_role_several_backends() -> None:
    """D3: the chosen backend is its first candidate. A requested backend has no schedule."""
    installed = registry(backend("slow"), backend("fast", preference=100))
    request = BackendRequest(roles={Role.DECODE: "slow"})
    selection = select(installed, request, Problem(LLAMA), ranking=_Scheduled())
    assert [each.spec.name for each in selection.serving(Role.PREFILL)] == ["fast", "slow"]
    assert selection.chosen(Role.PREFILL).spec.name == "fast"
    assert selection.choices[Role.DECODE].schedule is None
    assert [each.spec.name for each in selection.serving(Role.DECODE)] == ["slow"]


def test_backends_of_a_schedule_share_the_pages_of_the_chosen_one() -> None:
    """D3: those that cannot read them are left out, unless the host decided on pages that all can read."""
    paged = replace(PLAIN, page_sizes=PageSizes.of(128))
    installed = registry(backend("odd", paged), backend("even"), backend("fast", preference=100))
    for size, wanted, printed in ((None, ["fast", "even"], True), (128, ["fast", "even", "odd"], False)):
        selection = select(installed, BackendRequest(), Problem(LLAMA, page_size=size), ranking=_Scheduled())
        assert [each.spec.name for each in selection.serving(Role.DECODE)] == wanted
        assert ("; without odd, for pages of 64" in selection.choices[Role.DECODE].why()) is printed


@pytest.mark.parametrize(
    ("tokens", "verify", "chosen", "wanted"),
    [
        (0, Role.DECODE, GraphLevel.UNIFORM, ["fast", "even", "single"]),
        (4, Role.DECODE, GraphLevel.UNIFORM, ["fast", "even"]),
        (4, Role.PREFILL, GraphLevel.UNIFORM, ["fast", "even", "single"]),
        (4, Role.DECODE, GraphLevel.DECODE, ["fast", "even", "single"]),
    ],
    ids=["no drafts", "drafts", "verified by who prefills", "nothing to lose"],
)
def test_a_backend_of_a_schedule_takes_no_graphs_from_the_chosen_one(
    tokens: int, verify: Role, chosen: GraphLevel, wanted: list[str]
) -> None:
    """D3: if drafts are verified in graphs, backends that cannot be captured for that are left out."""
    able = replace(PLAIN, roles={"prefill", "decode", "draft"}, max_speculative_tokens=8)
    levels = {"single": GraphLevel.DECODE, "even": GraphLevel.UNIFORM, "fast": chosen}
    installed = registry(
        *(
            backend(name, replace(able, cuda_graph=level), preference=100 * (name == "fast"))
            for name, level in levels.items()
        )
    )
    problem = Problem(LLAMA, "cuda", 90, speculative_tokens=tokens, wants_graphs=True)
    selection = select(installed, BackendRequest(verify=verify), problem, ranking=_Scheduled())
    assert [each.spec.name for each in selection.serving(Role.DECODE)] == wanted
    printed = "; without single, for CUDA graphs that verify drafts" in selection.choices[Role.DECODE].why()
    assert printed is ("single" not in wanted)


def test_graphs_are_those_of_all_that_share_a_role() -> None:
    """D3"""
    levels = {"single": GraphLevel.DECODE, "fast": GraphLevel.UNIFORM}
    installed = registry(
        *(backend(name, replace(PLAIN, cuda_graph=level), preference=int(level)) for name, level in levels.items())
    )
    problem = Problem(LLAMA, "cuda", 90, wants_graphs=True)
    lines = list(explanation(select(installed, BackendRequest(), problem, ranking=_Scheduled())))
    assert lines[-1] == "CUDA graphs: DECODE, by single (no more is declared)"


def test_every_backend_of_a_schedule_has_its_options() -> None:
    """D3"""
    installed = registry(backend("slow"), backend("fast", preference=100))
    selection = select(installed, BackendRequest(), Problem(LLAMA), ranking=_Scheduled())
    assert set(selection.options) == {"fast", "slow"}
