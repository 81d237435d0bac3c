"""Cache rows of the attention kernel: addresses, L2 prefetch, loads and fp8 conversion.

fp8 rows are loaded as 16-bit pairs of adjacent columns, because shared memory gives 16-bit matrices transposed, but
8-bit ones only element by element. Tensor cores multiply them as fp16, to which a pair is converted by one instruction
(to bf16 it takes seven). So an fp8 row is two halves, its even and its odd columns. So are queries and results, which
are split once before the first step and joined once after the last.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LINE = tl.constexpr(128)
"""Bytes that a prefetch brings to L2."""
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def prefetch(rows, there, WIDTH: tl.constexpr):
    """Prefetch rows of ``WIDTH`` bytes, given by their addresses, to L2. A hint; nothing waits for it."""
    LINES: tl.constexpr = (WIDTH + _LINE - 1) // _LINE
    SIDE: tl.constexpr = 1 if LINES == 1 else (2 if LINES == 2 else 4)
    line = tl.arange(0, SIDE)
    at = rows.to(tl.int64)[:, None] + line[None, :] * _LINE
    asked = (there[:, None] & (line < LINES)[None, :]).to(tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred asked; setp.ne.s32 asked, $2, 0; @asked prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r", [at, asked], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def rows_at(cache, page, token, first, STEP: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
            SLOT_STRIDE: tl.constexpr, FAR: tl.constexpr):  # fmt: skip
    """Return the addresses of a step's rows. ``page`` is a scalar if a step lies in one page, or one per token."""
    at = cache + page.to(tl.int64) * PAGE_STRIDE
    if FAR:
        return at + (token % PAGE_SIZE).to(tl.int64) * SLOT_STRIDE
    if PAGE_SIZE % STEP == 0:
        return at + first % PAGE_SIZE * SLOT_STRIDE + tl.arange(0, STEP) * SLOT_STRIDE
    return at + token % PAGE_SIZE * SLOT_STRIDE


@triton.jit
def columns(WIDTH: tl.constexpr, FLOAT8: tl.constexpr, FAR: tl.constexpr):
    """Return the columns for ``load`` (pairs of columns for fp8), in 64 bits if offsets need them."""
    column = tl.arange(0, WIDTH // 2 if FLOAT8 else WIDTH)
    if FAR:
        column = column.to(tl.int64)
    return column


@triton.jit
def load(at, column, there, COLUMN_STRIDE: tl.constexpr, DIM: tl.constexpr, FLOAT8: tl.constexpr, PAIRS: tl.constexpr,
         MASKED: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """Load rows from their addresses as 16-bit elements or pairs of fp8 elements.

    With ``ZEROS``, zeros for columns past ``DIM``, and if masked for rows that are not there; without, anything.
    ``PAIRS`` says that pairs can be loaded as they are.
    """
    if FLOAT8 and PAIRS:
        pairs_at = at.to(tl.pointer_type(tl.uint16))
        rows = _load(pairs_at[:, None] + column[None, :], column, there, DIM // 2, MASKED, ZEROS)
    elif FLOAT8:
        cells_at = at.to(tl.pointer_type(tl.uint8))[:, None] + column[None, :] * (2 * COLUMN_STRIDE)
        even = _load(cells_at, column, there, DIM // 2, MASKED, ZEROS)
        odd = _load(cells_at + COLUMN_STRIDE, column, there, DIM // 2, MASKED, ZEROS)
        rows = even.to(tl.uint16) | (odd.to(tl.uint16) << 8)
    else:
        rows = _load(at[:, None] + column[None, :] * COLUMN_STRIDE, column, there, DIM, MASKED, ZEROS)
    return rows


@triton.jit
def _load(at, column, there, COLUMNS: tl.constexpr, MASKED: tl.constexpr, ZEROS: tl.constexpr):
    exist = (column < COLUMNS)[None, :]
    if MASKED and column.shape[0] != COLUMNS:
        exist = exist & there[:, None]
    elif MASKED:
        exist = there[:, None]
    if not MASKED and column.shape[0] == COLUMNS:
        rows = tl.load(at)
    elif ZEROS:
        rows = tl.load(at, mask=exist, other=0.0)
    else:
        rows = tl.load(at, mask=exist)
    return rows


@triton.jit
def fp16_of_pairs(pairs):
    """Convert the lower and the upper fp8 element of every 16 bits to fp16."""
    if _INTERPRETED:
        lower, upper = (pairs & 255).to(tl.uint8), (pairs >> 8).to(tl.uint8)
        lower, upper = lower.to(tl.float8e4nv, bitcast=True), upper.to(tl.float8e4nv, bitcast=True)
        return lower.to(tl.float16), upper.to(tl.float16)
    # The same in three instructions for the four numbers of a register, where the compiler makes ten of the above: move
    # both lower bytes to the front, then convert each half.
    return tl.inline_asm_elementwise(
        "{ .reg .b32 sorted; .reg .b16 lower, upper;"
        "prmt.b32 sorted, $2, 0, 0x3120; mov.b32 {lower, upper}, sorted;"
        "cvt.rn.f16x2.e4m3x2 $0, lower; cvt.rn.f16x2.e4m3x2 $1, upper; }",
        "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def fp16_halves(queries, scale):
    """Return even and odd columns of queries in fp16, and the scale of their logits.

    Each row of other types is divided by a power of 2, so that its numbers are up to 2 and fp16 holds them as well as
    bf16 did.
    """
    by = scale
    if queries.dtype != tl.float16:
        largest = tl.max(tl.abs(queries.to(tl.float32)), 1)
        power = tl.exp2(tl.floor(tl.log2(tl.maximum(largest, 1e-30))))[:, None]
        by = scale * power
        queries = (queries / power).to(tl.float16)
    even, odd = tl.split(tl.reshape(queries, [queries.shape[0], queries.shape[1] // 2, 2]))
    return even, odd, by
