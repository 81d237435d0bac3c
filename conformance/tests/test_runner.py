"""Reports of the kit: claims, floors, expected failures, and a command that repeats each failure."""

from __future__ import annotations

import json
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from errno import ENOMEM
from functools import partial
from importlib.metadata import version
from xml.etree import ElementTree

import pytest
import torch

from attnplug import AttentionKind, CacheLayout, DType, UsageError
from attnplug.declare.version import CONTRACT_VERSION
from attnplug_conformance.case import Case
from attnplug_conformance.catalog import all_checks
from attnplug_conformance.processes import results
from attnplug_conformance.report import as_html, as_json, as_junit, lines
from attnplug_conformance.runner import Status, read_expected, required_contract, run_check, run_checks
from attnplug_conformance.scene_pools import MAX_INT32, WideStates
from attnplug_conformance.stored_rows import coded_formats
from attnplug_conformance.subject import linear_dims
from attnplug_conformance.testing import assert_check
from attnplug_testing.errors import raises_naming
from kit_subjects import CHECKS, subject, text

BASE_2 = text("mha").replace("extras.lse[rows] = sums", "extras.lse[rows] = sums / 0.6931471805599453")
LSE = [CHECKS["mha.lse.extend"], CHECKS["mha.decode.one_request"]]


def claiming(**changes):
    """A good backend that claims something else."""
    good = subject("good_mha", text("mha"))
    spec = good.registered.spec
    spec = replace(spec, capabilities=replace(spec.capabilities, **changes))
    return replace(good, registered=replace(good.registered, spec=spec))


def test_a_failure_says_what_is_wrong_and_how_to_repeat_it():
    verdict = run_checks(subject("base_2", BASE_2), LSE, floors=False)
    report = "\n".join(lines(verdict))
    assert f"FAILED mha.lse.extend: {verdict.results[0].message}" in report and "base 2" in verdict.results[0].message
    assert "attnplug conform good_mha --device cpu --check mha.lse.extend" in report
    assert not verdict.holds


def test_a_repeated_check_has_the_same_options_and_inputs():
    broken = replace(subject("base_2", BASE_2), settings=("good_mha.speed=very high", "good_mha.level=2"))
    (line,) = (line for line in lines(run_checks(broken, LSE[:1], floors=False, seed=7)) if "repeat:" in line)
    wanted = "--check mha.lse.extend --backend-option 'good_mha.speed=very high' --backend-option good_mha.level=2"
    assert line.endswith(f"{wanted} --seed 7")


@pytest.mark.parametrize(
    ("builds", "fault"),
    [
        ("[KernelBuild('a', print, bool)]", ""),
        ("[KernelBuild('a', print, bool)] * 2", "several kernels named a"),
        ("[KernelBuild('a', lambda: None, bool)]", "another process"),
        ("['a.cu']", "not a KernelBuild"),
        ("None", "good_mha"),
    ],
)
def test_the_kernels_that_a_backend_lists_are_checked(builds, fault):
    """E1"""
    hook = f"\nfrom attnplug.kernels import KernelBuild\ndef builds(problem, roles, options):\n    return {builds}\n"
    lists = subject("lists", text("mha") + hook)
    spec = replace(lists.registered.spec, kernel_builds="kit_lists:builds")
    lists = replace(lists, registered=replace(lists.registered, spec=spec))
    (result,) = run_checks(lists, [CHECKS["declared.kernel_builds"]], floors=False).results
    assert result.status is (Status.FAILED if fault else Status.PASSED) and fault in result.message


def test_a_backend_that_cannot_be_built_ends_the_run():
    unbuildable = subject("unbuildable", text("mha").replace("self.captured = {}", "raise RuntimeError('no kernel')"))
    verdict = run_checks(unbuildable, all_checks())
    ran = [result for result in verdict.results if result.status is not Status.REFUSED]
    assert [result.unbuilt for result in ran] == [True] and "RuntimeError: no kernel" in ran[0].message
    (problem,) = verdict.problems
    assert "good_mha cannot be built" in problem


def test_a_backend_that_cannot_be_built_for_one_case_is_checked_for_the_others():
    picky = text("mha").replace("self.captured = {}", "assert len(context.roles) == 2; self.captured = {}")
    checks = [CHECKS[name] for name in ("mha.decode.one_request", "mha.built.prefill", "mha.extend.ragged")]
    verdict = run_checks(subject("picky", picky), checks, floors=False)
    assert [result.status for result in verdict.results] == [Status.PASSED, Status.FAILED, Status.PASSED]


def test_in_pytest_a_backend_that_cannot_be_built_fails_once():
    unbuildable = subject("unbuildable", text("mha").replace("self.captured = {}", "raise RuntimeError('no kernel')"))
    with pytest.raises(pytest.fail.Exception, match="no kernel"):
        assert_check(unbuildable, LSE[0], {})
    with pytest.raises(pytest.skip.Exception, match=r"mha\.lse\.extend"):
        assert_check(unbuildable, LSE[1], {})


def test_a_tuple_is_named_and_every_failure_of_a_kind_is_shown_once():
    pair = text("mha").replace("return out\n\n    def write", "return out, out\n\n    def write")
    names = ("decode.one_request", "decode.long", "plan.two_alive_decode", "plan.wrapped", "results_kept_decode")
    verdict = run_checks(subject("pair", pair), [CHECKS[f"mha.{name}"] for name in names], floors=False)
    assert {result.message.partition(" ")[2] for result in verdict.results} == {
        "returned a tuple of 2 (Tensor, Tensor); it must return one tensor"
    }
    report = "\n".join(lines(verdict))
    assert report.count("FAILED") == 2 and len(report) < 1500 and all(f"mha.{name}" in report for name in names)


def test_junit_counts_every_check_and_problem():
    """For CI systems, which read test suites, test cases, failures and skips."""
    forbidden = text("mha").replace("self.check(batch.geometry)", "raise RuntimeError('\\x1b[31m<no> & \\x00')")
    checks = [CHECKS[f"mha.{name}"] for name in ("lse.extend", "lse.decode", "decode.long", "dims_differ.extend")]
    broken = subject("forbidden", forbidden)
    broken = replace(broken, registered=claiming(head_dims=frozenset({(16, 16)})).registered)
    broken = replace(
        broken,
        registered=replace(broken.registered, spec=replace(broken.registered.spec, factory="kit_forbidden:Backend")),
    )
    verdict = run_checks(broken, checks, expected={"mha.lse.extend": "known", "mha.nothing": "no check"})
    root = ElementTree.fromstring(as_junit(verdict).encode())
    (suite,) = root
    cases = suite.findall("testcase")
    for node in (root, suite):
        counts = [int(node.attrib[name]) for name in ("tests", "failures", "errors", "skipped")]
        assert counts == [len(cases), len(suite.findall("*/failure")), 0, len(suite.findall("*/skipped"))]
        assert float(node.attrib["time"]) >= 0
    assert root.tag == "testsuites" and suite.tag == "testsuite" and suite.attrib["name"] == "good_mha"
    assert [case.attrib["name"] for case in cases[:4]] == [check.name for check in checks]
    assert [next(iter(case), case).tag for case in cases[:4]] == ["skipped", "failure", "failure", "skipped"]
    assert len(cases) == 4 + len(verdict.problems) and len(verdict.problems) >= 2
    failure = cases[1].find("failure")
    assert "<no> & ?" in failure.attrib["message"] and "repeat:" in failure.text


class DyingPool:
    """Fake process pool. One death breaks the whole pool, as in ``concurrent.futures``."""

    def __init__(self, deadly, jobs, asked):
        self.deadly, self.jobs, self.asked = deadly, jobs, asked

    def submit(self, run, name, seed):
        self.asked.append((self.jobs, name))
        future = Future()
        if self.jobs > 1 or name in self.deadly:
            future.set_exception(BrokenProcessPool("it died"))
        else:
            future.set_result({"status": Status.PASSED})
        return future

    def shutdown(self, *, cancel_futures):
        assert cancel_futures


def died(checks, *deadly):
    asked = []
    runner = partial(results, lambda jobs: DyingPool(deadly, jobs, asked), 2)
    return run_checks(subject("good", text("mha")), checks, runner=runner, floors=False), asked


def test_the_check_whose_process_dies_fails_and_no_other():
    first, second = LSE
    verdict, asked = died([second, first], first.name)
    assert [result.status for result in verdict.results] == [Status.PASSED, Status.FAILED]
    assert f"FAILED {first.name}: " in "\n".join(lines(verdict))
    both = [(2, second.name), (2, first.name)]
    assert asked == [*both, (1, second.name), both[1], (1, first.name)] and not verdict.problems


def test_after_three_deaths_nothing_else_is_run():
    verdict, _ = died(LSE * 2, *(check.name for check in LSE))
    assert len(verdict.results) == 3 and verdict.results[2].lost and len(verdict.problems) == 1


def test_a_check_that_is_not_claimed_has_the_backends_own_refusal():
    result = run_check(CHECKS["mha.window.decode"], claiming(features=frozenset(), extras=frozenset()))
    assert result.status is Status.REFUSED and "sliding_window" in result.message


@pytest.mark.parametrize("format", [format.name for format in coded_formats("mha")])
def test_two_layers_have_scales_of_their_own_also_if_a_backend_reads_one_format_only(format):
    result = run_check(CHECKS["mha.two_layers"], claiming(kv_dtypes=frozenset({format})))
    assert result.status is Status.PASSED, result.message


def test_a_backend_may_use_operations_that_torch_lists_as_nondeterministic():
    """The kit fills uninitialized memory by torch's deterministic mode."""
    work = "work, start = plan.metadata, 0"
    put = text("mha").replace(work, f"{work}; torch.zeros(2).put_(torch.tensor([1]), torch.ones(1))")
    result = run_check(CHECKS["mha.decode.one_request"], subject("put", put))
    assert result.status is Status.PASSED, result.message


@pytest.mark.parametrize("layout", [CacheLayout.HEAD_MAJOR, CacheLayout.STRIDED])
def test_a_backend_that_does_not_read_token_major_memory_is_checked_over_what_it_reads(layout):
    verdict = run_checks(claiming(layouts=frozenset({layout})), all_checks(), quick=True)
    assert verdict.holds and sum(result.status is Status.PASSED for result in verdict.results) > 70
    assert run_check(CHECKS["mha.pages.wide"], claiming(layouts=frozenset({layout}))).status is Status.PASSED


def test_claiming_nothing_that_can_run_does_not_pass():
    verdict = run_checks(claiming(head_dims=frozenset({(13, 11)})), all_checks())
    assert not verdict.holds and verdict.problems


@pytest.mark.parametrize(
    ("good", "old", "new", "claim"),
    [
        ("sparse", "if any(", "if problem.coordinator or any(", "hisparse"),
        ("sparse", "if any(", "if problem.kv_dtype == 'fp8_ds_mla' or any(", "mla fp8_ds_mla"),
        ("sparse", "if any(", "if problem.index_dtype is not None or any(", "float8_e4m3fn index keys"),
        ("compressed", '"entries", ', "", "compressed"),
    ],
)
def test_a_claim_whose_checks_are_all_refused_does_not_pass(good, old, new, claim):
    backend = subject(f"refusing_{good}", text(good).replace(old, new))
    others = [CHECKS[name] for name in ("mla.decode.one_request", "mla.sparse.extend")]  # of which one runs
    verdict = run_checks(backend, [*others, *(check for check in all_checks() if check.claim == claim)])
    (problem,) = (each for each in verdict.problems if f"claim {claim} " in each)
    assert problem.startswith("0 checks")


@pytest.mark.parametrize("requested", [frozenset(), frozenset({"run"})], ids=["none", "run"])
def test_layers_may_be_refused_where_levels_of_invariance_are_requested(requested):
    """E3: a claim with fewer checks than needed is a problem only without levels."""
    backend = replace(claiming(invariant=frozenset({"run"})), invariant=requested)
    verdict = run_checks(backend, [CHECKS["mha.decode.one_request"]])
    assert any("claim lse " in problem for problem in verdict.problems) is not bool(requested)


def test_a_kind_that_is_claimed_and_refused_does_not_pass():
    """C1, D3: it would be selected for MLA layers without any check of them."""
    mla = {"kinds": frozenset({"mha", "mla"}), "mla_dims": frozenset({(7, 3)}), "max_heads": 8}
    verdict = run_checks(claiming(**mla), [CHECKS["mha.decode.one_request"], CHECKS["mla.fp8_ds_mla.extend"]])
    assert any("kind mla" in problem for problem in verdict.problems)


def test_nothing_that_ran_does_not_pass():
    verdict = run_checks(claiming(devices=frozenset({"cuda"})), all_checks())
    (problem,) = verdict.problems
    assert "good_mha" in problem and {result.status for result in verdict.results} <= {Status.REFUSED, Status.PASSED}


def test_an_expected_failure_passes_with_its_reason():
    verdict = run_checks(subject("base_2", BASE_2), LSE, expected={"mha.lse.extend": "base 2 for now"}, floors=False)
    assert verdict.holds and verdict.results[0].message.startswith("base 2 for now")


def test_an_expected_failure_that_passes_is_a_problem():
    verdict = run_checks(subject("good_mha", text("mha")), LSE, expected={"mha.lse.extend": "once"}, floors=False)
    (problem,) = verdict.problems
    assert "mha.lse.extend" in problem and verdict.results[0].status is Status.PASSED


def test_an_expected_failure_of_no_check_is_a_problem():
    verdict = run_checks(subject("good_mha", text("mha")), LSE, expected={"mha.lsee": "once"}, floors=False)
    (problem,) = verdict.problems
    assert "mha.lsee" in problem


@pytest.mark.parametrize("entry", ["mha.lse.extend", "mha.lse.extend:", "a: once\na: twice"])
def test_an_entry_without_a_reason_or_twice_is_an_error(entry):
    with pytest.raises(ValueError, match="known"):
        read_expected(entry, "known")


def test_expected_failures_are_read_with_comments():
    assert read_expected("# why\nmha.lse.extend: base 2  # until 1.0\n", "f") == {"mha.lse.extend": "base 2"}


def test_the_reports_hold_every_check():
    verdict = run_checks(subject("base_2", BASE_2), LSE, floors=False)
    page, data = as_html(verdict), json.loads(json.dumps(as_json(verdict)))
    assert "base 2" in page and "Error by length" in page and "http" not in page.replace("http-equiv", "")
    assert data["conforms"] is False and data["claims"]["lse"] == {"failed": 1}
    assert [row["check"] for row in data["results"]] == ["mha.lse.extend", "mha.decode.one_request"]


def test_every_check_has_a_requirement_and_a_claim():
    assert all(check.requirement and check.claim and check.name.count(".") >= 1 for check in all_checks())


@pytest.mark.parametrize("name", ["mha.pages.wide", "mha.strided.wide", "mha.strides.wide", "gdn.slots.wide"])
def test_a_check_is_refused_where_address_space_is_short(name, monkeypatch):
    """Out of memory, as with ``ulimit -v``, is not a fault of the backend."""

    def too_large(*_):
        raise OSError(ENOMEM, "Cannot allocate memory")

    good = "linear" if name.startswith("gdn") else "mha"
    monkeypatch.setattr("mmap.mmap", too_large)
    result = run_check(CHECKS[name], subject("good", text(good)))
    assert result.status is Status.REFUSED and "GiB of address space" in result.message


@pytest.mark.parametrize("kind", [kind for kind in AttentionKind if kind.is_linear])
def test_a_gpu_has_room_for_states_whose_offsets_exceed_32_bits(kind):
    layers = Case((), kind=kind, linear=linear_dims(kind, 64, 64), dtype=DType.BFLOAT16, page_size=16).layers
    pool = WideStates(layers, num_slots=5, dtype=DType.BFLOAT16, device=torch.device("meta"))
    states = [one for each in pool.layer_ids for one in (pool.recurrent(each), pool.conv(each)) if one is not None]
    assert max(one.numel() for one in states) > MAX_INT32
    assert sum(one.numel() * one.element_size() for one in states) < 30 << 30


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 48, 512])
def test_no_case_has_a_negative_length(page_size):
    cases = {name: check.case(page_size, 1100) for name, check in CHECKS.items() if check.case is not None}
    assert not {name for name, case in cases.items() if any(min(each) < 0 for each in case.lengths)}


def test_the_quick_run_has_a_check_of_every_claim_of_the_layers_themselves():
    quick = {check.claim for check in all_checks() if check.quick}
    assert {"mha", "mla", "linear", "lse", "window", "cap", "sinks", "out", "trees", "graphs", "mla as mha"} <= quick
    assert {"sparse", "mla fp8_ds_mla", "float8_e4m3fn index keys", "hisparse", "compressed"} <= quick


class TestContracts:
    """D4: a dated kit. Core has contract 1.3 here, and the check of the log-sum-exp came with 1.2."""

    @pytest.fixture(autouse=True)
    def later_core(self, monkeypatch):
        monkeypatch.setattr("attnplug.declare.version.CONTRACT_VERSION", "1.3")

    @pytest.fixture
    def base_2(self):
        broken = subject("base_2", BASE_2)
        spec = replace(broken.registered.spec, contract="1.0")
        return replace(broken, registered=replace(broken.registered, spec=spec))

    @pytest.fixture
    def checks(self):
        return [replace(LSE[0], since="1.2"), LSE[1]]

    @pytest.mark.parametrize("contract", ["1.0", "1.1"])
    def test_a_check_that_came_later_is_advisory(self, contract, base_2, checks):
        verdict = run_checks(base_2, checks, floors=False, contract=contract)
        assert [result.status for result in verdict.results] == [Status.ADVISORY, Status.PASSED]
        assert verdict.holds and verdict.contract == contract
        (line,) = (line for line in lines(verdict) if line.startswith("advisory failure"))
        assert "contract 1.2" in line and "base 2" in line
        counts = ElementTree.fromstring(as_junit(verdict))
        assert (counts.get("failures"), counts.get("skipped")) == ("0", "1")

    @pytest.mark.parametrize("contract", ["1.2", "1.3", None])
    def test_it_is_required_by_its_contract_and_by_later_ones(self, contract, base_2, checks):
        verdict = run_checks(base_2, checks, floors=False, contract=contract)
        assert verdict.results[0].status is Status.FAILED and not verdict.holds
        assert verdict.contract == (contract or "1.3")

    def test_an_expected_failure_stays_one(self, base_2, checks):
        verdict = run_checks(base_2, checks, floors=False, contract="1.0", expected={checks[0].name: "known"})
        assert verdict.results[0].status is Status.EXPECTED

    @pytest.mark.parametrize(("contract", "outcome"), [("1.1", pytest.xfail.Exception), ("1.2", pytest.fail.Exception)])
    def test_in_pytest_an_advisory_failure_is_an_expected_one(self, contract, outcome, base_2, checks):
        with pytest.raises(outcome):
            assert_check(base_2, checks[0], {}, contract=contract)

    def test_the_report_names_kit_contract_backend_device_and_a_digest(self, base_2, checks):
        first, again = (run_checks(base_2, checks, floors=False, contract="1.1") for _ in range(2))
        found = as_json(first)
        assert (found["contract"], found["version"], found["device"]) == ("1.1", "0", "cpu")
        assert found["kit"] == version("attnplug-conformance") and found["place"].startswith("cpu")
        assert [result["since"] for result in found["results"]] == ["1.2", "1.0"]
        assert found["digest"] == again.digest and len(found["digest"]) == 64
        assert run_checks(base_2, checks, floors=False).digest != found["digest"]
        for report in ("\n".join(lines(first)), as_html(first), as_junit(first)):
            assert first.digest[:16] in report and str(found["kit"]) in report and "1.1" in report

    @pytest.mark.parametrize("contract", ["0.9", "1.4", "2.0", "1", "01.0", "one"])
    def test_a_contract_that_this_core_does_not_run_is_a_usage_error(self, contract, base_2):
        with raises_naming(UsageError, contract, "1.0 to 1.3"):
            required_contract(contract, base_2.registered.spec)

    def test_a_contract_older_than_the_backends_is_a_usage_error(self, base_2):
        spec = replace(base_2.registered.spec, contract="1.2")
        with raises_naming(UsageError, "1.1", "1.2"):
            required_contract("1.1", spec)
        assert required_contract("1.2", spec) == "1.2"

    def test_a_backend_of_an_older_minor_conforms_to_what_it_declares(self, base_2):
        assert run_check(CHECKS["declared.contract"], base_2).status is Status.PASSED
        other = replace(base_2.registered, spec=replace(base_2.registered.spec, contract="1.4"))
        assert run_check(CHECKS["declared.contract"], replace(base_2, registered=other)).status is Status.FAILED


def test_every_check_says_since_which_contract_it_is_required():
    """D4: a check newer than core would be required by nothing."""
    assert all(check.required_by(CONTRACT_VERSION) for check in all_checks())
