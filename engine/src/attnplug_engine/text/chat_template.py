"""Chat template of a checkpoint: renders a conversation as the text that its model expects.

A template is untrusted code. It runs in Jinja's sandbox, with the names that transformers provides, so that the same
text is rendered.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from attnplug import UsageError
from attnplug.declare.errors import describe_error
from attnplug.hf.config_keys import read_json_object, read_text, show
from attnplug_engine.checkpoints.random import TINY
from attnplug_engine.checkpoints.safetensors import checkpoint_folder
from attnplug_engine.text.chat import Chat
from attnplug_engine.text.tokenizer_config import TokenizerConfig

_KEY = "chat_template"
_MAX_CHARACTERS = 1 << 24
_MAX_POWER = 64
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled template. ``tokens`` are the special tokens that it may write, by names such as ``bos_token``."""

    def __init__(self, text: str, source: str, tokens: Mapping[str, str]) -> None:
        self._source, self._tokens = source, tokens
        try:
            self._template = _environment().from_string(text)
        except TemplateSyntaxError as error:
            raise UsageError(f"{source}: the chat template is wrong in line {error.lineno}: {error.message}") from error
        except Exception as error:  # e.g. RecursionError for thousands of brackets
            raise UsageError(f"{source}: the chat template cannot be compiled: {describe_error(error)}") from error

    @classmethod
    def find(cls, reference: str) -> ChatTemplate:
        """Find the template of a model reference, where transformers looks for it. Raises UsageError."""
        if reference.startswith(TINY):
            raise UsageError(f"{reference} has no chat template: a built-in model is not trained on conversations")
        folder = checkpoint_folder(reference)
        config = TokenizerConfig(folder)
        text, source = _text(folder, config.values)
        return cls(text, str(source), config.special_tokens)

    def render(self, chat: Chat) -> str:
        """Render the conversation up to the start of the model's answer. Raises UsageError if the template fails."""
        messages = _with_reasoning(chat.messages)
        keys = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        parts, count = [], 0
        try:
            for part in self._template.generate(self._tokens, **keys):
                parts.append(part)
                count += len(part)
                if count > _MAX_CHARACTERS:
                    raise TemplateError(f"it writes more than {_MAX_CHARACTERS} characters")
        except TemplateError as error:  # includes raise_exception() of the template
            raise UsageError(f"{self._source}: the chat template refuses: {error.message}") from error
        except Exception as error:
            raise UsageError(f"{self._source}: the chat template fails: {describe_error(error)}") from error
        return "".join(parts)


def _with_reasoning(messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Copy a message's reasoning to all key names that templates read."""
    copied: list[Mapping[str, object]] = []
    for message in messages:
        given = next((message[key] for key in _REASONING if message.get(key) is not None), None)
        copied.append(message if given is None else {"thinking": given, **message, "reasoning_content": given})
    return copied


def _text(folder: Path, config: Mapping[str, object]) -> tuple[str, Path]:
    """Return the template and the file it is from. A file of its own takes precedence over the config."""
    path = folder / "chat_template.jinja"
    if os.path.lexists(path):
        return read_text(path), path
    path, value = folder / "tokenizer_config.json", config.get(_KEY)
    older = folder / "chat_template.json"
    if value is None and os.path.lexists(older):
        path, value = older, read_json_object(older).get(_KEY)
    if value is None:
        raise UsageError(
            f"the checkpoint {str(folder)!r} has no chat template, neither as chat_template.jinja nor in "
            "tokenizer_config.json; write the prompt as the model expects it, and give it as text"
        )
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        if "default" not in named:
            raise UsageError(f"{path}: '{_KEY}' has no template named 'default'; it has {show(list(named))}")
        value = named["default"]
    if not isinstance(value, str):
        raise UsageError(f"{path}: '{_KEY}' is {show(value)}; it must be a text, or a list of named templates")
    return value, path


class _Generation(Extension):
    """``{% generation %}``, which marks training targets: renders its body unchanged."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """Namespace without names that begin with an underscore, which would lead out of the sandbox."""

    def __init__(*args: object, **attributes: object) -> None:
        self, *rest = args
        assert isinstance(self, _PlainNamespace)
        values: dict[str, object] = dict(*rest, **attributes)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have {name!r}: names with an underscore in front are not allowed")


class _Dict:
    """``dict`` for templates: a constructor without access to its class."""

    def __call__(self, *args: object, **values: object) -> dict[str, object]:
        return dict(*args, **values)

    def fromkeys(self, *args: object) -> dict[object, object]:
        return dict.fromkeys(*args)  # type: ignore[call-overload, no-any-return]


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which bounds ``range``, with bounded products and powers: ``'x' * 10**10`` would take all
    memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        counts = [len(value) if isinstance(value, str | list | tuple) else value for value in (left, right)]
        if operator == "**":
            too_large = isinstance(right, int) and right > _MAX_POWER
        else:
            too_large = counts != [left, right] and math.prod(counts) > _MAX_CHARACTERS
        if too_large:
            raise SecurityError(f"{show(left)} {operator} {show(right)} is too large")
        return super().call_binop(context, operator, left, right)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda text: datetime.now().strftime(text),
        "dict": _Dict(),
        "namespace": _PlainNamespace,
    }
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize without Jinja's escaping of HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
