"""The versions of FlashInfer that the plugin claims take the same calls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from attnplug_flashinfer_mla import kernels

ROOT = Path(__file__).resolve().parents[3]
VERSION_VARIABLE = "ATTNPLUG_TEST_FLASHINFER"
PLAIN = [option for plugin in ("cacheprovider", "hypothesispytest") for option in ("-p", f"no:{plugin}")]
"""For a pytest that starts in half the time."""
(UNPACKED,) = re.findall(r"^FLASHINFER := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)

READ_FLASHINFER = ("signatures", "cutlass_calls", "mla_scheduler", "jit_modules", "versions")
"""Tests whose result depends on FlashInfer's version."""


def test_this_is_the_version_it_should_be() -> None:
    if VERSION_VARIABLE not in os.environ:
        pytest.skip("any version that is installed")
    assert kernels.load_library().version == os.environ[VERSION_VARIABLE]


def test_the_unpacked_versions_are_the_ends_of_what_the_plugin_claims() -> None:
    project = tomllib.loads((ROOT / "plugins/flashinfer_mla/pyproject.toml").read_text())["project"]
    (claimed,) = (Requirement(text) for text in project["dependencies"] if text.startswith("flashinfer-python"))
    oldest, newest = UNPACKED.split()
    assert claimed.specifier.contains(newest)
    assert f">={oldest}" in str(claimed.specifier).split(",")


@pytest.mark.long
@pytest.mark.skipif(VERSION_VARIABLE in os.environ, reason="this is such a version")
@pytest.mark.parametrize("version", UNPACKED.split())
def test_other_versions_take_the_same_calls(version: str) -> None:
    """Run these tests against another FlashInfer, unpacked by ``make test`` in addition to the installed one."""
    unpacked = Path(sys.prefix) / "flashinfer" / version
    if not unpacked.is_dir():
        pytest.skip(f"there is no {unpacked}; make test unpacks it")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join(filter(None, (str(unpacked), os.environ.get("PYTHONPATH"))))
    paths = [Path(__file__).with_name(f"test_{name}.py") for name in READ_FLASHINFER]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *PLAIN, *paths],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": path, VERSION_VARIABLE: version},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
