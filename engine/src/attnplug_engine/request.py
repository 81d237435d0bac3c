"""A request: what was asked, how its tokens are chosen, how far it has come, and its part in a step."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from attnplug.host import UsageError, show

if TYPE_CHECKING:
    from collections import deque

    from attnplug_engine.text.transcript import Transcript

DEFAULT_MAX_TOKENS = 32
LARGEST = LARGEST_SEED = 2**63 - 1
_LARGEST_FLOAT, _SMALLEST_FLOAT = sys.float_info.max, math.ulp(0.0)


def _refuse(name: str, value: object, allowed: str) -> UsageError:
    return UsageError(f"{name}={show(value)} is not allowed; give {allowed}")


def _check_whole(name: str, value: object, lowest: int, allowed: str) -> None:
    # Values come from JSON lines too, where a text or true is one typo away, and numbers may have hundreds of digits.
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= LARGEST:
        raise _refuse(name, value, allowed)


def _check_number(name: str, value: object, lowest: float, highest: float, allowed: str) -> None:
    # No math.isfinite, which overflows for an int of hundreds of digits; comparisons do not.
    if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
        raise _refuse(name, value, allowed)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    A temperature of 0 is greedy, whatever ``top_k``, ``top_p`` and ``min_p`` say. ``top_k`` keeps the k likeliest
    tokens (0 keeps all); ``top_p`` then keeps the likeliest that together have this share of what is left; ``min_p``
    keeps those that are at least so many times as likely as the likeliest. Without a ``seed`` the sampler derives one
    from its own seed and the request's id. A stop token ends the request and is its last token. A text of ``stop`` ends
    it too, with the token that completes it; the request's text ends before it.
    ``logprobs`` asks for the log probability of every new token, and of so many of the likeliest beside it.
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
        object.__setattr__(self, "temperature", float(self.temperature))  # numpy takes no int above 64 bits
        _check_whole("top_k", self.top_k, 0, "0 for all tokens, or how many of the likeliest to keep")
        _check_number("top_p", self.top_p, _SMALLEST_FLOAT, 1, "a share above 0 and at most 1")
        _check_number("min_p", self.min_p, 0, 1, "a share from 0, which keeps all, to 1")
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, f"a number from 0 to {LARGEST_SEED}")
        if not isinstance(self.stop_token_ids, frozenset):
            raise _refuse("stop_token_ids", self.stop_token_ids, "a frozenset of token ids, 0 or more each")
        for token in self.stop_token_ids:
            _check_whole("stop_token_ids: token", token, 0, "token ids, 0 or more each")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise _refuse("stop", self.stop, "texts, none of them empty")
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, "how many of the likeliest tokens to tell, 0 or more")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """It produced one of its stop tokens, which is its last token, or a stop text."""
    LENGTH = "length"
    """It has ``max_tokens`` tokens, or fills the context."""
    ABORTED = "aborted"
    """Its owner ended it."""
    ERROR = "error"
    """It could not go on; the engine says why."""


class RequestState(StrEnum):
    """Where a request is. A preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class LikelyToken(NamedTuple):
    """A token, and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model found a token: of its own logits, before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[LikelyToken, ...]
    """The likeliest tokens in its place, as many as were asked for; of equals the lower token id first."""


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way to its tokens. The scheduler changes it; everyone else reads.

    The last three fields are the engine's, which looks at every new token.

    ``computed`` counts the tokens, prompt and output together, whose cache rows are written by the steps that were
    scheduled, those in flight included; it falls back to 0 when the request is preempted, while ``output`` stays.
    ``output`` holds the tokens of finished steps. ``cached_tokens`` is the prefix that the cache supplied when the
    request was first admitted; a preempted request that finds its own pages again is no hit.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    row: int | None = None
    """Its row of the slot table, while it has one."""
    slot: int | None = None
    """Where its linear-attention state lies, while it has a row and the model has such layers."""
    computed: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    max_length: int = 0
    """Tokens, prompt and output together, at which the request ends; the scheduler lowers it to the context."""
    transcript: Transcript | None = None
    """Its text so far, where it has stop texts to look for."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One for each output token, where they are asked for."""
    followers: list[Follower] = field(default_factory=list)
    flying: int = 0
    """With speculation: steps in flight that bring it tokens."""
    in_rounds: bool = False
    """With speculation: its prefill is scheduled to the end, and rounds go on from there."""
    sampling: bytes | None = None
    """Its parameters and seed as the sampler packs them, once it has."""

    def __post_init__(self) -> None:
        self.prompt = tuple(self.prompt)
        self.max_length = len(self.prompt) + self.params.max_tokens

    @property
    def length(self) -> int:
        """Tokens so far, prompt and output together."""
        return len(self.prompt) + len(self.output)

    @property
    def pending(self) -> int:
        """Output tokens that steps in flight sample, and that are not known yet."""
        return max(self.computed + 1 - len(self.prompt) - len(self.output), 0)

    @property
    def decoding(self) -> bool:
        """Whether all that is left to compute is its newest output token, known or pending."""
        return self.computed >= len(self.prompt) + max(len(self.output) - 1, 0)

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """The tokens at positions ``start`` to ``stop - 1``, prompt and output as one sequence."""
        prompt = len(self.prompt)
        if stop <= prompt:
            return self.prompt[start:stop]
        return self.prompt[start:] + tuple(self.output[max(start - prompt, 0) : stop - prompt])


@dataclass(slots=True)  # made for every token: frozen it takes twice as long
class Update:
    """A new token of a prompt, or its end (``token`` is ``None``). ``index`` is the prompt's, in its list."""

    index: int
    request: Request
    token: int | None


@dataclass(slots=True, eq=False)
class Follower:
    """One who follows a request: where its updates go, and its index among those that he follows."""

    updates: deque[Update]
    index: int

    def tell(self, request: Request, token: int | None) -> None:
        self.updates.append(Update(self.index, request, token))
