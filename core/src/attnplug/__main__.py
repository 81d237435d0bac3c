"""``python -m attnplug``."""

from attnplug.cli import main

main()
