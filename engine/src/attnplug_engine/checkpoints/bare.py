"""Checkpoints of a base model: saved from ``Qwen3Model`` and the like, without a head, and names without ``model.``"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from attnplug.host import show
from attnplug_engine.checkpoints.safetensors import Checkpoint, MissingTensor, WeightSource

HEAD = "lm_head.weight"
_ROOT = "model."
_EMBEDDING = "embed_tokens.weight"


class BareCheckpoint:
    """A base model's tensors by the names that they have in the whole model: ``model.`` before each."""

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
    """The checkpoint itself, or a base model's by the names of the whole model."""
    bare = _EMBEDDING in source.names() and _ROOT + _EMBEDDING not in source.names()
    return BareCheckpoint(source) if bare else source


def check_head(checkpoint: Checkpoint, head: str = HEAD) -> None:
    """Raise where a checkpoint has no head of its own, nor shares its embedding for one: it cannot generate."""
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
