"""A step: the tokens that the scheduler runs together, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from attnplug import ForwardMode
from attnplug.kernels import PageCopy
from attnplug_engine.request import Request

PENDING = -1
"""In ``token_ids``: a token that an earlier step, still in flight, samples for the same row."""
BAD_LOGITS = -1
"""In place of a sampled token: the logits are not finite, so no token can be sampled."""


class StepEntry(NamedTuple):  # half the cost of a frozen dataclass; created per request and step
    """Tokens that one request runs in a step: ``token_ids`` at ``position``, ``position + 1``, …

    A decoding request may run its newest token before the host knows it: ``token_ids`` is then ``(PENDING,)``. If
    ``sampled``, the logits of the last token give the request's next token; otherwise the tokens only fill the cache.
    """

    request: Request
    position: int
    token_ids: tuple[int, ...]
    sampled: bool

    @property
    def positions(self) -> range:
        return range(self.position, self.position + len(self.token_ids))


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its entries in the order of their rows in the batch.

    ``copies`` go to the pools' ``copy_pages``, in this order, before anything is written. ``rows`` are the entries'
    rows of the slot table, whose lengths already include the new tokens. ``state_slots`` are the slots of their linear
    states, if the model has any. ``snapshots`` are pairs of such slots: after the forward, the state of the first is
    copied to the second. With speculation, the first ``rounds`` entries are verified in a round; their ``position`` is
    an upper bound of the rows committed before it.
    """

    mode: ForwardMode
    entries: tuple[StepEntry, ...]
    copies: tuple[PageCopy, ...]
    rows: tuple[int, ...]
    state_slots: tuple[int, ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()
    rounds: int = 0

    @property
    def num_tokens(self) -> int:
        return sum([len(entry.token_ids) for entry in self.entries])

    @property
    def sampled_requests(self) -> list[Request]:
        """Requests to sample a token for, in the order of ``sampled_rows``."""
        return [entry.request for entry in self.entries if entry.sampled]

    @property
    def sampled_rows(self) -> list[int]:
        """Indices of the step's ``num_tokens`` rows whose logits are sampled."""
        rows, end = [], 0
        for entry in self.entries:
            end += len(entry.token_ids)
            if entry.sampled:
                rows.append(end - 1)
        return rows


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step: each request's new token by request id, and the requests that it finished."""

    tokens: dict[int, int]
    finished: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Result of a speculative step: each request's new tokens by request id, and the requests that it finished."""

    tokens: dict[int, list[int]]
    finished: tuple[Request, ...]
