"""vLLM's metadata of a step, ``CommonAttentionMetadata``, as the geometry that our planners read. Nothing is copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnplug import ForwardMode, Geometry
from attnplug.host import HostLengths


@dataclass(frozen=True, slots=True)
class Shape:
    """What does not change from step to step. ``pages`` is how many columns of a block table can be in use.

    ``verify`` is the number of new tokens of a request whose draft is checked, 0 without speculation. ``host`` says
    that the backend needs exact lengths on the CPU, and that vLLM has them.
    """

    page_size: int
    pages: int
    verify: int = 0
    host: bool = False

    def mode(self, metadata: Any) -> ForwardMode:
        """What a batch asks of attention, by numbers alone."""
        longest, requests, tokens = metadata.max_query_len, metadata.num_reqs, metadata.num_actual_tokens
        if longest == 1 and tokens == requests:
            return ForwardMode.DECODE
        if tokens == requests * longest:
            return ForwardMode.TARGET_VERIFY if longest == self.verify else ForwardMode.EXTEND
        return ForwardMode.MIXED

    def geometry(self, metadata: Any, *, captured: bool = False, new_lens: Tensor | None = None) -> Geometry:
        """The geometry of a whole batch. Each request has equally many new tokens, unless ``new_lens`` are given or
        the batch is mixed."""
        mode, tokens = self.mode(metadata), metadata.num_actual_tokens
        if new_lens is None and mode is ForwardMode.MIXED:
            starts = metadata.query_start_loc
            new_lens = starts[1:] - starts[:-1]
        table = metadata.block_table_tensor
        if table.shape[1] > self.pages:
            table = table[:, : self.pages]
        slots = metadata.slot_mapping
        return Geometry(
            mode,
            table,
            metadata.seq_lens,
            self.page_size,
            rows=tokens,
            max_seq_len=min(metadata.max_seq_len, table.shape[1] * self.page_size),
            max_new=metadata.max_query_len,
            new_lens=new_lens,
            host=self.lengths(metadata) if self.host and not captured else None,
            slots=slots if slots.shape[0] == tokens else slots[:tokens],
            captured=captured,
        )

    def lengths(self, metadata: Any) -> HostLengths:
        """Exact lengths on the CPU, which vLLM calls an upper bound: it is exact unless it speculates ahead."""
        starts = metadata.query_start_loc_cpu.tolist()
        kv_lens = metadata.seq_lens_cpu_upper_bound.tolist()
        return HostLengths([end - start for start, end in zip(starts, starts[1:], strict=False)], kv_lens)


def split(metadata: Any, requests: int) -> tuple[Any, Any]:
    """A mixed batch as two: its first ``requests``, which decode, and the rest."""
    starts = metadata.query_start_loc_cpu
    tokens, total = int(starts[requests]), metadata.num_reqs
    lens = starts[1:] - starts[:-1]
    return (
        _part(metadata, 0, requests, 0, tokens, int(lens[:requests].max())),
        _part(metadata, requests, total, tokens, metadata.num_actual_tokens, int(lens[requests:].max())),
    )


def decoding(metadata: Any, threshold: int) -> int:
    """How many requests at the front have at most ``threshold`` new tokens; vLLM puts those first."""
    starts = metadata.query_start_loc_cpu
    long = (starts[1:] - starts[:-1]) > threshold
    return int(long.int().argmax()) if bool(long.any()) else metadata.num_reqs


def _part(metadata: Any, first: int, last: int, start: int, end: int, longest: int) -> Any:
    bound = metadata.seq_lens_cpu_upper_bound
    return metadata.replace(
        query_start_loc=metadata.query_start_loc[first : last + 1],
        query_start_loc_cpu=metadata.query_start_loc_cpu[first : last + 1],
        seq_lens=metadata.seq_lens[first:last],
        num_reqs=last - first,
        num_actual_tokens=end - start,
        max_query_len=longest,
        block_table_tensor=metadata.block_table_tensor[first:last],
        slot_mapping=metadata.slot_mapping[start:end],
        seq_lens_cpu_upper_bound=None if bound is None else bound[first:last],
    )
