"""Chat template of a checkpoint: renders a conversation as the text that its model expects.

A template is untrusted code. It is compiled and rendered in a process of its own, see ``template_worker``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from attnplug import UsageError
from attnplug.hf.config_keys import read_json_object, read_text, show
from attnplug.host import AttnplugError
from attnplug_engine.checkpoints.random import TINY
from attnplug_engine.checkpoints.safetensors import checkpoint_folder
from attnplug_engine.text.chat import Chat
from attnplug_engine.text.errors import PromptError
from attnplug_engine.text.template_process import PROCESS
from attnplug_engine.text.tokenizer_config import TokenizerConfig

_KEY = "chat_template"
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A template. ``tokens`` are the special tokens that it may write, by names such as ``bos_token``."""

    def __init__(self, text: str, source: str, tokens: Mapping[str, str]) -> None:
        self._text, self._source, self._tokens = text, source, tokens

    @classmethod
    def find(cls, reference: str) -> ChatTemplate:
        """Find the template of a model reference, where transformers looks for it. Raises UsageError."""
        if reference.startswith(TINY):
            raise UsageError(f"{reference} has no chat template: a built-in model is not trained on conversations")
        folder = checkpoint_folder(reference)
        config = TokenizerConfig(folder)
        text, source = _text(folder, config.values)
        return cls(text, str(source), config.special_tokens)

    def render(self, chat: Chat) -> str:
        """Render the conversation up to the start of the model's answer.

        Raises PromptError if the template refuses the conversation or fails, and UsageError if it cannot be compiled or
        exceeds the limits of time and memory.
        """
        keys = {"messages": _with_reasoning(chat.messages), "tools": None, "documents": None}
        try:
            answer = PROCESS.render(self._text, {**self._tokens, **keys, "add_generation_prompt": True})
        except AttnplugError as error:
            raise type(error)(f"{self._source}: {error.message}") from error
        if (text := answer.get("text")) is not None:
            return text
        ((kind, message),) = answer.items()
        # The message is the checkpoint's own: control characters must not reach a terminal.
        message = "".join(char if char.isprintable() else "?" for char in message)
        if kind == "invalid":
            raise UsageError(f"{self._source}: the chat template {message}")
        raise PromptError(f"{self._source}: the chat template {'refuses' if kind == 'refused' else 'fails'}: {message}")


def _with_reasoning(messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Copy a message's reasoning to all key names that templates read."""
    copied: list[Mapping[str, object]] = []
    for message in messages:
        given = next((message[key] for key in _REASONING if message.get(key) is not None), None)
        copied.append(message if given is None else {"thinking": given, **message, "reasoning_content": given})
    return copied


def _text(folder: Path, config: Mapping[str, object]) -> tuple[str, Path]:
    """Return the template and the file it is from. A file of its own takes precedence over the config."""
    path = folder / "chat_template.jinja"
    if os.path.lexists(path):
        return read_text(path), path
    path, value = folder / "tokenizer_config.json", config.get(_KEY)
    older = folder / "chat_template.json"
    if value is None and os.path.lexists(older):
        path, value = older, read_json_object(older).get(_KEY)
    if value is None:
        raise UsageError(
            f"the checkpoint {str(folder)!r} has no chat template, neither as chat_template.jinja nor in "
            "tokenizer_config.json; write the prompt as the model expects it, and give it as text"
        )
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        if "default" not in named:
            raise UsageError(f"{path}: '{_KEY}' has no template named 'default'; it has {show(list(named))}")
        value = named["default"]
    if not isinstance(value, str):
        raise UsageError(f"{path}: '{_KEY}' is {show(value)}; it must be a text, or a list of named templates")
    return value, path
