"""Requests: prompt, sampling parameters, and progress."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from attnplug import UsageError
from attnplug.hf.config_keys import show

if TYPE_CHECKING:
    from collections import deque

    from attnplug_engine.text.transcript import Transcript

DEFAULT_MAX_TOKENS = 32
LARGEST = LARGEST_SEED = 2**63 - 1
_LARGEST_FLOAT, _SMALLEST_FLOAT = sys.float_info.max, math.ulp(0.0)


def _refuse(name: str, value: object, allowed: str) -> UsageError:
    return UsageError(f"`{name}` {show(value)} is not allowed; give {allowed}", settings=[name])


def _check_whole(name: str, value: object, lowest: int, allowed: str) -> None:
    # Values also come from JSON lines, where a text or true is one typo away and numbers may have hundreds of digits.
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= LARGEST:
        raise _refuse(name, value, allowed)


def _check_number(name: str, value: object, lowest: float, highest: float, allowed: str) -> None:
    # Not math.isfinite, which overflows for an int of hundreds of digits; comparisons do not.
    if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
        raise _refuse(name, value, allowed)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters and stop conditions of one request.

    A temperature of 0 is greedy, whatever ``top_k``, ``top_p`` and ``min_p`` are. ``top_k`` keeps the k most likely
    tokens (0 keeps all). ``top_p`` then keeps the most likely ones that together have this share of the remaining
    probability. ``min_p`` keeps those that are at least ``min_p`` times as likely as the most likely one. Without a
    ``seed``, the sampler derives one from its own seed and the request id. A stop token ends the request and is its
    last token. A text of ``stop`` ends it too, with the token that completes it; the request's text ends before it.
    ``logprobs`` requests the log probability of every new token, and of this number of most likely tokens in its place.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    min_p: float = 0.0

    def __post_init__(self) -> None:
        _check_whole("max_tokens", self.max_tokens, 1, f"a number of new tokens, 1 or more, at most {LARGEST}")
        _check_number("temperature", self.temperature, 0, _LARGEST_FLOAT, "0 for greedy, or a finite number above 0")
        object.__setattr__(self, "temperature", float(self.temperature))  # numpy accepts no int above 64 bits
        _check_whole("top_k", self.top_k, 0, "0 for all tokens, or how many of the likeliest to keep")
        _check_number("top_p", self.top_p, _SMALLEST_FLOAT, 1, "a share above 0 and at most 1")
        _check_number("min_p", self.min_p, 0, 1, "a share from 0, which keeps all, to 1")
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, f"a number from 0 to {LARGEST_SEED}")
        if not isinstance(self.stop_token_ids, frozenset):
            raise _refuse("stop_token_ids", self.stop_token_ids, "a frozenset of token ids, 0 or more each")
        for token in self.stop_token_ids:
            _check_whole("stop_token_ids", token, 0, "token ids, 0 or more each")
        if not isinstance(self.stop, tuple):
            raise _refuse("stop", self.stop, "a tuple of texts")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise _refuse("stop", self.stop, "texts that are not empty")
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, "how many of the most likely tokens to report, 0 or more")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class FinishReason(StrEnum):
    """Reason why a request ended."""

    STOP = "stop"
    """It produced a stop token, which is its last token, or a stop text."""
    LENGTH = "length"
    """It has ``max_tokens`` tokens, or fills the context."""
    ABORTED = "aborted"
    """Its owner ended it."""
    ERROR = "error"
    """It could not continue; the engine reports why."""


class RequestState(StrEnum):
    """State of a request. A preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class LikelyToken(NamedTuple):
    """A token and its log probability (natural logarithm)."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a sampled token, by the model's logits before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[LikelyToken, ...]
    """Most likely tokens in its place, as many as requested; of equals the lower token id first."""


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its progress. The scheduler changes it; all others only read it.

    The engine maintains ``transcript``, ``logprobs`` and ``followers``, because it sees every new token.

    ``computed`` counts the tokens, prompt and output, whose cache rows are written by scheduled steps, those in flight
    included. It returns to 0 if the request is preempted, while ``output`` stays. ``output`` holds the tokens of
    finished steps. ``cached_tokens`` is the prefix found in the cache at the first admission; a preempted request that
    finds its own pages again does not count as a hit.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    row: int | None = None
    """Row of the slot table, while it has one."""
    slot: int | None = None
    """Slot of its linear-attention state, while it has a row and the model has such layers."""
    computed: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    max_length: int = 0
    """Number of tokens, prompt and output, at which the request ends; the scheduler limits it to the context."""
    transcript: Transcript | None = None
    """Text so far, if it has stop texts."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry per output token, if requested."""
    followers: list[Follower] = field(default_factory=list)
    steps_in_flight: int = 0
    """Steps in flight that give it tokens (speculation)."""
    in_rounds: bool = False
    """True once its prefill is completely scheduled and rounds follow (speculation)."""
    sampling: bytes | None = None
    """Parameters and seed in the sampler's packed form, once computed."""

    def __post_init__(self) -> None:
        self.prompt = tuple(self.prompt)
        self.max_length = len(self.prompt) + self.params.max_tokens

    @property
    def length(self) -> int:
        """Number of tokens so far, prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def pending(self) -> int:
        """Number of output tokens that steps in flight sample and the host does not know yet."""
        return max(self.computed + 1 - len(self.prompt) - len(self.output), 0)

    @property
    def decoding(self) -> bool:
        """True if only its newest output token, known or pending, is left to compute."""
        return self.computed >= len(self.prompt) + max(len(self.output) - 1, 0)

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the tokens at positions ``start`` to ``stop - 1`` of prompt and output."""
        prompt = len(self.prompt)
        if stop <= prompt:
            return self.prompt[start:stop]
        return self.prompt[start:] + tuple(self.output[max(start - prompt, 0) : stop - prompt])


@dataclass(slots=True)  # created per token; frozen would take twice as long
class Update:
    """A new token of a prompt, or its end (``token`` is None). ``index`` is the prompt's position in its list."""

    index: int
    request: Request
    token: int | None


@dataclass(slots=True, eq=False)
class Follower:
    """A consumer of a request's updates. ``index`` is the request's position among those that it follows."""

    updates: deque[Update]
    index: int

    def notify(self, request: Request, token: int | None) -> None:
        self.updates.append(Update(self.index, request, token))
