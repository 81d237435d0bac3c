"""EAGLE-3: a Llama layer over a token's embedding and several inner hidden states of the target, with its own head over
a draft vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from attnplug import ForwardBatch, LayerSpec, ModelSpec
from attnplug.hf.config_keys import Config
from attnplug_engine.checkpoints.safetensors import Checkpoint, WeightSource
from attnplug_engine.models.decoder import Block, LoadedModel, hidden_norm, norm_eps
from attnplug_engine.models.layers import Head, RMSNorm, check_activation, embedded
from attnplug_engine.models.rope import Rope, Rotation
from attnplug_engine.models.weights import Weights
from attnplug_engine.speculation.drafts.eagle import joined, llama_attention, llama_mlp
from attnplug_engine.speculation.drafts.model import DraftError, DraftModel, HiddenInputs
from attnplug_engine.speculation.drafts.shared import own_embedding, own_head

_HEAD, _MAP, _LAYERS = "lm_head.weight", "d2t", "eagle_aux_hidden_state_layer_ids"
_UNKNOWN: Mapping[str, object] = {
    "fc_norm": False,
    "norm_output": False,
    "parallel_drafting": False,
    "use_aux_hidden_state": True,
}
"""Keys of other drafts of the same name, with the only supported value."""


class FirstLayer(nn.Module):
    """Attention over an embedding and a hidden state side by side, each normed; the residual is the hidden state."""

    def __init__(self, weights: Weights, config: Config, layer: LayerSpec, *, norm_before_residual: bool) -> None:
        super().__init__()
        norm, hidden = hidden_norm(config), config.integer("hidden_size")
        self.embedding_norm = norm(weights.at("input_layernorm"))
        self.hidden_norm = norm(weights.at("hidden_norm"))
        self.attention = llama_attention(weights, config, layer, inputs=2 * hidden)
        self.mlp_norm = norm(weights.at("post_attention_layernorm"))
        self.mlp = llama_mlp(weights, config)
        self._adds_normed = norm_before_residual
        self._parallel = weights.parallel

    def forward(self, embedded: Tensor, hidden: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        normed = self.hidden_norm(hidden)
        both = torch.cat((self.embedding_norm(embedded), normed), dim=-1)
        attended = self.attention(both, rotation, batch, onto=normed if self._adds_normed else hidden)
        hidden = self._parallel.all_reduce(attended)
        return self._parallel.all_reduce(self.mlp(hidden, norm=self.mlp_norm, onto=hidden))


class Eagle3Draft(DraftModel):
    """EAGLE-3 draft. Hidden states are those before the last norm. The first step reads the target's inner ones, side
    by side, further steps the draft's own."""

    def __init__(
        self, weights: Weights, source: WeightSource, config: Config, spec: ModelSpec, target: LoadedModel
    ) -> None:
        hidden = config.integer("hidden_size")
        super().__init__(spec.for_rank(weights.parallel.size), hidden)
        check_activation(config)
        eagle = config.section("eagle_config") or Config({}, config.source, config.model_type, "eagle_config.")
        for key, allowed in _UNKNOWN.items():
            for part in (config, eagle):
                if part.lookup(key) not in (None, allowed):
                    raise part.wrong(key, f"{str(allowed).lower()} or absent: a draft of this kind cannot be run")
        self.hidden_inputs = HiddenInputs(layers=_taps(config, eagle, len(target.module.layers)))
        width = self.hidden_inputs.width(hidden)

        self.embedding = own_embedding(weights, target)
        normed = config.flag("norm_before_fc") or eagle.flag("norm_before_fc")
        self.input_norm = RMSNorm(weights.at("input_norm"), width, norm_eps(config)) if normed else None
        self.join = joined(weights, width, hidden)
        self.rope = Rope(config, spec.layers[0].head_dim, dtype=weights.dtype, device=weights.device)
        name = "layers.0" if weights.holds("layers.0.hidden_norm.weight") else "midlayer"
        before = config.flag("norm_before_residual")
        self.first = FirstLayer(weights.at(name), config, spec.layers[0], norm_before_residual=before)

        def block(layer: LayerSpec) -> Block:
            own = weights.at(f"layers.{layer.layer_id}")
            return Block(own, hidden_norm(config), llama_attention(own, config, layer), llama_mlp(own, config))

        self.layers = nn.ModuleList([block(layer) for layer in spec.layers[1:]])
        self.norm = hidden_norm(config)(weights.at("norm"))
        vocab = target.module.vocab_size
        drafted = vocab if config.lookup("draft_vocab_size") is None else config.integer("draft_vocab_size", most=vocab)
        if drafted == vocab:
            self.head = own_head(weights, _HEAD, target)
        else:
            self.head = Head.load(weights, _HEAD, drafted, hidden)
            self.target_ids = _target_ids(source, drafted, vocab).to(weights.device)

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor | None, batch: ForwardBatch, step: int = 0
    ) -> Tensor:
        assert hidden is not None
        rotation = self.rope.at(positions)
        rows = self.first(embedded(input_ids, self.embedding), self._own(hidden), rotation, batch)
        for layer in self.layers:
            rows = layer(rows, rotation, batch)
        return cast(Tensor, rows)

    def _own(self, hidden: Tensor) -> Tensor:
        """Return hidden states ``[rows, hidden]`` that the first layer may overwrite."""
        if hidden.shape[1] == self.hidden_size:
            return hidden.clone()
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        return self.join(hidden)

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        return cast(Tensor, self.head(self.norm(hidden)))


def _taps(config: Config, eagle: Config, layers: int) -> tuple[int, ...]:
    """Return the target's layers whose inputs are read: those that the config lists, or an early, a middle and a late
    one.

    Two conventions are in use. A list that begins with 1 names layers by their outputs, as in SGLang. Any other names
    them by their inputs, as in vLLM; the first block's input is never used, so 2 is the same layer there.
    """
    part = config if config.lookup(_LAYERS) is not None else eagle
    listed = part.sequence(_LAYERS)
    if not listed:
        return tuple(min(max(layer, 0), layers) for layer in (2, layers // 2, layers - 3))
    shift = 1 if listed[0] == 1 else 0
    taps = [layer + shift for layer in listed if isinstance(layer, int) and not isinstance(layer, bool)]
    if len(taps) != len(listed) or min(taps) < 0 or max(taps) > layers or len(taps) < 2:
        raise part.wrong(_LAYERS, f"a list of two or more layers of the target, which has {layers}")
    return tuple(taps)


def _target_ids(source: WeightSource, drafted: int, vocab: int) -> Tensor:
    """Return the target's token for each draft token. With random weights they are the first ones."""
    own = torch.arange(drafted)
    if not isinstance(source, Checkpoint):
        return own
    ids = own + source.integers(_MAP, (drafted,))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        worst = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise DraftError(
            f"the draft {source.name!r} maps one of its tokens to {worst} by its tensor {_MAP!r}, and the target has "
            f"tokens 0 to {vocab - 1}; give a draft of this target by `speculative_draft_model`"
        )
    return ids
