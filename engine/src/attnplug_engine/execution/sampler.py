"""The next token of each request: greedy or drawn, the same in whatever batch the request runs.

Drawing is Gumbel-max: of the tokens that top-k, top-p and min-p keep, the one with the largest
``logit / temperature + noise``. The noise of a token is a hash of the request's seed, of the place in its output and of
the token's id. Nothing is drawn from a state, and a maximum does not depend on the order in which it is taken: a
request's token depends on its own logits, parameters, seed and place, and on nothing else.
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

from attnplug.host import UsageError
from attnplug_engine.execution.sampling_inputs import sampling_metadata
from attnplug_engine.kernels.sampling_metadata import SamplingMetadata
from attnplug_engine.request import LikelyToken, Request, TokenLogprobs

_FIRST_LOOK = 1024
"""How many of the likeliest tokens top-p looks at before it sorts the whole vocabulary."""

_BLOCK, _SMALLEST_BLOCK = 512, 32
"""On the CPU the largest logit is looked for in blocks: the largest power of two, within these, that divides a row."""

_GOLDEN, _FACTORS, _SHIFTS = (
    np.uint32(0x9E3779B9),
    (np.uint32(0x7FEB352D), np.uint32(0x846CA68B)),
    (np.uint32(16), np.uint32(15)),
)
"""Of the hash. The mixing is "lowbias32", which was found by search to have the least bias of its length."""

_AT_ONCE = 1 << 15
"""How many numbers are hashed at once on the CPU: what stays in a core's cache."""


def request_seed(seed: int, request_id: int) -> int:
    """The seed of a request that brought none, from the engine's own."""
    return int.from_bytes(blake2b(f"request:{seed}:{request_id}".encode(), digest_size=8).digest(), "little")


class Sampler:
    """Chooses the tokens of steps that are not captured. ``seed`` is the engine's."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def seed_of(self, request: Request) -> int:
        """What a request's draws are seeded with: its own seed, or one from the engine's and its id."""
        return request_seed(self._seed, request.id) if request.params.seed is None else request.params.seed

    def sample(self, logits: Tensor, requests: Sequence[Request], positions: Sequence[int] | None = None) -> Tensor:
        """The next token of each request ``[requests]`` from ``logits [requests, vocab]``; see ``sample``.

        ``positions`` are as ``sampling_metadata`` takes them.
        """
        if logits.dim() != 2 or logits.shape[0] != len(requests) or not logits.shape[1]:
            raise UsageError(
                f"logits of shape {list(logits.shape)} do not fit {len(requests)} requests; give [requests, vocab]"
            )
        if logits.is_cpu and all([request.params.greedy for request in requests]):
            return likeliest(logits)
        return sample(logits, sampling_metadata(requests, self.seed_of, logits.device, positions))


def sample(logits: Tensor, batch: SamplingMetadata) -> Tensor:
    """The token of each row ``[rows]``, in int64, from ``logits [rows, vocab]`` in float32.

    It is -1 where a row holds NaN or +inf, or nothing that can be chosen: a logit of -inf marks a token that cannot. On
    a GPU nothing waits for the device, and the launches are the same whatever the parameters are, so that a graph may
    capture them.
    """
    if not logits.is_cpu:
        from attnplug_engine.kernels.sample import launch_sample

        return launch_sample(logits, batch)
    tokens = likeliest(logits)
    drawn = ((batch.temperature > 0) & (tokens >= 0)).nonzero().flatten()
    if not drawn.shape[0]:
        return tokens
    if drawn.shape[0] < tokens.shape[0]:
        tokens[drawn] = _draw(logits[drawn], tokens[drawn], batch.rows(drawn))
        return tokens
    return _draw(logits, tokens, batch)


def likeliest(logits: Tensor) -> Tensor:
    """The token with the largest of ``logits [rows, vocab]`` in each row, the first of equals; -1 if it is not finite.

    A NaN or +inf anywhere in a row is its largest, so that one pass finds them too.
    """
    rows, vocab = logits.shape
    block = gcd(vocab, _BLOCK)
    if not logits.is_cpu or logits.dtype is not torch.float32 or block < _SMALLEST_BLOCK:
        largest = logits.max(dim=-1)
        return torch.where(torch.isfinite(largest.values), largest.indices, -1)
    # On the CPU only torch's amax is vectorised, and it has no indices: take the largest of each block, then look for
    # the token in the first block that has it. A third of the time of max, a tenth of argmax.
    peaks = logits.view(rows, vocab // block, block).amax(-1).numpy()
    row, first = np.arange(rows), peaks.argmax(-1)
    found = first * block + logits.numpy().reshape(rows, vocab // block, block)[row, first].argmax(-1)
    finite = np.isfinite(peaks[row, first])
    return torch.from_numpy(found if finite.all() else np.where(finite, found, -1))


def largest(logits: Tensor, count: int) -> Tensor:
    """The tokens with the largest of ``logits [rows, vocab]`` float32 first, ``[rows, count]``; of equals the first.

    Order and id are one number here: topk says nothing of the order of equals, nor of which of them it takes.
    """
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    order += torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return order.topk(count).indices


def gumbel(start: int, stop: int, seed: Tensor, position: Tensor) -> Tensor:
    """On the CPU: the noise of tokens ``start`` to ``stop - 1`` for each row, ``[rows, stop - start]``."""
    return gumbel_of(np.arange(start, stop, dtype=np.uint32), seed, position)


def gumbel_of(tokens: NDArray[np.uint32], seed: Tensor, position: Tensor) -> Tensor:
    """On the CPU: the noise of ``tokens`` for each row, ``[rows, tokens]``.

    ``-log(-log(1 - chance))`` for a hash as the chance, which is never 0 or 1. Much noise, which decides, comes from
    small chances: there float32 has all of the hash's 32 bits.
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
    """A bijection of 32 bits, every bit of whose result depends on every bit of ``x``; in place."""
    shifted = x >> _SHIFTS[0]
    x ^= shifted
    x *= _FACTORS[0]
    x ^= np.right_shift(x, _SHIFTS[1], out=shifted)
    x *= _FACTORS[1]
    x ^= np.right_shift(x, _SHIFTS[0], out=shifted)
    return x


def _draw(logits: Tensor, largest: Tensor, batch: SamplingMetadata) -> Tensor:
    """On the CPU: the tokens drawn from ``logits``, whose ``largest [rows]`` are finite; no row is greedy."""
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
    return likeliest(scores)


def _kept(logits: Tensor, peak: Tensor, batch: SamplingMetadata, top_k: Tensor, look: int = _FIRST_LOOK) -> Tensor:
    """Which tokens ``[rows, vocab]`` top-k, here at least 1, and top-p keep; ``peak [rows, 1]`` are the largest.

    Where the share of top-p is not reached by the first ``look`` tokens, all are sorted.
    """
    vocab, heat = logits.shape[1], batch.temperature.unsqueeze(1)
    most = int(torch.where(top_k < vocab, top_k, min(look, vocab)).max())
    largest = logits.topk(most).values if most < vocab else logits.sort(descending=True).values
    reached = _weights(largest, peak, heat).cumsum(-1)
    total = reached.gather(1, (top_k - 1).clamp(max=most - 1).unsqueeze(1))[:, 0]
    shares = batch.top_p < 1
    if (whole := shares & (top_k > most)).any():
        total[whole] = _weights(logits[whole], peak[whole], heat[whole]).sum(-1)
    enough = torch.where(shares, total * batch.top_p.double(), inf)
    count = torch.minimum((reached < enough.unsqueeze(1)).sum(-1) + 1, top_k)
    short = (count > most).nonzero().flatten()
    last = largest.gather(1, (count - 1).clamp(max=most - 1).unsqueeze(1))
    kept = logits >= last
    surplus = (kept.sum(-1) > count).nonzero().flatten()
    if surplus.shape[0]:  # of equals the first
        rows, least = logits[surplus], last[surplus]
        above, equal = rows > least, rows == least
        kept[surplus] = above | (equal & (equal.cumsum(-1) <= count[surplus, None] - above.sum(-1, keepdim=True)))
    if short.shape[0]:
        kept[short] = _kept(logits[short], peak[short], batch.rows(short), top_k[short], vocab)
    return kept


def _weights(logits: Tensor, peak: Tensor, heat: Tensor) -> Tensor:
    """As whole numbers, the largest 2**40: their sums are the same in whatever order, and so in whatever batch."""
    return (logits - peak).div_(heat).exp_().mul_(2.0**40).long()


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of some rows, on the logits' device; ``cpu()`` of each may be taken without waiting."""

    tokens: Tensor
    """``[rows]``: the chosen tokens."""
    chosen: Tensor
    """``[rows]``: how likely they are."""
    top: Tensor
    """``[rows, count]``: the likeliest tokens, of equals the lower id first."""
    top_logprobs: Tensor
    """``[rows, count]``."""

    @staticmethod
    def of(logits: Tensor, tokens: Tensor, rows: Sequence[int], count: int) -> Logprobs:
        """Of ``rows`` of ``logits [all rows, vocab]`` and of the ``tokens [all rows]`` chosen there."""
        which = torch.tensor(rows, dtype=torch.int64).to(logits.device, non_blocking=True)
        logits, tokens = logits[which], tokens[which]
        most = logits.amax(1, keepdim=True)
        # A CPU's own log_softmax adds a large vocabulary up in float32, one number after the other.
        total = (logits - most).exp_().sum(1, keepdim=True, dtype=torch.float64).log_().float()
        top = largest(logits, min(count, logits.shape[1]))
        chosen = logits.gather(1, tokens.clamp(min=0).unsqueeze(1)) - most - total
        return Logprobs(tokens, chosen[:, 0], top, logits.gather(1, top) - most - total)

    def map(self, change: Callable[[Tensor], Tensor]) -> Logprobs:
        """The same with every tensor changed: copied to the host, say."""
        return Logprobs(change(self.tokens), change(self.chosen), change(self.top), change(self.top_logprobs))

    def told(self, requests: Sequence[Request]) -> dict[int, TokenLogprobs]:
        """As ``each``, by request id; a row without a token is left out."""
        found = zip(requests, self.each(requests), strict=True)
        return {request.id: one for request, one in found if one is not None}

    def each(self, requests: Sequence[Request]) -> list[TokenLogprobs | None]:
        """On the host: for the request of each row as many as it asked for, ``None`` for a row without a token.

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
