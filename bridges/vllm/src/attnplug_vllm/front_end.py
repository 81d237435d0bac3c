"""What can be refused before vLLM starts any process: the command line, read for what concerns attention.

vLLM gives plugins no configuration when it loads them, and makes layers in worker processes, tens of seconds later. The
command line is there at once. A program that calls vLLM's ``LLM`` has none, and is judged when its layers are made.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnplug import DType, ModelSpec, Problem, Refusal, Setting
from attnplug.host import (
    AttnplugError,
    ModelConfigError,
    Registry,
    UsageError,
    default_ranking,
    load_model,
    model_dtype,
    select,
)
from attnplug_vllm.config import CUSTOM, SECTION, read_settings, without_custom
from attnplug_vllm.host import HOST, render
from attnplug_vllm.words import refused

_SHORT = {"-tp": "--tensor-parallel-size", "-ac": "--attention-config"}
"""vLLM's short names of options that are read here."""
_OTHER_CONFIG = {"hf-overrides", "hf-config-path", "config-format"}
_NO_MLA = "VLLM_MLA_DISABLE"


def options_of(argv: Sequence[str]) -> dict[str, str]:
    """``--name value`` and ``--name=value``, by name without dashes; the last one counts. A flag alone is empty."""
    found: dict[str, str] = {}
    arguments = list(argv)
    for place, given in enumerate(arguments):
        short = re.split(r"[.=]", given, maxsplit=1)[0]
        argument = _SHORT.get(short, short) + given[len(short) :]
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            following = arguments[place + 1] if place + 1 < len(arguments) else "--"
            name, _, keys = name.partition(".")
            key = name.replace("_", "-") + (f".{keys}" if keys else "")
            found[key] = value if equals else "" if following.startswith("--") else following
    return found


def object_of(option: str, options: Mapping[str, str]) -> dict[str, Any]:
    """What an option gives as JSON in one piece, or key by key; nothing where vLLM itself will complain."""
    try:
        whole = json.loads(options.get(option, "{}"))
    except ValueError:
        return {}
    found: dict[str, Any] = whole if isinstance(whole, dict) else {}
    for name, value in options.items():
        first, _, keys = name.partition(".")
        if first == option and keys:
            here, *path = found, *keys.split(".")
            for key in path[:-1]:
                here = here.setdefault(key, {}) if isinstance(here, dict) else {}
            if isinstance(here, dict):
                here[path[-1]] = _value(value)
    return found


def additional_config(options: Mapping[str, str]) -> dict[str, Any]:
    """What ``--additional-config`` gives."""
    return object_of("additional-config", options)


def attention_backends(options: Mapping[str, str]) -> list[str]:
    """The attention backends that are named for all layers, or for some kind of layer."""
    attention = object_of("attention-config", options)
    kinds = attention.get("backend_per_kind")
    named = [options.get("attention-backend"), attention.get("backend")]
    named += kinds.values() if isinstance(kinds, dict) else []
    return [str(name).upper() for name in named if name and str(name).lower() != "auto"]


def check_command_line(argv: Sequence[str], registry: Registry, device: str | None, sm: int | None) -> None:
    """Raise UsageError for a command line that asks for attnplug and cannot have it."""
    options = options_of(argv)
    config = additional_config(options)
    if SECTION not in config:
        return
    request = read_settings(config).request
    names = attention_backends(options)
    if CUSTOM not in names and "config" not in options:  # a file may name it
        raise UsageError(without_custom(names))
    model = _model(argv, options)
    try:
        problem = HOST.fit(_problem(options, model, device, sm))
    except (ValueError, UsageError):  # vLLM complains of these itself
        problem = Problem()
    reasons: list[Refusal] = list(HOST.refuse(problem))
    if reasons:
        raise UsageError(refused(reasons))
    ranking = default_ranking(registry, problem, per_batch=HOST.per_batch(problem))
    try:
        select(registry, request, problem, ranking=ranking)
    except AttnplugError as error:
        raise UsageError(error.told(render)) from None


def _problem(options: Mapping[str, str], model: ModelSpec | None, device: str | None, sm: int | None) -> Problem:
    dtype = _type(options.get("dtype", "auto"), Setting.DTYPE)
    if dtype is None and model is not None:
        dtype = model_dtype(model)
        if dtype is DType.FLOAT32 and options.get("dtype", "auto") == "auto":
            dtype = None  # vLLM takes a smaller type then
    return Problem(
        model,
        device=device,
        sm=sm,
        dtype=dtype,
        kv_dtype=_type(options.get("kv-cache-dtype", "auto"), Setting.KV_DTYPE),
        page_size=int(options["block-size"]) if options.get("block-size") else None,
        tensor_parallel=int(options.get("tensor-parallel-size") or 1),
    )


def _model(argv: Sequence[str], options: Mapping[str, str]) -> ModelSpec | None:
    """The model, if it is a folder here whose layers attnplug can read; vLLM knows more models, and fetches some. Not
    judged is one that vLLM is told to see in another way."""
    places = [place for place, argument in enumerate(argv) if argument == "serve"]
    name = options.get("model") or (argv[places[0] + 1] if places and places[0] + 1 < len(argv) else "")
    if not name or name.startswith("-") or not Path(name, "config.json").is_file():
        return None
    if {option.partition(".")[0] for option in options} & _OTHER_CONFIG or os.environ.get(_NO_MLA, "0") != "0":
        return None
    try:
        return load_model(name)
    except ModelConfigError:
        return None


def _type(name: str, setting: Setting) -> DType | None:
    return None if name == "auto" else DType.parse(name, setting)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
