"""Random float32 checkpoints that run in a second, in SGLang's format, and transformers' results for them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

SHARED: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
GROUPED: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_theta": 10000.0,
}
"""On a CPU, SGLang has no rotary embedding for DeepSeek without it."""
OF_DEEPSEEK = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1}
"""Keys of published checkpoints that SGLang reads and transformers does not write."""
TOKENS = 24


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SHARED, **GROUPED, num_hidden_layers=3, tie_word_embeddings=False))


def deepseek() -> Any:
    dims = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 24}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    dense = {"moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**SHARED, **dims, **experts, **dense, **heads, rope_parameters=YARN))


def gemma2() -> Any:
    """A window in every other layer, and a cap. The cap of the last logits is off: SGLang has it as a GPU's kernel."""
    return Gemma2ForCausalLM(
        Gemma2Config(
            **SHARED,
            **GROUPED,
            num_hidden_layers=4,
            sliding_window=32,
            query_pre_attn_scalar=16,
            final_logit_softcapping=None,
            hidden_act="gelu_pytorch_tanh",
            pad_token_id=0,
        )
    )


def save(name: str, folder: Path) -> Path:
    """Write the checkpoint ``name`` under ``folder``."""
    torch.manual_seed(0)
    model = {"llama": llama, "deepseek": deepseek, "gemma2": gemma2}[name]()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    target = folder / name
    model.to(torch.float32).save_pretrained(target)
    if name == "deepseek":
        config = target / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **OF_DEEPSEEK}))
    return target


def save_draft(folder: Path) -> Path:
    """Write the checkpoint ``folder`` with noise in its weights: its best tokens are often among the model's."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    target = folder.with_name(f"{folder.name}-draft")
    model.save_pretrained(target)
    text = (folder / "config.json").read_text()
    # As DeepSeek-V3, a draft would be the model's own layers for drafts (NextN). The classes are the same.
    (target / "config.json").write_text(text.replace("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"))
    return target


def prompts() -> list[list[int]]:
    """Eight prompts of different lengths; the last two begin with the same 70 tokens."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 256) for _ in range(count)]

    shared = tokens(70)
    return [tokens(count) for count in (5, 17, 64, 130, 33, 7)] + [shared + tokens(count) for count in (9, 40)]


def expected(folder: Path) -> list[list[int]]:
    """The greedy tokens of every prompt, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found = []
    for prompt in prompts():
        given = torch.tensor([prompt])
        out = model.generate(given, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        found.append(out[0, len(prompt) :].tolist())
    return found
