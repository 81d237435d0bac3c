"""Published model configs, and functions to read them with changes."""

from __future__ import annotations

from typing import Any

import pytest

from attnplug import ModelSpec
from attnplug.hf.model_config import model_from_config
from attnplug.host import ModelConfigError

LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
YARN_40 = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
TINY_YARN: dict[str, Any] = {
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
}
"""YaRN for a tiny model: scaling begins within the contexts of tests."""
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_scaling": YARN_40,
    "torch_dtype": "bfloat16",
}
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 262144,
}
KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR: dict[str, Any] = {
    "model_type": "kimi_linear",
    "hidden_size": 2304,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 72,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_attn_config": {
        "full_attn_layers": KIMI_FULL,
        "kda_layers": [number for number in range(1, 28) if number not in KIMI_FULL],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}
NEMOTRON_H_8B: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
}


def read(config: dict[str, Any], **changes: Any) -> ModelSpec:
    """Return the spec of a config with changed keys."""
    return model_from_config({**config, **changes}, "a-model")


def refused(config: dict[str, Any], key: str, **changes: Any) -> str:
    """Check that a config with changed keys is refused because of ``key``; returns the message."""
    with pytest.raises(ModelConfigError) as caught:
        read(config, **changes)
    assert caught.value.key == key
    assert caught.value.source == "a-model"
    assert repr(key) in str(caught.value)
    return str(caught.value)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return a config without these keys."""
    return {key: value for key, value in config.items() if key not in keys}
