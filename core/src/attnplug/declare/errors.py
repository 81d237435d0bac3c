"""Every error that attnplug raises on purpose.

Exception contract: a message says who (plugin, distribution, version), what was asked, what is allowed and what to do
next, in one piece. The things that it names are also attributes. The command prints the message and the options to
change, without a traceback, and exits with ``exit_code``.
"""

from __future__ import annotations

from collections.abc import Iterable

from attnplug.declare.settings import Render

LONGEST_MESSAGE = 2000
"""How many characters of a foreign message are shown: a compiler's log must not bury everything else."""


def describe_error(error: BaseException) -> str:
    """A foreign exception as text for a terminal, with its type; one of ours is shown as its message."""
    if isinstance(error, AttnplugError):
        return str(error)
    try:
        text = str(error)
    except BaseException:  # an exception that cannot even be printed must still be reported
        text = "(its message cannot be printed)"
    if len(text) > LONGEST_MESSAGE:
        text = f"{text[:LONGEST_MESSAGE]}… ({len(text)} characters)"
    text = "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class AttnplugError(Exception):
    """Base of all: something was refused, or a check failed.

    ``settings`` are the keys of what a user can change about it. A message names a setting by its key in backticks, and
    :meth:`format` shows it as the host spells it. As a string, the error shows plain keys.
    """

    exit_code = 1

    def __init__(self, message: str = "", *, settings: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.settings = tuple(dict.fromkeys(settings))

    def format(self, render: Render) -> str:
        """The message with settings as ``render`` spells them; settings that it does not mention come last."""
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
    """What was asked for cannot be understood: a wrong name, option, file or value."""

    exit_code = 2


class PluginError(AttnplugError):
    """A plugin is wrong: its import, its hooks, its specs, its contract version or its names."""


class HookError(AttnplugError):
    """An optional hook cannot be called with what its caller offers."""


class BackendError(AttnplugError):
    """A backend could not be built, or what its factory returned is not a backend."""


class PlanError(AttnplugError):
    """A batch and its plan do not belong together (B5)."""


class PoolError(AttnplugError):
    """A page, slot or row was asked for, freed or written in a way the pool cannot honour."""


class WorkspaceError(AttnplugError):
    """Scratch memory was asked for in a way its contract forbids."""


class PluginWarning(UserWarning):
    """A plugin failed, and things go on without it."""


class TableWarning(UserWarning):
    """Measured times cannot be used, and things go on without them."""
