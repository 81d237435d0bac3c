"""The kit catches every broken backend of ``mutants`` by the intended check, with the right diagnosis."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from attnplug_conformance.catalog import all_checks
from attnplug_conformance.failure import CheckFailure
from attnplug_conformance.runner import Status, run_check, run_checks
from kit_subjects import CHECKS, subject, text
from mutants import MUTANTS, Mutant
from mutants.random_cases import SEEDS, SEEDS_OF_SMALL_CASES


def mutated(mutant: Mutant) -> str:
    source = text(mutant.good)
    for old, new in filter(None, ((mutant.old, mutant.new), mutant.prepared)):
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
        source = source.replace(old, new)
    return source


def test_there_are_enough_and_each_has_a_name_of_its_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60


@pytest.mark.parametrize("good", ["mha", "mla", "new_mla", "sparse", "compressed", "linear"])
@pytest.mark.sample(2)
def test_the_good_backends_pass_everything(good):
    verdict = run_checks(subject(f"good_{good}", text(good)), all_checks())
    failed = {result.check.name: result.message for result in verdict.results if result.status is Status.FAILED}
    assert not failed and not verdict.problems
    ran = {result.check.name for result in verdict.results if result.status is Status.PASSED}
    meant = {mutant.caught_by for mutant in MUTANTS if mutant.good == good and "-claims_" not in mutant.name}
    assert meant <= ran, "a check that is meant to catch a mutant does not run"


def test_results_of_another_form_are_caught_by_the_quick_run():
    faults = [mutant for mutant in MUTANTS if "-result_" in mutant.name]
    assert len(faults) >= 10 and all(CHECKS[mutant.caught_by].quick for mutant in faults)


def fail_at_once(drawn, *_):
    raise CheckFailure(drawn.describe())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_kit_catches(mutant, monkeypatch):
    monkeypatch.setattr("attnplug_conformance.checks.random.shrink", fail_at_once)  # test_random tests shrinking
    budget = 2.0 if mutant.name in SEEDS_OF_SMALL_CASES else 10.0  # random cases end at the first failure
    broken = replace(subject(mutant.name, mutated(mutant)), budget=budget)
    result = run_check(CHECKS[mutant.caught_by], broken, (SEEDS | SEEDS_OF_SMALL_CASES).get(mutant.name, 0))
    assert result.status is Status.FAILED
    assert mutant.message in result.message


SET = [mutant for mutant in MUTANTS if mutant.name.removeprefix("mha-").startswith(("environment_", "float32_"))]


@pytest.mark.parametrize("mutant", SET, ids=lambda mutant: mutant.name)
def test_what_earlier_checks_left_in_the_process_hides_nothing(mutant):
    """In a whole run other checks come first, so the backend's settings are already in effect."""
    broken = subject(mutant.name, mutated(mutant))
    try:
        results = [run_check(CHECKS[name], broken) for name in ("mha.decode.one_request", mutant.caught_by)]
    finally:
        os.environ.pop("KERNEL_CACHE", None)
        torch.set_float32_matmul_precision("highest")
    assert [result.status for result in results] == [Status.PASSED, Status.FAILED]
    assert mutant.message in results[1].message
