"""Cache rows of the attention kernel: addresses, L2 prefetch, loads, scales and conversion, by KV format.

Quantized rows (fp8, nvfp4) are loaded as 16-bit elements of 2 or 4 adjacent columns: ``ldmatrix`` transposes 16-bit
matrices, while 8-bit ones would be read element by element. Tensor cores multiply them as fp16: one instruction
converts a pair of fp8 to fp16, but seven to bf16. So a quantized row becomes several tensors, e.g. its even and its odd
columns (``triton_products``).
"""

from __future__ import annotations

import triton
import triton.language as tl

FP8_ROWS, NVFP4 = tl.constexpr(2), tl.constexpr(3)
NVFP4_BITS = tl.constexpr(4)
"""nvfp4 on GPUs without instructions that convert fp8 (before SM 89)."""
NVFP4_FACTORS = {NVFP4.value: 64.0, NVFP4_BITS.value: 256.0}
"""Factor by which nvfp4 rows exceed what ``decode`` returns, so that fp16 holds all of their values exactly."""
_GROUP = tl.constexpr(16)
"""Columns per scale of nvfp4."""
SMALLEST_SCALE = tl.constexpr(1e-30)
"""Lower bound of a row's scale, for rows of zeros that were never written."""
_LINE = tl.constexpr(128)
"""Bytes that a prefetch brings to L2."""
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def prefetch(rows, there, WIDTH: tl.constexpr):
    """Prefetch rows of ``WIDTH`` bytes at addresses ``rows`` to L2. A hint; nothing waits for it."""
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
            SLOT_STRIDE: tl.constexpr, INT64: tl.constexpr):  # fmt: skip
    """Return the addresses of a step's rows. ``page`` is a scalar if a step lies in one page, or one per token."""
    at = cache + page.to(tl.int64) * PAGE_STRIDE
    if INT64:
        return at + (token % PAGE_SIZE).to(tl.int64) * SLOT_STRIDE
    if PAGE_SIZE % STEP == 0:
        return at + first % PAGE_SIZE * SLOT_STRIDE + tl.arange(0, STEP) * SLOT_STRIDE
    return at + token % PAGE_SIZE * SLOT_STRIDE


@triton.jit
def columns(WIDTH: tl.constexpr, PACK: tl.constexpr, INT64: tl.constexpr):
    """Return the columns for ``load`` in units of 16 bits, as int64 if ``INT64``."""
    column = tl.arange(0, WIDTH // PACK)
    if INT64:
        column = column.to(tl.int64)
    return column


@triton.jit
def load(at, column, there, COLUMN_STRIDE: tl.constexpr, DIM: tl.constexpr, PACK: tl.constexpr, PAIRS: tl.constexpr,
         MASKED: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """Load rows from their addresses as 16-bit elements of ``PACK`` columns.

    With ``ZEROS``, zeros for columns beyond ``DIM``, and if masked for missing rows; without, anything. ``PAIRS``:
    two bytes of a coded row can be loaded as 16 bits.
    """
    if PACK > 1 and PAIRS:
        pairs_at = at.to(tl.pointer_type(tl.uint16))
        rows = _load(pairs_at[:, None] + column[None, :], column, there, DIM // PACK, MASKED, ZEROS)
    elif PACK > 1:
        cells_at = at.to(tl.pointer_type(tl.uint8))[:, None] + column[None, :] * (2 * COLUMN_STRIDE)
        even = _load(cells_at, column, there, DIM // PACK, MASKED, ZEROS)
        odd = _load(cells_at + COLUMN_STRIDE, column, there, DIM // PACK, MASKED, ZEROS)
        rows = even.to(tl.uint16) | (odd.to(tl.uint16) << 8)
    else:
        rows = _load(at[:, None] + column[None, :] * COLUMN_STRIDE, column, there, DIM, MASKED, ZEROS)
    return rows


@triton.jit
def load_row_scales(
    cache, page, token, first, STEP: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr, INT64: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Load one float32 scale per row of a step. Missing rows have any number; other formats return 0, not used.

    Without a mask, the compiler may load adjacent scales together. The page number of a step without rows is 0,
    so its addresses are valid.
    """
    if FORMAT == FP8_ROWS:
        if PAGE_SIZE % STEP == 0:
            first = tl.multiple_of(first % PAGE_SIZE, STEP)
        scales = tl.load(rows_at(cache, page, token, first, STEP, PAGE_SIZE, PAGE_STRIDE, SLOT_STRIDE, INT64))
    else:
        scales = 0
    return scales


@triton.jit
def load_step_scales(
    key_scales, value_scales, page, token, first, STEP: tl.constexpr, PAGE_SIZE: tl.constexpr, KS_PAGE: tl.constexpr,
    KS_SLOT: tl.constexpr, VS_PAGE: tl.constexpr, VS_SLOT: tl.constexpr, INT64: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Load the scales of a step's keys and values, for rows with one each."""
    return (
        load_row_scales(key_scales, page, token, first, STEP, PAGE_SIZE, KS_PAGE, KS_SLOT, INT64, FORMAT),
        load_row_scales(value_scales, page, token, first, STEP, PAGE_SIZE, VS_PAGE, VS_SLOT, INT64, FORMAT),
    )


@triton.jit
def load_group_scales(at, there, COLUMN_STRIDE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load nvfp4's scales from the addresses of rows, as e4m3 codes. Missing rows have 0."""
    group = tl.arange(0, WIDTH // _GROUP)
    return _load(at[:, None] + group[None, :] * COLUMN_STRIDE, group, there, DIM // _GROUP, True, True)


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
def fp16_of_e2m1(codes, scales):
    """Convert the four e2m1 codes of every 16 bits to fp16, times 2 ** -6 and ``scales``, fp16 of the same shape."""
    # The bits of a code, moved to the middle of an e4m3 code, are a number 2 ** 6 times smaller, subnormals included.
    if _INTERPRETED:
        factors = scales.to(tl.float32) * 256.0
        return (
            (_fp16_of_code(codes << 9, codes << 12) * factors).to(tl.float16),
            (_fp16_of_code(codes << 5, codes << 8) * factors).to(tl.float16),
            (_fp16_of_code(codes << 1, codes << 4) * factors).to(tl.float16),
            (_fp16_of_code(codes >> 3, codes) * factors).to(tl.float16),
        )
    # Two elements per register: first their bytes are sorted, so that codes of the same place are adjacent.
    return tl.inline_asm_elementwise(
        "{ .reg .b32 w, t, lower, upper; .reg .b16 a, b, c, d;"
        "prmt.b32 w, $4, 0, 0x3120;"
        "shl.b32 t, w, 2; and.b32 t, t, 0x1C1C1C1C; shl.b32 lower, w, 4; lop3.b32 lower, lower, 0x80808080, t, 0xEA;"
        "shr.b32 t, w, 2; and.b32 t, t, 0x1C1C1C1C; lop3.b32 upper, w, 0x80808080, t, 0xEA;"
        "mov.b32 {a, b}, lower; mov.b32 {c, d}, upper;"
        "cvt.rn.f16x2.e4m3x2 t, a; mul.rn.f16x2 $0, t, $5; cvt.rn.f16x2.e4m3x2 t, c; mul.rn.f16x2 $1, t, $5;"
        "cvt.rn.f16x2.e4m3x2 t, b; mul.rn.f16x2 $2, t, $5; cvt.rn.f16x2.e4m3x2 t, d; mul.rn.f16x2 $3, t, $5; }",
        "=&r,=&r,=&r,=r,r,r", [codes, scales], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _fp16_of_e2m1_by_bits(codes, scales):
    """Convert the four e2m1 codes of every 16 bits to fp16, times 2 ** -14 and ``scales``, by integer operations."""
    # The bits of a code are those of an fp16 number 2 ** 14 times smaller, subnormal ones included.
    if _INTERPRETED:
        return (
            _fp16_of_code(codes << 9, codes << 12) * scales,
            _fp16_of_code(codes << 5, codes << 8) * scales,
            _fp16_of_code(codes << 1, codes << 4) * scales,
            _fp16_of_code(codes >> 3, codes) * scales,
        )
    # Two elements per register; the compiler's own code takes them one by one, and may flush subnormal numbers.
    return tl.inline_asm_elementwise(
        "{ .reg .b32 m, s;"
        "shl.b32 m, $4, 9; shl.b32 s, $4, 12; and.b32 m, m, 0x0E000E00; and.b32 s, s, 0x80008000;"
        "or.b32 m, m, s; mul.rn.f16x2 $0, m, $5;"
        "shl.b32 m, $4, 5; shl.b32 s, $4, 8; and.b32 m, m, 0x0E000E00; and.b32 s, s, 0x80008000;"
        "or.b32 m, m, s; mul.rn.f16x2 $1, m, $5;"
        "shl.b32 m, $4, 1; shl.b32 s, $4, 4; and.b32 m, m, 0x0E000E00; and.b32 s, s, 0x80008000;"
        "or.b32 m, m, s; mul.rn.f16x2 $2, m, $5;"
        "shr.b32 m, $4, 3; and.b32 m, m, 0x0E000E00; and.b32 s, $4, 0x80008000;"
        "or.b32 m, m, s; mul.rn.f16x2 $3, m, $5; }",
        "=&r,=&r,=&r,=&r,r,r", [codes, scales], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _fp16_of_code(magnitude, sign):
    return ((magnitude & 0x0E00) | (sign & 0x8000)).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _group_scales(codes, COLUMNS: tl.constexpr, FORMAT: tl.constexpr):
    """Return nvfp4's scales in fp16, times 2 ** 6 for ``NVFP4_BITS``, for each of ``COLUMNS`` elements of a row."""
    scales = _fp16_of_e4m3_by_bits(codes) if FORMAT == NVFP4_BITS else _fp16_of_e4m3(codes)
    scales = tl.broadcast_to(scales[:, :, None], [scales.shape[0], scales.shape[1], COLUMNS // scales.shape[1]])
    return tl.reshape(scales, [scales.shape[0], COLUMNS])


@triton.jit
def _fp16_of_e4m3(codes):
    if _INTERPRETED:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        return tl.where(codes == 0x7F, float("nan"), numbers)  # the interpreter knows no NaN in fp8
    return tl.inline_asm_elementwise(
        "{ .reg .b16 lower, upper; mov.b32 {lower, upper}, $2;"
        "cvt.rn.f16x2.e4m3x2 $0, lower; cvt.rn.f16x2.e4m3x2 $1, upper; }",
        "=&r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _fp16_of_e4m3_by_bits(codes):
    """Convert positive e4m3 codes to fp16, times 2 ** 6."""
    # The bits of a code are those of an fp16 number 2 ** 8 times smaller, subnormal ones included, but for NaN, 0x7F.
    if _INTERPRETED:
        numbers = (codes.to(tl.uint16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
        return tl.where(codes == 0x7F, float("nan"), numbers).to(tl.float16)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 n, t;"
        "prmt.b32 n, $2, 0, 0x1404; shr.b32 n, n, 1; add.u32 t, n, 0x00800080; and.b32 t, t, 0x40004000;"
        "or.b32 n, n, t; mov.b32 t, 0x74007400; mul.rn.f16x2 $0, n, t;"
        "prmt.b32 n, $2, 0, 0x3424; shr.b32 n, n, 1; add.u32 t, n, 0x00800080; and.b32 t, t, 0x40004000;"
        "or.b32 n, n, t; mov.b32 t, 0x74007400; mul.rn.f16x2 $1, n, t; }",
        "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def decode(rows, scales, FORMAT: tl.constexpr):
    """Return rows as tensors for products: fp16 of every second or fourth column, or the rows themselves.

    The scales of nvfp4 are applied; ``NVFP4_FACTORS`` are not. Scales of whole rows are applied to logits and weights.
    """
    if FORMAT == NVFP4:
        tensors = fp16_of_e2m1(rows, _group_scales(scales, rows.shape[1], FORMAT))
    elif FORMAT == NVFP4_BITS:
        tensors = _fp16_of_e2m1_by_bits(rows, _group_scales(scales, rows.shape[1], FORMAT))
    elif FORMAT > 0:
        tensors = fp16_of_pairs(rows)
    else:
        tensors = (rows,)
    return tensors


@triton.jit
def log2_near(numbers):
    """Return logarithms that need not be exact, by one instruction."""
    if _INTERPRETED:
        return tl.log2(numbers)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=r,r", [numbers], dtype=tl.float32, is_pure=True, pack=1
    )
