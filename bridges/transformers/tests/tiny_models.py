"""Tiny random models of transformers, in float32, and prompts for them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

import attnplug_transformers  # noqa: F401 (it registers the names)

NATIVE = "attnplug:torch_native"
VOCABULARY = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
WINDOW = 24
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SIZES),
    "qwen3": Qwen3Config(**_SIZES),
    "gemma2": Gemma2Config(**_SIZES, sliding_window=WINDOW, query_pre_attn_scalar=20, attn_logit_softcapping=2.0),
    "gemma2_uncapped": Gemma2Config(**_SIZES, sliding_window=WINDOW, attn_logit_softcapping=None),
    "gemma3": Gemma3TextConfig(**_SIZES, sliding_window=WINDOW, layer_types=["full_attention", "sliding_attention"]),
    "gemma3n": Gemma3nTextConfig(  # its last two layers read the caches of the first two
        **{**_SIZES, "num_hidden_layers": 4, "intermediate_size": [64] * 4},
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.0] * 4,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        laurel_rank=8,
    ),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=128),
    "lfm2": Lfm2Config(**_SIZES, layer_types=["full_attention", "conv"]),
    "gpt_oss": GptOssConfig(**_SIZES, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1),
    "deepseek_v3": DeepseekV3Config(
        **{**_SIZES, "num_key_value_heads": 8, "head_dim": 8},
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
}


@cache
def model(name: str) -> PreTrainedModel:
    """A model with weights large enough that attention decides its tokens. Tests set its implementation."""
    torch.manual_seed(7)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    for module in made.modules():
        if isinstance(sinks := getattr(module, "sinks", None), torch.nn.Parameter):
            torch.nn.init.normal_(sinks)
    return made.requires_grad_(False)


def padded(lens: list[int], *, left: bool = True) -> dict[str, Tensor]:
    """Prompts of these lengths, padded to the longest."""
    generator = torch.Generator().manual_seed(3)
    longest = max(lens)
    ids = torch.randint(3, VOCABULARY, (len(lens), longest), generator=generator)
    positions = torch.arange(longest)
    counts = torch.tensor(lens)[:, None]
    mask = positions >= longest - counts if left else positions < counts
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long()}


def generated(name: str, implementation: str, prompts: dict[str, Tensor], **options: Any) -> Tensor:
    """The tokens that a model adds, greedily."""
    made: Any = model(name)
    made.set_attn_implementation(implementation)
    out = made.generate(**prompts, do_sample=False, pad_token_id=0, eos_token_id=None, **options)
    tokens: Tensor = out[:, prompts["input_ids"].shape[1] :]
    return tokens
