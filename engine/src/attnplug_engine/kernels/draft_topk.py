"""Top-k tokens of each row with the sampler's noise, in two launches: chunks of a row, then rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options
from attnplug_engine.kernels.sample import _LOWEST, CHUNK, _gumbel, _keys
from attnplug_engine.kernels.sampling_metadata import SamplingMetadata

_NONE = tl.constexpr(float("-inf"))


@triton.jit
def _log_of_sum(x):
    """log(sum(exp(x))); -inf if every x is."""
    most = tl.max(x, 0)
    shift = tl.where(most > _NONE, most, 0.0)
    total = tl.maximum(tl.sum(tl.exp(x - shift), 0), 1.0)  # the largest term is 1
    return tl.where(most > _NONE, shift + tl.log(total), _NONE)


@triton.jit(do_not_specialize_on_alignment=["temperature", "seed", "position", "peaks", "totals"])
def _look(
    logits, stride, vocab, temperature, seed, position, target_ids, peaks, totals, scores, tokens, chunks,
    TOPK: tl.constexpr, MAPPED: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per chunk of a row: its best scores, their tokens, and the logarithm of the sum of all weights.

    Scores of a sampled row are relative to the chunk's largest logit, like the sampler's, so both round alike.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row * stride + token, mask=token < vocab, other=_NONE).to(tl.float32)
    value = tl.where(value < float("inf"), value, _NONE)  # also replaces NaN
    heat = tl.load(temperature + row)
    place = row * chunks + chunk
    score, peak = value, tl.max(value, 0)
    if heat > 0:
        one, two = _keys(tl.load(seed + row), tl.load(position + row))
        ids = token
        if MAPPED:
            ids = tl.load(target_ids + token, mask=token < vocab, other=0).to(tl.int32)
        shift = tl.where(peak > _NONE, peak, 0.0)
        score = tl.maximum((value - shift) / heat + _gumbel(ids, one, two), _LOWEST)
        score = tl.where(value > _NONE, score, _NONE)
    tl.store(peaks + place, peak)
    tl.store(totals + place, _log_of_sum(score))
    for each in tl.static_range(TOPK):
        best, which = tl.max(score, axis=0, return_indices=True)
        tl.store(scores + place * TOPK + each, best)
        tl.store(tokens + place * TOPK + each, chunk * CHUNK + which)
        score = tl.where(token == chunk * CHUNK + which, _NONE, score)


@triton.jit(do_not_specialize_on_alignment=["temperature", "peaks", "totals"])
def _choose(
    temperature, target_ids, peaks, totals, scores, tokens, chunks, chosen, logprobs,
    TOPK: tl.constexpr, MAPPED: tl.constexpr, CHUNKS: tl.constexpr, FOUND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row: the best of its chunks."""
    if EARLY:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    chunk, found = tl.arange(0, CHUNKS), tl.arange(0, FOUND)
    is_found, count = found < chunks * TOPK, row * chunks
    peak_of = tl.load(peaks + count + chunk, mask=chunk < chunks, other=_NONE)
    total = tl.load(totals + count + chunk, mask=chunk < chunks, other=_NONE)
    score = tl.load(scores + count * TOPK + found, mask=is_found, other=_NONE)
    if heat > 0:
        peak = tl.max(peak_of, 0)
        shift = tl.where(peak > _NONE, peak, 0.0)
        total += (peak_of - shift) / heat
        ahead = tl.load(peaks + count + found // TOPK, mask=is_found, other=_NONE)
        score = tl.where(score > _NONE, tl.maximum(score + (ahead - shift) / heat, 2 * _LOWEST), _NONE)
    whole = _log_of_sum(total)
    whole = tl.where(whole > _NONE, whole, 0.0)
    for each in tl.static_range(TOPK):
        best, which = tl.max(score, axis=0, return_indices=True)
        token = tl.load(tokens + count * TOPK + which)
        if MAPPED:
            token = tl.load(target_ids + token).to(tl.int32)
        tl.store(chosen + row * TOPK + each, token.to(tl.int64))
        tl.store(logprobs + row * TOPK + each, best - whole)
        score = tl.where(found == which, _NONE, score)


def launch_draft_topk(
    logits: Tensor, batch: SamplingMetadata, topk: int, target_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Launch ``attnplug_engine.speculation.draft_sampling.gumbel_topk``."""
    rows, vocab = logits.shape
    chosen = torch.empty(rows, topk, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, topk, dtype=torch.float32, device=logits.device)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    chunks = triton.cdiv(vocab, CHUNK)
    peaks, totals = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device)
    scores = torch.empty(rows, chunks, topk, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, chunks, topk, dtype=torch.int32, device=logits.device)
    ids, mapped = (tokens, False) if target_ids is None else (target_ids, True)
    found, options = (peaks, totals, scores, tokens, chunks), launch_options(logits.device)
    _look[chunks, rows](
        logits, logits.stride(0), vocab, batch.temperature, batch.seed, batch.position, ids, *found,
        TOPK=topk, MAPPED=mapped, CHUNK=CHUNK, num_warps=4, **options,
    )  # fmt: skip
    _choose[rows,](
        batch.temperature, ids, *found, chosen, logprobs,
        TOPK=topk, MAPPED=mapped, CHUNKS=triton.next_power_of_2(chunks), FOUND=triton.next_power_of_2(chunks * topk),
        num_warps=4, **options,
    )  # fmt: skip
    return chosen, logprobs
