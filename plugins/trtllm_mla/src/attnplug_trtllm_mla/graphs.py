"""CUDA graph support: static buffers and plans of captured batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import Geometry, GraphLimits
from attnplug_flashinfer_mla.device_planner import fill_indices
from attnplug_flashinfer_mla.lengths import CallLengths
from attnplug_trtllm_mla.planner import DecodeCall, kernel_table, table_width


@dataclass(frozen=True, slots=True, eq=False)
class CapturedDecode:
    """Call and static buffers of one captured batch shape.

    For rows of padding, ``slots`` ``[rows]`` int64 is -1 and ``padding`` ``[rows]`` bool is true.
    """

    call: DecodeCall
    qo_indptr: Tensor
    kv_indptr: Tensor
    slots: Tensor
    padding: Tensor

    def fill(self, geometry: Geometry, kernel_page: int) -> None:
        """Fill the kernels' inputs from the batch's page table and lengths. Captured in the graph.

        The kernels do not support requests without keys. So a padded request attends to as many keys as queries, from
        whatever pages its row of the table names, and ``attend`` clears its output.
        """
        seq_lens = geometry.seq_lens
        lengths = CallLengths(self.qo_indptr, self.kv_indptr, seq_lens)
        pages = kernel_table(geometry, kernel_page)
        fill_indices(pages, lengths, kernel_page, self.call.block_tables.view(-1), self.slots)
        torch.clamp(seq_lens, min=self.call.queries, out=self.call.seq_lens)
        torch.lt(self.slots, 0, out=self.padding)
        if geometry.slots is not None:
            self.slots.copy_(geometry.slots)


class DecodeGraphMemory:
    """Static buffers of one lane, shared by all captured shapes because a lane's graphs run one after the other."""

    def __init__(self, limits: GraphLimits, max_context: int, kernel_page: int, device: torch.device) -> None:
        self._max_seq_len, self._width = max_context, table_width(max_context, kernel_page)
        self._block_tables = torch.zeros(limits.max_bs, self._width, dtype=torch.int32, device=device)
        self._seq_lens = torch.ones(limits.max_bs, dtype=torch.int32, device=device)
        self._slots = torch.full((limits.max_num_tokens,), -1, dtype=torch.int64, device=device)
        self._padding = torch.ones(limits.max_num_tokens, dtype=torch.bool, device=device)

    def capture(self, geometry: Geometry) -> CapturedDecode:
        """Return the call of a new batch shape. Does not read its lengths, which change from replay to replay."""
        requests, rows = geometry.requests, geometry.rows
        queries = rows // requests
        each = torch.arange(requests + 1, dtype=torch.int32, device=self._seq_lens.device)
        return CapturedDecode(
            call=DecodeCall(queries, self._block_tables[:requests], self._seq_lens[:requests], self._max_seq_len),
            qo_indptr=each * queries,
            kv_indptr=each * self._width,
            slots=self._slots[:rows],
            padding=self._padding[:rows],
        )
