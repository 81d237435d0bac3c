"""Readers of the attention layers in a Hugging Face config, one per model family.

A reader converts a ``Config`` to one entry per layer of the model: a ``LayerSpec``, whose ``layer_id`` is set later
from its position, or None for a layer without attention (MLP, experts). A new model type needs one function and one
line in ``READERS``. ``_decoder`` reads the other types of ``class_defaults.json``, which are plain decoders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from attnplug.declare.model import AttentionKind, CompressedDims, IndexerDims, LayerSpec, LinearDims, MLADims
from attnplug.hf.config_keys import Config, ModelConfigError, rope_section, rope_type

MAX_COLUMNS = 1 << 24
"""Maximum width of a layer's queries, values, cache row or convolution. Real ones are below a hundredth of it."""

Layers = Sequence[LayerSpec | None]
Reader = Callable[[Config], Layers]


# ---- softmax attention ----


def _decoder(config: Config) -> Layers:
    """Read a plain decoder: all layers MLA, or all softmax with or without a sliding window."""
    if config.lookup("use_bidirectional_attention"):
        raise config.error("means bidirectional attention, which no backend supports", "use_bidirectional_attention")
    if config.lookup("kv_lora_rank") is not None:
        return _latent_layers(config)
    full = _softmax(config)
    slides = _slides(config, config.layer_count())
    if not any(slides):
        return [full] * len(slides)
    sliding = replace(full, sliding_window=config.integer("sliding_window"))
    return [sliding if slide else full for slide in slides]


def _softmax(config: Config) -> LayerSpec:
    heads = config.integer("num_attention_heads")
    kv_heads = config.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads, which is {heads}")
    head_dim = config.optional_integer("head_dim")
    if head_dim is None:
        hidden = config.integer("hidden_size")
        if hidden % heads:
            raise config.wrong("hidden_size", f"a multiple of num_attention_heads ({heads}) if head_dim is not set")
        head_dim = hidden // heads
    scale = config.optional_number("attention_multiplier")
    if scale is None:
        scale = (config.optional_number("query_pre_attn_scalar") or head_dim) ** -0.5
    cap, sinks = config.optional_number("attn_logit_softcapping"), config.model_type == "gpt_oss"
    return LayerSpec(0, AttentionKind.MHA, heads, kv_heads, head_dim, head_dim, scale, logit_cap=cap, sinks=sinks)


def _slides(config: Config, count: int) -> list[bool]:
    """Return True for each layer that has a sliding window."""
    listed = config.choices("layer_types", {"full_attention": False, "sliding_attention": True}, count)
    if listed is not None:
        return listed
    if config.optional_integer("sliding_window") is None:
        return [False] * count
    if config.model_type.startswith(("qwen", "smollm3")):
        # Their configs contain a window even if it is disabled. Other types do not have the key: they ignore it.
        if not config.flag("use_sliding_window"):
            return [False] * count
        if config.model_type == "smollm3":
            return [not rotary for rotary in rotary_layers(config)]
        if config.model_type == "qwen3_moe":
            return [True] * count
        first = config.integer("max_window_layers", least=0)
        if config.model_type == "qwen2_moe":
            return [index < first and index % 2 == 0 for index in range(count)]
        return [index >= first for index in range(count)]
    period = config.optional_integer("sliding_window_pattern")
    return [period is None or (index + 1) % period != 0 for index in range(count)]


def rotary_layers(config: Config) -> list[bool]:
    """Return True for each layer that has rotary positions, of a model in which some have none (SmolLM3)."""
    count = config.layer_count()
    listed = config.choices("no_rope_layers", {1: True, 0: False}, count, longer=True)  # despite its name, 1 is a rope
    every = config.optional_integer("no_rope_layer_interval") or 4
    return [(index + 1) % every != 0 for index in range(count)] if listed is None else listed


def _latent_layers(config: Config) -> Layers:
    count = config.layer_count()
    dense = _latent(config, _yarn_mscale(config))
    topk = config.optional_integer("index_topk")
    if topk is None:
        return config.choices("layer_types", {"full_attention": dense}, count) or [dense] * count
    known: Mapping[str | int, bool] = {
        "full_attention": False,
        "indexed_attention": True,
        "deepseek_sparse_attention": True,
    }
    sparse = config.choices("layer_types", known, count) or [True] * count
    indexer = IndexerDims(config.integer("index_n_heads"), config.integer("index_head_dim"), topk)
    if indexer.head_dim < config.integer("qk_rope_head_dim"):
        raise config.wrong("index_head_dim", f"at least qk_rope_head_dim, {config.integer('qk_rope_head_dim')}")
    # A sparse layer has its own index, or shares that of the closest earlier layer that has one.
    layers, last = [], None
    key, computing = _computes_index(config, count)
    for index, (is_sparse, computes) in enumerate(zip(sparse, computing, strict=True)):
        last = index if is_sparse and computes else last
        if is_sparse and last is None:
            raise config.error(f"lets layer {index} share an index, but no earlier layer has one", key)
        own = indexer if computes else replace(indexer, shares=last)
        layers.append(replace(dense, indexer=own) if is_sparse else dense)
    return layers


def _computes_index(config: Config, count: int) -> tuple[str, list[bool]]:
    """Return the key that decides, and True for each layer that, if sparse, computes its own index."""
    key = "indexer_types"
    words: Mapping[str | int, bool] = {"full": True, "shared": False}
    listed = config.choices(key, words, count)
    if listed is None and config.lookup("index_topk_pattern") is not None:
        key = "index_topk_pattern"
        if isinstance(pattern := config.lookup(key), str):
            words, config = {"F": True, "S": False}, replace(config, values={**config.values, key: list(pattern)})
        listed = config.choices(key, words, count)
    if listed is None:
        key = "index_topk_freq"
        every = config.optional_integer(key, least=0) or 1
        offset = config.optional_integer("index_skip_topk_offset", least=0)
        first = (2 if offset is None else offset) - 1
        listed = [max(index - first, 0) % every == 0 for index in range(count)]
    return key, listed


def _latent(config: Config, mscale: float = 1.0) -> LayerSpec:
    heads = config.integer("num_attention_heads")
    dims = MLADims(
        config.integer("kv_lora_rank"), config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    )
    head_dim, v_head_dim = dims.qk_nope_head_dim + dims.qk_rope_head_dim, config.integer("v_head_dim")
    scale = head_dim**-0.5 * mscale * mscale
    return LayerSpec(0, AttentionKind.MLA, heads, heads, head_dim, v_head_dim, scale, mla=dims)


def _yarn_mscale(config: Config) -> float:
    """Return the factor of long-context rope on queries and on keys, which enters the softmax scale squared.

    transformers does the same in deepseek_v2 and deepseek_v3 (``yarn_apply_mscale``, 5.17 and 5.22), for every rope
    type except "default", not only for yarn. ``mscale`` itself scales cos and sin, not the softmax scale.
    """
    rope = rope_section(config)
    if rope_type(rope) == "default":
        return 1.0
    all_dim = rope.optional_number("mscale_all_dim", least=0.0)
    if not all_dim:
        return 1.0
    factor = rope.number("factor")
    return 0.1 * all_dim * math.log(factor) + 1.0 if factor > 1 else 1.0


# ---- linear attention, and hybrids with softmax attention ----


def _linear(kind: AttentionKind, dims: LinearDims, scale: float) -> LayerSpec:
    """Return a linear layer. Queries and keys have width ``key_dim``, values ``value_dim``."""
    return LayerSpec(0, kind, dims.heads, dims.key_heads, dims.key_dim, dims.value_dim, scale, linear=dims)


def _kimi_linear(config: Config) -> Layers:
    """Read KDA layers interleaved with MLA. The MLA has rope columns but no rope, so no yarn factor applies."""
    count = config.layer_count()
    published = config.section("linear_attn_config")  # in published checkpoints; transformers' own keys are flat

    def dimension(nested: str, flat: str) -> int:
        value = None if published is None else published.optional_integer(nested)
        return config.integer(flat) if value is None else value

    heads, width = dimension("num_heads", "linear_num_heads"), dimension("head_dim", "linear_head_dim")
    conv_width = dimension("short_conv_kernel_size", "linear_conv_kernel_dim")
    kda = _linear(AttentionKind.KDA, LinearDims(heads, heads, width, width, 3 * heads * width, conv_width), width**-0.5)
    full = _latent(config)
    listed = config.choices("layer_types", {"linear_attention": kda, "full_attention": full}, count)
    if listed is not None:
        return listed
    if published is None:
        raise config.missing("layer_types")
    layers: list[LayerSpec | None] = [None] * count
    for key, layer in (("kda_layers", kda), ("full_attn_layers", full)):
        for number in published.sequence(key) or ():
            if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= count:
                raise published.wrong(key, f"a list of layer numbers from 1 to {count}")
            if layers[number - 1] is not None:
                raise published.wrong(key, f"a list without layer {number}, which is already listed")
            layers[number - 1] = layer
    if None in layers:
        raise published.wrong(
            "kda_layers", f"complete with full_attn_layers: layer {layers.index(None) + 1} of {count} is in neither"
        )
    return layers


def _gdn_hybrid(config: Config) -> Layers:
    """Read Gated DeltaNet layers with every ``full_attention_interval``-th layer softmax: Qwen3-Next, Qwen3.5."""
    count = config.layer_count()
    heads, key_heads = config.integer("linear_num_value_heads"), config.integer("linear_num_key_heads")
    if heads % key_heads:
        raise config.wrong("linear_num_key_heads", f"a divisor of linear_num_value_heads, which is {heads}")
    key_dim, value_dim = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
    channels = 2 * key_heads * key_dim + heads * value_dim
    dims = LinearDims(heads, key_heads, key_dim, value_dim, channels, config.integer("linear_conv_kernel_dim"))
    gdn, full = _linear(AttentionKind.GDN, dims, key_dim**-0.5), _softmax(config)
    listed = config.choices("layer_types", {"linear_attention": gdn, "full_attention": full}, count)
    interval = config.optional_integer("full_attention_interval") or 4
    return listed or [gdn if (index + 1) % interval else full for index in range(count)]


def _minimax(config: Config) -> Layers:
    """Read Lightning layers, without scale and convolution, interleaved with softmax layers. MiniMax-M2 has none."""
    count = config.layer_count()
    full = replace(_softmax(config), sliding_window=config.optional_integer("sliding_window"))
    dims = LinearDims(full.num_heads, full.num_heads, full.head_dim, full.head_dim)
    lightning = _linear(AttentionKind.LIGHTNING, dims, 1.0)
    listed = config.choices("layer_types", {"linear_attention": lightning, "full_attention": full}, count)
    if listed is None:
        listed = config.choices("attn_type_list", {0: lightning, 1: full}, count)
    if listed is None and config.model_type == "minimax_m2":
        return [full] * count
    if listed is None:
        raise config.missing("layer_types")
    return listed


def _ring(config: Config) -> Layers:
    """Read Lightning layers with a scale, and MLA in the last layer of each group: Ring-2.5, Ling-2.5."""
    group, heads, width = (config.integer(key) for key in ("layer_group_size", "num_attention_heads", "head_dim"))
    lightning = _linear(AttentionKind.LIGHTNING, LinearDims(heads, heads, width, width), width**-0.5)
    full = _latent(config)
    return [lightning if (index + 1) % group else full for index in range(config.layer_count())]


def _mamba(config: Config, heads_key: str, width_key: str, state_key: str) -> LayerSpec:
    heads, width, groups = config.integer(heads_key), config.integer(width_key), config.integer("n_groups")
    if heads % groups:
        raise config.wrong("n_groups", f"a divisor of {heads_key}, which is {heads}")
    state = config.integer(state_key)
    channels = heads * width + 2 * groups * state
    dims = LinearDims(heads, groups, state, width, channels, config.integer("conv_kernel"))
    return _linear(AttentionKind.MAMBA2, dims, 1.0)


def _mamba2(config: Config) -> Layers:
    layer = _mamba(config, "num_heads", "head_dim", "state_size")
    inner = layer.num_heads * layer.v_head_dim
    expand, hidden = config.optional_integer("expand"), config.optional_integer("hidden_size")
    if expand is not None and hidden is not None and expand * hidden != inner:
        raise config.wrong("expand", f"num_heads * head_dim / hidden_size, which is {inner} / {hidden}")
    return [layer] * config.layer_count()


def _nemotron_h(config: Config) -> Layers:
    """Read Mamba-2 and softmax layers among MLP and expert layers. Its softmax layers have no rope."""
    mamba, full = _mamba(config, "mamba_num_heads", "mamba_head_dim", "ssm_state_size"), _softmax(config)
    count = config.optional_integer("num_hidden_layers")
    known: dict[str | int, LayerSpec | None] = {"mamba": mamba, "attention": full, "mlp": None, "moe": None}
    known |= {"linear_attention": mamba, "full_attention": full}
    key = "layers_block_type"
    pattern = config.optional_text("hybrid_override_pattern")
    if config.lookup(key) is None and pattern is not None:
        key = "hybrid_override_pattern"
        known = {"M": mamba, "*": full, "-": None, "E": None}
        config = replace(config, values={**config.values, key: list(pattern)})
    listed = config.choices(key, known, count)
    if listed is None:
        raise config.missing(key)
    if not any(listed):
        raise config.error("contains no attention layer", key)
    return listed


# ---- sliding-window layers, some of which also attend to compressed entries ----

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATIOS = {SPARSE: ("compress_rate_csa", 4), HEAVY: ("compress_rate_hca", 128)}
_BY_NAME: Mapping[str | int, str] = {name: name for name in (SLIDING, SPARSE, HEAVY)}
_BY_RATIO: Mapping[str | int, str] = {0: SLIDING, 4: SPARSE, 128: HEAVY}


def _compressed_layers(config: Config) -> list[LayerSpec]:
    """Read DeepSeek-V4. A layer caches one latent row per token, used as key and value, and has sinks and a window."""
    heads, width = config.integer("num_attention_heads"), config.integer("head_dim")
    if (config.optional_integer("num_key_value_heads") or 1) != 1:
        raise config.wrong("num_key_value_heads", "1, because all query heads share one row")
    index = IndexerDims(config.integer("index_n_heads"), config.integer("index_head_dim"), config.integer("index_topk"))
    dims = MLADims(kv_lora_rank=width, qk_nope_head_dim=width, qk_rope_head_dim=0)
    window = config.integer("sliding_window")
    sliding = LayerSpec(
        0, AttentionKind.MLA, heads, heads, width, width, width**-0.5, sliding_window=window, sinks=True, mla=dims
    )
    section = config.section("compress_rates")
    ratios = {}  # tokens per entry; as in transformers, the older key has priority
    for kind, (older, default) in _RATIOS.items():
        named = None if section is None else section.optional_integer(kind)
        ratios[kind] = config.optional_integer(older) or named or default
    known = {
        SLIDING: sliding,
        SPARSE: replace(sliding, compressed=CompressedDims(ratios[SPARSE], overlap=True), indexer=index),
        HEAVY: replace(sliding, compressed=CompressedDims(ratios[HEAVY])),
    }
    count = config.layer_count()
    types = [HEAVY if number < 2 or number % 2 == 0 else SPARSE for number in range(count)]
    for key, by in (("compress_ratios", _BY_RATIO), ("layer_types", _BY_NAME)):
        # Entries beyond the layer count are multi-token prediction layers, left out.
        types = config.choices(key, by, count, longer=True) or types
    if set(types) == {SLIDING}:
        raise config.error(
            "makes every layer a sliding one; models without compressed layers are not supported", "layer_types"
        )
    return [known[each] for each in types]


READERS: Mapping[str, Reader] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"), _latent_layers),
    "deepseek_v4": _compressed_layers,
    "kimi_linear": _kimi_linear,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _gdn_hybrid),
    **dict.fromkeys(("minimax", "minimax_m1", "minimax_m2", "minimax_text_01"), _minimax),
    "ring_linear": _ring,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
}


def read_layers(config: Config) -> tuple[LayerSpec, ...]:
    """Return the attention layers of a model in order. Layers without attention are left out."""
    layers = READERS.get(config.model_type, _decoder)(config)
    for layer in filter(None, dict.fromkeys(layers)):
        dims, widths = layer.linear, [layer.num_heads * layer.head_dim, layer.num_heads * layer.v_head_dim]
        widths += [] if dims is None else [dims.conv_channels, dims.conv_width]
        widths += [] if layer.mla is None else [layer.mla.row_dim]
        widths += [] if layer.indexer is None else [layer.indexer.heads * layer.indexer.head_dim]
        if max(widths) > MAX_COLUMNS:  # which no real model has; refused before it is allocated
            heads = f"{layer.num_heads} heads of {layer.head_dim} and {layer.v_head_dim}"
            raise ModelConfigError(
                f"{config.source}: a layer of kind {layer.kind} has {max(widths)} columns ({heads}); "
                f"the maximum is {MAX_COLUMNS}",
                config.source,
            )
    return tuple(replace(layer, layer_id=index) for index, layer in enumerate(layers) if layer is not None)
