"""What can be refused before vLLM starts any process: the command line, read for what concerns attention.

vLLM gives plugins no configuration when it loads them, and makes layers in worker processes, tens of seconds later. The
command line is there at once. A program that calls vLLM's ``LLM`` has none, and is judged when its layers are made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnplug import DType, ModelSpec, Problem, Refusal, Setting
from attnplug.host import AttnplugError, ModelConfigError, Registry, UsageError, load_model, model_dtype, select
from attnplug_vllm.config import SECTION, read_settings
from attnplug_vllm.host import HOST, render
from attnplug_vllm.words import refused

CUSTOM = "CUSTOM"


def options_of(argv: Sequence[str]) -> dict[str, str]:
    """``--name value`` and ``--name=value``, by name without dashes; the last one counts. A flag alone is empty."""
    found: dict[str, str] = {}
    arguments = list(argv)
    for place, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            following = arguments[place + 1] if place + 1 < len(arguments) else "--"
            name, _, keys = name.partition(".")
            key = name.replace("_", "-") + (f".{keys}" if keys else "")
            found[key] = value if equals else "" if following.startswith("--") else following
    return found


def additional_config(options: Mapping[str, str]) -> dict[str, Any]:
    """What ``--additional-config`` gives, in one piece or key by key; nothing where vLLM itself will complain."""
    try:
        whole = json.loads(options.get("additional-config", "{}"))
    except ValueError:
        return {}
    config: dict[str, Any] = whole if isinstance(whole, dict) else {}
    for name, value in options.items():
        first, _, keys = name.partition(".")
        if first == "additional-config" and keys:
            here, *path = config, *keys.split(".")
            for key in path[:-1]:
                here = here.setdefault(key, {}) if isinstance(here, dict) else {}
            if isinstance(here, dict):
                here[path[-1]] = _value(value)
    return config


def check_command_line(argv: Sequence[str], registry: Registry, device: str | None, sm: int | None) -> None:
    """Raise UsageError for a command line that asks for attnplug and cannot have it."""
    options = options_of(argv)
    config = additional_config(options)
    if SECTION not in config:
        return
    request = read_settings(config).request
    kinds = options.get("attention-config", "") + "".join(
        name for name in options if name.startswith("attention-config.")
    )
    if options.get("attention-backend", "").upper() != CUSTOM and not kinds and device != "cpu":
        raise UsageError(
            f"--additional-config asks for {SECTION}, but vLLM is not told to use it; add --attention-backend {CUSTOM}"
        )
    model = _model(argv, options)
    try:
        problem = HOST.fit(_problem(options, model, device, sm))
    except (ValueError, UsageError):  # vLLM complains of these itself
        problem = Problem()
    reasons: list[Refusal] = list(HOST.refuse(problem))
    if reasons:
        raise UsageError(refused(reasons))
    try:
        select(registry, request, problem)
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
    """The model, if it is a folder here whose layers attnplug can read; vLLM knows more models, and fetches some."""
    places = [place for place, argument in enumerate(argv) if argument == "serve"]
    name = options.get("model") or (argv[places[0] + 1] if places and places[0] + 1 < len(argv) else "")
    if not name or name.startswith("-") or not Path(name, "config.json").is_file():
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
