"""The code in docs/conformance.md works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from attnplug_conformance.report import lines
from attnplug_conformance.runner import Status, run_check, run_checks
from kit_subjects import CHECKS, subject, text

PAGE = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_two_lines_are_tests_of_every_check():
    names: dict[str, Any] = {}
    exec(BLOCKS[0], names)
    (parametrized,) = names["test_conforms"].pytestmark
    assert CHECKS["mha.decode.long"] in parametrized.args[1]
    names["test_enough_is_claimed"]()


def test_a_seam_runs_on_a_cpu():
    names: dict[str, Any] = {}
    exec(BLOCKS[1], names)
    subject = names["on_a_cpu"]("torch_native", "attnplug.torch_native.backend:TorchNativeBackend")
    assert run_check(CHECKS["mha.decode.long"], subject).status is Status.PASSED


def test_a_failure_looks_as_the_page_shows_it():
    broken = (
        text("mha")
        .replace("good_mha", "my_backend")
        .replace("lse[rows] = sums", "lse[rows] = sums / 0.6931471805599453")
    )
    verdict = run_checks(subject("base_2", broken), [CHECKS["mha.lse.extend"]], floors=False)
    (shown,) = re.findall(r"```\n(FAILED mha.lse.extend.*?)\n```", PAGE, re.DOTALL)
    assert shown in "\n".join(lines(verdict))


def test_the_page_knows_how_many_mutants_there_are():
    from mutants import MUTANTS

    assert f"contain {len(MUTANTS)} broken backends" in PAGE


def test_every_check_that_the_page_names_exists():
    """The page names a check in full, or by a prefix that several share."""
    for name in re.findall(r"check `([\w.]+)`", PAGE):
        assert any(f".{name}" in check for check in CHECKS), name
