"""Lengths and pages → groups of requests that dense torch operations can attend to together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnplug.geometry import Geometry

# A group is padded to its longest request: it may waste half of what it reads, but only while the whole read stays
# small; beyond that a group of its own is cheaper than the padding.
_SMALL_READ = 4096
_LARGEST_READ = 1 << 17


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Requests with equally many new tokens, attended to in one go.

    ``rows`` ``[requests * queries]`` says which rows of q are theirs (``None``: all of q's planned rows, in order);
    ``slots`` ``[requests, keys]`` where their cache rows lie, padded by repeating a request's own last row, so that
    padding never touches memory of others. ``offsets`` ``[requests]`` is the position of a request's first query.
    """

    rows: Tensor | None
    slots: Tensor
    offsets: Tensor
    queries: int
    keys: int
    smallest_offset: int
    largest_offset: int

    @property
    def requests(self) -> int:
        return self.slots.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class NativeMetadata:
    """Where new rows are written, and the groups that cover every request with new tokens exactly once."""

    new_slots: Tensor
    groups: tuple[Group, ...]


def plan_groups(geometry: Geometry) -> NativeMetadata:
    """Divide a batch into groups by query length, then by similar cache length."""
    members = _memberships(geometry.query_lens.tolist(), geometry.kv_lens.tolist())
    first_rows = geometry.query_lens.cumsum(0) - geometry.query_lens
    groups = tuple(_group(geometry, torch.tensor(requests), first_rows) for requests in members)
    if len(groups) == 1 and members[0] == sorted(members[0]):
        groups = (replace(groups[0], rows=None),)
    return NativeMetadata(geometry.new_slots(), groups)


def _memberships(query_lens: list[int], kv_lens: list[int]) -> list[list[int]]:
    """The request numbers of each group, longest cache first; a group of all keeps the batch's own order."""
    by_queries: dict[int, list[int]] = {}
    for request, queries in enumerate(query_lens):
        if queries:
            by_queries.setdefault(queries, []).append(request)
    groups: list[list[int]] = []
    for requests in by_queries.values():
        longest = max(kv_lens[request] for request in requests)
        if longest * len(requests) <= min(2 * sum(kv_lens[r] for r in requests), _LARGEST_READ):
            groups.append(requests)
            continue
        current: list[int] = []
        for request in sorted(requests, key=lambda r: -kv_lens[r]):
            longest = kv_lens[current[0]] if current else 0
            read = longest * (len(current) + 1)
            wasteful = 2 * kv_lens[request] < longest and longest > _SMALL_READ
            if current and (read > _LARGEST_READ or wasteful):
                groups.append(current)
                current = []
            current.append(request)
        groups.append(current)
    return groups


def _group(geometry: Geometry, requests: Tensor, first_rows: Tensor) -> Group:
    queries = int(geometry.query_lens[requests[0]])
    kv_lens = geometry.kv_lens[requests]
    offsets = kv_lens - queries
    keys = int(kv_lens.max())
    positions = torch.minimum(torch.arange(keys)[None, :], kv_lens[:, None] - 1)
    device = geometry.page_table.device
    return Group(
        rows=(first_rows[requests][:, None] + torch.arange(queries)[None, :]).flatten().to(device, non_blocking=True),
        slots=geometry.slots(requests[:, None], positions),
        offsets=offsets.to(device, non_blocking=True),
        queries=queries,
        keys=keys,
        smallest_offset=int(offsets.min()),
        largest_offset=int(offsets.max()),
    )
