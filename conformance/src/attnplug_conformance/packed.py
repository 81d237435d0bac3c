"""Rows in fp8 with scales of their own, byte by byte: what a cache holds, written by no code of a pool."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 128
"""Values of a latent row that share a scale."""
FP8 = torch.float8_e4m3fn


def in_fp8(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Groups ``[…, numbers]`` as e4m3 values and a scale ``[…, 1]`` each: the least power of two that fits."""
    groups = groups.float()
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scales = torch.exp2(torch.ceil(torch.log2(largest / 448.0)))
    return (groups / scales).to(FP8), scales


def packed(rows: Tensor, rank: int) -> Tensor:
    """Latent rows ``[…, rank + rope]`` as bytes of ``fp8_ds_mla``: values, scales, and the rest in bfloat16."""
    values, scales = in_fp8(rows[..., :rank].unflatten(-1, (-1, GROUP)))
    parts = values.flatten(-2), scales.flatten(-2), rows[..., rank:].to(torch.bfloat16)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def unpacked(cells: Tensor, rank: int, *, scaled: bool = True) -> Tensor:
    """The rows that bytes of ``fp8_ds_mla`` hold, float32; without their scales, as a mistake reads them."""
    end = rank + rank // GROUP * 4
    values, scales, rest = (part.contiguous() for part in cells.tensor_split((rank, end), -1))
    groups = values.view(FP8).float().unflatten(-1, (-1, GROUP))
    if scaled:
        groups = groups * scales.view(torch.float32).unsqueeze(-1)
    return torch.cat([groups.flatten(-2), rest.view(torch.bfloat16).float()], -1)


def put_index_keys(memory: Tensor, pages: Tensor, offsets: Tensor, keys: Tensor) -> None:
    """Write index keys ``[n, dim]`` to bytes ``[pages, page_size, dim + 4]``: of a page all keys, then all scales."""
    count, size, width = memory.shape
    dim, whole = width - 4, memory.view(count, -1)
    values, scales = in_fp8(keys)
    whole[:, : size * dim].unflatten(1, (size, dim))[pages, offsets] = values.view(torch.uint8)
    whole[:, size * dim :].unflatten(1, (size, 4))[pages, offsets] = scales.view(torch.uint8)


def index_keys_in_fp8(keys: Tensor) -> Tensor:
    """Index keys as fp8 keeps them, float32."""
    values, scales = in_fp8(keys)
    return values.float() * scales
