"""An interrupt that comes while the command is still being imported, before ``main`` could catch it.

Importing this module is what prepares for it: the package does so before anything else.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

EXIT_CODE = 130
_COMMANDS = ("attnplug", "-m")
"""The script that pip writes, and ``python -m attnplug`` as long as this package is being imported."""


def _is_the_command() -> bool:
    arguments = getattr(sys, "argv", None) or [""]  # an embedded interpreter has none
    return os.path.basename(arguments[0]) in _COMMANDS


def _end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """End the process on an interrupt as ``main`` would: in a word, without a traceback."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    if sys.stderr is not None:
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
    os._exit(EXIT_CODE)  # without this the interpreter would end by the signal, after a traceback of its own


if _is_the_command():
    sys.excepthook = _end
