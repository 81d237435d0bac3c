"""Sparse MLA: what a backend selects by its index, and that it attends to what was selected and to nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attnplug import (
    INDEX_KEYS,
    AttentionKind,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    IndexerDims,
    IndexInputs,
    IndexKeyPool,
    SelectedPositions,
    SelectedRows,
    SelectedSlots,
)
from attnplug.host import KVPools, bind_hook, optional_hooks
from attnplug_conformance.case import LAYER, Case
from attnplug_conformance.check import Check, Measured, Stand
from attnplug_conformance.diagnosis import Wrong, check_padding, check_result
from attnplug_conformance.reference import Rules, attention
from attnplug_conformance.scene import NAN, Scene, relative_error, tail, zero_by_chance_is_nan

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
INDEX = IndexerDims(heads=8, head_dim=16, topk=8)


class SparseScene(Scene):
    """Requests with index keys beside their rows, poisoned alike."""

    def _pools(self, healed: str | None) -> KVPools:
        plain = super()._pools(healed)
        assert self.case.dtype is not None and self.case.index is not None
        self.index = self.case.index
        pool = IndexKeyPool(
            self.case.layers,
            num_pages=self.num_pages,
            page_size=self.page_size,
            dtype=self.case.dtype,
            device=self.device,
        )
        for layer_id in pool.layer_ids:
            pool.keys(layer_id).fill_(NAN)
        self.index_rows = [self.normal(total, self.index.head_dim) for total in self.totals]
        for request, (before, _) in enumerate(self.case.lengths):
            page, offset = self.places(request, 0, before)
            pool.keys(LAYER)[page, offset] = self.index_rows[request][:before]
        return KVPools(mla=plain.mla, caches={INDEX_KEYS: pool})

    def select(self, batch: ForwardBatch) -> SelectedRows:
        """What the backend selects, judged: as many rows as there should be, and none with a lower score than one that
        was left out. Scores that differ by rounding alone may change places."""
        hook = bind_hook(self.backend, "select", optional_hooks()["select"], ())
        if hook is None:
            raise Wrong("it claims sparse layers, and has no select")
        rows = batch.num_tokens
        q = self.normal(sum(self.new), self.index.heads, self.index.head_dim)
        weights = self.normal(sum(self.new), self.index.heads).float()
        keys = self.new_rows(self.index_rows)
        with zero_by_chance_is_nan(self.device):
            found = hook(IndexInputs(tail(q, rows), tail(keys, rows), tail(weights, rows)), self.layer, batch)
        if not isinstance(found, SelectedPositions | SelectedSlots):
            raise Wrong(f"select returned {type(found).__name__}, not SelectedPositions or SelectedSlots")
        self.chosen = self._judge(found, q.double().cpu(), weights.double().cpu())
        return found

    def _judge(self, found: SelectedRows, q: Tensor, weights: Tensor) -> list[list[int]]:
        tensor = found.positions if isinstance(found, SelectedPositions) else found.slots
        if tensor.dtype is not torch.int32 or not (tensor[sum(self.new) :] == -1).all():
            raise Wrong(f"select gave {tensor.dtype}, or rows of padding that are not -1; give torch.int32")
        chosen: list[list[int]] = []
        for request, (before, new) in enumerate(self.case.lengths):
            keys = self.index_rows[request].double().cpu()
            pages, offsets = self.places(request, 0, self.totals[request])
            slots = {slot: row for row, slot in enumerate((pages * self.page_size + offsets).tolist())}
            for position in range(before, before + new):
                token, place = len(chosen), f"request {request}, token {position}"
                row = tensor[token].tolist()
                live = [value for value in row if value >= 0]
                mine = live if isinstance(found, SelectedPositions) else [slots.get(value, -1) for value in live]
                wanted = min(self.index.topk, position + 1)
                if row[: len(live)] != live:
                    raise Wrong(f"select put -1 before a row that it chose ({place}); -1 follows the last")
                if len(set(mine)) != wanted or len(mine) != wanted or not all(0 <= each <= position for each in mine):
                    right = f"{wanted} distinct ones from 0 to {position}"
                    raise Wrong(f"select chose rows {sorted(mine)} ({place}), and not {right}")
                scores = weights[token] @ torch.relu(q[token] @ keys[: position + 1].T * self.index.scale)
                best = scores.sort(descending=True).values[:wanted]
                short = float((best - scores[mine].sort(descending=True).values).max() / scores.abs().max())
                if not short <= self.tolerance:
                    raise Wrong(f"select chose rows whose scores fall short of the best by {short:.1e} ({place})")
                chosen.append(sorted(mine))
        return chosen

    def wanted_sparse(self) -> Tensor:
        """Attention to the chosen rows alone."""
        requests = [request for request, new in enumerate(self.new) for _ in range(new)]
        outs = []
        for query, request, chosen in zip(self.q, requests, self.chosen, strict=True):
            keys, values = (rows[chosen] for rows in self.stored(request))
            outs.append(attention(query[None], keys, values, Rules(self.layer.scale, aligned="none"))[0])
        return torch.cat(outs)


def _sparse(stand: Stand) -> None:
    scene = SparseScene(stand.subject, stand.case)
    batch = scene.plan(scene.batch())
    selected = scene.select(batch)
    out = scene.forward(batch, extras=ForwardExtras(selected=selected))
    check_result(scene, out, batch.num_tokens)
    wanted = scene.wanted_sparse()
    error = relative_error(out[: len(wanted)], wanted)
    if not error <= scene.tolerance:
        whole = relative_error(out[: len(wanted)], scene.wanted()[0])
        if whole <= scene.tolerance:
            raise Wrong("it attended to all rows, and not to those that were selected")
        raise Wrong(f"attention to the selected rows is wrong by {error:.1e} where {scene.tolerance:.0e} is allowed")
    check_padding(out, len(wanted))
    stand.measured.append(Measured(len(wanted), max(scene.totals), error, scene.tolerance, 0.0, 0.0))


def _not_given(stand: Stand) -> None:
    scene = SparseScene(stand.subject, stand.case)
    batch = scene.plan(scene.batch())
    try:
        scene.forward(batch)
    except Exception:
        return
    raise Wrong("a sparse layer was given no extras.selected, and it attended all the same")


def sparse_checks() -> Iterator[Check]:
    shapes: dict[str, tuple[tuple[tuple[int, int], ...], ForwardMode, int]] = {
        "extend": (((3, 4), (30, 5), (0, 12)), EXTEND, 0),
        "decode": (((7, 1), (8, 1), (40, 1), (0, 1)), DECODE, 0),
        "padding": (((7, 2), (30, 3)), EXTEND, 3),
    }
    for name, (lengths, mode, padding) in shapes.items():
        yield Check(
            f"mla.sparse.{name}",
            "sparse",
            "the rows of the largest scores are selected, and attended to",
            _case(lengths, mode, padding),
            _sparse,
            True,
        )
    yield Check(
        "mla.sparse.not_given",
        "sparse",
        "a sparse layer without selected rows is an error",
        _case(((7, 2), (30, 3)), EXTEND),
        _not_given,
    )


def _case(lengths: tuple[tuple[int, int], ...], mode: ForwardMode, padding: int = 0) -> Callable[[int, int], Case]:
    """Small where a CPU runs it, and of a model's size where kernels do."""

    def case(p: int, longest: int) -> Case:
        large = longest > 2000
        mine = tuple((8 * before, new) for before, new in lengths) if large else lengths
        index = IndexerDims(heads=32, head_dim=128, topk=64) if large else INDEX
        return Case(mine, mode, AttentionKind.MLA, index=index, extras=frozenset({"selected"}), padding=padding)

    return case
