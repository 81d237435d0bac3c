"""A step: the tokens that the scheduler runs together, and the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from attnplug import ForwardMode
from attnplug.host import PageCopy
from attnplug_engine.request import Request

PENDING = -1
"""In a step's ``token_ids``: a token that an earlier step, still in flight, samples for the same row."""
BAD_LOGITS = -1
"""In place of a sampled token: the logits are not finite, and no token can be chosen from them."""


class StepEntry(NamedTuple):  # made for every request at every step, at less than half a frozen dataclass's cost
    """The tokens that one request runs in a step: ``token_ids`` at ``position``, ``position + 1``, …

    A request that decodes may run its newest token before the host knows it: ``token_ids`` is then ``(PENDING,)``.
    ``sampled`` says that the logits of its last token choose the request's next token; the others only fill the
    cache.
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
    """What to run: the entries in the order of their rows in the batch.

    ``copies`` go to the pools' ``copy_pages``, in this order, before anything is written. ``rows`` are the entries'
    rows of the slot table, which has room for the new tokens already: its lengths include them. ``state_slots`` are
    the slots of their linear states, if the model has any. ``snapshots`` are pairs of such slots: after the forward
    the state of the first is copied to the second. With speculation the first ``rounds`` entries are verified in a
    round: their ``position`` is the most that may be committed before it.
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
        """The requests to sample a token for, in the order of ``sampled_rows``."""
        return [entry.request for entry in self.entries if entry.sampled]

    @property
    def sampled_rows(self) -> list[int]:
        """Which of the step's ``num_tokens`` rows carry the logits to sample from."""
        rows, end = [], 0
        for entry in self.entries:
            end += len(entry.token_ids)
            if entry.sampled:
                rows.append(end - 1)
        return rows


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought: each request's new token by request id, and the requests that it finished."""

    tokens: dict[int, int]
    finished: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a step of a speculating engine brought: each request's new tokens by request id, and whom it finished."""

    tokens: dict[int, list[int]]
    finished: tuple[Request, ...]
