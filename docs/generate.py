"""Write the generated parts of the documentation: output of commands, tables of specs, packages and measurements.

A block begins with <!-- generated: CONTENT --> or <!-- sample: CONTENT --> and ends with <!-- end -->. CONTENT is a
command, a name in TABLES, or "file PATH", a Python file. "| 12 lines" behind a command keeps the first 12 lines of its
output, and "| with A B" runs it with the plugins of these distributions only.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import diagrams
from measurements import (
    arrivals,
    cost_of_invariance,
    cost_of_levels,
    cost_of_wrapping,
    cpu_rates,
    decode_plot,
    decode_rates,
    decode_steps,
    decode_times,
    engine_rates,
    first_tokens,
    hosts,
    kv_formats,
    loads,
    short_prefills,
    times_to_first_token,
)

from attnplug.cli.backends import describe
from attnplug.declare.errors import Setting
from attnplug.declare.problem import INVARIANCE, sorted_levels
from attnplug.declare.spec import Registered
from attnplug.declare.version import DEPRECATIONS, removal
from attnplug.hf.model_config import ALIASES, model_from_config
from attnplug.host import TINY_CONFIGS, load_registry
from attnplug.registry.hosts import load_host
from attnplug_engine.models.architectures import ARCHITECTURES
from attnplug_engine.quantization.config import SCHEMES

ROOT = Path(__file__).parent.parent
PAGES = [
    path
    for pattern in ("README.md", "docs/**/*.md", "*/README.md", "plugins/*/README.md", "bridges/*/README.md")
    for path in sorted(ROOT.glob(pattern))
]
_BLOCK = re.compile(r"<!-- (generated|sample): (.+?) -->\n.*?<!-- end -->", re.DOTALL)


def table_of_backends() -> str:
    """One row per backend of this repository, from its spec."""
    levels = "[invariant](invariance.md), if requested"
    rows = [f"| name | package | what it is | supports | {levels} |", "|---|---|---|---|---|"]
    for name, backend in _ours().items():
        spec = backend.spec
        cells = f"`{name}`", f"`{backend.source.distribution}`", spec.summary, describe(spec.capabilities)
        rows.append(f"| {' | '.join(cells)} | {_levels(backend)} |")
    return "\n".join(rows)


def table_of_models() -> str:
    """One row per architecture of the engine: its layers' attention, those of its tiny model, and its builder's
    docstring."""
    rows = ["| model type | attention | |", "|---|---|---|"]
    for name, architecture in ARCHITECTURES.items():
        spec = model_from_config({**TINY_CONFIGS.get(name, TINY_CONFIGS["llama"]), "model_type": name}, name)
        features = sorted({feature.replace("_", " ") for layer in spec.layers for feature in layer.features})
        text = inspect.getdoc(architecture.build) or inspect.getdoc(sys.modules[architecture.build.__module__]) or ""
        also = "".join(f", `{alias}`" for alias, known in ALIASES.items() if known == name)
        summary = " ".join(text.partition("\n\n")[0].replace("``", "`").split())
        rows.append(f"| `{name}`{also} | {', '.join([_attention(name), *features])} | {summary} |")
    return "\n".join(rows)


def list_of_models() -> str:
    """One row per kind of attention with its model types, and one with the quantization schemes."""
    kinds: dict[str, list[str]] = {}
    for name in ARCHITECTURES:
        kinds.setdefault(_attention(name), []).append(f"`{name}`")
        kinds[_attention(name)] += [f"`{alias}`" for alias, known in ALIASES.items() if known == name]
    rows = [f"| {kind} | {', '.join(names)} |" for kind, names in kinds.items()]
    schemes = "; ".join(scheme.title.partition(" (")[0] for scheme in SCHEMES)
    return "\n".join(["| attention | model types |", "|---|---|", *rows, f"| any, quantized | {schemes} |"])


def _attention(name: str) -> str:
    """Return the kinds of attention in the layers of an architecture's tiny model."""
    spec = model_from_config({**TINY_CONFIGS.get(name, TINY_CONFIGS["llama"]), "model_type": name}, name)
    return " + ".join(dict.fromkeys(layer.kind.upper() for layer in spec.layers))


def table_of_deprecations() -> str:
    """One row per deprecated name."""
    rows = ["| name | use | warns since | error in | removed in |", "|---|---|---|---|---|"]
    for name, (since, replacement) in DEPRECATIONS.items():
        error, removed = removal(since)
        rows.append(f"| `{name}` | {replacement} | {since} | {error} | {removed} |")
    return "\n".join(rows)


def table_of_levels() -> str:
    """One row per level of invariance, from the contract."""
    rows = [f"| `{level}` | {text} |" for level, text in INVARIANCE.items()]
    return "\n".join(["| level | the bits do not depend on |", "|---|---|", *rows])


def list_of_backends() -> str:
    """One short row per backend of this repository, from its spec."""
    rows = ["| name | package | what it is | [invariant](docs/invariance.md) |", "|---|---|---|---|"]
    for name, each in _ours().items():
        rows.append(f"| `{name}` | `{each.source.distribution}` | {each.spec.summary} | {_levels(each)} |")
    return "\n".join(rows)


def _levels(backend: Registered) -> str:
    """Return the levels of invariance that a backend claims."""
    claimed = sorted_levels(backend.spec.capabilities.invariant)
    return "all levels" if len(claimed) == len(INVARIANCE) else ", ".join(claimed) or "–"


def table_of_packages() -> str:
    """One row per published package of this repository, from its pyproject.toml."""
    rows = ["| package | contents |", "|---|---|"]
    for pattern in ("*", "plugins/*", "bridges/*"):
        for path in sorted(ROOT.glob(f"{pattern}/pyproject.toml")):
            project = tomllib.loads(path.read_text())["project"]
            if "Private :: Do Not Upload" in project["classifiers"]:
                continue
            folder = path.parent.relative_to(ROOT).as_posix()
            text = re.sub(r"^attnplug[ a-z]*: ", "", project["description"])
            rows.append(f"| [`{project['name']}`](../{folder}/README.md) | {text[0].upper()}{text[1:]} |")
    return "\n".join(rows)


def table_of_schemes() -> str:
    """One row per quantization scheme of the engine."""
    rows = ["| scheme | published models |", "|---|---|"]
    rows += [f"| {scheme.title} | {scheme.published} |" for scheme in SCHEMES]
    return "\n".join(rows)


def table_of_formats() -> str:
    """One row per KV format of this repository, from its declaration."""
    rows = ["| format | package | stored | 128 values | latent row of 512 + 64 | error | holds |", "|---" * 7 + "|"]
    for name, entry in load_registry().kv_formats.items():
        if entry.source.distribution.startswith("attnplug"):
            format, holds = entry.value, ", ".join(sorted(entry.value.holds))
            sizes = [f"{format.row_nbytes(128)} bytes" if "mha" in holds else ""]
            sizes += [f"{format.row_nbytes(576, 64)} bytes" if "mla" in holds else ""]
            cells = [f"`{name}`", f"`{entry.source.distribution}`", format.summary, *sizes, f"{format.error:g}", holds]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def table_of_commands() -> str:
    """One row per command, as ``attnplug --help`` lists them."""
    listed = re.findall(r"^    (\w+)\s+(\S.+)$", _run("attnplug --help"), re.MULTILINE)
    return "\n".join(["| command | |", "|---|---|", *(f"| `attnplug {name}` | {text} |" for name, text in listed)])


def table_of_hosts() -> str:
    """One column per host of this repository, from its HostSpec: package, versions, and its names for settings."""
    found = [load_host(name) for name in ("vllm", "sglang", "transformers")]
    specs = [spec for spec, _ in found]
    rows = ["| | " + " | ".join(spec.title for spec in specs) + " |", "|---" * (1 + len(specs)) + "|"]
    rows.append("| package | " + " | ".join(f"`{source.distribution}`" for _, source in found) + " |")
    rows.append("| versions | " + " | ".join(f"`{spec.versions}`" for spec in specs) + " |")
    for setting in Setting:
        names = [spec.render(setting) for spec in specs]
        if any(names):
            rows.append(f"| {setting} | " + " | ".join(f"`{name}`" if name else "–" for name in names) + " |")
    return "\n".join(rows)


def table_of_conformance() -> str:
    """One row per report in docs/conformance. Reports of a GPU that name no kit are older than these fields."""
    rows = ["| backend | where | kit, contract | passed | failed | not claimed | digest |", "|---" * 7 + "|"]
    for path in sorted((ROOT / "docs" / "conformance").glob("*.json")):
        report = json.loads(path.read_text())
        counts = [sum(claim.get(status, 0) for claim in report["claims"].values()) for status in STATUSES]
        name = f"`{report['backend']}` {report['source'].rpartition(' ')[2]}"
        where = report["place"].rpartition(", torch")[0]
        kit, digest = "not recorded", ""
        if "kit" in report:
            kit, digest = f"{report['kit']}, {report['contract']}", f"`{report['digest'][:8]}`"
        rows.append(f"| {name} | {where} | {kit} | " + " | ".join(map(str, counts)) + f" | {digest} |")
    return "\n".join(rows)


STATUSES = ("passed", "failed", "refused")
TABLES = {
    "table of conformance": table_of_conformance,
    "table of backends": table_of_backends,
    "table of hosts": table_of_hosts,
    "list of backends": list_of_backends,
    "table of commands": table_of_commands,
    "table of models": table_of_models,
    "list of models": list_of_models,
    "table of levels": table_of_levels,
    "table of packages": table_of_packages,
    "table of deprecations": table_of_deprecations,
    "table of schemes": table_of_schemes,
    "table of formats": table_of_formats,
    "decode times": decode_times,
    "cost of wrapping": cost_of_wrapping,
    "cost of invariance": cost_of_invariance,
    "times of KV formats": kv_formats,
    "cost of levels": cost_of_levels,
    "decode rates": decode_rates,
    "engine rates": engine_rates,
    "decode steps": decode_steps,
    "first tokens": first_tokens,
    "times to first token": times_to_first_token,
    "loads": loads,
    "short prefills": short_prefills,
    "arrivals": arrivals,
    "hosts": hosts,
    "cpu rates": cpu_rates,
}


FILES = {
    "docs/decode-h200.svg": decode_plot,
    "docs/packages.svg": diagrams.packages,
    "docs/batch.svg": diagrams.batch,
}
"""Files that are generated as a whole."""


def _ours() -> dict[str, Registered]:
    backends = load_registry().backends.items()
    return {name: backend for name, backend in backends if backend.source.distribution.startswith("attnplug")}


@cache
def _run(command: str, *, plugins: str = "", sample: bool = False) -> str:
    """Output of a command on a machine without a GPU. A sample includes standard error.

    ``plugins`` are distributions, separated by commas; the default is all of this repository, regardless of what else
    is installed.
    """
    program, *arguments = command.split()
    words = [str(Path(sys.executable).parent / program), *arguments]
    if command == "make run":
        words = [sys.executable, "examples/generate_and_check.py"]
    plugins = plugins or ",".join(sorted({backend.source.distribution for backend in _ours().values()}))
    environment = {**os.environ, "ATTNPLUG_PLUGINS": plugins, "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
    environment["ATTNPLUG_TABLES"] = "off"  # ignore measurements of this machine
    environment["COLUMNS"] = "1000" if "--help" in command else "150"  # help: one line per command
    errors = subprocess.STDOUT if sample else subprocess.PIPE
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=environment, check=False
    )
    return "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())


def output_of(content: str, *, sample: bool) -> str:
    """A command and its output, or the first lines of it."""
    command, *options = content.split(" | ")
    plugins = next((",".join(option.split()[1:]) for option in options if option.startswith("with ")), "")
    lines = _run(command, plugins=plugins, sample=sample).splitlines()
    for option in options:
        if option.endswith(" lines"):
            lines = [*lines[: int(option.removesuffix(" lines"))], "…"]
    return "\n".join(["```console", f"$ {command}", *lines, "```"])


def generated(text: str, *, samples: bool) -> str:
    """Return a page with its generated blocks up to date, and its samples if requested."""

    def block(match: re.Match[str]) -> str:
        kind, content = match.groups()
        if kind == "sample" and not samples:
            return match[0]
        if content in TABLES:
            body = TABLES[content]()
        elif content.startswith("file "):
            body = f"```python\n{(ROOT / content.removeprefix('file ')).read_text()}```"
        else:
            body = output_of(content, sample=kind == "sample")
        return f"<!-- {kind}: {content} -->\n{body}\n<!-- end -->"

    return _BLOCK.sub(block, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if a page is out of date (part of make lint)")
    parser.add_argument("--samples", action="store_true", help="rewrite samples, too: output with times")
    given, stale = parser.parse_args(), []
    for page in (*PAGES, *map(ROOT.joinpath, FILES)):
        now = page.read_text() if page.exists() else ""
        whole = FILES.get(str(page.relative_to(ROOT)))
        wanted = generated(now, samples=given.samples) if whole is None else whole()
        if now == wanted:
            continue
        stale.append(str(page.relative_to(ROOT)))
        if not given.check:
            page.write_text(wanted)
    if stale and given.check:
        sys.exit(f"out of date: {', '.join(stale)}; run 'make docs'")


if __name__ == "__main__":
    main()
