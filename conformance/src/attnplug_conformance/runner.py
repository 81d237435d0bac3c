"""Run all checks of a backend's claims and collect passes, failures and refusals."""

from __future__ import annotations

import shlex
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from pathlib import Path

import torch

from attnplug import AttentionKind, BackendSpec, Capabilities, ExtendPath, Feature, GraphLevel, Role, UsageError
from attnplug.declare import version
from attnplug.declare.errors import describe_error
from attnplug.declare.problem import INVARIANCE
from attnplug.machine.runtime import runtime_of
from attnplug_conformance.arithmetic import watching
from attnplug_conformance.case import Case
from attnplug_conformance.check import Check, CheckContext, Measured
from attnplug_conformance.diagnosis import explain_changes
from attnplug_conformance.failure import CheckFailure
from attnplug_conformance.scene import NotATensor
from attnplug_conformance.stored_rows import coded_formats
from attnplug_conformance.subject import NotBuilt, Subject, Unclaimed

_TORCH = f"{Path(torch.__file__).parent}/"


class Status(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    EXPECTED = "expected failure"
    ADVISORY = "advisory failure"
    """Failure of a check that the contract of the run does not require."""


@dataclass(frozen=True)
class Result:
    """Result of one check. ``message`` is the diagnosis of a failure or the reasons of a refusal."""

    check: Check
    status: Status
    message: str = ""
    case: str = ""
    seconds: float = 0.0
    measured: Sequence[Measured] = field(default=())
    lost: str = ""
    """Reason why no further check can run; empty if the run can go on."""
    unbuilt: bool = False
    """True if the check failed because the backend could not be built."""
    seed: int = 0
    repeat: str = ""
    """Further arguments of the command that repeats the check: a random case."""

    def reproduce(self, subject: Subject) -> str:
        """Return the command that repeats this check."""
        if subject.seam is not None:
            case = f" --attention-{self.repeat.removeprefix('--')}" if self.repeat else ""
            return f"pytest -k {self.check.name!r}{case} (it runs {subject.seam})"
        options = [word for setting in subject.settings for word in ("--backend-option", shlex.quote(setting))]
        seed = ["--seed", str(self.seed)] if self.seed and not self.repeat else []
        command = ["attnplug", "conform", subject.name, "--device", subject.device.type]
        return " ".join([*command, self.repeat or f"--check {self.check.name}", *options, *seed])


def run_check(check: Check, subject: Subject, seed: int = 0) -> Result:
    """Run one check. Exceptions of the backend become failures."""
    with _one_thread(subject.device):
        return _run_check(check, subject, seed)


def _run_check(check: Check, subject: Subject, seed: int) -> Result:
    started = time.perf_counter()

    def result(
        status: Status,
        message: str = "",
        case: str = "",
        measured: Sequence[Measured] = (),
        unbuilt: bool = False,
        repeat: str = "",
    ) -> Result:
        lost = ""
        if status is Status.FAILED and _lost(subject.device):
            lost = f"the GPU is unusable after {check.name}: illegal memory access"
        elif status is Status.FAILED:
            message = explain_changes() or message  # all else may follow from them, and then its hint misleads
        seconds = time.perf_counter() - started
        return Result(check, status, message, case, seconds, tuple(measured), lost, unbuilt, seed, repeat)

    if (reason := check.applies(subject)) is not None:
        return result(Status.REFUSED, reason)
    case, description = Case((), seed=seed), ""
    if check.case is not None:
        try:
            case = subject.fit(replace(check.case(subject.page_size, subject.longest), seed=seed))
        except Unclaimed as refused:
            return result(Status.REFUSED, str(refused))
        description = case.describe()
    context = CheckContext(subject, case)
    with watching():
        try:
            check.run(context)
        except CheckFailure as failure:
            case_text = failure.case or description
            return result(Status.FAILED, str(failure), case_text, context.measured, repeat=failure.repeat)
        except NotATensor as failure:
            return result(Status.FAILED, str(failure), description, context.measured)
        except Unclaimed as refused:
            return result(Status.REFUSED, str(refused), description)
        except NotBuilt as error:
            return result(Status.FAILED, str(error), description, unbuilt=True)
        except (Exception, SystemExit) as error:
            message = f"it raised {describe_error(error)}{location(error)}"
            return result(Status.FAILED, message, description, context.measured)
        return result(Status.PASSED, context.note, description, context.measured)


def location(error: BaseException) -> str:
    """Location of an exception: its last frame outside torch, which is usually the author's code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_TORCH)] or frames
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


@dataclass(frozen=True)
class Verdict:
    """All results of one backend, and problems of the run as a whole."""

    subject: Subject
    results: tuple[Result, ...]
    problems: tuple[str, ...]
    quick: bool
    seconds: float
    contract: str
    """Contract whose checks are required."""

    @property
    def digest(self) -> str:
        """SHA-256 of the verdicts and problems, ordered by check. Equal verdicts have equal digests."""
        lines = sorted(f"{result.check.name}: {result.status}" for result in self.results)
        return sha256("\n".join([*lines, *self.problems]).encode()).hexdigest()

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
    "hisparse": 3,
    "compressed": 4,
    **{f"invariant {level}": 1 for level in INVARIANCE},
}
"""Minimum number of checks that must run per claim in a full run. A backend with one role needs half of it."""


def required_contract(given: str | None, spec: BackendSpec, option: str = "--contract") -> str:
    """Return the contract whose checks a run requires: ``given`` by ``option``, or the installed one.

    Raises UsageError for one that this core does not run, or that is older than the backend's.
    """
    installed = version.CONTRACT_VERSION
    if given is None:
        return installed
    if version.contract_problem(given) is not None:
        major, minor = installed.split(".")
        allowed = installed if minor == "0" or major == "0" else f"{major}.0 to {installed}"
        raise UsageError(f"{option} {given} is not a contract that this kit checks; give {allowed}")
    if (version.parse_contract(given) or ()) < (version.parse_contract(spec.contract) or ()):
        needed = f"backend {spec.name} needs contract {spec.contract}"
        raise UsageError(f"{option} {given} is too old: {needed}; give {spec.contract} or newer")
    return given


Runner = Callable[[Sequence[Check], int], Iterator[Result]]
"""Function that runs checks with a seed and yields results in order."""


def run_checks(
    subject: Subject,
    checks: Iterable[Check],
    *,
    quick: bool = False,
    seed: int = 0,
    expected: Mapping[str, str] | None = None,
    floors: bool = True,
    runner: Runner | None = None,
    contract: str | None = None,
) -> Verdict:
    """Run checks in order. ``expected`` maps known failures to reasons; one that does not fail is a problem.

    Failures of checks that ``contract``, by default the installed one, does not require are advisory.
    """
    contract = version.CONTRACT_VERSION if contract is None else contract
    started = time.perf_counter()
    results, problems, known = [], [], dict(expected or {})
    kinds = {str(kind) for kind in subject.capabilities.kinds} | {"declared"}
    chosen = [check for check in checks if (check.quick or not quick) and check.kind in kinds]
    names = {check.name for check in chosen}
    for name in known:
        if name not in names and not quick:
            problems.append(f"the expected failure {name} names no check")
    built = False
    local_results = (run_check(check, subject, seed) for check in chosen)
    for result in local_results if runner is None else runner(chosen, seed):
        check = result.check
        if check.name in known:
            if result.status is Status.FAILED:
                result = replace(result, status=Status.EXPECTED, message=f"{known[check.name]} ({result.message})")
            else:
                problems.append(f"{check.name} is an expected failure but {result.status}; remove the entry")
        elif result.status is Status.FAILED and not check.required_by(contract):
            result = replace(result, status=Status.ADVISORY)
        results.append(result)
        built |= check.case is not None and result.status is not Status.REFUSED and not result.unbuilt
        lost = result.lost
        if result.unbuilt and not built and result.status is Status.FAILED:
            lost = f"backend {subject.name} cannot be built"
        if lost:
            problems.append(f"{lost}; nothing else ran")
            floors = False
            break
    if floors:
        problems += floor_problems(subject, results, quick)
    return Verdict(subject, tuple(results), tuple(problems), quick, time.perf_counter() - started, contract)


def _lost(device: torch.device) -> bool:
    """Return True if an illegal access has made the GPU unusable for this process."""
    try:
        if (module := runtime_of(device).module) is not None:
            module.synchronize()
    except RuntimeError:
        return True
    return False


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Run torch on one thread on a CPU: the matrices are too small for more."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _claimed_formats(subject: Subject) -> dict[str, bool]:
    """Return the claims of formats whose rows have several parts, and True for each that the backend makes by name."""
    can, claims = subject.capabilities, dict[str, bool]()
    for kind in sorted({AttentionKind.MHA, AttentionKind.MLA} & can.kinds):
        for format in coded_formats(kind):
            if format.in_bytes:
                claims[f"{kind} {format}"] = can.kv_dtypes is not None and format.name in can.kv_dtypes
    if Feature.SPARSE in can.features:
        claims |= {f"{each} index keys": each.name in (can.index_dtypes or ()) for each in coded_formats("index")}
    return claims


def _trivial_levels(capabilities: Capabilities) -> set[str]:
    """Return levels that a backend keeps because it never runs two batches that differ in them."""
    captured = capabilities.cuda_graph > GraphLevel.NEVER and not all(kind.is_linear for kind in capabilities.kinds)
    verified = capabilities.max_speculative_tokens and capabilities.roles & {Role.DECODE, Role.LINEAR}
    extended = capabilities.roles & {Role.PREFILL, Role.LINEAR}
    applies = {"graph": captured, "verify": verified, "chunks": extended}
    return {level for level, can in applies.items() if not can}


def floor_problems(subject: Subject, results: Sequence[Result], quick: bool) -> list[str]:
    """Describe claims with too few checks run. A backend that refuses everything does not pass."""
    ran = Counter(
        result.check.claim
        for result in results
        if result.status is not Status.REFUSED and result.check.kind != "declared"
    )
    if not ran:
        return [f"nothing ran: backend {subject.name} refused every check on {subject.device.type}"]
    capabilities, heads = subject.capabilities, AttentionKind.MHA in subject.capabilities.kinds
    claimed = {
        "window": heads and Feature.SLIDING_WINDOW in capabilities.features,
        "cap": heads and Feature.LOGIT_CAP in capabilities.features,
        "sinks": heads and Feature.SINKS in capabilities.features,
        "sparse": Feature.SPARSE in capabilities.features,
        **_claimed_formats(subject),
        "hisparse": "hisparse" in capabilities.coordinators,
        "compressed": Feature.COMPRESSED in capabilities.features,
        "lse": "lse" in capabilities.extras,
        "out": "out" in capabilities.extras,
        "trees": capabilities.trees,
        "mla as mha": AttentionKind.MLA in capabilities.kinds and bool(capabilities.mla_extend - {ExtendPath.ABSORBED}),
        "graphs": capabilities.cuda_graph > GraphLevel.NEVER and not quick,  # the quick run has few of them
        **{f"invariant {level}": not quick for level in capabilities.invariant - _trivial_levels(capabilities)},
    }
    kinds = {result.check.kind for result in results if result.status is not Status.REFUSED}
    problems = [
        f"no check of kind {kind} ran, which the backend claims; see its refusals"
        for kind in sorted(map(str, capabilities.kinds))
        if kind not in kinds
    ]
    share = 4 if quick else 1 if {Role.PREFILL, Role.DECODE} <= capabilities.roles else 2
    for claim, floor in (FLOORS | dict.fromkeys(_claimed_formats(subject), 2)).items():
        fewest = max(1, floor // share)
        # A backend may refuse some layers if levels of invariance are requested.
        needed = claimed.get(claim, False) and not subject.invariant
        if (ran[claim] or needed) and ran[claim] < fewest:
            problems.append(
                f"{ran[claim]} checks of the claim {claim} ran, at least {fewest} must; see the backend's refusals"
            )
    return problems


def read_expected(text: str, source: str) -> dict[str, str]:
    """Parse expected failures, one line ``check: reason`` each. Raises ``ValueError`` if a reason is missing."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        name, _, reason = (part.strip() for part in entry.partition(":"))
        if not reason:
            raise ValueError(f"{source}:{number}: {name} has no reason; write 'check: reason'")
        if name in found:
            raise ValueError(f"{source}:{number}: {name} is listed twice")
        found[name] = reason
    return found
