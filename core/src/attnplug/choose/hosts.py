"""Engines that bridges carry backends into, as data: what they fix, what they lack, and their words for our settings.

A bridge declares its host by an entry point. An explanation reads it, and so does the bridge when it runs: both judge
alike.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from attnplug.choose.loading import find_entry_points, guarded, load_entry_point
from attnplug.declare.errors import PluginError, UsageError, describe_error
from attnplug.declare.installed import installed_version
from attnplug.declare.problem import Problem
from attnplug.declare.refusal import Refusal, RefusalCode
from attnplug.declare.registered import Source
from attnplug.declare.settings import Render

GROUP = "attnplug.hosts"
"""Entry-point group by which a bridge declares its host: name = the host's, target = a :class:`HostSpec`."""

_BROUGHT_BY = {name: f"attnplug-{name}" for name in ("vllm", "sglang", "transformers")}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """A host. The module that defines it imports neither torch nor the host."""

    title: str
    """Its name as its users write it: ``vLLM``."""
    distributions: tuple[str, ...]
    """What pip calls it; more than one if it is published under several names."""
    versions: str
    """The versions that the bridge is made for: ``>=0.26,<0.33``."""
    render: Render
    fit: Callable[[Problem], Problem]
    """The problem as this host poses it: with the layout, the lengths and the graphs that it has."""
    refuse: Callable[[Problem], Iterable[Refusal]]
    """What cannot be carried there, whichever backend is chosen."""
    per_batch: Callable[[Problem], bool] = lambda problem: False
    """Whether ``auto`` gives such a problem a backend for each batch, as :func:`default_ranking` takes it."""

    def installed(self) -> str | None:
        """The version that is installed here; ``None`` if it is not."""
        return next((found for name in self.distributions if (found := installed_version(name)) is not None), None)

    def version_refusal(self, found: str) -> Refusal | None:
        """The refusal of a version that the bridge is not made for; ``None`` if it is."""
        from packaging.specifiers import SpecifierSet  # here: a start-up that asks for no host need not pay for it

        if SpecifierSet(self.versions).contains(found, prereleases=True):
            return None
        return Refusal(
            RefusalCode.REQUIREMENT,
            f"this is {self.title} {found}, and the bridge to it is made for {self.versions}",
            found,
            self.versions,
            advice=f"pip install '{self.distributions[0]}{self.versions}', or another version of the bridge",
        )

    def refusals(self, problem: Problem) -> list[Refusal]:
        """Every reason against this host as it is installed here."""
        found = self.installed()
        version = None if found is None else self.version_refusal(found)
        return [*([] if version is None else [version]), *self.refuse(problem)]


def load_host(name: str) -> tuple[HostSpec, Source]:
    """A host that an installed bridge declares, and the bridge. Raises UsageError where none has that name."""
    points, _ = find_entry_points(GROUP)
    named = [point for point in points if point.name == name]
    if not named:
        known = sorted({point.name for point in points})
        hint = f"pip install {_BROUGHT_BY[name]}" if name in _BROUGHT_BY else _known(name, known)
        raise UsageError(f"no installed package leads to a host {name!r}; {hint}")
    sources = [Source.of(point) for point in named]
    if len(named) > 1:
        claimants = " and ".join(f"{source} ({source.target})" for source in sources)
        raise PluginError(f"host {name!r} is claimed by {claimants}, so neither is used; uninstall one")
    try:
        with guarded():
            spec = load_entry_point(named[0])
        if not isinstance(spec, HostSpec):
            raise PluginError(f"it is {spec!r}; make it a HostSpec")
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"while loading host {name} ({sources[0]})") from error
    except BaseException as error:  # packages raise anything on import
        raise PluginError(
            f"host {name!r} ({sources[0]}, {sources[0].target}) cannot be loaded: {describe_error(error)}"
        ) from error
    return spec, sources[0]


def _known(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name.lower(), [*known, *_BROUGHT_BY], n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"there are {', '.join(known)}" if known else f"there are bridges to {', '.join(_BROUGHT_BY)}, none is here"
