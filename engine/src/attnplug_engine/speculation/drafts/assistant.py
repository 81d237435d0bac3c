"""Assistant: a small draft without a cache of its own, whose attention reads the target's cached rows.

Tensors are named as in Gemma 4's assistants. The attention has queries, but no keys or values. The config's
``model_type`` is ``llama_assistant``. Beside the keys of Llama it has ``backbone_hidden_size``, the target's hidden
size, and ``target_layers``, which names the target's layer that each of its layers reads; by default all read the
target's last layer that has rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from attnplug import AttentionKind, ForwardBatch, LayerSpec, ModelSpec
from attnplug.hf.config_keys import Config, show
from attnplug.host import active_attention
from attnplug_engine.models.decoder import Attention, Block, LoadedModel, hidden_norm, norm_eps
from attnplug_engine.models.layers import MLP, Head, Linear, RMSNorm, check_activation, embedded
from attnplug_engine.models.rope import LayerRopes, Rotation
from attnplug_engine.models.weights import WeightRows, Weights
from attnplug_engine.parallel.collectives import even_part, scaled
from attnplug_engine.settings.speculation import DRAFT_MODEL, TOPK, Speculation
from attnplug_engine.speculation.drafts.model import LAST, DraftError, DraftModel

ASSISTANT = "llama_assistant"
EMBEDDING = "model.embed_tokens.weight"
"""Also serves as the head if no other is stored; tokens are embedded by the target."""
_HEAD = "lm_head.weight"


class ReadingAttention(Attention):
    """Queries over cached rows; none are written. ``layer`` is the target's, with the assistant's queries."""

    def __init__(self, weights: Weights, layer: LayerSpec, hidden: int, *, bias: bool, eps: float) -> None:
        super().__init__()
        heads = even_part(layer.num_heads, weights.parallel, "attention heads")
        self.layer = layer.for_rank(weights.parallel.size)
        width = layer.head_dim
        parts = [WeightRows("q_proj", layer.num_heads * width, scaled(heads, width))]
        self.query = Linear.stacked(weights, parts, hidden, bias=bias)
        values = layer.num_heads * layer.v_head_dim
        self.out = Linear.row_parallel(
            weights.at("o_proj"), values, hidden, scaled(heads, layer.v_head_dim), bias=weights.holds("o_proj.bias")
        )
        self.norm = RMSNorm(weights.at("q_norm"), width, eps) if weights.holds("q_norm.weight") else None

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        *,
        norm: RMSNorm | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        layer = self.layer
        q = self.query(hidden, norm=norm).unflatten(1, (layer.num_heads, layer.head_dim))
        q = rotation.apply(q if self.norm is None else self.norm(q))
        attended = active_attention().attend(q, None, None, layer, batch, save_kv_cache=False)
        return self.out(attended.flatten(1), onto=onto)


class AssistantDraft(DraftModel):
    """A token's embedding and a hidden state, both the target's, joined and passed through a few layers.

    In the first step, the hidden state is the target's before the token. In further steps it is the previous step's
    output, projected back to the target's width.
    """

    hidden_inputs = LAST
    reads_target = True

    def __init__(self, weights: Weights, config: Config, spec: ModelSpec, target: LoadedModel) -> None:
        hidden, backbone = config.integer("hidden_size"), config.integer("backbone_hidden_size")
        super().__init__(spec.for_rank(weights.parallel.size), hidden)
        check_activation(config)
        self.embedding, self.rope = target.module.embedding, target.module.rope
        if isinstance(self.rope, LayerRopes):
            raise DraftError(
                f"the layers of the target {target.spec.name} have different ropes, and the assistant "
                f"{config.source!r} has one; give another draft by `{DRAFT_MODEL}`",
                DRAFT_MODEL,
            )
        self.before = Linear.stacked(weights, [WeightRows("pre_projection", hidden, slice(0, hidden))], 2 * backbone)
        self.after = Linear.stacked(weights, [WeightRows("post_projection", backbone, slice(0, backbone))], hidden)
        norm, model, by_id = hidden_norm(config), weights.at("model"), {layer.layer_id: layer for layer in spec.layers}
        eps, intermediate = norm_eps(config), config.integer("intermediate_size")

        def block(index: int, read: int) -> Block:
            own = model.at(f"layers.{index}")
            attention = own.at("self_attn")
            reading = ReadingAttention(attention, by_id[read], hidden, bias=attention.holds("q_proj.bias"), eps=eps)
            return Block(own, norm, reading, MLP(own.at("mlp"), hidden, intermediate))

        reads = _reads(config, spec)
        self.layers = nn.ModuleList([block(index, read) for index, read in enumerate(reads)])
        self.norm = norm(model.at("norm"))
        name = _HEAD if weights.holds(_HEAD) else EMBEDDING
        self.head = Head.load(weights, name, target.module.vocab_size, hidden)

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor | None, batch: ForwardBatch, step: int = 0
    ) -> Tensor:
        assert hidden is not None
        if step:
            hidden = self.after(hidden)
        rows = self.before(torch.cat((embedded(input_ids, self.embedding), hidden), dim=-1))
        rotation = self.rope.at(positions)
        for layer in self.layers:
            rows = layer(rows, rotation, batch)
        return self.norm(rows)

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        return cast(Tensor, self.head(hidden))


def is_assistant(given: Mapping[str, object]) -> bool:
    """Return True if a config is that of an assistant."""
    return given.get("model_type") == ASSISTANT


def assistant_spec(speculation: Speculation, given: Mapping[str, object], target: ModelSpec) -> ModelSpec:
    """Return the target's layers that an assistant reads, each once, with the assistant's queries.

    Their ids are the target's, so the assistant's backend finds their rows in the target's pools.
    """
    source = speculation.draft_model
    assert source is not None
    config = Config(given, source, ASSISTANT)
    if speculation.topk > 1:
        raise DraftError(
            f"`{TOPK}` {speculation.topk} makes trees of drafts, and the assistant {source!r} has no rows of its own "
            f"for branches; give a `{TOPK}` of 1",
            TOPK,
        )
    heads, by_id = config.integer("num_attention_heads"), {layer.layer_id: layer for layer in target.layers}
    read = [by_id[number] for number in sorted(set(_reads(config, target)))]
    for layer in read:
        _check(layer, heads, config, target)
    layers = tuple(replace(layer, num_heads=heads) for layer in read)
    return replace(target, name=f"{source} (assistant)", layers=layers)


def _reads(config: Config, target: ModelSpec) -> list[int]:
    """Return the target's layer that each of the assistant's layers reads."""
    known, count, key = [layer.layer_id for layer in target.layers], config.layer_count(), "target_layers"
    named = config.sequence(key)
    if named is None:
        return [max((layer.layer_id for layer in target.full_layers), default=known[-1])] * count
    if len(named) != count:
        raise config.error(f"names {len(named)} layers; it must name one for each of 'num_hidden_layers' {count}", key)
    reads = [number for number in named if isinstance(number, int) and number in known]
    for number in named:
        if number not in reads:
            has = f"{known[0]} to {known[-1]}" if known == list(range(len(known))) else ", ".join(map(str, known))
            raise config.error(f"names layer {show(number)}, and the target {target.name} has layers {has}", key)
    return reads


def _check(layer: LayerSpec, heads: int, config: Config, target: ModelSpec) -> None:
    """Raise if an assistant's queries do not fit the rows of a layer of its target."""
    what = f"layer {layer.layer_id} of the target {target.name}"
    if layer.kind is not AttentionKind.MHA:
        raise DraftError(
            f"the assistant {config.source!r} reads {what}, which is of kind {layer.kind}; it can read layers of kind "
            f"{AttentionKind.MHA}. Name others by 'target_layers' in its config, or give another draft by "
            f"`{DRAFT_MODEL}`",
        )
    if layer.sinks:
        raise DraftError(
            f"the assistant {config.source!r} reads {what}, which has attention sinks; give another draft by "
            f"`{DRAFT_MODEL}`",
            DRAFT_MODEL,
        )
    width = config.optional_integer("head_dim")
    if width not in (None, layer.head_dim):
        raise config.wrong("head_dim", f"{layer.head_dim}, as the keys of {what} have")
    if heads % layer.num_kv_heads:
        raise config.wrong("num_attention_heads", f"a multiple of the {layer.num_kv_heads} KV heads of {what}")
