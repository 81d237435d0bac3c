"""Objects that plugins provide, together with the plugin each comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from importlib_metadata import EntryPoint

from attnplug.declare.installed import HasMetadata, metadata_lines
from attnplug.declare.spec import BackendSpec

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of a plugin: its entry point and its distribution."""

    entry_point: str
    target: str
    distribution: str
    version: str

    @classmethod
    def of(cls, point: EntryPoint) -> Source:
        return cls(point.name, point.value, *distribution_identity(point.dist))

    @property
    def embedded(self) -> bool:
        """True if the plugin is core's own. Its module decides, because anyone can choose names and metadata."""
        return self.target.startswith("attnplug.")

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def distribution_identity(distribution: HasMetadata | None) -> tuple[str, str]:
    """Name and version of a distribution, with placeholders for what damaged or missing metadata lacks."""
    found = {} if distribution is None else metadata_lines(distribution)
    place = getattr(distribution, "_path", "made by hand")
    return found.get("name") or f"unknown distribution ({place})", found.get("version") or "?"


@dataclass(frozen=True, slots=True)
class Registered:
    """A backend that can be requested by name, and the plugin that provides it."""

    spec: BackendSpec
    source: Source


@dataclass(frozen=True, slots=True)
class Provided(Generic[Item]):
    """An object other than a backend, and the plugin that provides it."""

    value: Item
    source: Source
