"""``attnplug new``: create a package with a correct backend for an author to start from."""

from __future__ import annotations

import argparse
import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from attnplug import UsageError
from attnplug.cli import output
from attnplug.cli.app import Commands, add_command
from attnplug.declare.installed import installed_version
from attnplug.declare.version import CONTRACT_VERSION, core_range
from attnplug.host import load_registry

if TYPE_CHECKING:
    from packaging.version import Version

KINDS = ("mha", "mla", "linear")

PYPROJECT = """\
[project]
name = "DISTRIBUTION"
version = "0.1.0"
description = "An attention backend for attnplug"
requires-python = ">=3.11"
dependencies = ["attnplugCORE_RANGE", "torch"]

[project.optional-dependencies]
test = ["attnplug-conformance", "pytest", "ruff"]

[project.entry-points."attnplug.plugins"]
PACKAGE = "PACKAGE.plugin"

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["src/PACKAGE"]

[tool.ruff]
line-length = 120
"""

PLUGIN = '''\
"""Declaration of the backend. Imports neither torch nor the backend itself."""

from attnplug import IMPORTS


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="PACKAGE",
            summary="SUMMARY",
            contract="CONTRACT",
            factory="PACKAGE.backend:CLASS",
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.KIND}),
                devices=frozenset({"cpu", "cuda"}),
                dtypes=frozenset({DType.FLOAT32, DType.BFLOAT16}),
CLAIMS            ),
        )
    ]
'''

CLAIMS = {
    "mha": ("CacheLayout", "MHA", ["layouts=frozenset(CacheLayout),  # any strides: vLLM's cache too"]),
    "mla": (
        "CacheLayout",
        "MLA",
        ["layouts=frozenset(CacheLayout),  # any strides: vLLM's cache too", 'extras=frozenset({"lse"}),'],
    ),
    "linear": ("Role", "LIGHTNING", ["roles=frozenset({Role.LINEAR}),"]),
}

TEST = '''\
"""Conformance tests: everything that the backend claims, against float64."""

from attnplug_conformance.testing import conformance_tests, subject_of

test_conforms, test_enough_is_claimed = conformance_tests(subject_of("PACKAGE"))
'''

CI = """\
name: ci
on: [push, pull_request]
jobs:
  test:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {python-version: "3.12"}
      - run: pip install -e .[test]
      - run: ruff check . && ruff format --check .
      - run: pytest
      - run: attnplug conform PACKAGE --report report.html
      - uses: actions/upload-artifact@v4
        if: always()
        with: {name: conformance, path: report.html}
"""

README = """\
# DISTRIBUTION

An attention backend for [attnplug](https://github.com/attnplug/attnplug).

```console
$ pip install -e .[test]
$ attnplug conform PACKAGE
```
"""


def declare_new(commands: Commands[argparse.ArgumentParser]) -> None:
    text = "Create a package with a correct backend, tests and CI to start from."
    parser = add_command(commands, "new", text, _new)
    parser.add_argument("name", metavar="NAME", help="name of the backend and its package, such as my_backend")
    parser.add_argument("--kind", choices=KINDS, default="mha", help="kind of attention: mha, mla or linear")


def _new(parsed: argparse.Namespace) -> int:
    name = parsed.name
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", name) or keyword.iskeyword(name) or name == "auto":
        raise UsageError(
            f"{name!r} is not a name for a backend; give up to 64 lower-case letters, digits and underscores, a letter "
            "first, and neither a Python keyword nor 'auto'"
        )
    if name in load_registry().backends:
        raise UsageError(f"there is a backend {name!r} already; give another name")
    if find_spec(name) is not None:  # the package would shadow that module
        raise UsageError(f"{name!r} is the name of a module that is installed here; give another one")
    folder = Path(name)
    if folder.exists():
        raise UsageError(f"{folder} exists already; give another name, or remove it")
    made = files(name, parsed.kind)
    try:
        for path, text in made.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be written: {error.strerror}; go to another folder") from None
    if parsed.json:
        output.write_json({"folder": str(folder), "files": sorted(made)})
    else:
        print(f"made {folder}: {', '.join(sorted(made))}")
        print(f"next: pip install -e ./{name} && attnplug conform {name}")
    return 0


def requirement_range(version: Version) -> str:
    """Return the releases of core that run a package written for ``version``, such as ``>=1.2,<2``.

    A pre-release is below its version: ``>=1.0`` would not allow 1.0.0rc1.
    """
    lowest, below = core_range((version.major, version.minor)).split(",")
    return f">={version},{below}" if version.is_prerelease else f"{lowest},{below}"


def files(name: str, kind: str) -> dict[str, str]:
    """Contents of the package: text by path."""
    from packaging.version import Version  # not at the top: attnplug --help imports this module

    title = "".join(part.capitalize() for part in name.split("_"))
    imported, claimed, claims = CLAIMS[kind]
    template = (Path(__file__).parent / "templates" / f"{kind}.py").read_text()
    summary = template.partition('"""SUMMARY: ')[2].partition(".")[0]
    placeholders = {
        "DISTRIBUTION": name.replace("_", "-"),
        "PACKAGE": name,
        "CONTRACT": CONTRACT_VERSION,
        "CORE_RANGE": requirement_range(Version(installed_version("attnplug") or CONTRACT_VERSION)),
        "CLASS": title,
        "KIND": claimed,
        "SUMMARY": summary,
    }

    def filled(text: str) -> str:
        for word, value in placeholders.items():
            text = text.replace(word, value)
        return text

    names = sorted(("AttentionKind", "BackendSpec", "Capabilities", "DType", imported))
    spec = PLUGIN.replace("IMPORTS", ", ".join([*names, "hookimpl"]))
    spec = spec.replace("CLAIMS", "".join(f"                {claim}\n" for claim in claims))
    return {
        "pyproject.toml": filled(PYPROJECT),
        "README.md": filled(README),
        ".github/workflows/ci.yml": filled(CI),
        f"src/{name}/__init__.py": "",
        f"src/{name}/plugin.py": filled(spec),
        f"src/{name}/backend.py": _authors(template).replace("MyBackend", title),
        "tests/test_conformance.py": filled(TEST),
    }


def _authors(template: str) -> str:
    """Convert a template to an author's file, in which attnplug is third-party and imports are sorted accordingly."""
    start, _, rest = template.replace('"""SUMMARY: ', '"""').partition("from torch import Tensor\n\n")
    ours, _, body = rest.partition("\n")
    quoted = start.partition('"""')[2]
    return f'"""{quoted[0].upper()}{quoted[1:]}{ours}\nfrom torch import Tensor\n{body}'
