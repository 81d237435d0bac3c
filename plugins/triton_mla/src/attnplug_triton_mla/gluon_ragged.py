"""MLA prefill as MHA in Gluon on SM 90: ragged attention by ``attnplug_triton_mha.gluon_attention``.

It replaces ``triton_ragged.attend_ragged`` for heads of up to 192 key and 128 value columns, both multiples of 64, with
the same tiles. Triton's interpreter does not run Gluon: tests on a CPU use ``attnplug_testing.gluon_interpreter``,
which has no layouts, and compile the kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnplug_triton_mha.gluon_attention import attend_tile


@gluon.jit
def attend_ragged_rows(
    q, keys, values, out, lse, tiles, query_indptr, kv_indptr, q_row, q_head, scale,
    HEADS: gl.constexpr, DIM: gl.constexpr, V_DIM: gl.constexpr, K_HEAD_COLUMNS: gl.constexpr,
    V_HEAD_COLUMNS: gl.constexpr, TILE: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    LSE: gl.constexpr,
):  # fmt: skip
    """Attend with one tile of query rows. ``keys`` and ``values`` are descriptors of ``[rows, columns]``."""
    head, me = gl.program_id(0), gl.program_id(1)
    sequence, block = gl.load(tiles + 2 * me), gl.load(tiles + 2 * me + 1)
    if sequence >= 0:
        begin, key_start = gl.load(query_indptr + sequence), gl.load(kv_indptr + sequence)
        new = gl.load(query_indptr + sequence + 1) - begin
        kv_len = gl.load(kv_indptr + sequence + 1) - key_start
        if CAUSAL:
            prefix = kv_len - new
            end = gl.maximum(gl.minimum(prefix + (block + 1) * TILE, kv_len), 0)
        else:
            prefix = kv_len  # every row sees all keys
            end = kv_len
        attend_tile(
            q, keys, values, tiles, 1, out, lse, lse, lse, lse, tiles, q_row, q_head, head, begin, prefix, kv_len, new,
            block, 0, end, 0, 1, 0, lse, key_start, key_start, head * K_HEAD_COLUMNS, head * V_HEAD_COLUMNS, scale, 1.0,
            HEADS, 1, DIM, V_DIM, 0, 0, 0, 0, False, False, LSE, TILE, STEP, STAGES, False, False, False,
        )  # fmt: skip
