"""Batch-invariant arithmetic: the bits of a row do not depend on the other rows of a tensor (E3).

Libraries choose blocking, vector tails and the split of a sum by the number of rows, and so does most of torch. Inside
:func:`arithmetic` a dispatch mode replaces these operators:

- Matrix products run in tiles of a constant number of rows, padded. On a GPU they run in one Triton kernel
  (``invariant_gemm``), because cuBLAS chooses its kernel by the number of rows.
- Sums are a tree of elementwise additions.
- Transcendental functions, and others of several roundings, run in padded chunks on a CPU: torch computes the last
  elements of a tensor, and of each thread's part of it, with other code than the vectorised one.
- ``topk`` of a few thousand elements takes the first of equals.

It replaces operators instead of the calls of each model, so an architecture needs no code of its own for it. Rows are
the second to last dimension of a product's first factor. A product that is batched over tokens is not covered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_state = threading.local()


def active() -> bool:
    """Return True inside of :func:`arithmetic` on this thread, suspended or not."""
    return getattr(_state, "mode", None) is not None


_UNCHANGED = nullcontext()


def arithmetic(on: bool) -> AbstractContextManager[None]:
    """Return a context in which torch's operators on this thread are batch-invariant if ``on``. May be nested."""
    return _UNCHANGED if not on or active() else _replaced()


@contextmanager
def _replaced() -> Iterator[None]:
    _state.mode = mode = Replacing()  # type: ignore[no-untyped-call]  # torch has no annotations
    try:
        with mode:
            yield
    finally:
        _state.mode = None


@contextmanager
def suspended() -> Iterator[None]:
    """Run torch's own operators inside of :func:`arithmetic`: a backend keeps its levels of invariance by itself."""
    mode: Replacing | None = getattr(_state, "mode", None)
    if mode is None:
        yield
        return
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        mode.__enter__()  # type: ignore[no-untyped-call]


class Replacing(TorchDispatchMode):
    """Dispatch mode that runs the replacement of an operator. It is off while a replacement runs."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise the first operator imports torch's compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        replacement = _REPLACEMENTS.get(func)
        return (func if replacement is None else replacement)(*args, **(kwargs or {}))


# Matrix products

_TILES = (512, 128, 32, 16)
"""Numbers of rows that a CPU multiplies at once; the last one is also that of a padded remainder. A tile begins at a
multiple of 64 bytes, because MKL's code depends on the alignment. A call with 16 rows takes about as long as one with
4; 32 rows take half as long per row (measured with MKL on a Xeon)."""
_ALIGNED = 64
_FEWEST_TERMS = 64
"""Fewest terms of the sums in a larger tile: the order of a few terms seldom shows."""
_COMPARED, _MOST_DRAWS = 1 << 18, 64
"""Number of sums to compare, and the most tiles to compute for them. Orders that differ in one term change about one
sum in 1,000."""
_agreeing: dict[tuple[object, ...], bool] = {}


def product(rows: Tensor, matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Multiply ``rows [..., n, inputs]`` by ``matrix [..., inputs, outputs]``: ``[..., n, outputs]`` in ``dtype``.

    Leading dimensions are equal, and belong to the model (heads, groups), not to the batch.
    """
    if not rows.is_floating_point():
        return torch.matmul(rows, matrix)
    if not rows.is_cuda:
        return _in_tiles(rows, matrix).to(dtype or rows.dtype)
    from attnplug_engine.kernels.invariant_gemm import invariant_gemm

    if rows.dim() == 2:
        return invariant_gemm(rows, matrix.t(), dtype=dtype)
    flat, matrices = rows.flatten(0, -3), matrix.flatten(0, -3)
    parts = [invariant_gemm(one, each.t(), dtype=dtype) for one, each in zip(flat, matrices, strict=True)]
    return cast(Tensor, torch.stack(parts).unflatten(0, rows.shape[:-2]))


def _in_tiles(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply tiles of constant numbers of rows, the larger ones only if they give the same bits as the smallest.

    The matrix is the first factor: MKL is then faster with few rows, and more sizes agree.
    """
    count, start, turned = rows.shape[-2], 0, matrix.mT
    smallest = _TILES[-1] if _agrees(matrix, _TILES[-1]) else 1  # a single row at a time always agrees
    parts = []
    while start < count:
        left = count - start
        size = next((size for size in _TILES[:-1] if left >= size and smallest > 1 and _agrees(matrix, size)), smallest)
        tile = rows[..., start : start + size, :]
        if left < size:
            padded = rows.new_zeros(*rows.shape[:-2], size, rows.shape[-1])
            padded[..., :left, :] = tile
            tile = padded
        parts.append(_tile(turned, tile))
        start += size
    if not parts:
        return rows.new_empty(*rows.shape[:-1], matrix.shape[-1])
    return (parts[0] if len(parts) == 1 else torch.cat(parts, -2))[..., :count, :].contiguous()


def _tile(turned: Tensor, tile: Tensor) -> Tensor:
    tile = tile.contiguous()
    return torch.matmul(turned, (tile if tile.data_ptr() % _ALIGNED == 0 else tile.clone()).mT).mT


def _agrees(matrix: Tensor, size: int) -> bool:
    """Return True if a tile of ``size`` rows gives every row the bits that the smallest tile gives it, at any place.

    Computed once per shape and device. MKL with 64 rows or more sums a long dimension in other blocks, and so does
    oneDNN with 16-bit numbers.
    """
    least, (inputs, outputs) = _TILES[-1], matrix.shape[-2:]
    if size > least and inputs < _FEWEST_TERMS:
        return False
    key = (matrix.shape, matrix.stride(), matrix.dtype, matrix.device, size, torch.get_num_threads())
    if key not in _agreeing:
        from attnplug_engine.kernels.cancelling_terms import cancelling

        draws = min(_COMPARED // (size * outputs + 1) + 1, _MOST_DRAWS)
        rows, factor = cancelling(draws * (size if size > least else 2), matrix)
        if size > least:
            tiles = ([_tile(factor.mT, part) for part in rows.split(each, -2)] for each in (size, least))
            _agreeing[key] = torch.equal(*(torch.cat(each, -2) for each in tiles))
        else:
            equal = (_tile(factor.mT, row.expand(*row.shape[:-2], least, -1)) for row in rows.split(1, -2))
            _agreeing[key] = all(bool((tile == tile[..., :1, :]).all()) for tile in equal)
    return _agreeing[key]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = product(x.reshape(-1, x.shape[-1]), weight.t()).unflatten(0, x.shape[:-1])
    return out if bias is None else out.add_(bias)


def _mm(first: Tensor, second: Tensor, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    found = product(first, second, dtype)
    return found if out is None else out.copy_(found)


def _add_product(
    added: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1, in_place: bool = False
) -> Tensor:
    found = product(first, second)
    if alpha != 1:
        found.mul_(alpha)
    found = found.add_(added if beta == 1 else added * beta)
    return added.copy_(found) if in_place else found


def _matmul(first: Tensor, second: Tensor) -> Tensor:
    if second.dim() == 2 and first.dim() >= 2:
        return _linear(first, second.t())
    if first.dim() < 2 or second.dim() < 2:
        return torch.matmul(first, second)
    leading = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    return product(first.expand(*leading, -1, -1), second.expand(*leading, -1, -1))


# Sums and choices

_LONGEST_SORTED = 4096


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Return the sum over ``dim``, in an order that depends on its length only."""
    x = x.movedim(dim, -1)
    while (length := x.shape[-1]) > 1:
        half = length // 2
        pairs = x[..., :half] + x[..., half : 2 * half]
        x = pairs if length % 2 == 0 else torch.cat((pairs, x[..., -1:]), -1)
    return x.squeeze(-1)


def _sum(
    x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if dims is None or len(dims) != 1 or not x.is_floating_point() or not x.shape[dims[0]]:
        return cast(Tensor, torch.ops.aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype))
    # As in torch, a sum of a short dtype is rounded once.
    dtype, wide = dtype or x.dtype, torch.promote_types(dtype or x.dtype, torch.float32)
    found = tree_sum(x.to(wide), dims[0]).to(dtype)
    return found.unsqueeze(dims[0]) if keepdim else found


def _mean(
    x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if dims is None or len(dims) != 1 or not x.shape[dims[0]]:
        return cast(Tensor, torch.ops.aten.mean.dim(x, dims, keepdim, dtype=dtype))
    return _sum(x, dims, keepdim, dtype=dtype) / x.shape[dims[0]]


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    if not x.dim() or x.shape[dim] > _LONGEST_SORTED or k > x.shape[dim]:
        values, indices = torch.topk(x, k, dim, largest, sorted)
        return values, indices
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


# Functions of elements

_CHUNK, _LANES = 1 << 14, 128
"""Elements of a chunk: few enough for one thread, and a multiple of the elements that vectorised loops take."""


def _in_chunks(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Run an elementwise operator on chunks that have no remainder."""
    tensors = [place for place, one in enumerate(args) if isinstance(one, Tensor)]
    if any(args[place].is_cuda for place in tensors):
        return func(*args, **kwargs)
    shaped = torch.broadcast_tensors(*(args[place] for place in tensors))
    shape, count = shaped[0].shape, shaped[0].numel()
    padded = [_padded(one, -count % _LANES).split(_CHUNK) for one in shaped]
    parts = []
    for chunk in zip(*padded, strict=True):
        given = list(args)
        for place, one in zip(tensors, chunk, strict=True):
            given[place] = one
        parts.append(func(*given, **kwargs))
    if not parts:
        return func(*args, **kwargs)
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:count].view(shape)


def _padded(x: Tensor, more: int) -> Tensor:
    flat = x.reshape(-1)
    return torch.cat((flat, flat.new_ones(more))) if more else flat


def _in_place(func: Callable[..., Tensor], target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return target.copy_(_in_chunks(func, target, *args, **kwargs))


def _into(func: Callable[..., Tensor], *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
    return out.copy_(_in_chunks(func, *args, **kwargs))


def _multiply(func: Callable[..., Tensor], x: Tensor, y: object) -> Tensor:
    return _in_chunks(func, x, y) if x.is_complex() else func(x, y)


def _multiply_in_place(func: Callable[..., Tensor], x: Tensor, y: object) -> Tensor:
    return x.copy_(_in_chunks(torch.mul, x, y)) if x.is_complex() else func(x, y)


_aten = torch.ops.aten
_UNARY = ("exp", "log", "log1p", "sigmoid", "silu", "cos", "sin", "tanh")
_FURTHER = ("softplus", "gelu", "polar", "hypot", "addcmul", "addcdiv")
_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    _aten.linear.default: _linear,
    _aten.mm.default: _mm,
    _aten.mm.dtype: _mm,
    _aten.mm.out: _mm,
    _aten.bmm.default: product,
    _aten.matmul.default: _matmul,
    _aten.addmm.default: _add_product,
    _aten.addmm_.default: partial(_add_product, in_place=True),
    _aten.baddbmm.default: _add_product,
    _aten.sum.dim_IntList: _sum,
    _aten.mean.dim: _mean,
    _aten.topk.default: _topk,
    _aten.mul.Tensor: partial(_multiply, _aten.mul.Tensor),
    _aten.mul_.Tensor: partial(_multiply_in_place, _aten.mul_.Tensor),
    _aten.addcmul.out: partial(_into, _aten.addcmul.default),
    **{getattr(_aten, name).default: partial(_in_chunks, getattr(_aten, name).default) for name in _UNARY + _FURTHER},
    **{
        getattr(_aten, f"{name}_").default: partial(_in_place, getattr(_aten, name).default)
        for name in (*_UNARY, "addcmul", "addcdiv")
    },
}
"""Replacements by overload. Complex products and ``addcmul`` are here because scalar code may fuse their sums."""
