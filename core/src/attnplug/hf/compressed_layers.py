"""Reader for DeepSeek-V4 configs: sliding-window layers, some of which also attend to compressed entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attnplug.declare.model import AttentionKind, CompressedDims, IndexerDims, LayerSpec, MLADims
from attnplug.hf.config_keys import Config

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"

_RATIOS = {SPARSE: ("compress_rate_csa", 4), HEAVY: ("compress_rate_hca", 128)}
_BY_NAME: Mapping[str | int, str] = {name: name for name in (SLIDING, SPARSE, HEAVY)}
_BY_RATIO: Mapping[str | int, str] = {0: SLIDING, 4: SPARSE, 128: HEAVY}


def compressed_layers(config: Config) -> list[LayerSpec]:
    """Read the layers. Each caches one latent row per token, used as key and value, and has sinks and a window."""
    heads, width = config.integer("num_attention_heads"), config.integer("head_dim")
    if (config.optional_integer("num_key_value_heads") or 1) != 1:
        raise config.wrong("num_key_value_heads", "1, because all query heads share one row")
    index = IndexerDims(config.integer("index_n_heads"), config.integer("index_head_dim"), config.integer("index_topk"))
    sliding = LayerSpec(
        layer_id=0,
        kind=AttentionKind.MLA,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width,
        v_head_dim=width,
        scale=width**-0.5,
        sliding_window=config.integer("sliding_window"),
        sinks=True,
        mla=MLADims(kv_lora_rank=width, qk_nope_head_dim=width, qk_rope_head_dim=0),
    )
    known = {
        SLIDING: sliding,
        SPARSE: replace(sliding, compressed=CompressedDims(_ratio(config, SPARSE), overlap=True), indexer=index),
        HEAVY: replace(sliding, compressed=CompressedDims(_ratio(config, HEAVY))),
    }
    types = _types(config)
    if set(types) == {SLIDING}:
        raise config.error(
            "makes every layer a sliding one; models without compressed layers are not supported", "layer_types"
        )
    return [known[each] for each in types]


def _types(config: Config) -> list[str]:
    """Return the type of each layer. Entries beyond the layer count are multi-token prediction layers, left out."""
    count = config.layer_count()
    for key, known in (("layer_types", _BY_NAME), ("compress_ratios", _BY_RATIO)):
        listed = config.choices(key, known)
        if listed is None:
            continue
        if len(listed) < count:
            raise config.error(f"has {len(listed)} entries; it must have one for each of the {count} layers", key)
        return listed[:count]
    return [HEAVY if index < 2 or index % 2 == 0 else SPARSE for index in range(count)]


def _ratio(config: Config, kind: str) -> int:
    """Return the number of tokens per entry. As in transformers, the older key has priority."""
    older, default = _RATIOS[kind]
    section = config.section("compress_rates")
    named = None if section is None else section.optional_integer(kind)
    return config.optional_integer(older) or named or default
