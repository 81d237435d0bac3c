"""Token sampling: greedy or random, independent of the batch in which a request runs.

Random sampling uses the Gumbel-max trick: of the tokens that top-k, top-p and min-p keep, it takes the one with the
largest ``logit / temperature + noise``. The noise of a token is a hash of the request's seed, the position in its
output and the token id. There is no generator state, and a maximum does not depend on evaluation order. So a token
depends only on the request's own logits, parameters, seed and position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import gcd, inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnplug import UsageError
from attnplug_engine.execution.sampling_inputs import sampling_metadata
from attnplug_engine.kernels.sampling_metadata import SamplingMetadata
from attnplug_engine.request import LikelyToken, Request, TokenLogprobs

_FIRST_LOOK = 1024
"""Number of most likely tokens that top-p examines before it sorts the whole vocabulary."""

_BLOCK, _SMALLEST_BLOCK = 512, 32
"""Block size of the argmax on the CPU: the largest power of two within these bounds that divides a row."""

_GOLDEN, _FACTORS, _SHIFTS = (
    np.uint32(0x9E3779B9),
    (np.uint32(0x7FEB352D), np.uint32(0x846CA68B)),
    (np.uint32(16), np.uint32(15)),
)
"""Constants of the hash. The mixing is "lowbias32", which was found by search to have the least bias of its length."""

_AT_ONCE = 1 << 15
"""Numbers that are hashed together on the CPU, so that they stay in a core's cache."""


def request_seed(seed: int, request_id: int) -> int:
    """Derive the seed of a request that has none from the engine's seed."""
    return int.from_bytes(blake2b(f"request:{seed}:{request_id}".encode(), digest_size=8).digest(), "little")


class Sampler:
    """Samples the tokens of eager steps. ``seed`` is the engine's."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def seed_of(self, request: Request) -> int:
        """Return the seed of a request: its own, or one derived from the engine's seed and the request id."""
        return request_seed(self._seed, request.id) if request.params.seed is None else request.params.seed

    def sample(self, logits: Tensor, requests: Sequence[Request], positions: Sequence[int] | None = None) -> Tensor:
        """Return the next token of each request ``[requests]`` from ``logits [requests, vocab]``; see ``sample``.

        ``positions`` are those of ``sampling_metadata``.
        """
        if logits.dim() != 2 or logits.shape[0] != len(requests) or not logits.shape[1]:
            raise UsageError(
                f"logits of shape {list(logits.shape)} do not fit {len(requests)} requests; give [requests, vocab]"
            )
        if not logits.is_cuda and all([request.params.greedy for request in requests]):
            return argmax_finite(logits)
        return sample(logits, sampling_metadata(requests, self.seed_of, logits.device, positions))


def sample(logits: Tensor, batch: SamplingMetadata) -> Tensor:
    """Return the token of each row ``[rows]`` int64 from ``logits [rows, vocab]`` float32.

    The token is -1 if a row holds NaN or +inf, or only -inf, which marks tokens that cannot be chosen. On a GPU this
    does not synchronize, and the launches do not depend on the parameters, so a CUDA graph can capture them.
    """
    if logits.is_cuda:
        from attnplug_engine.kernels.sample import launch_sample

        return launch_sample(logits, batch)
    if not logits.is_cpu:  # random bits are made with NumPy
        return sample(logits.cpu(), batch.cpu()).to(logits.device)
    tokens = argmax_finite(logits)
    drawn = ((batch.temperature > 0) & (tokens >= 0)).nonzero().flatten()
    if not drawn.shape[0]:
        return tokens
    if drawn.shape[0] < tokens.shape[0]:
        tokens[drawn] = _draw(logits[drawn], tokens[drawn], batch.rows(drawn))
        return tokens
    return _draw(logits, tokens, batch)


def argmax_finite(logits: Tensor) -> Tensor:
    """Return the argmax of each row of ``logits [rows, vocab]``, the first of equals; -1 if it is not finite.

    NaN or +inf anywhere in a row is its maximum, so one pass finds them too.
    """
    rows, vocab = logits.shape
    block = gcd(vocab, _BLOCK)
    if not logits.is_cpu or logits.dtype is not torch.float32 or block < _SMALLEST_BLOCK:
        largest = logits.max(dim=-1)
        return torch.where(torch.isfinite(largest.values), largest.indices, -1)
    # On the CPU only torch's amax is vectorised, and it returns no indices. So take the maximum of each block, then
    # search the first block that has it: a third of the time of max, a tenth of argmax.
    peaks = logits.view(rows, vocab // block, block).amax(-1).numpy()
    row, first = np.arange(rows), peaks.argmax(-1)
    found = first * block + logits.numpy().reshape(rows, vocab // block, block)[row, first].argmax(-1)
    finite = np.isfinite(peaks[row, first])
    return torch.from_numpy(found if finite.all() else np.where(finite, found, -1))


def top_tokens(logits: Tensor, count: int) -> Tensor:
    """Return the tokens with the largest of ``logits [rows, vocab]`` float32, ``[rows, count]`` in descending order,
    the first of equals first.

    Logit and id are packed into one number, because topk does not define the order of equals, nor which of them it
    takes.
    """
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    order += torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return order.topk(count).indices


def gumbel(start: int, stop: int, seed: Tensor, position: Tensor) -> Tensor:
    """Return the noise of tokens ``start`` to ``stop - 1`` for each row, ``[rows, stop - start]`` (CPU)."""
    return gumbel_of(np.arange(start, stop, dtype=np.uint32), seed, position)


def gumbel_of(tokens: NDArray[np.uint32], seed: Tensor, position: Tensor) -> Tensor:
    """Return the noise of ``tokens`` for each row, ``[rows, tokens]`` (CPU).

    It is ``-log(-log(1 - chance))`` with a hash as the chance, which is never 0 or 1. Large noise, which decides, comes
    from small chances: there float32 keeps all 32 bits of the hash.
    """
    halves = seed.numpy().view(np.uint32).reshape(-1, 2)
    low = _mix(halves[:, 0] + _GOLDEN)
    first = _mix(position.numpy().view(np.uint32) + _mix(halves[:, 1] + low))
    second = _mix((first ^ low) + _GOLDEN)
    bits = _mix(tokens + first[:, None])
    bits ^= second[:, None]
    chance = torch.from_numpy(_mix(bits).astype(np.float32))
    chance.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return chance.neg_().log1p_().neg_().log_().neg_()


def _mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Mix 32 bits in place. A bijection; every bit of the result depends on every bit of ``x``."""
    shifted = x >> _SHIFTS[0]
    x ^= shifted
    x *= _FACTORS[0]
    x ^= np.right_shift(x, _SHIFTS[1], out=shifted)
    x *= _FACTORS[1]
    x ^= np.right_shift(x, _SHIFTS[0], out=shifted)
    return x


def _draw(logits: Tensor, largest: Tensor, batch: SamplingMetadata) -> Tensor:
    """Sample tokens from ``logits``, whose maxima ``largest [rows]`` are finite; no row is greedy (CPU)."""
    vocab = logits.shape[1]
    peak = logits.gather(1, largest.unsqueeze(1))
    scores = (logits - peak).div_(batch.temperature.unsqueeze(1))
    if batch.min_p.any():
        scores.masked_fill_(scores.exp() < batch.min_p.unsqueeze(1), -inf)
    top_k = torch.where((batch.top_k <= 0) | (batch.top_k > vocab), vocab, batch.top_k.long())
    filtered = ((top_k < vocab) | (batch.top_p < 1)).nonzero().flatten()
    if filtered.shape[0]:
        kept = _kept(logits[filtered], peak[filtered], batch.rows(filtered), top_k[filtered])
        scores[filtered] = scores[filtered].masked_fill_(kept.logical_not_(), -inf)
    width = max(_AT_ONCE // logits.shape[0], 256)
    for start in range(0, vocab, width):
        stop = min(start + width, vocab)
        scores[:, start:stop] += gumbel(start, stop, batch.seed, batch.position)
    return argmax_finite(scores)


def _kept(logits: Tensor, peak: Tensor, batch: SamplingMetadata, top_k: Tensor, look: int = _FIRST_LOOK) -> Tensor:
    """Return the mask ``[rows, vocab]`` of tokens that top-k (at least 1 here) and top-p keep. ``peak [rows, 1]`` are
    the maxima.

    All tokens are sorted only if the first ``look`` ones do not reach the share of top-p.
    """
    vocab, temperature = logits.shape[1], batch.temperature.unsqueeze(1)
    most = int(torch.where(top_k < vocab, top_k, min(look, vocab)).max())
    largest = logits.topk(most).values if most < vocab else logits.sort(descending=True).values
    reached = _weights(largest, peak, temperature).cumsum(-1)
    total = reached.gather(1, (top_k - 1).clamp(max=most - 1).unsqueeze(1))[:, 0]
    shares = batch.top_p < 1
    if (whole := shares & (top_k > most)).any():
        total[whole] = _weights(logits[whole], peak[whole], temperature[whole]).sum(-1)
    enough = torch.where(shares, total * batch.top_p.double(), inf)
    count = torch.minimum((reached < enough.unsqueeze(1)).sum(-1) + 1, top_k)
    short = (count > most).nonzero().flatten()
    last = largest.gather(1, (count - 1).clamp(max=most - 1).unsqueeze(1))
    kept = logits >= last
    surplus = (kept.sum(-1) > count).nonzero().flatten()
    if surplus.shape[0]:  # keep the first of equals
        rows, least = logits[surplus], last[surplus]
        above, equal = rows > least, rows == least
        kept[surplus] = above | (equal & (equal.cumsum(-1) <= count[surplus, None] - above.sum(-1, keepdim=True)))
    if short.shape[0]:
        kept[short] = _kept(logits[short], peak[short], batch.rows(short), top_k[short], vocab)
    return kept


def _weights(logits: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """Return integer weights, at most 2**40. Their sums do not depend on the order, and so not on the batch."""
    return (logits - peak).div_(temperature).exp_().mul_(2.0**40).long()


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of several rows, on the logits' device."""

    tokens: Tensor
    """Sampled tokens ``[rows]``."""
    chosen: Tensor
    """Log probabilities of the sampled tokens ``[rows]``."""
    top: Tensor
    """Most likely tokens ``[rows, count]``; of equals the lower id first."""
    top_logprobs: Tensor
    """Log probabilities of the most likely tokens ``[rows, count]``."""

    @staticmethod
    def of(logits: Tensor, tokens: Tensor, rows: Sequence[int], count: int) -> Logprobs:
        """Compute them for ``rows`` of ``logits [all rows, vocab]`` and of the sampled ``tokens [all rows]``."""
        which = torch.tensor(rows, dtype=torch.int64).to(logits.device, non_blocking=True)
        logits, tokens = logits[which], tokens[which]
        most = logits.amax(1, keepdim=True)
        # log_softmax on a CPU sums a large vocabulary sequentially in float32.
        total = (logits - most).exp_().sum(1, keepdim=True, dtype=torch.float64).log_().float()
        top = top_tokens(logits, min(count, logits.shape[1]))
        chosen = logits.gather(1, tokens.clamp(min=0).unsqueeze(1)) - most - total
        return Logprobs(tokens, chosen[:, 0], top, logits.gather(1, top) - most - total)

    def map(self, change: Callable[[Tensor], Tensor]) -> Logprobs:
        """Apply ``change`` to every tensor, e.g. a copy to the host."""
        return Logprobs(change(self.tokens), change(self.chosen), change(self.top), change(self.top_logprobs))

    def by_request(self, requests: Sequence[Request]) -> dict[int, TokenLogprobs]:
        """Return ``each`` by request id, without rows that have no token."""
        found = zip(requests, self.each(requests), strict=True)
        return {request.id: one for request, one in found if one is not None}

    def each(self, requests: Sequence[Request]) -> list[TokenLogprobs | None]:
        """Return, for the request of each row, the number of entries that it requests; None for a row without a token.

        Tokens that cannot be chosen are left out. Waits for the device.
        """
        rows = zip(
            requests,
            self.tokens.tolist(),
            self.chosen.tolist(),
            self.top.tolist(),
            self.top_logprobs.tolist(),
            strict=True,
        )
        return [
            TokenLogprobs(
                token,
                logprob,
                tuple(
                    LikelyToken(*likely)
                    for likely in zip(top[: request.params.logprobs], likely_logprobs, strict=False)
                    if likely[1] > -inf
                ),
            )
            if token >= 0
            else None
            for request, token, logprob, top, likely_logprobs in rows
        ]
