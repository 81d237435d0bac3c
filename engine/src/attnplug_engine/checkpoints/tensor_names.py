"""Checkpoints of a base model, e.g. saved from ``Qwen3Model``: without a head, and tensor names without ``model.``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from attnplug.hf.config_keys import show
from attnplug_engine.checkpoints.safetensors import Checkpoint, MissingTensor, WeightSource

HEAD = "lm_head.weight"
_ROOT = "model."
_EMBEDDING = "embed_tokens.weight"


class BareCheckpoint:
    """A base model's tensors under the names of the whole model, with the prefix ``model.``."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    @property
    def config(self) -> Mapping[str, object]:
        return self._source.config

    @property
    def name(self) -> str:
        return self._source.name

    def names(self) -> Sequence[str]:
        return [_ROOT + name for name in self._source.names()]

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        self._source.check(name.removeprefix(_ROOT), shape)

    def tensor(
        self, name: str, shape: tuple[int, ...], *, rows: slice | None = None, columns: slice | None = None
    ) -> Tensor:
        return self._source.tensor(name.removeprefix(_ROOT), shape, rows=rows, columns=columns)

    def integers(self, name: str, shape: tuple[int, ...], below: int) -> Tensor:
        return self._source.integers(name.removeprefix(_ROOT), shape, below)


def with_full_names(source: WeightSource) -> WeightSource:
    """Return the checkpoint with the whole model's tensor names."""
    bare = _EMBEDDING in source.names() and _ROOT + _EMBEDDING not in source.names()
    return BareCheckpoint(source) if bare else source


def check_head(checkpoint: Checkpoint, head: str = HEAD) -> None:
    """Raise if a checkpoint has neither a head nor a tied embedding: it cannot generate."""
    config = checkpoint.config
    if head in checkpoint.names() or config.get("tie_word_embeddings") is True:
        return
    raise MissingTensor(
        f"the checkpoint {checkpoint.name!r} ({show(config.get('architectures'))}) has no head: no tensor {head!r}, "
        "and its config does not tie it to the embedding. It cannot generate; 'attnplug embed' pools its hidden states",
        checkpoint.name,
        head,
        checkpoint.files,
    )
