"""Checkpoints of several architectures on a GPU, generated on this backend and compared with transformers."""

from __future__ import annotations

from typing import Any

import pytest

from attnplug import DType, ExtendPath, Role
from attnplug.host import ExtendPolicy
from attnplug_testing.devices import DEVICES
from attnplug_testing.references.flashattention import skip_without_fa4
from attnplug_testing.rounded_oracle import DEEPSEEK_V3, RoundedOracle

pytestmark = [*DEVICES[1].marks]

COMMON = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "max_position_embeddings": 4096,
    "initializer_range": 0.06,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    "qwen3": {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128},
    "mistral": {
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "sliding_window": 50,
    },
    "qwen3_next": {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 2,  # both of them always: choosing would turn rounding into other experts
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
}


@pytest.fixture(scope="module")
def oracle(request, tmp_path_factory):
    name = request.param
    config = DEEPSEEK_V3 if name == "deepseek_v3" else {**COMMON, **MODELS[name]}
    return RoundedOracle(str(tmp_path_factory.mktemp(name)), name, config)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"page_size": 16, "num_pages": 120, "chunked_prefill_size": 100},
    {"page_size": 128, "num_pages": 32, "chunked_prefill_size": 90},
    {"page_size": 256, "num_pages": 16, "dtype": DType.FLOAT16},
    {"backend_options": {"flashattention": {"kernel": "torch"}}, "chunked_prefill_size": 90},
]
MLA_SETTINGS: list[dict[str, Any]] = [
    *SETTINGS,
    {"extend_policy": ExtendPolicy(forced=ExtendPath.CHUNKED, chunk_capacity=64), "chunked_prefill_size": 90},
    {"role_backends": {Role.PREFILL: "flashattention", Role.DECODE: "flashmla"}, "page_size": 64},
]


def named(settings: object) -> str | None:
    return (",".join(settings) or "default") if isinstance(settings, dict) else None


@pytest.mark.parametrize("oracle", MODELS, indirect=True)
@pytest.mark.parametrize("settings", SETTINGS, ids=named)
def test_same_tokens_as_transformers_where_bfloat16_can_tell(oracle, settings):
    """A7 for Qwen3-Next. Logits as near to float32's as transformers' own in bfloat16, tokens equal beyond that."""
    if "backend_options" not in settings:
        skip_without_fa4()
    oracle.check(attention_backend="flashattention", **settings)


@pytest.mark.parametrize("oracle", ["deepseek_v3"], indirect=True)
@pytest.mark.parametrize("settings", MLA_SETTINGS, ids=named)
def test_prefill_here_and_decode_elsewhere(oracle, settings):
    """C1: the same for DeepSeek-V3."""
    if "role_backends" in settings:
        pytest.importorskip("flash_mla", exc_type=ImportError)
    if "backend_options" not in settings:
        skip_without_fa4()
    roles = {"role_backends": {Role.PREFILL: "flashattention"}}
    oracle.check(**{"attention_backend": "torch_native", **roles, **settings})
