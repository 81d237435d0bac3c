"""Up-projections of an MLA layer, and their absorption into queries and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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
    by_head: Callable[[Tensor, Tensor], Tensor | None] | None = None
    """Kernel of the host: multiplies ``[rows, heads, inputs | others]`` by ``[heads, inputs, outputs]`` to ``[rows,
    heads, outputs | others]``, copying columns behind the inputs. Returns ``None`` for rows that torch multiplies."""
    w_values: Tensor = field(init=False)
    """``[heads * v_head_dim, kv_lora_rank]``: ``w_vc`` as one contiguous matrix, made once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "w_values", self.w_vc.transpose(1, 2).reshape(-1, self.w_vc.shape[1]).contiguous())

    def absorb(self, q: Tensor) -> Tensor:
        """Absorb ``w_kc`` into queries: ``[tokens, heads, nope + rope]`` → ``[tokens, heads, kv_lora_rank + rope]``."""
        if self.by_head is not None and (product := self.by_head(q, self.w_kc)) is not None:
            return product
        nope, rank = self.w_kc.shape[1:]
        absorbed = q.new_empty(*q.shape[:2], rank + q.shape[-1] - nope)
        absorbed[..., :rank] = _product(q[..., :nope].transpose(0, 1), self.w_kc).transpose(0, 1)
        absorbed[..., rank:] = q[..., nope:]
        return absorbed

    def project_back(self, latent: Tensor) -> Tensor:
        """Project attended latents to values: ``[tokens, heads, kv_lora_rank]`` → ``[tokens, heads, v_head_dim]``."""
        if self.by_head is not None and (product := self.by_head(latent, self.w_vc)) is not None:
            return product
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


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """``rows @ weight``, for one matrix or for one per head."""
    product = torch.bmm if weight.dim() == 3 else torch.mm
    if rows.device.type == "cpu" and rows.dtype.itemsize < 4:  # CPU kernels for short dtypes may be 200 times slower
        return product(rows.float(), weight.float()).to(rows.dtype)
    return product(rows, weight)
