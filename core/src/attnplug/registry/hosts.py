"""Specs of foreign engines that a bridge connects to: supported versions, limits, and their names for our settings.

A bridge declares its host by an entry point. ``attnplug explain`` and the running bridge use the same spec.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from attnplug.declare.errors import PluginError, Refusal, RefusalCode, Render, UsageError
from attnplug.declare.installed import installed_version
from attnplug.declare.problem import Problem
from attnplug.declare.spec import Source
from attnplug.registry.loading import attributed, find_entry_points, load_entry_point

GROUP = "attnplug.hosts"
"""Entry-point group in which a bridge declares its host: name = the host's name, target = a :class:`HostSpec`."""

DOCS = "https://github.com/attnplug/attnplug/blob/main/docs/hosts.md"
"""Documentation of the available bridges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """Spec of a host. The module that defines it must import neither torch nor the host.

    Example::

        HOST = HostSpec(title="vLLM", distributions=("vllm",), versions=">=0.26,<0.33", render=..., fit=..., refuse=...)
    """

    title: str
    """Name as its users write it: ``vLLM``."""
    distributions: tuple[str, ...]
    """Names of its distributions; more than one if it is published under several names."""
    versions: str
    """Versions that the bridge supports: ``>=0.26,<0.33``."""
    render: Render
    """Return the host's spelling of a setting, or None if the host has no such setting."""
    fit: Callable[[Problem], Problem]
    """Return the problem with the host's cache layout, kind of lengths and CUDA graphs."""
    refuse: Callable[[Problem], Iterable[Refusal]]
    """Return refusals that hold for every backend."""
    per_batch: Callable[[Problem], bool] = lambda problem: False
    """Return True if ``auto`` may choose a backend per batch for a problem (see :func:`default_ranking`)."""

    def installed(self) -> str | None:
        """Return the installed version, or None."""
        return next((found for name in self.distributions if (found := installed_version(name)) is not None), None)

    def version_refusal(self, found: str) -> Refusal | None:
        """Return the refusal of a version that the bridge does not support, or None."""
        from packaging.specifiers import SpecifierSet  # imported here to keep start-up without a host fast

        if SpecifierSet(self.versions).contains(found, prereleases=True):
            return None
        return Refusal(
            RefusalCode.REQUIREMENT,
            f"this is {self.title} {found}, but the bridge is made for {self.versions}",
            found,
            self.versions,
            advice=f"pip install '{self.distributions[0]}{self.versions}', or another version of the bridge",
        )

    def refusals(self, problem: Problem) -> list[Refusal]:
        """Return every refusal of a problem by this host, including that of the installed version."""
        version = None if (found := self.installed()) is None else self.version_refusal(found)
        return [*filter(None, [version]), *self.refuse(problem)]


def load_host(name: str) -> tuple[HostSpec, Source]:
    """Load the spec of a host and return it with its bridge's source.

    Raises UsageError if no installed bridge declares the host, and PluginError if its spec cannot be loaded.
    """
    points, _ = find_entry_points(GROUP)
    named = [point for point in points if point.name == name]
    if not named:
        known = sorted({point.name for point in points})
        installed = f"installed: bridges to {', '.join(known)}" if known else "no bridge is installed"
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"{installed}; {DOCS} lists the available ones"
        raise UsageError(f"no installed package provides a bridge to host {name!r}; {hint}")
    if len(named) > 1:
        claimants = " and ".join(f"{Source.of(point)} ({point.value})" for point in named)
        raise PluginError(f"host {name!r} is claimed by {claimants}, so neither is used; uninstall one")
    with attributed("host", named[0]):
        spec = load_entry_point(named[0])
        if not isinstance(spec, HostSpec):
            raise PluginError(f"it is {spec!r}, not a HostSpec")
    return spec, Source.of(named[0])
