"""Conversion of a model reference to a ``ModelSpec``.

A reference is a ``config.json`` or the folder that contains one. ``model_layers`` interprets the keys that concern
attention. Nothing is downloaded, and no weights are read.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from attnplug.declare.errors import UsageError
from attnplug.declare.model import ModelSpec
from attnplug.hf.config_keys import TINY, TINY_CONFIGS, Config, ModelConfigError, read_json_object, show
from attnplug.hf.model_layers import READERS, read_layers

UNBOUNDED_CONTEXT = 1 << 20
"""Context length of a model whose config sets no limit (Mamba-2 has no positions)."""
_CLASS_DEFAULTS = json.loads(Path(__file__).with_name("class_defaults.json").read_text("utf-8"))
"""Defaults of transformers' config classes by model type, for keys that published configs omit (gemma-3-4b-it has no
num_attention_heads). ``sliding_window_pattern`` is the distance in layers from one full layer to the next. Types
without a reader are plain decoders: their layers were compared with the attention modules of transformers 5.22."""
ALIASES = {
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Other names of a text model's type: Kimi-K2.5 says kimi_k2, and a section may leave it to the outer type."""
UNSUPPORTED = {
    "llama4_text": "layers that attend within fixed chunks of tokens do not fit the contract, in which a layer has a "
    "sliding window or none"
}
"""Reasons against model types that cannot be read."""
KNOWN_TYPES = tuple(sorted(READERS.keys() | _CLASS_DEFAULTS.keys()))
"""Model types that can be read. Reading another type as a plain decoder could be silently wrong."""


def read_model(reference: str) -> ModelSpec:
    """Read the config at ``reference``, a file or folder. Raises ModelConfigError for any failure."""
    path = Path(reference)
    if not reference or not os.path.lexists(path):
        raise ModelConfigError(
            f"{reference!r} does not exist; give a config.json, a folder that contains one (nothing is downloaded), "
            f"or a built-in model: {', '.join(TINY + known for known in TINY_CONFIGS)}",
            reference,
        )
    if os.path.isdir(path) and not os.path.lexists(path / "config.json"):
        close = list[str]()  # files that the user may have meant: other JSON files, and a config.json one level down
        with suppress(OSError):
            entries = sorted(path.iterdir())
            close = [entry.name for entry in entries if entry.suffix in (".json", ".yaml") and os.path.isfile(entry)]
            close += [f"{entry.name}/config.json" for entry in entries if os.path.isfile(entry / "config.json")]
        # The most similar ones come first: a sharded checkpoint's folder has many other JSON files.
        likeness = {name: difflib.SequenceMatcher(None, name, "config.json").ratio() for name in close}
        close = sorted(close, key=lambda name: (name != "params.json", -likeness[name]))[:4]
        has = f"; it has {', '.join(close)}, which cannot be used" if close else ""
        raise ModelConfigError(
            f"the folder {reference!r} contains no config.json{has}; give the folder of a Hugging Face checkpoint",
            reference,
        )
    path = path / "config.json" if os.path.isdir(path) else path
    try:
        values = read_json_object(path)
    except UsageError as error:
        raise ModelConfigError(str(error), str(path)) from error
    return model_from_config(values, Path(os.path.abspath(path)).parent.name or str(path), str(path))


def text_model_config(values: Mapping[str, object], source: str) -> Config:
    """Return the config of a model's decoder, with its model type: the config itself, or the section of a multimodal
    config that describes its text model."""
    config = outer = Config(values, source, model_type="")
    if "num_attention_heads" not in values or "num_hidden_layers" not in values:
        sections = (outer.section(key) for key in ("text_config", "llm_config", "language_config"))
        config = next((section for section in sections if section is not None), outer)
    model_type = config.optional_text("model_type") or outer.optional_text("model_type")
    if not model_type:
        raise config.error("is missing; it determines how the other keys are read", "model_type")
    return replace(config, model_type=ALIASES.get(model_type, model_type))


def model_from_config(values: Mapping[str, object], name: str, source: str | None = None) -> ModelSpec:
    """Convert a config that is already a mapping. Raises ModelConfigError; ``source`` is ``name`` by default."""
    source = source or name
    outer, config = Config(values, source, model_type=""), text_model_config(values, source)
    if config.model_type not in KNOWN_TYPES:
        part = config if config.lookup("model_type") else outer
        reason = UNSUPPORTED.get(config.model_type)
        problem = f"supported: {reason}" if reason else f"known; known types: {', '.join(KNOWN_TYPES)}"
        raise part.error(f"is {show(config.model_type)}, which is not {problem}", "model_type")
    config = replace(config, values={**_CLASS_DEFAULTS.get(config.model_type, {}), **config.values})
    for part in (outer, config):
        if part.flag("is_encoder_decoder"):
            raise part.error(
                "is true: an encoder-decoder model needs attention over the encoder's output, which no backend "
                "supports; give a decoder-only model",
                "is_encoder_decoder",
            )
        if part.lookup("is_causal") is False:  # transformers respects it in every model
            raise part.error("is false: no backend supports bidirectional attention; give a causal model", "is_causal")
    dtypes = (part.optional_text(key) for part in (config, outer) for key in ("dtype", "torch_dtype"))
    dtype = next((dtype.removeprefix("torch.") for dtype in dtypes if dtype is not None), None)
    return ModelSpec(
        name=name,
        model_type=config.model_type,
        layers=read_layers(config),
        context_length=config.optional_integer("max_position_embeddings") or UNBOUNDED_CONTEXT,
        dtype=dtype,
    )
