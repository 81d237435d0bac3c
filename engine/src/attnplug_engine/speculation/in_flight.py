"""A step of rounds and prefills in flight: launched on the device, with its new tokens on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnplug_engine.execution.in_flight import to_host
from attnplug_engine.execution.sampler import Logprobs
from attnplug_engine.execution.step_output import record_event
from attnplug_engine.request import Request, TokenLogprobs
from attnplug_engine.speculation.timing import Timing


class RoundOutput:
    """Output for several requests: the first ``counts [requests]`` of their ``tokens [requests, most]``.

    The copy to the host is started here, before the device's next work. ``logits [requests * most, vocab]`` are those
    from which the tokens were chosen. ``lengths [requests]`` are the cache rows committed by then.
    """

    def __init__(
        self, requests: Sequence[Request], tokens: Tensor, counts: Tensor, logits: Tensor, lengths: Tensor
    ) -> None:
        self._requests = requests
        self._numbers = to_host(torch.cat([lengths.unsqueeze(1), counts.unsqueeze(1), tokens], 1))
        self.committed: list[int] | None = None
        """``lengths`` on the host, once the tokens are read."""
        self._asking: list[Request] = []
        self._logprobs: Logprobs | None = None
        most = tokens.shape[1]
        asking = [number for number, request in enumerate(requests) if request.params.logprobs is not None]
        if asking:
            self._asking = [requests[number] for number in asking for _ in range(most)]
            rows = [number * most + place for number in asking for place in range(most)]
            count = max(request.params.logprobs or 0 for request in self._asking)
            self._logprobs = Logprobs.of(logits, tokens.flatten(), rows, count).map(to_host)
        self._done = record_event(tokens.device)

    def tokens(self) -> list[list[int]]:
        """Return the new tokens of each request. Blocks until they have arrived."""
        if self._done is not None:
            self._done.synchronize()
        numbers = self._numbers.tolist()
        self.committed = [row[0] for row in numbers]
        return [row[2 : 2 + row[1]] for row in numbers]

    def logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """Return log probabilities of each new token by request id, for requests that want them. Call it after
        ``tokens``."""
        logprobs: dict[int, list[TokenLogprobs]] = {}
        if self._logprobs is not None:
            for request, one in zip(self._asking, self._logprobs.each(self._asking), strict=True):
                if one is not None:
                    logprobs.setdefault(request.id, []).append(one)
        return logprobs


class RoundsInFlight:
    """A launched step: new tokens, and log probabilities for requests that want them. ``replayed``: graphs ran its
    round; ``replayed_prefill``: a graph ran its target's prefill."""

    def __init__(
        self, parts: Sequence[RoundOutput], timing: Timing | None, *, replayed: bool, replayed_prefill: bool
    ) -> None:
        self._parts, self.timing = parts, timing
        self.replayed, self.replayed_prefill = replayed, replayed_prefill

    def tokens(self) -> list[list[int]]:
        """Return new tokens for each of ``sampled_requests``; the last is -1 if its logits are not finite. Blocks until
        the step has finished."""
        return [new for part in self._parts for new in part.tokens()]

    def logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """Return log probabilities by request id, for requests that want them. Call it after ``tokens``."""
        return {request: logprobs for part in self._parts for request, logprobs in part.logprobs().items()}
