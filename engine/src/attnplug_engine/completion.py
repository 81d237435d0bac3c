"""What became of prompts: each one's completion, and what all of them took."""

from __future__ import annotations

from dataclasses import dataclass

from attnplug import ForwardMode
from attnplug_engine.request import Step, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one prompt. ``cached_tokens`` are those of the prompt that the prefix cache supplied."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of one prompt. ``text`` is ``None`` where the checkpoint has no tokenizer."""

    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: str
    usage: Usage
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One for each token, where ``SamplingParams.logprobs`` asks for them."""


@dataclass(slots=True)
class Statistics:
    """Tokens and seconds since the engine was made. A step that does both is divided by its tokens."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    def add(self, step: Step, seconds: float) -> None:
        total = step.num_tokens
        decoding = (
            total if step.mode is ForwardMode.DECODE else sum(1 for entry in step.entries if entry.request.output)
        )
        self.decode_tokens += decoding
        self.prefill_tokens += total - decoding
        self.decode_seconds += seconds * decoding / total
        self.prefill_seconds += seconds * (total - decoding) / total
