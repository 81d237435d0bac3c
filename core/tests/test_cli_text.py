"""Tables of the command line, on terminals of any width."""

from __future__ import annotations

import sys

import pytest

from attnplug.cli.output import table

COLUMNS = ("name", "distribution", "contract", "supports", "status")
ROWS = [
    ("flashinfer_mla", "attnplug-flashinfer-mla 2.3.4", "1.0", "mla, on cuda, SM 80–, bfloat16/float16", "usable here"),
    ("odd", "odd-dist 1.2.3", "", "", "broken: " + "RuntimeError: no driver " * 5 + "x" * 50),
]


def drawn(width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert sys.stdout.isatty()
    return table(COLUMNS, ROWS)


@pytest.mark.parametrize("width", [1, 2, 5, 20, 40, 60, 80, 160])
def test_nothing_is_wider_than_the_terminal_and_nothing_is_lost(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = drawn(width, monkeypatch)
    assert max(map(len, text.splitlines())) <= width
    kept = "".join(text.split())
    if width <= 40:  # one cell below the other
        for row in ROWS:
            assert all("".join(cell.split()) in kept for cell in row)


def test_a_narrow_terminal_gets_one_field_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(40, monkeypatch).splitlines()
    assert lines[:3] == ["flashinfer_mla", "  distribution: attnplug-flashinfer-mla", "    2.3.4"]
    assert "  contract: 1.0" in lines and "  status: usable here" in lines
    assert "odd" in lines and lines.count("  contract: 1.0") == 1  # what a row lacks is not named


@pytest.mark.parametrize("width", [40, 60, 80, 90, 100, 110, 120, 130, 160])
def test_no_name_is_broken(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = drawn(width, monkeypatch).replace("/", "/ ").split()
    for row in ROWS:
        for cell in row:
            assert {word for word in cell.replace("/", "/ ").split() if len(word) <= 40} <= set(words)


def test_a_wide_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(140, monkeypatch).splitlines()
    assert lines[0].split() == list(COLUMNS)
    assert set(lines[1]) == {"─", " "}
