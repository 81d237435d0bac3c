"""Plain text tables, for commands that must start quickly: drawing with rich costs them a third of their budget."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

_WIDE = 160


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns; the last ones wrap within the terminal's width."""
    width = shutil.get_terminal_size((_WIDE, 24)).columns if sys.stdout.isatty() else _WIDE
    widths = _widths([columns, *rows], width - 2 * (len(columns) - 1))
    lines = [_line(columns, widths), _line(["─" * each for each in widths], widths)]
    for row in rows:
        wrapped = [textwrap.wrap(cell, each) or [""] for cell, each in zip(row, widths, strict=True)]
        for number in range(max(map(len, wrapped))):
            lines.append(_line([cell[number] if number < len(cell) else "" for cell in wrapped], widths))
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _widths(rows: Sequence[Sequence[str]], available: int) -> list[int]:
    """Natural widths where they fit; otherwise the widest columns give way, down to a readable minimum."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) > available:
        widest = max(range(len(widths)), key=widths.__getitem__)
        if widths[widest] <= 16:
            break
        widths[widest] -= 1
    return widths
