"""What a backend is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from attnplug.declare.model import ModelSpec
from attnplug.declare.problem import DType, Role
from attnplug.kv import KVPools
from attnplug.kv.workspace import WorkspaceOwner


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step that will be asked for."""

    max_requests: int
    max_tokens: int
    max_context: int


@dataclass(frozen=True, slots=True)
class Parallel:
    """This process's place among the tensor-parallel ranks."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class Serving:
    """How this process serves, where a backend builds or does less for it (A3, A6)."""

    skip_prefill: bool = False
    """A speculative draft's worker: it decodes, and somebody else prefills."""
    disaggregation_mode: Literal["null", "prefill", "decode"] = "null"
    disable_chunked_prefix_cache: bool = False
    is_embedding: bool = False
    """Prompts are embedded and nothing is generated: no token is ever decoded."""
    chunked_prefill_size: int | None = None
    """The most tokens of a prompt in one step; -1 where prompts are never cut, ``None`` where nobody said."""
    disable_radix_cache: bool = False
    """No request begins with rows that another one left in the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class BackendContext:
    """Everything a backend is built from. It cannot be made before its parts, so the order of construction (pools,
    coordinators, backends) needs no discipline. ``page_size`` is the manager's; pools tell their layouts."""

    name: str
    roles: frozenset[Role]
    model: ModelSpec
    device: torch.device
    dtype: torch.dtype
    kv_dtype: DType
    page_size: int
    limits: Limits
    pools: KVPools
    workspace: WorkspaceOwner
    parallel: Parallel = Parallel()
    serving: Serving = Serving()
    coordinator: Any = None
    """What keeps part of the cache elsewhere (HiSparse); captured by a backend's constructor, or None (A10)."""
    options: Any = None
