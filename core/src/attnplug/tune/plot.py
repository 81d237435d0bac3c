"""Plots as SVG, drawn by hand: points and lines on logarithmic axes, with error bars. They need nothing to be shown."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 44, 48
_ROW = 15
_COLOURS = ("#2456c7", "#c2410c", "#17693a", "#7c3aed", "#b3261e", "#0e7490", "#8a5a00", "#be185d")
_GREY, _INK = "#6b7483", "#1d2430"


class Mark(NamedTuple):
    """One point, with the ends of its error bar; they are equal to ``y`` where there is none."""

    x: float
    y: float
    low: float
    high: float

    @classmethod
    def at(cls, x: float, y: float) -> Mark:
        return cls(x, y, y, y)


@dataclass(frozen=True, slots=True)
class Series:
    """Marks that belong together. ``line`` joins them, ``dashed`` without marks, as a limit is drawn."""

    name: str
    marks: tuple[Mark, ...]
    line: bool = True
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot. ``labels`` name the places 1, 2, … of an axis that is not a number; otherwise x is logarithmic."""

    title: str
    x_name: str
    y_name: str
    series: tuple[Series, ...]
    labels: tuple[str, ...] = ()


def figure(panels: Sequence[Panel], *, standalone: bool = False) -> str:
    """Panels in two columns, as one SVG. A series has one colour in all of them.

    A file of its own must be ``standalone``; inside a page an SVG needs no namespace.
    """
    space = ' xmlns="http://www.w3.org/2000/svg"' if standalone else ""
    if not panels:
        return f'<svg{space} viewBox="0 0 {WIDTH} 40"><text y="24">Nothing was measured.</text></svg>'
    names = dict.fromkeys(series.name for panel in panels for series in panel.series if not series.dashed)
    colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(names)}
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    height = HEIGHT + 14 + _ROW * -(-max(len(panel.series) for panel in panels) // 2)
    drawn = (
        f'<g transform="translate({place % columns * WIDTH} {place // columns * height})">{_panel(panel, colours)}</g>'
        for place, panel in enumerate(panels)
    )
    return (
        f'<svg{space} viewBox="0 0 {columns * WIDTH} {rows * height}" role="img" '
        f'font-family="system-ui, sans-serif"><rect width="100%" height="100%" fill="#fff"/>{"".join(drawn)}</svg>'
    )


def _panel(panel: Panel, colours: dict[str, str]) -> str:
    marks = [mark for series in panel.series for mark in series.marks if _drawable(mark)]
    title = _text(_LEFT, 16, panel.title, size=13, colour=_INK)
    if not marks:
        return title + _text(_LEFT, 60, "Nothing was measured.")
    across = _Axis.linear(len(panel.labels)) if panel.labels else _Axis.log(mark.x for mark in marks)
    up = _Axis.log(value for mark in marks for value in (mark.y, mark.low, mark.high) if value > 0)
    parts = [title, *_frame(panel, across, up)]
    for series in panel.series:
        parts += _drawn(series, across, up, colours.get(series.name, _GREY))
    parts += _legend(panel.series, colours)
    return "".join(parts)


def _drawable(mark: Mark) -> bool:
    return mark.x > 0 and mark.y > 0 and math.isfinite(mark.x) and math.isfinite(mark.y)


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    logarithmic: bool

    @classmethod
    def log(cls, values: Iterable[float]) -> _Axis:
        powers = [math.log10(value) for value in values]
        margin = max(0.05 * (max(powers) - min(powers)), 0.08)
        return cls(min(powers) - margin, max(powers) + margin, True)

    @classmethod
    def linear(cls, places: int) -> _Axis:
        return cls(0.5, places + 0.5, False)

    def part(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        own = math.log10(value) if self.logarithmic else value
        return (own - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """1, 2 and 5 times powers of ten, or the powers alone where these are many."""
        steps = (1, 2, 5) if self.high - self.low < 3 else (1,)
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        found = [step * 10.0**power for power in powers for step in steps]
        return [value for value in found if 0 <= self.part(value) <= 1]


def _x(axis: _Axis, value: float) -> float:
    return _LEFT + axis.part(value) * (WIDTH - _LEFT - _RIGHT)


def _y(axis: _Axis, value: float) -> float:
    return HEIGHT - _BOTTOM - axis.part(value) * (HEIGHT - _TOP - _BOTTOM)


def _frame(panel: Panel, across: _Axis, up: _Axis) -> Iterator[str]:
    bottom = HEIGHT - _BOTTOM
    for value in up.ticks():
        y = _y(up, value)
        yield f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" stroke="#e3e7ee"/>'
        yield _text(_LEFT - 6, y + 4, _number(value), anchor="end")
    if panel.labels:
        places = [(float(place), label) for place, label in enumerate(panel.labels, 1)]
    else:
        here = sorted({mark.x for series in panel.series for mark in series.marks if mark.x > 0})
        shown = here if len(here) <= 8 else across.ticks()
        places = [(value, _number(value)) for value in shown]
    for value, label in places:
        yield _text(_x(across, value), bottom + 16, label, anchor="middle", size=11 if len(places) <= 10 else 8)
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{WIDTH - _RIGHT}" fill="none" stroke="{_GREY}"/>'
    yield _text((_LEFT + WIDTH - _RIGHT) / 2, bottom + 40, panel.x_name, anchor="middle", size=12)
    yield _text(_LEFT, 34, panel.y_name, size=12)


def _drawn(series: Series, across: _Axis, up: _Axis, colour: str) -> Iterator[str]:
    marks = sorted(mark for mark in series.marks if _drawable(mark))
    spots = [(_x(across, mark.x), _y(up, mark.y)) for mark in marks]
    if series.line and len(spots) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        dashes = ' stroke-dasharray="5 4"' if series.dashed else ""
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>'
    if series.dashed and len(spots) > 1:
        return
    for mark, (x, y) in zip(marks, spots, strict=True):
        if 0 < mark.low < mark.high:
            yield f'<path d="M{x:.1f} {_y(up, mark.low):.1f}V{_y(up, mark.high):.1f}" stroke="{colour}"/>'
        opacity = "" if series.line else ' opacity=".55"'
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"{opacity}/>'


def _legend(series: Sequence[Series], colours: dict[str, str]) -> Iterator[str]:
    """Names in two columns, below the axis."""
    named = [each for each in series if each.name]
    for place, each in enumerate(named):
        x, y = _LEFT + place % 2 * (WIDTH - _LEFT) / 2, HEIGHT + 14 + place // 2 * _ROW
        yield f'<rect x="{x}" y="{y - 8}" width="14" height="4" fill="{colours.get(each.name, _GREY)}"/>'
        yield _text(x + 20, y - 2, each.name)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, colour: str = _GREY) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">'
        f"{html.escape(text)}</text>"
    )


def _number(value: float) -> str:
    """4096 as 4k, 1e-7 as it is."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:.0f}k" if value < 1 << 20 else f"{value / (1 << 20):.0f}M"
    return f"{value:g}"
