"""Capacity of an engine: pages, slots and step sizes, from its options and free memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from attnplug import ModelSpec, PoolError, Setting, UsageError
from attnplug.host import Selection
from attnplug.machine.runtime import runtime_of
from attnplug_engine.memory.capacity import Capacity, HotBytes, bytes_per_page, bytes_per_state
from attnplug_engine.models.host_memory import available_memory
from attnplug_engine.options import EngineOptions
from attnplug_engine.parallel.collectives import allowed_ranks
from attnplug_engine.scheduling.scheduler import unchunked_step_tokens
from attnplug_engine.settings.capture_sizes import default_prefill_sizes, default_sizes
from attnplug_engine.speculation.scheduler import lookahead_rows
from attnplug_sparse.hisparse import HotSizes, rows_and_entries

_CPU_CACHE_BYTES = 1 << 30
_GPU_CACHE_SHARE = 0.85
_MAX_EMPTY_PAGES = 1 << 21
_GRAPH_LAYER_BYTES = 1 << 19
"""Memory of one layer in one CUDA graph. With 33 graphs of 16 layers, engines of 1.1B parameters took 474 to 728 MiB on
an H200, of which about half are activations and logits."""
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


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process may still allocate on a device."""
    if (module := runtime_of(device).module) is None:
        return available_memory()
    module.empty_cache()  # memory that torch caches counts as taken
    return int(module.mem_get_info(device)[0])


def cache_budget(device: torch.device, share: float, reserved: int = 0) -> int:
    """Return the bytes for caches: ``share`` of a GPU's free memory without ``reserved``, and a fixed size on a CPU."""
    if runtime_of(device).module is None:
        return _CPU_CACHE_BYTES
    return int((free_memory(device) - reserved) * share)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Estimated bytes of an engine on its device, of one rank, before weights are read.

    ``weights`` includes a draft's. ``caches`` has ``pages`` pages and the linear states. ``graphs`` includes the
    activations of the largest step that is captured. ``host`` is host memory for rows that are not on the device
    (HiSparse).
    """

    device: str
    free: int
    weights: int
    caches: int
    pages: int
    page_size: int
    graphs: int
    host: int = 0

    def __str__(self) -> str:
        caches = f"caches {_size(self.caches)} ({self.pages} pages of {self.page_size} tokens)"
        host = f" and {_size(self.host)} of host memory" if self.host else ""
        graphs = f", CUDA graphs about {_size(self.graphs)}" if self.graphs else ""
        return f"weights {_size(self.weights)}, {caches}{host}{graphs}; {self.device} has {_size(self.free)} free"


def plan_memory(
    spec: ModelSpec,
    config: Mapping[str, object],
    options: EngineOptions,
    selection: Selection,
    dtype: torch.dtype,
    kv_dtype: str,
    device: torch.device,
    weights: int,
    draft: ModelSpec | None = None,
    *,
    rank_counts: Callable[[], Sequence[int]],
) -> MemoryPlan:
    """Estimate the memory of an engine for a rank's ``spec`` and ``weights`` bytes, a draft's included.

    ``rank_counts`` are the numbers of ranks that can divide the model and its draft. Raises PoolError if it cannot fit.
    """
    free, one_memory = free_memory(device), runtime_of(device).module is None
    if one_memory:  # of all ranks, and of host and device
        free //= spec.ranks
    if weights > free:
        advice = "use a checkpoint in fewer bits"
        enough = [] if one_memory else [count for count in rank_counts() if count * free >= weights * spec.ranks]
        if enough:
            advice = f"{allowed_ranks(enough)}, or {advice}"
        each = f" for each of {spec.ranks} ranks" if one_memory and spec.ranks > 1 else ""
        raise PoolError(
            f"the weights take {_size(weights)} on {device.type}, and {_size(free)} are free{each}; {advice}",
            settings=[Setting.TENSOR_PARALLEL] if enough else [],
        )
    planned = capacity(spec, options, selection, dtype, kv_dtype, device, draft, reserved=weights)
    drafts, host = planned.nodes - 1, 0
    caches = planned.state_slots * bytes_per_state(spec, dtype)
    if planned.hot_buffer:
        hot = HotBytes.of(spec, planned, kv_dtype, dtype, options.index_dtype)
        page, host = hot.device_page, hot.host_page * planned.num_pages
        caches += hot.fixed
    else:
        page = bytes_per_page(spec, planned.page_size, kv_dtype, dtype, options.index_dtype, drafts=drafts)
    if draft is not None:
        page += bytes_per_page(draft, planned.page_size, kv_dtype, dtype, options.index_dtype, drafts=drafts)
    caches += planned.num_pages * page
    graphs = 0
    if runtime_of(device).graph is not None and options.captures:
        graphs = _graph_bytes(config, len(spec.layers), options, planned, dtype)
    shared = host if one_memory else 0
    if weights + caches + shared > free:
        slots = planned.state_slots
        states, taken = f" and {slots} linear states" if slots else "", _size(caches + shared)
        raise PoolError(
            f"caches of {planned.num_pages} pages of {planned.page_size} tokens{states} take {taken} beside "
            f"weights of {_size(weights)}, and {_size(free)} are free on {device.type}; lower `num_pages`"
            + (", `state_slots` or `max_batch`" if slots else ""),
            settings=["num_pages", "state_slots", "max_batch"] if slots else ["num_pages"],
        )
    return MemoryPlan(device.type, free, weights, caches, planned.num_pages, planned.page_size, graphs, host)


def _graph_bytes(
    config: Mapping[str, object], layers: int, options: EngineOptions, planned: Capacity, dtype: torch.dtype
) -> int:
    """Estimate the memory of CUDA graphs: activations of the largest step, logits, and the graphs themselves."""
    batches = options.cuda_graph_batch_sizes or default_sizes(planned.max_batch)
    prefills: Sequence[int] = ()
    if options.captures_prefills:
        prefills = options.cuda_graph_prefill_sizes or default_prefill_sizes(planned.max_step_tokens)
    hidden, inner, vocab = (_int_or_zero(config.get(key)) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    activations = max((*batches, *prefills)) * (6 * hidden + 2 * inner) * dtype.itemsize
    logits = max(batches) * vocab * 3 * torch.float32.itemsize
    return activations + logits + (len(batches) + len(prefills)) * layers * _GRAPH_LAYER_BYTES


def _int_or_zero(value: object) -> int:
    return value if isinstance(value, int) else 0


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 28 else f"{nbytes / 2**20:.1f} MiB"


def capacity(
    spec: ModelSpec,
    options: EngineOptions,
    selection: Selection,
    dtype: torch.dtype,
    kv_dtype: str,
    device: torch.device,
    draft: ModelSpec | None = None,
    *,
    reserved: int = 0,
) -> Capacity:
    """Return the capacity of an engine: from its options, and otherwise from free memory.

    A ``draft`` has rows of its own on the same pages. ``reserved`` bytes will be allocated before caches.
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
        return _hot_capacity(spec, options, room_for, most, dtype, kv_dtype, device, draft, reserved)
    if num_pages is None:
        page = bytes_per_page(spec, page_size, kv_dtype, dtype, options.index_dtype, drafts=nodes - 1)
        if draft is not None:
            page += bytes_per_page(draft, page_size, kv_dtype, dtype, options.index_dtype, drafts=nodes - 1)
        room = cache_budget(device, _GPU_CACHE_SHARE, reserved)
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
    reserved: int,
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
    is_cpu = runtime_of(device).module is None  # then host and device are the same memory
    num_pages, free = options.num_pages, available_memory() - (reserved if is_cpu else 0)
    if num_pages is None:
        room = cache_budget(device, _GPU_CACHE_SHARE, reserved)
        host_budget = config.host_budget(free, spec.ranks)
        if is_cpu:
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
