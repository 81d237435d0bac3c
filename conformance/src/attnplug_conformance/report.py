"""Reports of a conformance run: console text, JSON, JUnit XML, and a self-contained HTML page."""

from __future__ import annotations

import html
import platform
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from statistics import median
from xml.etree.ElementTree import Element, SubElement, indent, tostring

import torch

from attnplug.declare.installed import installed_version
from attnplug.machine.runtime import runtime_of
from attnplug_conformance.check import Measured
from attnplug_conformance.runner import Result, Status, Verdict

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #1d2430 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top }
tr { border-bottom: 1px solid #e3e7ee } code { font-size: .85em }
.passed { color: #17693a } .failed { color: #b3261e; font-weight: 600 }
.refused { color: #6b7483 } .expected, .advisory { color: #8a5a00 }
"""


_MAX_NAMES = 8
"""Maximum number of further checks with the same failure that the console report names."""


def environment(verdict: Verdict) -> str:
    """Describe the device, software versions and, if any, the reference kernels of a run."""
    device = verdict.subject.device
    name = "cpu" if device.type == "cpu" else runtime_of(device).processor(device).name
    seam = "" if verdict.subject.seam is None else f", {verdict.subject.seam}"
    return f"{name}{seam}, torch {torch.__version__}, Python {platform.python_version()}"


def kit(verdict: Verdict) -> str:
    """Describe the kit of a run: its version, the contract whose checks are required, and the digest of results."""
    return f"kit {_kit_version()}, contract {verdict.contract}, digest {verdict.digest[:16]}"


def _kit_version() -> str:
    return installed_version("attnplug-conformance") or "unknown"


def lines(verdict: Verdict) -> Iterator[str]:
    """Yield the lines of the console report."""
    subject = verdict.subject
    yield f"{subject.name} ({subject.registered.source}) on {environment(verdict)}"
    yield kit(verdict)
    for claim, counts in verdict.by_claim().items():
        counted = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        yield f"  {claim:<16} {counted}"
    for result in verdict.results:
        if result.status is Status.PASSED and result.message:
            yield f"  {result.check.name}: {result.message}"
    refused = Counter(result.message for result in verdict.results if result.status is Status.REFUSED)
    if refused:
        yield "not claimed, by its own refusals:"
        for message, count in refused.most_common():
            yield f"  {count:>3} × {message}"
    for result in verdict.results:
        if result.status is Status.EXPECTED:
            yield f"expected failure {result.check.name}: {result.message}"
        elif result.status is Status.ADVISORY:
            since = f"required since contract {result.check.since}"
            yield f"advisory failure {result.check.name}, {since}: {result.message}"
    alike: dict[str, list[Result]] = {}
    for result in verdict.results:
        if result.status is Status.FAILED:
            alike.setdefault(result.message, []).append(result)
    for first, *others in alike.values():
        yield from failure(first, verdict)
        if others:
            names = ", ".join(result.check.name for result in others[:_MAX_NAMES])
            yield f"  the same in: {names}" + f" and {len(others) - _MAX_NAMES} more" * (len(others) > _MAX_NAMES)
    for problem in verdict.problems:
        yield f"PROBLEM {problem}"
    yield summary(verdict)


def failure(result: Result, verdict: Verdict) -> Iterator[str]:
    """Yield the lines of one failure."""
    yield f"FAILED {result.check.name}: {result.message}"
    yield f"  must hold: {result.check.requirement}"
    if result.case:
        yield f"  case:      {result.case}"
    yield f"  repeat:    {result.reproduce(verdict.subject)}"


def summary(verdict: Verdict) -> str:
    """Return the last line of the console report."""
    counts = Counter(result.status for result in verdict.results)
    counted = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status] or status is Status.FAILED)
    quick = " (quick)" if verdict.quick else ""
    outcome = "conforms" if verdict.holds else "does not conform"
    return f"{verdict.subject.name} {outcome}{quick}: {counted}, in {verdict.seconds:.1f} s"


def as_json(verdict: Verdict) -> dict[str, object]:
    """Return the report as JSON values."""
    subject = verdict.subject
    return {
        "backend": subject.name,
        "source": str(subject.registered.source),
        "version": subject.registered.source.version,
        "kit": _kit_version(),
        "contract": verdict.contract,
        "digest": verdict.digest,
        "place": environment(verdict),
        "device": subject.device.type,
        "seam": subject.seam,
        "quick": verdict.quick,
        "conforms": verdict.holds,
        "seconds": round(verdict.seconds, 2),
        "problems": list(verdict.problems),
        "claims": {
            claim: {str(status): count for status, count in counts.items() if count}
            for claim, counts in verdict.by_claim().items()
        },
        "refused": dict(Counter(result.message for result in verdict.results if result.status is Status.REFUSED)),
        "results": [
            {
                "check": result.check.name,
                "claim": result.check.claim,
                "since": result.check.since,
                "says": result.check.requirement,
                "status": str(result.status),
                "words": result.message,
                "case": result.case,
                "seconds": round(result.seconds, 4),
                "error": max((one.error for one in result.measured), default=None),
                "tolerance": max((one.tolerance for one in result.measured), default=None),
            }
            for result in verdict.results
        ],
    }


def as_junit(verdict: Verdict) -> str:
    """Render JUnit XML for CI systems: one suite, one test case per check and per problem of the run.

    Refused checks, expected and advisory failures are skipped test cases.
    """
    subject, results = verdict.subject, verdict.results
    failed = sum(result.status is Status.FAILED for result in results) + len(verdict.problems)
    skipped = sum(result.status in (Status.REFUSED, Status.EXPECTED, Status.ADVISORY) for result in results)
    counts = {
        "tests": str(len(results) + len(verdict.problems)),
        "failures": str(failed),
        "errors": "0",
        "skipped": str(skipped),
        "time": f"{verdict.seconds:.3f}",
    }
    root = Element("testsuites", {"name": "attnplug conform", **counts})
    now = datetime.now(UTC).isoformat(timespec="seconds").removesuffix("+00:00")
    suite = SubElement(
        root, "testsuite", {"name": subject.name, **counts, "timestamp": now, "hostname": platform.node()}
    )
    properties = SubElement(suite, "properties")
    described = {"source": str(subject.registered.source), "environment": environment(verdict)}
    described |= {"kit": _kit_version(), "contract": verdict.contract, "digest": verdict.digest}
    for name, value in described.items():
        SubElement(properties, "property", {"name": name, "value": _printable(value)})
    for result in results:
        check = result.check
        given = {"classname": f"{subject.name}.{check.claim}", "name": check.name, "time": f"{result.seconds:.3f}"}
        case = SubElement(suite, "testcase", given)
        if result.status is Status.FAILED:
            message = {"message": _printable(result.message), "type": "failed"}
            SubElement(case, "failure", message).text = _printable("\n".join(failure(result, verdict)))
        elif result.status is not Status.PASSED:
            SubElement(case, "skipped", {"message": _printable(f"{result.status}: {result.message}")})
    for number, problem in enumerate(verdict.problems, 1):
        case = SubElement(
            suite, "testcase", {"classname": f"{subject.name}.run", "name": f"problem {number}", "time": "0"}
        )
        SubElement(case, "failure", {"message": _printable(problem), "type": "problem"}).text = _printable(problem)
    indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{tostring(root, encoding="unicode")}\n'


def _printable(text: str) -> str:
    """Replace characters that XML 1.0 forbids, such as those of a terminal's colours."""
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)


def as_html(verdict: Verdict) -> str:
    """Render an HTML page: results by claim, failures, errors by length, times by rows, and every check."""
    subject, escape = verdict.subject, html.escape
    statuses = list(Status)
    head = "".join(f"<th>{status}</th>" for status in statuses)
    claims = "".join(
        f"<tr><td>{escape(claim)}</td>" + "".join(f"<td>{counts[s] or ''}</td>" for s in statuses) + "</tr>"
        for claim, counts in verdict.by_claim().items()
    )
    failures = "".join(
        f"<pre>{escape(chr(10).join(failure(result, verdict)))}</pre>"
        for result in verdict.results
        if result.status is Status.FAILED
    )
    failures += "".join(f"<pre>{escape(problem)}</pre>" for problem in verdict.problems)
    rows = "".join(
        f"<tr><td><code>{escape(r.check.name)}</code></td><td class={r.status.split()[0]}>{r.status}</td>"
        f"<td>{escape(r.message or r.check.requirement)}</td><td>{r.seconds * 1e3:.0f} ms</td></tr>"
        for r in verdict.results
    )
    measured = [one for result in verdict.results for one in result.measured]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(subject.name)}</title><style>{_STYLE}</style>"
        f"<h1>{escape(summary(verdict))}</h1>"
        f"<p>{escape(str(subject.registered.source))} on {escape(environment(verdict))}<br>{escape(kit(verdict))}</p>"
        f"<h2>Claims</h2><table><tr><th>claim</th>{head}</tr>{claims}</table>"
        + (f"<h2>Failures</h2>{failures}" if failures else "")
        + f"<h2>Error by length</h2>{_errors(measured)}<h2>Time by rows</h2>{_times(measured)}"
        + f"<h2>Checks</h2><table>{rows}</table></html>"
    )


def _errors(measured: Iterable[Measured]) -> str:
    """Render a table of the largest error, relative to the tolerance, by the longest request of a call."""
    found: dict[int, list[float]] = {}
    for one in measured:
        found.setdefault(_next_power_of_two(one.longest), []).append(one.error / one.tolerance)
    rows = "".join(
        f"<tr><td>up to {n}</td><td>{len(e)}</td><td>{max(e):.3g}</td></tr>" for n, e in sorted(found.items())
    )
    return f"<table><tr><th>rows</th><th>calls</th><th>largest error / allowed</th></tr>{rows}</table>"


def _times(measured: Iterable[Measured]) -> str:
    """Render a table of the median time by the new rows of a call."""
    found: dict[int, list[float]] = {}
    for one in measured:
        if one.run_s:
            found.setdefault(_next_power_of_two(one.rows), []).append(1e3 * one.run_s)
    rows = "".join(
        f"<tr><td>up to {n}</td><td>{len(t)}</td><td>{median(t):.3g}</td></tr>" for n, t in sorted(found.items())
    )
    return f"<table><tr><th>new rows</th><th>calls</th><th>median ms</th></tr>{rows}</table>"


def _next_power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
