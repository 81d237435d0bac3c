"""Weights of a model by name: in the model's dtype, only the rank's part, with a record of what was taken."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug_engine.checkpoints.safetensors import UnusedTensors, WeightSource, shortened
from attnplug_engine.parallel.collectives import TensorParallel, length

# Buffers in old checkpoints that every model computes by itself.
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True)
class WeightRows:
    """Rows of a stored weight ``[total, in_features]`` for a stack: this rank's, possibly reordered.

    ``order`` holds indices into the owned rows, one per row of the result; other rows are not taken.
    """

    name: str
    total: int
    own: slice
    order: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of rows in the stack."""
        return length(self.own) if self.order is None else len(self.order)


class Weights:
    """Tensors under one prefix of a source, in the model's dtype and on its device.

    ``at`` returns a submodule's tensors. All tensors taken below the root are recorded in one place, so that
    ``check_all_taken`` at the root finds unused ones.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel,
        head: bool = True,
        prefix: str = "",
        taken: set[str] | None = None,
        on_read: Callable[[int], None] | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.parallel = parallel
        self.head = head
        """True if the model is to have its head."""
        self._source = source
        self._prefix = prefix
        self._taken = set() if taken is None else taken
        self._on_read = on_read
        """Called after each tensor with the number of tensors read so far."""

    def at(self, module: str) -> Weights:
        """Return the weights of a submodule: ``"layers.3"``."""
        return Weights(
            self._source,
            dtype=self.dtype,
            device=self.device,
            parallel=self.parallel,
            head=self.head,
            prefix=f"{self._prefix}{module}.",
            taken=self._taken,
            on_read=self._on_read,
        )

    def holds(self, name: str) -> bool:
        """Return True if the source has a tensor of this name, for tensors with two possible names."""
        return self._prefix + name in self._source.names()

    def take(
        self, name: str, *shape: int, rows: slice | None = None, columns: slice | None = None, exact: bool = False
    ) -> Tensor:
        """Return a tensor, or this rank's rows and columns of it. ``exact`` keeps it float32, whatever the model's
        dtype."""
        part = self._read(name, shape, rows, columns)
        # Always a copy: a file's memory map is not ours, and is not aligned for vector loads.
        return part.to(self.device, torch.float32 if exact else self.dtype, copy=True).contiguous()

    def integers(self, name: str, *shape: int, below: int) -> Tensor:
        """Return a tensor of integers from 0 to ``below - 1`` as int64."""
        full_name = self._prefix + name
        whole = self._source.integers(full_name, shape, below)
        self._note(full_name)
        return whole.to(self.device, copy=True)

    def stack(self, suffix: str, parts: Sequence[WeightRows], *in_features: int) -> Tensor:
        """Stack several stored tensors into one, ``[rows of all parts, *in_features]``, for one matrix product."""
        self.check(suffix, parts, *in_features)
        count = sum(part.count for part in parts)
        stacked = torch.empty(count, *in_features, dtype=self.dtype, device=self.device)
        self.fill(stacked, suffix, parts)
        return stacked

    def check(self, suffix: str, parts: Sequence[WeightRows], *in_features: int) -> None:
        """Raise if the parts are not stored with these shapes. Called before memory is allocated, because a config may
        lie."""
        for part in parts:
            self._source.check(f"{self._prefix}{part.name}.{suffix}", (part.total, *in_features))

    def fill(self, target: Tensor, suffix: str, parts: Sequence[WeightRows]) -> None:
        """Fill ``target [rows of all parts, …]`` with the parts' rows, part by part."""
        start = 0
        for part in parts:
            stop = start + part.count
            stored = self._read(f"{part.name}.{suffix}", (part.total, *target.shape[1:]), part.own, None)
            target[start:stop].copy_(stored if part.order is None else stored[part.order])
            start = stop

    def check_all_taken(self, ignored: Callable[[str], bool]) -> None:
        """Raise if the source holds tensors that no module took, other than known irrelevant ones."""
        unused = [
            name
            for name in self._source.names()
            if name not in self._taken and not _HARMLESS.search(name) and not ignored(name)
        ]
        if unused:
            raise UnusedTensors(
                f"the checkpoint {self._source.name!r} holds {len(unused)} tensors that no part of the model takes: "
                f"{shortened(unused)}; its config.json describes another model",
                self._source.name,
                unused,
            )

    def _read(self, name: str, shape: tuple[int, ...], rows: slice | None, columns: slice | None) -> Tensor:
        full_name = self._prefix + name
        part = self._source.tensor(full_name, shape, rows=rows, columns=columns)
        self._note(full_name)
        return part

    def _note(self, full_name: str) -> None:
        self._taken.add(full_name)
        if self._on_read is not None:
            self._on_read(len(self._taken))
