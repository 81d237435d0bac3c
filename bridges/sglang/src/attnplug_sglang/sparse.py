"""Sparse MLA (DeepSeek-V3.2): metadata of a planned batch for SGLang's indexer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from attnplug import BackendError, Geometry
from attnplug.kernels import spread
from attnplug.sparse import IndexerDims
from attnplug_sglang.host import INDEX_BY_HOST

SelectPositions = Callable[..., Tensor]
"""SGLang's ``DSATopKBackend.topk_func``: positions ``[rows, topk]`` int32 of the best scores, -1 behind the last one.

Called with scores ``[rows, columns]``, the number of columns that each row sees, ``topk``, and ``row_starts``: the
first column that each row sees.
"""


def indexer_dims(config: Any) -> IndexerDims | None:
    """Dims of the model's indexer, from its text config; ``None`` for dense models.

    Raises :class:`BackendError` for an index over groups of rows.
    """
    topk = getattr(config, "index_topk", None)
    if topk is None:
        return None
    if (pool := getattr(config, "index_kpool", 1)) > 1:
        raise BackendError(
            f"the model's index has one key for {pool} rows (index_kpool), which attnplug does not support; give "
            "--attention-backend dsa"
        )
    return IndexerDims(config.index_n_heads, config.index_head_dim, topk, shares=INDEX_BY_HOST)


class IndexerMetadata:
    """Metadata of a planned batch for SGLang's indexer, with the members of SGLang's ``BaseIndexerMetadata``.

    The indexer scores cached rows and calls ``topk_transform``. Layers pass the result on to attention as
    ``topk_indices``. Decodes and verifies are scored over pages, one row of the page table for each query. Extends are
    scored over the rows of all requests, gathered one request behind the other.
    """

    paged_mqa_schedule_metadata = None
    paged_mqa_ctx_lens_2d = None
    topk_indices_offset = None
    force_unfused_topk = True
    """Forbids SGLang's kernels that select slots instead of positions."""

    def __init__(self, geometry: Geometry, select: SelectPositions) -> None:
        self._geometry, self._select = geometry, select
        self._table, self._owner, self._range = geometry.page_table, None, None
        host, device, new = geometry.host, geometry.device, geometry.max_new
        if geometry.new_lens is None:
            self._new_lens = [new] * geometry.requests
            self._visible = geometry.seq_lens
            if new > 1:
                before = torch.arange(1 - new, 1, dtype=torch.int32, device=device)
                self._visible = (geometry.seq_lens[:, None] + before).flatten()
                self._table = geometry.page_table.repeat_interleave(new, 0)
            return
        assert host is not None, "an extend has exact lengths on the host"
        self._new_lens = list(host.query_lens)
        first = [total - more + 1 for total, more in zip(host.kv_lens, host.query_lens, strict=True)]
        owner, visible = spread(first, self._new_lens, device)
        gathered = torch.tensor([0, *accumulate(host.kv_lens)][:-1], dtype=torch.int32).to(device)
        self._owner, self._visible = owner.to(torch.int32), visible.to(torch.int32)
        start = gathered[owner]
        self._range = start, start + self._visible

    @property
    def attn_metadata(self) -> IndexerMetadata:
        """Object with ``topk_indices_offset``: ``None``, because positions are those in the request."""
        return self

    def get_seqlens_int32(self) -> Tensor:
        return self._geometry.seq_lens

    def get_seqlens_expanded(self) -> Tensor:
        """Return the number of cache rows that each query sees, ``[rows]`` int32."""
        return self._visible

    def get_page_table_64(self) -> Tensor:
        return self._table

    get_logical_page_table = get_page_table_64

    def get_page_table_1(self) -> Tensor:
        raise BackendError("SGLang's indexer reads pages of one row on ROCm, where attnplug has no sparse attention")

    def get_indexer_kvcache_range(self) -> tuple[Tensor, Tensor] | None:
        """Return the first and the end gathered row that each query of an extend sees, ``[rows]`` int32 each."""
        return self._range

    def get_indexer_seq_len(self) -> Tensor:
        return self._geometry.seq_lens

    def get_indexer_seq_len_cpu(self) -> Tensor:
        host = self._geometry.host
        assert host is not None, "SGLang's indexer reads host lengths of extends only"
        return torch.tensor(host.kv_lens)

    def get_dsa_extend_len_cpu(self) -> list[int]:
        return self._new_lens

    def get_token_to_batch_idx(self) -> Tensor | None:
        return self._owner

    def topk_transform(
        self, logits: Tensor, topk: int, ks: Tensor | None = None, ke_offset: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Return the positions of the best scores. ``ke_offset``: rows that each query sees, for a part of an extend.

        SGLang's other arguments translate positions to slots.
        """
        return self._select(logits, self._visible if ke_offset is None else ke_offset, topk, row_starts=ks)
