"""Writers of tiny quantized checkpoints in the published layouts, and their dequantized twins."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from attnplug_engine.models.architectures import load_model
from attnplug_engine.quantization.scheme import QuantizedWeight

FILE = "model.safetensors"
Quantize = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
"""Tensors of a module by their last name, and the dequantized weight."""

_PROJECTIONS = re.compile(r"\.(\w*_proj\w*|w[123]|wq_\w|wo_\w|wkv|eh_proj)\.weight$|^lm_head\.weight$")


def fp8_blocks(rows: int = 128, columns: int = 128, *, exponents: bool = False, name: str = "weight_scale_inv"):
    """DeepSeek's layout; with ``exponents`` the scales are UE8M0."""

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        out, width = weight.shape
        high, wide = -(-out // rows), -(-width // columns)
        scales = torch.empty(high, wide)
        codes, values = torch.empty(out, width, dtype=torch.float8_e4m3fn), torch.empty(out, width)
        for i in range(high):
            for j in range(wide):
                at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scale = weight[at].abs().max() / 448
                scales[i, j] = scale = torch.exp2(torch.log2(scale).ceil()) if exponents else scale
                codes[at] = (weight[at] / scale).to(torch.float8_e4m3fn)
                values[at] = codes[at].float() * scale
        return {"weight": codes, name: scales.to(torch.float8_e8m0fnu) if exponents else scales}, values

    return quantize


def fp8_channels(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()


def fp8_tensor(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().max().reshape(1) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)}, codes.float() * scale


def int4_groups(group: int):
    """K2-Thinking's layout, packed by compressed-tensors itself. The last group may be shorter."""

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
        width = weight.shape[1]
        groups = F.pad(weight, (0, -width % group)).unflatten(1, (-1, group))
        scales = (groups.abs().amax(2) / 7.5).bfloat16()
        codes = (groups / scales.float().unsqueeze(2)).round().clamp(-8, 7)
        values = (codes * scales.float().unsqueeze(2)).flatten(1)[:, :width]
        packed = helpers.pack_to_int32(codes.flatten(1)[:, :width].to(torch.int8), 4)
        return {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}, values

    return quantize


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(code: str = "weight", scale: str = "scale", *, kind: torch.dtype = torch.int8):
    """V4's experts; with other names, ``mxfp4-pack-quantized``."""

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = weight.unflatten(1, (-1, 32))
        exponents = torch.log2(groups.abs().amax(2) / 6).ceil()
        scaled = groups / torch.exp2(exponents).unsqueeze(2)
        codes = (scaled.unsqueeze(-1) - _E2M1).abs().argmin(-1)
        values = (_E2M1[codes] * torch.exp2(exponents).unsqueeze(2)).flatten(1)
        codes = codes.flatten(1)
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(kind)
        bytes_ = (exponents + 127).to(torch.uint8)
        return {code: packed, scale: bytes_.view(torch.float8_e8m0fnu) if scale == "scale" else bytes_}, values

    return quantize


def quantized(
    folder: Path,
    target: Path,
    config: Mapping[str, Any],
    quantize: Quantize,
    excluded: str = "lm_head",
    change: Callable[[dict[str, Tensor]], object] = lambda tensors: None,
    experts: Quantize | None = None,
) -> Path:
    """Write the checkpoint in ``folder`` with quantized projections to ``target``. Write its dequantized weights to
    ``target/dequantized``, and return that path."""
    plain = target / "dequantized"
    plain.mkdir(parents=True)
    tensors, values = {}, {}
    for name, tensor in load_file(folder / FILE).items():
        values[name] = tensor
        if _PROJECTIONS.search(name) and not re.search(excluded, name):
            own = experts if experts is not None and ".experts." in name else quantize
            parts, values[name] = own(tensor.float())
            tensors.update({f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()})
        else:
            tensors[name] = tensor
    change(tensors)
    keys = json.loads((folder / "config.json").read_text())
    for path, saved, extra in ((target, tensors, {"quantization_config": dict(config)}), (plain, values, {})):
        (path / "config.json").write_text(json.dumps({**keys, **extra}))
        save_file({name: value.contiguous() for name, value in saved.items()}, path / FILE, metadata={"format": "pt"})
    return plain


GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
"""``quantization_config`` of the published gpt-oss."""


def published_gpt_oss(
    folder: Path, target: Path, change: Callable[[dict[str, Tensor]], object] = lambda tensors: None
) -> Path:
    """Write the gpt-oss checkpoint in ``folder`` in its published form: stacked MXFP4 experts, all else in bfloat16."""
    target.mkdir()
    tensors = {}
    for name, tensor in load_file(folder / FILE).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts = [mxfp4("blocks", "scales", kind=torch.uint8)(weight.T.float())[0] for weight in tensor]
            for part in ("blocks", "scales"):
                tensors[f"{name}_{part}"] = torch.stack([expert[part] for expert in experts])
            tensors[f"{name}_blocks"] = tensors[f"{name}_blocks"].unflatten(2, (-1, 16))
        else:
            tensors[name] = tensor.bfloat16()
    change(tensors)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": GPT_OSS}
    (target / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / FILE, metadata={"format": "pt"})
    return target


# ---- what tests of quantized models share ----

NEW_TOKENS = 8
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def compressed(form: str, **weights: object) -> dict[str, object]:
    """A ``quantization_config`` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "symmetric": True} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}
FLOAT8 = {"num_bits": 8, "type": "float"}
ODD = {"hidden_size": 136, "intermediate_size": 200, "moe_intermediate_size": 72}
EVEN = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
CASES = {
    "fp8 blocks": ("qwen3", {}, {**FP8, "weight_block_size": [16, 16]}, fp8_blocks(16, 16)),
    "fp8 blocks, UE8M0 scales": (
        "llama",
        {"attention_bias": True},
        {**FP8, "weight_block_size": [16, 16], "scale_fmt": "ue8m0"},
        fp8_blocks(16, 16, exponents=True),
    ),
    "fp8 blocks of compressed-tensors": (
        "llama",
        {},
        compressed("float-quantized", **FLOAT8, strategy="block", block_structure=[16, 16]),
        fp8_blocks(16, 16, name="weight_scale"),
    ),
    "fp8 channels": ("qwen2", {}, compressed("float-quantized", **FLOAT8, strategy="channel"), fp8_channels),
    "fp8 tensors": ("llama", {}, compressed("float-quantized", **FLOAT8, strategy="tensor"), fp8_tensor),
    "int4, groups of 32": ("llama", EVEN, compressed("pack-quantized", **INT4, group_size=32), int4_groups(32)),
    "int4, groups of 128": ("qwen3", EVEN, compressed("pack-quantized", **INT4, group_size=128), int4_groups(128)),
    "MXFP4": (
        "llama",
        EVEN,
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        mxfp4("weight_packed", "weight_scale", kind=torch.uint8),
    ),
}


def logits_of(folder: Path, make_stage, sequences, **options):
    loaded = load_model(str(folder), dtype=torch.float32, device="cpu", **options)
    return make_stage(loaded, len(sequences)).run(sequences, NEW_TOKENS), loaded


def transformers_logits(folder: Path, sequences):
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    pytest.importorskip("accelerate")  # transformers needs it for fp8
    config = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    options = {}
    if config.get("quant_method") == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
        # by default it decompresses in the first forward
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    oracle = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, **options
    ).eval().float()  # fmt: skip
    with torch.inference_mode():
        return [oracle(torch.tensor([tokens])).logits[0].float() for tokens in sequences]


def kept(module: nn.Module) -> list[QuantizedWeight]:
    return [part for part in module.modules() if isinstance(part, QuantizedWeight)]


def nested(folder: Path) -> None:
    """Rewrite a checkpoint as the text model of a multimodal one."""
    tensors = load_file(folder / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    keys = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "llava", "quantization_config": keys.pop("quantization_config"), "text_config": keys}
    (folder / "config.json").write_text(json.dumps(outer))
