"""Entry point of the command: ``attnplug`` and ``python -m attnplug``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command. An interrupt ends it with one word, even while modules are still being imported."""
    from attnplug.machine.interrupt import end_on_interrupt

    sys.excepthook = end_on_interrupt
    from attnplug.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
