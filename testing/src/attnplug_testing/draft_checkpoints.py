"""Tiny draft-model checkpoints with random weights, under the tensor names of published ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attnplug.host import TINY_CONFIGS
from attnplug_engine.checkpoints.random import RandomCheckpoint
from attnplug_engine.models.architectures import build_model, load_model
from attnplug_engine.models.decoder import LoadedModel
from attnplug_engine.speculation.drafts.model import DraftModel

HIDDEN, VOCAB = 64, 128


def random_tensors(shapes: Mapping[str, tuple[int, ...]], *, centred: bool = False) -> dict[str, Tensor]:
    """Return random tensors by name. Norm weights are drawn around 1, or around 0 if ``centred``."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator) * 0.25
        tensors[name] = drawn + 1 if name.endswith("norm.weight") and not centred else drawn
    return tensors


def save(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def saved_target(folder: Path, name: str, extra: Mapping[str, Tensor], **keys: Any) -> tuple[Path, dict[str, Tensor]]:
    """Save ``tiny:NAME`` with ``extra`` tensors and changed config keys; returns the folder and all tensors."""
    source = RandomCheckpoint({**TINY_CONFIGS[name], **keys}, name=f"tiny:{name}")
    loaded = load_model(f"tiny:{name}", dtype=torch.float32, device="cpu")
    build_model(source, loaded.spec, dtype=torch.float32, device="cpu")
    source.save(folder)
    tensors = {**load_file(folder / "model.safetensors"), **extra}
    return save(folder, {**TINY_CONFIGS[name], **keys}, tensors), tensors


class Fed(nn.Module):
    """Adapter that runs a draft model as a decoder. ``table[token]`` stands for the target's hidden state.

    Its logits are ``[tokens, hidden + vocab]``: hidden states, then the draft's logits.
    """

    def __init__(self, draft: DraftModel, table: Tensor | None, step: int = 0) -> None:
        super().__init__()
        self.draft, self.table, self.step = draft, table, step

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Any) -> Tensor:
        hidden = None if self.table is None else self.table[input_ids]
        out: Tensor = self.draft(input_ids, positions, hidden, batch, step=self.step)
        if self.table is not None and hidden is not None:
            assert torch.equal(hidden, self.table[input_ids]), "a draft must not write to its input"
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.cat((hidden, self.draft.logits(hidden, self.step)), dim=-1)

    def loaded(self) -> LoadedModel:
        return LoadedModel(self, self.draft.spec, {})  # type: ignore[arg-type] # as much of a model as a draft takes


def shapes_of_llama_mlp(name: str, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (intermediate, HIDDEN),
        f"{name}.up_proj.weight": (intermediate, HIDDEN),
        f"{name}.down_proj.weight": (HIDDEN, intermediate),
    }


def shapes_of_grouped_attention(name: str, dim: int, *, width: int = HIDDEN, gated: bool = False) -> dict[str, Any]:
    """Shapes of GQA with four query heads and two KV heads of width ``dim``."""
    shapes = {
        f"{name}.q_proj.weight": (4 * dim * (2 if gated else 1), width),
        f"{name}.k_proj.weight": (2 * dim, width),
        f"{name}.v_proj.weight": (2 * dim, width),
        f"{name}.o_proj.weight": (HIDDEN, 4 * dim),
    }
    return shapes | ({f"{name}.{part}_norm.weight": (dim,) for part in "qk"} if gated else {})


def shapes_of_block_norms(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{part}_layernorm.weight": (HIDDEN,) for part in ("input", "post_attention")}


def shapes_of_deepseek_layer(name: str, *, own: bool = True) -> dict[str, tuple[int, ...]]:
    """Shapes of a multi-token-prediction layer; ``own`` adds its own embedding and head."""
    attention, experts = f"{name}.self_attn", f"{name}.mlp"
    shapes = {
        f"{name}.enorm.weight": (HIDDEN,),
        f"{name}.hnorm.weight": (HIDDEN,),
        f"{name}.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
        f"{name}.shared_head.norm.weight": (HIDDEN,),
        **shapes_of_block_norms(name),
        f"{attention}.q_a_proj.weight": (24, HIDDEN),
        f"{attention}.q_a_layernorm.weight": (24,),
        f"{attention}.q_b_proj.weight": (4 * (16 + 8), 24),
        f"{attention}.kv_a_proj_with_mqa.weight": (32 + 8, HIDDEN),
        f"{attention}.kv_a_layernorm.weight": (32,),
        f"{attention}.kv_b_proj.weight": (4 * (16 + 16), 32),
        f"{attention}.o_proj.weight": (HIDDEN, 4 * 16),
        f"{experts}.gate.weight": (4, HIDDEN),
        f"{experts}.gate.e_score_correction_bias": (4,),
        **shapes_of_llama_mlp(f"{experts}.shared_experts", 32),
    }
    for expert in range(4):
        shapes |= shapes_of_llama_mlp(f"{experts}.experts.{expert}", 32)
    if own:
        shapes |= {f"{name}.embed_tokens.weight": (VOCAB, HIDDEN), f"{name}.shared_head.head.weight": (VOCAB, HIDDEN)}
    return shapes


def saved_deepseek(folder: Path, layers: int = 1, *, own: bool = False, **keys: Any) -> tuple[Path, dict[str, Tensor]]:
    """Save ``tiny:deepseek_v3`` with ``layers`` layers for multi-token prediction."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(layers):
        shapes |= shapes_of_deepseek_layer(f"model.layers.{3 + index}", own=own)
    return saved_target(folder, "deepseek_v3", random_tensors(shapes), num_nextn_predict_layers=layers, **keys)


def shapes_of_assistant(config: Mapping[str, Any], dim: int, *, norms: bool = False) -> dict[str, tuple[int, ...]]:
    """Shapes of an assistant model with queries of width ``dim``, normalised if ``norms``."""
    hidden, heads, intermediate = (config[key] for key in ("hidden_size", "num_attention_heads", "intermediate_size"))
    backbone = config["backbone_hidden_size"]
    shapes = {
        "pre_projection.weight": (hidden, 2 * backbone),
        "post_projection.weight": (backbone, hidden),
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for name in (f"model.layers.{index}" for index in range(config["num_hidden_layers"])):
        shapes |= {f"{name}.{part}_layernorm.weight": (hidden,) for part in ("input", "post_attention")}
        shapes |= {f"{name}.mlp.{part}_proj.weight": (intermediate, hidden) for part in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (hidden, intermediate)
        shapes[f"{name}.self_attn.q_proj.weight"] = (heads * dim, hidden)
        shapes[f"{name}.self_attn.o_proj.weight"] = (hidden, heads * dim)
        if norms:
            shapes[f"{name}.self_attn.q_norm.weight"] = (dim,)
    return shapes
