"""Reports of a run: for the console, as JSON, and as one HTML page that needs nothing else."""

from __future__ import annotations

import html
import math
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

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


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1d2430 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .2rem .6rem; vertical-align: top }
tr { border-bottom: 1px solid #e3e7ee } code { font-size: .85em }
.passed { color: #17693a } .failed { color: #b3261e; font-weight: 600 } .refused { color: #6b7483 }
.expected { color: #8a5a00 } svg { background: #fafbfd; border: 1px solid #e3e7ee }
"""


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
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(subject.name)}</title>"
        f"<style>{_STYLE}</style><h1>{escape(summary(verdict))}</h1>"
        f"<p>{escape(str(subject.registered.source))} on {escape(place(verdict))}</p>"
        f"<h2>Claims</h2><table><tr><th>claim</th>{head}</tr>{claims}</table>"
        + (f"<h2>What is wrong</h2>{failures}" if failures else "")
        + "<h2>Error by length</h2><p>Each call's error, relative to what is allowed (1), by its longest request.</p>"
        + _plot(measured, lambda one: one.longest, lambda one: one.error / one.tolerance, "rows", "error / allowed")
        + "<h2>Time by rows</h2><p>Seconds of the call, by its new rows.</p>"
        + _plot([one for one in measured if one.run_s], lambda one: one.rows, lambda one: one.run_s, "new rows", "s")
        + f"<h2>Checks</h2><table>{rows}</table></html>"
    )


def _plot(
    measured: Sequence[Measured],
    x: Callable[[Measured], float],
    y: Callable[[Measured], float],
    x_name: str,
    y_name: str,
) -> str:
    """Points on logarithmic axes, as SVG."""
    points = [(max(x(one), 1), y(one)) for one in measured if y(one) > 0 and math.isfinite(y(one))]
    if not points:
        return "<p>Nothing was measured.</p>"
    width, height, edge = 760, 260, 48
    spans = []
    for values in zip(*points, strict=True):
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        spans.append((low, max(high, low + 1)))

    def at(value: float, axis: int) -> float:
        low, high = spans[axis]
        part = (math.log10(value) - low) / (high - low)
        return edge + part * (width - 2 * edge) if axis == 0 else height - edge - part * (height - 2 * edge)

    shapes = [
        f'<circle cx="{at(a, 0):.1f}" cy="{at(b, 1):.1f}" r="3" fill="#2456c7" opacity=".55"/>' for a, b in points
    ]
    for axis, (low, high) in enumerate(spans):
        for power in range(low, high + 1):
            spot = at(10.0**power, axis)
            where = f'x="{spot:.0f}" y="{height - 28}"' if axis == 0 else f'x="4" y="{spot:.0f}"'
            shapes.append(f'<text {where} font-size="11" fill="#6b7483">1e{power}</text>')
    shapes.append(f'<text x="{width / 2:.0f}" y="{height - 8}" font-size="12">{x_name}</text>')
    shapes.append(f'<text x="{edge}" y="16" font-size="12">{y_name}</text>')
    return f'<svg viewBox="0 0 {width} {height}" width="100%" role="img">{"".join(shapes)}</svg>'
