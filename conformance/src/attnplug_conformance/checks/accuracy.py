"""Checks of results against float64: input lengths, page orders, cache layouts, shapes, dtypes and features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from attnplug import AttentionKind, CacheLayout, DType, ForwardMode
from attnplug_conformance.case import Case, Shape, always
from attnplug_conformance.check import Check, CheckContext
from attnplug_conformance.failure import failure_prefix
from attnplug_conformance.stored_rows import coded_formats

EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED
VERIFY, DRAFT = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND

MAX_VERIFY_ROWS = 64
"""Maximum number of draft tokens in a verify: ``Geometry.tree`` has one bit for each."""
PROMPTS = ((0, 9), (0, 7))
"""A batch without any prefix, for which some backends have a path of its own."""
FULL_TILES = ((0, 128), (64, 64), (96, 32), (0, 64), (32, 32))


def _accurate(context: CheckContext) -> None:
    context.accurate()


def _with_lse(context: CheckContext) -> None:
    context.accurate(lse=True)


def _wide(context: CheckContext) -> None:
    with failure_prefix("with a cache so large that offsets exceed 32 bits; multiply pages and slots in 64 bits"):
        context.accurate()


def _max_rows(context: CheckContext) -> None:
    """Verify as many draft tokens as the backend claims. Tree masks then use bits beyond the first 32."""
    rows = min(context.subject.capabilities.max_speculative_tokens, MAX_VERIFY_ROWS)
    lengths = tuple((before, rows) for before, _ in context.case.lengths)
    trees = None
    if context.case.trees is not None:
        branches = tuple((row - 1) // 2 if row else -1 for row in range(rows))
        trees = (branches, tuple(row - 1 if row % 3 else row // 2 - 1 for row in range(rows)))
    context.accurate(context.scene(lengths=lengths, trees=trees))


def decode(*prefixes: int, **changes: Any) -> Case:
    return replace(Case(tuple((prefix, 1) for prefix in prefixes), DECODE), **changes)


INPUTS: dict[str, tuple[str, bool, Shape]] = {
    "decode.page_edges": (
        "decode is right if a request fills a page exactly, or has one row less or more",
        True,
        lambda p, longest: decode(p - 2 if p > 1 else 0, p - 1, p, 2 * p - 1, 7),
    ),
    "decode.one_request": ("decode is right for one request", False, lambda p, longest: decode(7)),
    "decode.first_token": (
        "decode is right for a request without a prefix",
        True,
        lambda p, longest: decode(0, 1, 2 * p),
    ),
    "decode.many_requests": (
        "decode is right for 19 requests",
        True,
        lambda p, longest: decode(*(3 + (request * 7) % (2 * p + 5) for request in range(19))),
    ),
    "decode.more_requests": (
        "decode is right for more requests than a warp has threads",
        False,
        lambda p, longest: decode(*(request % 5 for request in range(67))),
    ),
    "decode.block_edges": (
        "decode is right if a context is a multiple of a kernel's block size",
        True,
        lambda p, longest: decode(*(rows - 1 for rows in (512, 256, 128, 64, 32) if rows <= max(longest, 32))),
    ),
    "decode.long": (
        "decode is right for contexts longer than any block of a kernel",
        True,
        lambda p, longest: decode(longest - 1, 3, longest // 2),
    ),
    "extend.page_edges": (
        "an extend without prefix is right around the size of a page",
        True,
        lambda p, longest: Case(((0, max(p - 1, 1)), (0, p), (0, p + 1))),
    ),
    "extend.prefix_edges": (
        "an extend is right for prefixes that end at, before or beyond a page boundary",
        True,
        lambda p, longest: Case(((p, 2), (max(p - 1, 0), 2), (p // 2, p - p // 2), (2 * p - 1, 1))),
    ),
    "extend.ragged": (
        "an extend is right for requests of different lengths",
        True,
        lambda p, longest: Case(((0, p + 3), (p // 2, 5), (p, 1), (3 * p + 1, 2 * p + 1), (4, 9))),
    ),
    "extend.many_rows": (
        "an extend is right for requests with more new rows than a kernel's tile",
        True,
        lambda p, longest: Case(((5, min(longest, 150) - 5), (0, 3))),
    ),
    "extend.block_edges": (
        "an extend is right if new rows and all rows are multiples of a kernel's tile size",
        True,
        lambda p, longest: Case(
            tuple((before, new) for before, new in FULL_TILES if before + new <= max(longest, 64)),
        ),
    ),
    "extend.many_requests": (
        "an extend is right for more requests than a warp has threads",
        False,
        lambda p, longest: Case(tuple((request % 4, 1 + request % 3) for request in range(35))),
    ),
    "extend.one_row": (
        "an extend is right if no request has more than one new row, and one has none",
        False,
        lambda p, longest: Case(((5, 1), (9, 0), (0, 1), (p, 1))),
    ),
    "extend.no_new_rows": (
        "a request without new rows in an extend does not affect the others",
        False,
        lambda p, longest: Case(((5, 3), (9, 0), (0, 4))),
    ),
    "extend.long": (
        "an extend is right with a prefix longer than any block of a kernel",
        True,
        lambda p, longest: Case(((longest - 33, 33), (0, 5))),
    ),
    "decode.at_the_limits": (
        "decode is right if a batch reaches the context's limits",
        False,
        lambda p, longest: decode(3 * p - 1, 3 * p - 1, 2, at_limits=True),
    ),
    "extend.at_the_limits": (
        "an extend is right if a batch reaches the context's limits",
        False,
        lambda p, longest: Case(((p + 3, max(2 * p - 3, 1)), (0, 3 * p)), at_limits=True),
    ),
    "mixed": (
        "a mixed batch is right: some requests have one new token, others many",
        True,
        lambda p, longest: Case(((20, 1), (0, 9), (p - 1, 1), (5, 3)), MIXED),
    ),
    "verify": (
        "a target verify is right: each draft row sees the rows before it",
        True,
        lambda p, longest: Case(((10, 3), (max(p - 2, 1), 3), (0, 3), (longest // 4, 3)), VERIFY),
    ),
    "verify.two": (
        "a target verify of two rows is right: kernels often have a tile for it",
        False,
        lambda p, longest: Case(((10, 2), (max(p - 2, 1), 2), (0, 2)), VERIFY),
    ),
    "draft_extend": (
        "a draft extend is right: the draft model processes the accepted tokens",
        False,
        lambda p, longest: Case(((9, 4), (p, 4), (0, 4)), DRAFT),
    ),
    "pages.contiguous": (
        "pages may be contiguous",
        False,
        lambda p, longest: Case(((p + 1, 3), (2 * p, 4)), pages="contiguous"),
    ),
    "pages.interleaved": (
        "a request's pages need not be adjacent",
        False,
        lambda p, longest: Case(((2 * p + 1, 3), (3 * p, 4)), pages="interleaved"),
    ),
    "pages.interleaved_decode": (
        "a request's pages need not be adjacent",
        True,
        lambda p, longest: decode(2 * p + 1, 3 * p, p, pages="interleaved"),
    ),
    "pages.descending": (
        "pages need not ascend",
        False,
        lambda p, longest: Case(((2 * p + 1, p + 3), (3 * p, 4)), pages="descending"),
    ),
    "pages.shared": (
        "requests may share their first pages, as with a prefix cache",
        False,
        lambda p, longest: Case(((2 * p + 1, 3), (2 * p, 4), (3 * p, 2)), shared=(0, 2, 2)),
    ),
    "pages.shared_decode": (
        "requests may share their first pages, as with a prefix cache",
        False,
        lambda p, longest: decode(2 * p + 1, 2 * p, 3 * p, shared=(0, 2, 2)),
    ),
    "pages.far": (
        "slots may exceed 16 bits",
        False,
        lambda p, longest: Case(((p + 1, 3), (0, 4)), pages="far"),
    ),
    "pages.far_decode": (
        "slots may exceed 16 bits",
        False,
        lambda p, longest: decode(2 * p + 1, p, pages="far"),
    ),
    "large_inputs": (
        "logits that overflow exp give the right result",
        True,
        lambda p, longest: Case(((2 * p + 1, 3), (0, 7)), magnitude=60.0),
    ),
    "large_inputs_decode": (
        "logits that overflow exp give the right result in a decode",
        False,
        lambda p, longest: decode(2 * p + 1, 5, magnitude=12.0),
    ),
}
"""Input layouts for MHA and MLA: requirement, True if part of the quick run, and the case."""


def input_checks(kind: AttentionKind) -> Iterator[Check]:
    for name, (requirement, quick, shape) in INPUTS.items():
        yield Check(f"{kind}.{name}", str(kind), requirement, _of(kind, shape), _accurate, quick)
    for dtype in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16):
        for mode, extend in (("extend", True), ("decode", False)):
            base = (lambda p, longest: Case(((p + 3, 5), (0, 7)))) if extend else (lambda p, longest: decode(p + 3, 4))
            yield Check(
                f"{kind}.{dtype}.{mode}",
                f"{kind} {dtype}",
                f"results in {dtype} are right",
                _of(kind, base, dtype=dtype),
                _accurate,
                quick=dtype is not DType.FLOAT32,
            )
    for dtype in (DType.FLOAT16, DType.BFLOAT16):
        yield Check(
            f"{kind}.{dtype}.large_inputs",
            f"{kind} {dtype}",
            f"logits that overflow in {dtype} give the right result",
            _of(kind, lambda p, longest: Case(((p + 3, 5), (0, 7))), dtype=dtype, magnitude=200.0),
            _accurate,
        )
    for size in (1, 16, 32, 64, 128, 256):
        # One request beyond a page boundary is enough for large pages: interpreted kernels are slow.
        lengths = ((size + 1, 3), (2 * size - 1, 2)) if size < 128 else ((size - 1, 3),)
        decodes = ((size - 1, 1), (size, 1), (2 * size - 1, 1)) if size < 128 else ((size - 1, 1), (size, 1))
        for mode, case in (
            ("", Case(lengths, EXTEND, kind, page_size=size)),
            (".decode", Case(decodes, DECODE, kind, page_size=size)),
        ):
            yield Check(
                f"{kind}.page_size_{size}{mode}",
                f"{kind} pages",
                f"pages of {size} are read and written right",
                always(case),
                _accurate,
            )
    for layout in (CacheLayout.HEAD_MAJOR, CacheLayout.STRIDED):
        if kind is AttentionKind.MLA and layout is CacheLayout.HEAD_MAJOR:
            continue  # a latent row is one head: the same memory as token_major
        for mode, shape in (("extend", lambda p, longest: Case(((p + 3, 5),))), ("decode", lambda p, _: decode(p + 3))):
            yield Check(
                f"{kind}.{layout}.{mode}",
                f"{kind} {layout}",
                f"a cache with layout {layout}, as hosts have it, is read and written right",
                _of(kind, shape, layout=layout),
                _accurate,
            )
    for mode, shape in (
        ("", lambda p, longest: Case(((p + 3, 5), (0, 4)))),
        ("_decode", lambda p, _: decode(p + 3, 2)),
    ):
        for name, layout, claim in (
            ("pages", CacheLayout.TOKEN_MAJOR, str(kind)),
            ("strided", CacheLayout.STRIDED, f"{kind} {CacheLayout.STRIDED}"),
        ):
            wide, requirement = _of(kind, shape, layout=layout, pages="wide"), "offsets in a cache may exceed 32 bits"
            yield Check(f"{kind}.{name}.wide{mode}", claim, requirement, wide, _wide)
    for mode, shape in (
        ("extend", lambda p, longest: Case(((p + 3, 5), (0, 4)))),
        ("decode", lambda p, longest: decode(p + 3, 2 * p)),
    ):
        for format in coded_formats(kind):
            scales = {"kv_scales": (0.4, 1.7)} if format.layer_scale else {}
            yield Check(
                f"{kind}.{format}.{mode}",
                f"{kind} {format}",
                f"a cache in {format} is read and written with its scales",
                _of(kind, shape, kv_dtype=format.name, **scales),
                _accurate,
                quick=format.in_bytes,
            )
        yield Check(
            f"{kind}.lse.{mode}",
            "lse",
            "the log-sum-exp is natural, float32, [tokens, heads]",
            _of(kind, shape, extras=frozenset({"lse"})),
            _with_lse,
            quick=True,
        )
    for mode, shape in (
        ("prompt", lambda p, longest: Case(PROMPTS)),
        ("long", lambda p, longest: decode(longest - 1, 3, longest // 2)),
        ("verify", lambda p, longest: Case(((p + 3, 3), (2, 3)), VERIFY)),
    ):
        yield Check(
            f"{kind}.lse.{mode}",
            "lse",
            "the log-sum-exp is right without a prefix, for long contexts and for drafted rows",
            _of(kind, shape, extras=frozenset({"lse"})),
            _with_lse,
        )
    yield Check(
        f"{kind}.bounds.decode",
        f"{kind} bounds",
        "a decode is planned right if the host knows only upper bounds of its lengths",
        _of(kind, lambda p, longest: decode(p + 3, 2 * p - 1, 4), exact=False),
        _accurate,
        quick=True,
    )
    yield Check(
        f"{kind}.bounds.extend",
        f"{kind} bounds",
        "an extend is planned right if the host knows only upper bounds of its lengths",
        _of(kind, lambda p, longest: Case(((p + 3, 5), (0, 9), (2, 1))), exact=False),
        _accurate,
    )
    trees = ((-1, 0, 0, 1, 2, 2), (-1, -1, 1, 1, 0, 3))
    yield Check(
        f"{kind}.trees",
        "trees",
        "a row of a draft tree sees the prefix, itself and its ancestors",
        _of(kind, lambda p, longest: Case(((p + 1, 6), (4, 6)), VERIFY, trees=trees)),
        _accurate,
        quick=True,
    )
    for name, claim, drafted in (("verify.most", str(kind), None), ("trees.most", "trees", trees)):
        yield Check(
            f"{kind}.{name}",
            claim,
            f"a verify is right for as many rows as claimed, up to {MAX_VERIFY_ROWS}",
            _of(kind, lambda p, longest: Case(((70, 6), (4, 6)), VERIFY), trees=drafted),
            _max_rows,
        )


FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("a query sees as many keys as the window allows, itself included", {"window": 5}),
    "cap": ("logits are capped: cap * tanh(logit / cap)", {"cap": 1.5}),
    "sinks": ("sinks are in the denominator of the softmax", {"sinks": True, "extras": frozenset({"sinks"})}),
    "window_and_cap": ("a layer may have a window and a logit cap", {"window": 5, "cap": 1.5}),
    "window_and_sinks": (
        "a layer may have a window and sinks",
        {"window": 5, "sinks": True, "extras": frozenset({"sinks"})},
    ),
    "cap_and_sinks": (
        "a layer may have a logit cap and sinks, which are not capped",
        {"cap": 1.5, "sinks": True, "extras": frozenset({"sinks"})},
    ),
}
"""Optional features of a layer, and the cases that use them."""


def head_checks() -> Iterator[Check]:
    """Checks of MLA head counts, which kernels divide into tiles."""
    for heads in (1, 5, 16, 24, 64, 128):
        for mode, case in (
            ("extend", Case(((20, 3), (0, 5)), kind=AttentionKind.MLA, mla_heads=heads)),
            ("decode", Case(((19, 1), (4, 1)), DECODE, AttentionKind.MLA, mla_heads=heads)),
        ):
            yield Check(
                f"mla.heads_{heads}.{mode}",
                "mla heads",
                f"{heads} heads give the right result",
                always(case),
                _accurate,
            )


def shape_checks() -> Iterator[Check]:
    """Checks of head counts, head dimensions and features of MHA."""

    def small(p: int, longest: int) -> Case:
        return Case(((p + 3, 5), (0, 7)))

    shapes: tuple[tuple[str, str, dict[str, object]], ...] = (
        ("equal_heads", "each query head has its own KV head", {"kv_heads": 3, "group": 1}),
        ("gqa", "consecutive query heads share a KV head", {"kv_heads": 2, "group": 4}),
        ("gqa_7", "a group of query heads need not be a power of two", {"kv_heads": 2, "group": 7}),
        ("gqa_12", "a group of query heads may be larger than 8", {"kv_heads": 2, "group": 12}),
        ("gqa_24", "a group of query heads may be larger than 16, and no multiple of it", {"kv_heads": 2, "group": 24}),
        ("mqa", "all query heads share one KV head", {"kv_heads": 1, "group": 6}),
        ("layers.heads", "layers may differ in head count", {"other_heads": 12}),
        ("layers.widths", "layers may differ in head dimensions", {"other_widths": 2}),
        ("dims_differ", "keys and values may differ in head dimension", {"unequal_dims": True}),
    )
    for name, requirement, changes in shapes:
        for mode, base in (("extend", small), ("decode", lambda p, longest: decode(p + 3, 9))):
            yield Check(
                f"mha.{name}.{mode}",
                "mha",
                requirement,
                _of(AttentionKind.MHA, base, **changes),
                _accurate,
                name == "gqa",
            )
    square = Case(((19, 5), (0, 7)), kv_heads=16, group=1, page_size=16, layout=CacheLayout.HEAD_MAJOR)
    yield Check(
        "mha.head_major.square",
        f"mha {CacheLayout.HEAD_MAJOR}",
        "sizes do not tell the order of dimensions: pages may have as many tokens as heads",
        always(square),
        _accurate,
    )
    for width in (32, 64, 80, 96, 128, 192, 256):
        for mode, base in (("extend", small), ("decode", lambda p, longest: decode(p + 3, 9))):
            case = _of(AttentionKind.MHA, base, dims=(width, width), kv_heads=1, group=2)
            requirement = f"heads of {width} give the right result"
            yield Check(f"mha.width_{width}.{mode}", "mha widths", requirement, case, _accurate)
    for name, (requirement, changes) in FEATURES.items():
        for mode, base in (
            ("extend", lambda p, longest: Case(((0, 9), (3, 2), (4, 1), (p + 3, 6)))),
            ("decode", lambda p, longest: decode(3, 4, 5, 2 * p + 3, 2 * p + 4)),
            ("verify", lambda p, longest: Case(((3, 3), (p + 3, 3), (20, 3)), VERIFY)),
            ("prompt", lambda p, longest: Case(PROMPTS)),
        ):
            claim, quick = name.partition("_")[0], mode != "prompt"
            yield Check(
                f"mha.{name}.{mode}", claim, requirement, _of(AttentionKind.MHA, base, **changes), _accurate, quick
            )
            case = _of(AttentionKind.MLA, base, **changes)
            yield Check(f"mla.{name}.{mode}", f"mla {claim}", requirement, case, _accurate, quick)
    yield Check(
        "mha.window.wide",
        "window",
        "a window that spans several pages and is not a multiple of them",
        _of(AttentionKind.MHA, lambda p, longest: Case(((4 * p, 3), (p, p + 5)), window=2 * p + 3)),
        _accurate,
    )
    yield Check(
        "mha.window.shared",
        "window",
        "a window is right if requests share their first pages",
        _of(AttentionKind.MHA, lambda p, longest: decode(2 * p + 1, 2 * p, 3 * p, shared=(0, 2, 2)), window=5),
        _accurate,
    )
    long: tuple[tuple[str, Shape], ...] = (
        ("", lambda p, longest: Case(((longest - 33, 33), (0, 5)))),
        ("_decode", lambda p, longest: decode(longest - 1, 3, longest // 2)),
    )
    for (mode, base), (name, changes) in product(long, (("window", {"window": 37}), ("sinks", FEATURES["sinks"][1]))):
        yield Check(
            f"mha.{name}.long{mode}",
            name,
            f"{FEATURES[name][0]}, for contexts longer than any block of a kernel",
            _of(AttentionKind.MHA, base, **changes),
            _accurate,
        )
    some_layers: tuple[tuple[str, dict[str, Any]], ...] = (("window", {"window": 6}), ("cap", {"cap": 1.5}))
    for name, changes in some_layers:
        yield Check(
            f"mha.{name}.some_layers",
            name,
            f"layers with and without a {name} run in one model",
            _of(AttentionKind.MHA, lambda p, longest: Case(((2 * p, 3), (2, 4)), plain_first=True), **changes),
            _both_layers,
        )
    for mode, base in (("", lambda p, longest: Case(((p, 3), (2, 9)))), long[1]):
        for name, requirement, changes in (
            ("sinks", "sinks are not in the log-sum-exp", {"sinks": True, "extras": frozenset({"sinks", "lse"})}),
            ("window", "the log-sum-exp is over the keys in the window", {"window": 4, "extras": frozenset({"lse"})}),
        ):
            case = _of(AttentionKind.MHA, base, **changes)
            yield Check(f"mha.{name}.lse{mode}", name, requirement, case, _with_lse)


def _both_layers(context: CheckContext) -> None:
    """Run the layer under test and the one before it by one plan."""
    from attnplug_conformance.checks.cache import run_first_layer

    run_first_layer(context, context.scene())


def _of(kind: AttentionKind, shape: Shape, **changes: Any) -> Shape:
    return lambda p, longest: replace(shape(p, longest), kind=kind, **changes)
