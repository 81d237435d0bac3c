"""Random cases of the kit: reachable sizes and features, text form, shrinking, budget, and commands that repeat one."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from functools import cache

import pytest
import torch

from attnplug import AttentionKind, CacheLayout, DType, ForwardMode, UsageError
from attnplug.cli.app import parse, run
from attnplug_conformance.check import Check
from attnplug_conformance.checks import random as random_check
from attnplug_conformance.draw import draw
from attnplug_conformance.random_case import Way, fit, from_text, to_text
from attnplug_conformance.report import lines
from attnplug_conformance.runner import Status, run_check, run_checks
from attnplug_conformance.shrink import PASSES, shrink
from kit_subjects import CHECKS, subject, text

MHA, MLA = AttentionKind.MHA, AttentionKind.MLA
FP8 = DType.FLOAT8_E4M3


@cache
def drawn_cases(good, kind, number=300):
    backend = subject(f"drawn_{good}", text(good))
    return [case for index in range(number) if (case := draw(backend, kind, 0, index, 0.16)) is not None]


def totals(drawn):
    return [sum(each) for each in drawn.case.lengths]


def new(drawn):
    return [count for _, count in drawn.case.lengths]


def differ(drawn):
    return (
        drawn.case.kv_dtype not in (None, drawn.case.dtype)
        and drawn.case.kv_dtype in list(DType)
        and drawn.case.kv_dtype != FP8
    )


REACHED = {
    "more than 3 KV heads": lambda d: d.case.kv_heads > 3,
    "groups of more than 16": lambda d: d.case.group > 16,
    "more than 256 rows of a request": lambda d: max(new(d)) > 256,
    "more than 512 rows of a batch": lambda d: sum(new(d)) > 512,
    "more than 128 requests": lambda d: len(new(d)) > 128,
    "windows of 64 and more that hide rows": lambda d: d.case.window and 64 <= d.case.window < max(totals(d)),
    "one row and a long prefix in a mixed batch": lambda d: (
        d.case.mode is ForwardMode.MIXED and max(new(d)) > 1 and any(b > 256 and n == 1 for b, n in d.case.lengths)
    ),
    "contexts of more than 4,000 rows in bfloat16": lambda d: d.case.dtype is DType.BFLOAT16 and max(totals(d)) > 4000,
    "shared pages": lambda d: any(d.case.shared),
    "unused entries of -1": lambda d: d.case.unused == -1,
    "activations and cache of two dtypes": differ,
    "fp8 and a verify": lambda d: d.case.kv_dtype == FP8 and d.case.mode is ForwardMode.TARGET_VERIFY,
    "fp8 and a window": lambda d: d.case.kv_dtype == FP8 and d.case.window,
    "fp8 and sinks": lambda d: d.case.kv_dtype == FP8 and d.case.sinks,
    "fp8 and a log-sum-exp": lambda d: d.case.kv_dtype == FP8 and d.lse,
    "several ranks": lambda d: d.case.ranks > 1,
    "several captured shapes": lambda d: len(d.shapes) > 1,
    "trees written after planning": lambda d: d.late_tree,
    "trees of a captured batch written after planning": lambda d: d.late_tree and d.way is Way.CAPTURED,
    "a refused batch between two others": lambda d: d.refused,
    "two modes on one backend": lambda d: d.second is not None,
    "lanes": lambda d: d.way is Way.LANES,
    "upper bounds": lambda d: not d.case.exact,
    "padded requests": lambda d: d.case.padded_requests,
    "strides": lambda d: d.strided,
    "other layouts": lambda d: d.case.layout is CacheLayout.STRIDED,
    "far pages": lambda d: d.case.pages == "far",
    "logit caps": lambda d: d.case.cap,
    "large inputs": lambda d: d.case.magnitude > 1,
    **{
        f"mode {mode}": lambda d, mode=mode: d.case.mode is mode for mode in ForwardMode if mode is not ForwardMode.IDLE
    },
}
REACHED_MLA = {
    "rank 512": lambda d: d.case.mla.kv_lora_rank == 512,
    "more than 64 heads": lambda d: d.case.mla_heads > 64,
    "fp8_ds_mla": lambda d: d.case.kv_dtype == "fp8_ds_mla",
    **{f"path {path}": lambda d, path=path: d.path == path for path in ("absorbed", "one_shot", "chunked")},
}


@pytest.mark.parametrize("name", REACHED)
def test_the_generator_reaches(name):
    assert any(REACHED[name](drawn) for drawn in drawn_cases("mha", MHA))


@pytest.mark.parametrize("name", REACHED_MLA)
def test_the_generator_reaches_of_mla(name):
    assert any(REACHED_MLA[name](drawn) for drawn in drawn_cases("mla", MLA, 100))


def test_the_same_seed_gives_the_same_cases_and_another_one_others():
    backend = subject("seeded", text("mha"))
    one, again, other = ([draw(backend, MHA, seed, index, 0.1) for index in range(5)] for seed in (7, 7, 8))
    assert one == again != other


def test_a_case_is_what_its_text_says():
    backend = subject("written", text("mha"))
    cases = drawn_cases("mha", MHA) + drawn_cases("mla", MLA, 100)
    assert all(fit(backend, from_text(to_text(drawn))) == drawn for drawn in drawn_cases("mha", MHA)[:60])
    assert all(from_text(to_text(drawn)).seconds > 0 for drawn in cases[-60:])


@pytest.mark.parametrize(
    "given", ["", "[]", '{"mode": "decode"}', '{"lengths": [], "colour": 1}', '{"lengths": [], "mode": 3}']
)
def test_another_text_is_an_error(given):
    with pytest.raises(ValueError):
        from_text(given)


def test_shrinking_finds_the_smallest_case_and_is_deterministic():
    backend = subject("shrunk", text("mha"))

    def fails(drawn):
        return drawn.case.kv_heads > 3 and any(before >= 20 for before, _ in drawn.case.lengths)

    start = next(d for d in drawn_cases("mha", MHA) if d.way is not Way.CAPTURED and len(new(d)) > 3 and fails(d))
    small = shrink(start, lambda drawn: fit(backend, drawn), fails, PASSES)
    assert small == shrink(start, lambda drawn: fit(backend, drawn), fails, PASSES)
    case = small.case
    assert (case.kv_heads, case.group, case.lengths, small.way) == (4, 1, ((20, 1),), Way.RUN)
    assert (case.window, case.cap, case.unused, case.kv_dtype, case.ranks) == (None, None, None, None, 1)


BROKEN = text("mha").replace(
    "group = q.shape[1] // keys.shape[1]", "group = q.shape[1] // keys.shape[1]; q = q / (1 + (keys.shape[1] > 3))"
)


def test_a_failure_prints_its_seed_and_a_case_that_repeats_it():
    broken = replace(subject("broken_heads", BROKEN), budget=10.0)
    verdict = run_checks(broken, [CHECKS["mha.random"]], floors=False, seed=3)
    (result,) = verdict.results
    assert result.status is Status.FAILED and "seed 3" in result.message
    repeat = next(line for line in lines(verdict) if "repeat:" in line)
    words = shlex.split(repeat)
    case = words[words.index("--case") + 1]
    assert from_text(case).case.kv_heads == 4 and "--check" not in words
    again = run_check(CHECKS["mha.random"], replace(broken, random_case=case))
    assert again.status is Status.FAILED and again.case == result.case
    good = run_check(CHECKS["mha.random"], replace(subject("whole_heads", text("mha")), random_case=case))
    assert good.status is Status.PASSED


@pytest.mark.parametrize("slow", [0, 0.004])
def test_the_budget_is_kept_also_by_slow_backends(slow):
    burn = f"__import__('attnplug_conformance').burn({slow}); " if slow else ""
    import attnplug_conformance

    def spin(seconds):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    attnplug_conformance.burn = spin
    source = text("mha").replace(
        "slots = work.cache_slots(request, length)", f"{burn}slots = work.cache_slots(request, length)"
    )
    started = time.process_time()
    result = run_check(CHECKS["mha.random"], replace(subject("timed", source), budget=0.6), 1)
    spent = time.process_time() - started
    assert result.status is Status.PASSED and "random cases" in result.message and "seed 1" in result.message
    assert 0.6 * 0.7 <= spent <= 0.6 * 1.3


def test_scores_that_are_all_zero_are_no_failure():
    """Found by random cases: if a token sees one row with a score of 0, a relative error is undefined."""
    case = '{"lengths": [[0, 5]], "kind": "mla", "page_size": 16, "mla": [128, 32, 64], "mla_heads": 1, '
    case += '"dtype": "float32", "pages": "contiguous", "index": [8, 16, 11, null], "seed": 54032}'
    result = run_check(CHECKS["mla.random"], replace(subject("zeros", text("sparse")), random_case=case))
    assert result.status is Status.PASSED


def test_no_budget_means_no_random_cases():
    result = run_check(CHECKS["mha.random"], replace(subject("unfunded", text("mha")), budget=0))
    assert result.status is Status.REFUSED and not result.measured


def conform(*words):
    return run(parse(["conform", "torch_native", "--device", "cpu", *words]))


def test_the_command_takes_a_budget_and_a_case(capsys):
    assert conform("--check", "mha.random", "--budget", "0.2", "--seed", "5") == 0
    assert "seed 5" in capsys.readouterr().out
    assert conform("--case", '{"lengths": [[3, 1]], "mode": "decode"}') == 0
    assert "1 passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--budget", "-1"], ["--case", "{"], ["--case", '{"lengths": []}', "--check", "mha"]]
)
def test_a_mistake_in_the_command_is_a_usage_error(words):
    with pytest.raises(UsageError) as error:
        conform(*words)
    assert words[0] in str(error.value)


def test_every_kind_has_random_cases():
    checks = [check for check in CHECKS.values() if check.claim == "random"]
    assert {check.kind for check in checks} == set(map(str, AttentionKind)) and all(
        isinstance(c, Check) for c in checks
    )


def test_a_first_case_that_compiles_does_not_end_the_drawing():
    """On a GPU, the first case takes seconds longer than its estimate: start of CUDA, and compilation."""
    clock = random_check._Clock(torch.device("cuda"), 40.0)
    clock.record(estimated=0.001, measured=3.4)
    assert not clock.affords(0.01) and any(clock.affords(0.01) for _ in range(9))
    on_cpu = random_check._Clock(torch.device("cpu"), 40.0)
    on_cpu.record(estimated=0.001, measured=3.4)
    assert not any(on_cpu.affords(0.01) for _ in range(9))
