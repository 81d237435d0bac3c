"""The command ``attnplug``. Exit codes: 0 good, 1 a refusal or failed check, 2 wrong usage."""

from __future__ import annotations

import os
import sys

from attnplug.cli import output
from attnplug.cli.app import run
from attnplug.cli.blame import plugin_fault
from attnplug.declare.errors import AttnplugError
from attnplug.machine import interrupt


def main() -> None:
    """Run the command; a person's mistake ends in one message on standard error, never in a traceback."""
    try:
        with output.safe_streams():
            sys.exit(_run())
    except AttnplugError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt as error:  # it may say what was interrupted
        print(f"interrupted {error}".rstrip(), file=sys.stderr)
        sys.exit(interrupt.EXIT_CODE)
    except BrokenPipeError:  # the reader of our output went away, as in 'attnplug backends | head -1'
        _discard_output()
        sys.exit(1)
    except OSError as error:
        if error.errno is None or error.filename is not None:  # not of our output
            raise
        _discard_output()
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def _run() -> int:
    """The command, where an error in a plugin's code is told as that. One in ours is a traceback, to be reported."""
    try:
        return run()
    except (AttnplugError, KeyboardInterrupt):
        raise
    except BaseException as error:
        fault = plugin_fault(error)
        if fault is None:
            raise
        raise fault from error


def _discard_output() -> None:
    """Python flushes standard output once more when it ends; let that succeed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
