"""``attnplug plugins``: what installed packages bring, and which packages of ours are not installed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from attnplug.choose.hosts import GROUP
from attnplug.choose.loading import find_entry_points, normal
from attnplug.choose.registry import Registry, load_registry
from attnplug.cli import output
from attnplug.cli.backends import Row, listing
from attnplug.cli.foreign import claims, conflict
from attnplug.cli.text import table
from attnplug.cli.warn import warn_of_the_rest
from attnplug.declare.registered import Source
from attnplug.hf.tiny import TINY

OURS: Mapping[str, str] = {
    "attnplug-conformance": "Proves an attnplug backend right: every claim against float64, with a diagnosis in plain "
    "words",
    "attnplug-engine": "Runs real models on any attnplug backend: checkpoints, models, tensor parallelism, "
    "continuous batching",
    "attnplug-tune": "Measures attention backends: tune finds the fastest for a model here, bench compares them "
    "with their libraries",
    "attnplug-flashattention": "MHA, GQA and MLA prefill over FlashAttention kernels",
    "attnplug-flashinfer": "MHA and GQA over FlashInfer's paged kernels",
    "attnplug-flashinfer-mla": "latent attention (MLA) over FlashInfer's kernels",
    "attnplug-flashmla": "latent attention (MLA) decode by FlashMLA on Hopper GPUs",
    "attnplug-triton-mha": "MHA and GQA by Triton kernels, planned on the device",
    "attnplug-triton-mla": "latent attention (MLA) by Triton kernels, planned on the device",
    "attnplug-trtllm-mla": "latent attention (MLA) by TRT-LLM's generation kernels, on Blackwell",
    "attnplug-tokenspeed-mla": "latent attention (MLA) by TokenSpeed's kernels, on Blackwell",
    "attnplug-cutedsl-mla": "MLA decode by FlashInfer's CuTe DSL kernel, on Blackwell",
    "attnplug-hybrid-linear": "linear attention (GDN, KDA, Lightning, Mamba2) and short convolutions",
    "attnplug-vllm": "any attnplug backend inside vLLM",
    "attnplug-sglang": "any attnplug backend inside SGLang",
    "attnplug-transformers": "any attnplug backend inside transformers",
}
"""What there is to install, for people to read. Nothing is looked up here: entry points decide what is there (D1)."""


@dataclass(frozen=True, slots=True)
class Brought:
    """One thing that an installed package brings: a backend, a command, another hook's item, or a broken plugin."""

    distribution: str
    version: str
    kind: str
    name: str
    status: str
    text: str

    def as_json(self) -> dict[str, object]:
        return {"kind": self.kind, "name": self.name, "status": self.status, "text": self.text}


def list_plugins(own_commands: Collection[str], *, json: bool) -> int:
    registry = load_registry()
    brought = [_backend(row) for row in listing(registry, every=True)]
    brought += _commands(own_commands)
    brought += _hosts()
    brought += _other(registry)
    brought.sort(key=lambda one: (one.distribution != "attnplug", one.distribution, one.kind, one.name))
    here = {normal(one.distribution) for one in brought}
    missing = {name: text for name, text in OURS.items() if name not in here}
    if json:
        output.write_json({"installed": _by_package(brought), "available": [_offer(*item) for item in missing.items()]})
    else:
        cells = [(f"{b.distribution} {b.version}", f"{b.kind} {b.name}", b.text) for b in brought]
        print(table(("installed", "brings", "status"), cells))
        if missing:
            print("\n" + table(("not installed", "what it is", "to install"), [_cells(*i) for i in missing.items()]))
    warn_of_the_rest(registry)
    return 0


def _backend(row: Row) -> Brought:
    kind = "plugin" if row.status in ("broken", "blocked") else "backend"  # only the entry point of those is known
    return Brought(row.distribution, row.version, kind, row.name, row.status, row.text)


def _commands(own: Collection[str]) -> Iterator[Brought]:
    """Commands according to metadata. None is loaded, so a command that fails to load is not known to be broken."""
    found, _ = claims()  # what cannot be read is listed among the broken plugins
    for name, points in found.items():
        taken = conflict(name, points, own)
        for source in map(Source.of, points):
            status = "installed" if taken is None else "broken"
            yield Brought(source.distribution, source.version, "command", name, status, taken or "installed")


def _hosts() -> Iterator[Brought]:
    """Hosts according to metadata; ``explain --host`` loads them."""
    for source in map(Source.of, find_entry_points(GROUP)[0]):
        yield Brought(source.distribution, source.version, "host", source.entry_point, "installed", "installed")


def _other(registry: Registry) -> Iterator[Brought]:
    """What plugins bring beyond backends. Core's own is the same everywhere, and is left out."""
    kinds = [("workspace kind", name, kind.source) for name, kind in registry.workspace_kinds.items()]
    tables = [
        ("measured tables", path.stem, folder.source)
        for folder in registry.table_folders
        for path in sorted(folder.value.glob("*.json"))
    ]
    models = [("model", TINY + name, model.source) for name, model in registry.tiny_models.items()]
    for kind, name, source in (*kinds, *tables, *models):
        if not source.embedded:
            yield Brought(source.distribution, source.version, kind, name, "installed", "installed")


def _by_package(brought: list[Brought]) -> list[dict[str, object]]:
    packages: dict[tuple[str, str], list[Brought]] = {}
    for one in brought:
        packages.setdefault((one.distribution, one.version), []).append(one)
    return [
        {"distribution": distribution, "version": version, "brings": [one.as_json() for one in brings]}
        for (distribution, version), brings in packages.items()
    ]


def _offer(distribution: str, summary: str) -> dict[str, str]:
    return {"distribution": distribution, "summary": summary, "install": f"pip install {distribution}"}


def _cells(distribution: str, summary: str) -> tuple[str, str, str]:
    return distribution, summary, f"pip install {distribution}"
