"""Whose fault an error is that nobody expected."""

from __future__ import annotations

import traceback

from attnplug.errors import PluginError, describe_error
from attnplug.loading import Source, find_plugins


def plugin_fault(error: BaseException) -> PluginError | None:
    """What to tell a user of an error that comes out of a plugin's code; ``None`` if it does not come from there.

    A plugin is known by the package that its entry point leads to.
    """
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    packages = {point.module.partition(".")[0]: Source.of(point) for point in find_plugins()[0]}
    for frame, line in reversed(frames):
        source = packages.get(str(frame.f_globals.get("__name__")).partition(".")[0])
        if source is not None and not source.embedded:
            place = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
            return PluginError(f"plugin {source.entry_point} ({source}) failed at {place}: {describe_error(error)}")
    return None
