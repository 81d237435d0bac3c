"""Table of architectures, and loading of a model by its reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from attnplug import ModelSpec, UsageError
from attnplug.hf.config_keys import Config, show
from attnplug.hf.model_config import UNSUPPORTED, text_model_config
from attnplug.host import ModelConfigError
from attnplug.host import load_model as read_layers
from attnplug.registry.registry import tiny_config
from attnplug_engine.checkpoints.random import TINY, RandomCheckpoint
from attnplug_engine.checkpoints.safetensors import (
    Checkpoint,
    CheckpointError,
    WeightSource,
    checkpoint_config,
    checkpoint_folder,
)
from attnplug_engine.checkpoints.tensor_names import HEAD, no_head, text_config, text_model, with_full_names
from attnplug_engine.models import (
    deepseek,
    deepseek_v4,
    gemma,
    gpt_oss,
    kimi,
    llama,
    mamba,
    minimax,
    mixture,
    nemotron,
    qwen_hybrid,
    ring,
)
from attnplug_engine.models.decoder import Decoder, LoadedModel
from attnplug_engine.models.layers import pack_weights
from attnplug_engine.models.rope import exact_length
from attnplug_engine.models.weights import Weights, holds_weight, quantization_of
from attnplug_engine.parallel.collectives import SINGLE, ParallelError, TensorParallel

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")

_PREDICTION = ("num_nextn_predict_layers", "num_mtp_layers")
_GEMMA_SCALES = ("query_pre_attn_scalar", "attn_logit_softcapping")
_SCALES = ("attention_multiplier", *_GEMMA_SCALES)
_LAYER_TYPES = ("layer_types", "sliding_window_pattern")


@dataclass(frozen=True, slots=True)
class Architecture:
    """Builder of models of one type. ``defaults`` are the defaults of the type's config class for absent keys.

    ``aliases`` map other config key names to those that ``build`` reads. ``extra_layers`` names keys that count layers
    behind the last one (multi-token prediction), and ``ignored`` are patterns of tensor names: a checkpoint may hold
    both, but the decoder does not use them. ``unknown`` are keys by which core reads attention of any model but which
    this type does not have: transformers ignores them. ``head`` is the name of the output head's weight.
    """

    build: Callable[[Weights, Config, ModelSpec], Decoder]
    defaults: Mapping[str, object] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    extra_layers: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    unknown: tuple[str, ...] = _SCALES
    head: str = HEAD


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(llama.llama, unknown=(*_SCALES, "sliding_window")),
    "mistral": Architecture(llama.mistral, unknown=(*_SCALES, *_LAYER_TYPES)),
    "qwen2": Architecture(llama.qwen2),
    "qwen3": Architecture(llama.qwen3),
    "granite": Architecture(llama.granite, llama.GRANITE_DEFAULTS, unknown=(*_GEMMA_SCALES, "sliding_window")),
    "smollm3": Architecture(llama.smollm3, llama.SMOLLM3_DEFAULTS),
    "olmo2": Architecture(llama.olmo2, llama.OLMO2_DEFAULTS, unknown=(*_SCALES, "sliding_window")),
    "phi3": Architecture(llama.phi3, llama.PHI3_DEFAULTS, unknown=(*_SCALES, *_LAYER_TYPES)),
    "gemma2": Architecture(gemma.gemma2, gemma.DEFAULTS, unknown=("attention_multiplier", "sliding_window_pattern")),
    "gemma3_text": Architecture(
        gemma.gemma3_text, gemma.DEFAULTS_3, unknown=("attention_multiplier", "attn_logit_softcapping")
    ),
    "mixtral": Architecture(
        mixture.mixtral, mixture.MIXTRAL_DEFAULTS, mixture.MIXTRAL_ALIASES, unknown=(*_SCALES, *_LAYER_TYPES)
    ),
    "qwen2_moe": Architecture(mixture.qwen2_moe, mixture.QWEN2_DEFAULTS),
    "qwen3_moe": Architecture(
        mixture.qwen3_moe, mixture.QWEN3_DEFAULTS, mixture.QWEN3_ALIASES, unknown=(*_SCALES, "layer_types")
    ),
    "glm4_moe": Architecture(
        mixture.glm4_moe,
        mixture.GLM_DEFAULTS,
        mixture.GLM_ALIASES,
        extra_layers=("num_nextn_predict_layers",),
        unknown=(*_SCALES, "sliding_window"),
    ),
    "gpt_oss": Architecture(
        gpt_oss.gpt_oss, gpt_oss.DEFAULTS, gpt_oss.ALIASES, unknown=(*_SCALES, "sliding_window_pattern")
    ),
    "deepseek_v2": Architecture(deepseek.deepseek_v2, deepseek.V2_DEFAULTS),
    "deepseek_v3": Architecture(deepseek.deepseek_v3, deepseek.V3_DEFAULTS, extra_layers=_PREDICTION),
    "deepseek_v32": Architecture(deepseek.deepseek_v32, deepseek.V32_DEFAULTS, extra_layers=_PREDICTION),
    "glm_moe_dsa": Architecture(deepseek.deepseek_v32, deepseek.GLM_DEFAULTS, extra_layers=_PREDICTION),
    "deepseek_v4": Architecture(
        deepseek_v4.deepseek_v4,
        deepseek_v4.DEFAULTS,
        ignored=deepseek_v4.PREDICTION,
        head=deepseek_v4.NAMES.head,
    ),
    "kimi_linear": Architecture(kimi.kimi_linear, kimi.DEFAULTS, kimi.ALIASES),
    "qwen3_next": Architecture(qwen_hybrid.qwen3_next, qwen_hybrid.NEXT_DEFAULTS, ignored=qwen_hybrid.PREDICTION),
    "qwen3_5_text": Architecture(qwen_hybrid.qwen3_5, qwen_hybrid.DEFAULTS, ignored=qwen_hybrid.PREDICTION),
    "minimax": Architecture(minimax.minimax, minimax.DEFAULTS, minimax.ALIASES, ignored=minimax.COMPUTED),
    "ring_linear": Architecture(
        ring.ring_linear,
        ring.DEFAULTS,
        ring.ALIASES,
        extra_layers=("num_nextn_predict_layers",),
        ignored=ring.PREDICTION,
    ),
    "mamba2": Architecture(mamba.mamba2, mamba.DEFAULTS, mamba.ALIASES),
    "nemotron_h": Architecture(nemotron.nemotron_h, nemotron.DEFAULTS, nemotron.ALIASES, ignored=nemotron.PREDICTION),
}
"""Architectures by the config's ``model_type``. ``docs/adding-an-architecture.md`` shows how to add one."""


class DivideDraft(Protocol):
    """Builds a rank's part of a draft without values, for a target's. Raises ParallelError if it cannot be divided."""

    def __call__(self, target: LoadedModel, dtype: torch.dtype, *, checked: bool) -> nn.Module: ...


class UnknownArchitecture(UsageError):
    """A model of a type that the engine cannot run. ``known`` are the supported types."""

    def __init__(self, reference: str, model_type: str) -> None:
        self.reference = reference
        self.model_type = model_type
        self.known = tuple(ARCHITECTURES)
        super().__init__(
            f"{reference!r} is of model type {model_type!r}, which is unknown to the engine; it runs: "
            f"{', '.join(self.known)}"
        )


def load_model(
    reference: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    parallel: TensorParallel = SINGLE,
    seed: int = 0,
    random_weights: bool = False,
    head: bool = True,
    progress: Callable[[int, int], None] | None = None,
    source: WeightSource | None = None,
) -> LoadedModel:
    """Load a Hugging Face folder, or the built-in ``tiny:NAME`` with random weights from ``seed``.

    With ``random_weights`` a folder's weights are random too: only its config is read. Without ``head`` the model
    returns hidden states and no logits, and a checkpoint needs no head. ``progress(done, total)`` is called for every
    tensor read from a folder. Under ``parallel`` only this rank's part is read. ``source`` is the result of
    ``open_source``, if the caller has it. Raises UsageError (ModelConfigError,
    CheckpointError, UnknownArchitecture, ParallelError).
    """
    spec = load_spec(reference)
    if source is None:
        source = open_source(reference, device=device, seed=seed, random_weights=random_weights)
    if isinstance(source, Checkpoint):
        source = _whole_model(source, spec, head=head)
    return build_model(source, spec, dtype=dtype, device=device, parallel=parallel, head=head, progress=progress)


def _whole_model(source: Checkpoint, spec: ModelSpec, *, head: bool) -> Checkpoint:
    """Return a checkpoint under the tensor names of a whole model. Raises MissingTensor if it lacks the ``head``."""
    architecture = ARCHITECTURES[spec.model_type]
    tied = {**architecture.defaults, **source.config}.get("tie_word_embeddings") is True
    if head and not tied and not holds_weight(source, architecture.head):
        raise no_head(source, architecture.head)
    return with_full_names(source)


def load_spec(reference: str) -> ModelSpec:
    """Return the layers of a model that the engine runs. Raises UnknownArchitecture rather than errors in other keys of
    the config. With longrope, the context ends where transformers would rotate cached keys in another way."""
    try:
        spec = read_layers(reference)
    except ModelConfigError as error:
        with suppress(ModelConfigError, CheckpointError):
            model_type = text_model_config(_config(reference), reference).model_type
            if model_type not in UNSUPPORTED:  # for these, the error has the reason
                _known(model_type, reference, error)
        raise
    _known(spec.model_type, reference)
    longest = exact_length(read_config(model_config(reference), reference, spec))
    return spec if longest is None else replace(spec, context_length=min(longest, spec.context_length))


def model_config(reference: str) -> Mapping[str, object]:
    """Return the config of a model reference; of a multimodal one, that of its text model."""
    return text_config(_config(reference), reference)


def _config(reference: str) -> Mapping[str, object]:
    return tiny_config(reference) if reference.startswith(TINY) else checkpoint_config(reference)


def open_source(
    reference: str, *, device: torch.device | str, seed: int = 0, random_weights: bool = False
) -> WeightSource:
    """Return the source of the weights of a model reference: its folder, or random numbers.

    Raises ModelConfigError for an unknown quantization scheme.
    """
    source: WeightSource
    if reference.startswith(TINY):
        source = RandomCheckpoint.tiny(reference, seed=seed)
    elif random_weights:
        source = RandomCheckpoint.of_folder(reference, seed=seed, device=device)
    else:
        folder, path = checkpoint_folder(reference), Path(reference)
        source = text_model(Checkpoint.open(folder) if folder == path else Checkpoint.open(folder, path.name))
    quantization_of(source)
    return source


def build_model(
    source: WeightSource,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    parallel: TensorParallel = SINGLE,
    head: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Build the model that a source's config describes, from the source's weights; without its head if ``head`` is
    False."""
    total = len(source.names())  # 0 for random weights, which are drawn on request
    on_read = None if progress is None or not total else lambda done: progress(done, total)
    weights = Weights(source, dtype=dtype, device=torch.device(device), parallel=parallel, head=head, on_read=on_read)
    try:
        module = _build(weights, source, spec)
    except ParallelError as error:
        raise error.allowing(rank_counts(source, spec)) from error
    if torch.device(device).type == "cpu":
        pack_weights(module)
    return LoadedModel(module.eval(), spec.for_rank(parallel.size), source.config)


def _build(weights: Weights, source: WeightSource, spec: ModelSpec) -> Decoder:
    architecture = _known(spec.model_type, source.name)
    config = read_config(source.config, source.name, spec)
    with torch.no_grad():
        module = architecture.build(weights, config, spec)
    weights.check_all_taken(_ignored(architecture, config, head=weights.head))
    return module


def rank_nbytes(
    source: WeightSource,
    spec: ModelSpec,
    size: int,
    dtype: torch.dtype = torch.float32,
    divide_draft: DivideDraft | None = None,
    *,
    head: bool = True,
) -> int:
    """Return the bytes of the weights of a model, and of its draft, on one of ``size`` ranks. No weight is read.

    Raises ParallelError if the ranks cannot divide both, with the numbers that can, and CheckpointError if tensors are
    missing, are of other shapes or dtypes, or belong to no part of the model.
    """
    from attnplug_engine.models.weight_shapes import nbytes

    try:
        return nbytes(*_divide_both(source, spec, size, dtype, divide_draft, head=head, checked=True))
    except ParallelError as error:
        raise error.allowing(rank_counts(source, spec, divide_draft)) from error


def rank_counts(source: WeightSource, spec: ModelSpec, divide_draft: DivideDraft | None = None) -> list[int]:
    """Return the numbers of ranks that can divide all heads and weights of a model, and of its draft."""
    _divide_both(source, spec, 1, torch.float32, divide_draft)  # raise what no number of ranks avoids
    fitting = [1]
    for size in range(2, max(layer.num_heads for layer in spec.layers) + 1):
        with suppress(UsageError):
            _divide_both(source, spec, size, torch.float32, divide_draft)
            fitting.append(size)
    return fitting


def _divide_both(
    source: WeightSource,
    spec: ModelSpec,
    size: int,
    dtype: torch.dtype,
    divide_draft: DivideDraft | None,
    *,
    head: bool = True,
    checked: bool = False,
) -> tuple[nn.Module, ...]:
    target = divide(source, spec, size, dtype, head=head, checked=checked)
    return (target.module,) if divide_draft is None else (target.module, divide_draft(target, dtype, checked=checked))


def divide(
    source: WeightSource,
    spec: ModelSpec,
    size: int,
    dtype: torch.dtype,
    *,
    head: bool = True,
    checked: bool = False,
) -> LoadedModel:
    """Build one rank's part of a model without values. Raises UsageError (ParallelError) if it cannot be divided, and
    if ``checked``, CheckpointError for tensors that are not the model's."""
    from attnplug_engine.models.weight_shapes import shapes_of  # imports the quantization schemes

    if isinstance(source, Checkpoint):
        source = _whole_model(source, spec, head=head) if checked else with_full_names(source)
    module = _build(shapes_of(source, size, dtype, head=head, checked=checked), source, spec)
    return LoadedModel(module, spec.for_rank(size), source.config)


def _known(model_type: str, reference: str, cause: Exception | None = None) -> Architecture:
    architecture = ARCHITECTURES.get(model_type)
    if architecture is None:
        raise UnknownArchitecture(reference, model_type) from cause
    return architecture


def read_config(given: Mapping[str, object], source: str, spec: ModelSpec) -> Config:
    """Return the config with the key names that the architecture reads, and its defaults for absent keys.

    ``source`` is the origin in messages. Raises ModelConfigError for unsupported values.
    """
    architecture = _known(spec.model_type, source)
    values = dict(architecture.defaults)
    for key, value in given.items():
        name = architecture.aliases.get(key, key)
        if name != key and given.get(name, value) != value:
            raise Config(given, source, spec.model_type).wrong(
                key, f"the same as {name!r}, which is {show(given[name])}"
            )
        values[name] = value
    config = Config(values, source, spec.model_type)
    for key in architecture.unknown:
        if config.lookup(key) is not None:
            raise config.wrong(key, f"null or absent: models of type {spec.model_type!r} do not have it")
    return config


def _ignored(architecture: Architecture, config: Config, *, head: bool) -> Callable[[str], bool]:
    """Return a predicate for names of tensors that may stay unused: those of layers for multi-token prediction,
    computed ones, and the head of a model without one."""
    patterns = [re.compile(pattern) for pattern in architecture.ignored]
    extra = max((config.optional_integer(key, least=0) or 0 for key in architecture.extra_layers), default=0)
    further = range(config.layer_count(), config.layer_count() + extra) if extra else range(0)

    def ignored(name: str) -> bool:
        if name.startswith(architecture.head.removesuffix("weight")) and not head:
            return True
        layer = _LAYER.match(name)
        return (layer is not None and int(layer[1]) in further) or any(pattern.search(name) for pattern in patterns)

    return ignored
