"""Conversations as prompts. ``chat_template`` renders them for a model; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnplug import UsageError
from attnplug.hf.config_keys import show

_ALLOWED = 'a list of messages, each an object with texts as "role" and "content" (null beside "tool_calls")'


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the checkpoint's chat template: ``Chat([{"role": "user", "content": "Hello"}])``.

    A message may have further keys, with JSON values; their meaning is defined by the template.
    """

    messages: Sequence[Mapping[str, object]]

    def __post_init__(self) -> None:
        messages: object = self.messages
        if not isinstance(messages, list | tuple) or not messages:
            raise UsageError(f"messages is {show(messages)}; it must be {_ALLOWED}")
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise UsageError(f"messages has {show(message)} at index {number}; it must be {_ALLOWED}")
            for key in ("role", "content"):
                silent = key == "content" and message.get(key) is None and bool(message.get("tool_calls"))
                if not isinstance(message.get(key), str) and not silent:
                    found = show(message[key]) if key in message else "missing"
                    raise UsageError(f"{key} of message {number} is {found}; messages must be {_ALLOWED}")

    @classmethod
    def of_user(cls, text: str) -> Chat:
        """Return a conversation of one user message."""
        return cls([{"role": "user", "content": text}])
