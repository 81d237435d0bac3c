"""Scratch memory for kernels, owned in one place and shared by contract (A2)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.declare.errors import WorkspaceError


@dataclass(frozen=True, slots=True)
class WorkspaceKind:
    """The contract of some memory: who may leave what in it.

    Backends that ask for an equal kind share one allocation. ``zeroed`` memory is zero on first use and its users
    leave it zero (semaphores); plain memory holds anything. Kernels that overwrite what others expect to find zero
    ask for a kind with a name of their own.
    """

    name: str
    zeroed: bool = False


SCRATCH = WorkspaceKind("scratch")
TRTLLM_SEMAPHORES = WorkspaceKind("trtllm-semaphores", zeroed=True)
CUTE_DSL_SCRATCH = WorkspaceKind("cute-dsl-scratch")


@dataclass(frozen=True, slots=True)
class WorkspaceUse:
    """One line of the report: an allocation and what each owner asked of it.

    ``retired_bytes`` is held by users of a buffer that has since grown: they should take ``Workspace.buffer`` anew.
    """

    device: str
    kind: str
    zeroed: bool
    nbytes: int
    owners: dict[str, int]
    retired_bytes: int


class Workspace:
    """One shared allocation. ``buffer`` is its memory now, ``[bytes]`` uint8; it changes when somebody wants more."""

    __slots__ = ("_owners", "_retired", "buffer", "kind")

    def __init__(self, kind: WorkspaceKind, device: torch.device) -> None:
        self.kind = kind
        self.buffer: Tensor = torch.zeros(0, dtype=torch.uint8, device=device)
        self._owners: dict[str, int] = {}
        self._retired: list[weakref.ref[Tensor]] = []

    def _ask(self, owner: str, nbytes: int, frozen: bool) -> None:
        have = self.buffer.numel()
        if nbytes > have:
            if frozen:
                raise WorkspaceError(
                    f"{owner} asks for {nbytes} bytes of {self.kind.name} workspace, but it is frozen at {have}: "
                    "captured graphs hold its address; ask for the most you will need before graphs are captured"
                )
            if have:
                self._retired.append(weakref.ref(self.buffer))
            # torch.empty for plain memory: touching hundreds of MiB that kernels overwrite costs start-up time.
            make = torch.zeros if self.kind.zeroed else torch.empty
            self.buffer = make(nbytes, dtype=torch.uint8, device=self.buffer.device)
        self._owners[owner] = max(nbytes, self._owners.get(owner, 0))

    def _use(self) -> WorkspaceUse:
        alive = [buffer for ref in self._retired if (buffer := ref()) is not None]
        return WorkspaceUse(
            device=str(self.buffer.device),
            kind=self.kind.name,
            zeroed=self.kind.zeroed,
            nbytes=self.buffer.numel(),
            owners=dict(self._owners),
            retired_bytes=sum(buffer.numel() for buffer in alive),
        )


class WorkspaceOwner:
    """The one place that allocates scratch memory. Backends get it in their context."""

    def __init__(self) -> None:
        self._workspaces: dict[tuple[torch.device, WorkspaceKind, int], Workspace] = {}
        self._frozen = False

    def request(
        self, owner: str, device: torch.device | str, kind: WorkspaceKind, nbytes: int, lane: int = 0
    ) -> Workspace:
        """At least ``nbytes`` of this kind, shared with everyone who asks for the same kind there in the same lane.

        Lanes run at the same time, so they never share.
        """
        if nbytes < 1:
            raise WorkspaceError(f"{owner} asks for {nbytes} bytes of {kind.name} workspace; ask for 1 or more")
        key = (_exact(torch.device(device)), kind, lane)
        for _, other, _ in self._workspaces:
            if other.name == kind.name and other != kind:
                raise WorkspaceError(
                    f"{owner} asks for workspace {kind.name!r} with zeroed={kind.zeroed}, "
                    f"but it exists with zeroed={other.zeroed}; another contract needs another name"
                )
        workspace = self._workspaces.get(key)
        if workspace is None:
            workspace = Workspace(kind, key[0])
        workspace._ask(owner, nbytes, self._frozen)
        self._workspaces[key] = workspace
        return workspace

    def freeze(self) -> None:
        """From now on nothing grows: captured graphs hold the addresses."""
        self._frozen = True

    def report(self) -> tuple[WorkspaceUse, ...]:
        """Every allocation, by device and kind, with its owners."""
        uses: Iterator[WorkspaceUse] = (workspace._use() for workspace in self._workspaces.values())
        return tuple(sorted(uses, key=lambda use: (use.device, use.kind)))

    @property
    def nbytes(self) -> int:
        """Bytes held in all, buffers that have grown and are still in use included."""
        return sum(use.nbytes + use.retired_bytes for use in self.report())


def _exact(device: torch.device) -> torch.device:
    """``cuda`` and ``cuda:0`` are one device when 0 is current."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
