"""All exceptions of attnplug.

Exception contract: a message says who (plugin, distribution, version), which value was given, what is allowed and what
to do next. The same facts are attributes. The command prints the message and the settings to change, without a
traceback, and exits with ``exit_code``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from attnplug.declare.settings import Render, Setting

LONGEST_MESSAGE = 2000
"""Maximum characters shown of a foreign message: a compiler's log must not bury everything else."""
_NAMED_SETTING = re.compile(f"`({'|'.join(Setting)})`")


def describe_error(error: BaseException) -> str:
    """Return an exception as text for a terminal: type and message, or only the message of an AttnplugError."""
    if isinstance(error, AttnplugError):
        return str(error)
    try:
        text = str(error)
    except BaseException:  # an exception that cannot even be printed must still be reported
        text = "(its message cannot be printed)"
    if len(text) > LONGEST_MESSAGE:
        text = f"{text[:LONGEST_MESSAGE]}… ({len(text)} characters)"
    text = "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class AttnplugError(Exception):
    """Base class: something was refused, or a check failed.

    ``settings`` are the keys of the settings that a user can change. A message names a setting by its key in backticks;
    :meth:`format` replaces it with the host's spelling, ``str()`` with the plain key.
    """

    exit_code = 1

    def __init__(self, message: str = "", *, settings: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.settings = tuple(dict.fromkeys(settings))

    def format(self, render: Render) -> str:
        """Return the message with settings as ``render`` spells them; unmentioned settings are appended."""
        text, others = self.message, []
        for key in self.settings:
            shown = render(key)
            if f"`{key}`" in text:
                text = text.replace(f"`{key}`", shown or key)
            elif shown is not None:
                others.append(shown)
        return f"{text} ({', '.join(others)})" if others else text

    def __str__(self) -> str:
        text = self.message
        for key in self.settings:
            text = text.replace(f"`{key}`", key)
        return text


class UsageError(AttnplugError):
    """A user's request is invalid: a wrong name, option, file or value.

    Keys of ``Setting`` that its message names in backticks are ``settings`` too, behind the given ones.
    """

    exit_code = 2

    def __init__(self, message: str = "", *, settings: Iterable[str] = ()) -> None:
        super().__init__(message, settings=[*settings, *_NAMED_SETTING.findall(message)])


class PluginError(AttnplugError):
    """A plugin is faulty: its import, hooks, specs, contract version or names."""


class HookError(AttnplugError):
    """An optional hook requires an argument that its caller does not provide."""


class BackendError(AttnplugError):
    """A backend cannot be built or cannot run a call, or its factory returned something else."""


class PlanError(AttnplugError):
    """A batch and its plan do not belong together (B5)."""


class PoolError(AttnplugError):
    """A pool cannot provide, free or write a page, slot or row as requested."""


class WorkspaceError(AttnplugError):
    """Scratch memory was requested in a way that its contract forbids."""


class PluginWarning(UserWarning):
    """A plugin failed and is left out."""


class TableWarning(UserWarning):
    """Measured times cannot be used and are ignored."""
