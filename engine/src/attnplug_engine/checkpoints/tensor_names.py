"""Tensor names of checkpoints that are not those of a causal language model.

A multimodal checkpoint contains a text model: its config is a section, and its tensors have a longer prefix. A
checkpoint of a base model, e.g. saved from ``Qwen3Model``, has no head, and tensor names without ``model.``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from attnplug.hf.config_keys import show
from attnplug.hf.model_config import text_model_config
from attnplug_engine.checkpoints.safetensors import (
    QUANTIZATION_KEYS,
    Checkpoint,
    CheckpointError,
    MissingTensor,
    shortened,
)

HEAD = "lm_head.weight"
_ROOT = "model."
_EMBEDDING = "embed_tokens.weight"
_TEXT = r"(?:model\.)*(?:language_model|text_model|llm)\."
_TEXT_ROOT = re.compile(rf"({_TEXT}(?:model\.)*){re.escape(_EMBEDDING)}")
_TEXT_HEAD = re.compile(rf"(?:{_TEXT})?(lm_head\.\w+)")
_BLOCKS = re.compile(r"^blocks\.")
_OUTER_KEYS = ("architectures", "eos_token_id", "is_causal", *QUANTIZATION_KEYS)
_PREDICTION = "mtp."


def text_config(config: Mapping[str, object], source: str) -> Mapping[str, object]:
    """Return the config of a checkpoint's text model: the config itself, or the section of a multimodal one."""
    section = text_model_config(config, source)
    if not section.path:
        return config
    outer = {key: config[key] for key in _OUTER_KEYS if config.get(key) is not None}
    inner = {key: value for key, value in section.values.items() if value is not None or key not in outer}
    # As in transformers, the model with the head decides.
    tied = config.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
    text = {**outer, **inner, "model_type": section.model_type}
    return text if tied is None else {**text, "tie_word_embeddings": tied}  # if absent, the class has a default


def text_model(checkpoint: Checkpoint) -> Checkpoint:
    """Return the text model of a multimodal checkpoint, under the tensor names of a causal language model; any other
    checkpoint as it is. Tensors of other parts (images, audio) are left out."""
    config, stored = text_config(checkpoint.config, checkpoint.name), checkpoint.names()
    if config is checkpoint.config:
        return checkpoint
    roots = [match[1] for name in stored if (match := _TEXT_ROOT.fullmatch(name))]
    if len(roots) != 1:
        raise CheckpointError(
            f"the checkpoint {checkpoint.name!r} is multimodal, and the tensors of its text model are not found: "
            f"{shortened(roots) or 'no tensor'} ends with language_model.{_EMBEDDING} or the like; it holds "
            f"{shortened(tuple(stored))}",
            checkpoint.name,
        )
    root, names = roots[0], {name: name for name in stored if name.startswith(_PREDICTION)}
    for name in stored:
        if (head := _TEXT_HEAD.fullmatch(name)) is not None:
            names[head[1]] = name
        elif name.startswith(root):
            # transformers 5.22 saves the layers of Kimi-K2.5 as ``blocks``; published ones are ``layers``.
            names[_ROOT + _BLOCKS.sub("layers.", name.removeprefix(root))] = name
    if any(name.startswith(HEAD) for name in names):  # as in transformers, whatever the config says
        config = {**config, "tie_word_embeddings": False}
    return checkpoint.renamed(names, config)


def with_full_names(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the whole model's tensor names, also if it is one of a base model."""
    names = checkpoint.names()
    if _EMBEDDING not in names or _ROOT + _EMBEDDING in names:
        return checkpoint
    return checkpoint.renamed({_ROOT + name: name for name in names})


def no_head(checkpoint: Checkpoint, head: str) -> MissingTensor:
    """Return the error for a checkpoint with neither a head nor a tied embedding: it cannot generate."""
    config = checkpoint.config
    return MissingTensor(
        f"the checkpoint {checkpoint.name!r} ({show(config.get('architectures'))}) has no head: no tensor {head!r}, "
        "and its config does not tie it to the embedding. It cannot generate; 'attnplug embed' pools its hidden states",
        checkpoint.name,
        head,
        checkpoint.files,
    )
