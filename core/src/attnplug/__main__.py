"""``python -m attnplug``."""

from attnplug.cli.main import main

main()
