"""Early check of vLLM's command line, before vLLM starts any process.

vLLM loads plugins without a configuration and makes layers in worker processes, tens of seconds later. The command line
is available at once. Programs that call vLLM's ``LLM`` have none and are checked when layers are made.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnplug import DType, ModelSpec, Problem, Refusal, Setting, UsageError
from attnplug.host import AttnplugError, ModelConfigError, Registry, default_ranking, load_model, model_dtype, select
from attnplug_vllm.host import HOST, refusal_message, render
from attnplug_vllm.settings import CUSTOM, SECTION, missing_custom, read_request

_SHORT = {"-tp": "--tensor-parallel-size", "-ac": "--attention-config"}
"""vLLM's short forms of the options read here."""
_OVERRIDES = {"hf-overrides", "hf-config-path", "config-format"}
_DISABLES_MLA = "VLLM_MLA_DISABLE"


def options_of(argv: Sequence[str]) -> dict[str, str]:
    """Parse ``--name value`` and ``--name=value``, by name without dashes. The last one wins; a flag has value ""."""
    found: dict[str, str] = {}
    arguments = list(argv)
    for index, given in enumerate(arguments):
        short = re.split(r"[.=]", given, maxsplit=1)[0]
        argument = _SHORT.get(short, short) + given[len(short) :]
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            following = arguments[index + 1] if index + 1 < len(arguments) else "--"
            name, _, keys = name.partition(".")
            key = name.replace("_", "-") + (f".{keys}" if keys else "")
            found[key] = value if equals else "" if following.startswith("--") else following
    return found


def object_of(option: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Value of an option given as a JSON object or key by key; empty if the JSON is invalid, which vLLM reports."""
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
    """Value of ``--additional-config``."""
    return object_of("additional-config", options)


def attention_backends(options: Mapping[str, str]) -> list[str]:
    """Attention backends named for all layers, or for one kind of layer."""
    attention = object_of("attention-config", options)
    kinds = attention.get("backend_per_kind")
    named = [options.get("attention-backend"), attention.get("backend")]
    named += kinds.values() if isinstance(kinds, dict) else []
    return [str(name).upper() for name in named if name and str(name).lower() != "auto"]


def check_command_line(argv: Sequence[str], registry: Registry, device: str | None, sm: int | None) -> None:
    """Raise :class:`UsageError` if the command line requests attnplug and attnplug cannot serve it."""
    options = options_of(argv)
    config = additional_config(options)
    if SECTION not in config:
        return
    request = read_request(config)
    names = attention_backends(options)
    if CUSTOM not in names and "config" not in options:  # a configuration file may name it
        raise UsageError(missing_custom(names))
    model = _model(argv, options)
    try:
        problem = HOST.fit(_problem(options, model, device, sm))
    except (ValueError, UsageError):  # vLLM reports these itself
        problem = Problem()
    reasons: list[Refusal] = list(HOST.refuse(problem))
    if reasons:
        raise UsageError(refusal_message(reasons))
    ranking = default_ranking(registry, problem, per_batch=HOST.per_batch(problem))
    try:
        select(registry, request, problem, ranking=ranking)
    except AttnplugError as error:
        raise UsageError(error.format(render)) from error


def _problem(options: Mapping[str, str], model: ModelSpec | None, device: str | None, sm: int | None) -> Problem:
    dtype = _dtype(options.get("dtype", "auto"), Setting.DTYPE)
    if dtype is None and model is not None:
        dtype = model_dtype(model)
        if dtype is DType.FLOAT32 and options.get("dtype", "auto") == "auto":
            dtype = None  # vLLM then uses a smaller dtype
    return Problem(
        model,
        device=device,
        sm=sm,
        dtype=dtype,
        kv_dtype=_dtype(options.get("kv-cache-dtype", "auto"), Setting.KV_DTYPE),
        page_size=int(options["block-size"]) if options.get("block-size") else None,
        tensor_parallel=int(options.get("tensor-parallel-size") or 1),
    )


def _model(argv: Sequence[str], options: Mapping[str, str]) -> ModelSpec | None:
    """Model to check: a local folder whose layers attnplug can read.

    None for other models, which vLLM may know or download, and for options that override the model's configuration.
    """
    serve = [index for index, argument in enumerate(argv) if argument == "serve"]
    name = options.get("model") or (argv[serve[0] + 1] if serve and serve[0] + 1 < len(argv) else "")
    if not name or name.startswith("-") or not Path(name, "config.json").is_file():
        return None
    if {option.partition(".")[0] for option in options} & _OVERRIDES or os.environ.get(_DISABLES_MLA, "0") != "0":
        return None
    try:
        return load_model(name)
    except ModelConfigError:
        return None


def _dtype(name: str, setting: Setting) -> DType | None:
    return None if name == "auto" else DType.parse(name, setting)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
