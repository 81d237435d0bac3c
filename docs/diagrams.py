"""Diagrams of docs/architecture.md as SVG: packages from their pyproject.toml, the path of a batch from batch.txt."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLUE, GREEN, GREY, INK = "#3f51b5", "#2e7d5b", "#5f6b7a", "#1d2430"


def packages() -> str:
    """Draw every published package above the packages that it requires."""
    requires = {}
    for pattern in ("*", "plugins/*", "bridges/*"):
        for path in sorted(ROOT.glob(f"{pattern}/pyproject.toml")):
            project = tomllib.loads(path.read_text())["project"]
            if "Private :: Do Not Upload" not in project["classifiers"]:
                names = (re.split(r"[^\w-]", text)[0] for text in project["dependencies"])
                requires[project["name"]] = {name for name in names if name.startswith("attnplug")}

    @cache
    def depth(name: str) -> int:
        return 1 + max(map(depth, requires[name]), default=-1)

    wide, high, gap = 128, 34, 76
    rows = [sorted(name for name in requires if depth(name) == level) for level in range(max(map(depth, requires)) + 1)]
    width, height = (wide + 12) * max(map(len, rows)) + 12, (high + gap) * len(rows) - 10
    at = {}
    for level, row in enumerate(rows):
        left = (width - (wide + 12) * len(row)) / 2 + 6
        for place, name in enumerate(row):
            at[name] = (left + place * (wide + 12), height - (level + 1) * (high + gap) + 50 - high + 10)
    shapes = []
    for name, needed in requires.items():
        # Not what another one brings.
        for other in sorted(needed - {each for one in needed for each in requires[one]}):
            (x, y), (to_x, to_y) = at[name], at[other]
            shapes.append(_arrow(x + wide / 2, y + high, to_x + wide / 2, to_y))
    for name, (x, y) in at.items():
        short = name.removeprefix("attnplug-")
        host = short in ("vllm", "sglang", "transformers", "engine")
        color = BLUE if name == "attnplug" else GREEN if host else GREY
        shapes.append(f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="5" fill="{color}"/>')
        shapes.append(_text(x + wide / 2, y + 21, short, "#fff", anchor="middle"))
    note = "Blue: the contract. Green: hosts. Grey: backends, formats and tools. Arrows lead to required packages."
    return _svg(width, height, [*shapes, _text(12, height - 12, note)])


def batch() -> str:
    """Draw the path of a batch as a sequence diagram."""
    lines = [line for line in (ROOT / "docs" / "batch.txt").read_text().splitlines() if not line.startswith("#")]
    actors = [name.strip() for name in lines[0].split("|")]
    wide, step = 230, 34
    at = {name: 110 + place * wide for place, name in enumerate(actors)}
    width, height = wide * len(actors) + 90, step * len(lines) + 50
    shapes = [f'<line x1="{x}" y1="40" x2="{x}" y2="{height - 8}" stroke="#c3cad3"/>' for x in at.values()]
    for name, x in at.items():
        shapes.append(f'<rect x="{x - 75}" y="8" width="150" height="30" rx="5" fill="{BLUE}"/>')
        shapes.append(_text(x, 28, name, "#fff", anchor="middle"))
    for place, line in enumerate(lines[1:]):
        shapes += _step(line, at, 74 + place * step, width)
    return _svg(width, height, shapes)


def _step(line: str, at: dict[str, int], y: int, width: int) -> Iterator[str]:
    if line.startswith("=="):
        yield f'<rect x="4" y="{y - 20}" width="{width - 8}" height="26" rx="4" fill="#e8ebf7"/>'
        yield _text(14, y - 2, line.removeprefix("== "), BLUE, bold=True)
        return
    actor, _, text = line.partition(": ")
    source, _, target = actor.partition(" > ")
    if target:
        yield _arrow(at[source], y, at[target], y)
        left = min(at[source], at[target])
        yield _text(left + 10, y - 6, text)
    else:
        yield f'<circle cx="{at[source]}" cy="{y - 4}" r="4" fill="{GREEN}"/>'
        yield _text(at[source] + 10, y, text)


def _text(x: float, y: float, text: str, color: str = INK, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    # A white outline keeps text readable on lines.
    outline = "" if color == "#fff" else ' stroke="#fff" stroke-width="4" paint-order="stroke"'
    return f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}"{weight}{outline}>{escape(text)}</text>'


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return (
        f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{GREY}" stroke-width="1.3" marker-end="url(#head)"/>'
    )


def _svg(width: float, height: float, shapes: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="system-ui, sans-serif" font-size="13">'
    )
    marker = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker></defs>'
    )
    background = f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>'
    return "\n".join([head, marker, background, *shapes, "</svg>"]) + "\n"
