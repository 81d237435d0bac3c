"""Reports of a run: for the console, as JSON, and as one HTML page that needs nothing else."""

from __future__ import annotations

import html
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from attnplug.host import Mark, Panel, Series, figure, html_page
from attnplug_conformance.check import Measured
from attnplug_conformance.runner import Result, Status, Verdict


def place(verdict: Verdict) -> str:
    """The machine, and how the backend ran there."""
    device = verdict.subject.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    seam = "" if verdict.subject.seam is None else f", {verdict.subject.seam}"
    return f"{name}{seam}, torch {torch.__version__}, Python {platform.python_version()}"


def lines(verdict: Verdict) -> Iterator[str]:
    """The report for people, line by line."""
    subject = verdict.subject
    yield f"{subject.name} ({subject.registered.source}) on {place(verdict)}"
    for claim, counts in verdict.by_claim().items():
        told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        yield f"  {claim:<16} {told}"
    refused = Counter(result.words for result in verdict.results if result.status is Status.REFUSED)
    if refused:
        yield "not claimed, by its own refusals:"
        for words, count in refused.most_common():
            yield f"  {count:>3} × {words}"
    for result in verdict.results:
        if result.status is Status.EXPECTED:
            yield f"expected failure {result.check.name}: {result.words}"
    for result in verdict.results:
        if result.status is Status.FAILED:
            yield from failure(result, verdict)
    for problem in verdict.problems:
        yield f"PROBLEM {problem}"
    yield summary(verdict)


def failure(result: Result, verdict: Verdict) -> Iterator[str]:
    yield f"FAILED {result.check.name}: {result.words}"
    yield f"  must hold: {result.check.says}"
    if result.case:
        yield f"  case:      {result.case}"
    yield f"  repeat:    {result.reproduce(verdict.subject)}"


def summary(verdict: Verdict) -> str:
    counts = Counter(result.status for result in verdict.results)
    told = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status] or status is Status.FAILED)
    quick = " (quick)" if verdict.quick else ""
    outcome = "conforms" if verdict.holds else "does not conform"
    return f"{verdict.subject.name} {outcome}{quick}: {told}, in {verdict.seconds:.1f} s"


def as_json(verdict: Verdict) -> dict[str, object]:
    subject = verdict.subject
    return {
        "backend": subject.name,
        "source": str(subject.registered.source),
        "place": place(verdict),
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
        "refused": dict(Counter(result.words for result in verdict.results if result.status is Status.REFUSED)),
        "results": [
            {
                "check": result.check.name,
                "claim": result.check.claim,
                "says": result.check.says,
                "status": str(result.status),
                "words": result.words,
                "case": result.case,
                "seconds": round(result.seconds, 4),
                "error": max((one.error for one in result.measured), default=None),
                "tolerance": max((one.tolerance for one in result.measured), default=None),
            }
            for result in verdict.results
        ],
    }


def as_html(verdict: Verdict) -> str:
    """One page: claims by results, failures, errors by length, times by rows, and every check."""
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
        f"<td>{escape(r.words or r.check.says)}</td><td>{r.seconds * 1e3:.0f} ms</td></tr>"
        for r in verdict.results
    )
    measured = [one for result in verdict.results for one in result.measured]
    return html_page(
        subject.name,
        f"<h1>{escape(summary(verdict))}</h1>"
        f"<p>{escape(str(subject.registered.source))} on {escape(place(verdict))}</p>"
        f"<h2>Claims</h2><table><tr><th>claim</th>{head}</tr>{claims}</table>"
        + (f"<h2>What is wrong</h2>{failures}" if failures else "")
        + "<h2>Error by length</h2><p>Each call's error, relative to what is allowed (1), by its longest request.</p>"
        + _plot(measured, lambda one: one.longest, lambda one: one.error / one.tolerance, "rows", "error / allowed")
        + "<h2>Time by rows</h2><p>Seconds of the call, by its new rows.</p>"
        + _plot([one for one in measured if one.run_s], lambda one: one.rows, lambda one: one.run_s, "new rows", "s")
        + f"<h2>Checks</h2><table>{rows}</table>",
    )


def _plot(
    measured: Sequence[Measured],
    x: Callable[[Measured], float],
    y: Callable[[Measured], float],
    x_name: str,
    y_name: str,
) -> str:
    """Points on logarithmic axes, as SVG."""
    marks = tuple(Mark.at(max(x(one), 1), y(one)) for one in measured)
    return figure([Panel("", x_name, y_name, (Series("", marks, line=False),))])
