"""Draft models in float64, over whole sequences and without a cache: what tests of them share.

``t`` maps a checkpoint's tensor names to tensors. Nothing here is taken from the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


def norm(x: Tensor, weight: Tensor, *, centred: bool = False, eps: float = 1e-6) -> Tensor:
    weight = weight.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + weight if centred else weight)


def linear(t: Tensors, name: str, x: Tensor) -> Tensor:
    out = x @ t[f"{name}.weight"].double().T
    bias = t.get(f"{name}.bias")
    return out if bias is None else out + bias.double()


def mlp(t: Tensors, name: str, x: Tensor) -> Tensor:
    gate = linear(t, f"{name}.gate_proj", x)
    return linear(t, f"{name}.down_proj", gate * gate.sigmoid() * linear(t, f"{name}.up_proj", x))


def rotate(x: Tensor, *, pairs: bool = False, width: int | None = None, theta: float = 10000.0) -> Tensor:
    """``[tokens, heads, dim]`` by the tokens' places: halves, or neighbours as ``pairs``; the first ``width`` alone."""
    width = x.shape[-1] if width is None else width
    angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(0, width, 2).double() / width)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    part = x[..., :width]
    both = part.unflatten(-1, (-1, 2)) if pairs else torch.stack(part.chunk(2, dim=-1), dim=-1)
    turned = torch.view_as_real(torch.view_as_complex(both.contiguous()) * turn)
    flat = turned.flatten(-2) if pairs else torch.cat(turned.unbind(-1), dim=-1)
    return torch.cat((flat, x[..., width:]), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention; ``[tokens, heads, dim]`` each, KV heads shared by groups of query heads."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(len(q), len(q)).triu(1).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def llama_attention(t: Tensors, name: str, x: Tensor, dim: int) -> Tensor:
    q, k, v = (linear(t, f"{name}.{part}_proj", x).unflatten(-1, (-1, dim)) for part in "qkv")
    return linear(t, f"{name}.o_proj", attend(rotate(q), rotate(k), v).flatten(1))


def latent_attention(t: Tensors, name: str, x: Tensor, config: Mapping[str, int]) -> Tensor:
    """DeepSeek-V3's, with a low-rank query."""
    heads, nope, rope = (config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    low = norm(linear(t, f"{name}.q_a_proj", x), t[f"{name}.q_a_layernorm.weight"])
    q_nope, q_rope = linear(t, f"{name}.q_b_proj", low).unflatten(-1, (heads, -1)).split((nope, rope), dim=-1)
    latent, k_rope = linear(t, f"{name}.kv_a_proj_with_mqa", x).split((config["kv_lora_rank"], rope), dim=-1)
    up = linear(t, f"{name}.kv_b_proj", norm(latent, t[f"{name}.kv_a_layernorm.weight"])).unflatten(-1, (heads, -1))
    k_rope = rotate(k_rope[:, None], pairs=True).expand(-1, heads, -1)
    q = torch.cat((q_nope, rotate(q_rope, pairs=True)), dim=-1)
    attended = attend(q, torch.cat((up[..., :nope], k_rope), dim=-1), up[..., nope:])
    return linear(t, f"{name}.o_proj", attended.flatten(1))


def deepseek_layer(config: Mapping[str, int], t: Tensors, name: str, tokens: Sequence[int], hidden: Tensor) -> Tensor:
    """Hidden states and logits of a whole sequence, side by side: a layer for multi-token prediction."""
    embedding = t.get(f"{name}.embed_tokens.weight", t["model.embed_tokens.weight"])
    head = t.get(f"{name}.shared_head.head.weight", t["lm_head.weight"])
    embedded = norm(embedding[list(tokens)].double(), t[f"{name}.enorm.weight"])
    joined = torch.cat((embedded, norm(hidden.double(), t[f"{name}.hnorm.weight"])), dim=-1)
    x = linear(t, f"{name}.eh_proj", joined)
    normed = norm(x, t[f"{name}.input_layernorm.weight"])
    x = x + latent_attention(t, f"{name}.self_attn", normed, config)
    normed = norm(x, t[f"{name}.post_attention_layernorm.weight"])
    x = x + sigmoid_experts(t, f"{name}.mlp", normed, per_token=2, scaling=2.5)
    out = norm(x, t[f"{name}.shared_head.norm.weight"])
    return torch.cat((out, out @ head.double().T), dim=-1)


def gated_attention(t: Tensors, name: str, x: Tensor, dim: int, rotary: int) -> Tensor:
    """Qwen3-Next's: each head's query and gate, normed queries and keys, a part of each head rotated."""
    q, gate = linear(t, f"{name}.q_proj", x).unflatten(-1, (-1, 2 * dim)).chunk(2, dim=-1)
    k, v = (linear(t, f"{name}.{part}_proj", x).unflatten(-1, (-1, dim)) for part in "kv")
    q, k = (norm(y, t[f"{name}.{part}_norm.weight"], centred=True) for y, part in ((q, "q"), (k, "k")))
    attended = attend(rotate(q, width=rotary), rotate(k, width=rotary), v) * gate.sigmoid()
    return linear(t, f"{name}.o_proj", attended.flatten(1))


def sigmoid_experts(t: Tensors, name: str, x: Tensor, per_token: int, scaling: float) -> Tensor:
    """DeepSeek-V3's experts in one group, and the shared one."""
    scores = linear(t, f"{name}.gate", x).sigmoid()
    chosen = (scores + t[f"{name}.gate.e_score_correction_bias"].double()).topk(per_token).indices
    shares = scores.gather(1, chosen)
    return _mixed(t, name, x, chosen, shares / shares.sum(-1, keepdim=True) * scaling) + mlp(
        t, f"{name}.shared_experts", x
    )


def softmax_experts(t: Tensors, name: str, x: Tensor, per_token: int) -> Tensor:
    """Qwen3-Next's experts, with a separate gate for the shared one."""
    shares, chosen = linear(t, f"{name}.gate", x).softmax(-1).topk(per_token)
    shared = mlp(t, f"{name}.shared_expert", x) * linear(t, f"{name}.shared_expert_gate", x).sigmoid()
    return _mixed(t, name, x, chosen, shares / shares.sum(-1, keepdim=True)) + shared


def _mixed(t: Tensors, name: str, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    rows = [
        sum(share * mlp(t, f"{name}.experts.{expert}", row[None])[0] for expert, share in zip(*pair, strict=True))
        for row, *pair in zip(x, chosen.tolist(), shares, strict=True)
    ]
    return torch.stack(rows)
