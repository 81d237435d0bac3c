"""Writes what is generated in the README: the output of commands and the table of backends.

python docs/generate.py            rewrite
python docs/generate.py --check    fail if something is out of date (part of make lint)
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from attnplug import load_registry
from attnplug.cli.backends import describe

README = Path(__file__).parent.parent / "README.md"
_BLOCK = re.compile(r"<!-- generated: (.+?) -->\n.*?<!-- end -->", re.DOTALL)


def table_of_backends() -> str:
    """One row per backend of this repository, from its spec."""
    rows = ["| name | package | what it is | supports |", "|---|---|---|---|"]
    for name, backend in load_registry().backends.items():
        if backend.source.distribution.startswith("attnplug"):
            spec = backend.spec
            rows.append(
                f"| `{name}` | `{backend.source.distribution}` | {spec.summary} | {describe(spec.capabilities)} |"
            )
    return "\n".join(rows)


def output_of(command: str) -> str:
    """What a command prints, as a person sees it."""
    program = Path(sys.executable).parent / command.split()[0]
    # Only this repository's packages, whatever else is installed where this runs; and no GPU to be found.
    plugins = ",".join(sorted({b.source.distribution for b in load_registry().backends.values() if _ours(b)}))
    environment = {**os.environ, "ATTNPLUG_PLUGINS": plugins, "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
    done = subprocess.run([program, *command.split()[1:]], capture_output=True, text=True, env=environment, check=False)
    return f"```console\n$ {command}\n{done.stdout.rstrip()}\n```"


def _ours(backend: object) -> bool:
    return backend.source.distribution.startswith("attnplug")  # type: ignore[attr-defined]


def generated(text: str) -> str:
    def block(match: re.Match[str]) -> str:
        what = match[1]
        body = table_of_backends() if what == "table of backends" else output_of(what)
        return f"<!-- generated: {what} -->\n{body}\n<!-- end -->"

    return _BLOCK.sub(block, text)


def main() -> None:
    now = README.read_text()
    wanted = generated(now)
    if "--check" in sys.argv:
        if now != wanted:
            sys.exit("README.md is out of date; run 'make docs'")
    else:
        README.write_text(wanted)


if __name__ == "__main__":
    main()
