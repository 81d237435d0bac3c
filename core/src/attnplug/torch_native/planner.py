"""Planner: lengths and pages → groups of requests that run as one dense torch operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from attnplug.contract.geometry import Geometry
from attnplug.declare.problem import ForwardMode
from attnplug.machine.hardware import IS_ARM
from attnplug.machine.runtime import to_device

# A group is padded to its longest request. Up to this many rows per request, padding costs less than another group.
_SMALL_READ = 4096
# Maximum rows of a group, whose keys and values are gathered before attention.
_LARGEST_READ = 1 << 17
# Maximum rows of a decode group on a CPU, unless it is one request: larger copies exceed the CPU caches and are
# allocated anew from the system each time. On Arm torch's allocator keeps the memory.
_CACHED_READ = 1 << (13 if IS_ARM else 12)


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """Visibility of keys in a group of requests with equally many queries: keys up to a query's own position.

    ``offsets`` ``[requests]`` on the device is the position of each request's first query. ``bias`` ``[requests, 1, 1,
    keys]`` float32, 0 or -inf, is the mask of decode groups of different lengths on a CPU, made once for all layers.
    ``tree`` ``[requests, queries]`` int64 is a bit mask of the new keys that each query sees (``Geometry.tree``);
    ``None``: all up to its own position.
    """

    offsets: Tensor
    queries: int
    keys: int
    smallest_offset: int
    largest_offset: int
    bias: Tensor | None = None
    tree: Tensor | None = None

    @classmethod
    def of(
        cls, queries: int, offsets: Sequence[int], keys: int, device: torch.device, tree: Tensor | None = None
    ) -> Extent:
        return cls(to_device(offsets, device), queries, keys, min(offsets), max(offsets), tree=tree)

    @property
    def requests(self) -> int:
        return self.offsets.shape[0]

    @property
    def shared_mask(self) -> bool:
        """True if ``bias`` is the whole mask: one query per request, which sees every key if there is no bias."""
        return self.queries == 1 and (self.bias is not None or self.smallest_offset == self.largest_offset)

    @property
    def plain(self) -> bool:
        """True if query i sees keys 0 … i of its request: a prefill without prefix."""
        return self.largest_offset == 0 and self.queries == self.keys


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Requests with equally many new tokens that run as one operation.

    ``rows`` ``[requests * queries]`` are the indices of their rows in q (a slice if contiguous; ``None``: all planned
    rows, in order). ``slots`` ``[requests, keys]`` are the slots of their cache rows. ``run`` is the same as a slice,
    for one decoding request on a CPU with contiguous slots, which is read without a copy.
    """

    rows: Tensor | slice | None
    slots: Tensor
    extent: Extent
    run: slice | None = None

    def within(self, window: int | None) -> Group:
        """Return this group without keys that are outside of every query's window. They are neither read nor scored."""
        extent = self.extent
        unseen = 0 if window is None else max(0, extent.smallest_offset - window + 1)
        if not unseen:
            return self
        run = None if self.run is None else slice(self.run.start + unseen, self.run.stop)
        nearer = replace(
            extent,
            offsets=extent.offsets - unseen,
            keys=extent.keys - unseen,
            smallest_offset=extent.smallest_offset - unseen,
            largest_offset=extent.largest_offset - unseen,
            bias=None if extent.bias is None else extent.bias[..., unseen:],
        )
        return Group(self.rows, self.slots[:, unseen:], nearer, run)


def plan_groups(geometry: Geometry) -> tuple[Tensor, tuple[Group, ...]]:
    """Return the slot mapping ``[rows]`` of new rows, and groups that cover every request with new tokens exactly once.

    Requests are grouped by query length, then by similar KV length.
    """
    kv_lens, by_queries = geometry.kv_lens, {}
    if geometry.new_lens is None and geometry.rows:  # as in every decode step
        by_queries[geometry.max_new] = list(range(geometry.requests))
    else:
        for request, queries in enumerate(geometry.query_lens):
            if queries:
                by_queries.setdefault(queries, []).append(request)
    members: list[list[int]] = []  # requests of each group; those that fit into one keep the batch's order
    for requests in by_queries.values():
        lens = [kv_lens[request] for request in requests]
        if len(lens) * max(lens) <= min(2 * sum(lens), _LARGEST_READ):
            members.append(requests)
            continue
        first = len(members)  # longest first; one that would pad more than half of a large read starts a new group
        for request in sorted(requests, key=lambda request: -kv_lens[request]):
            longest = kv_lens[members[-1][0]] if len(members) > first else 0
            wasteful = longest > _SMALL_READ and 2 * kv_lens[request] < longest
            if not longest or wasteful or longest * (len(members[-1]) + 1) > _LARGEST_READ:
                members.append([])
            members[-1].append(request)
    cached = geometry.max_new == 1 and geometry.page_table.is_cpu
    whole = len(members) == 1 and members[0] == sorted(members[0])
    first_rows = None if whole else list(accumulate(geometry.query_lens, initial=0))
    groups: tuple[Group, ...] = ()
    for each in members:
        slots, plan = geometry.cache_slots(each), _cached_reads if cached else _group
        groups += plan(geometry, each, slots, first_rows)
    if whole and geometry.mode is ForwardMode.DECODE and geometry.slots is None:
        # A decoding request's new row is its last one, and its slots end with that row, padded or not.
        return slots.select(1, -1), groups
    return geometry.new_slots(), groups


def _group(geometry: Geometry, requests: list[int], slots: Tensor, first_rows: list[int] | None) -> tuple[Group, ...]:
    queries, kv_lens, device = geometry.query_lens[requests[0]], geometry.kv_lens, geometry.device
    offsets = [kv_lens[request] - queries for request in requests]
    rows = None
    if first_rows is not None:
        starts = torch.tensor([first_rows[request] for request in requests], dtype=torch.int64)
        rows = (starts.unsqueeze(1) + torch.arange(queries)).flatten().to(device, non_blocking=True)
    tree = geometry.tree
    if tree is not None and requests != list(range(geometry.requests)):
        tree = tree.index_select(0, to_device(requests, device))
    return (Group(rows, slots, Extent.of(queries, offsets, max(offsets) + queries, device, tree)),)


def _cached_reads(
    geometry: Geometry, requests: list[int], slots: Tensor, first_rows: list[int] | None
) -> tuple[Group, ...]:
    """Split requests with one query each on a CPU into groups that read few rows."""
    lens = [geometry.kv_lens[request] for request in requests]
    starts, longest = [0], 0
    for index, length in enumerate(lens):
        longest = max(longest, length)
        if index > starts[-1] and longest * (index + 1 - starts[-1]) > _CACHED_READ:
            starts.append(index)
            longest = length
    parts = [slice(*ends) for ends in pairwise([*starts, len(lens)])]
    groups = []
    for part in parts:
        offsets = np.array(lens[part]) - 1
        smallest, largest = int(offsets.min()), int(offsets.max())
        bias = None if smallest == largest else padding_bias(offsets, largest + 1)
        extent = Extent(torch.from_numpy(offsets), 1, largest + 1, smallest, largest, bias)
        rows: Tensor | slice | None = None if len(parts) == 1 else part
        if first_rows is not None:
            rows = torch.tensor([first_rows[request] for request in requests[part]])
        own = slots[part, : extent.keys].contiguous()
        places, run = own[0].numpy(), None
        if own.shape[0] == 1 and places[0] >= 0 and (np.diff(places) == 1).all():
            run = slice(int(places[0]), int(places[0]) + len(places))
        groups.append(Group(rows, own, extent, run))
    return tuple(groups)


def padding_bias(last: np.ndarray, keys: int) -> Tensor:
    """Return the bias ``[requests, 1, 1, keys]`` float32 that hides the keys beyond ``last`` ``[requests]``."""
    hidden = np.arange(keys) > last[:, None]
    return torch.from_numpy(np.where(hidden, np.float32("-inf"), np.float32(0)))[:, None, None]
