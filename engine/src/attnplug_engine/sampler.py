"""The next token of each request: greedy or drawn, the same in whatever batch the request runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import gcd, inf

import numpy as np
import torch
from torch import Tensor

from attnplug.host import AttnplugError, UsageError
from attnplug_engine.request import LikelyToken, Request, SamplingParams, TokenLogprobs

_FIRST_LOOK = 1024
"""How many of the likeliest tokens top-p looks at before it sorts the whole vocabulary."""

_BLOCK, _SMALLEST_BLOCK = 512, 32
"""On the CPU the largest logit is looked for in blocks: the largest power of two, within these, that divides a row."""


class BadLogits(AttnplugError):
    """Logits that are not finite: no token can be chosen from them. ``request_ids`` says whose."""

    def __init__(self, request_ids: Sequence[int]) -> None:
        self.request_ids = tuple(request_ids)
        super().__init__(
            f"the logits of requests {list(self.request_ids)} hold NaN or infinite values; the weights, the data type "
            "or the attention backend is at fault: try float32, or another backend"
        )


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but the two, for the output token at ``position``."""
    return (_hash(f"token:{seed}:{position}") >> 11) * 2.0**-53


def request_seed(seed: int, request_id: int) -> int:
    """The seed of a request that brought none, from the sampler's own."""
    return _hash(f"request:{seed}:{request_id}")


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class Sampler:
    """Chooses tokens from logits.

    A request's token depends on its own logits, its parameters, its seed and its number of output tokens so far, and
    on nothing else. Greedy rows share one maximum, which compares and never rounds. A drawn row is worked on alone, as
    a vector of its own in float64 on the CPU: reductions over a whole batch may add in another order when the
    batch is another. The draw walks the tokens in the order of their ids and not of their likelihood, so that logits
    which differ in their last bits (the model's own products depend on the batch) change it only where the
    drawn number falls between them.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> dict[int, int]:
        """The next token of each request, by request id, from ``logits [requests, vocab]``, row by row.

        A logit of -inf marks a token that cannot be chosen. Raises ``BadLogits`` and chooses nothing if a row holds
        NaN or +inf, or no token that can be chosen.
        """
        if logits.dim() != 2 or logits.shape[0] != len(requests) or not logits.shape[1]:
            raise UsageError(
                f"logits of shape {list(logits.shape)} do not fit {len(requests)} requests; give [requests, vocab]"
            )
        if not requests:
            return {}
        tokens = self._greedy(logits, requests)
        drawn = [row for row, request in enumerate(requests) if request.params.temperature]
        if drawn:
            # One copy off the device for all of them; on the CPU a view of each row will do.
            rows = logits if logits.is_cpu else logits[drawn].cpu()
            for place, row in enumerate(drawn):
                request = requests[row]
                vector = rows[row if rows is logits else place]
                tokens[row] = draw(vector, request.params, self._uniform(request))
        return {request.id: token for request, token in zip(requests, tokens, strict=True)}

    def _greedy(self, logits: Tensor, requests: Sequence[Request]) -> list[int]:
        """The likeliest token of every row, the first of equals; checks every row, drawn ones too."""
        best = likeliest(logits)
        if -1 in best:
            raise BadLogits([request.id for request, token in zip(requests, best, strict=True) if token == -1])
        return best

    def _uniform(self, request: Request) -> float:
        seed = request.params.seed
        if seed is None:
            seed = request_seed(self._seed, request.id)
        return uniform(seed, len(request.output) + max(request.pending - 1, 0))  # this one is pending, too


def likeliest(logits: Tensor) -> list[int]:
    """The token with the largest of ``logits [rows, vocab]`` in each row, the first of equals; -1 if it is not finite.

    A NaN or +inf anywhere in a row is its largest, so that one pass finds them too.
    """
    rows, vocab = logits.shape
    block = gcd(vocab, _BLOCK)
    if not logits.is_cpu or logits.dtype is not torch.float32 or block < _SMALLEST_BLOCK:
        largest = logits.max(dim=-1)
        tokens: list[int] = torch.where(torch.isfinite(largest.values), largest.indices, -1).tolist()
        return tokens
    # On the CPU only torch's amax is vectorised, and it has no indices: take the largest of each block, then look for
    # the token in the first block that has it. A third of the time of max, a tenth of argmax.
    peaks = logits.view(rows, -1, block).amax(-1).numpy()
    row, first = np.arange(rows), peaks.argmax(-1)
    found = first * block + logits.numpy().reshape(rows, -1, block)[row, first].argmax(-1)
    finite = np.isfinite(peaks[row, first])
    chosen: list[int] = (found if finite.all() else np.where(finite, found, -1)).tolist()
    return chosen


def draw(logits: Tensor, params: SamplingParams, chance: float) -> int:
    """The token that ``chance``, in [0, 1), picks from ``logits [vocab]`` on the CPU; finite, temperature above 0."""
    logits = logits.double()
    kept: Tensor | None = None
    if 0 < params.top_k < logits.shape[0]:
        kept = _largest(logits, torch.topk(logits, params.top_k).values)
        logits = logits[kept]
    weights = torch.exp((logits - logits.max()) / params.temperature)
    if params.top_p < 1:
        nucleus = _largest(weights, _nucleus(weights, params.top_p))
        weights = weights[nucleus]
        kept = nucleus if kept is None else kept[nucleus]
    cumulative = weights.cumsum(0)
    # The first whose cumulative weight is above the target; a token of weight 0 is never the first.
    choice = int(torch.searchsorted(cumulative, cumulative[-1:] * chance, right=True))
    return choice if kept is None else int(kept[choice])


def token_logprobs(logits: Tensor, requests: Sequence[Request], tokens: Mapping[int, int]) -> dict[int, TokenLogprobs]:
    """By request id, for those that ask: how likely ``logits [requests, vocab]`` make the token chosen for each.

    As in a draw each row is worked on alone, in float64 on the CPU, so that other rows change nothing.
    """
    asking = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    if not asking:
        return {}
    found = {}
    for row, vector in zip(asking, logits[asking].cpu(), strict=True):
        request = requests[row]
        logprobs = torch.log_softmax(vector.double(), dim=0)
        top: list[LikelyToken] = []
        if count := min(request.params.logprobs or 0, logprobs.shape[0]):
            kept = _largest(logprobs, torch.topk(logprobs, count).values)
            pairs = map(LikelyToken, kept.tolist(), logprobs[kept].tolist())
            top = sorted((pair for pair in pairs if pair.logprob > -inf), key=lambda pair: -pair.logprob)
        token = tokens[request.id]
        found[request.id] = TokenLogprobs(token, float(logprobs[token]), tuple(top))
    return found


def _nucleus(weights: Tensor, share: float) -> Tensor:
    """The fewest largest of ``weights [tokens]``, in falling order, that together have ``share`` of their sum."""
    target = weights.cumsum(0)[-1:] * share
    looked_at = min(_FIRST_LOOK, weights.shape[0])
    largest = torch.topk(weights, looked_at).values
    if largest.sum() < target:
        largest = weights.sort(descending=True).values
    return largest[: int(torch.searchsorted(largest.cumsum(0), target)) + 1]


def _largest(values: Tensor, largest: Tensor) -> Tensor:
    """Where the values ``largest``, given in falling order, lie in ``values``: ascending; of equals the first."""
    above = values > largest[-1]
    equal = (values == largest[-1]).nonzero().flatten()[: largest.shape[0] - int(above.sum())]
    above[equal] = True
    return above.nonzero().flatten()
