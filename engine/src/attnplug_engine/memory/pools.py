"""KV pools of a model's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch

from attnplug import AttentionKind, DType, KVFormat, LayerSpec, MHAPool, MLAPool, ModelSpec, PoolError
from attnplug.declare.errors import AttnplugError, PluginError, describe_error
from attnplug.host import KVPools, installed_format
from attnplug.kernels import CacheKey, RowPool
from attnplug.kv.pools import KeyedCache
from attnplug.linear import LinearStatePool
from attnplug.registry.loading import guarded
from attnplug_engine.memory.capacity import Capacity, HotBytes, bytes_per_page, bytes_per_state, hot_layers, own_dtype
from attnplug_sparse.hisparse import HOST_ENTRIES, HOST_ROWS, HOT_ENTRIES, HiSparse, HostRows, HotPool
from attnplug_sparse.pools import COMPRESSED, INDEX_KEYS, CompressedPool, IndexKeyPool


class _Pages(TypedDict):
    """Arguments that all paged pools have in common."""

    num_pages: int
    page_size: int
    device: torch.device


def check_codecs(
    layers: Sequence[LayerSpec], format: KVFormat, device: torch.device, index_format: KVFormat | None = None
) -> None:
    """Run the codecs of the formats of rows and index keys once for every width, and make their kernels for one page.

    On the CPU the kernels also write a row of padding. Raises PluginError if a codec or kernel cannot be imported,
    raises, or contradicts its declaration.
    """
    kinds: tuple[tuple[type[MHAPool | RowPool], KVFormat | None], ...]
    kinds = (MHAPool, format), (MLAPool, format), (IndexKeyPool, index_format)
    for pool, held in kinds:
        if held is None or held.codec is None or not any(map(pool.serves, layers)):
            continue
        try:
            with guarded():
                made = pool(layers, num_pages=1, page_size=held.page_multiple, dtype=held, device=device)
                if device.type in held.kernels and device.type == "cpu":  # on a GPU this would compile them
                    _write_padding(made)
        except AttnplugError:
            raise
        except (Exception, SystemExit) as error:
            cause = describe_error(error).splitlines()[0]
            raise PluginError(f"KV format {held}: its kernel for {device.type}: {cause}") from error


def _write_padding(pool: MHAPool | RowPool) -> None:
    first = torch.zeros(1, dtype=torch.int64)
    for layer_id in pool.layer_ids:
        if isinstance(pool, MHAPool):
            pool.write(layer_id, first - 1, *pool.read(layer_id, first))
        else:
            pool.write(layer_id, first - 1, pool.read_rows(layer_id, first))


def build_pools(
    spec: ModelSpec,
    capacity: Capacity,
    dtype: torch.dtype,
    kv_dtype: str,
    device: torch.device,
    index_dtype: str | None = None,
    *,
    scales: Mapping[int, tuple[float, float]] | None = None,
    hot: bool = False,
) -> KVPools:
    """Build the pools that the layers of a rank's ``spec`` need. ``dtype`` is the model's, and that of index keys
    unless ``index_dtype`` is given. ``scales`` are those of keys and values by layer id, used by formats with a scale
    per layer; latent rows have that of keys. With ``hot``, latent rows, and entries that indexes select, are in host
    memory, and the pools of both hold hot buffers. Raises PoolError if memory does not suffice."""
    try:
        with guarded():  # kernels of formats are made
            return _build_pools(spec, capacity, dtype, kv_dtype, device, index_dtype, scales or {}, hot=hot)
    except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError, for CUDA a subclass
        needed = capacity.num_pages * bytes_per_page(
            spec, capacity.page_size, kv_dtype, dtype, index_dtype, drafts=capacity.nodes - 1
        )
        if hot:
            hot_size = HotBytes.of(spec, capacity, kv_dtype, dtype, index_dtype)
            needed = hot_size.fixed + capacity.num_pages * hot_size.device_page
        what = f"{capacity.num_pages} pages of {capacity.page_size} tokens take {needed / 2**30:.1f} GiB"
        settings = ["num_pages"]
        if capacity.state_slots:
            states = capacity.state_slots * bytes_per_state(spec, dtype)
            what += f" and {capacity.state_slots} linear states {states / 2**30:.1f} GiB"
            settings += ["state_slots", "max_batch"]
        lower = " or ".join(f"`{setting}`" for setting in settings)
        raise PoolError(f"{what}, which cannot be allocated; lower {lower}", settings=settings) from error


def _build_pools(
    spec: ModelSpec,
    capacity: Capacity,
    dtype: torch.dtype,
    kv_dtype: str,
    device: torch.device,
    index_dtype: str | None,
    scales: Mapping[int, tuple[float, float]],
    *,
    hot: bool,
) -> KVPools:
    pages: _Pages = {"num_pages": capacity.num_pages, "page_size": capacity.page_size, "device": device}
    format, model_dtype = installed_format(kv_dtype), own_dtype(dtype)
    mha, kept = None, scales if format.layer_scale else {}
    if AttentionKind.MHA in spec.kinds:
        mha = MHAPool(spec.layers, dtype=format, scales=kept, **pages)
    mla: MLAPool | None = None
    latent = {layer_id: pair[0] for layer_id, pair in kept.items()}
    caches: dict[CacheKey[KeyedCache], KeyedCache] = {}
    if hot:
        mla, caches = _hot_pools(spec, capacity, kv_dtype, model_dtype, pages, latent)
    elif AttentionKind.MLA in spec.kinds:
        mla = MLAPool(spec.layers, dtype=format, scales=latent, **pages)
    linear = None
    if spec.linear_layers:
        linear = LinearStatePool(spec.layers, num_slots=capacity.state_slots, dtype=model_dtype, device=device)
    if spec.index_layers:
        caches[INDEX_KEYS] = IndexKeyPool(spec.layers, dtype=installed_format(index_dtype or model_dtype), **pages)
    if spec.compressed_layers:
        caches[COMPRESSED] = CompressedPool(
            spec.layers, dtype=model_dtype, drafts=capacity.nodes - 1, hosted=hot, **pages
        )
    return KVPools(mha=mha, mla=mla, linear=linear, caches=caches)


def _hot_pools(
    spec: ModelSpec,
    capacity: Capacity,
    kv_dtype: str,
    dtype: DType,
    pages: _Pages,
    scales: Mapping[int, float],
) -> tuple[HotPool, dict[CacheKey[KeyedCache], KeyedCache]]:
    """Return the pool of hot latent rows; and, by key, the host memory behind it and the pools of hot entries."""
    caches: dict[CacheKey[KeyedCache], KeyedCache] = {}
    pools = []
    groups = hot_layers(spec, capacity, kv_dtype, dtype)
    for key, (group, stored) in zip((HOST_ROWS, HOST_ENTRIES), groups, strict=False):
        own = scales if key is HOST_ROWS else {}  # entries have none
        pools.append(HotPool(group.layers, group.sizes, dtype=installed_format(stored), scales=own, **pages))
        row = pools[-1].cells.shape[1]
        caches[key] = HostRows(len(group.layers), row_nbytes=row, ratio=group.sizes.ratio, **pages)
    for entries in pools[1:]:
        caches[HOT_ENTRIES] = entries
    return pools[0], caches


def build_coordinator(pools: KVPools) -> HiSparse | None:
    """Build the coordinator that brings rows from host memory; None if all rows are on the device."""
    if not isinstance(pools.mla, HotPool):
        return None
    entries = None
    if HOT_ENTRIES in pools.caches:
        entries = HiSparse(pools.cache(HOT_ENTRIES), pools.cache(HOST_ENTRIES))
    return HiSparse(pools.mla, pools.cache(HOST_ROWS), entries)
