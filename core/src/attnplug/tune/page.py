"""What was measured, for people: tables of the fastest, plots, and one HTML page that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attnplug.tune.plot import Mark, Panel, Series, figure
from attnplug.tune.points import Point
from attnplug.tune.results import Row, by_point

LIMIT = "limit: each byte moved once"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #1d2430 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .2rem .6rem; vertical-align: top }
tr { border-bottom: 1px solid #e3e7ee } code { font-size: .85em }
.passed, .best { color: #17693a } .best { font-weight: 600 } .failed { color: #b3261e; font-weight: 600 }
.refused { color: #6b7483 } .expected { color: #8a5a00 }
"""


def html_page(title: str, body: str) -> str:
    """A page that needs no other file. ``title`` is text, ``body`` is HTML."""
    shown = html.escape(title)
    head = f"<meta charset=utf-8><title>{shown}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en>{head}{body}</html>"


def report_page(title: str, rows: Sequence[Row], notes: Iterable[str] = ()) -> str:
    """Tables and plots of what was measured, with notes on what was not."""
    body = [f"<h1>{html.escape(title)}</h1>", *(f"<p>{html.escape(note)}</p>" for note in notes)]
    for (layer, role), points in by_point(rows).items():
        sides = _sides(points)
        head = "".join(f"<th>{html.escape(side)}</th>" for side in sides)
        body.append(f"<h2>{html.escape(f'{role}: {layer}')}</h2>")
        body.append(figure(list(_panels(layer, role, points))))
        body.append(f"<table><tr><th>µs of a call</th>{head}</tr>")
        for point, found in points.items():
            best = min(found.values(), key=lambda row: row.us)
            cells = "".join(_cell(found.get(side), best) for side in sides)
            body.append(f"<tr><td>{html.escape(str(point))}</td>{cells}</tr>")
        body.append("</table>")
    return html_page(title, "".join(body))


def _cell(row: Row | None, best: Row) -> str:
    if row is None:
        return "<td></td>"
    share = "" if row.share is None else f" · {row.share:.0%} of the limit"
    mark = " class=best" if row is best else ""
    return f'<td{mark} title="half of the repetitions: {row.low:.1f}–{row.high:.1f}">{row.us:.1f}{share}</td>'


def plot_rows(rows: Sequence[Row]) -> str:
    """All rows as one SVG file."""
    groups = by_point(rows).items()
    return figure([each for (layer, role), points in groups for each in _panels(layer, role, points)], standalone=True)


def _sides(points: Mapping[Point, Mapping[str, Row]]) -> list[str]:
    return sorted({side for found in points.values() for side in found})


def _panels(layer: str, role: str, points: Mapping[Point, Mapping[str, Row]]) -> Iterator[Panel]:
    """A panel for every batch with three lengths or more, over these, and one for all other points."""
    groups: dict[tuple[int, int, bool], list[Point]] = {}
    for point in points:
        if role != "prefill":
            groups.setdefault((point.requests, point.tokens, point.ragged), []).append(point)
    alone = {key: group for key, group in groups.items() if len(group) >= 3}
    for (requests, tokens, ragged), group in alone.items():
        told = f"{requests} request{'s' * (requests > 1)}" + f", {tokens} tokens" * (tokens > 1)
        rows = "cache rows of a request on average, which differ" if ragged else "cache rows of each request"
        series = _series({point: float(point.length) for point in group}, points)
        yield Panel(f"{layer}: {told}", rows, "µs of a call", series)
    others = [point for point in points if not any(point in group for group in alone.values())]
    if others:
        places = {point: float(place) for place, point in enumerate(others, 1)}
        labels = tuple(_short(point) for point in others)
        name = "new tokens" if role == "prefill" else "requests × cache rows"
        yield Panel(f"{layer}: {role}", name, "µs of a call", _series(places, points), labels)


def _short(point: Point) -> str:
    def number(count: int) -> str:
        return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)

    if point.role == "prefill":
        prefix = point.length - point.tokens
        return f"{point.requests}×{number(point.tokens)}" + f"+{number(prefix)}" * bool(prefix)
    return f"{point.requests}×{'~' * point.ragged}{number(point.length)}" + f"v{point.tokens}" * (point.tokens > 1)


def _series(places: Mapping[Point, float], points: Mapping[Point, Mapping[str, Row]]) -> tuple[Series, ...]:
    found: dict[str, list[Mark]] = {}
    limits = []
    for point, x in places.items():
        for side, row in points[point].items():
            found.setdefault(side, []).append(Mark(x, row.us, row.low, row.high))
        if limit := max((row.limit_us for row in points[point].values()), default=0.0):
            limits.append(Mark.at(x, limit))
    series = [Series(side, tuple(marks)) for side, marks in sorted(found.items())]
    return (*series, *([Series(LIMIT, tuple(limits), dashed=True)] if limits else []))


def fastest(rows: Sequence[Row]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """For each (role, layer): a title, columns, and a row for each point, the fastest first named."""
    for (layer, role), points in by_point(rows).items():
        sides = _sides(points)
        lines = []
        for point, found in points.items():
            best = min(found.values(), key=lambda row: (row.us, row.side))
            cells = [found[side].told if side in found else "" for side in sides]
            share = "" if best.share is None else f" ({best.share:.0%} of the limit)"
            lines.append([str(point), best.side + share, *cells])
        yield f"{role}: {layer}, µs of a call", ["point", "fastest", *sides], lines
