"""Geometries for MHA planners, made from vLLM's ``CommonAttentionMetadata`` without a copy."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnplug import ForwardMode, Geometry, PlanError
from attnplug.host import HostLengths, TypicalLens


@dataclass(frozen=True, slots=True)
class GeometryBuilder:
    """Makes the geometries of a KV group. ``pages`` is the number of block-table columns that a request can use.

    ``verify`` is the number of new tokens of a request whose draft is verified, 0 without speculation. ``exact``: the
    backend needs exact lengths on the CPU, and vLLM has them. ``by_batch``: lengths decide which backend runs a batch.
    """

    page_size: int
    pages: int
    verify: int = 0
    exact: bool = False
    by_batch: bool = False

    def eager(self, metadata: Any) -> Geometry:
        """Geometry of a step that runs without a graph.

        vLLM's number of tokens may include padding, so the rows are counted by ``query_start_loc_cpu``.
        """
        requests, longest = metadata.num_reqs, metadata.max_query_len
        rows = int(metadata.query_start_loc_cpu[-1])
        new_lens = None
        if rows == requests * longest:
            mode = self._uniform_mode(longest)
        else:
            starts = metadata.query_start_loc
            mode, new_lens = ForwardMode.MIXED, starts[1:] - starts[:-1]
        slots, table = metadata.slot_mapping, self.table(metadata)
        return Geometry(
            mode,
            table,
            metadata.seq_lens,
            self.page_size,
            rows=rows,
            max_seq_len=min(metadata.max_seq_len, table.shape[1] * self.page_size),
            max_new=longest,
            new_lens=new_lens,
            host=host_lengths(metadata) if self.exact else None,
            slots=slots if slots.shape[0] == rows else slots[:rows],
            typical=typical_lengths(metadata.seq_lens_cpu_upper_bound) if self.by_batch else None,
        )

    def captured(self, metadata: Any) -> Geometry:
        """Geometry of a batch that a graph captures: upper bounds, over vLLM's own persistent tensors.

        Every request has the same number of new tokens. Padding rows, which belong to no request, come last. Raises
        :class:`PlanError` for any other batch.
        """
        requests, longest = metadata.num_reqs, metadata.max_query_len
        rows = requests * longest
        if rows > metadata.num_actual_tokens:
            raise PlanError(
                f"vLLM captures {metadata.num_actual_tokens} tokens for {requests} requests of up to {longest}; "
                "attnplug's bridge captures only batches in which every request has the same number; use "
                "--compilation-config.cudagraph_mode PIECEWISE"
            )
        table = self.table(metadata)
        return Geometry(
            self._uniform_mode(longest),
            table,
            metadata.seq_lens,
            self.page_size,
            rows=rows,
            max_seq_len=min(metadata.max_seq_len, table.shape[1] * self.page_size),
            max_new=longest,
            slots=metadata.slot_mapping[:rows],
            captured=True,
        )

    def _uniform_mode(self, longest: int) -> ForwardMode:
        if longest == 1:
            return ForwardMode.DECODE
        return ForwardMode.TARGET_VERIFY if longest == self.verify else ForwardMode.EXTEND

    def table(self, metadata: Any) -> Tensor:
        """Block table ``[requests, pages]``, without columns that no request uses."""
        table: Tensor = metadata.block_table_tensor
        return table[:, : self.pages] if table.shape[1] > self.pages else table


def host_lengths(metadata: Any) -> HostLengths:
    """Exact lengths on the CPU. vLLM calls them an upper bound; without asynchronous speculation they are exact."""
    starts = metadata.query_start_loc_cpu.tolist()
    kv_lens = metadata.seq_lens_cpu_upper_bound.tolist()
    return HostLengths([end - start for start, end in itertools.pairwise(starts)], kv_lens)


def typical_lengths(seq_lens: Tensor | None) -> TypicalLens | None:
    """Typical KV lengths of CPU lengths ``[requests]``, without padded requests, which have length 0."""
    return None if seq_lens is None else TypicalLens.of([length for length in seq_lens.tolist() if length])


def with_exact_lengths(metadata: Any) -> Any:
    """Metadata of a drafting step with lengths read back from the device, because those on the CPU may be one step
    old. Synchronizes with the GPU."""
    return metadata.replace(seq_lens_cpu_upper_bound=metadata.seq_lens.cpu())


def leading_decodes(metadata: Any, threshold: int) -> int:
    """Number of leading requests with at most ``threshold`` new tokens. vLLM puts those first."""
    starts = metadata.query_start_loc_cpu
    long = (starts[1:] - starts[:-1]) > threshold
    return int(long.int().argmax()) if bool(long.any()) else int(metadata.num_reqs)


def split(metadata: Any, requests: int) -> tuple[Any, Any]:
    """Split a mixed batch into its first ``requests``, which decode, and the rest."""
    starts = metadata.query_start_loc_cpu
    lens, tokens, total = starts[1:] - starts[:-1], int(starts[requests]), metadata.num_reqs
    return (
        _part(metadata, 0, requests, 0, tokens, int(lens[:requests].max())),
        _part(metadata, requests, total, tokens, int(starts[-1]), int(lens[requests:].max())),
    )


def _part(metadata: Any, first: int, last: int, start: int, end: int, longest: int) -> Any:
    bound = metadata.seq_lens_cpu_upper_bound
    return metadata.replace(
        query_start_loc=metadata.query_start_loc[first : last + 1] - start,
        query_start_loc_cpu=metadata.query_start_loc_cpu[first : last + 1] - start,
        seq_lens=metadata.seq_lens[first:last],
        num_reqs=last - first,
        num_actual_tokens=end - start,
        max_query_len=longest,
        block_table_tensor=metadata.block_table_tensor[first:last],
        slot_mapping=metadata.slot_mapping[start:end],
        seq_lens_cpu_upper_bound=None if bound is None else bound[first:last],
    )
