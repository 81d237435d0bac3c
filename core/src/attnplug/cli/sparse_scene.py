"""The stage of ``attnplug check`` for sparse layers: what a backend selects is judged by scores in float64, and what it
attends to by the rows that it selected."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug.cli.reference import attention_float64
from attnplug.cli.scene import Scene, Step
from attnplug.contract.backend import AttentionBackend, ForwardExtras, bind_optional_hook
from attnplug.contract.batch import ForwardBatch
from attnplug.contract.sparse import IndexInputs, SelectedPositions, SelectedRows
from attnplug.declare.errors import BackendError
from attnplug.declare.model import AttentionKind, IndexerDims, LayerSpec, MLADims
from attnplug.declare.problem import DType

SPARSE_LAYERS = {
    "sparse MLA, top 64": LayerSpec(
        1,
        AttentionKind.MLA,
        16,
        16,
        192,
        128,
        192**-0.5,
        mla=MLADims(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64),
        indexer=IndexerDims(heads=32, head_dim=128, topk=64),
    ),
}


class SparseScene(Scene):
    """Requests with index keys beside their rows, poisoned alike."""

    def __init__(
        self, layer: LayerSpec, dtype: DType, kv_dtype: DType, page_size: int, device: torch.device, seed: int
    ) -> None:
        super().__init__(layer, dtype, kv_dtype, page_size, device, seed)
        assert layer.indexer is not None
        self._dims = layer.indexer
        self._index_keys: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
        self._selected: tuple[Tensor, Tensor, SelectedRows] | None = None
        """The step's index queries and weights, and what was selected by them."""
        self._chosen: list[list[int]] = []
        """What each token of the step attends to."""

    def extras(self, step: Step, backend: AttentionBackend, batch: ForwardBatch) -> ForwardExtras:
        dims, lengths = self._dims, list(step.new_tokens.values())
        tokens = sum(lengths)
        q, k = self._normal(tokens, dims.heads, dims.head_dim), self._normal(tokens, dims.head_dim)
        weights = self._normal(tokens, dims.heads).float()
        for request, keys in zip(step.new_tokens, k.split(lengths), strict=True):
            self._index_keys[request].append(keys.double())
        select = bind_optional_hook(backend, "select")
        if select is None:
            raise BackendError(f"{backend.backend_id.name} has no select, which a sparse layer needs")
        index = IndexInputs(q.to(self.device), k.to(self.device), weights.to(self.device))
        selected: SelectedRows = select(index, self.layer, batch)
        self._selected = q.double(), weights.double(), selected
        return ForwardExtras(selected=selected)

    def judge(self, step: Step) -> None:
        """Each token is given as many rows as it should be, and none has a lower score than one that was left out.
        Scores that differ by rounding alone may change places."""
        assert self._selected is not None
        q, weights, selected = self._selected
        chosen: list[list[int]] = []
        by_position = isinstance(selected, SelectedPositions)
        tensor = selected.positions if isinstance(selected, SelectedPositions) else selected.slots
        for request, count in step.new_tokens.items():
            keys = torch.cat(self._index_keys[request])
            slots = {} if by_position else self._positions_of(request, len(keys))
            for position in range(len(keys) - count, len(keys)):
                token = len(chosen)
                scores = weights[token] @ torch.relu(q[token] @ keys[: position + 1].T * self._dims.scale)
                live = [int(row) for row in tensor[token].tolist() if row >= 0]
                mine = live if by_position else [slots.get(row, -1) for row in live]
                wanted = min(self._dims.topk, position + 1)
                if len(set(mine)) != wanted or len(mine) != wanted or not all(0 <= row <= position for row in mine):
                    raise BackendError(
                        f"the token at position {position} of request {request} was given rows {sorted(mine)}, and not "
                        f"{wanted} distinct ones from 0 to {position}"
                    )
                best = scores.sort(descending=True).values[:wanted]
                short = float((best - scores[mine].sort(descending=True).values).max() / scores.abs().max())
                if not short <= self.tolerance:
                    raise BackendError(
                        f"the token at position {position} of request {request} was given rows whose scores fall short "
                        f"of the best by {short:.1e} of the largest; {self.tolerance:.0e} is allowed"
                    )
                chosen.append(sorted(mine))
        self._chosen = chosen

    def _positions_of(self, request: int, rows: int) -> dict[int, int]:
        """The position of the row at each of a request's slots."""
        pages, size = list(self.table.pages(self.rows[request])), self.page_size
        return {pages[row // size] * size + row % size: row for row in range(rows)}

    def _wanted(self, step: Step, q: Tensor) -> tuple[Tensor, Tensor]:
        requests = [request for request, count in step.new_tokens.items() for _ in range(count)]
        outs = []
        for query, request, chosen in zip(q, requests, self._chosen, strict=True):
            keys, values = torch.cat(self.keys[request])[chosen], torch.cat(self.values[request])[chosen]
            outs.append(
                attention_float64(query[None], keys, values, scale=self.layer.scale, first_position=len(chosen))
            )
        return torch.cat([out for out, _ in outs]), torch.cat([lse for _, lse in outs])
