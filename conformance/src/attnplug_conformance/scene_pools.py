"""KV pools of scenes, in the memory layout of a case."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from tempfile import TemporaryFile

import torch
from torch import Tensor

from attnplug import CacheLayout, KVFormat, MHAPool, MLAPool
from attnplug.host import KVPools
from attnplug.kernels import RowFormat
from attnplug_conformance.case import FIRST, LAST, LAYER, Case
from attnplug_conformance.subject import Unclaimed

MAX_INT32 = 1 << 31
UNUSED_PAGES = 64
"""Number of pages in front of those that a scene with ``wide`` pages uses, whose offsets thus exceed 32 bits."""


def make_pools(case: Case, format: KVFormat, key_dim: int, pages: int, device: torch.device) -> KVPools:
    """Return a pool of the case's layers. ``key_dim`` is the width of a cached key, or of a latent row."""
    layers, size = case.layers, case.page_size
    assert size is not None
    strided = case.layout is CacheLayout.STRIDED
    shapes: dict[int, tuple[int, ...]] = {}
    if case.mla is not None:
        scales = {FIRST: 2.0, LAYER: case.kv_scales[0], LAST: 3.0} if format.layer_scale else None
        if not strided:
            mla = MLAPool(layers, num_pages=pages, page_size=size, dtype=format, device=device, scales=scales)
            return KVPools(mla=mla)
        form = RowFormat.of(format, key_dim, rope=case.mla.qk_rope_head_dim)
        shapes |= {layer.layer_id: (pages, size, form.width + 16) for layer in layers}
        given = _memory_of(shapes, form.stored, device, wide=case.pages == "wide")
        rows = {layer_id: memory[..., : form.width] for layer_id, memory in given.items()}
        return KVPools(mla=MLAPool.over(layers, rows, "pages tokens dim", page_size=size, dtype=format, scales=scales))
    pairs = {FIRST: (2.0, 3.0), LAYER: case.kv_scales, LAST: (3.0, 2.0)} if format.layer_scale else None
    if strided:
        for layer in layers:
            keys, values = (RowFormat.of(format, width) for width in (layer.head_dim, layer.v_head_dim))
            shapes[layer.layer_id] = pages, size, layer.num_kv_heads, keys.width + values.width
        both = _memory_of(shapes, keys.stored, device, wide=case.pages == "wide")
        order = "pages tokens heads (kv dim)"
        return KVPools(mha=MHAPool.over(layers, both, order, page_size=size, dtype=format, scales=pairs))
    mha = MHAPool(
        layers,
        num_pages=pages,
        page_size=size,
        dtype=format,
        device=device,
        layout="head_major" if case.layout is CacheLayout.HEAD_MAJOR else "token_major",
        scales=pairs,
    )
    return KVPools(mha=mha)


def _memory_of(
    shapes: Mapping[int, tuple[int, ...]], dtype: torch.dtype, device: torch.device, *, wide: bool
) -> dict[int, Tensor]:
    """Return memory ``[pages, …]`` by layer id.

    ``wide``: all layers are in one piece of memory, as some hosts have them, and pages lie so far apart that offsets in
    elements exceed 32 bits. On a CPU the piece is so large that truncated offsets are in it, too.
    """
    if not wide:
        return {layer_id: torch.zeros(shape, dtype=dtype, device=device) for layer_id, shape in shapes.items()}
    stride, pages = MAX_INT32 // UNUSED_PAGES, next(iter(shapes.values()))[0]
    start = MAX_INT32 if device.type == "cpu" else 0
    whole = _untouched(start + pages * stride, dtype, device)
    found = {}
    for layer_id, shape in shapes.items():
        inner = torch.empty(shape[1:], device="meta").stride()
        found[layer_id] = whole.as_strided(shape, (stride, *inner), start)
        start += math.prod(shape[1:])
    return found


def _untouched(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory that is not written. On a CPU it is a sparse file, which takes no room until it is used."""
    nbytes = count * dtype.itemsize
    if device.type == "cpu":
        with os.fdopen(os.memfd_create("cache"), "r+b") if hasattr(os, "memfd_create") else TemporaryFile() as file:
            file.truncate(nbytes)
            return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8).view(dtype)
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < nbytes:
        raise Unclaimed(f"the check needs {nbytes >> 30} GiB of the GPU's memory")
    return torch.empty(count, dtype=dtype, device=device)
