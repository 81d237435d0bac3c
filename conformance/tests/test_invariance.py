"""The kit catches every backend that breaks a claimed level of invariance, and shows the smallest pair of batches."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace

import pytest

from attnplug.declare.problem import INVARIANCE
from attnplug_conformance.case import Case
from attnplug_conformance.checks.invariance import _variants
from attnplug_conformance.failure import CheckFailure
from attnplug_conformance.invariant_case import from_text
from attnplug_conformance.runner import Result, Status, run_check
from attnplug_conformance.subject import Subject
from invariance_mutants import MUTANTS
from kit_subjects import CHECKS, subject, text
from mutants.mutant import Mutant


def broken(mutant: Mutant) -> Subject:
    source = text(mutant.good)
    assert source.count(mutant.old) == 1, f"{mutant.old!r} occurs {source.count(mutant.old)} times"
    return short(mutant.name, source.replace(mutant.old, mutant.new))


def short(name: str, source: str) -> Subject:
    """A backend for short requests, so that a check compares many within its budget."""
    return replace(subject(name, source), longest=300, budget=20.0)


def failing(result: Result) -> tuple[str, str]:
    """Level and case of a failure."""
    text = shlex.split(result.repeat)[1]
    return from_text(text)[0], text


@pytest.mark.sample(6)
@pytest.mark.parametrize("good", ["invariant", "sparse", "compressed", "linear"])
@pytest.mark.parametrize("level", [*INVARIANCE, "all"])
def test_good_backends_keep_every_level_that_they_claim(good: str, level: str) -> None:
    """E3"""
    prefix = {"invariant": "mha", "sparse": "mla.sparse", "compressed": "mla.compressed", "linear": "gdn"}[good]
    made = replace(short(f"good_{good}", text(good)), budget=0.5)
    result = run_check(CHECKS[f"{prefix}.invariant.{level}"], made)
    claimed = level == "all" or level in made.capabilities.invariant
    claimed &= (good, level) != ("compressed", "graph")  # never captured
    assert result.status is (Status.PASSED if claimed else Status.REFUSED), result.message


def test_every_level_has_mutants() -> None:
    assert len(MUTANTS) >= 12
    assert {mutant.caught_by.rpartition(".")[2] for mutant in MUTANTS} == set(INVARIANCE)


@pytest.mark.sample(8)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_level_is_caught_by_its_check(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """E3"""

    def fail_at_once(comparison, *_):  # shrinking has a test of its own
        raise CheckFailure(f"other bits, selected rows {comparison.describe()}")

    monkeypatch.setattr("attnplug_conformance.checks.invariance.shrink", fail_at_once)
    made = replace(broken(mutant), budget=200.0)  # the check ends at the first difference, on a slow machine, too
    result = run_check(CHECKS[mutant.caught_by], made)
    assert result.status is Status.FAILED
    assert mutant.message in result.message


def test_a_failure_shows_the_smallest_pair_of_batches_and_repeats_it() -> None:
    """E3: as many companions as change the split size, and as many cache rows as two splits need."""
    (mutant,) = (each for each in MUTANTS if each.name == "batch-split_count_from_the_batch_size")
    made = replace(broken(mutant), longest=90)
    result = run_check(CHECKS[mutant.caught_by], made)
    level, case = failing(result)
    first, second = from_text(case)[1].first, from_text(case)[1].second
    assert level == "batch" and first.describe() in result.message and second.describe() in result.message
    assert len(first.lengths) == 1 and len(second.lengths) + second.padded == 4
    assert (first.before, first.new) == (second.before, second.new) and first.before <= 32 and first.new == 1
    again = run_check(CHECKS[mutant.caught_by], replace(made, random_case=case))
    assert again.status is Status.FAILED and again.repeat == result.repeat
    good = replace(short("good_invariant", text("invariant")), random_case=case)
    assert run_check(CHECKS[mutant.caught_by], good).status is Status.PASSED


def test_a_case_of_another_form_is_refused() -> None:
    for given in ({"lengths": []}, {"level": "batch", "first": {"before": 1, "new": 1}, "second": {"seeds": 3}}):
        with pytest.raises(ValueError, match=r"first|seeds"):
            from_text(json.dumps(given))


def test_levels_are_checked_only_where_they_are_claimed() -> None:
    result = run_check(CHECKS["mha.invariant.batch"], subject("plain", text("mha")))
    assert result.status is Status.REFUSED and "batch" in result.message


def test_the_checks_run_every_dtype_and_kv_format_that_is_claimed() -> None:
    """E3: each level another one, which saves time, and ``all`` all of them. Kernels differ by both."""
    dtypes, formats = {"float32", "float16", "bfloat16"}, {"float8_e4m3fn", "fp8_per_token_head", "nvfp4"}
    made = subject("dtypes", text("invariant"))
    can = replace(made.capabilities, dtypes=dtypes, kv_dtypes=formats | dtypes)
    spec = replace(made.registered.spec, capabilities=can)
    made = replace(made, registered=replace(made.registered, spec=spec))
    case = made.fit(Case(((3, 1),)))
    run = {level: _variants(level, made, case) for level in (*INVARIANCE, "all")}
    for levels in (INVARIANCE, ["all"]):
        layers = [case, *(each for level in levels for each in run[level])]
        assert {each.dtype for each in layers} - {None} == dtypes
        assert {each.kv_dtype for each in layers} - {None} == formats


def test_a_check_requests_its_own_level_alone() -> None:
    """E3: a claim holds for backends that were built with the level requested, and needs no other one."""
    recording = "    calls, requested = 0, []\n\n    def __init__(self, context):\n        super().__init__(context)\n"
    recording += "        self.requested.append(context.invariant)\n"
    made = replace(short("records", text("invariant").replace("    calls = 0\n", recording)), budget=0.3)
    requested = sys.modules["kit_records"].Backend.requested
    for level in ("verify", "all"):
        assert run_check(CHECKS[f"mha.invariant.{level}"], made).status is Status.PASSED
        assert requested[-1] == (made.capabilities.invariant if level == "all" else {level})
