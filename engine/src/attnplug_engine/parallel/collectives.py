"""Tensor parallelism: the collectives a model needs, and which part of a weight each rank owns.

Every rank runs the same model on the same tokens with its own heads, columns and vocabulary rows. A block ends in one
``all_reduce``, and logits in one ``all_gather``; nothing else is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from attnplug.host import AttnplugError, UsageError


class ParallelError(UsageError):
    """A model cannot be divided over this many ranks. ``what`` is the thing to divide, ``count`` how many there are."""

    def __init__(self, message: str, what: str, count: int, size: int) -> None:
        super().__init__(message)
        self.what = what
        self.count = count
        self.size = size


class RankLost(AttnplugError):
    """A collective failed, because another rank is gone. ``rank`` is the one that noticed."""

    def __init__(self, rank: int, error: RuntimeError) -> None:
        first = str(error).partition("\n")[0]
        super().__init__(f"rank {rank} lost the others, or one of them failed: {first}")
        self.rank = rank


class TensorParallel(Protocol):
    """This process's place among the ranks, and what it exchanges with them. All ranks make the same calls in order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, the same on each. May reuse the memory of ``tensor``, which is the callee's from here."""
        ...

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The ranks' tensors, of one shape, one after the other along ``dim``."""
        ...


class SingleProcess:
    """One rank: nothing is exchanged."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor


SINGLE: TensorParallel = SingleProcess()
"""The model in one process."""


class ProcessGroupParallel:
    """Ranks that are processes of a torch.distributed group: the default group where none is given."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._owned = False
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.exit_code_when_lost: int | None = None
        """Where the process that started this one tells which rank failed: how this one ends, instead of RankLost."""

    @classmethod
    def join(
        cls,
        device: torch.device | str,
        *,
        rank: int | None = None,
        size: int | None = None,
        init_method: str | None = None,
    ) -> ProcessGroupParallel:
        """Start the default group: nccl for CUDA, gloo otherwise. ``close`` ends it.

        Without ``rank``, ``size`` and ``init_method`` they come from the environment that torchrun makes.
        """
        backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            init_method=init_method,
            rank=-1 if rank is None else rank,
            world_size=-1 if size is None else size,
        )
        joined = cls()
        joined._owned = True
        return joined

    def all_reduce(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        with self._noticing_loss():
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with self._noticing_loss():
            dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.cat(parts, dim)

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self.exit_code_when_lost is not None:
                raise SystemExit(self.exit_code_when_lost) from error
            raise RankLost(self.rank, error) from error

    def close(self) -> None:
        """End the group that ``join`` started, once all ranks are here; a group that was given stays."""
        if self._owned and dist.is_initialized():
            with suppress(RuntimeError):  # one that is gone already is not waited for
                dist.barrier()
            dist.destroy_process_group()
        self._owned = False


def even_part(count: int, parallel: TensorParallel, what: str) -> slice:
    """The part of ``count`` heads or columns that this rank owns. Raises ParallelError where it does not divide."""
    if count % parallel.size:
        raise ParallelError(
            f"{count} {what} cannot be divided evenly over {parallel.size} ranks; "
            f"use a --tensor-parallel that divides {count}",
            what,
            count,
            parallel.size,
        )
    each = count // parallel.size
    return slice(parallel.rank * each, (parallel.rank + 1) * each)


def kv_head_part(kv_heads: int, parallel: TensorParallel) -> slice:
    """The KV heads of this rank: an even part, or one head that several ranks hold when there are more ranks."""
    if parallel.size <= kv_heads:
        return even_part(kv_heads, parallel, "KV heads")
    if parallel.size % kv_heads:
        raise ParallelError(
            f"{kv_heads} KV heads cannot be shared by {parallel.size} ranks; "
            f"use a --tensor-parallel that divides {kv_heads} or is a multiple of it",
            "KV heads",
            kv_heads,
            parallel.size,
        )
    head = parallel.rank * kv_heads // parallel.size
    return slice(head, head + 1)


def padded_part(count: int, parallel: TensorParallel) -> tuple[slice, int]:
    """This rank's rows of a vocabulary, and how many rows every rank has once the last ones are padded."""
    each = -(-count // parallel.size)
    return slice(min(parallel.rank * each, count), min((parallel.rank + 1) * each, count)), each


def scaled(part: slice, width: int) -> slice:
    """The rows that belong to a part of the heads, where each head has ``width`` rows."""
    return slice(part.start * width, part.stop * width)


def length(part: slice) -> int:
    """How many things a part holds."""
    return int(part.stop - part.start)
