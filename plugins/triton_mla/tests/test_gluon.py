"""``gluon_low`` and ``gluon_wide`` in an interpreter on a CPU, against float64. ``gluon_ragged``: ``test_ragged``.

NaN is in every cache row that must not be read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attnplug import ForwardMode
from attnplug.host import MLADims
from attnplug_conformance.failure import CheckFailure
from attnplug_testing.devices import INTERPRETED
from attnplug_testing.gluon_interpreter import GluonError, interpreted, mutant
from attnplug_testing.kernel_scene import KernelCase, mla
from attnplug_testing.references import triton_mla
from attnplug_testing.sparse_scene import SparseStage, sparse
from attnplug_triton_mla import attention, gluon_low, gluon_wide
from attnplug_triton_mla.configurations import MLAKernelConfig

pytestmark = INTERPRETED

DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
LOW = MLAKernelConfig(16, 32, 4, 3, "low", start_steps=1, merge_columns=512)
WIDE = MLAKernelConfig(64, 64, 8, 2, "wide", start_steps=1, merge_columns=512)
MODULES = {"low": gluon_low, "wide": gluon_wide}
both = pytest.mark.parametrize("config", [LOW, WIDE], ids=["low", "wide"])


def check(
    case: KernelCase,
    config: MLAKernelConfig,
    monkeypatch: pytest.MonkeyPatch,
    seed: int = 0,
    module: Any = None,
) -> None:
    name = f"attend_{config.kernel}"
    kernel = getattr(module or MODULES[config.kernel], name)
    monkeypatch.setattr(attention, name, interpreted(kernel, seed))
    triton_mla.check(case, "cpu", lambda *_, **__: config)


CASES = {
    "one step": mla(((5, 1),), DECODE),
    "one request, split": mla(((700, 1),), DECODE, heads=4),
    "many lengths": mla(((600, 1), (3, 1), (100, 1), (31, 1), (0, 1)), DECODE, heads=2),
    "pages of one row": mla(((90, 1), (33, 1)), DECODE, 1, 4),
    "pages longer than a step": mla(((300, 1), (64, 1)), DECODE, 128, 4),
    "several tiles": mla(((70, 3), (7, 3)), VERIFY, heads=24),
    "no rope": mla(((90, 1), (5, 1)), DECODE, heads=8, dims=MLADims(64, 16, 0)),
    "log-sum-exp": mla(((90, 2), (5, 2)), VERIFY, heads=4, lse=True),
}


@both
@pytest.mark.parametrize("name", CASES)
def test_interpreted_results_are_those_of_float64(name, config, monkeypatch):
    """C1, C4"""
    check(CASES[name], config, monkeypatch)


@both
@pytest.mark.parametrize("page_size", [1, 16])
def test_interpreted_results_of_selected_rows(config, page_size, monkeypatch):
    """A10"""
    name = f"attend_{config.kernel}"
    monkeypatch.setattr(attention, name, interpreted(getattr(MODULES[config.kernel], name), 0))
    case = sparse(((33, 1), (0, 5), (64, 1), (2, 1)), ForwardMode.MIXED, page_size=page_size, topk=40)
    SparseStage(case, "cpu", lambda context: triton_mla.build(context, lambda *_, **__: config)).check()


def test_interpreted_splits_at_absolute_positions(monkeypatch):
    config = replace(WIDE, split=64, grows=True)
    check(mla(((700, 1), (30, 1)), DECODE, heads=4), config, monkeypatch)


@both
@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_interpreted_results_with_other_schedules(config, seed, monkeypatch):
    check(CASES["many lengths"], config, monkeypatch, seed)


ERRORS = {
    "low: rows are read during their copy": (LOW, "wait_group(BUFFERS - 2)", "wait_group(BUFFERS - 1)"),
    "low: rows are copied over those that are read": (
        LOW,
        "            top, total, sums = _add_step(logits, values,",
        "            top, total, sums = _add_step(logits, rows_shared.index(buffer).load(RIGHT),",
    ),
    "low: a token behind the last query": (LOW, "prefix + row // HEADS + 1, kv_len", "prefix + row + 2, kv_len + 1"),
    "wide: rows are read during their copy": (WIDE, "async_copy.wait_group(0)\n            fence", "fence"),
    "wide: rows are copied over those that are read": (WIDE, "2 if ROPE > 0 else 1, deps=(added,)", "3, deps=()"),
}  # fmt: skip
"""A configuration, and an error in the kernel's source."""


def check_schedules(config: MLAKernelConfig, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    for seed in range(6):
        check(CASES["one request, split"], config, monkeypatch, seed, module)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_in_the_kernels_are_found(name, tmp_path, monkeypatch):
    """As a wrong result or a race, with one of six schedules."""
    config, correct, wrong = ERRORS[name]
    module = mutant(MODULES[config.kernel], correct, wrong, tmp_path)
    with pytest.raises((GluonError, CheckFailure)):
        check_schedules(config, monkeypatch, module)
