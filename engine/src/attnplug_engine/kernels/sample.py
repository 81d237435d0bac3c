"""Token sampling on the device, in two launches. Imported only if there is a GPU with Triton.

The first launch reads every logit once, in chunks, so that a single row keeps many multiprocessors busy: it finds each
chunk's largest logit and its best sample. The second has one program per row. It combines the chunks, which suffices
for greedy rows and for sampling from the whole vocabulary.

A row with top-k, top-p or min-p uses rejection sampling. All three keep the first n tokens in one order: descending
logits, of equals the lower id. So a candidate is kept or not depending on the tokens ahead of it: their number and
their weight. A rejected candidate excludes all that follow it, and the best sample among those ahead is next. One pass
over the row checks a candidate and finds the next; with the logits of language models the first one is nearly always
kept.

Chunks and blocks depend on the vocabulary size only, and no program reads two rows: a row's token does not depend on
its batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels.sampling_metadata import SamplingMetadata

CHUNK = 2048
BLOCK = 8192
WARPS = 16
_PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)
_NO_WEIGHT = tl.constexpr(104.0)
"""exp(-104) is 0 in float32."""
_LOWEST = tl.constexpr(-1e38)
"""Smallest score of a token that can be chosen."""
_PER_ROW = ["temperature", "seed", "position", "peaks", "peak_tokens", "scores", "drawn"]
"""Arrays whose alignment depends on the number of rows. Each variant would be compiled when it first occurs (E1)."""


@triton.jit
def _mix(x):
    """Mix 32 bits. A bijection; every bit of the result depends on every bit of ``x``."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _keys(seed, position):
    """Return two hash words for the sample at ``position``."""
    low = _mix(seed.to(tl.uint32) + 0x9E3779B9)
    both = _mix((seed >> 32).to(tl.uint32) + low)
    first = _mix(position.to(tl.uint32) + both)
    return first, _mix((first ^ low) + 0x9E3779B9)


@triton.jit
def _log(x):
    """Logarithm by the GPU's own instruction: six digits, at a tenth of the exact one's instructions."""
    if _PTX:
        base = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return base * 0.6931471805599453
    return tl.log(x)


@triton.jit
def _gumbel(tokens, first, second):
    """Gumbel noise of each token id, like ``execution.sampler.gumbel``; small chances use a series."""
    bits = _mix(_mix(tokens.to(tl.uint32) + first) ^ second)
    chance = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    series = 0.3333333333333333 + chance * (0.25 + chance * (0.2 + chance * 0.16666666666666666))
    near = chance * (1 + chance * (0.5 + chance * series))
    return -_log(tl.where(chance < 0.0625, near, -_log(1 - chance)))


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def _look(
    logits, stride, vocab, temperature, seed, position, peaks, peak_tokens, scores, drawn, chunks,
    CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per chunk of a row: its largest logit, +inf if any is NaN or +inf, and its best sample.

    A score is relative to the chunk's largest logit, so no temperature is too low for it and no logit too large.
    """
    if EARLY:
        gdc_launch_dependents()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    temp = tl.load(temperature + row)
    bad = tl.max(((values != values) | (values == float("inf"))).to(tl.int32))
    peak, first = tl.max(values, axis=0, return_indices=True)
    place = row * chunks + chunk
    tl.store(peaks + place, tl.where(bad > 0, float("inf"), peak))
    tl.store(peak_tokens + place, chunk * CHUNK + first)
    if temp > 0:
        one, two = _keys(tl.load(seed + row), tl.load(position + row))
        shift = tl.where((peak > float("-inf")) & (peak < float("inf")), peak, 0.0)
        score = tl.maximum((values - shift) / temp + _gumbel(tokens, one, two), _LOWEST)
        best, which = tl.max(tl.where(values > float("-inf"), score, float("-inf")), axis=0, return_indices=True)
        tl.store(scores + place, best)
        tl.store(drawn + place, chunk * CHUNK + which)


@triton.jit
def _weight_above(logits, vocab, peak, temp, threshold, BLOCK: tl.constexpr):
    """Return the number of logits above ``threshold``, and their weight."""
    weights, counts = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        values = tl.load(logits + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
        above = values > threshold
        weights += tl.where(above, tl.exp((values - peak) / temp), 0.0)
        counts += above.to(tl.int32)
    return tl.sum(weights), tl.sum(counts)


@triton.jit
def _weight_of_largest(logits, vocab, peak, temp, wanted, BLOCK: tl.constexpr):
    """Return the weight of the ``wanted`` largest logits, to a millionth, which is the precision of a float32 sum.

    Searches a threshold with ``wanted`` logits above it, each time in a quarter of the remaining interval. Between two
    neighbouring thresholds all weights are equal.
    """
    low, high = peak - _NO_WEIGHT * temp, peak
    total, below = _weight_above(logits, vocab, peak, temp, low, BLOCK)
    if below > wanted:
        ahead, steps = 0, 0  # above ``high``
        while (below != wanted) & (steps < 14):
            quarter = (high - low) * 0.25
            one, two, three = low + quarter, low + 2 * quarter, high - quarter
            ones, twos, threes = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
            for start in range(0, vocab, BLOCK):
                tokens = start + tl.arange(0, BLOCK)
                values = tl.load(logits + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
                ones += (values > one).to(tl.int32)
                twos += (values > two).to(tl.int32)
                threes += (values > three).to(tl.int32)
            above_one, above_two, above_three = tl.sum(ones), tl.sum(twos), tl.sum(threes)
            if above_three >= wanted:
                low, below = three, above_three
            elif above_two >= wanted:
                low, below, high, ahead = two, above_two, three, above_three
            elif above_one >= wanted:
                low, below, high, ahead = one, above_one, two, above_two
            else:
                high, ahead = one, above_one
            steps += 1
        if below == wanted:
            total, below = _weight_above(logits, vocab, peak, temp, low, BLOCK)
        else:
            total, below = _weight_above(logits, vocab, peak, temp, high, BLOCK)
            total += (wanted - ahead).to(tl.float32) * tl.exp((high - peak) / temp)
    return total


@triton.jit(do_not_specialize_on_alignment=[*_PER_ROW, "top_k", "top_p", "min_p", "chosen"])
def _choose(
    logits, stride, vocab, temperature, top_k, top_p, min_p, seed, position, peaks, peak_tokens, scores, drawn, chunks,
    chosen, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row: its token from the results of its chunks, checked against its filters."""
    row = tl.program_id(0).to(tl.int64)
    temp = tl.load(temperature + row)
    place = tl.arange(0, CHUNKS)
    if EARLY:
        gdc_wait()  # for the results of _look
    found = tl.load(peaks + row * chunks + place, mask=place < chunks, other=float("-inf"))
    peak, first = tl.max(found, axis=0, return_indices=True)
    token = tl.load(peak_tokens + row * chunks + first)
    if (peak == float("inf")) | (peak == float("-inf")):
        token = -1
    elif temp > 0:
        score = tl.load(scores + row * chunks + place, mask=place < chunks, other=float("-inf"))
        _, which = tl.max(tl.maximum(score + (found - peak) / temp, 2 * _LOWEST), axis=0, return_indices=True)
        token = tl.load(drawn + row * chunks + which)
        wanted, share, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
        if (wanted <= 0) | (wanted > vocab):
            wanted = vocab
        if (wanted < vocab) | (share < 1) | (least > 0):
            logits += row * stride
            enough = float("inf")
            if share < 1:
                enough = share * _weight_of_largest(logits, vocab, peak, temp, wanted, BLOCK)
            one, two = _keys(tl.load(seed + row), tl.load(position + row))
            looking = 1
            while looking > 0:
                logit = tl.load(logits + token).to(tl.float32)
                count, weight, best, following = 0, 0.0, float("-inf"), token
                for start in range(0, vocab, BLOCK):
                    tokens = start + tl.arange(0, BLOCK)
                    values = tl.load(logits + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
                    ahead = (values > logit) | ((values == logit) & (tokens < token))
                    block = tl.sum(ahead.to(tl.int32))
                    if block > 0:
                        count += block
                        shifted = (values - peak) / temp
                        weight += tl.sum(tl.where(ahead, tl.exp(shifted), 0.0))
                        noisy = tl.maximum(shifted + _gumbel(tokens, one, two), _LOWEST)
                        top, which = tl.max(tl.where(ahead, noisy, float("-inf")), axis=0, return_indices=True)
                        if top > best:
                            best, following = top, start + which
                # Nothing is ahead of the largest logit, so it is kept, regardless of rounding.
                kept = (count < wanted) & (weight < enough) & (tl.exp((logit - peak) / temp) >= least)
                looking = tl.where(kept | (count == 0), 0, 1)
                token = tl.where(looking > 0, following, token)
    tl.store(chosen + row, token.to(tl.int64))


def launch_sample(logits: Tensor, batch: SamplingMetadata) -> Tensor:
    """Return the tokens ``[rows]`` sampled from ``logits [rows, vocab]``, -1 for rows that are not finite."""
    rows, vocab = logits.shape
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return chosen
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    chunks = triton.cdiv(vocab, CHUNK)
    peaks, scores = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device)
    peak_tokens, drawn = torch.empty(2, rows, chunks, dtype=torch.int32, device=logits.device)
    early = logits.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(logits.device) >= (9, 0)
    found = (peaks, peak_tokens, scores, drawn, chunks)
    _look[chunks, rows](
        logits, logits.stride(0), vocab, batch.temperature, batch.seed, batch.position, *found,
        CHUNK=CHUNK, EARLY=early, num_warps=4,
    )  # fmt: skip
    _choose[(rows,)](
        logits, logits.stride(0), vocab, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seed,
        batch.position, *found, chosen,
        CHUNKS=triton.next_power_of_2(chunks), BLOCK=min(BLOCK, triton.next_power_of_2(vocab)), EARLY=early,
        num_warps=WARPS, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return chosen
