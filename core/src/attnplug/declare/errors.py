"""All exceptions of attnplug, refusals, and the keys of the settings that both name.

Exception contract: a message says who (plugin, distribution, version), which value was given, what is allowed and what
to do next. The same facts are attributes. The command prints the message and the settings to change, without a
traceback, and exits with ``exit_code``. A refusal is a reason why a backend cannot serve a problem: match on its code,
never on its text. Each host decides how its users spell a setting's key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, fields
from enum import StrEnum


class Setting(StrEnum):
    """Keys that core knows. A plugin names an option of its own backend as ``NAME.KEY``."""

    ATTENTION_BACKEND = "attention_backend"
    PREFILL_ATTENTION_BACKEND = "prefill_attention_backend"
    DECODE_ATTENTION_BACKEND = "decode_attention_backend"
    LINEAR_ATTENTION_BACKEND = "linear_attention_backend"
    DRAFT_ATTENTION_BACKEND = "draft_attention_backend"
    BACKEND_OPTION = "backend_option"
    DEVICE = "device"
    SM = "sm"
    DTYPE = "dtype"
    KV_DTYPE = "kv_dtype"
    INDEX_DTYPE = "index_dtype"
    PAGE_SIZE = "page_size"
    LAYOUT = "layout"
    CUDA_GRAPH = "cuda_graph"
    BATCH_INVARIANT = "batch_invariant"
    EXACT_LENGTHS = "exact_lengths"
    SPECULATIVE_TOKENS = "speculative_tokens"
    SPECULATIVE_TOPK = "speculative_topk"
    SPECULATIVE_ATTENTION_MODE = "speculative_attention_mode"
    TENSOR_PARALLEL = "tensor_parallel"
    MAX_BATCH = "max_batch"
    NUM_PAGES = "num_pages"
    STATE_SLOTS = "state_slots"
    CONTEXT_LENGTH = "context_length"
    CHUNKED_PREFILL_SIZE = "chunked_prefill_size"
    ENABLE_HISPARSE = "enable_hisparse"
    MLA_EXTEND = "mla_extend"


Render = Callable[[str], str | None]
"""Returns a host's spelling of a key, such as ``block_size`` for ``page_size``; ``None`` if users cannot set it."""


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
        return AttnplugError.format(self, lambda key: None)


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


class RefusalCode(StrEnum):
    """Codes used by core. A plugin's check may use its own codes."""

    ROLE = "role"
    KIND = "kind"
    FEATURE = "feature"
    DEVICE = "device"
    SM = "sm"
    ARCHITECTURE = "architecture"
    DTYPE = "dtype"
    KV_DTYPE = "kv_dtype"
    INDEX_DTYPE = "index_dtype"
    PAGE_SIZE = "page_size"
    LAYOUT = "layout"
    LENGTHS = "lengths"
    HEADS = "heads"
    HEAD_DIM = "head_dim"
    MLA_DIMS = "mla_dims"
    LAYERS = "layers"
    SPECULATION = "speculation"
    CUDA_GRAPH = "cuda_graph"
    INVARIANCE = "invariance"
    TENSOR_PARALLEL = "tensor_parallel"
    REQUIREMENT = "requirement"
    IMPORT = "import"
    FACTORY = "factory"
    CHECK_FAILED = "check_failed"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason why a backend cannot serve a problem.

    ``Refusal("page_size", "page size 24 is not supported", value=24, allowed=[32, 64], setting="page_size")``

    ``value`` and ``allowed`` are plain data (strings, numbers, lists of them), written as JSON. ``setting`` is the key
    to change: a ``Setting``, or ``NAME.KEY`` for an option of backend ``NAME``. ``advice`` is a command that helps.
    """

    code: str
    message: str
    value: object = None
    allowed: object = None
    setting: str | None = None
    advice: str | None = None

    def __post_init__(self) -> None:
        for name in ("code", "message", "setting", "advice"):
            text = getattr(self, name)
            if not isinstance(text, str) and not (name in ("setting", "advice") and text is None):
                raise PluginError(f"a Refusal's {name} must be a string, not {text!r}")

    def as_json(self) -> Mapping[str, object]:
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    def format(self, render: Render) -> str:
        """Return the message and the remedy, with the setting as ``render`` spells it."""
        shown = None if self.setting is None else render(self.setting)
        remedies = [text for text in (shown and f"change {shown}", self.advice) if text]
        return f"{self.message} ({' or '.join(remedies)})" if remedies else self.message

    def __str__(self) -> str:
        return self.format(str)


def _plain(value: object) -> object:
    """Convert any value of a plugin's check to JSON data."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Set):
        return sorted((_plain(item) for item in value), key=str)
    return str(value)
