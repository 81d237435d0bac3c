"""Rules are cited by id and defined in docs/rules.md; each is named by a test that proves it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEFINED = set(re.findall(r"^\*\*([A-E]\d+) ", (ROOT / "docs" / "rules.md").read_text(), re.MULTILINE))
TESTS = [path for place in ("core", "engine", "plugins", "tests") for path in (ROOT / place).rglob("test_*.py")]
SOURCES = [path for place in ("core", "engine", "plugins") for path in (ROOT / place).glob("**/src/**/*.py")]


def cited(text: str) -> set[str]:
    return set(re.findall(r"\b[A-E]\d{1,2}\b", text))


def test_every_rule_that_is_cited_is_defined() -> None:
    unknown = {
        f"{path.relative_to(ROOT)}: {rule}"
        for path in (*SOURCES, *TESTS, *ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"))
        for rule in cited(path.read_text()) - DEFINED
    }
    assert not unknown


def test_every_rule_is_named_by_a_test() -> None:
    named: set[str] = set()
    for path in TESTS:
        text = path.read_text()
        if cited(text) <= named:  # parsing it would take most of the time
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                named |= cited(ast.get_docstring(node) or "")
    assert DEFINED and not DEFINED - named
