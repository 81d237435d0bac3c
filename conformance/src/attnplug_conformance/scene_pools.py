"""KV pools of scenes, in the memory layout of a case."""

from __future__ import annotations

import gc
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from tempfile import TemporaryFile

import torch
from torch import Tensor

from attnplug import CacheLayout, DType, KVFormat, LayerSpec, MHAPool, MLAPool
from attnplug.host import KVPools
from attnplug.kernels import RowFormat
from attnplug.linear import LinearStatePool
from attnplug_conformance.case import FIRST, LAST, LAYER, Case
from attnplug_conformance.subject import Unclaimed

MAX_INT32 = 1 << 31
UNUSED_PAGES = 64
"""First page of a strided cache with ``wide`` pages."""
FAR = 1 << 16
"""Minimum slot number of a scene with ``far`` pages."""


def first_page(case: Case, widths: tuple[int, int, int]) -> int:
    """Return the first page that a case uses. ``widths`` are those of a key and of a value, and the number of KV heads.

    The offsets of ``wide`` pages in elements exceed 32 bits.
    """
    assert case.page_size is not None
    key, value, heads = widths
    if case.pages == "wide":
        narrow = key if case.mla is not None else min(key, value)
        token_major = MAX_INT32 // (case.page_size * heads * narrow) + 1
        return UNUSED_PAGES if case.layout is CacheLayout.STRIDED else token_major
    return -(-FAR // case.page_size) if case.pages == "far" else 0


def make_pools(case: Case, format: KVFormat, key_dim: int, pages: int, device: torch.device) -> KVPools:
    """Return a pool of the case's layers. ``key_dim`` is the width of a cached key, or of a latent row."""
    layers, size = case.layers, case.page_size
    assert size is not None
    strided, wide = case.layout is CacheLayout.STRIDED, case.pages == "wide"
    shapes: dict[int, tuple[int, ...]] = {}
    if case.mla is not None:
        scales = {FIRST: 2.0, LAYER: case.kv_scales[0], LAST: 3.0} if format.layer_scale else None
        if not strided and not wide:
            mla = MLAPool(layers, num_pages=pages, page_size=size, dtype=format, device=device, scales=scales)
            return KVPools(mla=mla)
        form = RowFormat.of(format, key_dim, rope=case.mla.qk_rope_head_dim)
        shapes |= {layer.layer_id: (pages, size, form.width + 16 * strided) for layer in layers}
        given = _memory_of(shapes, form.stored, device, wide=wide, strided=strided)
        rows = {layer_id: memory[..., : form.width] for layer_id, memory in given.items()}
        return KVPools(mla=MLAPool.over(layers, rows, "pages tokens dim", page_size=size, dtype=format, scales=scales))
    pairs = {FIRST: (2.0, 3.0), LAYER: case.kv_scales, LAST: (3.0, 2.0)} if format.layer_scale else None
    if strided:
        for layer in layers:
            keys, values = (RowFormat.of(format, width) for width in (layer.head_dim, layer.v_head_dim))
            shapes[layer.layer_id] = pages, size, layer.num_kv_heads, keys.width + values.width
        both = _memory_of(shapes, keys.stored, device, wide=wide, strided=True)
        order = "pages tokens heads (kv dim)"
        return KVPools(mha=MHAPool.over(layers, both, order, page_size=size, dtype=format, scales=pairs))
    head_major = case.layout is CacheLayout.HEAD_MAJOR
    if wide:
        for layer in layers:
            places = (layer.num_kv_heads, size) if head_major else (size, layer.num_kv_heads)
            for number, width in enumerate((layer.head_dim, layer.v_head_dim)):
                form = RowFormat.of(format, width)
                shapes[2 * layer.layer_id + number] = pages, *places, form.width
        single = _memory_of(shapes, form.stored, device, wide=True, strided=False)
        given_pairs = {layer.layer_id: (single[2 * layer.layer_id], single[2 * layer.layer_id + 1]) for layer in layers}
        order = f"pages {'heads tokens' if head_major else 'tokens heads'} dim"
        return KVPools(mha=MHAPool.over(layers, given_pairs, order, page_size=size, dtype=format, scales=pairs))
    mha = MHAPool(
        layers,
        num_pages=pages,
        page_size=size,
        dtype=format,
        device=device,
        layout="head_major" if head_major else "token_major",
        scales=pairs,
    )
    return KVPools(mha=mha)


def _memory_of(
    shapes: Mapping[int, tuple[int, ...]], dtype: torch.dtype, device: torch.device, *, wide: bool, strided: bool
) -> dict[int, Tensor]:
    """Return memory ``[pages, …]`` for each shape.

    ``wide``: all are in one piece of memory, of which only the last pages are used. If ``strided``, pages of all layers
    alternate, as some hosts have them, and lie far apart. On a CPU truncated offsets are in the piece, too.
    """
    if not wide:
        return {layer_id: torch.zeros(shape, dtype=dtype, device=device) for layer_id, shape in shapes.items()}
    stride, start = MAX_INT32 // UNUSED_PAGES, MAX_INT32 if device.type == "cpu" else 0
    pages = next(iter(shapes.values()))[0]
    whole = _untouched(start + (pages * stride if strided else sum(map(math.prod, shapes.values()))), dtype, device)
    found = {}
    for number, shape in shapes.items():
        row, *inner = torch.empty(shape, device="meta").stride()
        found[number] = whole.as_strided(shape, (stride if strided else row, *inner), start)
        start += row if strided else math.prod(shape)
    return found


class WideStates(LinearStatePool):
    """States of linear layers. Only the last ``num_slots`` are used, at offsets beyond 32 bits.

    On a GPU those of the larger states of a layer do, which are the recurrent ones if there are any.
    """

    def __init__(self, layers: Sequence[LayerSpec], *, num_slots: int, dtype: DType, device: torch.device) -> None:
        super().__init__(layers, num_slots=1, dtype=dtype, device=device)
        like = LinearStatePool(layers, num_slots=1, dtype=dtype, device=device)
        both = {layer_id: (like.recurrent(layer_id), like.conv(layer_id)) for layer_id in like.layer_ids}
        sizes = [one.numel() for each in both.values() for one in each if one is not None]
        # A GPU has no room for as many slots as convolution states need: 268 GiB with those of Mamba2.
        size = min(sizes) if device.type == "cpu" else max(sizes)
        self.num_slots = MAX_INT32 // size + 1 + num_slots
        self._wide = {layer_id: [self._widened(one) for one in each] for layer_id, each in both.items()}

    def _widened(self, one: Tensor | None) -> Tensor | None:
        if one is None:
            return None
        shape = self.num_slots, *one.shape[1:]
        return _memory_of({0: shape}, one.dtype, one.device, wide=True, strided=False)[0]

    def recurrent(self, layer_id: int) -> Tensor | None:
        return self._wide[layer_id][0]

    def conv(self, layer_id: int) -> Tensor | None:
        return self._wide[layer_id][1]


def far_apart(rows: Tensor) -> Tensor:
    """Return a copy of rows that lie so far apart that the offsets of the second half exceed 32 bits."""
    stride = MAX_INT32 // max(len(rows) // 2, 1)
    start = MAX_INT32 if rows.device.type == "cpu" else 0
    whole = _untouched(start + len(rows) * stride, rows.dtype, rows.device)
    return whole.as_strided(rows.shape, (stride, *rows[0].stride()), start).copy_(rows)


def _untouched(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory that is not written. On a CPU it is a sparse file, which takes no room until it is used.

    Raises :class:`Unclaimed` if there is too little memory or, on a CPU, address space (``ulimit -v``).
    """
    nbytes = count * dtype.itemsize
    if device.type == "cpu":
        try:
            with os.fdopen(os.memfd_create("cache"), "r+b") if hasattr(os, "memfd_create") else TemporaryFile() as file:
                file.truncate(nbytes)
                memory = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            raise Unclaimed(f"the check needs {nbytes >> 30} GiB of address space: {error.strerror}") from error
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
    if device.type == "cuda":
        gc.collect()  # memory of earlier checks may be in reference cycles
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info(device)[0] < nbytes:
            raise Unclaimed(f"the check needs {nbytes >> 30} GiB of the GPU's memory")
    return torch.empty(count, dtype=dtype, device=device)
