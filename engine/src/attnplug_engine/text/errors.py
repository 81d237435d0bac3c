"""Errors of single prompts."""

from __future__ import annotations

from attnplug import UsageError


class PromptError(UsageError):
    """A prompt cannot be served. Other prompts of the same model are not affected."""
