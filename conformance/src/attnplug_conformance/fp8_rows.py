"""Byte layouts of fp8 rows with per-group scales, implemented independently of the pools."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 128
"""Number of values of a latent row that share a scale."""
FP8 = torch.float8_e4m3fn


def quantize_fp8(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize groups ``[…, values]`` to e4m3 with a scale ``[…, 1]`` each: the smallest power of two that fits."""
    groups = groups.float()
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scales = torch.exp2(torch.ceil(torch.log2(largest / 448.0)))
    return (groups / scales).to(FP8), scales


def pack_rows(rows: Tensor, rank: int) -> Tensor:
    """Pack latent rows ``[…, rank + rope]`` into ``fp8_ds_mla`` bytes: e4m3 values, scales, rotary part in bfloat16."""
    values, scales = quantize_fp8(rows[..., :rank].unflatten(-1, (-1, GROUP)))
    parts = values.flatten(-2), scales.flatten(-2), rows[..., rank:].to(torch.bfloat16)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def unpack_rows(cells: Tensor, rank: int, *, scaled: bool = True) -> Tensor:
    """Unpack ``fp8_ds_mla`` bytes to float32 rows. ``scaled=False`` ignores the scales, as a faulty backend might."""
    end = rank + rank // GROUP * 4
    values, scales, rest = (part.contiguous() for part in cells.tensor_split((rank, end), -1))
    groups = values.view(FP8).float().unflatten(-1, (-1, GROUP))
    if scaled:
        groups = groups * scales.view(torch.float32).unsqueeze(-1)
    return torch.cat([groups.flatten(-2), rest.view(torch.bfloat16).float()], -1)


def write_index_keys(memory: Tensor, pages: Tensor, offsets: Tensor, keys: Tensor) -> None:
    """Write index keys ``[n, dim]`` to bytes ``[pages, page_size, dim + 4]``: a page has keys, then scales."""
    count, size, width = memory.shape
    dim, whole = width - 4, memory.view(count, -1)
    values, scales = quantize_fp8(keys)
    whole[:, : size * dim].unflatten(1, (size, dim))[pages, offsets] = values.view(torch.uint8)
    whole[:, size * dim :].unflatten(1, (size, 4))[pages, offsets] = scales.view(torch.uint8)


def round_index_keys(keys: Tensor) -> Tensor:
    """Index keys rounded to fp8, as float32."""
    values, scales = quantize_fp8(keys)
    return values.float() * scales
