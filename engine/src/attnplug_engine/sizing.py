"""Capacity of an engine: pages, slots and step sizes, from its options and free memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnplug import ModelSpec, PoolError, UsageError
from attnplug.host import Selection
from attnplug.machine.runtime import runtime_of
from attnplug_engine.memory.capacity import Capacity, HotBytes, bytes_per_page, bytes_per_state
from attnplug_engine.models.host_memory import available_memory
from attnplug_engine.options import EngineOptions
from attnplug_engine.scheduling.scheduler import unchunked_step_tokens
from attnplug_engine.speculation.scheduler import lookahead_rows
from attnplug_sparse.hisparse import HotSizes, rows_and_entries

_CPU_CACHE_BYTES = 1 << 30
_GPU_CACHE_SHARE = 0.85
_MAX_EMPTY_PAGES = 1 << 21
_SLOTS_PER_REQUEST = 3
"""Default number of linear states per request: its own and two snapshots."""


def check_buffers(spec: ModelSpec, options: EngineOptions) -> None:
    """Raise if hot buffers cannot serve a model. Needs no memory, so it runs before weights are read."""
    nodes = 1 if options.speculation is None else options.speculation.nodes
    sizes = HotSizes(1, 1, 1, options.hisparse.buffer_size(spec, nodes), nodes)
    for group in filter(None, rows_and_entries(spec.layers, sizes)):
        group.sizes.check(group.layers)


def page_and_context(spec: ModelSpec, options: EngineOptions, selection: Selection) -> tuple[int, int]:
    """Return the page size, and the most tokens of a request."""
    assert selection.page_size is not None
    return selection.page_size, options.context_length or spec.context_length


def cache_budget(device: torch.device, share: float) -> int:
    """Return the bytes for caches: ``share`` of a GPU's free memory, and a fixed size on a CPU."""
    if (module := runtime_of(device).module) is None:
        return _CPU_CACHE_BYTES
    module.empty_cache()  # memory that torch caches counts as taken
    return int(module.mem_get_info(device)[0] * share)


def capacity(
    spec: ModelSpec,
    options: EngineOptions,
    selection: Selection,
    dtype: torch.dtype,
    kv_dtype: str,
    device: torch.device,
    draft: ModelSpec | None = None,
) -> Capacity:
    """Return the capacity of an engine: from its options, and otherwise from free memory.

    A ``draft`` has rows of its own on the same pages.
    """
    page_size, context = page_and_context(spec, options, selection)
    speculation = options.speculation
    nodes, lookahead = (1, 0) if speculation is None else (speculation.nodes, lookahead_rows(speculation))
    per_request = -(-(context + lookahead) // page_size)
    num_pages = options.num_pages
    state_slots = options.state_slots or 0
    if spec.linear_layers and not state_slots:
        state_slots = _SLOTS_PER_REQUEST * options.max_batch + 1 if options.prefix_cache else options.max_batch
    elif state_slots and not spec.linear_layers:
        raise UsageError(
            f"`state_slots` {state_slots} is given, but the model has no linear-attention layer; leave it out",
            settings=["state_slots"],
        )
    if not spec.full_layers:
        # A page takes no memory then, but a config may claim any context.
        num_pages = min(num_pages or per_request * options.max_batch, _MAX_EMPTY_PAGES)
    chunk = min(options.step_tokens(on_gpu=runtime_of(device).module is not None), context)
    if chunk == -1:
        chunk = unchunked_step_tokens(context, options.max_batch)
    room_for = Capacity(num_pages or 1, page_size, options.max_batch, chunk, context, state_slots, lookahead, nodes)
    if options.enable_hisparse:
        most = per_request * options.max_batch
        return _hot_capacity(spec, options, room_for, most, dtype, kv_dtype, device, draft)
    if num_pages is None:
        page = bytes_per_page(spec, page_size, kv_dtype, dtype, options.index_dtype, drafts=nodes - 1)
        if draft is not None:
            page += bytes_per_page(draft, page_size, kv_dtype, dtype, options.index_dtype, drafts=nodes - 1)
        room = cache_budget(device, _GPU_CACHE_SHARE)
        if runtime_of(device).module is not None:
            room -= state_slots * bytes_per_state(spec, dtype)
        num_pages = min(room // page, per_request * options.max_batch)
        if num_pages < 1:
            states = f" beside {state_slots} linear states: lower `state_slots`" if state_slots else ""
            raise PoolError(
                f"one page of {page_size} tokens takes {page} bytes, and there are {max(room, 0)}{states}; "
                "give a smaller `page_size`",
                settings=["state_slots", "page_size"] if state_slots else ["page_size"],
            )
    return replace(room_for, num_pages=num_pages)


def _hot_capacity(
    spec: ModelSpec,
    options: EngineOptions,
    capacity: Capacity,
    most_pages: int,
    dtype: torch.dtype,
    kv_dtype: str,
    device: torch.device,
    draft: ModelSpec | None,
) -> Capacity:
    """Return the capacity if latent rows are in host memory: pages are limited by host memory and by the device memory
    that each takes."""
    size, config = capacity.page_size, options.hisparse
    capacity = replace(capacity, num_pages=0, hot_buffer=config.buffer_size(spec, capacity.nodes))
    hot = HotBytes.of(spec, capacity, kv_dtype, dtype, options.index_dtype)
    on_host, fixed = hot.host_page, hot.fixed
    on_device = hot.device_page + (
        0
        if draft is None
        else bytes_per_page(draft, size, kv_dtype, dtype, options.index_dtype, drafts=capacity.nodes - 1)
    )
    num_pages, free = options.num_pages, available_memory()
    if num_pages is None:
        room = cache_budget(device, _GPU_CACHE_SHARE)
        host_budget = config.host_budget(spec.ranks)
        if runtime_of(device).module is None:
            host_budget = min(host_budget, free, _CPU_CACHE_BYTES)
        num_pages = min((room - fixed) // on_device, host_budget // on_host, most_pages)
        if num_pages < 1:
            raise PoolError(
                f"`enable_hisparse` takes {fixed / 2**20:.0f} MiB on the device for hot buffers of "
                f"{capacity.hot_buffer} rows of {capacity.max_batch} requests, and for each page of {size} tokens "
                f"{on_device / 2**20:.3g} MiB there and {on_host / 2**20:.3g} MiB on the host; there are "
                f"{room / 2**20:.0f} and {host_budget / 2**20:.0f} MiB; lower `max_batch`, or the device_buffer_size "
                "of `hisparse_config`, or raise its host_memory_gib",
                settings=["enable_hisparse", "max_batch", "hisparse_config"],
            )
    if num_pages * on_host > free:
        raise PoolError(
            f"{num_pages} pages of {size} tokens take {num_pages * on_host / 2**30:.2f} GiB of host memory, and "
            f"{free / 2**30:.2f} GiB are free; lower `num_pages`, or the host_memory_gib of `hisparse_config`",
            settings=["num_pages", "hisparse_config"],
        )
    return replace(capacity, num_pages=num_pages)
