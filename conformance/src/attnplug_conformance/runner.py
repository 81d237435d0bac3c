"""Runs everything that a backend claims, and says what held, what did not, and what it refused."""

from __future__ import annotations

import shlex
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import torch

from attnplug import AttentionKind, DType, ExtendPath, Feature, GraphLevel, Role
from attnplug.declare.errors import describe_error
from attnplug_conformance.case import Case
from attnplug_conformance.check import Check, Measured, Stand
from attnplug_conformance.diagnosis import Wrong
from attnplug_conformance.subject import Refused, Subject

_TORCH = f"{Path(torch.__file__).parent}/"


class Status(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    EXPECTED = "expected failure"


@dataclass(frozen=True)
class Result:
    """One check of one backend. ``words`` say what it did wrong, or why it refused."""

    check: Check
    status: Status
    words: str = ""
    case: str = ""
    seconds: float = 0.0
    measured: Sequence[Measured] = field(default=())
    lost: str = ""
    """Why nothing can run after it."""
    seed: int = 0

    def reproduce(self, subject: Subject) -> str:
        """The command that runs this check alone."""
        if subject.seam is not None:
            return f"pytest -k {self.check.name!r} (it runs {subject.seam})"
        options = [word for setting in subject.settings for word in ("--backend-option", shlex.quote(setting))]
        seed = ["--seed", str(self.seed)] if self.seed else []
        command = ["attnplug", "conform", subject.name, "--device", subject.device.type, "--check", self.check.name]
        return " ".join([*command, *options, *seed])


def run_check(check: Check, subject: Subject, seed: int = 0) -> Result:
    """Run one check. Nothing that a backend raises escapes."""
    with _one_thread(subject.device):
        return _run_check(check, subject, seed)


def _run_check(check: Check, subject: Subject, seed: int) -> Result:
    started = time.perf_counter()

    def result(status: Status, words: str = "", case: str = "", measured: Sequence[Measured] = ()) -> Result:
        lost = ""
        if status is Status.FAILED and _lost(subject.device):
            lost = f"the GPU is lost after {check.name}: it read or wrote outside of memory"
        return Result(check, status, words, case, time.perf_counter() - started, tuple(measured), lost, seed)

    if (reason := check.applies(subject)) is not None:
        return result(Status.REFUSED, reason)
    case, told = Case(()), ""
    if check.case is not None:
        try:
            case = subject.fit(replace(check.case(subject.page_size, subject.longest), seed=seed))
        except Refused as refused:
            return result(Status.REFUSED, str(refused))
        told = case.told()
    stand = Stand(subject, case)
    try:
        check.run(stand)
    except Wrong as wrong:
        return result(Status.FAILED, str(wrong), told, stand.measured)
    except Refused as refused:
        return result(Status.REFUSED, str(refused), told)
    except (Exception, SystemExit) as error:
        return result(Status.FAILED, f"it raised {describe_error(error)}{place(error)}", told, stand.measured)
    return result(Status.PASSED, "", told, stand.measured)


def place(error: BaseException) -> str:
    """Location of an exception: its last frame outside torch, which is usually the author's code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_TORCH)] or frames
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


@dataclass(frozen=True)
class Verdict:
    """All results of one backend, and what is wrong beyond them."""

    subject: Subject
    results: tuple[Result, ...]
    problems: tuple[str, ...]
    quick: bool
    seconds: float

    @property
    def holds(self) -> bool:
        return not self.problems and not any(result.status is Status.FAILED for result in self.results)

    def by_claim(self) -> dict[str, dict[Status, int]]:
        table: dict[str, dict[Status, int]] = {}
        for result in self.results:
            counts = table.setdefault(result.check.claim, dict.fromkeys(Status, 0))
            counts[result.status] += 1
        return table


FLOORS = {
    "mha": 55,
    "mla": 45,
    "linear": 15,
    "lse": 1,
    "window": 4,
    "cap": 1,
    "sinks": 2,
    "out": 1,
    "trees": 1,
    "graphs": 1,
    "mla as mha": 4,
    "sparse": 3,
    "mla fp8_ds_mla": 2,
    "fp8 index keys": 2,
    "hisparse": 3,
    "compressed": 4,
}
"""The fewest checks that must run for a claim, in a full run. A backend of one role runs half of them."""


Runner = Callable[[Sequence[Check], int], Iterator[Result]]
"""Runs checks with a seed: results in their order."""


def run_checks(
    subject: Subject,
    checks: Iterable[Check],
    *,
    quick: bool = False,
    seed: int = 0,
    expected: Mapping[str, str] | None = None,
    told: Callable[[Result], None] = lambda result: None,
    floors: bool = True,
    runner: Runner | None = None,
) -> Verdict:
    """Run checks, in order. ``expected`` are failures that are known, with a reason each: strict."""
    started = time.perf_counter()
    results, problems, known = [], [], dict(expected or {})
    kinds = {str(kind) for kind in subject.can.kinds} | {"declared"}
    chosen = [check for check in checks if (check.quick or not quick) and check.kind in kinds]
    names = {check.name for check in chosen}
    for name in known:
        if name not in names and not quick:
            problems.append(f"the expected failure {name} names no check")
    here = (run_check(check, subject, seed) for check in chosen)
    for result in here if runner is None else runner(chosen, seed):
        check = result.check
        if check.name in known:
            if result.status is Status.FAILED:
                result = replace(result, status=Status.EXPECTED, words=f"{known[check.name]} ({result.words})")
            else:
                problems.append(f"{check.name} is an expected failure, and it {result.status}; remove the entry")
        results.append(result)
        told(result)
        if result.lost:
            problems.append(f"{result.lost}; nothing else ran")
            floors = False
            break
    if floors:
        problems += floor_problems(subject, results, quick)
    return Verdict(subject, tuple(results), tuple(problems), quick, time.perf_counter() - started)


def _lost(device: torch.device) -> bool:
    """Return True if an illegal access has made the GPU unusable for this process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Run torch on one thread on a CPU: the matrices are small, and more threads wait for each other."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def floor_problems(subject: Subject, results: Sequence[Result], quick: bool) -> list[str]:
    """Claims of which too little ran: claiming nothing does not pass."""
    ran = Counter(
        result.check.claim
        for result in results
        if result.status is not Status.REFUSED and result.check.kind != "declared"
    )
    if not ran:
        return [f"nothing ran: backend {subject.name} refused every check on {subject.device.type}"]
    can, heads = subject.can, AttentionKind.MHA in subject.can.kinds
    claimed = {
        "window": heads and Feature.SLIDING_WINDOW in can.features,
        "cap": heads and Feature.LOGIT_CAP in can.features,
        "sinks": heads and Feature.SINKS in can.features,
        "sparse": Feature.SPARSE in can.features,
        "mla fp8_ds_mla": AttentionKind.MLA in can.kinds and DType.FP8_DS_MLA in can.kv_dtypes,
        "fp8 index keys": Feature.SPARSE in can.features and DType.FLOAT8_E4M3 in can.index_dtypes,
        "hisparse": "hisparse" in can.coordinators,
        "compressed": Feature.COMPRESSED in can.features,
        "lse": "lse" in can.extras,
        "out": "out" in can.extras,
        "trees": can.trees,
        "mla as mha": AttentionKind.MLA in can.kinds and bool(can.mla_extend - {ExtendPath.ABSORBED}),
        "graphs": can.cuda_graph > GraphLevel.NEVER and not quick,  # few of them are quick
    }
    kinds = {result.check.kind for result in results if result.status is not Status.REFUSED}
    problems = [
        f"nothing of the kind {kind} ran, which it claims; see what it refused"
        for kind in sorted(map(str, can.kinds))
        if kind not in kinds
    ]
    share = 4 if quick else 1 if {Role.PREFILL, Role.DECODE} <= can.roles else 2
    for claim, floor in FLOORS.items():
        fewest = max(1, floor // share)
        if (ran[claim] or claimed.get(claim, False)) and ran[claim] < fewest:
            problems.append(f"{ran[claim]} checks of the claim {claim} ran, and {fewest} must; see what it refused")
    return problems


def read_expected(text: str, source: str) -> dict[str, str]:
    """Expected failures: a line each, ``check: reason``. Raises ``ValueError`` for an entry without a reason."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        name, _, reason = (part.strip() for part in entry.partition(":"))
        if not reason:
            raise ValueError(f"{source}:{number}: {name} has no reason; write 'check: reason'")
        if name in found:
            raise ValueError(f"{source}:{number}: {name} is there twice")
        found[name] = reason
    return found
