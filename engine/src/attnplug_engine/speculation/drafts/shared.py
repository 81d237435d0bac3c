"""Embedding and head of a draft, its own or the target's."""

from __future__ import annotations

from torch import nn

from attnplug_engine.models.decoder import LoadedModel
from attnplug_engine.models.layers import Head, frozen
from attnplug_engine.models.weights import Weights

EMBEDDING = "embed_tokens.weight"


def own_embedding(weights: Weights, target: LoadedModel) -> nn.Parameter:
    """Return the embedding stored under these weights; the target's if there is none, or an identical one."""
    shared = target.module.embedding
    if not weights.holds(EMBEDDING):
        return shared
    own = weights.take(EMBEDDING, *shared.shape)
    return shared if weights.same(own, shared) else frozen(own)


def own_head(weights: Weights, name: str, target: LoadedModel) -> Head:
    """Return the head stored under this name; the target's if there is none, or an identical one."""
    shared = target.module.head
    assert shared is not None, "a target is loaded with its head"
    if not weights.holds(name):
        return shared
    own = Head.load(weights, name, target.module.vocab_size, target.module.hidden_size)
    return shared if weights.same(own.weight, shared.weight) else own
