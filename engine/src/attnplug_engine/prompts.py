"""Prompts from the command line and from JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnplug.errors import UsageError
from attnplug_engine.chat import Chat
from attnplug_engine.launch import readable
from attnplug_engine.request import SamplingParams

_PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
_PARAM_KEYS = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop_token_ids")


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One prompt and how its tokens are chosen. ``where`` is its place, for errors: ``prompts.jsonl:3``."""

    prompt: str | list[int] | Chat
    params: SamplingParams
    where: str
    id: object = None
    """What the line calls itself; passed through."""


def read_prompts(path: str, defaults: SamplingParams, *, chat: bool = False) -> list[PromptLine]:
    """The prompts of a file of JSON lines; empty lines are left out. A bad line is an error with its number.

    With ``chat`` a prompt that is a text is one message of a user.
    """
    try:
        text = _read(readable(path))
    except OSError as error:
        raise UsageError(f"--prompts {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompts {path} is not UTF-8 text: byte {error.start} cannot be decoded") from error
    lines = list(_lines(text, path, defaults, chat))
    if not lines:
        raise UsageError(f'--prompts {path} holds no prompt; write one JSON object a line: {{"prompt": "…"}}')
    return lines


def _read(path: str) -> str:
    if path == "-" and sys.stdin is None:
        raise OSError("standard input is closed")
    content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    return content.decode("utf-8-sig")


def _lines(text: str, path: str, defaults: SamplingParams, chat: bool) -> Iterator[PromptLine]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                yield _line(json.loads(line), defaults, where, chat)
            except json.JSONDecodeError as error:
                raise UsageError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
            except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
                raise UsageError(f"{where}: not JSON that can be read: {error}") from None


def _line(value: Any, defaults: SamplingParams, where: str, chat: bool) -> PromptLine:
    if not isinstance(value, dict):
        raise UsageError(f'{where}: not an object; write {{"prompt": "…"}} or {{"prompt_token_ids": […]}}')
    unknown = sorted(value.keys() - {*_PROMPT_KEYS, *_PARAM_KEYS, "id"})
    if unknown:
        raise UsageError(
            f"{where}: unknown keys {', '.join(unknown)}; known are {', '.join(_PROMPT_KEYS + _PARAM_KEYS)}"
        )
    given = [key for key in _PROMPT_KEYS if key in value]
    if len(given) != 1:
        raise UsageError(f"{where}: give exactly one of {' and '.join(_PROMPT_KEYS)}, not {len(given)}")
    prompt = value[given[0]]
    if given[0] == "prompt" and not isinstance(prompt, str):
        raise UsageError(f"{where}: prompt is {prompt!r}; it must be a string")
    if given[0] == "prompt_token_ids" and not isinstance(prompt, list):
        raise UsageError(f"{where}: prompt_token_ids is {prompt!r}; it must be a list of token ids")
    changes = {key: value[key] for key in _PARAM_KEYS if key in value}
    if "stop_token_ids" in changes:
        if not isinstance(changes["stop_token_ids"], list):
            raise UsageError(
                f"{where}: stop_token_ids is {changes['stop_token_ids']!r}; it must be a list of token ids"
            )
        try:
            changes["stop_token_ids"] = frozenset(changes["stop_token_ids"]) | defaults.stop_token_ids
        except TypeError:
            raise UsageError(f"{where}: stop_token_ids holds something that is no token id") from None
    try:
        if given[0] == "messages":
            prompt = Chat(prompt)
        elif chat and given[0] == "prompt":
            prompt = Chat.of_user(prompt)
        return PromptLine(prompt, replace(defaults, **changes), where, value.get("id"))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
