"""Scratch memory for kernels, owned in one place and shared by kind (A2)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.declare.errors import WorkspaceError
from attnplug.declare.kv_format import WorkspaceKind

Allocate = Callable[[int, torch.device, bool], Tensor]
"""Allocator of workspace memory: ``(nbytes, device, zeroed)`` → tensor ``[nbytes]`` uint8."""


@dataclass(frozen=True, slots=True)
class WorkspaceUse:
    """One line of the report: an allocation, and the bytes that each owner requested.

    ``retired_bytes`` are buffers replaced since; their users should read ``Workspace.buffer`` again.
    """

    device: str
    kind: str
    lane: int
    zeroed: bool
    nbytes: int
    owners: dict[str, int]
    retired_bytes: int


class Workspace:
    """One shared allocation. ``buffer`` is its memory, ``[bytes]`` uint8, replaced when an owner requests more."""

    __slots__ = ("_owners", "_retired", "buffer", "kind", "lane")

    def __init__(self, kind: WorkspaceKind, device: torch.device, lane: int) -> None:
        self.kind = kind
        self.lane = lane
        self.buffer: Tensor = torch.zeros(0, dtype=torch.uint8, device=device)
        self._owners: dict[str, int] = {}
        self._retired: list[weakref.ref[Tensor]] = []

    def _grow(self, owner: str, nbytes: int, allocate: Allocate | None) -> None:
        have = self.buffer.numel()
        if nbytes > have:
            if allocate is None:
                raise WorkspaceError(
                    f"{owner} requests {nbytes} bytes of {self.kind.name} workspace, but it is frozen at {have}: "
                    "captured graphs hold its address; request the maximum before graphs are captured"
                )
            device = self.buffer.device
            buffer = allocate(nbytes, device, self.kind.zeroed)
            wanted = ((nbytes,), torch.uint8, device)
            if (buffer.shape, buffer.dtype, buffer.device) != wanted or not buffer.is_contiguous():
                raise WorkspaceError(
                    f"the allocator gave {list(buffer.shape)} {buffer.dtype} on {buffer.device} for {self.kind.name} "
                    f"workspace; it must give contiguous [{nbytes}] torch.uint8 on {device}"
                )
            if self.kind.zeroed and buffer.any():
                raise WorkspaceError(f"the allocator gave {self.kind.name} workspace that is not zero, as requested")
            if have:
                self._retired.append(weakref.ref(self.buffer))
            self.buffer = buffer
        self._owners[owner] = max(nbytes, self._owners.get(owner, 0))


def _allocate(nbytes: int, device: torch.device, zeroed: bool) -> Tensor:
    # torch.empty for plain memory: touching hundreds of MiB that kernels overwrite would cost start-up time.
    return (torch.zeros if zeroed else torch.empty)(nbytes, dtype=torch.uint8, device=device)


class WorkspaceOwner:
    """Owner of all scratch memory, in the backends' context: ``WorkspaceOwner(allocate)``.

    A host that accounts for memory itself passes its own ``allocate``, whose results are checked.
    """

    def __init__(self, allocate: Allocate = _allocate) -> None:
        self._workspaces: dict[tuple[torch.device, WorkspaceKind, int], Workspace] = {}
        self._allocate: Allocate | None = allocate

    def request(
        self, owner: str, device: torch.device | str, kind: WorkspaceKind, nbytes: int, lane: int = 0
    ) -> Workspace:
        """Return at least ``nbytes`` of this kind, shared by all who request the same device, kind and lane.

        Lanes run at the same time and never share. Raises WorkspaceError for a request that would grow a frozen
        workspace, and for a kind whose name exists with another ``zeroed``.
        """
        if nbytes < 1 or lane < 0:
            raise WorkspaceError(
                f"{owner} requests {nbytes} bytes of {kind.name} workspace in lane {lane}; request 1 or more, in "
                "lane 0 or higher"
            )
        place = torch.device(device)
        if place.index is None:  # "cuda" is the same device as "cuda:0" if 0 is current
            place = torch.empty(0, device=place).device
        key = (place, kind, lane)
        for _, other, _ in self._workspaces:
            if other.name == kind.name and other != kind:
                raise WorkspaceError(
                    f"{owner} requests workspace {kind.name!r} with zeroed={kind.zeroed}, "
                    f"but it exists with zeroed={other.zeroed}; another contract needs another name"
                )
        workspace = self._workspaces.get(key) or Workspace(kind, key[0], lane)
        workspace._grow(owner, nbytes, self._allocate)
        self._workspaces[key] = workspace
        return workspace

    def freeze(self) -> None:
        """Forbid growth from now on, because captured graphs hold the addresses."""
        self._allocate = None

    def report(self) -> tuple[WorkspaceUse, ...]:
        """Return all allocations with their owners, sorted by device, kind and lane."""
        uses = []
        for (device, kind, lane), each in self._workspaces.items():
            retired = sum(buffer.numel() for ref in each._retired if (buffer := ref()) is not None)
            nbytes, owners = each.buffer.numel(), dict(each._owners)
            uses.append(WorkspaceUse(str(device), kind.name, lane, kind.zeroed, nbytes, owners, retired))
        return tuple(sorted(uses, key=lambda use: (use.device, use.kind, use.lane)))

    @property
    def nbytes(self) -> int:
        """Total bytes, including buffers that were replaced and are still in use."""
        return sum(use.nbytes + use.retired_bytes for use in self.report())
