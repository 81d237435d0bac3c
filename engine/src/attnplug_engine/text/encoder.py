"""Prompt encoder: texts, conversations and token ids to validated token ids of one model."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from attnplug import PoolError, UsageError
from attnplug.hf.config_keys import show
from attnplug_engine.text.chat import Chat
from attnplug_engine.text.chat_template import ChatTemplate
from attnplug_engine.text.errors import PromptError
from attnplug_engine.text.tokenizer import Tokenizer, find_tokenizer, has_tokenizer

Prompt = str | Sequence[int] | Chat
_NO_TOKENIZER = (
    "the checkpoint has no tokenizer.json; give the prompt as token ids (prompt_token_ids in --prompts), or write the "
    "file with save_pretrained of its tokenizer in transformers"
)
NO_STOP_TEXTS = "stop texts need the checkpoint's tokenizer.json, and it has none; use stop_token_ids"


def check_files(model: str, prompt: Prompt, *, stop: bool = False) -> None:
    """Raise UsageError if a checkpoint lacks a file that a prompt, or a ``stop`` text, needs. Reads no weights."""
    if not has_tokenizer(model) and (stop or isinstance(prompt, str | Chat)):
        raise UsageError(NO_STOP_TEXTS if stop else _NO_TOKENIZER)
    if isinstance(prompt, Chat):
        ChatTemplate.find(model)


class PromptEncoder:
    """Encodes texts, conversations and token ids. ``tokenizer`` is None if the checkpoint has none.

    A checkpoint's chat template is read at the first conversation.
    """

    def __init__(self, model: str, vocab_size: int) -> None:
        self._model, self._vocab_size = model, vocab_size
        self.tokenizer: Tokenizer | None = find_tokenizer(model, vocab_size)
        self._chat_template: ChatTemplate | None = None

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """Return the token ids of a prompt, all within the vocabulary. Raises UsageError."""
        if isinstance(prompt, str | Chat):
            return self._encode_text(prompt)
        if isinstance(prompt, bytes):  # also a sequence of numbers
            raise PromptError("the prompt is bytes; give a text, or a list of token ids")
        return [self._checked(token) for token in prompt]

    def _checked(self, token: int) -> int:
        if not isinstance(token, int) and hasattr(token, "__index__"):  # integers of numpy and torch
            token = operator.index(token)
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._vocab_size:
            raise PromptError(f"token id {show(token)} is not in the vocabulary; give 0 to {self._vocab_size - 1}")
        return token

    def _encode_text(self, prompt: str | Chat) -> Sequence[int]:
        if self.tokenizer is None:
            raise UsageError(_NO_TOKENIZER)
        text = prompt if isinstance(prompt, str) else self._rendered(prompt)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = "a byte that is not UTF-8, or half of a surrogate pair"  # argv keeps such bytes as these
            raise PromptError(f"the prompt is not text: character {error.start} is {what}") from None
        return self.tokenizer.encode(text, special_tokens=isinstance(prompt, str))

    def _rendered(self, chat: Chat) -> str:
        if self._chat_template is None:
            self._chat_template = ChatTemplate.find(self._model)
        return self._chat_template.render(chat)


@contextmanager
def naming_prompt(where: str) -> Iterator[None]:
    """Prefix errors raised inside with the prompt's place."""
    try:
        yield
    except (UsageError, PoolError) as error:
        raise type(error)(f"{where}: {error.message}", settings=error.settings) from error
