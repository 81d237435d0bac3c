"""DeepSeek-V4's attention: one row per token that is key and value, a sliding window, and compressed entries of
windows.

The layer projects; the backend compresses.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnplug import ForwardBatch, ForwardExtras, LayerSpec
from attnplug.hf.config_keys import Config
from attnplug.host import active_attention
from attnplug.sparse import CompressorInputs, CompressorWeights, IndexerDims, IndexInputs
from attnplug_engine.models.decoder import Attention, norm_eps
from attnplug_engine.models.layers import Linear, RMSNorm, frozen
from attnplug_engine.models.rope import PairRotation, Rotation, TorchRotation, inverse_frequencies
from attnplug_engine.models.weights import WeightRows, Weights
from attnplug_engine.parallel.collectives import even_part, length, scaled
from attnplug_sparse.selection import select_rows

_ROPES = ("main", "compress")
"""Keys of the rotary embeddings of sliding layers, and of layers with entries."""


class EndRotation:
    """Rotation of the last columns of rows, in pairs, and its inverse."""

    def __init__(self, positions: Tensor, frequencies: Tensor) -> None:
        angles = positions.unsqueeze(-1) * frequencies
        self._width = 2 * frequencies.shape[0]
        self._there, self._back = (PairRotation(each, 1.0, torch.float32) for each in (angles, -angles))

    def apply_(self, x: Tensor) -> None:
        """Rotate the last columns of ``x [tokens, heads, dim]`` in place."""
        self._there.apply_(x[..., -self._width :])

    def undo_(self, x: Tensor) -> None:
        self._back.apply_(x[..., -self._width :])


class TwoRotations(TorchRotation):
    """Rotations of sliding layers and of layers with entries."""

    __slots__ = ("compressed", "sliding")

    def __init__(self, sliding: EndRotation, compressed: EndRotation) -> None:
        self.sliding, self.compressed = sliding, compressed


class TwoRopes:
    """Rotary embeddings: plain for sliding layers, possibly stretched (yarn) for layers with entries."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.width = width = _rotary_width(config)
        """Number of rotated columns."""
        sections = [_rope_keys(config, label) for label in _ROPES]
        found = [inverse_frequencies(section, width) for section in sections]
        for (_, factor), section in zip(found, sections, strict=True):
            if factor != 1.0:
                message = f"gives a factor of {factor} on cos and sin; only 1 is supported"
                raise section.error(message, "attention_factor")
        self.sliding, self.compressed = (frequencies.to(device) for frequencies, _ in found)

    def at(self, positions: Tensor) -> Rotation:
        return TwoRotations(EndRotation(positions, self.sliding), EndRotation(positions, self.compressed))


def _rotary_width(config: Config) -> int:
    """Return the number of rotated columns of a head."""
    key, dim = "partial_rotary_factor", config.integer("head_dim")
    share = config.optional_number(key)
    if share is None:
        width = config.integer("qk_rope_head_dim", most=dim)
    elif share > 1.0:
        raise config.wrong(key, "at most 1")
    else:
        width = int(dim * share)
    given = _given_ropes(config)
    for own in filter(None, (given and given.section(label) for label in _ROPES)):
        factor = own.optional_number(key)  # transformers rotates whole heads without it
        if int(dim * (1.0 if factor is None else factor)) != width:
            raise own.wrong(key, f"{width / dim:g} as in the outer config: {width} of {dim} columns are rotated")
    return width


def _given_ropes(config: Config) -> Config | None:
    """Return the section with the config's rope keys: flat, or with a section for each of the two ropes."""
    sections = (config.section(key) for key in ("rope_scaling", "rope_parameters"))
    return next((part for part in sections if part and part.values), None)


def _rope_keys(config: Config, label: str) -> Config:
    """Return a config with the keys of one of the two ropes only: ``main`` or ``compress``."""
    given = _given_ropes(config)
    values: dict[str, object] = {}
    if given is not None and (own := given.section(label)) is not None:
        values = dict(own.values)
    elif label == "compress":
        flat = {} if given is None else dict(given.values)
        values = {**flat, "rope_theta": config.number("compress_rope_theta")}
    else:
        values = {"rope_theta": config.number("rope_theta")}
    if "yarn" in (values.get("rope_type"), values.get("type")):
        values.setdefault("attention_factor", 1.0)
    keys = {"rope_parameters": values, "max_position_embeddings": config.integer("max_position_embeddings")}
    return replace(config, values=keys)


class Compressor(nn.Module):
    """Compressor of a layer for entries of ``dim``: its part of the layer's projection, and its weights."""

    def __init__(self, weights: Weights, layer: LayerSpec, dim: int, eps: float, frequencies: Tensor) -> None:
        super().__init__()
        dims = layer.compressed
        assert dims is not None
        self.width = dims.series * dim
        self.bias = frozen(weights.take("ape", dims.ratio, self.width, exact=True))
        self.norm = frozen(weights.take("norm.weight", dim, exact=True))
        self._weights = CompressorWeights(self.bias, self.norm, eps, frequencies)

    def rows(self, path: str) -> list[WeightRows]:
        return [WeightRows(f"{path}.{name}", self.width, slice(0, self.width)) for name in ("wkv", "wgate")]

    def forward(self, values: Tensor, gates: Tensor) -> CompressorInputs:
        return CompressorInputs(values, gates, self._weights)


class EntryIndexer(nn.Module):
    """Indexer that selects a layer's entries; its keys have a compressor of their own."""

    def __init__(self, weights: Weights, dims: IndexerDims, config: Config) -> None:
        super().__init__()
        width = dims.heads * dims.head_dim
        self.q = Linear.stacked(weights, [WeightRows("wq_b", width, slice(0, width))], config.integer("q_lora_rank"))
        self.head_weight = frozen(
            weights.take("weights_proj.weight", dims.heads, config.integer("hidden_size"), exact=True)
        )
        self._dims = dims

    def forward(self, normed: Tensor, latents: Tensor, entries: CompressorInputs, rope: EndRotation) -> IndexInputs:
        q = self.q(latents).unflatten(1, (self._dims.heads, self._dims.head_dim))
        rope.apply_(q)
        weights = F.linear(normed.float(), self.head_weight) * self._dims.heads**-0.5
        return IndexInputs(q, None, weights, entries)


class CompressedAttention(Attention):
    """All three types of layers: window only, with all entries, and with entries selected by an index.

    One product of the input gives ``[query latents | row | values | gates | index values | index gates]``, as far as
    the layer has them. Rows carry their rotation into the output, so the output's last columns are rotated back. The
    output projection is grouped: first each group of heads by itself, then all groups.
    """

    def __init__(self, weights: Weights, layer: LayerSpec, config: Config, ropes: TwoRopes) -> None:
        super().__init__()
        heads = even_part(layer.num_heads, weights.parallel, "attention heads")
        groups = even_part(config.integer("o_groups"), weights.parallel, "groups of attention heads")
        self.layer = layer.for_rank(weights.parallel.size)
        hidden, rank, width, eps = (
            config.integer("hidden_size"), config.integer("q_lora_rank"), layer.head_dim, norm_eps(config)
        )  # fmt: skip
        projections = [WeightRows("wq_a", rank, slice(0, rank)), WeightRows("wkv", width, slice(0, width))]
        self.compressor = self.index_compressor = self.indexer = None
        if layer.compressed is not None:
            self.compressor = Compressor(weights.at("compressor"), layer, width, eps, ropes.compressed)
            projections += self.compressor.rows("compressor")
        if layer.indexer is not None:
            own, dims = weights.at("indexer"), layer.indexer
            self.index_compressor = Compressor(own.at("compressor"), layer, dims.head_dim, eps, ropes.compressed)
            projections += self.index_compressor.rows("indexer.compressor")
            self.indexer = EntryIndexer(own, dims, config)
        self._widths = [rows.count for rows in projections]
        self.down = Linear.stacked(weights, projections, hidden)
        self.q_norm, self.row_norm = RMSNorm(weights.at("q_norm"), rank, eps), RMSNorm(weights.at("norm"), width, eps)
        self.q_up = Linear.stacked(weights, [WeightRows("wq_b", layer.num_heads * width, scaled(heads, width))], rank)
        self.sinks = frozen(weights.take("attn_sink", layer.num_heads, rows=heads, exact=True))
        count, low = config.integer("o_groups"), config.integer("o_lora_rank")
        if layer.num_heads % count:
            raise config.wrong("o_groups", f"a divisor of num_attention_heads, which is {layer.num_heads}")
        inside = layer.num_heads * width // count
        grouped = weights.take("wo_a.weight", count * low, inside, rows=scaled(groups, low))
        self.group_out = frozen(grouped.unflatten(0, (length(groups), low)).transpose(1, 2).contiguous())
        self.out = Linear.row_parallel(weights.at("wo_b"), count * low, hidden, scaled(groups, low))
        self._eps = eps

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        *,
        norm: RMSNorm | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(rotation, TwoRotations)
        layer, attention = self.layer, active_attention()
        rope = rotation.sliding if layer.compressed is None else rotation.compressed
        normed = hidden if norm is None else norm(hidden)
        low, row, *compressed = self.down(normed).split(self._widths, dim=1)
        latents = self.q_norm(low)
        q = self.q_up(latents).unflatten(1, (layer.num_heads, layer.head_dim))
        q = F.rms_norm(q.float(), (layer.head_dim,), None, self._eps).to(q.dtype)
        rows = self.row_norm(row).unsqueeze(1)
        rope.apply_(q)
        rope.apply_(rows)
        entries = selected = None
        if self.compressor is not None:
            entries = self.compressor(*compressed[:2])
        if self.indexer is not None and self.index_compressor is not None:
            index = self.indexer(normed, latents, self.index_compressor(*compressed[2:]), rope)
            selected = select_rows(attention, index, layer, batch)
        extras = ForwardExtras(sinks=self.sinks, selected=selected, entries=entries)
        out = attention.attend(q, rows, None, layer, batch, extras=extras)
        rope.undo_(out)
        grouped = out.flatten(1).unflatten(1, (self.group_out.shape[0], -1)).transpose(0, 1)
        mixed = torch.bmm(grouped, self.group_out).transpose(0, 1).flatten(1)
        return self.out(mixed, onto=onto)
