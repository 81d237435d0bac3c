"""Random matrices whose products show the order of their sums."""

from __future__ import annotations

import torch
from torch import Tensor

_DRAWN = 256
"""Most columns that are drawn for a comparison; a matrix with more repeats them."""


def cancelling(count: int, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``count`` random rows ``[..., count, inputs]``, and a random matrix with the shape, strides and dtype of
    ``matrix [..., inputs, outputs]``. In products with every other row, each term has an opposite.

    Such a sum is 0 but for its rounding errors, so that its bits show its order. Rounding to 16 bits hides the order of
    other sums: only a few of 10,000 differ.
    """
    *leading, inputs, outputs = matrix.shape
    device = matrix.device if matrix.is_cuda else torch.device("cpu")  # a plugin's device may have no generator
    seed = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=matrix.dtype, device=device, generator=seed)

    rows, columns = drawn(*leading, count, inputs), drawn(inputs, min(outputs, _DRAWN))
    first, second = torch.randperm(inputs, device=device, generator=seed)[: inputs // 2 * 2].view(2, -1)
    rows[..., ::2, second], columns[second] = rows[..., ::2, first], -columns[first]
    factor = written = torch.empty_strided(matrix.shape, matrix.stride(), dtype=matrix.dtype, device=matrix.device)
    for dim, stride in enumerate(matrix.stride()):
        written = written if stride else written.narrow(dim, 0, 1)  # of an expanded dimension there is one
    written.copy_(columns[:, torch.arange(written.shape[-1], device=device) % _DRAWN])
    return rows.to(matrix.device), factor
