"""Triton kernels of ``decode_chain_h200.py``: weights that are loaded or prefetched while attention runs.

``fetch`` brings the first weights of the next products into L2, from a side stream. ``early_skinny_gemm`` and
``early_streamed_gemm`` are the engine's products with more work before they wait for their input: they prefetch weights
of the product after them, or their own, or load their first columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options
from attnplug_engine.kernels.gemm_epilogue import finish
from attnplug_engine.kernels.gemm_tiles import STREAMED, STREAMED_GATED, GemmConfig
from attnplug_engine.kernels.skinny_gemm import _skinny_gemm
from attnplug_engine.kernels.streamed_gemm import _streamed_gemm

HELD = {
    False: ((256, STREAMED), (512, STREAMED)),
    True: ((256, STREAMED_GATED), (512, replace(STREAMED_GATED, stages=2))),
}
"""Columns loaded before the wait and configurations of streamed products, by whether they are gated."""
OWN = {False: ((512, 2048), STREAMED), True: ((256, 512, 1024, 2048), STREAMED_GATED)}
"""Columns prefetched before the wait."""

LOAD, LINES, BULK = (tl.constexpr(mode) for mode in range(3))
MODES = {"load": LOAD, "lines": LINES, "bulk": BULK}
"""How weights are asked for: plain loads, whose sum is stored, a prefetch instruction for each 128 bytes, or one for
each piece. Triton's interpreter knows only the first."""
_LINE = tl.constexpr(128)
_PIECE = tl.constexpr(2048)
"""Bytes that are asked for at once."""
PIECE = _PIECE.value
_PIECES = {"load": 8, "lines": 32, "bulk": 32}
"""Pieces of an iteration of ``fetch``."""


@triton.jit
def _ask(at, there, BYTES: tl.constexpr, MODE: tl.constexpr):
    """Prefetch ``BYTES`` bytes from each address to L2, without waiting."""
    asked = there.to(tl.int32)
    if MODE == BULK:
        tl.inline_asm_elementwise(
            "{ .reg .pred asked; setp.ne.s32 asked, $2, 0; @asked cp.async.bulk.prefetch.L2.global [$1], $3;"
            " mov.u32 $0, 0; }",
            "=r,l,r,r", [at, asked, tl.full(at.shape, BYTES, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        line = tl.arange(0, BYTES // _LINE)
        tl.inline_asm_elementwise(
            "{ .reg .pred asked; setp.ne.s32 asked, $2, 0; @asked prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r", [at[:, None] + line[None, :] * _LINE, asked[:, None] + line[None, :] * 0],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _fetch_share(first, then, first_pieces, then_pieces, upper, PIECES: tl.constexpr, MODE: tl.constexpr):
    """Ask for this program's share of ``first_pieces`` pieces of one matrix, then of ``then_pieces`` of another.

    The latter are pieces of the gate and, ``upper`` words behind, of ``up`` in turn: both are needed at the same time.
    Returns the sum of all words with the mode LOAD, otherwise 0.
    """
    WORDS: tl.constexpr = _PIECE // 4
    total = first_pieces + then_pieces
    found = tl.zeros([PIECES], tl.int32)
    for start in range(tl.program_id(0) * PIECES, total, tl.num_programs(0) * PIECES):
        number = start + tl.arange(0, PIECES)
        rest = tl.maximum(number - first_pieces, 0).to(tl.int64)
        in_first, in_then = number < first_pieces, (number >= first_pieces) & (number < total)
        first_at = first + tl.minimum(number, first_pieces).to(tl.int64) * WORDS
        then_at = then + rest // 2 * WORDS + rest % 2 * upper
        if MODE == LOAD:
            word = tl.arange(0, WORDS)
            found += tl.sum(tl.load(first_at[:, None] + word[None, :], mask=in_first[:, None], other=0), 1)
            found += tl.sum(tl.load(then_at[:, None] + word[None, :], mask=in_then[:, None], other=0), 1)
        else:
            at = tl.where(in_first, first_at.to(tl.int64), then_at.to(tl.int64))
            _ask(at, in_first | in_then, _PIECE, MODE)
    return tl.sum(found, 0)


@triton.jit(do_not_specialize=["first_pieces", "then_pieces"])
def _fetch(sums, first, then, first_pieces, then_pieces, upper, PIECES: tl.constexpr, MODE: tl.constexpr):
    found = _fetch_share(first, then, first_pieces, then_pieces, upper, PIECES, MODE)
    if MODE == LOAD:
        tl.store(sums + tl.program_id(0), found)


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """The next ``nbytes`` bytes of weights in the order of use: those of ``first``, if any, then those of a gated
    matrix ``then [gate | up, K]``, half of them from each part."""

    then: Tensor
    nbytes: int
    first: Tensor | None = None

    def arguments(self) -> tuple[Tensor, Tensor, int, int, int]:
        """Return the matrices as words, their numbers of pieces, and the words between gate and ``up``."""
        first = 0 if self.first is None else min(self.nbytes, self.first.nbytes) // PIECE
        then = min(self.nbytes // PIECE - first, self.then.nbytes // PIECE) // 2 * 2
        words = self.then.view(torch.int32)
        return words if self.first is None else self.first.view(torch.int32), words, first, then, words.numel() // 2


def fetch(fetched: Fetched, sums: Tensor, programs: int, mode: str) -> None:
    """Bring weights into L2 by one launch. ``sums [programs]`` int32 are written with the mode ``load`` only."""
    _fetch[(programs,)](sums, *fetched.arguments(), PIECES=_PIECES[mode], MODE=MODES[mode].value, num_warps=4)


@triton.jit(do_not_specialize=["rows", "columns", "first_pieces", "then_pieces"])
def _early_skinny_gemm(
    out, x, weight, bias, onto, gain, rows, columns, out_stride, x_stride, onto_stride, eps,
    first, then, first_pieces, then_pieces, upper,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BFLOAT16: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr, EARLY: tl.constexpr,
    PIECES: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Product of the engine, which loads its own weights before it waits. It asks for others first."""
    if EARLY:
        gdc_launch_dependents()
        _fetch_share(first, then, first_pieces, then_pieces, upper, PIECES, MODE)
    _skinny_gemm(
        out, x, weight, bias, onto, gain, rows, columns, out_stride, x_stride, onto_stride, eps,
        K, ROWS, BLOCK_N, BLOCK_K, BFLOAT16, GATED, NORM, BIAS, ONTO, EARLY,
    )  # fmt: skip


def early_skinny_gemm(x: Tensor, weight: Tensor, config: GemmConfig, onto: Tensor, fetched: Fetched) -> Tensor:
    """Return ``onto [rows, N]`` plus ``x [rows, K]`` times ``weight [N, K]`` transposed, as ``skinny_gemm`` does."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _early_skinny_gemm[(triton.cdiv(outputs, config.block_n),)](
        out, x.view(torch.int32), weight.view(torch.int32), x, onto, x, rows, outputs,
        out.stride(0), x.stride(0) // 2, onto.stride(0), 0.0, *fetched.arguments(),
        K=inputs,
        ROWS=triton.next_power_of_2(rows),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        BFLOAT16=x.dtype is torch.bfloat16,
        GATED=False,
        NORM=False,
        BIAS=False,
        ONTO=True,
        PIECES=32 * config.warps,
        MODE=BULK.value,
        num_warps=config.warps,
        **launch_options(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _held_gemm(
    out, x, weight, onto, rows, columns, out_stride, x_stride, onto_stride,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    HELD: tl.constexpr, GATED: tl.constexpr, ONTO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``_streamed_gemm`` whose first ``HELD`` columns of weights are loaded before it waits. ``BLOCK_K`` divides the
    others."""
    PARTS: tl.constexpr = 2 if GATED else 1
    first = tl.program_id(0) * BLOCK_N
    line = tl.arange(0, PARTS * BLOCK_N)
    place = first + line // PARTS
    lines = weight + (place + line % PARTS * columns).to(tl.int64)[:, None] * K
    exists = (place < columns)[:, None]
    row = tl.arange(0, ROWS)
    inputs = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_stride  # rows behind the last repeat it
    begin = tl.arange(0, HELD)[None, :]
    held = tl.load(lines + begin, mask=exists, other=0.0, eviction_policy="evict_first")
    if EARLY:
        gdc_wait()
    total = tl.dot(held, tl.trans(tl.load(inputs + begin)))
    for start in tl.range(HELD, K, BLOCK_K, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_K)[None, :]
        weights = tl.load(lines + column, mask=exists, other=0.0, eviction_policy="evict_first")
        total = tl.dot(weights, tl.trans(tl.load(inputs + column)), acc=total)
    total_up = total
    if GATED:
        total, total_up = tl.split(tl.permute(total.reshape(BLOCK_N, 2, ROWS), (0, 2, 1)))
    finish(
        total, total_up, total, out, out, onto, first + tl.arange(0, BLOCK_N), row, rows, columns, out_stride,
        onto_stride, 0.0, K, GATED, False, False, ONTO,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "columns", "first_pieces", "then_pieces"])
def _early_streamed_gemm(
    out, x, weight, onto, rows, columns, out_stride, x_stride, onto_stride,
    first, then, first_pieces, then_pieces, upper,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    HELD: tl.constexpr, OWN: tl.constexpr, FETCHES: tl.constexpr, GATED: tl.constexpr, ONTO: tl.constexpr,
    EARLY: tl.constexpr, PIECES: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Product of the engine, or one with ``HELD`` columns loaded before it waits. Before it waits, it also asks for the
    first ``OWN`` columns of its own weights, and with ``FETCHES`` for other weights."""
    if EARLY:
        gdc_launch_dependents()
        if OWN > 0:
            PARTS: tl.constexpr = 2 if GATED else 1
            line = tl.arange(0, PARTS * BLOCK_N)
            place = tl.program_id(0) * BLOCK_N + line // PARTS
            lines = weight + (place + line % PARTS * columns).to(tl.int64) * K
            _ask(lines.to(tl.int64), place < columns, OWN * 2, MODE)
        if FETCHES:
            _fetch_share(first, then, first_pieces, then_pieces, upper, PIECES, MODE)
    if HELD > 0:
        _held_gemm(
            out, x, weight, onto, rows, columns, out_stride, x_stride, onto_stride,
            K, ROWS, BLOCK_N, BLOCK_K, STAGES, HELD, GATED, ONTO, EARLY,
        )  # fmt: skip
    else:
        _streamed_gemm(
            out, x, weight, x, onto, rows, columns, out_stride, x_stride, onto_stride,
            K, ROWS, BLOCK_N, BLOCK_K, STAGES, GATED, False, ONTO, EARLY,
        )  # fmt: skip


def early_streamed_gemm(
    x: Tensor,
    weight: Tensor,
    config: GemmConfig,
    *,
    onto: Tensor | None = None,
    gated: bool = False,
    held: int = 0,
    own: int = 0,
    fetched: Fetched | None = None,
) -> Tensor:
    """Return ``x [rows, K]`` times ``weight [N, K]`` transposed, as ``skinny_gemm`` does with stages.

    Before it waits for ``x``, it loads ``held`` columns of weights and prefetches ``own`` columns, both powers of two,
    and prefetches ``fetched``.
    """
    rows, inputs = x.shape
    assert (inputs - held) % config.block_k == 0 and inputs % config.block_k == 0
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    others = (weight, weight, 0, 0, 0) if fetched is None else fetched.arguments()
    _early_streamed_gemm[(triton.cdiv(outputs, config.block_n),)](
        out, x, weight, x if onto is None else onto, rows, outputs, out.stride(0), x.stride(0),
        0 if onto is None else onto.stride(0), *others,
        K=inputs,
        ROWS=max(triton.next_power_of_2(rows), 16),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        HELD=held,
        OWN=min(own, inputs),
        FETCHES=fetched is not None,
        GATED=gated,
        ONTO=onto is not None,
        PIECES=32 * config.warps,
        MODE=BULK.value,
        num_warps=config.warps,
        **launch_options(x.device),
    )  # fmt: skip
    return out
