"""Planner: lengths and state slots → groups of requests that dense torch operations process together.

Copies nothing from the device: padded requests are known on the device only, and are handled there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from attnplug.kernels import to_device


@dataclass(frozen=True, slots=True, eq=False)
class RequestGroup:
    """Requests with similar numbers of new tokens, padded to the longest of them. All tensors are on the device.

    ``requests``, ``slots`` and ``lens`` are ``[members]``: request numbers, state slots, new tokens. ``rows``
    ``[members, longest]`` are the rows of their tokens, with the last one repeated. ``live`` ``[members, longest]``
    bool masks the repetitions.

    A padded request is replaced by a copy of a member: the same rows advance the same state to the same slot. So its
    write is correct, and planning need not wait for the device to learn which requests are padded. A group of padded
    requests only has no live row, and writes back the state that it read at the slot of another request of the batch.
    It must not use slots of other batches, which another lane may be writing concurrently. A batch of padded requests
    only has no such slot, and uses slot 0.
    """

    requests: Tensor
    slots: Tensor
    lens: Tensor
    rows: Tensor
    live: Tensor

    def token(self, number: int) -> RequestGroup:
        """Return the group with one token of each member."""
        part = slice(number, number + 1)
        return replace(self, rows=self.rows[:, part], live=self.live[:, part])

    def first(self, tokens: Tensor) -> RequestGroup:
        """Return the group with only the first ``tokens`` ``[requests]`` tokens of each member live."""
        lens = torch.minimum(self.lens, tokens[self.requests])
        return replace(self, lens=lens, live=_within(lens, self.rows.shape[1]))


@dataclass(frozen=True, slots=True, eq=False)
class Grouping:
    """Groups that cover every request with new tokens exactly once, and the permutation to the batch's row order.

    The concatenated groups have ``size`` rows. ``order`` ``[query_rows]`` int64 is the index of each planned row among
    them; ``size`` for the rows of padded requests.
    """

    groups: tuple[RequestGroup, ...]
    order: Tensor
    size: int

    def in_batch_order(self, results: Sequence[Tensor], zero: Tensor, rows: int) -> Tensor:
        """Reorder the groups' results ``[members, longest, …]`` to ``[rows, …]``.

        Padding rows become ``zero`` ``[1, …]``.
        """
        order = F.pad(self.order, (0, rows - self.order.shape[0]), value=self.size)
        return torch.cat([*(result.flatten(0, 1) for result in results), zero]).index_select(0, order)


def plan_groups(query_lens: Sequence[int], state_slots: Tensor, *, alone: bool = False) -> Grouping:
    """Group a batch by its new tokens, on the host. ``state_slots`` ``[requests]`` is -1 for padded requests.

    With ``alone`` every request is a group.
    """
    device = state_slots.device
    first_rows = list(accumulate(query_lens, initial=0))
    query_rows = first_rows.pop()
    lens, firsts = to_device([query_lens, first_rows], device).unbind()
    memberships = _memberships(query_lens)
    if alone:
        memberships = [[number] for members in memberships for number in members]
    spare = None if len(memberships) < 2 else ((state_slots >= 0) & (lens > 0)).int().argmax(0, keepdim=True)
    groups, starts, size = [], [0] * len(query_lens), 0
    for members in memberships:
        longest = query_lens[members[0]]
        groups.append(_group(to_device(members, device), longest, lens, firsts, state_slots, spare))
        for number in members:
            starts[number] = size
            size += longest
    request = torch.repeat_interleave(lens, output_size=query_rows)
    shifts = to_device(starts, device) - firsts
    order = torch.arange(query_rows, device=device) + shifts[request]
    return Grouping(tuple(groups), order.masked_fill_(state_slots[request] < 0, size), size)


def _memberships(query_lens: Sequence[int]) -> list[list[int]]:
    """Return the request numbers of each group, longest first. Less than half of a group is padding."""
    groups: list[list[int]] = []
    for number in sorted(range(len(query_lens)), key=lambda number: -query_lens[number]):
        if not query_lens[number]:
            break
        if not groups or 2 * query_lens[number] <= query_lens[groups[-1][0]]:
            groups.append([])
        groups[-1].append(number)
    return groups


def _group(
    numbers: Tensor, longest: int, lens: Tensor, firsts: Tensor, state_slots: Tensor, spare: Tensor | None
) -> RequestGroup:
    """Make a group. ``spare`` ``[1]`` is a request that is not padded, for a group of padded requests only."""
    real = state_slots[numbers] >= 0
    requests = torch.where(real, numbers, numbers[real.int().argmax(0, keepdim=True)])
    slots = state_slots[requests]
    padded = slots < 0  # still negative: the whole group is padded
    own = lens[requests].masked_fill_(padded, 0)
    if spare is not None:
        slots = torch.where(padded, state_slots[spare], slots)
    last = (own - 1).clamp_(min=0).unsqueeze(1)
    offsets = torch.minimum(torch.arange(longest, device=numbers.device), last)
    rows = firsts[requests].unsqueeze(1) + offsets
    return RequestGroup(requests, slots.clamp(min=0), own, rows, _within(own, longest))


def _within(lens: Tensor, longest: int) -> Tensor:
    return torch.arange(longest, device=lens.device) < lens.unsqueeze(1)
