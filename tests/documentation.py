"""Pages of the documentation and their contents."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "writing-a-backend.md").read_text()
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    path for pattern in ("*.md", "docs/**/*.md", "[!.]*/README.md", "[!.]*/*/README.md") for path in ROOT.glob(pattern)
]
FENCED = re.compile(r"```.*?```|<!-- (?:generated|sample).*?<!-- end -->", re.DOTALL)
GENERATED = re.compile(r"<!-- generated: .*?<!-- end -->", re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def files(text: str) -> dict[str, str]:
    """The files that a page gives: a paragraph that begins with a path, and either a block or that it is empty."""
    found = {}
    for path, rest in re.findall(r"^`([\w./]+\.\w+)`(.*?)(?=^`[\w./]+\.\w+`|\Z)", text, re.DOTALL | re.MULTILINE):
        given = re.findall(r"```\w+\n(.*?)```", rest, re.DOTALL)
        assert len(given) == (" is empty" not in rest.partition("\n\n")[0]), f"{path}: {rest}"
        found[path] = "".join(given)
    return found
