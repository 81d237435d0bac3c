"""Commands that other packages bring, by entry points. A broken one matters only to those who ask for it."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Collection, Mapping

from importlib_metadata import EntryPoint

from attnplug.choose.loading import Broken, find_entry_points, guarded, load_entry_point
from attnplug.declare.errors import PluginError, UsageError, describe_error
from attnplug.declare.registered import Source

GROUP = "attnplug.commands"
"""Entry-point group by which other packages add commands: name = the command, target = ``declare(commands)``."""

_BROUGHT_BY = {
    "check": "attnplug-conformance",
    "conform": "attnplug-conformance",
    "new": "attnplug-conformance",
    "run": "attnplug-engine",
    "embed": "attnplug-engine",
    "tune": "attnplug-tune",
    "bench": "attnplug-tune",
}

Commands = argparse._SubParsersAction  # what argparse calls the place where commands are added


def add_all(commands: Commands[argparse.ArgumentParser], own: Collection[str]) -> None:
    """Add every command that can be loaded, with one line on standard error for each that cannot."""
    found, broken = claims()
    for fault in broken:
        print(f"warning: {fault.source}: {fault.error}", file=sys.stderr)
    for name, points in found.items():
        try:
            _add(commands, name, points, own)
        except PluginError as error:
            print(f"warning: {error}", file=sys.stderr)


def add(commands: Commands[argparse.ArgumentParser], asked: str, own: Collection[str]) -> None:
    """Add the command that was asked for; none of the others is loaded."""
    found, broken = claims()
    if asked not in found:
        known = [*own, *found]
        if asked in _BROUGHT_BY:
            hint = f"it comes with {_BROUGHT_BY[asked]}: pip install {_BROUGHT_BY[asked]}"
        else:
            near = difflib.get_close_matches(asked.lower(), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        unread = "".join(f"\n  {fault.source}: {fault.error}" for fault in broken)
        raise UsageError(f"there is no command {asked!r}; {hint}{unread}")
    _add(commands, asked, found[asked], own)


def claims() -> tuple[Mapping[str, list[EntryPoint]], list[Broken]]:
    """Every command's name with the entry points that claim it, and installations that cannot be read."""
    points, broken = find_entry_points(GROUP)
    found: dict[str, list[EntryPoint]] = {}
    for point in sorted(points, key=lambda point: point.name):
        found.setdefault(point.name, []).append(point)
    return found, broken


def conflict(name: str, points: Collection[EntryPoint], own: Collection[str]) -> str | None:
    """Why no claim to a command's name counts; ``None`` if there is one claim, and the name is free."""
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
    source = Source.of(point)
    try:
        with guarded():
            load_entry_point(point)(commands)
        declared = commands.choices.get(name)
        if declared is None:
            raise PluginError("it adds no command of that name")
        if declared.get_default("command") is None or declared.get_default("json") is None:
            raise PluginError("it adds its command without attnplug.cli.app.add_command")
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"while loading command {name} ({source})") from error
    except BaseException as error:  # packages raise anything on import, SystemExit too
        reason = describe_error(error)
        raise PluginError(f"command {name!r} ({source}, {point.value}) cannot be loaded: {reason}") from error
