"""``attnplug backends``: list installed backends, their abilities and their status on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import NamedTuple

from attnplug.cli import output
from attnplug.cli.app import option, refusal_as_json
from attnplug.declare.capabilities import Capabilities
from attnplug.declare.errors import Refusal, RefusalCode
from attnplug.declare.problem import GraphLevel, Problem
from attnplug.declare.spec import Source
from attnplug.registry.registry import ALLOW_VARIABLE, Registry, load_registry


class BackendRow(NamedTuple):
    """One backend or plugin of the listing. ``status`` is ``usable``, ``refused``, ``broken`` or ``blocked``."""

    name: str
    source: Source
    contract: str | None
    status: str
    supports: str = ""
    reasons: tuple[Refusal, ...] = ()
    error: str | None = None

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "distribution": self.source.distribution,
            "version": self.source.version,
            "contract": self.contract,
            "status": self.status,
            "reasons": [refusal_as_json(reason, option) for reason in self.reasons],
            "error": self.error,
        }

    @property
    def text(self) -> str:
        """Status as text."""
        if self.status == "usable":
            return "usable here"
        if self.status == "refused":
            # The command has no options that change a setting.
            return "refused here: " + "; ".join(reason.format(lambda setting: None) for reason in self.reasons)
        return f"{self.status}: {self.error}"


def run(parsed: argparse.Namespace) -> int:
    registry, every = load_registry(), parsed.all
    if parsed.names:  # of all selectable backends, usable here or not; fast enough for shell completion
        output.write(list(registry.backends), "\n".join(registry.backends), json=parsed.json)
        return 0
    rows = list(listing(registry, every))
    columns = ("name", "distribution", "contract", "supports", "status")
    cells = [(row.name, str(row.source), row.contract or "", row.supports, row.text) for row in rows]
    output.write([row.as_json() for row in rows], output.table(columns, cells), json=parsed.json)
    hidden = [] if every else [(len(registry.broken), "broken"), (len(registry.blocked), "blocked")]
    counts = " and ".join(f"{count} {status}" for count, status in hidden if count)
    if counts:
        print(f"{counts} not shown; 'attnplug backends --all' shows them", file=sys.stderr)
    output.warn_of_plugins(registry, broken=False)
    return 0


def listing(registry: Registry, every: bool) -> Iterator[BackendRow]:
    """Yield usable and refused backends by name. With ``every``, broken and blocked plugins follow."""
    here = [
        Problem(device=name, sm=processor.sm or None, architecture=processor.architecture)
        for name in dict.fromkeys(("cuda", "cpu", *registry.devices))  # the first one decides between equal counts
        for processor in registry.processors(name)
    ]
    outcomes = [
        (backend, [backend.spec.refusals(problem) for problem in here]) for backend in registry.backends.values()
    ]
    registry.raise_if_check_failed((backend, refusals) for backend, found in outcomes for refusals in found)
    for backend, found in outcomes:
        # Empty if the backend can use any device of this machine; otherwise the refusals of the closest match.
        reasons = min(found, key=lambda refused: (RefusalCode.DEVICE in [each.code for each in refused], len(refused)))
        spec, status = backend.spec, "refused" if reasons else "usable"
        yield BackendRow(spec.name, backend.source, spec.contract, status, describe(spec.capabilities), tuple(reasons))
    if every:
        for broken in registry.broken:
            yield BackendRow(broken.name, broken.source, broken.contract, "broken", error=broken.error)
        for source in registry.blocked:
            yield BackendRow(source.entry_point, source, None, "blocked", error=f"{ALLOW_VARIABLE} does not list it")


def describe(can: Capabilities) -> str:
    """Return a one-line summary of a backend's capabilities."""
    devices = "/".join(sorted(can.devices or ["any device"]))
    parts = ["/".join(sorted(can.kinds)), "for " + "/".join(sorted(can.roles)), f"on {devices}"]
    if (low := can.min_sm) is not None or can.max_sm is not None:
        parts.append(f"SM {low}" if low == can.max_sm else f"SM {low or ''}–{can.max_sm or ''}")
    parts += [f"{device} {needed}" for device, needed in can.architectures.items()]
    parts.append("/".join(sorted(can.dtypes)))
    if can.kv_dtypes != can.dtypes:
        parts.append("KV " + ("in any format" if can.kv_dtypes is None else "/".join(sorted(can.kv_dtypes))))
    parts.append(f"page size {can.page_sizes}")
    if can.cuda_graph > GraphLevel.NEVER:
        parts.append(f"graphs {can.cuda_graph.name.lower()}")
    parts += sorted(can.features) + ["trees"] * can.trees
    return ", ".join(parts)
