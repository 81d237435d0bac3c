"""Completions of prompts."""

from __future__ import annotations

from dataclasses import dataclass

from attnplug_engine.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one prompt. ``cached_tokens`` of the prompt were found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """Completion of one prompt. ``text`` is None if the checkpoint has no tokenizer."""

    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: str
    usage: Usage
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token, if ``SamplingParams.logprobs`` requests them."""
