"""Tensor parallelism: collectives, and the part of a weight that each rank owns.

Every rank runs the same model on the same tokens with its own heads, columns and vocabulary rows. A block ends in one
``all_reduce``, and logits in one ``all_gather``; nothing else is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from attnplug import UsageError
from attnplug.host import AttnplugError


class ParallelError(UsageError):
    """A model cannot be divided over this many ranks. ``what`` is to be divided, ``count`` is its number.

    ``fitting`` are numbers of ranks that can divide the whole model, if they are known.
    """

    def __init__(self, problem: str, what: str, count: int, size: int, fitting: Sequence[int] = ()) -> None:
        super().__init__(f"{problem}; {allowed_ranks(fitting)}")
        self.problem = problem
        self.what = what
        self.count = count
        self.size = size
        self.fitting = tuple(fitting)

    def allowing(self, fitting: Sequence[int]) -> ParallelError:
        """Return the error with the numbers of ranks that can divide the whole model."""
        return ParallelError(self.problem, self.what, self.count, self.size, fitting)


def allowed_ranks(fitting: Sequence[int]) -> str:
    """Return the advice to use one of these numbers of ranks, or another one if they are not known."""
    if not fitting:
        return "use another --tensor-parallel"
    *others, last = map(str, fitting)
    return f"use --tensor-parallel {', '.join(others)} or {last}" if others else f"use --tensor-parallel {last}"


class RankLost(AttnplugError):
    """A collective failed because another rank has exited. ``rank`` is the one that noticed."""

    def __init__(self, rank: int, error: RuntimeError) -> None:
        first = str(error).partition("\n")[0]
        super().__init__(f"rank {rank} lost the others, or one of them failed: {first}")
        self.rank = rank


class TensorParallel(Protocol):
    """Rank, number of ranks, and collectives of this process. All ranks make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, the same on each. May reuse the memory of ``tensor``, which the caller gives
        up."""
        ...

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate the ranks' tensors, all of one shape, along ``dim``."""
        ...


class SingleProcess:
    """A single rank: nothing is exchanged."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor


SINGLE: TensorParallel = SingleProcess()
"""The whole model in one process."""


class FirstRank:
    """Rank 0 of ``size`` ranks. Collectives return tensors of the right shape without communication."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat([tensor] * self.size, dim)


class RankOrder:
    """Ranks whose tensors are summed in the order of the ranks, whatever their size.

    A library chooses the algorithm of an ``all_reduce``, and with it the order of three or more ranks, by the size of
    the tensor, i.e. by the number of tokens. This one sends all parts to every rank.
    """

    def __init__(self, parallel: TensorParallel) -> None:
        self._parallel = parallel
        self.rank, self.size = parallel.rank, parallel.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        first, *others = self._parallel.all_gather(tensor.unsqueeze(0), 0).unbind()
        for other in others:
            first = first + other
        return first

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        return self._parallel.all_gather(tensor, dim)


class ProcessGroupParallel:
    """Ranks that are processes of a torch.distributed group, by default the default group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._owned = False
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.exit_code_when_lost: int | None = None
        """Exit code that replaces RankLost, if the parent process reports which rank failed."""

    @classmethod
    def join(
        cls,
        device: torch.device | str,
        *,
        rank: int | None = None,
        size: int | None = None,
        init_method: str | None = None,
    ) -> ProcessGroupParallel:
        """Start the default group with torch's backend for the device, such as nccl for CUDA. ``close`` ends it.

        ``rank``, ``size`` and ``init_method`` default to the environment variables that torchrun sets.
        """
        dist.init_process_group(
            dist.get_default_backend_for_device(device),
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
        """End the group that ``join`` started, once all ranks have arrived; a group passed to the constructor stays."""
        if self._owned and dist.is_initialized():
            with suppress(RuntimeError):  # do not wait for a rank that has exited
                dist.barrier()
            dist.destroy_process_group()
        self._owned = False


def even_part(count: int, parallel: TensorParallel, what: str) -> slice:
    """Return the part of ``count`` heads or columns that this rank owns. Raises ParallelError if it does not divide
    evenly."""
    if count % parallel.size:
        raise ParallelError(
            f"{count} {what} cannot be divided evenly over {parallel.size} ranks",
            what,
            count,
            parallel.size,
        )
    each = count // parallel.size
    return slice(parallel.rank * each, (parallel.rank + 1) * each)


def grouped_part(count: int, group: int, parallel: TensorParallel, what: str) -> slice:
    """Return the part of ``count`` columns that this rank owns, divided between groups: parts may differ by a group.

    Raises ParallelError if there are fewer groups than ranks.
    """
    groups, rank, size = -(-count // group), parallel.rank, parallel.size
    if groups < size:
        raise ParallelError(
            f"{count} {what} in groups of {group} cannot be divided over {size} ranks",
            what,
            count,
            size,
        )
    return slice(groups * rank // size * group, min(groups * (rank + 1) // size * group, count))


def kv_head_part(kv_heads: int, parallel: TensorParallel) -> slice:
    """Return the KV heads of this rank: an even part, or one head that several ranks share if there are more ranks."""
    if parallel.size <= kv_heads:
        return even_part(kv_heads, parallel, "KV heads")
    if parallel.size % kv_heads:
        raise ParallelError(
            f"{kv_heads} KV heads cannot be shared by {parallel.size} ranks",
            "KV heads",
            kv_heads,
            parallel.size,
        )
    head = parallel.rank * kv_heads // parallel.size
    return slice(head, head + 1)


def padded_part(count: int, parallel: TensorParallel) -> tuple[slice, int]:
    """Return this rank's rows of a vocabulary, and the rows per rank once the last ones are padded."""
    each = -(-count // parallel.size)
    return slice(min(parallel.rank * each, count), min((parallel.rank + 1) * each, count)), each


def scaled(part: slice, width: int) -> slice:
    """Return the rows of a part of the heads, with ``width`` rows per head."""
    return slice(part.start * width, part.stop * width)


def shifted(part: slice, start: int) -> slice:
    """Return a part of rows that begin at ``start`` of a stored tensor."""
    return slice(start + part.start, start + part.stop)


def length(part: slice) -> int:
    """Return the length of a part."""
    return int(part.stop - part.start)
