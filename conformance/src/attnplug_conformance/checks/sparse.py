"""Sparse MLA: what a backend selects by its index, and that it attends to what was selected and to nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attnplug import AttentionKind, DType, ForwardBatch, ForwardExtras, ForwardMode, GraphLevel, LayerSpec
from attnplug.contract.backend import optional_hooks
from attnplug.contract.hooks import bind_hook
from attnplug.host import KVPools
from attnplug.sparse import IndexerDims, IndexInputs, SelectedPositions, SelectedRows, SelectedSlots
from attnplug_conformance.arithmetic import NAN, as_bytes, poison, relative_error, tail, zero_by_chance_is_nan
from attnplug_conformance.case import LAYER, Case
from attnplug_conformance.check import Check, Measured, Stand
from attnplug_conformance.checks.graphs import Capture, graphs_claimed, others
from attnplug_conformance.diagnosis import Wrong, check_padding, check_result, wrong_when
from attnplug_conformance.packed import index_keys_in_fp8, put_index_keys
from attnplug_conformance.reference import Rules, ancestors, attention
from attnplug_conformance.scene import Scene
from attnplug_sparse.pools import INDEX_KEYS, IndexKeyPool

EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
INDEX = IndexerDims(heads=8, head_dim=16, topk=8)
FOREST = ((-1, 0, 0, 1, 2, 2), (-1, -1, 1, 1, 0, 3), (-1, 0, 1, 2, 3, 3), (-1, 0, 1, 0, -1, 2))
"""Trees of drafts. In some, rows see fewer rows than the index chooses, where the prefix is short."""


class SparseScene(Scene):
    """Requests with index keys beside their rows, poisoned alike."""

    queries: tuple[Tensor, Tensor] | None = None
    """Queries of the index, and their weights."""

    def _pools(self, healed: str | None) -> KVPools:
        plain = super()._pools(healed)
        assert self.case.dtype is not None and self.case.index is not None
        self.index = self.case.index
        pool = IndexKeyPool(
            self.case.layers,
            num_pages=self.num_pages,
            page_size=self.page_size,
            dtype=self.case.index_dtype or self.case.dtype,
            device=self.device,
        )
        for layer_id in pool.layer_ids:
            poison(pool.keys(layer_id))
        self.index_rows = [self.normal(total, self.index.head_dim) for total in self.totals]
        fp8 = self.case.index_dtype is DType.FLOAT8_E4M3
        if fp8:  # keys whose scales differ
            sizes = [torch.exp2((torch.arange(total) % 5 - 2).float()) for total in self.totals]
            scaled = zip(self.index_rows, sizes, strict=True)
            self.index_rows = [(rows * size[:, None].to(self.device)).to(self.dtype) for rows, size in scaled]
        for request, (before, _) in enumerate(self.case.lengths):
            page, offset = self.places(request, 0, before)
            if fp8:
                put_index_keys(pool.keys(LAYER), page, offset, self.index_rows[request][:before])
            else:
                pool.keys(LAYER)[page, offset] = self.index_rows[request][:before]
        return KVPools(mla=plain.mla, caches={**plain.caches, INDEX_KEYS: pool})

    @property
    def short_of_best(self) -> float:
        """Tolerance of a selected score. Kernels that read fp8 keys may also round their queries to fp8."""
        return 5e-2 if self.case.index_dtype is DType.FLOAT8_E4M3 else self.tolerance

    def hook(self) -> Callable[[IndexInputs, LayerSpec, ForwardBatch], SelectedRows]:
        found = bind_hook(self.backend, "select", optional_hooks()["select"], ())
        if found is None:
            raise Wrong("it claims sparse layers, and has no select")
        return found

    def index_inputs(self, rows: int) -> IndexInputs:
        """Index inputs of the new tokens in ``rows`` rows, with NaN for padding."""
        if self.queries is None:
            tokens, heads = sum(self.new), self.index.heads
            q, weights = self.normal(tokens, heads, self.index.head_dim), self.normal(tokens, heads).float()
            # With weights of one sign larger keys win, and these are larger by their scales.
            self.queries = q, weights.abs() if self.case.index_dtype is DType.FLOAT8_E4M3 else weights
        q, weights = self.queries
        return IndexInputs(tail(q, rows), tail(self.new_rows(self.index_rows), rows), tail(weights, rows))

    def select(self, batch: ForwardBatch) -> SelectedRows:
        """Return the backend's selection after checking it."""
        hook = self.hook()
        with zero_by_chance_is_nan(self.device):
            found = hook(self.index_inputs(batch.num_tokens), self.layer, batch)
        return self.check_selection(found)

    def check_selection(self, found: object) -> SelectedRows:
        """A selection of as many rows as there should be, and none with a lower score than one that was left out.
        Scores that differ by rounding alone may change places."""
        if not isinstance(found, SelectedPositions | SelectedSlots):
            raise Wrong(f"select returned {type(found).__name__}, not SelectedPositions or SelectedSlots")
        assert self.queries is not None
        self.chosen = self._check_chosen(found, *(each.double().cpu() for each in self.queries))
        return found

    def _check_chosen(self, found: SelectedRows, q: Tensor, weights: Tensor) -> list[list[int]]:
        tensor = found.positions if isinstance(found, SelectedPositions) else found.slots
        if tensor.dtype is not torch.int32:
            raise Wrong(f"select gave {tensor.dtype}; it must be torch.int32")
        if tensor.dim() != 2 or len(tensor) < sum(self.new):
            raise Wrong(
                f"select gave shape {tuple(tensor.shape)}; it must be (rows of the batch, rows that are chosen)"
            )
        if tensor.device != self.q.device:
            raise Wrong(f"select gave a choice on {tensor.device}, but q is on {self.q.device}")
        if not (tensor[sum(self.new) :] == -1).all():
            raise Wrong("select chose rows for padding; a row of padding has -1 everywhere")
        chosen: list[list[int]] = []
        for request, (before, new) in enumerate(self.case.lengths):
            keys = self.index_rows[request].cpu()
            keys = (index_keys_in_fp8(keys) if self.case.index_dtype is DType.FLOAT8_E4M3 else keys).double()
            pages, offsets = self.places(request, 0, self.totals[request])
            slots = {slot: row for row, slot in enumerate((pages * self.page_size + offsets).tolist())}
            for position in range(before, before + new):
                token, place = len(chosen), f"request {request}, token {position}"
                seen, row = self.seen(request, position), tensor[token].tolist()
                live = [value for value in row if value >= 0]
                mine = live if isinstance(found, SelectedPositions) else [slots.get(value, -1) for value in live]
                wanted = min(self.index.topk, len(seen))
                if row[: len(live)] != live:
                    raise Wrong(f"select put -1 before a row that it chose ({place}); -1 follows the last")
                if len(set(mine)) != wanted or len(mine) != wanted or not set(mine) <= set(seen):
                    self._raise_bad_choice(request, position, place, mine, wanted)
                scores = weights[token] @ torch.relu(q[token] @ keys.T * self.index.scale)
                best = scores[seen].sort(descending=True).values[:wanted]
                short = float((best - scores[mine].sort(descending=True).values).max() / scores[seen].abs().max())
                if not short <= self.short_of_best:
                    raise Wrong(f"select chose rows whose scores fall short of the best by {short:.1e} ({place})")
                chosen.append(sorted(mine))
        return chosen

    def _raise_bad_choice(self, request: int, position: int, place: str, mine: list[int], wanted: int) -> None:
        """Raise :class:`Wrong` for a choice of too few rows, of one twice, or of one that the token does not see."""
        before = self.case.lengths[request][0]
        if self.case.trees is not None:
            drafted = sorted({row for row in mine if row >= before} - set(self.seen(request, position)))
            if drafted:
                raise Wrong(
                    f"select chose rows {drafted} ({place}), drafts that are no ancestors of it: a row of a tree "
                    f"chooses from the prefix, itself and its ancestors, {self.seen(request, position)[before:]}"
                )
        right = f"{wanted} distinct ones of those that it sees, up to {position}"
        raise Wrong(f"select chose rows {sorted(mine)} ({place}), and not {right}")

    def seen(self, request: int, position: int) -> list[int]:
        """The positions that a new token of a request sees, in ascending order."""
        before, trees = self.case.lengths[request][0], self.case.trees
        if trees is None:
            return [*range(position + 1)]
        return [*range(before), *(before + row for row in ancestors(trees[request], position - before))]

    def wanted_sparse(self) -> tuple[Tensor, Tensor]:
        """Attention to the chosen rows alone, and its log-sum-exp."""
        requests = [request for request, new in enumerate(self.new) for _ in range(new)]
        found = []
        for query, request, chosen in zip(self.q, requests, self.chosen, strict=True):
            keys, values = (rows[chosen] for rows in self.stored(request))
            found.append(attention(query[None], keys, values, Rules(self.layer.scale, aligned="none")))
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def check_sparse(stand: Stand, scene: SparseScene, *, lse: bool = False, out: bool = False) -> None:
    """Plan, select and attend; raises :class:`Wrong` unless the result is float64's over the chosen rows."""
    batch = scene.plan(scene.batch())
    selected, rows, heads = scene.select(batch), batch.num_tokens, scene.layer.num_heads
    sums = torch.full((rows, heads), NAN, device=scene.device) if lse else None
    given = torch.full((rows, heads, scene.widths[1]), NAN, dtype=scene.dtype, device=scene.device) if out else None
    result = scene.forward(batch, extras=ForwardExtras(selected=selected, lse=sums, out=given))
    check_result(scene, result, rows)
    if given is not None and result.data_ptr() != given.data_ptr():
        raise Wrong("the result is in other memory than extras.out")
    check_selected(stand, scene, result, sums)


def check_selected(stand: Stand, scene: SparseScene, result: Tensor, sums: Tensor | None = None) -> None:
    """Raise :class:`Wrong` unless a result is float64's over the rows that were chosen."""
    wanted, wanted_lse = scene.wanted_sparse()
    error = relative_error(result[: len(wanted)], wanted)
    if not error <= scene.tolerance:
        whole = relative_error(result[: len(wanted)], scene.wanted()[0])
        if whole <= scene.tolerance:
            raise Wrong("it attended to all rows, and not to those that were selected")
        raise Wrong(f"attention to the selected rows is wrong by {error:.1e} where {scene.tolerance:.0e} is allowed")
    check_padding(result, len(wanted))
    if sums is not None:
        wrong = relative_error(sums[: len(wanted)], wanted_lse)
        if not wrong <= max(scene.tolerance, 1e-5):
            raise Wrong(f"the log-sum-exp over the selected rows is wrong by {wrong:.1e}; it is natural")
        if not (sums[len(wanted) :] == float("-inf")).all():
            raise Wrong("the log-sum-exp of rows of padding is not -inf: such a row sees no key")
    stand.measured.append(Measured(len(wanted), max(scene.totals), error, scene.tolerance, 0.0, 0.0))


def _sparse(stand: Stand) -> None:
    check_sparse(stand, SparseScene(stand.subject, stand.case))


def _with_lse(stand: Stand) -> None:
    check_sparse(stand, SparseScene(stand.subject, stand.case), lse=True)


def _with_out(stand: Stand) -> None:
    check_sparse(stand, SparseScene(stand.subject, stand.case), out=True)


class SparseCapture(Capture):
    """A captured batch that selects and attends."""

    def __init__(self, scene: SparseScene) -> None:
        super().__init__(scene)
        self.select, given = scene.hook(), scene.index_inputs(sum(scene.new))
        assert given.k is not None
        q, k, weights = (torch.zeros_like(each) for each in (given.q, given.k, given.weights))
        self.index = IndexInputs(q, k, weights)

    def run(self) -> None:
        scene = self.scene
        forward = scene.backend.forward_decode if scene.case.mode is DECODE else scene.backend.forward_extend
        with zero_by_chance_is_nan(scene.device):
            self.attention.refill(self.batch)
            self.selected = self.select(self.index, scene.layer, self.batch)
            extras = ForwardExtras(selected=self.selected)
            self.out = forward(self.q, self.k, self.v, scene.layer, self.batch, extras=extras)

    def put(self, other: Scene) -> None:
        super().put(other)
        assert isinstance(other, SparseScene)
        memory, theirs = (scene.pools.cache(INDEX_KEYS).keys(LAYER) for scene in (self.scene, other))
        poison(memory)
        as_bytes(memory)[: len(theirs)] = as_bytes(theirs)
        given = other.index_inputs(self.batch.num_tokens)
        assert given.k is not None and self.index.k is not None
        for target, source in ((self.index.q, given.q), (self.index.k, given.k), (self.index.weights, given.weights)):
            target.copy_(source)


def _replays(stand: Stand) -> None:
    scene = SparseScene(stand.subject, stand.case)
    capture = SparseCapture(scene)
    capture.reserve().capture()
    for other in others(stand, scene):
        capture.put(other)
        out = capture.replay()
        with wrong_when("a replay with other lengths and pages"):
            other.check_selection(capture.selected)
            check_selected(stand, other, out)


def _not_given(stand: Stand) -> None:
    scene = SparseScene(stand.subject, stand.case)
    batch = scene.plan(scene.batch())
    try:
        scene.forward(batch)
    except Exception:
        return
    raise Wrong("a sparse layer was given no extras.selected, and it attended all the same")


def sparse_checks() -> Iterator[Check]:
    chosen = "it selects the best rows by its index, and attends to these alone"
    packed = "the selected rows of fp8_ds_mla are read by scales of their own, one for every 128 values"
    scaled = "index keys in fp8 are read and written by their scales, one for each key"
    plain, mixed = ((7, 2), (30, 3)), ((3, 4), (30, 5), (0, 12))
    decode = ((7, 1), (8, 1), (40, 1), (0, 1))
    rows: tuple[tuple[str, str, str, Callable[[int, int], Case], Callable[[Stand], None]], ...] = (
        ("extend", "sparse", chosen, sparse_case(mixed, EXTEND), _sparse),
        ("decode", "sparse", chosen, sparse_case(decode, DECODE), _sparse),
        ("verify", "sparse", chosen, sparse_case(((12, 3), (30, 3)), VERIFY), _sparse),
        ("trees", "trees", "a row of a drafted tree chooses from the prefix, itself and its ancestors",
         sparse_case(((3, 6), (1, 6), (30, 6)), VERIFY, trees=FOREST[:3]), _sparse),
        *((str(dtype), "sparse", f"{chosen}, in {dtype}", sparse_case(plain, EXTEND, dtype=dtype), _sparse)
          for dtype in (DType.FLOAT16, DType.BFLOAT16)),
        ("padding", "sparse", chosen, sparse_case(plain, EXTEND, padding=3), _sparse),
        ("not_given", "sparse", "a sparse layer without selected rows is an error", sparse_case(plain, EXTEND),
         _not_given),
        ("lse", "lse", "the log-sum-exp is over the selected rows", sparse_case(plain, EXTEND, "lse", padding=3),
         _with_lse),
        ("out", "out", "the result is written to the caller's memory", sparse_case(plain, EXTEND, "out"), _with_out),
        ("fp8_ds_mla.extend", "mla fp8_ds_mla", packed, sparse_case(mixed, EXTEND, kv_dtype=DType.FP8_DS_MLA),
         _sparse),
        ("fp8_ds_mla.decode", "mla fp8_ds_mla", packed, sparse_case(decode, DECODE, kv_dtype=DType.FP8_DS_MLA),
         _sparse),
        ("fp8_index.extend", "fp8 index keys", scaled, sparse_case(plain, EXTEND, index_dtype=DType.FLOAT8_E4M3),
         _sparse),
        ("fp8_index.decode", "fp8 index keys", scaled, sparse_case(decode, DECODE, index_dtype=DType.FLOAT8_E4M3),
         _sparse),
    )  # fmt: skip
    yield Check(
        "mla.sparse.bounds",
        "mla bounds",
        "a sparse decode is planned right where the host has upper bounds of its lengths only",
        sparse_case(decode, DECODE, exact=False),
        _sparse,
    )
    for name, mode, new, level, trees in (
        ("decode", DECODE, 1, GraphLevel.DECODE, None),
        ("verify", VERIFY, 3, GraphLevel.UNIFORM, None),
        ("trees", VERIFY, 4, GraphLevel.UNIFORM, tuple(tree[:4] for tree in FOREST)),
    ):
        yield Check(
            f"mla.sparse.graph.{name}",
            "graphs",
            "a captured batch selects and attends anew at each replay, with other lengths, pages and trees",
            sparse_case(((60, new),) * 4, mode, graph=level, trees=trees),
            _replays,
            applies=graphs_claimed(level, trees=trees is not None),
        )
    for name, claim, says, case, run in rows:
        yield Check(
            f"mla.sparse.{name}",
            claim,
            says,
            case,
            run,
            claim not in ("lse", "out") and name not in ("verify", "not_given"),
        )


def sparse_case(
    lengths: tuple[tuple[int, int], ...], mode: ForwardMode, *extras: str, **changes: Any
) -> Callable[[int, int], Case]:
    """Small where a CPU runs it, and of a model's size where kernels do."""

    def case(p: int, longest: int) -> Case:
        large = longest > 2000
        mine = tuple((8 * before, new) for before, new in lengths) if large else lengths
        index = IndexerDims(heads=32, head_dim=128, topk=64) if large else INDEX
        needed = frozenset({"selected", *extras})
        return Case(mine, mode, AttentionKind.MLA, index=index, extras=needed, **changes)

    return case
