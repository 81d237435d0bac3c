"""Entry point of the command ``attnplug``. Exit codes: 0 success, 1 refusal or failed check, 2 usage error."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import traceback

from importlib_metadata import EntryPoint

from attnplug.cli import output
from attnplug.cli.app import option, parse, run
from attnplug.declare.errors import AttnplugError, PluginError, Render, describe_error
from attnplug.declare.spec import Source
from attnplug.machine import interrupt
from attnplug.registry.loading import find_entry_points


def main() -> None:
    """Run the command. A user's mistake ends in one message on standard error, without a traceback."""
    render: Render = option
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # the stack of a crash names the plugin that was loading; see load_entry_point
    try:
        with output.safe_streams():
            parsed = parse()
            render = parsed.render
            sys.exit(_run(parsed))
    except AttnplugError as error:
        print(f"error: {error.format(render)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt as error:  # its text may name the plugin that was loading
        print(f"interrupted {error}".rstrip(), file=sys.stderr)
        sys.exit(interrupt.EXIT_CODE)
    except BrokenPipeError:  # the reader closed the pipe, as in 'attnplug backends | head -1'
        _discard_output()
        sys.exit(1)
    except OSError as error:
        if error.errno is None or error.filename is not None:  # unrelated to our output
            raise
        _discard_output()
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def _run(parsed: argparse.Namespace) -> int:
    """Run the command. An error in a plugin's code names the plugin; one in our code keeps its traceback."""
    try:
        return run(parsed)
    except (AttnplugError, KeyboardInterrupt, interrupt.Terminated):
        raise
    except BaseException as error:
        if (fault := _plugin_fault(error)) is None:
            raise
        raise fault from error


def _discard_output() -> None:
    """Redirect standard output to null, because Python flushes it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _plugin_fault(error: BaseException) -> PluginError | None:
    """Return a PluginError that names the plugin whose code raised ``error``, or None if none did."""
    packages = {package: Source.of(point) for point in find_entry_points()[0] for package in _packages(point)}
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
