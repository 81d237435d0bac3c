"""Attribution of unexpected errors to the plugin whose code raised them."""

from __future__ import annotations

import traceback

from importlib_metadata import EntryPoint

from attnplug.declare.errors import PluginError, describe_error
from attnplug.declare.registered import Source
from attnplug.registry.loading import find_plugins


def plugin_fault(error: BaseException) -> PluginError | None:
    """Return a PluginError that names the plugin whose code raised ``error``, or None if none did."""
    packages = {package: Source.of(point) for point in find_plugins()[0] for package in _packages(point)}
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        source = packages.get(str(frame.f_globals.get("__name__")).partition(".")[0])
        if source is not None and not source.embedded:
            place = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
            return PluginError(f"plugin {source.entry_point} ({source}) failed at {place}: {describe_error(error)}")
    return None


def _packages(point: EntryPoint) -> set[str]:
    """Return the top-level packages and modules of a plugin's target and of its distribution."""
    try:
        files = point.dist.files or [] if point.dist is not None else []
        return {point.module.partition(".")[0], *(file.parts[0].removesuffix(".py") for file in files)}
    except Exception:  # a damaged installation
        return set()
