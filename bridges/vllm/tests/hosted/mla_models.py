"""Tiny DeepSeek-V3 models, with the latent rows that vLLM's own kernel for the CPU is compiled for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from engines import NEW, VOCABULARY

# vLLM's rotary kernel for the CPU is wrong for MLA's strided queries.
COMMON: dict[str, Any] = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
OPTIONS: dict[str, dict[str, Any]] = {"dense": COMMON, "moe": {**COMMON, "hf_overrides": {"topk_method": "noaux_tc"}}}


def _config(name: str) -> DeepseekV3Config:
    return DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=32,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1 if name == "moe" else 3,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )


@dataclass
class MLAModels:
    """Checkpoints by name: ``dense`` or ``moe``."""

    folder: Path
    _told: dict[tuple[str, str], list[list[int]]] = field(default_factory=dict)

    def path(self, name: str) -> str:
        path = self.folder / name
        if not path.exists():
            torch.manual_seed(0)
            DeepseekV3ForCausalLM(_config(name)).save_pretrained(path)
        return str(path)

    def expected(self, name: str, prompts: list[list[int]]) -> list[list[int]]:
        """The tokens that transformers generates, greedily, one request at a time."""
        key = name, str(prompts)
        if key not in self._told:
            model = DeepseekV3ForCausalLM.from_pretrained(
                self.path(name), dtype=torch.float32, attn_implementation="eager"
            )
            self._told[key] = [_greedy(model, prompt) for prompt in prompts]
        return self._told[key]


def _greedy(model: DeepseekV3ForCausalLM, prompt: list[int]) -> list[int]:
    given = torch.tensor([prompt])
    printed = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0}
    with torch.no_grad():
        out = model.generate(given, attention_mask=torch.ones_like(given), **printed)
    return out[0, len(prompt) :].tolist()
