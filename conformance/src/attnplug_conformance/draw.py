"""Random cases, drawn from everything that a spec claims.

A drawn case depends only on the claims, the seed, its index and the largest cost, so a seed gives the same cases
everywhere. Sizes are log-uniform. Those of a case whose product is too expensive are halved in random order, so that
each size alone reaches its maximum in some cases.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

from attnplug import AttentionKind, ExtendPath, Feature, ForwardMode, GraphLevel, Role
from attnplug.declare.kv_format import PLAIN_FORMATS
from attnplug.host import MLADims
from attnplug.linear import LinearDims
from attnplug.sparse import IndexerDims
from attnplug_conformance.case import Case
from attnplug_conformance.random_case import (
    UNIFORM,
    Drawn,
    Lengths,
    Way,
    batch_seconds,
    cache_bytes,
    fit,
    query_heads,
)
from attnplug_conformance.reference import Parents
from attnplug_conformance.stored_rows import coded_formats, format_of, only_coded
from attnplug_conformance.subject import TYPES, Subject

EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED
VERIFY, DRAFT = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
GRAPHS = {DECODE: GraphLevel.DECODE, VERIFY: GraphLevel.UNIFORM, EXTEND: GraphLevel.ALWAYS}
"""Graph level that captured batches of a mode need."""

TILES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PAGE_SIZES = (1, 2, 4, 8, 16, 16, 16, 32, 32, 64, 64, 128, 256, 3, 12, 48)
WIDTHS = (16, 16, 16, 32, 32, 64, 64, 8, 24, 40, 80, 96, 112, 128, 160, 192, 256)
SMALL_WIDTHS = 7
"""Number of leading ``WIDTHS`` that cases with large sizes have most of the time."""
LATENT = ((32, 16, 8), (32, 16, 8), (64, 32, 16), (128, 32, 64), (256, 64, 32), (512, 128, 64))
"""kv_lora_rank, qk_nope_head_dim and qk_rope_head_dim."""
MAX_HEADS = 128
MOST = {"longest": 8192, "requests": 320, "new": 2048, "heads": MAX_HEADS, "group": 64}
"""Largest context, requests of a batch, new rows of a request, (KV) heads, and query heads per KV head."""
LARGE = (
    *((), ("longest",), ("new",), ("requests",), ("heads",), ("group",), ()),
    *(("longest", "group"), ("longest",), ("requests", "new"), ("heads", "new")),
)
"""Sizes that are large, in turn."""
USUAL = {"longest": 400, "requests": 10, "new": 40, "heads": 4, "group": 5}
"""The same, if the size is not one of the large ones of a case."""
MAX_LOGITS = 1 << 24
"""Maximum number of logits of one request. The reference holds several float64 tensors of this size."""
MAX_CACHE_BYTES = 1 << 27
MAX_CHUNKS = 16
"""Maximum number of chunks of a chunked MLA extend, about."""
FREE_DRAWS = 30
"""Number of draws after which a spec that refuses all of them counts as claiming none."""


def draw(subject: Subject, kind: AttentionKind, seed: int, index: int, largest: float) -> Drawn | None:
    """Return one random case with an estimated cost of up to ``largest`` seconds; ``None`` if the spec refuses it."""
    rng = random.Random(f"{seed} {kind} {index}")
    large = LARGE[index % len(LARGE)]
    seconds = largest * 2 ** -rng.uniform(0, 2 if "longest" in large else 4)  # many small cases, some large ones
    source = _Source(subject, kind, rng, seconds, large)
    for _ in range(FREE_DRAWS):
        drawn = source.linear() if kind.is_linear else source.attention()
        if drawn is not None and (fitted := fit(subject, drawn)) is not None:
            return fitted
    return None


class _Source:
    """Random choices for one case."""

    def __init__(
        self, subject: Subject, kind: AttentionKind, rng: random.Random, largest: float, large: tuple[str, ...]
    ) -> None:
        self.subject, self.kind, self.rng, self.largest, self.large = subject, kind, rng, largest, large
        self.can = subject.capabilities
        self.gpu = subject.device.type == "cuda"

    # Distributions

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def upto(self, most: int, least: int = 1) -> int:
        """Log-uniform whole number."""
        if most <= least:
            return least
        return min(most, int(math.exp(self.rng.uniform(math.log(least), math.log(most + 1)))))

    def edge(self, most: int, *sizes: int) -> int:
        """A number up to ``most`` at, before or behind a multiple of a size or a tile, or a log-uniform one."""
        if self.chance(0.35):
            return self.upto(most)
        size = self.rng.choice([size for size in (*sizes, *sizes, *TILES) if size <= most] or [1])
        return max(0, min(most, size * self.upto(max(most // size, 1)) + self.rng.choice((-1, -1, 0, 0, 1, 1, 2))))

    # Full attention

    def attention(self) -> Drawn | None:
        mode = self._mode()
        if mode is None:
            return None
        case = self._shape(Case((), mode, self.kind))
        sparse = case.index is not None
        way = self._way(case)
        path, ragged = None, False
        if self.kind is AttentionKind.MLA and mode is EXTEND and not sparse and way is Way.RUN:
            plain = case.window is None and case.cap is None
            paths = sorted(path for path in self.can.mla_extend if plain or path is ExtendPath.ABSORBED)
            if paths and not case.sinks and (ExtendPath.ABSORBED not in paths or self.chance(0.6)):
                path, way = self.rng.choice(paths), Way.PATH
                ragged = path is not ExtendPath.ABSORBED
        case = replace(case, ragged=ragged, lanes=2 if way is Way.LANES else 1)
        case = self._lengths(case, 2 if way in (Way.SEQUENCE, Way.LANES) else 1)
        case = self._memory(case)
        if way is Way.CAPTURED:
            return self._captured(case)
        case = self._padding(case, way)
        drawn = Drawn(case, way, path=path)
        if path is ExtendPath.CHUNKED:
            drawn = replace(drawn, chunk=max(self.upto(400), sum(before for before, _ in case.lengths) // MAX_CHUNKS))
        if way in (Way.SEQUENCE, Way.LANES):
            drawn = self._second(drawn)
        return self._extras(drawn)

    def _mode(self) -> ForwardMode | None:
        roles, modes = self.can.roles, []
        if Role.PREFILL in roles:
            modes += [EXTEND, EXTEND, MIXED]
        if modes and "new" in self.large:
            return self.rng.choice(modes)
        if Role.DECODE in roles:
            modes += [DECODE, DECODE]
        if Role.DECODE in roles and self.can.max_speculative_tokens:
            modes += [VERIFY, VERIFY]
        if Role.DRAFT in roles:
            modes.append(DRAFT)
        return self.rng.choice(modes) if modes else None

    def _way(self, case: Case) -> Way:
        graph = GRAPHS.get(case.mode)
        if case.index is not None:
            return Way.RUN
        ways = [Way.RUN] * 6 + [Way.SEQUENCE] * 2 + [Way.LANES]
        if graph is not None and self.can.cuda_graph >= graph:
            ways += [Way.CAPTURED] * 3
        return self.rng.choice(ways)

    def _shape(self, case: Case) -> Case:
        """Draw heads, widths, dtypes, pages and features."""
        rng, can = self.rng, self.can
        sizes = [size for size in PAGE_SIZES if can.page_sizes.kernel_size(size) is not None]
        case = replace(
            case,
            page_size=rng.choice(sizes) if sizes else max(can.page_sizes.kernel or {64}),
            dtype=rng.choice([dtype for dtype in TYPES if dtype in can.dtypes] or sorted(can.dtypes)),
            layout=rng.choice(sorted(can.layouts)) if self.chance(0.4) else case.layout,
            ranks=self.upto(8) if self.chance(0.2) else 1,
            seed=rng.randrange(1 << 16),
        )
        if self.chance(0.5):
            held = {format.name for format in coded_formats(self.kind)}
            claimed = PLAIN_FORMATS | held if can.kv_dtypes is None else can.kv_dtypes
            coded = sorted(held & claimed)
            case = replace(case, kv_dtype=rng.choice(coded if coded and self.chance(0.5) else sorted(claimed)))
        if case.kv_dtype is not None and format_of(case.kv_dtype).layer_scale:
            case = replace(case, kv_scales=rng.choice(((0.4, 1.7), (1.0, 1.0), (2.5, 0.3), (0.05, 0.11))))
        if self.kind is AttentionKind.MLA:
            latent = LATENT if can.mla_dims is None else [(rank, 128, rope) for rank, rope in sorted(can.mla_dims)]
            rank, nope, rope = rng.choice(latent)
            value = rng.choice((16, 32, 128)) if can.mla_dims is None else 128
            case = replace(case, mla=MLADims(rank, nope, rope), v_head_dim=value)
            if Feature.SPARSE in can.features and self.chance(0.5):
                case = self._index(case)
        else:
            case = replace(case, dims=self._dims())
            if not can.layers_alike and self.chance(0.15):
                heads = self.upto(8) if self.chance(0.5) else None
                case = replace(case, other_heads=heads, other_widths=1 if heads else 2)
        if case.index is not None:
            return case
        if Feature.LOGIT_CAP in can.features and self.chance(0.2):
            case = replace(case, cap=rng.choice((0.5, 1.5, 30.0)))
        if Feature.SINKS in can.features and "sinks" in can.extras and self.chance(0.25):
            case = replace(case, sinks=True)
        if case.mode is VERIFY and can.trees and self.chance(0.6):
            return replace(case, trees=())  # one is drawn per request, once there are requests
        if Feature.SLIDING_WINDOW in can.features and self.chance(0.4):
            case = replace(case, window=1)  # its size follows from the lengths
        if not can.layers_alike and (case.window or case.cap) and self.chance(0.2):
            case = replace(case, plain_first=True)
        return case

    def _dims(self) -> tuple[int, int]:
        if self.can.head_dims is not None:
            return self.rng.choice(sorted(self.can.head_dims))
        width = self.rng.choice(WIDTHS if not self.large or self.chance(0.3) else WIDTHS[:SMALL_WIDTHS])
        return width, (self.rng.choice(WIDTHS) if self.chance(0.15) else width)

    def _index(self, case: Case) -> Case:
        """Draw an indexer. Its top-k is smaller than most contexts, and sometimes larger."""
        common = self.gpu or self.can.mla_dims is not None
        dims = (32, 128, 64) if common else (8, 16, self.upto(64))
        claimed, held = self.can.index_dtypes, [format.name for format in coded_formats("index")]
        coded = [name for name in held if claimed is None or name in claimed]
        trees: tuple[Parents, ...] | None = () if case.mode is VERIFY and self.can.trees and self.chance(0.6) else None
        return replace(
            case,
            index=IndexerDims(*dims),
            index_dtype=self.rng.choice(coded) if coded and self.chance(0.3) else None,
            trees=trees,
        )

    def _lengths(self, case: Case, batches: int) -> Case:
        """Draw sizes, halve them until the case is affordable, and draw the lengths of all requests.

        The large sizes are the last to be halved: all of them together would be too expensive.
        """
        rng = self.rng
        fixed = {DECODE: 1, VERIFY: self.upto(self._speculative()), DRAFT: self.upto(8)}.get(case.mode)
        most = {**MOST, "longest": 2 * MOST["longest"] if self.gpu else MOST["longest"]}
        most["heads"] = min(self.can.max_heads or MAX_HEADS, MAX_HEADS)
        least = dict.fromkeys(most, 1) | {"requests": batches}
        if fixed is not None:
            most["new"] = least["new"] = fixed
        sizes = {
            name: self.upto(size, max(least[name], int(size**0.8)))
            if name in self.large
            else self.upto(min(size, USUAL[name]), least[name])
            for name, size in most.items()
        }
        while True:
            case = self._with_heads(case, sizes["heads"], sizes["group"])
            before = max(sizes["longest"] - sizes["new"], 0)
            probe = replace(case, lengths=((before, sizes["new"]),) * sizes["requests"])
            logits = query_heads(case) * sizes["new"] * (before + sizes["new"])
            # Most requests are much shorter than the longest one.
            spent = batch_seconds(replace(probe, lengths=probe.lengths[:1])) + batch_seconds(probe) / 4
            if spent <= self.largest and cache_bytes(probe) <= MAX_CACHE_BYTES and logits <= MAX_LOGITS:
                break
            names = [name for name, size in sizes.items() if size > least[name]]
            if not names:
                break
            name = rng.choice([name for name in names if name not in self.large] or names)
            sizes[name] = max(least[name], sizes[name] // 2)
        if case.window is not None:
            case = replace(case, window=max(1, self.edge(2 * sizes["longest"], case.page_size or 16)))
        lengths = [self._request(case, sizes["longest"], sizes["new"]) for _ in range(sizes["requests"])]
        if case.mode not in UNIFORM:
            number = rng.randrange(len(lengths))
            lengths[number] = (lengths[number][0], sizes["new"])
        number = rng.randrange(len(lengths))
        before, count = lengths[number]
        lengths[number] = (max(before, sizes["longest"] - count), count)
        if not any(new for _, new in lengths):
            lengths[0] = (lengths[0][0], 1)
        case = replace(case, lengths=tuple(lengths))
        if case.trees is not None:
            case = replace(case, trees=self._trees(case.lengths))
        return self._shared(case) if len(lengths) > 1 and self.chance(0.3) else case

    def _with_heads(self, case: Case, heads: int, group: int) -> Case:
        if case.is_mla:
            return replace(case, mla_heads=heads)
        most = min(self.can.max_heads or MAX_HEADS, MAX_HEADS)
        return replace(case, kv_heads=heads, group=max(1, min(group, most // heads)))

    def _shared(self, case: Case) -> Case:
        """Let some neighbours share leading pages, and have prefixes that reach beyond them."""
        size, lengths = case.page_size or 1, list(case.lengths)
        shared = [0] * len(lengths)
        first = self.rng.randrange(len(lengths) - 1)
        pages = self.upto(max(1, 256 // size))
        for number in range(first, min(len(lengths), first + 1 + self.upto(4))):
            before, new = lengths[number]
            lengths[number] = (max(before, pages * size + self.rng.choice((0, 0, 1, size - 1))), new)
            shared[number] = pages if number > first else 0
        return replace(case, lengths=tuple(lengths), shared=tuple(shared))

    def _speculative(self) -> int:
        return min(self.can.max_speculative_tokens, 64)

    def _request(self, case: Case, longest: int, most_new: int) -> tuple[int, int]:
        """Lengths of one request. Prefixes and totals are often around the sizes of pages, tiles and windows."""
        if case.mode in UNIFORM:
            new = most_new
        elif case.mode is MIXED and self.chance(0.5):
            new = 1
        else:
            new = 0 if self.chance(0.03) else max(1, self.edge(most_new, case.page_size or 1))
        if self.chance(0.12):
            return 0, new
        window = () if case.window is None else (case.window,)
        before = self.edge(longest, case.page_size or 1, *window)
        if self.chance(0.4):  # the total is at the boundary, not the prefix
            before = max(0, before - new)
        return before, new

    def _trees(self, lengths: Lengths) -> tuple[Parents, ...]:
        return tuple(tuple(self.rng.randrange(-1, row) if row else -1 for row in range(new)) for _, new in lengths)

    def _memory(self, case: Case) -> Case:
        """Draw the order of pages, unused entries, limits and the host's knowledge of lengths."""
        case = replace(
            case,
            unused=-1 if self.chance(0.6) else None,
            pages=self.rng.choice(("shuffled", "shuffled", "contiguous", "interleaved", "descending")),
            exact=not (self.can.needs_cpu_seq_lens is False and self.chance(0.4)),
            at_limits=self.chance(0.1) and case.lanes == 1,
        )
        if self.chance(0.12):
            far = replace(case, pages="far")
            if batch_seconds(far) <= 2 * self.largest and cache_bytes(far) <= MAX_CACHE_BYTES:
                return far
        return case

    def _padding(self, case: Case, way: Way) -> Case:
        if way in (Way.SEQUENCE, Way.LANES) or self.chance(0.6):
            return case
        rows = self.upto(40) if self.chance(0.7) else 0
        requests = self.upto(9) if self.chance(0.5) and way is Way.RUN and case.index is None else 0
        return replace(case, padding=rows, padded_requests=requests, at_limits=False)

    def _second(self, drawn: Drawn) -> Drawn:
        """Divide the requests into two batches, the second one possibly in another mode."""
        case, rng = drawn.case, self.rng
        split = rng.randrange(1, len(case.lengths))
        refused = rng.choice(("", "missing", "stale", "short")) if drawn.way is Way.SEQUENCE else ""
        second = rng.choice((EXTEND, DECODE, None, None))
        if second in (None, case.mode) or case.trees is not None or case.mode not in (EXTEND, MIXED, DECODE):
            return replace(drawn, split=split, refused=refused)
        others = [(before, 1) if second is DECODE else (before, max(1, new)) for before, new in case.lengths[split:]]
        case = replace(case, lengths=(*case.lengths[:split], *others))
        return replace(drawn, case=case, split=split, refused=refused, second=second)

    def _captured(self, case: Case) -> Drawn:
        """Draw captured shapes and their replays from the requests of a case."""
        lengths, ragged = case.lengths, case.mode is EXTEND
        case = replace(case, graph=GRAPHS[case.mode], at_limits=False, shared=(), exact=True)
        shapes: list[tuple[int, int]] = []
        replays: list[tuple[int, Lengths, tuple[Parents, ...] | None]] = []
        for _ in range(self.rng.randrange(1, 4)):
            count = self.upto(len(lengths))
            start = self.rng.randrange(len(lengths) - count + 1)
            rows = max(1, sum(new for _, new in lengths[start : start + count]))
            shape = count, rows if ragged else count * lengths[0][1]
            shapes += [] if shape in shapes else [shape]
        for _ in range(self.rng.randrange(1, 5)):
            number = self.rng.randrange(len(shapes))
            count, rows = shapes[number]
            used = []
            for before, new in self.rng.sample(lengths, self.upto(count)):
                if 0 < new <= rows:
                    used.append((before, new))
                    rows -= new
            if used:
                trees = None if case.trees is None else self._trees(tuple(used))
                replays.append((number, tuple(used), trees))
        if not replays:
            new = 1 if ragged else lengths[0][1]
            replays.append((0, ((0, new),), None if case.trees is None else self._trees(((0, new),))))
        late = case.trees is not None and self.chance(0.5)
        return Drawn(case, Way.CAPTURED, shapes=tuple(shapes), replays=tuple(replays), late_tree=late)

    def _extras(self, drawn: Drawn) -> Drawn:
        case, can = drawn.case, self.can
        if drawn.way is Way.PATH:
            return drawn
        lse = "lse" in can.extras and self.chance(0.35)
        out = "out" in can.extras and self.chance(0.15)
        drawn = replace(drawn, lse=lse, out=out)
        if case.index is not None:
            return drawn
        late = case.trees is not None and not can.needs_cpu_seq_lens and self.chance(0.5)
        large = self.chance(0.06) and case.kv_dtype in (None, *PLAIN_FORMATS) and not only_coded(can.kv_dtypes)
        if large and drawn.way is Way.RUN:
            drawn = replace(drawn, case=replace(drawn.case, magnitude=self.rng.choice((12.0, 60.0))))
        saved = drawn.way is not Way.RUN or not self.chance(0.1)
        return replace(drawn, strided=self.chance(0.15), saved=saved, late_tree=late)

    # Linear attention

    def linear(self) -> Drawn:
        rng, kind = self.rng, self.kind
        mode = rng.choice((EXTEND, EXTEND, DECODE, MIXED, *([VERIFY] if self.can.max_speculative_tokens else [])))
        width = rng.choice((64, 128)) if self.gpu else rng.choice((12, 16, 64))
        heads, key_heads = self.upto(16), 0
        key_heads = heads
        if kind in (AttentionKind.GDN, AttentionKind.MAMBA2):
            key_heads = self.upto(heads)
            heads = key_heads * max(1, heads // key_heads)
        if kind is AttentionKind.SHORT_CONV:
            dims = LinearDims(0, 0, 0, 0, conv_channels=8 * self.upto(64), conv_width=rng.choice((2, 3, 4)))
        elif kind is AttentionKind.LIGHTNING:
            dims = LinearDims(heads, key_heads, width, width)
        else:
            dims = LinearDims(heads, key_heads, width, width, 2 * key_heads * width + heads * width, 4)
        dtype = rng.choice([dtype for dtype in TYPES if dtype in self.can.dtypes] or sorted(self.can.dtypes))
        case = Case((), mode, kind, linear=dims, dtype=dtype, seed=rng.randrange(1 << 16))
        new = {DECODE: 1, VERIFY: self.upto(min(self.can.max_speculative_tokens or 1, 8))}.get(mode, self.upto(700))
        requests = self.upto(200)
        while requests * new > 1 and batch_seconds(replace(case, lengths=((1, new),) * requests)) > 2 * self.largest:
            if requests > 1 and (new == 1 or mode is VERIFY or self.chance(0.5)):
                requests //= 2
            else:
                new = max(1, new // 2)
                if requests == 1 and (new == 1 or mode is VERIFY):
                    break
        lengths = tuple(
            (rng.choice((0, self.upto(500))), new if mode in UNIFORM else 1 if mode is MIXED and self.chance(0.5)
             else max(1, self.edge(new, 64)))
            for _ in range(requests)
        )  # fmt: skip
        case = replace(case, lengths=lengths)
        if self.chance(0.3) and mode is not VERIFY:
            case = replace(case, padding=self.upto(20))
        if self.chance(0.3) and kind is not AttentionKind.LIGHTNING:
            case = replace(case, silu=self.chance(0.5), bias=self.chance(0.5))
        return Drawn(case, Way.TWO_STEPS if mode is EXTEND and self.chance(0.3) else Way.RUN)
