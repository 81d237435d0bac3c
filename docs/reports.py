"""Writes docs/conformance: every backend of this repository by the conformance kit, on a CPU.

Where kernels need a GPU, stand-ins of the backends' own tests are in their place, and the report says so. A report of a
GPU is written by ``attnplug conform NAME --device cuda --report docs/conformance/NAME-h200.json``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

from attnplug_conformance import Subject
from attnplug_conformance.catalog import all_checks
from attnplug_conformance.report import as_json, summary
from attnplug_conformance.runner import run_checks

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "conformance"


def subjects() -> list[Subject]:
    """What the packages' own tests prove."""
    os.environ["TRITON_INTERPRET"] = "1"
    tests = [ROOT / "core" / "tests", *sorted(ROOT.glob("plugins/*/tests"))]
    sys.path[:0] = map(str, tests)
    found = []
    for folder in tests:
        spec = importlib.util.spec_from_file_location(f"of_{folder.parent.name}", folder / "test_conformance.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += module.SUBJECTS
    return found


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for subject in subjects():
        verdict = run_checks(subject, all_checks())
        told = as_json(verdict)
        told["results"] = [row for row in told["results"] if row["status"] != "passed"]
        (FOLDER / f"{subject.name}-cpu.json").write_text(json.dumps(told, indent=1) + "\n")
        sys.stderr.write(f"{summary(verdict)}\n")


if __name__ == "__main__":
    main()
