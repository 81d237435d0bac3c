"""Entry point of the command: ``attnplug`` and ``python -m attnplug``."""

from __future__ import annotations


def main() -> None:
    """Run the command. An interrupt ends it with one word, even while modules are still being imported."""
    from attnplug.machine import interrupt

    interrupt.end_quietly()
    from attnplug.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
