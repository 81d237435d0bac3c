"""Multi-token prediction: a draft of the extra layers that a model's own checkpoint holds behind its last one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from attnplug import ForwardBatch, LayerSpec, ModelSpec
from attnplug.hf.config_keys import Config
from attnplug_engine.checkpoints.safetensors import Checkpoint, WeightSource
from attnplug_engine.models import deepseek, qwen_hybrid
from attnplug_engine.models.decoder import MODEL, Block, LoadedModel, hidden_norm
from attnplug_engine.models.layers import Head, Linear, Projection, RMSNorm, embedded
from attnplug_engine.models.rope import Rotation
from attnplug_engine.models.weights import WeightRows, Weights, holds_weight
from attnplug_engine.settings.speculation import STEPS, TOPK, Speculation
from attnplug_engine.speculation.drafts.model import LAST, DraftError, DraftModel
from attnplug_engine.speculation.drafts.shared import own_embedding, own_head

MakeBlock = Callable[[Weights, Config, LayerSpec], Block]


class PredictionLayer(nn.Module):
    """One draft model: a token's embedding and the hidden state before it, joined, through a block and a last norm."""

    def __init__(
        self,
        embedding: nn.Parameter,
        embedding_norm: RMSNorm,
        hidden_norm: RMSNorm,
        join: Projection,
        block: Block,
        norm: RMSNorm,
        head: Head,
    ) -> None:
        super().__init__()
        self.embedding, self.embedding_norm, self.hidden_norm = embedding, embedding_norm, hidden_norm
        self.join, self.block, self.norm, self.head = join, block, norm, head

    def forward(self, input_ids: Tensor, hidden: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        rows = self.embedding_norm(embedded(input_ids, self.embedding))
        joined = self.join(torch.cat((rows, self.hidden_norm(hidden)), dim=-1))
        return self.norm(self.block(joined, rotation, batch))


class PredictionDraft(DraftModel):
    """A model's own layers for multi-token prediction. Hidden states are those behind the last norm, of target and
    draft alike. Several layers serve one step each, with rows of their own in the cache."""

    hidden_inputs = LAST

    def __init__(self, spec: ModelSpec, target: LoadedModel, layers: list[PredictionLayer]) -> None:
        super().__init__(spec, target.module.hidden_size)
        self.rope = target.module.rope
        self.layers = nn.ModuleList(layers)
        self.models = len(layers)

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor | None, batch: ForwardBatch, step: int = 0
    ) -> Tensor:
        return cast(Tensor, self._layer(step)(input_ids, hidden, self.rope.at(positions), batch))

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        return cast(Tensor, self._layer(step).head(hidden))

    def _layer(self, step: int) -> PredictionLayer:
        return cast(PredictionLayer, self.layers[step if self.models > 1 else 0])


@dataclass(frozen=True, slots=True)
class Predictor:
    """Storage of the layers of one model type. ``counts`` are the config keys with their number; 1 without them.

    ``first`` names a tensor that every such checkpoint holds. ``owned`` returns a pattern of the names of all tensors
    of the first n layers.
    """

    counts: tuple[str, ...]
    first: Callable[[Config], str]
    owned: Callable[[Config, int], str]
    build: Callable[[Weights, Config, ModelSpec, LoadedModel], list[PredictionLayer]]


def _join(weights: Weights, name: str, hidden: int) -> Projection:
    return Linear.stacked(weights, [WeightRows(name, hidden, slice(0, hidden))], 2 * hidden)


def _deepseek(weights: Weights, config: Config, spec: ModelSpec, target: LoadedModel) -> list[PredictionLayer]:
    norm, hidden = hidden_norm(config), config.integer("hidden_size")

    def layer(layer: LayerSpec) -> PredictionLayer:
        own = weights.at(MODEL.layer(config.layer_count() + layer.layer_id))
        return PredictionLayer(
            own_embedding(own, target),
            norm(own.at("enorm")),
            norm(own.at("hnorm")),
            _join(own, "eh_proj", hidden),
            deepseek.prediction_block(own, config, layer),
            norm(own.at("shared_head.norm")),
            own_head(own, "shared_head.head.weight", target),
        )

    return [layer(one) for one in spec.layers]


def _qwen(make_block: MakeBlock) -> Callable[[Weights, Config, ModelSpec, LoadedModel], list[PredictionLayer]]:
    """Builder for Qwen3-Next and Qwen3.5: all layers share everything but the blocks."""

    def build(weights: Weights, config: Config, spec: ModelSpec, target: LoadedModel) -> list[PredictionLayer]:
        own, norm = weights.at("mtp"), hidden_norm(config, zero_centred=True)
        embedding = own_embedding(own, target)
        embedding_norm, before = norm(own.at("pre_fc_norm_embedding")), norm(own.at("pre_fc_norm_hidden"))
        join, after = _join(own, "fc", config.integer("hidden_size")), norm(own.at("norm"))
        head = own_head(own, "lm_head.weight", target)
        blocks = [make_block(own.at(f"layers.{layer.layer_id}"), config, layer) for layer in spec.layers]
        return [PredictionLayer(embedding, embedding_norm, before, join, block, after, head) for block in blocks]

    return build


def _qwen_predictor(make_block: MakeBlock) -> Predictor:
    return Predictor(
        ("num_nextn_predict_layers", "mtp_num_hidden_layers"),
        lambda config: "mtp.fc.weight",
        lambda config, count: rf"^mtp\.(?!layers\.)|^mtp\.layers\.(?:{_numbers(0, count)})\.",
        _qwen(make_block),
    )


def _numbers(start: int, count: int) -> str:
    return "|".join(map(str, range(start, start + count)))


PREDICTORS: Mapping[str, Predictor] = {
    "deepseek_v3": Predictor(
        ("num_nextn_predict_layers", "num_mtp_layers"),
        lambda config: f"{MODEL.layer(config.layer_count())}.eh_proj.weight",
        lambda config, count: rf"^model\.layers\.(?:{_numbers(config.layer_count(), count)})\.",
        _deepseek,
    ),
    "qwen3_next": _qwen_predictor(qwen_hybrid.next_prediction_block),
    "qwen3_5_text": _qwen_predictor(qwen_hybrid.prediction_block),
}
"""Predictors by the target's ``model_type``."""


def prediction_spec(speculation: Speculation, target: ModelSpec, given: Mapping[str, object], source: str) -> ModelSpec:
    """Return the layers that are used, from the target's config ``given``."""
    predictor = _predictor(target)
    config = Config(given, source, target.model_type)
    counts = [config.optional_integer(key, least=0) for key in predictor.counts]
    stored = max((count for count in counts if count is not None), default=1)
    if not stored:
        keys = [key for key, count in zip(predictor.counts, counts, strict=True) if count is not None]
        raise DraftError(
            f"{source} has no layers for multi-token prediction: its config says {keys[0]!r}: 0; choose another "
            "`speculative_algorithm`, such as eagle or standalone, and its `speculative_draft_model`"
        )
    if 1 < stored < speculation.steps:
        raise DraftError(
            f"{source} has {stored} layers for multi-token prediction, one for each step, and "
            f"`{STEPS}` is {speculation.steps}; give at most {stored}",
            STEPS,
        )
    used = min(stored, speculation.steps)
    if used > 1 and speculation.topk > 1:
        raise DraftError(
            f"`{TOPK}` {speculation.topk} makes trees of drafts, and {source} has {stored} layers for multi-token "
            f"prediction, one for each step of a chain; give a `{TOPK}` of 1",
            TOPK,
        )
    layer = target.full_layers[-1]
    layers = tuple(replace(layer, layer_id=index) for index in range(used))
    return replace(target, name=f"{target.name} (mtp)", layers=layers)


def build_prediction(
    weights: Weights, source: WeightSource, config: Config, spec: ModelSpec, target: LoadedModel
) -> PredictionDraft:
    """Load the layers of ``spec``, which is the whole model's, from the target's own checkpoint."""
    predictor = _predictor(spec)
    first = predictor.first(config)
    if isinstance(source, Checkpoint) and not holds_weight(source, first):
        raise DraftError(
            f"the checkpoint {source.name!r} holds no layers for multi-token prediction: it has no tensor {first!r}; "
            "fetch all of its files, or choose another `speculative_algorithm`"
        )
    layers = predictor.build(weights, config, spec, target)
    owned = re.compile(predictor.owned(config, len(layers)))
    weights.check_all_taken(lambda name: not owned.search(name))
    return PredictionDraft(spec.for_rank(weights.parallel.size), target, layers)


def _predictor(target: ModelSpec) -> Predictor:
    predictor = PREDICTORS.get(target.model_type)
    if predictor is None:
        raise DraftError(
            f"{target.name!r} is of model type {target.model_type!r}, whose layers for multi-token prediction cannot "
            f"be read; those of {', '.join(PREDICTORS)} can. Choose another `speculative_algorithm`, such as eagle or "
            "standalone, and its `speculative_draft_model`"
        )
    return predictor
