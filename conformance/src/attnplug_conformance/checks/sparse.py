"""Checks of sparse MLA: the backend's selection by its index, and attention to exactly the selected rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from attnplug import AttentionKind, DType, ForwardBatch, ForwardExtras, ForwardMode, GraphLevel, LayerSpec
from attnplug.contract.backend import bind_optional_hook
from attnplug.host import KVPools, ModelAttention
from attnplug.sparse import IndexerDims, IndexInputs, SelectedPositions, SelectedRows, SelectedSlots
from attnplug_conformance.arithmetic import NAN, as_bytes, pad_rows, poison, relative_error, uninitialized_as_nan
from attnplug_conformance.case import LAYER, Case
from attnplug_conformance.check import Check, CheckContext, Measured
from attnplug_conformance.checks.graphs import Capture, others, requires_graphs
from attnplug_conformance.diagnosis import check_padding, check_result, locate
from attnplug_conformance.failure import CheckFailure, failure_prefix
from attnplug_conformance.reference import Rules, ancestors, attention
from attnplug_conformance.scene import Scene
from attnplug_conformance.stored_rows import StoredRows, coded_formats, format_of
from attnplug_sparse.pools import INDEX_KEYS, IndexKeyPool, index_format

EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
INDEX = IndexerDims(heads=8, head_dim=16, topk=8)
FOREST = ((-1, 0, 0, 1, 2, 2), (-1, -1, 1, 1, 0, 3), (-1, 0, 1, 2, 3, 3), (-1, 0, 1, 0, -1, 2))
"""Draft trees. With a short prefix, some rows see fewer rows than top-k."""


class SparseScene(Scene):
    """Scene with index keys, poisoned like the rows."""

    queries: tuple[Tensor, Tensor] | None = None
    """Index queries and their weights."""

    def _pools(self, zero_region: str | None) -> KVPools:
        plain = super()._pools(zero_region)
        assert self.case.dtype is not None and self.case.index is not None
        self.index = self.case.index
        pool = IndexKeyPool(
            self.case.layers,
            num_pages=self.num_pages,
            page_size=self.page_size,
            dtype=format_of(self.case.index_dtype or self.case.dtype),
            device=self.device,
        )
        self.stored_keys = StoredRows(index_format(format_of(pool.dtype)), self.index.head_dim)
        for layer_id in pool.layer_ids:
            poison(pool.keys(layer_id))
        self.index_rows = [self.normal(total, self.index.head_dim) for total in self.totals]
        if self.index_coded:  # keys whose scales differ
            sizes = [torch.exp2((torch.arange(total) % 5 - 2).float()) for total in self.totals]
            scaled = zip(self.index_rows, sizes, strict=True)
            self.index_rows = [(rows * size[:, None].to(self.device)).to(self.dtype) for rows, size in scaled]
        self.share(self.index_rows)
        for request, (before, _) in enumerate(self.case.lengths):
            page, offset = self.places(request, 0, before)
            cells = self.stored_keys.encode(self.index_rows[request][:before].unsqueeze(1))
            for memory, part in zip(pool.parts(LAYER), cells, strict=True):
                as_bytes(memory)[page, offset] = as_bytes(part)
        return KVPools(mla=plain.mla, caches={**plain.caches, INDEX_KEYS: pool})

    @property
    def index_coded(self) -> bool:
        """True if index keys are not stored as they are."""
        return self.stored_keys.format.codec is not None

    @property
    def score_tolerance(self) -> float:
        """Tolerance of a selected score. Kernels that read coded keys may also round their queries so."""
        return max(self.tolerance, self.stored_keys.format.error) if self.index_coded else self.tolerance

    def hook(self) -> Callable[[IndexInputs, LayerSpec, ForwardBatch], SelectedRows]:
        found = bind_optional_hook(self.backend, "select")
        if found is None:
            raise CheckFailure("it claims sparse layers but has no select")
        return found

    def index_inputs(self, rows: int) -> IndexInputs:
        """Index inputs of the new tokens in ``rows`` rows, with NaN for padding."""
        if self.queries is None:
            tokens, heads = sum(self.new), self.index.heads
            q, weights = self.normal(tokens, heads, self.index.head_dim), self.normal(tokens, heads).float()
            # Non-negative weights favour large keys, so that ignoring the scales changes the selection.
            self.queries = q, weights.abs() if self.index_coded else weights
        q, weights = self.queries
        return IndexInputs(pad_rows(q, rows), pad_rows(self.new_rows(self.index_rows), rows), pad_rows(weights, rows))

    def select(self, batch: ForwardBatch) -> SelectedRows:
        """Return the backend's selection after checking it."""
        hook = self.hook()
        with uninitialized_as_nan(self.device):
            found = hook(self.index_inputs(batch.num_tokens), self.layer, batch)
        return self.check_selection(found)

    def check_selection(self, found: object) -> SelectedRows:
        """Check that a selection has the right number of rows and the best scores.

        Rows whose scores differ only by rounding are interchangeable.
        """
        if not isinstance(found, SelectedPositions | SelectedSlots):
            raise CheckFailure(f"select returned {type(found).__name__}, not SelectedPositions or SelectedSlots")
        assert self.queries is not None
        self.chosen = self._check_chosen(found, *(each.double().cpu() for each in self.queries))
        return found

    def _check_chosen(self, found: SelectedRows, q: Tensor, weights: Tensor) -> list[list[int]]:
        tensor = found.positions if isinstance(found, SelectedPositions) else found.slots
        if tensor.dtype is not torch.int32:
            raise CheckFailure(f"select returned {tensor.dtype}, not torch.int32")
        if tensor.dim() != 2 or len(tensor) < sum(self.new):
            raise CheckFailure(f"select returned shape {tuple(tensor.shape)}, not (rows of the batch, selected rows)")
        if tensor.device != self.q.device:
            raise CheckFailure(f"select returned a tensor on {tensor.device}, but q is on {self.q.device}")
        if not (tensor[sum(self.new) :] == -1).all():
            raise CheckFailure("select chose rows for padding; a padding row must be all -1")
        chosen: list[list[int]] = []
        for request, (before, new) in enumerate(self.case.lengths):
            keys = self.stored_keys.read_back(self.index_rows[request].cpu().unsqueeze(1)).squeeze(1).double()
            pages, offsets = self.places(request, 0, self.totals[request])
            slots = {slot: row for row, slot in enumerate((pages * self.page_size + offsets).tolist())}
            for position in range(before, before + new):
                token, place = len(chosen), f"request {request}, token {position}"
                seen, row = self.seen(request, position), tensor[token].tolist()
                live = [value for value in row if value >= 0]
                selected = live if isinstance(found, SelectedPositions) else [slots.get(value, -1) for value in live]
                wanted = min(self.index.topk, len(seen))
                if row[: len(live)] != live:
                    raise CheckFailure(f"select put -1 before a selected row ({place}); -1 must follow the last one")
                if len(set(selected)) != wanted or len(selected) != wanted or not set(selected) <= set(seen):
                    self._raise_bad_choice(request, position, place, selected, wanted)
                scores = weights[token] @ torch.relu(q[token] @ keys.T * self.index.scale)
                best = scores[seen].sort(descending=True).values[:wanted]
                largest = scores[seen].abs().max().clamp(min=1e-30)  # all are zero if no head sees a row
                short = float((best - scores[selected].sort(descending=True).values).max() / largest)
                if not short <= self.score_tolerance:
                    raise CheckFailure(
                        f"select chose rows whose scores fall short of the best by {short:.1e} ({place})"
                    )
                chosen.append(sorted(selected))
        return chosen

    def _raise_bad_choice(self, request: int, position: int, place: str, selected: list[int], wanted: int) -> None:
        """Raise :class:`CheckFailure` for a selection with missing, duplicate or invisible rows."""
        before = self.case.lengths[request][0]
        if self.case.trees is not None:
            drafted = sorted({row for row in selected if row >= before} - set(self.seen(request, position)))
            if drafted:
                raise CheckFailure(
                    f"select chose rows {drafted} ({place}), draft tokens that are not its ancestors; a tree row "
                    f"selects from the prefix, itself and its ancestors, {self.seen(request, position)[before:]}"
                )
        right = f"{wanted} distinct visible rows, up to {position}"
        raise CheckFailure(f"select chose rows {sorted(selected)} ({place}), not {right}")

    def seen(self, request: int, position: int) -> list[int]:
        """Positions that a new token of a request sees, in ascending order."""
        before, trees = self.case.lengths[request][0], self.case.trees
        if trees is None:
            return [*range(position + 1)]
        return [*range(before), *(before + row for row in ancestors(trees[request], position - before))]

    def wanted_sparse(self, *, fill: bool = False) -> tuple[Tensor, Tensor]:
        """Expected attention to the selected rows, and its log-sum-exp. ``fill``: a mistake, with row 0 for each -1."""
        requests = [request for request, new in enumerate(self.new) for _ in range(new)]
        found = []
        for query, request, chosen in zip(self.q, requests, self.chosen, strict=True):
            none = [0] * (self.index.topk - len(chosen)) if fill else []
            keys, values = (rows[[*chosen, *none]] for rows in self.stored(request))
            found.append(attention(query[None], keys, values, Rules(self.layer.scale, aligned="none")))
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def check_sparse(context: CheckContext, scene: SparseScene, *, lse: bool = False, out: bool = False) -> None:
    """Plan, select and attend. Raises :class:`CheckFailure` if the result differs from float64 over these rows."""
    batch = scene.plan(scene.batch())
    selected, rows, heads = scene.select(batch), batch.num_tokens, scene.layer.num_heads
    sums = torch.full((rows, heads), NAN, device=scene.device) if lse else None
    given = torch.full((rows, heads, scene.widths[1]), NAN, dtype=scene.dtype, device=scene.device) if out else None
    result = scene.forward(batch, extras=ForwardExtras(selected=selected, lse=sums, out=given))
    check_result(scene, result, rows)
    if given is not None and result.data_ptr() != given.data_ptr():
        raise CheckFailure("the result is not in extras.out")
    check_selected(context, scene, result, sums)


def check_selected(context: CheckContext, scene: SparseScene, result: Tensor, sums: Tensor | None = None) -> None:
    """Raise :class:`CheckFailure` unless a result agrees with float64 over the selected rows."""
    wanted, wanted_lse = scene.wanted_sparse()
    error = relative_error(result[: len(wanted)], wanted)
    if not error <= scene.tolerance:
        whole = relative_error(result[: len(wanted)], scene.wanted()[0])
        if whole <= scene.tolerance:
            raise CheckFailure("it attended to all rows, not to the selected ones")
        if relative_error(result[: len(wanted)], scene.wanted_sparse(fill=True)[0]) <= scene.tolerance:
            raise CheckFailure("it attended to the request's first row for each -1 among the selected rows; skip them")
        first = "first at {}{}".format(*locate(scene, result[: len(wanted)], wanted))
        raise CheckFailure(
            f"attention to the selected rows is wrong by {error:.2e}; {scene.tolerance:.2e} is allowed, {first}"
        )
    check_padding(result, len(wanted))
    if sums is not None:
        lse_error = relative_error(sums[: len(wanted)], wanted_lse)
        if not lse_error <= max(scene.tolerance, 1e-5):
            raise CheckFailure(
                f"the log-sum-exp over the selected rows is wrong by {lse_error:.1e}; it must be natural"
            )
        if not (sums[len(wanted) :] == float("-inf")).all():
            raise CheckFailure("the log-sum-exp of padding rows is not -inf; a padding row sees no key")
    context.measured.append(Measured(len(wanted), max(scene.totals), error, scene.tolerance, 0.0, 0.0))


def _sparse(context: CheckContext) -> None:
    check_sparse(context, SparseScene(context.subject, context.case))


def _with_lse(context: CheckContext) -> None:
    check_sparse(context, SparseScene(context.subject, context.case), lse=True)


def _with_out(context: CheckContext) -> None:
    check_sparse(context, SparseScene(context.subject, context.case), out=True)


class SparseCapture(Capture):
    """A captured batch with selection and attention."""

    def __init__(
        self,
        scene: SparseScene,
        attention: ModelAttention | None = None,
        requests: int | None = None,
        rows: int | None = None,
    ) -> None:
        super().__init__(scene, 0, attention, requests, rows)
        self.select, given = scene.hook(), scene.index_inputs(sum(scene.new))
        assert given.k is not None
        q, k, weights = (torch.zeros_like(each[: len(self.q)]) for each in (given.q, given.k, given.weights))
        self.index = IndexInputs(q, k, weights)

    def run(self) -> None:
        scene = self.scene
        forward = scene.backend.forward_decode if scene.case.mode is DECODE else scene.backend.forward_extend
        with uninitialized_as_nan(scene.device):
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


def _replays(context: CheckContext) -> None:
    scene = SparseScene(context.subject, context.case)
    capture = SparseCapture(scene)
    capture.reserve().capture()
    for other in others(context, scene):
        capture.put(other)
        out = capture.replay()
        with failure_prefix("a replay with other lengths and pages"):
            other.check_selection(capture.selected)
            check_selected(context, other, out)


def _no_selection(context: CheckContext) -> None:
    scene = SparseScene(context.subject, context.case)
    batch = scene.plan(scene.batch())
    try:
        scene.forward(batch)
    except Exception:
        return
    raise CheckFailure("it ran a sparse layer without extras.selected")


def sparse_checks() -> Iterator[Check]:
    chosen = "it selects the best rows by its index, and attends only to these"
    packed, scaled = (
        "selected {} rows are read with their scales",
        "{} index keys are read and written with their scales",
    )
    plain, mixed = ((7, 2), (30, 3)), ((3, 4), (30, 5), (0, 12))
    decode = ((7, 1), (8, 1), (40, 1), (0, 1), (2, 1))
    rows: tuple[tuple[str, str, str, Callable[[int, int], Case], Callable[[CheckContext], None]], ...] = (
        ("extend", "sparse", chosen, sparse_case(mixed, EXTEND), _sparse),
        ("decode", "sparse", chosen, sparse_case(decode, DECODE), _sparse),
        ("extend.many_rows", "sparse", chosen, sparse_case(((3, 66),), EXTEND), _sparse),
        ("decode.long", "sparse", chosen, sparse_case(((300, 1), (601, 1)), DECODE), _sparse),
        ("verify", "sparse", chosen, sparse_case(((12, 3), (30, 3)), VERIFY), _sparse),
        ("trees", "trees", "a row of a draft tree selects from the prefix, itself and its ancestors",
         sparse_case(((3, 6), (1, 6), (30, 6)), VERIFY, trees=FOREST[:3]), _sparse),
        *((str(dtype), "sparse", f"{chosen}, in {dtype}", sparse_case(plain, EXTEND, dtype=dtype), _sparse)
          for dtype in (DType.FLOAT16, DType.BFLOAT16)),
        ("padding", "sparse", chosen, sparse_case(plain, EXTEND, padding=3), _sparse),
        ("not_given", "sparse", "a sparse layer without selected rows is an error", sparse_case(plain, EXTEND),
         _no_selection),
        ("lse", "lse", "the log-sum-exp is over the selected rows", sparse_case(plain, EXTEND, "lse", padding=3),
         _with_lse),
        ("out", "out", "the result is written to the caller's memory", sparse_case(plain, EXTEND, "out"), _with_out),
        *((f"{each}.{mode}", f"mla {each}", packed.format(each),
           sparse_case(lengths, mode, kv_dtype=each.name), _sparse)
          for each in coded_formats("mla") if each.in_bytes for lengths, mode in ((mixed, EXTEND), (decode, DECODE))),
        *((f"{each}_index.{mode}", f"{each} index keys", scaled.format(each),
           sparse_case(lengths, mode, index_dtype=each.name), _sparse)
          for each in coded_formats("index") for lengths, mode in ((plain, EXTEND), (decode, DECODE))),
    )  # fmt: skip
    yield Check(
        "mla.sparse.bounds",
        "mla bounds",
        "a sparse decode is planned right if the host knows only upper bounds of its lengths",
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
            "each replay of a captured batch selects and attends with its own lengths, pages and trees",
            sparse_case(((60, new),) * 4, mode, graph=level, trees=trees),
            _replays,
            applies=requires_graphs(level, trees=trees is not None),
        )
    for name, claim, requirement, case, run in rows:
        yield Check(
            f"mla.sparse.{name}",
            claim,
            requirement,
            case,
            run,
            name not in ("verify", "not_given", "extend.many_rows", "decode.long"),
        )


def sparse_case(
    lengths: tuple[tuple[int, int], ...], mode: ForwardMode, *extras: str, **changes: Any
) -> Callable[[int, int], Case]:
    """Return a case with small sizes on a CPU and a model's sizes on a GPU."""

    def case(p: int, longest: int) -> Case:
        large = longest > 2000
        scaled = tuple((8 * before, new) for before, new in lengths) if large else lengths
        index = IndexerDims(heads=32, head_dim=128, topk=64) if large else INDEX
        needed = frozenset({"selected", *extras})
        return Case(scaled, mode, AttentionKind.MLA, index=index, extras=needed, **changes)

    return case
