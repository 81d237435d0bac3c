"""Prepare a release: versions, changelog, reproducible wheels and sdists, and a smoke test of each. Uploads nothing.

Usage: make release VERSION=1.0.0rc1. RELEASING.md describes the steps before and after it.

- Everything is checked before the first file is changed. A second run with the same version only builds and tests.
- The first two numbers of a version are the contract, so the contract changes with them.
- Packages are built twice, from two copies of the tracked files: the second wheel directly, the first from the sdist.
  All hashes must be equal. SOURCE_DATE_EPOCH is the day in the changelog, so that anybody can reproduce the build.
- Each package is installed into a fresh environment, together with our packages that it requires. Third-party packages
  are linked from the environment that runs this script.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from attnplug.declare.version import parse_contract
from attnplug_conformance.new_command import requirement_range
from attnplug_testing.environments import Environment, link_dependencies, link_pip

ROOT = Path(__file__).parent
VERSION_FILE = "core/src/attnplug/declare/version.py"
REWRITTEN = (".md", ".py", ".toml")
KEPT = ("CHANGELOG.md", "benchmarks/results/", "fossils/", "release.py", "tests/test_release.py")
"""Files that are not rewritten, because they mention other versions."""


class ReleaseError(Exception):
    """A release cannot be made. The message says why and what to do."""


def packages(root: Path) -> dict[str, Path]:
    """Return the folders of all packages by the distributions' names."""
    found = (
        *root.glob("*/pyproject.toml"),
        *root.glob("plugins/*/pyproject.toml"),
        *root.glob("bridges/*/pyproject.toml"),
    )
    return {_project(path)["name"]: path.parent for path in sorted(found)}


def _project(pyproject: Path) -> dict[str, str]:
    project: dict[str, str] = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    return project


def tracked(root: Path) -> list[str]:
    return _git(root, "ls-files", "-z").split("\0")[:-1]


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


# Versions


def contract_of(version: Version) -> tuple[int, int]:
    return version.major, version.minor


def check_version(root: Path, text: str) -> tuple[Version, Version]:
    """Return the current version and the one to release. Raises ReleaseError if that cannot be released."""
    current = Version(_project(root / "core" / "pyproject.toml")["version"])
    try:
        version = Version(text)
    except InvalidVersion:
        version = None
    if version is None or str(version) != text or len(version.release) != 3 or version.dev or version.local:
        raise ReleaseError(f"{text!r} is not a version of a release; give one such as 1.2.3 or 1.2.0rc1")
    if version < current:
        raise ReleaseError(f"{version} is older than {current}, the version of this tree; give a newer one")
    if f"v{version}" in _git(root, "tag", "--list").split() and version != current:
        raise ReleaseError(f"the tag v{version} exists; give a version that was not released")
    if version != current and (changed := _git(root, "status", "--porcelain")):
        raise ReleaseError(f"the work tree has changes:\n{changed}commit them, and run this again")
    return current, version


def changelog(root: Path, version: Version, today: str) -> tuple[str, int]:
    """Return the changelog with a date in the section of ``version``, and that day as Unix time.

    The section is the one that is marked as unreleased, or, in a second run, the dated one.
    """
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if (dated := re.search(rf"^## {re.escape(str(version))} \((\d{{4}}-\d\d-\d\d)\)$", text, re.MULTILINE)) is None:
        text, count = re.subn(r"^## \S+ \(unreleased\)$", f"## {version} ({today})", text, flags=re.MULTILINE)
        if count != 1:
            raise ReleaseError(
                f"CHANGELOG.md has {count} sections '## {version} (unreleased)'; describe the release in exactly one"
            )
    contract = "{}.{}".format(*contract_of(version))
    if f"\n### Contract {contract}\n" not in text:
        raise ReleaseError(
            f"CHANGELOG.md has no '### Contract {contract}'; say there what authors of plugins have to do"
        )
    day = datetime.strptime(today if dated is None else dated[1], "%Y-%m-%d").replace(tzinfo=UTC)
    return text, int(day.timestamp())


def rewriter(old: Version, new: Version) -> Callable[[str, str], str]:
    """Return a function ``(path, text) -> text`` that replaces the versions of our packages and of the contract.

    A plugin's declared ``contract`` is its minimum, so it stays if the new core still supports it.
    """
    before, after = contract_of(old), contract_of(new)
    declared, now = ("{}.{}".format(*contract) for contract in (before, after))
    was = re.escape(str(old))
    rules = {
        rf"\b(attnplug[\w-]* ){was}(?![\w.])": (rf"\g<1>{new}", (".md", ".py")),
        rf"(?<![\w.]){was}( is not released yet| is released, install from a clone)": (rf"{new}\g<1>", (".md",)),
        rf"\b(attnplug[\w-]*(?:\[\w+\])?)=={was}(?![\w.])": (rf"\g<1>=={new}", (".toml",)),
        rf"\b(attnplug[\w-]*(?:\[\w+\])?){re.escape(requirement_range(old))}": (
            rf"\g<1>{requirement_range(new)}",
            (".md", ".toml"),
        ),
        rf'^version = "{was}"$': (f'version = "{new}"', ("pyproject.toml",)),
        rf'^CONTRACT_VERSION = "{declared}"$': (f'CONTRACT_VERSION = "{now}"', (VERSION_FILE,)),
    }
    if before != after and not (before[0] == after[0] > 0):
        rules[rf'\bcontract="{declared}"'] = f'contract="{now}"', (".md", ".py")

    def rewrite(path: str, text: str) -> str:
        for pattern, (replacement, ends) in rules.items():
            if path.endswith(ends):
                text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
        return text

    return rewrite


def set_version(root: Path, old: Version, new: Version) -> list[str]:
    """Replace versions in all tracked files. Returns the paths of changed files."""
    rewrite, changed = rewriter(old, new), []
    for path in tracked(root):
        if path.endswith(REWRITTEN) and not path.startswith(KEPT):
            text = (root / path).read_text(encoding="utf-8")
            if (now := rewrite(path, text)) != text:
                (root / path).write_text(now, encoding="utf-8")
                changed.append(path)
    return changed


# Builds

_BUILD = """
import os, sys
from hatchling.build import build_sdist, build_wheel
command, output, *projects = sys.argv[1:]
for project in projects:
    os.chdir(project)
    print({"sdist": build_sdist, "wheel": build_wheel}[command](output))
"""


def build(root: Path, output: Path, epoch: int) -> dict[str, str]:
    """Build the sdist and the wheel of every package twice into ``output``. Returns SHA-256 hashes by file name.

    Raises ReleaseError if two builds differ.
    """
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / name for name in ("first", "second", "unpacked")]
        first, second, unpacked = folders
        for copy, mode in ((first, 0o644), (second, 0o600)):
            _copy_tracked(root, copy / "tree", mode)
            _build("sdist", copy / "dist", packages(copy / "tree").values(), epoch)
        for sdist in sorted((first / "dist").glob("*.tar.gz")):
            with tarfile.open(sdist) as archive:
                archive.extractall(unpacked, filter="data")
        _build("wheel", first / "dist", sorted(unpacked.iterdir()), epoch)
        _build("wheel", second / "dist", packages(second / "tree").values(), epoch)
        hashes, again = _hashes(first / "dist"), _hashes(second / "dist")
        if differing := sorted(name for name in hashes.keys() | again.keys() if hashes.get(name) != again.get(name)):
            raise ReleaseError(f"two builds differ in {', '.join(differing)}; a build must depend on its sources alone")
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(first / "dist", output)
    (output / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in hashes.items()))
    return hashes


def _copy_tracked(root: Path, folder: Path, mode: int) -> None:
    for path in tracked(root):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, target)
        target.chmod(mode)


def _build(command: str, output: Path, projects: Iterable[Path], epoch: int) -> None:
    folders = [str(project) for project in projects]
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, command, str(output), *folders],
        env=os.environ | {"SOURCE_DATE_EPOCH": str(epoch)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ReleaseError(f"building a {command} failed:\n{done.stderr}")


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


# Smoke tests

_SMOKE = """
import sys
from importlib.metadata import distribution
import attnplug
from attnplug.declare.installed import requirement_refusal
from attnplug.host import load_registry
from attnplug.cli.app import make_parser

name, version = sys.argv[1:]
assert attnplug.__file__.startswith(sys.prefix), attnplug.__file__
installed = distribution(name)
assert installed.version == version, installed.version
for text in installed.requires or ():
    if text.startswith("attnplug"):
        assert (refusal := requirement_refusal(text)) is None, refusal
registry = load_registry()
assert not registry.broken, registry.broken
for point in installed.entry_points:
    if point.group == "attnplug.plugins":
        sources = {backend.source.entry_point for backend in registry.backends.values()}
        sources |= {provided.source.entry_point for provided in registry.kv_formats.values()}
        assert point.name in sources, (point, sources)
    elif point.group == "attnplug.commands":
        try:
            make_parser([point.name]).parse_args([point.name, "--help"])
        except SystemExit as done:
            assert done.code == 0, point
for package in (installed.read_text("top_level.txt") or name.replace("-", "_")).split():
    __import__(package)
"""


def smoke_tests(dist: Path, folders: Mapping[str, Path], version: Version) -> Iterator[str]:
    """Install each package into a fresh environment and use it. Yields the name of each package that works."""
    with tempfile.TemporaryDirectory() as place:
        parts = [Path(place) / name for name in ("dependencies", "pip")]
        for part in parts:
            part.mkdir()
        dependencies, pip = link_dependencies(parts[0]), link_pip(parts[1])
        for name in folders:
            environment = Environment.make(_new(Path(place) / "environments" / name), dist, pip, dependencies)
            environment.install(*(f"{each}=={version}" for each in sorted(required(name, folders))))
            _smoke(environment, name, version)
            yield name
            shutil.rmtree(environment.folder)


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _smoke(environment: Environment, name: str, version: Version) -> None:
    contract = "{}.{}".format(*contract_of(version))
    done = environment.run("python", "-c", _SMOKE, name, str(version))
    if done.returncode:
        raise ReleaseError(f"{name} does not work once installed:\n{done.stderr}")
    if (printed := environment.attnplug("--version").stdout) != f"attnplug {version}, contract {contract}\n":
        raise ReleaseError(
            f"with {name}, attnplug --version prints {printed!r}; it must print {version} and {contract}"
        )
    if f"Version: {version}\n" not in (shown := environment.run_pip("show", name)):
        raise ReleaseError(f"pip show {name} prints\n{shown}; it must show version {version}")


def required(name: str, folders: Mapping[str, Path]) -> set[str]:
    """Return the names of a package, of core, and of our packages that they require, transitively."""
    found, left = set[str](), [name, "attnplug"]
    while left:
        if (each := left.pop()) not in found:
            found.add(each)
            needed = _project(folders[each] / "pyproject.toml").get("dependencies", ())
            left += [other for text in needed if (other := Requirement(text).name) in folders]
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__.partition("\n")[0])
    parser.add_argument("version", metavar="VERSION", help="the version to release, such as 1.0.0rc1")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    root = parsed.root
    try:
        old, new = check_version(root, parsed.version)
        text, epoch = changelog(root, new, datetime.now(UTC).strftime("%Y-%m-%d"))
        assert parse_contract("{}.{}".format(*contract_of(new))) is not None
        if old != new:
            changed = set_version(root, old, new)
            print(f"set version {new} in {len(changed)} files")
        (root / "CHANGELOG.md").write_text(text, encoding="utf-8")
        sums = root / "dist" / "SHA256SUMS"
        before = sums.read_text() if sums.exists() else ""
        hashes = build(root, root / "dist", epoch)
        print(f"built {len(hashes)} files twice with equal hashes: dist/SHA256SUMS (SOURCE_DATE_EPOCH={epoch})")
        if f"attnplug-{new}.tar.gz" in before:
            print(f"the hashes {'are those of' if sums.read_text() == before else 'differ from'} the build before")
        for name in smoke_tests(root / "dist", packages(root), new):
            print(f"installed and used {name} {new}", flush=True)
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"""Nothing was committed or uploaded. Next, as in RELEASING.md:
  make test
  git commit -am 'release: {new}'
  git tag -a v{new} -m 'attnplug {new}'
  make release VERSION={new}   # from the tag: the same hashes
  twine upload $(ls dist/* | grep -v -e SHA256SUMS -e attnplug_testing)""")
    return 0


if __name__ == "__main__":
    sys.exit(main())
