"""Random changes to every tiny config: the engine has transformers' logits, or refuses the config."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
import torch

from attnplug.host import TINY_CONFIGS, AttnplugError
from attnplug_engine.engine import Engine
from attnplug_engine.request import SamplingParams
from attnplug_testing.rounded_oracle import watched_logits

MODELS = sorted(TINY_CONFIGS.keys() - {"ring_linear"})  # transformers does not have it
COMPARED, DRAWN = 12, 200
"""Configs whose logits are compared, and maximum of those drawn for it."""
NEW_TOKENS = 6
WIDTHS = {"hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"}
RANKS = {"kv_lora_rank", "q_lora_rank", "o_lora_rank"}
FLAGS = {"attention_bias", "mlp_bias", "tie_word_embeddings", "norm_topk_prob", "use_sliding_window", "use_qk_norm"}
CHOICES: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(WIDTHS, (16, 40, 48, 72, 96)),
    **dict.fromkeys(RANKS, (16, 24, 40, 72)),
    **dict.fromkeys(FLAGS, (False, True)),
    "num_hidden_layers": (1, 2, 3, 5),
    "sliding_window": (None, 1, 2, 5, 9, 64),
    "index_topk": (2, 3, 7, 100),
    "index_n_heads": (8, 16),  # with few heads many scores are equal, and transformers selects any of them
    "partial_rotary_factor": (0.25, 0.5, 0.75, 1.0),
    "head_dim": (8, 12, 16, 20, 32),
    "final_logit_softcapping": (None, 1.0, 30.0),
    "routed_scaling_factor": (0.5, 1.0, 2.5),
    "max_position_embeddings": (64, 128, 1000),
    "hidden_act": ("silu", "gelu", "relu"),
}
"""Values of keys that a config has, or may have. Numbers of the other keys are multiplied and divided."""
KEPT = {"model_type", "architectures", "dtype", "vocab_size", "initializer_range", "bos_token_id", "eos_token_id"}


def changed(random: Random, config: dict[str, Any]) -> dict[str, Any]:
    """Return changes to some keys of a config."""
    changes: dict[str, Any] = {}
    others = random.sample(sorted(CHOICES.keys() - config.keys()), 2)  # a model ignores, or refuses, what it lacks
    for key in random.sample(sorted((config.keys() | {*others}) - KEPT), random.choice((1, 2, 3, 4))):
        value = config.get(key)
        if key in CHOICES:
            changes[key] = random.choice(CHOICES[key])
        elif key in ("num_attention_heads", "num_key_value_heads"):
            heads = random.choice((1, 2, 3, 4, 6))
            changes["num_attention_heads"] = heads
            if "num_key_value_heads" in config:
                grouped = [number for number in range(1, heads + 1) if heads % number == 0]
                changes["num_key_value_heads"] = heads if "kv_lora_rank" in config else random.choice(grouped)
        elif isinstance(value, bool):
            changes[key] = not value
        elif isinstance(value, int):
            changes[key] = random.choice((1, 2, 3, 2 * value, 3 * value, max(value // 2, 1), value + 8))
        elif isinstance(value, float):
            changes[key] = value * random.choice((0.5, 2.0))
        elif key == "rope_parameters":
            changes[key] = ropes(random, value)
        elif isinstance(value, list):
            changes[key] = random.sample(value, len(value))
    return changes


def ropes(random: Random, given: Any) -> dict[str, Any]:
    """Return rope keys of another type, or those of one of several ropes with another width."""
    if isinstance(given, dict) and (several := sorted(key for key in given if isinstance(given[key], dict))):
        one = random.choice(several)
        return {**given, one: {**given[one], "partial_rotary_factor": random.choice((0.25, 0.5))}}
    return random.choice(
        (
            {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": random.choice((0.5, 1.0))},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
        )
    )


def settings(random: Random, config: dict[str, Any]) -> dict[str, Any]:
    sizes = ((1, 90), (4, 24), (8, 12), (16, 40))
    page_size, num_pages = random.choice(sizes[2:] if "compress_rates" in config else sizes)
    return {
        "page_size": page_size,
        "num_pages": num_pages,
        "chunked_prefill_size": random.choice((1, 3, 7, 64, -1)),
        "prefix_cache": random.random() < 0.7,
        "two_batch_overlap": random.random() < 0.2,
        "batch_invariant": random.random() < 0.2,
    }


def drop_defaults(random: Random, oracle: Any) -> None:
    """Leave keys out of a checkpoint's config whose values are transformers' defaults, as published configs do."""
    from transformers import AutoConfig

    path = oracle.folder / "config.json"
    config = json.loads(path.read_text())
    defaults = AutoConfig.for_model(oracle.model.config.model_type).to_dict()
    same = [key for key, value in config.items() if key not in KEPT and key in defaults and defaults[key] == value]
    left_out = random.sample(same, len(same) // 2)
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in left_out}))


def prompts(random: Random) -> list[list[int]]:
    """Different lengths; the second and third begin alike, so that one finds the other's pages."""
    drawn = [[random.randrange(128) for _ in range(length)] for length in (1, 25, 33, 14)]
    drawn[2][:20] = drawn[1][:20]
    return drawn


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.sample(1)
def test_a_changed_config_has_the_logits_of_transformers_or_is_refused(model_type, oracle_type, tmp_path):
    """D3: nothing that a config says is ignored."""
    compared = 0
    for number in range(DRAWN):
        random, config = Random(f"{model_type} {number}"), TINY_CONFIGS[model_type]
        changes, given = changed(random, config), prompts(random)
        try:
            oracle = oracle_type(tmp_path / str(number), model_type, changes)
            oracle.logits(given[1])
        except Exception:
            continue  # transformers cannot run it
        drop_defaults(random, oracle)
        try:
            engine = Engine(str(oracle.folder), device="cpu", ignore_eos=True, **settings(random, config))
        except AttnplugError:
            continue
        with watched_logits() as seen:
            completions = engine.generate(given, SamplingParams(max_tokens=NEW_TOKENS))
        for prompt, completion, request in zip(given, completions, sorted(seen), strict=True):
            wanted = oracle.logits([*prompt, *completion.token_ids[:-1]])[len(prompt) - 1 :]
            error = (torch.stack(seen[request]) - wanted).abs().max() / (1 + wanted.abs().max())
            assert error < 2e-3, f"{changes}: {error}"
        compared += 1
        if compared == COMPARED:
            break
    assert compared == COMPARED
