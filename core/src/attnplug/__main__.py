"""Entry point of the command: ``attnplug`` and ``python -m attnplug``."""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found] # the public module imports others, which takes 5 ms
import os
import sys


def main() -> None:
    """Run the command. An interrupt ends it with one word, even while modules are still being imported."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # otherwise the caller ignores it
    if handled:
        signal.signal(signal.SIGINT, _end)
    from attnplug.cli.app import main as run

    if handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _end(*_: object) -> None:
    """Signal handler: end the process. Not an exception, which code that is being imported may catch or convert."""
    if sys.stderr is not None:
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
    os._exit(130)


if __name__ == "__main__":
    main()
