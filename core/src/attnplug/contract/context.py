"""What a backend is built from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeVar

import torch

from attnplug.contract.coordinator import Coordinator
from attnplug.declare.capabilities import Capabilities
from attnplug.declare.errors import BackendError, PoolError
from attnplug.declare.model import ModelSpec
from attnplug.declare.problem import DType, Role
from attnplug.kv import KVPools
from attnplug.kv.workspace import WorkspaceOwner

Options = TypeVar("Options")


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step that will be asked for, and how many plans run at the same time."""

    max_requests: int
    max_tokens: int
    max_context: int
    lanes: int = 1
    """Batches come in lanes 0 … ``lanes - 1``. A backend has scratch and graph memory for each."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """This process's place among the tensor-parallel ranks."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class Serving:
    """How this process serves, where a backend builds or does less for it (A3, A6)."""

    skip_prefill: bool = False
    """This is a speculative draft's worker. It decodes; another backend prefills."""
    disaggregation_mode: Literal["null", "prefill", "decode"] = "null"
    disable_chunked_prefix_cache: bool = False
    is_embedding: bool = False
    """Prompts are embedded and nothing is generated: no token is ever decoded."""
    chunked_prefill_size: int | None = None
    """The most tokens of a prompt in one step; -1 if prompts are never cut, ``None`` if that is unknown."""
    disable_radix_cache: bool = False
    """No request begins with rows that another one left in the cache."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostContext:
    """What all backends of one model on one rank share.

    ``model`` is this rank's part: its heads are those that this rank computes, and its layers may be one KV group of
    the model. It cannot be made before its parts, so the order of construction (pools, coordinators, backends) needs no
    discipline. A host that binds its caches late builds late, and builds again if their addresses change.
    """

    model: ModelSpec
    device: torch.device
    dtype: torch.dtype
    kv_dtype: DType
    page_size: int
    """The manager's; pools tell their layouts."""
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
                    f"{pool.page_size} in {pool.dtype}; make both alike"
                )
        # With a coordinator, pages of the MLA pool are not those of the page table.
        mla = self.pools.mla if self.coordinator is None else None
        for key, cache in self.pools.caches.items():
            if mla is not None and (cache.page_size, cache.num_pages) != (mla.page_size, mla.num_pages):
                raise PoolError(
                    f"the {key.name} have {cache.num_pages} pages of {cache.page_size}, and the latent rows "
                    f"{mla.num_pages} of {mla.page_size}; one page table leads to both, so make them alike"
                )

    def for_backend(
        self, name: str, declared: Capabilities, *, roles: frozenset[Role] = frozenset(), options: object = None
    ) -> BackendContext:
        """The context of one backend: what all share, and what is its own."""
        shared = {field.name: getattr(self, field.name) for field in fields(HostContext)}
        return BackendContext(**shared, name=name, declared=declared, roles=roles, options=options)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BackendContext(HostContext):
    """Everything that one backend is built from, and nothing else: no globals, no lazy attributes."""

    name: str
    """The name by which it was asked for. Its ``backend_id`` has the same."""
    declared: Capabilities
    """What its spec declares. Its own claims are not wider."""
    roles: frozenset[Role]
    options: object
    """The value of its own options, parsed; ``None`` where it has none. ``options_of`` gives it with its type."""

    def options_of(self, kind: type[Options]) -> Options:
        """The options as the dataclass that the spec names; the defaults of that where none were given."""
        if self.options is None:
            return kind()
        if not isinstance(self.options, kind):
            raise BackendError(f"backend {self.name} was given {self.options!r} as its options, not {kind.__name__}")
        return self.options
