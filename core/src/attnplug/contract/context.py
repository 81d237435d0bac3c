"""Context from which backends are built, and the protocol of coordinators."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from attnplug.contract.geometry import Geometry
from attnplug.contract.inputs import SelectedPositions, SelectedSlots
from attnplug.declare.capabilities import Capabilities
from attnplug.declare.errors import BackendError, PoolError
from attnplug.declare.model import ModelSpec
from attnplug.declare.problem import Role
from attnplug.kv.pools import KVPools
from attnplug.kv.workspace import WorkspaceOwner


@runtime_checkable
class Coordinator(Protocol):
    """Keeps latent rows outside the pools, e.g. in host memory, and loads those that attention reads (A10).

    It is built after the pools and before the backends, which capture it in their constructors.
    """

    @property
    def name(self) -> str:
        """Name in ``Capabilities.coordinators``, messages and reports."""

    @property
    def device_nbytes(self) -> int:
        """Bytes held on the device, not counting the pools."""

    @property
    def host_nbytes(self) -> int:
        """Bytes held in host memory."""

    def load_selected(
        self, layer_id: int, rows: Tensor, new_slots: Tensor, selected: SelectedPositions, geometry: Geometry
    ) -> SelectedSlots:
        """Write a layer's new rows, and load the selected rows into the MLA pool.

        ``rows`` ``[tokens, row_dim]`` or ``[tokens, 1, row_dim]`` are the new rows of the batch with this geometry, and
        ``new_slots`` ``[tokens]`` their slots by the page table, -1 for padding. Returns the pool's slots ``[tokens,
        width]`` of the selected rows, -1 where ``selected`` has -1. They are valid until the next call. Does not
        synchronise with the host and can be captured in a CUDA graph.
        """

    def load_entries(
        self, layer_id: int, entries: Tensor, new_slots: Tensor, selected: SelectedPositions, geometry: Geometry
    ) -> SelectedSlots:
        """Write the entries that a compressed layer's new tokens complete, and load the selected ones.

        Like ``load_selected``, into the pool of entries. ``entries`` ``[tokens, dim]`` has each entry in the row of its
        last token, ``new_slots`` ``[tokens]`` are slots of entries by the page table, -1 for tokens that complete none.
        """

    def release(self, row: int) -> None:
        """Free everything kept for the request in this row of the slot table, which has finished or was aborted.

        Allowed in every state of a request. Waits for copies of its rows in flight. Does nothing if nothing is kept.
        """


Options = TypeVar("Options")


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest step, and number of plans that run at the same time: ``Limits(256, 8192, 32768, lanes=2)``."""

    max_requests: int
    max_tokens: int
    max_context: int
    lanes: int = 1
    """Batches come in lanes 0 … ``lanes - 1``. A backend has scratch and graph memory for each."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """Tensor-parallel rank of this process, and number of ranks: ``Parallel(rank=1, size=8)``."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class Serving:
    """Serving mode of this process, e.g. ``Serving(is_embedding=True)``. A backend may build or do less (A3, A6)."""

    skip_prefill: bool = False
    """True in the worker of a speculative draft: this backend decodes, and another one prefills."""
    disaggregation_mode: Literal["null", "prefill", "decode"] = "null"
    disable_chunked_prefix_cache: bool = False
    is_embedding: bool = False
    """True if prompts are embedded and no token is ever decoded."""
    chunked_prefill_size: int | None = None
    """Maximum tokens of a prompt per step; -1 if prompts are never chunked, ``None`` if unknown."""
    disable_radix_cache: bool = False
    """True if no request starts with cache rows of another request."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostContext:
    """Context that all backends of one model on one rank share: ``build_selection(selection, HostContext(...))``.

    ``model`` is this rank's part: its heads are those that this rank computes, and its layers may be one KV group of
    the model. A context cannot be made before its parts, which guarantees the order of construction (pools,
    coordinators, backends). A host that binds its caches late builds backends late, and again if addresses change.
    """

    model: ModelSpec
    device: torch.device
    dtype: torch.dtype
    kv_dtype: str
    """Name of the KV cache's format."""
    page_size: int
    """Tokens per page of the host's page table. Pools describe their memory layouts."""
    limits: Limits
    pools: KVPools
    workspace: WorkspaceOwner
    parallel: Parallel = Parallel()
    serving: Serving = Serving()
    coordinator: Coordinator | None = None
    """Keeps part of the cache outside the pools. Backends capture it in their constructors (A10)."""

    def __post_init__(self) -> None:
        for pool in (self.pools.mha, self.pools.mla):
            if pool is not None and (pool.page_size, pool.dtype) != (self.page_size, self.kv_dtype):
                raise PoolError(
                    f"the context has pages of {self.page_size} in {self.kv_dtype}, but a pool has pages of "
                    f"{pool.page_size} in {pool.dtype}; use the same for both"
                )
        # With a coordinator, pages of the MLA pool are not those of the page table.
        mla = self.pools.mla if self.coordinator is None else None
        for key, cache in self.pools.caches.items():
            if mla is not None and (cache.page_size, cache.num_pages) != (mla.page_size, mla.num_pages):
                raise PoolError(
                    f"the {key.name} have {cache.num_pages} pages of {cache.page_size}, and the latent rows "
                    f"{mla.num_pages} of {mla.page_size}; one page table addresses both, so use the same for both"
                )

    def for_backend(
        self,
        name: str,
        declared: Capabilities,
        *,
        roles: frozenset[Role] = frozenset(),
        options: object = None,
        invariant: frozenset[str] = frozenset(),
    ) -> BackendContext:
        """Return the context of one backend: the shared part and the backend's own fields."""
        shared = {field.name: getattr(self, field.name) for field in fields(HostContext)}
        return BackendContext(**shared, name=name, declared=declared, roles=roles, options=options, invariant=invariant)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BackendContext(HostContext):
    """Everything that one backend is built from: ``MyBackend(context)``. No globals, no lazy attributes."""

    name: str
    """Name by which the backend was requested. Its ``backend_id`` has the same name."""
    declared: Capabilities
    """Capabilities that its spec declares. The claims of the backend may not be wider."""
    roles: frozenset[Role]
    options: object
    """Parsed options of the backend, ``None`` if it has none. ``options_of`` returns them with their type."""
    invariant: frozenset[str] = frozenset()
    """Requested levels of ``INVARIANCE``. The backend keeps those that it claims, and may run faster without them."""

    def options_of(self, kind: type[Options]) -> Options:
        """Return the options as the dataclass that the spec names, or its defaults if none were given."""
        if self.options is None:
            return kind()
        if not isinstance(self.options, kind):
            raise BackendError(f"backend {self.name} was given {self.options!r} as its options, not {kind.__name__}")
        return self.options
