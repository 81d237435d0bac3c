"""MkDocs hooks: pages that are made while the site is built, and links to files outside of docs/.

The README becomes the first page and the packages' READMEs become pages. The reference of the public modules comes
from docstrings, that of the commands from their parsers, that of the rules from the tests that name them.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

MODULES = ("attnplug", *(f"attnplug.{name}" for name in ("kernels", "linear", "sparse", "tables", "host")))
ROOT = Path(__file__).parent.parent
SOURCE = "https://github.com/attnplug/attnplug/blob/main"
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
_RULE = re.compile(r"(?<=[(, ])([A-E]\d{1,2})(?=[),])")
_LOADED = re.compile(r'<(?:script|img|iframe)\b[^>]*\ssrc="(?:https?:)?//[^"]*|<link\b[^>]*\bhref="(?:https?:)?//[^"]*')
_ROLE = re.compile(r":(?:class|func|meth|mod):(?=<code|`)")


def pages_outside() -> dict[str, str]:
    """Return the site's name of every page that is outside of docs/, by its path in the repository."""
    found = {"README.md": "index.md"}
    found |= {path.name: f"project/{path.name.lower()}" for path in ROOT.glob("[A-Z]*.md") if path.name != "README.md"}
    for pattern in ("*", "plugins/*", "bridges/*", "examples/*"):
        for path in ROOT.glob(f"{pattern}/README.md"):
            folder = path.parent.relative_to(ROOT).as_posix()
            if folder != "docs" and not folder.startswith("."):
                found[f"{folder}/README.md"] = f"packages/{folder.replace('/', '-')}.md"
    return found


OUTSIDE = pages_outside()
INSIDE = {name: path for path, name in OUTSIDE.items()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of packages and of the project to the navigation."""
    assert config.nav is not None
    for title, folder in (("Packages", "packages/"), ("Project", "project/")):
        config.nav.append({title: sorted(name for name in INSIDE if name.startswith(folder))})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files of docs/."""
    from mkdocs.structure.files import File

    pages = {name: (ROOT / path).read_text() for path, name in OUTSIDE.items()}
    pages |= {f"reference/{module}.md": module_page(module) for module in MODULES}
    pages |= {"reference/options.md": options_page(), "reference/rule-tests.md": rules_page()}
    for name, content in pages.items():
        rank = "---\nsearch:\n  boost: 0.3\n---\n" if name.startswith("reference/") else ""  # the guide comes first
        files.append(File.generated(config, name, content=rank + content))
    return files


def module_page(module: str) -> str:
    """Return the reference of a public module: every name that its stub exports."""
    found = import_module(module)
    names = [f"::: {module}.{name}" for name in found.__all__]
    return "\n\n".join([f"# {module}", found.__doc__ or "", *names])


def options_page() -> str:
    """Return the options of every command, from its parser."""
    from attnplug.cli.app import EPILOG, make_parser

    (commands,) = (each for each in make_parser()._actions if isinstance(each, argparse._SubParsersAction))
    lines = ["# Options of every command", "", "[Commands](../commands.md) has examples and output. " + EPILOG]
    for name, parser in sorted(commands.choices.items()):
        lines += ["", f"## attnplug {name}", "", parser.description or "", "", *_options(parser)]
    return "\n".join(lines)


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    formatter = parser._get_formatter()
    yield from ("| option | |", "|---|---|")
    for action in parser._actions:
        if action.help is argparse.SUPPRESS:
            continue
        metavar = formatter._get_default_metavar_for_optional(action) if action.option_strings else action.dest
        value = "" if action.nargs == 0 else f" {formatter._format_args(action, metavar)}"
        spelled = ", ".join(f"`{each}{value}`" for each in action.option_strings) or f"`{value.strip()}`"
        text = formatter._expand_help(action) if action.help else ""
        cells = [cell.replace("|", "\\|") for cell in (spelled, text)]
        yield f"| {cells[0]} | {cells[1]} |"


def rules_page() -> str:
    """Return the tests that name each rule in their docstrings."""
    tests: dict[str, list[str]] = {}
    folders = ("tests", *(f"{place}/tests" for place in ("*", "plugins/*", "bridges/*")))
    for path in sorted(path for folder in folders for path in ROOT.glob(f"{folder}/**/test_*.py")):
        text = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for rule in set(re.findall(r"\b[A-E]\d{1,2}\b", ast.get_docstring(node) or "")):
                    link = f"[{text}]({SOURCE}/{text}#L{node.lineno})"
                    tests.setdefault(rule, []).append(f"| `{node.name}` | {link} |")
    lines = ["# Tests of every rule", "", "Tests that name a rule of [the rules](../rules.md) in their docstrings."]
    for rule in re.findall(r"^\*\*([A-E]\d+) ", (ROOT / "docs" / "rules.md").read_text(), re.MULTILINE):
        lines += [
            "",
            f"## {rule}",
            "",
            f"[Definition](../rules.md#{rule})",
            "",
            "| test | file |",
            "|---|---|",
            *tests[rule],
        ]
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at pages of the site, and those to other files of the repository at their source."""
    name = page.file.src_uri
    if name == "rules.md":
        markdown = re.sub(r"^\*\*([A-E]\d+) ", r'<a id="\1"></a>**\1 ', markdown, flags=re.MULTILINE)
    folder = PurePosixPath(INSIDE.get(name, f"docs/{name}")).parent.as_posix()

    def target(match: re.Match[str]) -> str:
        path, anchor = normpath(f"{folder}/{match[1]}"), match[2] or ""
        if path in OUTSIDE:
            return relpath(OUTSIDE[path], PurePosixPath(name).parent.as_posix()) + anchor
        inside = path.removeprefix("docs/")
        if inside != path and files.get_file_from_path(inside) is not None:
            return relpath(inside, PurePosixPath(name).parent.as_posix()) + anchor
        return f"{SOURCE}/{path}" if (ROOT / path).exists() else match[0]

    return "".join(
        part if part.startswith("```") else _LINK.sub(target, part)
        for part in re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    )


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove the roles of Sphinx from docstrings, and link rules there to their definitions."""
    if not page.file.src_uri.startswith("reference/attnplug"):
        return html
    rules = files.get_file_from_path("rules.md")
    assert rules is not None
    return _RULE.sub(rf'<a href="{rules.url_relative_to(page.file)}#\1">\1</a>', _ROLE.sub("", html))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that loads something from the network."""
    from mkdocs.exceptions import PluginError

    if (found := _LOADED.search(output)) is not None:
        raise PluginError(f"{page.file.src_uri} loads {found[0]} from the network; make it a file of the site")
    return output
