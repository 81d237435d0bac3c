"""Commands of other packages, found by entry points. A broken command is an error only for its own users."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Collection, Mapping

from importlib_metadata import EntryPoint

from attnplug.declare.errors import PluginError, UsageError
from attnplug.declare.registered import Source
from attnplug.registry.loading import Broken, attributed, find_entry_points, guarded, load_entry_point

DOCS = "https://github.com/attnplug/attnplug/blob/main/docs/commands.md"
GROUP = "attnplug.commands"
"""Entry-point group of commands: name = the command's name, target = a function ``declare(commands)``."""

Commands = argparse._SubParsersAction  # argparse's class of subcommands, private but returned by add_subparsers


def add_all(commands: Commands[argparse.ArgumentParser], own: Collection[str]) -> None:
    """Add every command that can be loaded. Print one line to standard error for each that cannot."""
    found, broken = claims()
    for fault in broken:
        print(f"warning: {fault.source}: {fault.error}", file=sys.stderr)
    for name, points in found.items():
        try:
            _add(commands, name, points, own)
        except PluginError as error:
            print(f"warning: {error}", file=sys.stderr)


def add(commands: Commands[argparse.ArgumentParser], name: str, own: Collection[str]) -> None:
    """Add one command without loading the others. Raises UsageError if no package provides it."""
    found, broken = claims()
    if name not in found:
        known = [*own, *found]
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands are {', '.join(known)}; packages add more, see {DOCS}"
        unreadable = "".join(f"\n  {fault.source}: {fault.error}" for fault in broken)
        raise UsageError(f"there is no command {name!r}; {hint}{unreadable}")
    _add(commands, name, found[name], own)


def claims() -> tuple[Mapping[str, list[EntryPoint]], list[Broken]]:
    """Return the entry points of every command by name, and installations that cannot be read."""
    points, broken = find_entry_points(GROUP)
    found: dict[str, list[EntryPoint]] = {}
    for point in sorted(points, key=lambda point: point.name):
        found.setdefault(point.name, []).append(point)
    return found, broken


def conflict(name: str, points: Collection[EntryPoint], own: Collection[str]) -> str | None:
    """Return an error if several packages claim a command's name or attnplug itself has it; otherwise None."""
    claimants = " and ".join(f"{Source.of(point)} ({point.value})" for point in points)
    if name in own:
        return f"command {name!r} of {claimants} is not used: attnplug has a command of that name"
    if len(points) > 1:
        return f"command {name!r} is claimed by {claimants}, so neither is used; uninstall one"
    return None


def _add(
    commands: Commands[argparse.ArgumentParser], name: str, points: list[EntryPoint], own: Collection[str]
) -> None:
    taken = conflict(name, points, own)
    if taken is not None:
        raise PluginError(taken)
    (point,) = points
    with attributed("command", point):
        with guarded():
            load_entry_point(point)(commands)
        declared = commands.choices.get(name)
        if declared is None:
            raise PluginError("it adds no command of that name")
        if declared.get_default("command") is None or declared.get_default("json") is None:
            raise PluginError("it does not add its command with attnplug.host.add_command")
