"""Up-projections of an MLA layer, and their absorption into queries and outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MLAWeights:
    """Up-projections of one layer, for this rank's heads.

    ``w_kc`` ``[heads, nope, kv_lora_rank]`` projects latents to keys, ``w_vc`` ``[heads, kv_lora_rank, v_head_dim]`` to
    values. Absorbed attention applies the first to the query and the second to the output.
    """

    w_kc: Tensor
    w_vc: Tensor
    w_values: Tensor = field(init=False)
    """``[heads * v_head_dim, kv_lora_rank]``: ``w_vc`` as one contiguous matrix, made once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "w_values", self.w_vc.transpose(1, 2).reshape(-1, self.w_vc.shape[1]).contiguous())

    def absorb(self, q: Tensor) -> Tensor:
        """Absorb ``w_kc`` into queries: ``[tokens, heads, nope + rope]`` → ``[tokens, heads, kv_lora_rank + rope]``."""
        if _by_kernel(q, self.w_kc):
            from attnplug.mla.triton_heads import multiply_heads

            return multiply_heads(q, self.w_kc)
        nope, rank = self.w_kc.shape[1:]
        absorbed = q.new_empty(*q.shape[:2], rank + q.shape[-1] - nope)
        absorbed[..., :rank] = _product(q[..., :nope].transpose(0, 1), self.w_kc).transpose(0, 1)
        absorbed[..., rank:] = q[..., nope:]
        return absorbed

    def project_back(self, latent: Tensor) -> Tensor:
        """Project attended latents to values: ``[tokens, heads, kv_lora_rank]`` → ``[tokens, heads, v_head_dim]``."""
        if _by_kernel(latent, self.w_vc):
            from attnplug.mla.triton_heads import multiply_heads

            return multiply_heads(latent, self.w_vc)
        return _product(latent.transpose(0, 1), self.w_vc).transpose(0, 1)

    def up_project(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Up-project cache rows ``[rows, kv_lora_rank + rope]`` to keys ``[rows, heads, nope + rope]`` and values
        ``[rows, heads, v_head_dim]``."""
        heads, nope, rank = self.w_kc.shape
        latent, rope = rows[:, :rank], rows[:, rank:]
        keys = rows.new_empty(rows.shape[0], heads, nope + rope.shape[1])
        keys[..., :nope] = _product(latent, self.w_kc.flatten(0, 1).T).unflatten(1, (heads, nope))
        keys[..., nope:] = rope.unsqueeze(1)
        return keys, _product(latent, self.w_values.T).unflatten(1, (heads, -1))


_MAX_KERNEL_ROWS = 256
"""With more rows a library's batched product is faster than our kernel, although it requires copies."""


def _by_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Return True if our Triton kernel multiplies these rows: few rows, in a short dtype, on a GPU with Triton."""
    return (
        rows.is_cuda
        and 0 < rows.shape[0] <= _MAX_KERNEL_ROWS
        and rows.dtype in (torch.bfloat16, torch.float16)
        and weight.dtype == rows.dtype
        and _has_triton()
    )


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """``rows @ weight``, for one matrix or for one per head."""
    product = torch.bmm if weight.dim() == 3 else torch.mm
    if rows.device.type == "cpu" and rows.dtype.itemsize < 4:  # CPU kernels for short dtypes may be 200 times slower
        return product(rows.float(), weight.float()).to(rows.dtype)
    return product(rows, weight)
