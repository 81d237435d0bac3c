"""Engine settings, and the capacity that follows from them and from free memory."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attnplug import DType, GraphLevel, ModelSpec, PoolError, Role, UsageError
from attnplug.hf.config_keys import show
from attnplug.host import ExtendPolicy, Selection
from attnplug_engine.graphs.capture_sizes import BATCH_SIZES, PREFILL_SIZES, SizeOption
from attnplug_engine.memory.capacity import Capacity, HotBytes, bytes_per_page, bytes_per_state
from attnplug_engine.memory.hisparse import HiSparseConfig
from attnplug_engine.models.host_memory import available_memory
from attnplug_engine.request import LARGEST_SEED
from attnplug_engine.scheduling.scheduler import unchunked_step_tokens
from attnplug_engine.speculation.options import Speculation, read_speculation
from attnplug_engine.speculation.scheduler import lookahead_rows
from attnplug_sparse.hisparse import HotSizes, rows_and_entries

LARGEST_BATCH = 1 << 16
LARGEST_COUNT = 1 << 40  # of pages, slots or tokens; torch's sizes do not overflow

_CPU_CACHE_BYTES = 1 << 30
_GPU_CACHE_SHARE = 0.85
_MAX_EMPTY_PAGES = 1 << 21
_SLOTS_PER_REQUEST = 3
"""Default number of linear states per request: its own and two snapshots."""


_SWITCHES = (
    "disable_cuda_graph",
    "disable_prefill_cuda_graph",
    "two_batch_overlap",
    "plan_stream",
    "enable_hisparse",
)
_WITHOUT_PREFILLS = (
    ("disable_prefill_cuda_graph", "leave out one of them"),
    ("speculative_algorithm", "prefills that a draft follows are not captured: leave out one of them"),
    ("enable_hisparse", "prefills that bring rows to host memory are not captured: leave out one of them"),
)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of an engine. None means: chosen automatically."""

    attention_backend: str = "auto"
    role_backends: Mapping[Role, str] = field(default_factory=dict)
    backend_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    device: str | None = None
    dtype: DType | None = None
    kv_dtype: DType | None = None
    index_dtype: DType | None = None
    """Element type of a sparse model's index keys. None: the model's own."""
    page_size: int | None = None
    num_pages: int | None = None
    max_batch: int = 32
    chunked_prefill_size: int = 2048
    """Most tokens of one step; -1 for prompts that are not chunked."""
    prefix_cache: bool = True
    state_slots: int | None = None
    """Slots for the states of linear layers: those of running requests and of snapshots."""
    state_checkpoint: int = 1024
    """Tokens between two snapshots of linear states, rounded up to whole pages."""
    context_length: int | None = None
    extend_policy: ExtendPolicy = field(default_factory=ExtendPolicy)
    seed: int = 0
    random_weights: bool = False
    """Read only a checkpoint's config, and draw the weights from ``seed`` on the device: for speed measurements."""
    ignore_eos: bool = False
    """Continue beyond the checkpoint's end-of-text tokens."""
    check_layers: bool = False
    overlap: bool | None = None
    """Schedule and launch a step while the previous one runs. None: on a GPU; on a CPU it only wastes rows."""
    two_batch_overlap: bool = False
    """Run steps as two halves, on two streams on a GPU. Steps of few tokens and replayed decode steps are not split
    there."""
    cuda_graph_batch_sizes: tuple[int, ...] | None = None
    """Numbers of requests for which decode steps are captured. None: several up to ``max_batch``, if the backends can
    be captured. If given, backends that cannot be captured are refused."""
    cuda_graph_prefill_sizes: tuple[int, ...] | None = None
    """Numbers of tokens up to which steps with prefill are captured. None: several up to 2048, if the backends can
    capture any batch, and only where the GPU runs them faster than the host launches them. If given, backends that
    cannot capture them are refused."""
    disable_cuda_graph: bool = False
    disable_prefill_cuda_graph: bool = False
    enable_hisparse: bool = False
    """Keep latent rows in host memory, and on the device those that sparse layers select."""
    hisparse_config: str | Mapping[str, Any] | None = None
    """Settings of HiSparse: JSON text or a mapping with the keys of ``HiSparseConfig``."""
    speculative_algorithm: str | None = None
    """Speculation algorithm: ``mtp``, ``eagle``, ``eagle3``, ``standalone`` or ``ngram``. None: no speculation."""
    speculative_draft_model: str | os.PathLike[str] | None = None
    """The draft's checkpoint, if the algorithm has one."""
    speculative_num_steps: int | None = None
    """Depth of a draft in tokens."""
    speculative_topk: int | None = None
    """Branches of a draft; more than 1 make it a tree."""
    speculative_num_draft_tokens: int | None = None
    """Rows of a request that the target verifies at once, the newest token's included."""
    plan_stream: bool = False
    """Plan the next part of a round on a side stream, in rounds that are not replayed."""

    def __post_init__(self) -> None:
        for name in ("dtype", "kv_dtype", "index_dtype"):
            value = getattr(self, name)
            if isinstance(value, torch.dtype):
                value = str(value).removeprefix("torch.")
            if isinstance(value, str):  # "bf16" stands for the member
                object.__setattr__(self, name, DType.parse(value, name))
        self._check_whole("max_batch", 1, LARGEST_BATCH)
        for name in ("num_pages", "context_length", "state_slots", "state_checkpoint"):
            if getattr(self, name) is not None:
                self._check_whole(name, 1, LARGEST_COUNT)
        self._check_whole("seed", 0, LARGEST_SEED)
        _ = self.speculation  # raises if a setting is wrong
        for name in _SWITCHES:
            if not isinstance(value := getattr(self, name), bool):
                raise UsageError(f"`{name}` {show(value)} is not allowed; give True or False", settings=[name])
        if self.plan_stream and self.speculative_algorithm is None:
            raise UsageError(
                "`plan_stream` plans rounds ahead, and there are none without `speculative_algorithm`; leave it out",
                settings=["plan_stream", "speculative_algorithm"],
            )
        self._check_hisparse()
        if self.overlap is not None and not isinstance(self.overlap, bool):
            raise UsageError(
                f"`overlap` {show(self.overlap)} is not allowed; give True, False, or None to choose by the device",
                settings=["overlap"],
            )
        if self.chunked_prefill_size != -1:
            self._check_whole("chunked_prefill_size", 1, LARGEST_COUNT, ", or -1 for prompts that are not chunked")
        chunk = LARGEST_COUNT if self.chunked_prefill_size == -1 else self.chunked_prefill_size
        self._check_graphs(BATCH_SIZES, self.max_batch, ())
        self._check_graphs(PREFILL_SIZES, max(chunk, self.max_batch), _WITHOUT_PREFILLS)

    def _check_hisparse(self) -> None:
        _ = self.hisparse  # raises if a setting is wrong
        if self.hisparse_config is not None and not self.enable_hisparse:
            raise UsageError(
                "`hisparse_config` is given, and HiSparse is off; leave it out, or give `enable_hisparse`",
                settings=["hisparse_config", "enable_hisparse"],
            )
        if self.enable_hisparse and self.two_batch_overlap:
            raise UsageError(
                "`enable_hisparse` keeps the rows of one running layer on the device, and "
                "`two_batch_overlap` runs two; leave out one of them",
                settings=["enable_hisparse", "two_batch_overlap"],
            )

    def _check_graphs(self, option: SizeOption, most: int, without: Collection[tuple[str, str]]) -> None:
        """Check requested capture sizes, if any. ``without`` are settings that exclude them, with the remedy."""
        if (sizes := getattr(self, option.name)) is None:
            return
        object.__setattr__(self, option.name, option.check(sizes, most))
        for name, remedy in (
            ("disable_cuda_graph", "leave out one of them"),
            ("check_layers", "a graph stops at no layer: leave out one of them"),
            *without,
        ):
            if getattr(self, name):
                raise UsageError(
                    f"`{option.name}` demands CUDA graphs, and `{name}` is given; {remedy}",
                    settings=[option.name, name],
                )

    @property
    def speculation(self) -> Speculation | None:
        """Settings of speculation; None if it is off. Raises UsageError."""
        return read_speculation(
            self.speculative_algorithm,
            self.speculative_draft_model,
            self.speculative_num_steps,
            self.speculative_topk,
            self.speculative_num_draft_tokens,
        )

    @property
    def hisparse(self) -> HiSparseConfig:
        """Settings of HiSparse. Raises UsageError."""
        return HiSparseConfig.read(self.hisparse_config)

    @property
    def captures(self) -> bool:
        """True if graphs are captured where that is possible."""
        return not self.disable_cuda_graph and not self.check_layers

    @property
    def captures_prefills(self) -> bool:
        """True if prefills are captured where that is possible."""
        without = self.disable_prefill_cuda_graph or self.enable_hisparse or self.speculative_algorithm is not None
        return self.captures and not without

    @property
    def demanded_graphs(self) -> GraphLevel:
        """Level that all backends must be able to capture. Captured prefills need only one backend."""
        given = self.cuda_graph_batch_sizes is not None or self.cuda_graph_prefill_sizes is not None
        return GraphLevel.DECODE if given else GraphLevel.NEVER

    def _check_whole(self, name: str, lowest: int, highest: int, or_else: str = "") -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
            raise UsageError(
                f"`{name}` {show(value)} is not allowed; give a number from {lowest} to {highest}{or_else}",
                settings=[name],
            )


def check_buffers(spec: ModelSpec, options: EngineOptions) -> None:
    """Raise if hot buffers cannot serve a model. Needs no memory, so it runs before weights are read."""
    nodes = 1 if options.speculation is None else options.speculation.nodes
    sizes = HotSizes(1, 1, 1, options.hisparse.buffer_size(spec, nodes), nodes)
    for group in filter(None, rows_and_entries(spec.layers, sizes)):
        group.sizes.check(group.layers)


def page_and_context(spec: ModelSpec, options: EngineOptions, selection: Selection) -> tuple[int, int]:
    """Return the page size, and the most tokens of a request."""
    assert selection.page_size is not None
    return selection.page_size, min(options.context_length or spec.context_length, spec.context_length)


def cache_budget(device: torch.device, share: float) -> int:
    """Return the bytes for caches: ``share`` of a GPU's free memory, and a fixed size on a CPU."""
    if device.type != "cuda":
        return _CPU_CACHE_BYTES
    torch.cuda.empty_cache()  # memory that torch caches counts as taken
    return int(torch.cuda.mem_get_info(device)[0] * share)


def capacity(
    spec: ModelSpec,
    options: EngineOptions,
    selection: Selection,
    dtype: torch.dtype,
    kv_dtype: DType,
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
    if options.chunked_prefill_size == -1:
        chunk = unchunked_step_tokens(context, options.max_batch)
    else:
        chunk = min(options.chunked_prefill_size, context)
    room_for = Capacity(num_pages or 1, page_size, options.max_batch, chunk, context, state_slots, lookahead, nodes)
    if options.enable_hisparse:
        most = per_request * options.max_batch
        return _hot_capacity(spec, options, room_for, most, dtype, kv_dtype, device, draft)
    if num_pages is None:
        page = bytes_per_page(spec, page_size, kv_dtype, dtype, options.index_dtype, drafts=nodes - 1)
        if draft is not None:
            page += bytes_per_page(draft, page_size, kv_dtype, dtype, options.index_dtype, drafts=nodes - 1)
        room = cache_budget(device, _GPU_CACHE_SHARE)
        if device.type == "cuda":
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
    kv_dtype: DType,
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
        if device.type != "cuda":
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
