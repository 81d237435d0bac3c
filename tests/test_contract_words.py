"""The contract and the plugins contain no command-line options: settings have keys, and the host renders them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = "declare machine kv contract author mla layers wrappers auto registry torch_native"
SOURCES = [ROOT / "core/src/attnplug" / room for room in ROOMS.split()] + sorted(ROOT.glob("plugins/*/src"))
OPTION = re.compile(r"(?<!pip install )--[a-z]")


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.relative_to(ROOT)))
def test_no_text_names_an_option_of_a_command_line(source: Path) -> None:
    """D3"""
    files = sorted(source.rglob("*.py"))
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and OPTION.search(node.value)
    ]
    assert found == []
