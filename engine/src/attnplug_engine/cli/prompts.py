"""Prompts from the command line and from JSON lines."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TextIO

from attnplug import UsageError
from attnplug.hf.config_keys import show
from attnplug_engine.parallel.ranks import prompts_path
from attnplug_engine.request import SamplingParams
from attnplug_engine.text.chat import Chat

_PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
_PARAM_KEYS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "stop", "logprobs")


class _Keys(NamedTuple):
    """Keys of a line beside ``id``."""

    prompt: tuple[str, ...]
    params: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One prompt and its sampling parameters. ``where`` is its place in errors: ``prompts.jsonl:3``."""

    prompt: str | list[int] | Chat
    params: SamplingParams
    where: str
    id: str | int | float | None = None
    """The user's id of the prompt, repeated in its output line."""


def read_prompts(
    path: str, defaults: SamplingParams, *, chat: bool = False, embedded: bool = False, plain: bool = False
) -> list[PromptLine]:
    """Read the prompts of a file of JSON lines, or of standard input if ``path`` is ``-``.

    With ``chat``, a prompt that is a text becomes a conversation of one user message. Prompts to be ``embedded`` cannot
    be conversations and have no sampling parameters. With ``plain``, every line is a prompt as it is.
    """
    keys = _Keys(("prompt", "prompt_token_ids"), ()) if embedded else _Keys(_PROMPT_KEYS, _PARAM_KEYS)
    name = "standard input" if path == "-" else path
    try:
        with _opened(prompts_path(path)) as stream:
            lines = stream.read().split("\n")
        prompts = []
        for number, line in enumerate(lines, start=1):
            if line.strip():
                value = {"prompt": line.removesuffix("\r")} if plain else _json(line, f"{name}:{number}")
                prompts.append(_line(value, defaults, f"{name}:{number}", keys, chat))
    except OSError as error:
        raise UsageError(f"--prompts {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompts {path} is not UTF-8 text: byte {error.start} cannot be decoded") from error
    if not prompts:
        wanted = "a text per line" if plain else 'one JSON object per line: {"prompt": "…"}'
        raise UsageError(f"{name} holds no prompt; write {wanted}")
    return prompts


def check_files(model: str, lines: Iterable[PromptLine]) -> None:
    """Raise UsageError if a model is unknown, or lacks a file that a prompt needs. Reads no weights."""
    from attnplug_engine.models.architectures import load_spec  # imports torch
    from attnplug_engine.text.encoder import check_files as check
    from attnplug_engine.text.encoder import naming_prompt

    load_spec(model)
    for line in lines:
        with naming_prompt(line.where):
            check(model, line.prompt, stop=bool(line.params.stop))


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line, object_pairs_hook=_unique)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except ValueError:
        raise UsageError(f"{where}: not JSON that can be read: a number has thousands of digits") from None
    except RecursionError:
        raise UsageError(f"{where}: not JSON that can be read: thousands of brackets are open") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises UsageError for a repeated key; ``json`` would keep the last one."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise UsageError(f"the key {show(key)} is given twice; keep one")
        found[key] = value
    return found


def _opened(path: str) -> contextlib.AbstractContextManager[TextIO]:
    if path != "-":
        if os.path.exists(path) and stat.S_ISCHR(os.stat(path).st_mode) and path not in ("/dev/stdin", "/dev/tty"):
            raise UsageError(f"--prompts {path} is a device, which may never end; give a file, or - for standard input")
        return open(path, encoding="utf-8-sig")
    if sys.stdin is None:
        raise UsageError("--prompts - reads standard input, which is closed")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")
    return contextlib.nullcontext(sys.stdin)


def _line(value: Any, defaults: SamplingParams, where: str, keys: _Keys, chat: bool) -> PromptLine:
    if not isinstance(value, dict):
        raise UsageError(f'{where}: not an object; write {{"prompt": "…"}} or {{"prompt_token_ids": […]}}')
    known = (*keys.prompt, "id", *keys.params)
    if unknown := sorted(value.keys() - set(known)):
        raise UsageError(f"{where}: unknown keys {', '.join(unknown)}; known are {', '.join(known)}")
    given = [key for key in keys.prompt if key in value]
    if len(given) != 1:
        raise UsageError(f"{where}: give exactly one of {', '.join(keys.prompt)}, not {len(given)}")
    prompt = value[given[0]]
    if given[0] == "prompt" and not isinstance(prompt, str):
        raise UsageError(f"{where}: prompt is {show(prompt)}; it must be a string")
    if given[0] == "prompt_token_ids" and not isinstance(prompt, list):
        raise UsageError(f"{where}: prompt_token_ids is {show(prompt)}; it must be a list of token ids")
    changes = {key: value[key] for key in keys.params if key in value}
    if isinstance(changes.get("stop"), str):
        changes["stop"] = [changes["stop"]]
    for key, kind in (("stop_token_ids", "token ids"), ("stop", "texts")):
        if not isinstance(changes.get(key, []), list):
            raise UsageError(f"{where}: {key} is {show(changes[key])}; it must be a list of {kind}")
    if "stop_token_ids" in changes:
        try:
            changes["stop_token_ids"] = frozenset(changes["stop_token_ids"]) | defaults.stop_token_ids
        except TypeError:
            raise UsageError(f"{where}: stop_token_ids holds something that is not a token id") from None
    if "stop" in changes:
        changes["stop"] = (*changes["stop"], *defaults.stop)
    try:
        if given[0] == "messages":
            prompt = Chat(prompt)
        elif chat and given[0] == "prompt":
            prompt = Chat.of_user(prompt)
        return PromptLine(prompt, replace(defaults, **changes), where, _id(value))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _id(line: dict[str, Any]) -> str | int | float | None:
    value = line.get("id")
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise UsageError(f"id is {show(value)}; it must be a string or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"id is {value}, which JSON has no number for; write it as a string")
    return value
