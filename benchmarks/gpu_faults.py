"""Mutation tests of GPU-only faults: put one fault at a time into a kernel and run the tests marked ``gpu``.

    python benchmarks/gpu_faults.py --check                      check that every fault still applies; no GPU needed
    python benchmarks/gpu_faults.py [--only NAME …] [--json F]   on a GPU; minutes, less with --only

A fault is a piece of a source file and its replacement. Its package is copied, the copy is changed and put first on
``PYTHONPATH``, and a few tests run in a process of their own: the working tree stays as it is. Every selection of tests
also runs once without a fault: it must pass.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "flashinfer-python", "sgl-flash-mla", "pytest")


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    """Path from the root of the repository."""
    old: str
    """Occurs once in the file."""
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest besides ``-m gpu``."""

    @property
    def source(self) -> Path:
        """Folder to put on ``PYTHONPATH``."""
        return ROOT / self.file.partition("/src/")[0] / "src"


def _plugin(name: str) -> tuple[str, str]:
    """A plugin's package and its tests."""
    return f"plugins/{name}/src/attnplug_{name}", f"plugins/{name}/tests"


ROWS, ROW_TESTS = "core/src/attnplug/kv/triton_rows.py", "core/tests/test_kv_rows.py"
INDEX, INDEX_TESTS = "plugins/sparse/src/attnplug_sparse/index", "plugins/sparse/tests/test_index.py"
FLASHINFER, FLASHINFER_TESTS = _plugin("flashinfer_mla")
FLASHMLA, FLASHMLA_TESTS = _plugin("flashmla")
FLASHATTENTION, FLASHATTENTION_TESTS = _plugin("flashattention")
TRITON, TRITON_TESTS = _plugin("triton_mla")
LATENT, LATENT_TESTS = "engine/src/attnplug_engine/kernels/latent.py", "engine/tests/test_latent_rows.py"

# Few tests each, and the same for similar faults, since each fault recompiles its kernel.
_ONE = "\n        _write_row("  # in the kernel that writes one cache, not two
_NO_SLOT = (ROW_TESTS, "-k", "before_or_behind or without_a_slot and float32 and not triton")
_INDICES = (f"{FLASHINFER_TESTS}/test_planner.py", "-k", "row_by_row or stays_inside")
_WORK_LIST = (f"{FLASHINFER_TESTS}/test_work_list.py", "-k", "same_list and 1-16")
_PAGED = (f"{FLASHINFER_TESTS}/test_batches.py", "-k", "TestAbsorbed and test_decode and 16-64")
_RAGGED = (f"{FLASHINFER_TESTS}/test_batches.py", "-k", "three_paths and chunked-16-64")
_PAGES = (f"{FLASHMLA_TESTS}/test_planner.py", "-k", "64-2 or 128-7 or stays_inside")
_PARTS = (f"{FLASHATTENTION_TESTS}/test_kv_splits.py", "-k", "TestTables")
_MERGE = (f"{FLASHATTENTION_TESTS}/test_kv_splits.py", "-k", "TestMerge and launch")
_PLAN = (f"{TRITON_TESTS}/test_schedule.py", "-k", "last_of_their_request or plain or 0-0-False")
_LOW = (f"{TRITON_TESTS}/test_batches.py", "-k", "TestMatrix and test_decode and 5-16-64")
_WIDE = (f"{TRITON_TESTS}/test_batches.py", "-k", "TestMatrix and test_decode and 60-128-64")
_LONG = (f"{TRITON_TESTS}/test_batches.py", "-k", "thousandfold and decode")
"""Enough steps per program for a page lookup ahead."""
_LAST = (f"{TRITON_TESTS}/test_batches.py", "-k", "ways_to_cut and extend and plain")
_EARLY = f"{TRITON_TESTS}/test_batches.py"
_SPARSE = (INDEX_TESTS, "-k", "float64")
_WAIT_IN_GLUON = "            gdc_wait()  # for queries and cache rows; schedule and page table are older\n"
_WITHOUT = "            pass\n"

FAULTS = (
    Fault(
        "core: slot -1 is written", ROWS, f"if (slot >= 0) & (slot < limit):{_ONE}", f"if slot < limit:{_ONE}", _NO_SLOT
    ),
    Fault("core: a slot after the last is written", ROWS, f"slot < limit):{_ONE}", f"slot <= limit):{_ONE}", _NO_SLOT),
    Fault(
        "core: the page of the slot behind",
        ROWS,
        "slot // PAGE_SIZE * PAGE_STRIDE",
        "(slot + 1) // PAGE_SIZE * PAGE_STRIDE",
        _NO_SLOT,
    ),
    Fault(
        "flashinfer_mla: a begun page is left out",
        f"{FLASHINFER}/triton_kernels.py",
        "(kv_len + page_size - 1) // page_size, width)",
        "kv_len // page_size, width)",
        _INDICES,
    ),
    Fault(
        "flashinfer_mla: new rows one further",
        f"{FLASHINFER}/triton_kernels.py",
        "position = kv_len - new + place",
        "position = kv_len - new + place + 1",
        _INDICES,
    ),
    Fault(
        "flashinfer_mla: stretches one step further",
        f"{FLASHINFER}/triton_kernels.py",
        "tl.maximum(me * length - start, 0) * STEP, 0)",
        "tl.maximum(me * length - start + 1, 0) * STEP, 0)",
        _WORK_LIST,
    ),
    Fault(
        "flashmla: a begun page is left out",
        f"{FLASHMLA}/triton_kernels.py",
        "pages = (kv_len + PAGE - 1) // PAGE",
        "pages = kv_len // PAGE",
        _PAGES,
    ),
    Fault(
        "flashmla: new rows one further",
        f"{FLASHMLA}/triton_kernels.py",
        "position = asked - QUERIES + query",
        "position = asked - QUERIES + query + 1",
        _PAGES,
    ),
    Fault(
        "flashattention: a part begins one page further",
        f"{FLASHATTENTION}/triton_kernels.py",
        "page = begin + place",
        "page = begin + place + 1",
        _PARTS,
    ),
    Fault(
        "flashattention: new rows one further",
        f"{FLASHATTENTION}/triton_kernels.py",
        "- queries + row % queries",
        "- queries + row % queries + 1",
        _PARTS,
    ),
    Fault(
        "flashattention: parts are merged in base 2",
        f"{FLASHATTENTION}/triton_kernels.py",
        "base + tl.log(divisor)",
        "base + tl.log2(divisor)",
        _MERGE,
    ),
    Fault(
        "schedule: the column of the row behind",
        f"{INDEX}/triton_schedule.py",
        "column = position // PAGE_SIZE",
        "column = (position + 1) // PAGE_SIZE",
        _PLAN,
    ),
    Fault(
        "schedule: a begun step is left out",
        f"{INDEX}/triton_schedule.py",
        "units = tl.maximum((kv_len + STEP - 1) // STEP, 1)",
        "units = tl.maximum(kv_len // STEP, 1)",
        _PLAN,
    ),
    Fault(
        "triton_mla, low: the page of the step before",
        f"{TRITON}/gluon_low.py",
        "            token += 2 * STEP\n",
        "            token += STEP\n",
        _LONG,
    ),
    Fault(
        "triton_mla, wide: the page of the step before",
        f"{TRITON}/gluon_wide.py",
        "next_at, ahead = table + (first + STEP) // PAGE_SIZE",
        "next_at, ahead = table + first // PAGE_SIZE",
        _WIDE,
    ),
    Fault(
        "index: a token does not see itself",
        f"{INDEX}/triton_score.py",
        "visible = token[:, None] < seen[None, :]",
        "visible = token[:, None] + 1 < seen[None, :]",
        _SPARSE,
    ),
    Fault(
        "top-k: scores equal to the threshold are left out",
        f"{INDEX}/triton_topk.py",
        "(values > low).to(tl.int32) + equal * all_of_them, equal * (1 - all_of_them)",
        "(values > low).to(tl.int32), equal * 0",
        _SPARSE,
    ),
    Fault(
        "triton_mla, low: a log-sum-exp in base 2",
        f"{TRITON}/gluon_low.py",
        "log2 * LN_2, mask=live)",
        "log2, mask=live)",
        _LOW,
    ),
    Fault(
        "triton_mla, wide: a log-sum-exp in base 2",
        f"{TRITON}/gluon_wide.py",
        "log2 * LN_2, mask=live)",
        "log2, mask=live)",
        _WIDE,
    ),
    Fault(
        "triton_mla, merge: a log-sum-exp in base 2",
        f"{TRITON}/triton_merge.py",
        'tl.where(top == float("-inf"), 0.0, top), total) * LN_2)',
        'tl.where(top == float("-inf"), 0.0, top), total))',
        _LOW,
    ),
    Fault(
        "triton_mla, last: a log-sum-exp in base 2",
        f"{TRITON}/triton_merge.py",
        "log2_sum(base, total) * LN_2, mask=live)",
        "log2_sum(base, total), mask=live)",
        _LAST,
    ),
    Fault(
        "core: rows are written before they arrived",
        ROWS,
        "        gdc_wait()  # for the kernels that wrote slots and rows\n",
        "",
        (_EARLY, "-k", "launched_early and low"),
    ),
    Fault(
        "engine: a cache row of padding is stored",
        LATENT,
        "kept = (place >= 0) & (place < limit)",
        "kept = place < limit",
        (LATENT_TESTS, "-k", "nowhere_else"),
    ),
    Fault(
        "engine: a cache row after the last is stored",
        LATENT,
        "kept = (place >= 0) & (place < limit)",
        "kept = (place >= 0) & (place <= limit)",
        (LATENT_TESTS, "-k", "nowhere_else"),
    ),
    Fault(
        "engine: queries are absorbed before they arrived",
        LATENT,
        "        gdc_wait()\n    start",
        "        pass\n    start",
        (LATENT_TESTS, "-k", "late_kernel_made"),
    ),
    Fault(
        "triton_mla, low: rows are read before they arrived",
        f"{TRITON}/gluon_low.py",
        _WAIT_IN_GLUON,
        _WITHOUT,
        (_EARLY, "-k", "launched_early and low"),
    ),
    Fault(
        "triton_mla, wide: rows are read before they arrived",
        f"{TRITON}/gluon_wide.py",
        _WAIT_IN_GLUON,
        _WITHOUT,
        (_EARLY, "-k", "launched_early and wide"),
    ),
    Fault(
        "triton_mla, triton: rows are read before they arrived",
        f"{TRITON}/triton_attention.py",
        "            gdc_wait()\n        by = scale\n",
        "            pass\n        by = scale\n",
        (_EARLY, "-k", "launched_early and not low and not wide"),
    ),
    Fault(
        "triton_mla, merge: parts are read before they arrived",
        f"{TRITON}/triton_merge.py",
        "            gdc_wait()\n        tops = ",
        "            pass\n        tops = ",
        (_EARLY, "-k", "launched_early and low"),
    ),
    # FlashInfer compiles for a minute at its first use on a machine: these come last.
    Fault(
        "flashinfer_mla: a paged log-sum-exp in base 2",
        f"{FLASHINFER}/kernels.py",
        "                return_lse=lse is not None,\n                return_lse_base_on_e=True,\n",
        "                return_lse=lse is not None,\n                return_lse_base_on_e=False,\n",
        _PAGED,
    ),
    Fault(
        "flashinfer_mla: a ragged log-sum-exp in base 2",
        f"{FLASHINFER}/kernels.py",
        "            lse.mul_(_LN_2)  # base 2 → natural log (C4)\n",
        "            pass\n",
        _RAGGED,
    ),
)


def stale() -> list[str]:
    """Problems of the faults themselves: text that does not occur exactly once, tests that do not exist."""
    found = []
    for fault in FAULTS:
        times = (ROOT / fault.file).read_text().count(fault.old)
        if times != 1:
            found.append(f"{fault.name}: {fault.old!r} occurs {times} times in {fault.file}, not once")
        if not (ROOT / fault.tests[0]).is_file():
            found.append(f"{fault.name}: there is no {fault.tests[0]}")
    names = [fault.name for fault in FAULTS]
    return found + [f"two faults are called {name!r}" for name in sorted({n for n in names if names.count(n) > 1})]


def run(tests: tuple[str, ...], sources: list[Path], timeout: float) -> dict[str, Any]:
    """``passed``, ``failed``, ``nothing selected`` or ``timed out``, the seconds, and pytest's output."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
    path = os.pathsep.join(map(str, [*sources, os.environ.get("PYTHONPATH", "")]))
    started, outcomes = time.monotonic(), {0: "passed", 1: "failed", 5: "nothing selected"}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"outcome": "timed out", "seconds": round(time.monotonic() - started, 1), "said": f"after {timeout} s"}
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line and not line.startswith("SKIPPED")]
    # A process killed by an illegal memory access counts as failed.
    outcome = outcomes.get(done.returncode, f"exit {done.returncode}")
    if outcome == "passed" and not any(" passed" in line for line in lines[-3:]):
        outcome = "nothing selected"  # all tests were skipped
    said = [line[:250] for line in lines if line.startswith(("FAILED", "ERROR"))][:1] + lines[-1:]
    return {"outcome": outcome, "seconds": round(time.monotonic() - started, 1), "said": " | ".join(said)}


def with_fault(fault: Fault, sources: list[Path], timeout: float) -> dict[str, Any]:
    """The outcome of a fault's tests, with a changed copy of its package first on the path."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(fault.source, Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__")))
        file = copy / Path(fault.file).relative_to(fault.source.relative_to(ROOT))
        file.write_text(file.read_text().replace(fault.old, fault.new))
        return run(fault.tests, [copy, *sources], timeout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only look whether the faults fit the source")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="faults whose name contains one of these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    parser.add_argument("--commit", help="of the working tree, where that cannot be asked")
    parser.add_argument("--jobs", type=int, default=4, help="selections at a time (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one selection of tests")
    arguments = parser.parse_args()
    if problems := stale():
        print("\n".join(problems), file=sys.stderr)
        return 1
    if arguments.check:
        print(f"{len(FAULTS)} faults fit the source")
        return 0
    from gpu_report import Report, describe  # imports torch

    about = describe("faults that only a GPU sees: do the tests marked gpu find them?", PACKAGES, arguments.commit)
    report = Report(arguments.json, {**about, "without_fault": {}, "faults": {}})
    sources = [ROOT / "core" / "src", ROOT / "engine" / "src", *sorted(ROOT.glob("plugins/*/src"))]
    faults = [f for f in FAULTS if not arguments.only or any(part in f.name for part in arguments.only)]
    selections = dict.fromkeys(fault.tests for fault in faults)
    missed = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        clean = pool.map(lambda tests: run(tests, sources, arguments.timeout), selections)
        outcomes = pool.map(lambda fault: with_fault(fault, sources, arguments.timeout), faults)
        control = {" ".join(tests): outcome for tests, outcome in zip(selections, clean, strict=True)}
        report.put("without_fault", control)
        for fault, found in zip(faults, outcomes, strict=True):
            selection = " ".join(fault.tests)
            red = found["outcome"] not in ("passed", "nothing selected")
            found["seen"] = red and control[selection]["outcome"] == "passed"
            if not found["seen"]:
                missed.append(fault.name)
            report.put("faults", {**report.found["faults"], fault.name: {**found, "tests": selection}})
            print(f"{'seen' if found['seen'] else 'MISSED':6} {found['seconds']:6.1f} s  {fault.name}", flush=True)
            if control[selection]["outcome"] != "passed":
                print(
                    f"       without the fault: {control[selection]['outcome']}: {control[selection]['said']}",
                    flush=True,
                )
    report.put("missed", missed)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
