"""Reading of untrusted JSON and text files. Every failure is one UsageError that names the file."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from attnplug.declare.errors import UsageError
from attnplug.hf.config_keys import show

MOST_BYTES = 16 << 20
"""Size limit of a config. Users may pass the file with the weights by mistake."""


def read_json_object(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, object]:
    """Read a JSON object. Raises only UsageError, which names the file."""
    text = read_text(path, most_bytes)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UsageError(f"{path} is not JSON: {error.msg} at {where}") from error
    except RecursionError as error:
        raise UsageError(f"{path} is not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits
        raise UsageError(f"{path} is not JSON that can be read: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} is JSON, but not an object: it holds {show(value)}")
    return value


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Read a UTF-8 text file. Raises only UsageError, which names the file."""
    regular_size(path)
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise UsageError(f"{path} is larger than {most_bytes} bytes, the limit for such a file")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: byte {error.start} cannot be decoded") from error


def regular_size(path: Path) -> int:
    """Return the size of a file in bytes. Raises UsageError unless it is a regular file: reading a pipe would block."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{path} cannot be read: Is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path} cannot be read: it is not a regular file, but a pipe, a socket or a device")
    return status.st_size
