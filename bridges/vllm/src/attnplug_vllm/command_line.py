"""Early check of vLLM's command line, before vLLM starts any process.

vLLM loads plugins without a configuration and makes layers in worker processes, tens of seconds later. The command line
is available at once. Programs that call vLLM's ``LLM`` have none and are checked when layers are made.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attnplug import AttentionKind, DType, ModelSpec, Problem, Refusal, Setting, UsageError
from attnplug.host import AttnplugError, ModelConfigError, Registry, default_ranking, load_model, model_dtype, select
from attnplug_vllm.host import (
    HOST,
    Feature,
    refusal_message,
    refused_mla_prefill,
    refused_sharding,
    refused_sparse,
    refused_without_lse,
    render,
    requested_invariance,
    unsupported_features,
)
from attnplug_vllm.kv_formats import cache_format
from attnplug_vllm.settings import CUSTOM, SECTION, missing_custom, read_request

_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-ac": "--attention-config",
    "-sc": "--speculative-config",
}
"""vLLM's short forms of the options read here."""
_OVERRIDES = {"hf-overrides", "hf-config-path", "config-format"}
_DISABLES_MLA = "VLLM_MLA_DISABLE"


def options_of(argv: Sequence[str]) -> dict[str, str]:
    """Parse ``--name value`` and ``--name=value``, by name without dashes. The last one wins; a flag has value "".

    Options of the file that ``--config`` names come first, as in vLLM. Empty if the file cannot be read, which vLLM
    reports.
    """
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
    if "config" not in found:
        return found
    import yaml  # vLLM requires it

    try:
        return {**_options_of_file(yaml.safe_load(Path(found["config"]).read_text())), **found}
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return {}


def _options_of_file(content: Mapping[str, Any]) -> dict[str, str]:
    given = {str(name).replace("_", "-"): value for name, value in content.items() if value is not False}
    texts = {name: json.dumps(value) if isinstance(value, dict) else str(value) for name, value in given.items()}
    return {name: "" if given[name] is True else text for name, text in texts.items()}


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


def requests_attnplug(options: Mapping[str, str], *, custom_is_ours: bool) -> bool:
    """Return True if the options have attnplug's section, or only name CUSTOM and no other package can be meant."""
    return SECTION in additional_config(options) or (custom_is_ours and CUSTOM in attention_backends(options))


def check_command_line(argv: Sequence[str], registry: Registry, device: str | None, sm: int | None) -> None:
    """Raise :class:`UsageError` if attnplug, which the command line requests, cannot serve it."""
    options = options_of(argv)
    config = additional_config(options)
    request = read_request(config)
    names = attention_backends(options)
    if CUSTOM not in names:
        raise UsageError(missing_custom(names))
    cache_format(options.get("kv-cache-dtype", "auto"), torch.float32)
    folder = _model_folder(argv, options)
    model = _model(folder)
    try:
        problem = _problem(options, model, device, sm)
    except (ValueError, UsageError):  # vLLM reports these itself
        problem = Problem()
    reasons = [*HOST.refuse(problem), *_unsupported(options, folder, model, device)]
    if _exceeds_one(options, "decode-context-parallel-size"):
        reasons += refused_without_lse(request, registry)
    if reasons:
        raise UsageError(refusal_message(reasons))
    ranking = default_ranking(registry, problem, per_batch=HOST.per_batch(problem))
    try:
        select(registry, request, problem, ranking=ranking)
    except AttnplugError as error:
        raise UsageError(error.format(render)) from error


def _unsupported(
    options: Mapping[str, str], folder: Path | None, model: ModelSpec | None, device: str | None
) -> Iterator[Refusal]:
    """Refusals of features, as far as options, environment and a local model's configuration show them."""
    kinds = {layer.kind for layer in model.full_layers} if model is not None else set()
    attention, kv_dtype = object_of("attention-config", options), options.get("kv-cache-dtype", "auto")
    yield from unsupported_features(
        {
            Feature.PCP: _exceeds_one(options, "prefill-context-parallel-size"),
            Feature.DBO: _is_on(options, "enable-dbo") or _exceeds_one(options, "ubatch-size"),
            Feature.NON_CAUSAL: attention.get("use_non_causal") is True,
            Feature.FAST_PREFILL: _is_on(options, "kv-sharing-fast-prefill"),
            Feature.COMPUTED_SCALES: _is_on(options, "calculate-kv-scales"),
            Feature.CHUNKED_ATTENTION: bool(folder is not None and _text_config(folder).get("attention_chunk_size")),
            Feature.MLA_FP8_ON_CPU: device == "cpu" and AttentionKind.MLA in kinds and kv_dtype in ("fp8", "fp8_e4m3"),
        }
    )
    ranks = 1 + _exceeds_one(options, "decode-context-parallel-size")
    if model is not None and model.is_sparse:
        yield from refused_sparse(ranks, attention.get("hisparse_config"))
    if ranks > 1 and AttentionKind.MHA in kinds and model is not None:
        windows = not _is_on(options, "disable-sliding-window")
        layers = [layer if windows else replace(layer, sliding_window=None) for layer in model.full_layers]
        interleave = options.get("cp-kv-cache-interleave-size", "1")
        yield from refused_sharding(
            layers,
            speculates=bool(object_of("speculative-config", options)),
            interleave=int(interleave) if interleave.isdecimal() else 1,
        )
    theirs, ours = attention.get("mla_prefill_backend"), additional_config(options).get(SECTION, {})
    if "prefill" in ours and AttentionKind.MLA in kinds:
        yield from refused_mla_prefill(None if theirs is None else str(theirs).upper(), ranks)


def _exceeds_one(options: Mapping[str, str], name: str) -> bool:
    return options.get(name, "").isdecimal() and int(options[name]) > 1


def _is_on(options: Mapping[str, str], flag: str) -> bool:
    """Return True if a flag is given. Its value is ignored: it may be the positional argument that follows."""
    return flag in options and f"no-{flag}" not in options


def _problem(options: Mapping[str, str], model: ModelSpec | None, device: str | None, sm: int | None) -> Problem:
    dtype = _dtype(options.get("dtype", "auto"), Setting.DTYPE)
    if dtype is None and model is not None:
        dtype = model_dtype(model)
        if dtype is DType.FLOAT32 and options.get("dtype", "auto") == "auto":
            dtype = None  # vLLM then uses a smaller dtype
    drafted = int(object_of("speculative-config", options).get("num_speculative_tokens") or 0)
    problem = Problem(
        model,
        device=device,
        sm=sm,
        dtype=dtype,
        kv_dtype=_kv_dtype(options.get("kv-cache-dtype", "auto")),
        page_size=int(options["block-size"]) if options.get("block-size") else None,
        tensor_parallel=int(options.get("tensor-parallel-size") or 1),
        speculative_tokens=1 + drafted if drafted else 0,
        invariant=requested_invariance(),
    )
    # Without the flag, vLLM decides later whether it schedules a step before lengths are known.
    return replace(HOST.fit(problem), exact_lengths=not (drafted and _is_on(options, "async-scheduling")))


def _model_folder(argv: Sequence[str], options: Mapping[str, str]) -> Path | None:
    """Folder of a local model, unless options override its configuration."""
    serve = [index for index, argument in enumerate(argv) if argument == "serve"]
    name = argv[serve[0] + 1] if serve and serve[0] + 1 < len(argv) else "-"
    name = options.get("model", "") if name.startswith("-") else name
    if not name or not Path(name, "config.json").is_file():
        return None
    if {option.partition(".")[0] for option in options} & _OVERRIDES or os.environ.get(_DISABLES_MLA, "0") != "0":
        return None
    return Path(name)


def _model(folder: Path | None) -> ModelSpec | None:
    """Model to check; None if attnplug cannot read its layers, since vLLM may know it or download it."""
    try:
        return None if folder is None else load_model(str(folder))
    except ModelConfigError:
        return None


def _text_config(folder: Path) -> dict[str, Any]:
    """Language model's part of a configuration; empty if it cannot be read, which vLLM reports."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        return {**config, **config.get("text_config", {})}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _dtype(name: str, setting: Setting) -> DType | None:
    return None if name == "auto" else DType.parse(name, setting)


def _kv_dtype(name: str) -> str | None:
    return None if name == "auto" else cache_format(name, torch.float32).name


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
