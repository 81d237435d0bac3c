"""Entry point of the command ``attnplug``. Exit codes: 0 success, 1 refusal or failed check, 2 usage error."""

from __future__ import annotations

import argparse
import os
import sys

from attnplug.cli import output
from attnplug.cli.app import parse, run
from attnplug.cli.blame import plugin_fault
from attnplug.cli.options import option
from attnplug.declare.errors import AttnplugError
from attnplug.declare.settings import Render
from attnplug.machine import interrupt


def main() -> None:
    """Run the command. A user's mistake ends in one message on standard error, without a traceback."""
    render: Render = option
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
        fault = plugin_fault(error)
        if fault is None:
            raise
        raise fault from error


def _discard_output() -> None:
    """Redirect standard output to null, because Python flushes it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
