"""Write docs/conformance: the conformance kit's report on every backend of this repository.

python docs/reports.py            on a CPU; kernels that need a GPU are replaced by the stand-ins of the backends' own
                                  tests, and the report says so
python docs/reports.py cuda       on a GPU: every installed backend that runs there, checks in eight processes
python docs/reports.py cuda NAME  only the named backends
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from attnplug.host import load_registry
from attnplug_conformance import Subject
from attnplug_conformance.catalog import all_checks
from attnplug_conformance.processes import in_processes
from attnplug_conformance.report import as_json, lines
from attnplug_conformance.runner import Status, run_checks
from attnplug_conformance.testing import subject_of

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "conformance"


def on_a_cpu() -> list[Subject]:
    """Return the subjects that the packages' own tests verify."""
    tests = [ROOT / "core/tests/test_conformance.py", *sorted(ROOT.glob("plugins/*/tests/test_conformance.py"))]
    sys.path[:0] = [str(path.parent) for path in tests]
    importlib.import_module("attnplug_testing.triton_mode").settle_triton()
    found = []
    for path in tests:
        spec = importlib.util.spec_from_file_location(f"of_{path.parent.parent.name}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += module.SUBJECTS
    return found


def main(device: str = "cpu", *names: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    subjects = (
        on_a_cpu() if device == "cpu" else [subject_of(name, device) for name in names or load_registry().backends]
    )
    for subject in subjects:
        verdict = run_checks(subject, all_checks(), runner=in_processes(8, subject) if device != "cpu" else None)
        report = as_json(verdict)
        report["results"] = [row for row in report["results"] if row["status"] in (Status.FAILED, Status.EXPECTED)]
        if any("nothing ran" in problem for problem in verdict.problems):
            sys.stderr.write(f"{verdict.problems[0]}\n")
            continue
        (FOLDER / f"{subject.name}-{device}.json").write_text(json.dumps(report, indent=1) + "\n")
        sys.stderr.writelines(f"{line}\n" for line in lines(verdict) if not line.startswith("  "))


if __name__ == "__main__":
    main(*sys.argv[1:])
