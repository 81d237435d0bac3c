"""Ring-2.5's equations in float64 over a whole sequence, from the tensors by name: transformers has no such model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def ring_logits(tensors: Mapping[str, Tensor], config: Mapping[str, Any], tokens: list[int]) -> Tensor:
    """``[tokens, vocab]``."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    layers, eps = config["num_hidden_layers"], config["rms_norm_eps"]
    hidden = weights["model.word_embeddings.weight"][tokens]
    for index in range(layers):
        prefix = f"model.layers.{index}."
        own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        attend = _lightning if (index + 1) % config["layer_group_size"] else _latent
        hidden = hidden + attend(own, config, _norm(hidden, own["input_layernorm.weight"], eps), index)
        normed = _norm(hidden, own["post_attention_layernorm.weight"], eps)
        dense = index < config["first_k_dense_replace"]
        hidden = hidden + (_mlp(own, "mlp", normed) if dense else _experts(own, config, normed))
    return _norm(hidden, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def _mlp(own: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    gate, up = x @ own[f"{name}.gate_proj.weight"].T, x @ own[f"{name}.up_proj.weight"].T
    return (gate * gate.sigmoid() * up) @ own[f"{name}.down_proj.weight"].T


def _experts(own: Mapping[str, Tensor], config: Mapping[str, Any], x: Tensor) -> Tensor:
    scores = (x @ own["mlp.gate.weight"].T).sigmoid()
    rows = []
    for row, score in zip(x, scores, strict=True):
        chosen = (score + own["mlp.gate.expert_bias"]).argsort(descending=True)[: config["num_experts_per_tok"]]
        outputs = [score[expert] / score[chosen].sum() * _mlp(own, f"mlp.experts.{expert}", row) for expert in chosen]
        rows.append(config["routed_scaling_factor"] * sum(outputs) + _mlp(own, "mlp.shared_experts", row))
    return torch.stack(rows)


def _angles(config: Mapping[str, Any], width: int, tokens: int) -> Tensor:
    """``[tokens, width / 2]``."""
    exponents = torch.arange(0, width, 2).double() / width
    return torch.arange(tokens).double()[:, None] * config["rope_theta"] ** -exponents


def _turn(first: Tensor, second: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return first * cos - second * sin, second * cos + first * sin


def _lightning(own: Mapping[str, Tensor], config: Mapping[str, Any], x: Tensor, index: int) -> Tensor:
    tokens, heads, width = len(x), config["num_attention_heads"], config["head_dim"]
    qkv = (x @ own["attention.query_key_value.weight"].T).reshape(tokens, 3, heads, width)
    rotated = int(width * config["partial_rotary_factor"])
    angles = _angles(config, rotated, tokens)
    q, k = qkv[:, 0], qkv[:, 1]
    pair = []
    for rows, name in ((q, "query"), (k, "key")):
        rows = _norm(rows, own[f"attention.{name}_layernorm.weight"], config["rms_norm_eps"])
        turned = _turn(rows[..., : rotated // 2], rows[..., rotated // 2 : rotated], angles)
        pair.append(torch.cat((*turned, rows[..., rotated:]), dim=-1))
    distance = (torch.arange(tokens)[:, None] - torch.arange(tokens)).double()
    out = torch.zeros(tokens, heads, width, dtype=torch.float64)
    # The authors' formula, in modeling_bailing_moe_v2_5.py: ``slope`` is the log of the decay, layers count from 0.
    last = config["num_hidden_layers"] - 1
    for head in range(heads):  # a power of two, for which ALiBi's slopes are plain
        slope = -(2 ** (-8 * (head + 1) / heads)) * (1 - (index - 1) / last + 1e-5)
        decay = (slope * distance).exp().tril()
        out[:, head] = (pair[0][:, head] @ pair[1][:, head].T * decay) @ qkv[:, 2, head] / math.sqrt(width)
    groups = out.reshape(tokens, config["group_norm_size"], -1)
    normed = _norm(groups, torch.ones((), dtype=torch.float64), config["rms_norm_eps"]).reshape(tokens, -1)
    gate = (x @ own["attention.g_proj.weight"].T).sigmoid()
    return (normed * own["attention.g_norm.weight"] * gate) @ own["attention.dense.weight"].T


def _latent(own: Mapping[str, Tensor], config: Mapping[str, Any], x: Tensor, index: int) -> Tensor:
    tokens, heads, eps = len(x), config["num_attention_heads"], config["rms_norm_eps"]
    nope, rope, latent = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
    low = _norm(x @ own["attention.q_a_proj.weight"].T, own["attention.q_a_layernorm.weight"], eps)
    q = (low @ own["attention.q_b_proj.weight"].T).reshape(tokens, heads, nope + rope)
    row = x @ own["attention.kv_a_proj_with_mqa.weight"].T
    expanded = _norm(row[:, :latent], own["attention.kv_a_layernorm.weight"], eps) @ own["attention.kv_b_proj.weight"].T
    k_nope, v = expanded.reshape(tokens, heads, -1).split((nope, config["v_head_dim"]), dim=-1)
    angles = _angles(config, rope, tokens)
    rotary = []
    for rows in (q[..., nope:], row[:, None, latent:]):
        rotary.append(torch.stack(_turn(rows[..., 0::2], rows[..., 1::2], angles), dim=-1).flatten(-2))
    q = torch.cat((q[..., :nope], rotary[0]), dim=-1)
    k = torch.cat((k_nope, rotary[1].expand(-1, heads, -1)), dim=-1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(nope + rope)
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(dim=-1), v)
    return attended.flatten(1) @ own["attention.dense.weight"].T
