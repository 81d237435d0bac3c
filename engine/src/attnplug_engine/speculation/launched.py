"""A step of rounds and prefills that was asked of the device: what it will have brought, on its way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug_engine.launched import to_host
from attnplug_engine.request import Request, TokenLogprobs
from attnplug_engine.sampler import Logprobs
from attnplug_engine.speculation.timing import Timing


@dataclass(frozen=True, slots=True, eq=False)
class Brought:
    """What some requests got of the device: their ``tokens [requests, most]`` and how many, ``counts [requests]``.

    ``logits [requests * most, vocab]`` are those by which the tokens were chosen, and are read when this is launched.
    """

    requests: Sequence[Request]
    tokens: Tensor
    counts: Tensor
    logits: Tensor


class LaunchedRounds:
    """The new tokens of a step, and log probabilities for the requests that ask. ``replayed``: graphs ran its round."""

    def __init__(self, parts: Sequence[Brought], timing: Timing | None, *, replayed: bool) -> None:
        self.replayed, self.timing = replayed, timing
        self._parts = [to_host(torch.cat([part.counts.unsqueeze(1), part.tokens], 1)) for part in parts]
        self._asking: list[tuple[list[Request], Logprobs]] = []
        for part in parts:
            self._ask(part)
        self._done: torch.cuda.Event | None = None
        if parts and parts[0].tokens.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record()

    def _ask(self, part: Brought) -> None:
        most = part.tokens.shape[1]
        asking = [number for number, request in enumerate(part.requests) if request.params.logprobs is not None]
        if not asking:
            return
        requests = [part.requests[number] for number in asking for _ in range(most)]
        rows = [number * most + place for number in asking for place in range(most)]
        count = max(request.params.logprobs or 0 for request in requests)
        found = Logprobs.of(part.logits, part.tokens.flatten(), rows, count).map(to_host)
        self._asking.append((requests, found))

    def tokens(self) -> list[list[int]]:
        """New tokens for each of the step's ``sampled_requests``; the last is -1 where logits are not finite. Waits."""
        if self._done is not None:
            self._done.synchronize()
        return [row[1 : 1 + row[0]] for part in self._parts for row in part.tolist()]

    def logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """By request id, for those that ask: of each new token, and of none past them. Call it after ``tokens``."""
        told: dict[int, list[TokenLogprobs]] = {}
        for requests, found in self._asking:
            for request, one in zip(requests, found.each(requests), strict=True):
                if one is not None:
                    told.setdefault(request.id, []).append(one)
        return told
