"""Kernel configurations by batch shape: a table, and the adjustment to a GPU's shared memory.

A shape is the number of (query token, head of a group) rows per request, and the number of tiles of all requests and KV
heads. Lengths are not part of it: they are known on the device only, a captured graph serves any, and the schedule
adapts to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_TILE = 128


@dataclass(frozen=True, slots=True)
class MHAKernelConfig:
    """Tile sizes and launch parameters of the attention kernel and of the merge."""

    tile: int
    """(query token, head) rows per tile: 16 to 128."""
    step: int
    """Cache rows per loop iteration: 16 to 128."""
    warps: int
    stages: int
    programs: int
    """Programs per multiprocessor, among which a batch's work is divided."""
    prefetch: int = 0
    """Steps that a program prefetches to L2 before it waits for the previous kernel."""
    single: bool = False
    """Use a code path without a loop for programs with one step. It loads queries and cache rows together."""
    merge_elements: int = 32
    """Elements of partial results per thread of a fused merge: more loads in flight, more registers."""
    separate_merge: bool | None = None
    """Merge a tile's KV splits by a separate kernel, or fused into the attention kernel by the program that finishes
    last. ``None`` decides by the maximum number of splits (``merges_separately``). If requests have different numbers
    of new rows, the merge is always fused."""
    overlap: bool = True
    """Use programmatic dependent launch (SM 90 and newer)."""
    registers: int | None = None
    """Maximum registers per thread, so that several programs fit a multiprocessor."""
    specialized: bool = False
    """Use ``gluon_attention``, with warps for loads and others for products, instead of ``triton_attention``."""
    split: int = 0
    """Rows of the shortest KV split at absolute positions (``triton_splits``); 0 splits by the work of the batch."""

    @property
    def compiler_options(self) -> dict[str, bool]:
        """Options for equal bits: the compiler may fuse a product and a sum in one kernel or loop and not in another,
        such as where a mask is applied in between, so kernels with splits at absolute positions fuse none."""
        return {"enable_fp_fusion": False} if self.split else {}


FORMATS = {"float8_e4m3fn": 1, "fp8_per_token_head": 2, "nvfp4": 3}
"""``FORMAT`` numbers of quantized KV formats. 0 is a cache of 16-bit values."""
PACKS = (1, 2, 2, 4)
"""Columns per 16 bits of the cache, by the number of its format."""
ANY = 1 << 30  # no limit
_FEW = MHAKernelConfig(16, 32, 4, 3, programs=2, prefetch=4, single=True, merge_elements=64)
_SOME = MHAKernelConfig(16, 64, 4, 3, programs=3, prefetch=2)
_MANY = MHAKernelConfig(16, 64, 4, 3, programs=4, prefetch=1)
_TALL = MHAKernelConfig(64, 64, 4, 3, programs=2)
_EXTEND = MHAKernelConfig(MAX_TILE, 64, 8, 3, programs=1)
_LONG_EXTEND = MHAKernelConfig(MAX_TILE, 128, 4, 2, programs=1, specialized=True)
LONG_ROWS = 16384
"""Rows per request from which extends of head dim 64 are long: 4096 tokens with groups of four heads. A specialized
program takes a multiprocessor for itself, so its first loads and its stores are not hidden: prompts of 512 tokens take
1.3 times as long as with the other kernel, prompts of 2048 as long, and prompts of 8192 0.84 times (H200)."""
TABLE: tuple[tuple[int, int, MHAKernelConfig], ...] = (
    # maximum rows per request, maximum tiles
    (16, 32, _FEW),
    (16, 256, _SOME),
    (16, ANY, _MANY),
    (32, 32, replace(_FEW, tile=32)),
    (32, ANY, replace(_SOME, tile=32)),
    (64, ANY, _TALL),
    (LONG_ROWS - 1, ANY, _EXTEND),
    (ANY, ANY, _LONG_EXTEND),
)
INVARIANT = (
    MHAKernelConfig(16, 64, 4, 3, programs=2, prefetch=1, split=64),
    MHAKernelConfig(64, 64, 4, 3, programs=1, prefetch=1, split=64),
    MHAKernelConfig(MAX_TILE, 64, 8, 3, programs=1, prefetch=1, split=64),
)
"""Configurations if levels of invariance beyond ``run`` are requested, the smallest tiles first.

Bits do not depend on the tile: rows of a product are independent, on mma.sync and wgmma alike (checked on an H200), all
configurations have the same steps and splits, and the compiler fuses nothing by itself."""
_FEW_SHORT = replace(_FEW, step=64, prefetch=2)
"""``_FEW`` for rows of half the bytes: fp8, and key and value dims of up to ``_NARROW``. With the latter, 0.66 to 0.84
of the time from 2 x 4096 and 4 x 1024 tokens on, and 1.03 at 1 x 1024 (H200)."""
TABLE_FP8: tuple[tuple[int, int, MHAKernelConfig], ...] = (
    (16, 32, _FEW_SHORT),
    (16, 256, _SOME),
    (16, ANY, replace(_MANY, programs=3)),
    (32, 32, replace(_FEW_SHORT, tile=32)),
    *TABLE[4:],
)
"""Table for fp8 caches: a row has half the bytes, so a step has twice as many rows."""
# Rows with their own scales are limited by instructions, not bytes: fewer warps with more rows execute fewer of them.
_PER_TOKEN = replace(_MANY, warps=2)
TABLE_PER_TOKEN = (
    TABLE_FP8[0],
    (16, 256, replace(_SOME, step=128, stages=2, programs=2, prefetch=1)),
    (16, ANY, _PER_TOKEN),
    *TABLE_FP8[3:],
)
_NVFP4 = MHAKernelConfig(16, 32, 1, 3, programs=8, prefetch=1)
TABLE_NVFP4 = (
    TABLE_FP8[0],
    (16, 256, MHAKernelConfig(16, 128, 4, 3, programs=3, prefetch=1, registers=168)),
    (16, ANY, _NVFP4),
    *TABLE_FP8[3:],
)
TABLES = TABLE, TABLE_FP8, TABLE_PER_TOKEN, TABLE_NVFP4
"""Tables by the number of the cache's format."""
ENTRIES = tuple(entry for table in TABLES for *_, entry in table)
_NARROW = 64
"""Maximum key and value dim for which four warps hold the largest tile, and are faster than eight (H200)."""
WIDE = 256
"""Key or value dim from which a decode has one program per multiprocessor: shared memory allows few more, and half as
many splits are half as much to merge (0.85 of the time with one request of 8192 tokens, H200)."""
_MAX_DECODE_TILE = 32
"""Maximum tile of a decode."""
_MIN_TILE = 16
_MIN_STEP = 16
_SPECIALIZED_WIDTHS = 64, 128
"""Key and value dims of ``gluon_attention``: chunks of 64 columns, as many as registers hold."""


def choose(rows: int, requests: int, kv_heads: int, format: int) -> MHAKernelConfig:
    """Return the configuration for ``requests`` with up to ``rows`` (query token, head of a group) rows each."""
    return next(entry for most, tiles, entry in TABLES[format] if rows <= most and requests * kv_heads <= tiles)


@dataclass(frozen=True, slots=True)
class MHAKernelLimits:
    """Limits of a configuration: SM version, shared memory per program, padded key and value dims, number of
    the cache's format, and whether TMA can copy its rows."""

    sm: int
    shared_bytes: int
    width: int
    v_width: int
    format: int = 0
    copied: bool = False


def fit_config(configuration: MHAKernelConfig, limits: MHAKernelLimits) -> MHAKernelConfig:
    """Return ``configuration``, with fewer stages, shorter steps or smaller tiles if it exceeds the limits."""
    # With head dim 128, short prompts are faster, too (H200: 0.80 to 0.87 of the time up to 1024 tokens).
    wide = configuration == _EXTEND and min(limits.width, limits.v_width) > _NARROW
    if configuration.specialized or wide:
        configuration = _LONG_EXTEND if _specializes(limits) else _EXTEND
    if configuration.specialized:
        return configuration
    if configuration == _FEW and max(limits.width, limits.v_width) <= _NARROW:
        configuration = _FEW_SHORT
    fits = configuration if limits.sm >= 90 else replace(configuration, overlap=False, prefetch=0)
    if fits.tile == MAX_TILE and max(limits.width, limits.v_width) <= _NARROW:
        fits = replace(fits, warps=4)
    if fits.tile <= _MAX_DECODE_TILE and max(limits.width, limits.v_width) >= WIDE:
        fits = replace(fits, programs=1)
    while _shared_bytes(fits, limits) > limits.shared_bytes:
        if fits.stages > 2:
            fits = replace(fits, stages=fits.stages - 1)
        elif fits.step > 2 * _MIN_STEP:
            fits = replace(fits, step=fits.step // 2)
        elif fits.tile > _MIN_TILE:
            fits = replace(fits, tile=fits.tile // 2, warps=max(fits.warps // 2, 4))
        elif fits.stages > 1:
            fits = replace(fits, stages=1)
        else:
            break
    return fits


def _specializes(limits: MHAKernelLimits) -> bool:
    """Return True if ``gluon_attention`` runs: it multiplies by wgmma, which only SM 90 has."""
    widths = {limits.width, limits.v_width}
    return limits.sm == 90 and limits.copied and limits.format == 0 and widths <= set(_SPECIALIZED_WIDTHS)


def fit_invariant(
    configurations: tuple[MHAKernelConfig, ...], limits: MHAKernelLimits | None
) -> tuple[MHAKernelConfig, ...]:
    """Return the configurations as ``fit_config`` does, with equal steps; those that cannot have them are left out.

    Steps are those of the largest tile below ``MAX_TILE``, which any head dim can have. ``MAX_TILE`` is faster with
    head dim 128 only (0.59 of the time with 4096 tokens, H200): with 64, half of the rows are as fast and divide short
    prompts among more programs; above, its sums exceed the registers.
    """
    if limits is None:
        return configurations
    width = max(limits.width, limits.v_width)
    *smaller, base = (each for each in configurations if each.tile < MAX_TILE)
    base = fit_config(base if width < WIDE else replace(base, warps=2 * base.warps), limits)
    largest = [each for each in configurations if each.tile == MAX_TILE and _NARROW < width < WIDE]
    fits = [fit_config(replace(each, step=base.step), limits) for each in (*smaller, *largest)]
    kept = [each for each in (base, *fits) if each.step == base.step]
    return tuple(sorted(kept, key=lambda each: each.tile))


def _shared_bytes(configuration: MHAKernelConfig, limits: MHAKernelLimits) -> int:
    """Return an upper bound of the compiler's shared memory: queries, weights, and cache rows of all stages.

    It includes a 16-bit copy of coded rows, which large tiles always take, others only in some versions of Triton.
    """
    tile, step = configuration.tile, configuration.step
    columns = limits.width + limits.v_width
    rows = configuration.stages * step * columns * 2 // PACKS[limits.format]
    converted = step * columns * 2 if limits.format else 0
    return tile * 2 * (limits.width + step) + rows + converted


def max_partial_rows(multiprocessors: int, kv_heads: int) -> int:
    """Return the maximum rows of partial results of any table entry, over all KV heads."""
    return max(2 * max(entry.programs * multiprocessors, kv_heads) * entry.tile for entry in ENTRIES)


MAX_FUSED_PARTS = 3
"""Maximum number of splits per tile for a fused merge. With so few splits most tiles are not split at all, and a second
launch would cost 1.5 µs for nothing (H200). For tiles that are split, the separate kernel is faster by 2 µs, however
few splits they have."""
_LENGTH_SKEW = 2
"""Expected ratio of the longest request to the mean. A longer request is merged in more rounds, or by a fused merge."""
_MERGED_NUMBERS = 64
"""Elements of partial results per thread of the separate merge kernel."""
_MERGING_WARPS = 4
_MIN_PARTS = 16
_MIN_COLUMNS = 32
"""One L2 line: 128 bytes."""


def max_parts(target: int, tiles: int, requests: int, steps: int) -> int:
    """Return the expected maximum of splits per tile, if ``target`` programs share the work of ``tiles`` tiles.

    A tile has at most ``steps`` steps. All tiles of a request are split alike. Lengths are not known here.
    """
    share = -(-target * min(requests, _LENGTH_SKEW) // tiles)
    return max(min(share, steps), 1)


def merges_separately(configuration: MHAKernelConfig, parts: int) -> bool:
    """Return True if a separate kernel merges tiles of up to ``parts`` splits."""
    return parts > MAX_FUSED_PARTS if configuration.separate_merge is None else configuration.separate_merge


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """Tile sizes of the separate merge kernel."""

    parts: int
    """Splits per load."""
    columns: int
    """Columns per program."""
    warps: int


def merge_config(parts: int, rows: int, v_width: int, multiprocessors: int) -> MergeConfig:
    """Return the merge configuration for ``rows`` (query token, head) rows with up to ``parts`` splits.

    A program loads all splits at once if its registers hold them. Columns are narrowed while there are fewer programs
    than multiprocessors.
    """
    most = _MERGED_NUMBERS * 32 * _MERGING_WARPS
    at_once = min(max(1 << (parts - 1).bit_length(), _MIN_PARTS), most // _MIN_COLUMNS)
    columns = min(most // at_once, v_width)
    while columns > _MIN_COLUMNS and rows * (v_width // columns) < multiprocessors:
        columns //= 2
    return MergeConfig(at_once, columns, max(at_once * columns // (_MERGED_NUMBERS * 32), 1))


_MANY_ROWS = 1024
"""Rows from which ``merge_splits`` has one program each, since most of them have nothing to merge. Columns are
independent, so this changes no bit."""
_SPLIT_TOPS, _SPLIT_COLUMNS = 64, 64
"""Splits whose largest logits ``merge_splits`` loads at once, and columns per program of one warp."""


def split_merge_config(rows: int, v_width: int) -> MergeConfig:
    """Return the configuration that merges splits at absolute positions."""
    return MergeConfig(_SPLIT_TOPS, v_width if rows >= _MANY_ROWS else min(v_width, _SPLIT_COLUMNS), 1)
