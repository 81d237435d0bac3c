"""Pages of the bridge, and the attention over them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from attnplug import (
    CacheLayout,
    DType,
    ForwardBatch,
    Geometry,
    LayerSpec,
    MHAPool,
    ModelSpec,
    Problem,
    Setting,
    UsageError,
)
from attnplug.host import (
    AttnplugError,
    BackendRequest,
    HostContext,
    KVPools,
    Limits,
    ModelAttention,
    Selection,
    WorkspaceOwner,
    build_chosen,
    build_selection,
    default_ranking,
    load_registry,
)
from attnplug_transformers.errors import BridgeError
from attnplug_transformers_host import HOST

Built = TypeVar("Built")


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """KV memory for a number of requests, and the attention over it. ``table`` ``[requests, pages]`` int32 gives each
    request its own consecutive pages."""

    attention: ModelAttention
    pool: MHAPool
    layers: Mapping[int, LayerSpec]
    table: Tensor
    limits: Limits

    @classmethod
    @torch.inference_mode(False)  # inference tensors could not be written outside of inference mode
    def make(cls, request: BackendRequest, layers: Mapping[int, LayerSpec], like: Tensor, limits: Limits) -> Pages:
        """Allocate pages for layers, with the device and dtype of ``like``, for steps of up to ``limits``."""
        model = ModelSpec("transformers", "transformers", tuple(layers.values()), limits.max_context)
        problem = problem_of(model, like.device, like.dtype, None, CacheLayout.TOKEN_MAJOR)

        def build(selection: Selection) -> Pages:
            size = selection.page_size
            assert size is not None and problem.kv_dtype is not None
            per_request = -(-limits.max_context // size)
            count = limits.max_requests * per_request
            pool = MHAPool(model.layers, num_pages=count, page_size=size, dtype=problem.kv_dtype, device=like.device)
            attention = attention_over(selection, model, pool, like.device, like.dtype, limits)
            table = torch.arange(count, dtype=torch.int32, device=like.device).view(limits.max_requests, per_request)
            return cls(attention, pool, layers, table, limits)

        return choose_and_build(request, problem, build)

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def page_size(self) -> int:
        return self.pool.page_size

    def planned(self, geometry: Geometry) -> ForwardBatch:
        """Plan a batch over these pages."""
        return planned(self.attention, geometry)

    def rows(self) -> Iterator[Tensor]:
        """Keys and values of every layer, as ``[requests, rows, kv_heads, dim]``."""
        for index in self.layers:
            for pages in (self.pool.keys(index), self.pool.values(index)):
                yield pages.unflatten(0, self.table.shape).flatten(1, 2)


def planned(attention: ModelAttention, geometry: Geometry) -> ForwardBatch:
    """Plan a batch. Synchronizes with the device only for backends that need exact lengths on the host."""
    if attention.backend.claims.needs_cpu_seq_lens:
        geometry = geometry.with_host_lengths()
    batch = ForwardBatch(geometry)
    attention.plan(batch)
    return batch


def choose(request: BackendRequest, problem: Problem, *, plans_in_graphs: bool = False) -> Selection:
    """Select the backends. Raises :class:`BridgeError` with every refusal if none can serve the problem.

    ``plans_in_graphs``: CUDA graphs capture steps together with their plans, from lengths on the device.
    """
    return choose_and_build(request, problem, lambda selection: selection, plans_in_graphs=plans_in_graphs)


def choose_and_build(
    request: BackendRequest, problem: Problem, build: Callable[[Selection], Built], *, plans_in_graphs: bool = False
) -> Built:
    """Select as ``choose`` does, and build. ``auto`` continues without a backend that cannot be built, and warns."""
    try:
        refusals = HOST.refuse(problem)
        if refusals:
            raise BridgeError("; ".join(refusal.format(HOST.render) for refusal in refusals))
        registry, fitted = load_registry(), HOST.fit(problem)
        if plans_in_graphs:
            fitted = replace(fitted, wants_graphs=True, exact_lengths=False)
        return build_chosen(registry, request, fitted, build, ranking=default_ranking(registry, fitted))[1]
    except AttnplugError as error:
        raise BridgeError(error.format(HOST.render)) from None


def problem_of(
    model: ModelSpec, device: torch.device, dtype: torch.dtype, page_size: int | None, layout: CacheLayout
) -> Problem:
    """Problem of a model on a device."""
    sm = None
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        sm = 10 * major + minor
    try:
        element = DType.parse(str(dtype), Setting.DTYPE)
    except UsageError as error:
        raise BridgeError(error.format(HOST.render)) from None
    return Problem(
        model, device=device.type, sm=sm, dtype=element, kv_dtype=element, page_size=page_size, layout=layout
    )


def attention_over(
    selection: Selection, model: ModelSpec, pool: MHAPool, device: torch.device, dtype: torch.dtype, limits: Limits
) -> ModelAttention:
    """Build the selected backends over a pool."""
    pools = KVPools(mha=pool)
    context = HostContext(
        model=model,
        device=device,
        dtype=dtype,
        kv_dtype=pool.dtype,
        page_size=pool.page_size,
        limits=limits,
        pools=pools,
        workspace=WorkspaceOwner(),
    )
    return ModelAttention(build_selection(selection, context), pools)


class PageStore(threading.local):
    """Pages of one thread, by layer shape, device and dtype. Layers of one shape share them, as they run in sequence.

    A batch that exceeds them gets new ones of at least twice the size.
    """

    def __init__(self, request: BackendRequest) -> None:
        self._request = request
        self._pages: dict[tuple[LayerSpec, torch.device, torch.dtype], Pages] = {}

    def pages(self, layer: LayerSpec, like: Tensor, limits: Limits) -> Pages:
        """Pages for a layer, with the device and dtype of ``like``, for steps of up to ``limits``."""
        key = layer, like.device, like.dtype
        pages = self._pages.get(key)
        if pages is None or not fits(limits, pages.limits):
            limits = grown_limits(limits, None if pages is None else pages.limits)
            pages = self._pages[key] = Pages.make(self._request, {layer.layer_id: layer}, like, limits)
        return pages


def fits(needed: Limits, limits: Limits) -> bool:
    """Return True if ``needed`` does not exceed ``limits``."""
    return (
        needed.max_requests <= limits.max_requests
        and needed.max_tokens <= limits.max_tokens
        and needed.max_context <= limits.max_context
    )


def grown_limits(needed: Limits, current: Limits | None) -> Limits:
    """Round limits up to powers of two, so that a cache that grows by one token per step is seldom rebuilt."""
    current = current or Limits(1, 1, 1)
    return Limits(
        max_requests=power_of_two(max(needed.max_requests, current.max_requests)),
        max_tokens=power_of_two(max(needed.max_tokens, current.max_tokens)),
        max_context=power_of_two(max(needed.max_context, current.max_context, 256)),
    )


def power_of_two(number: int) -> int:
    """Smallest power of two that is not below ``number``."""
    return 1 << max(number - 1, 0).bit_length()
