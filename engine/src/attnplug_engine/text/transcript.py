"""The text of tokens as they come: only what later tokens cannot change, up to where a stop text begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnplug_engine.text.tokenizer import Tokenizer

_UNDECIDED = "\ufffd"
"""What tokenizers give for the bytes of a character that is not complete."""

_MOST_PENDING = 16
"""Tokens without a sure character after which one does not wait any longer: a character has four bytes at most."""


class Detokenizer:
    """Text of tokens, one by one, in time that does not grow with what came before.

    What a token reads as depends on the tokens before it (a leading space is dropped at the start, a character may
    be divided over tokens). So a window is decoded: the tokens of the last piece of text, and those after it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._known = 0  # tokens of the window whose text is told whole
        self._told = 0  # characters of the window's text that are told

    def push(self, token: int) -> str:
        """The text that this token makes sure; empty while a character is not complete."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        sure = text
        if len(self._window) - self._known <= _MOST_PENDING:
            sure = text.rstrip(_UNDECIDED)
        new = sure[self._told :]
        self._told = max(self._told, len(sure))
        if len(sure) == len(text) and (new or len(self._window) - self._known > _MOST_PENDING):
            del self._window[: self._known]
            self._known = len(self._window)
            self._told = len(self._tokenizer.decode(self._window))
        return new

    def finish(self) -> str:
        """What is left when no token follows: the bytes of an incomplete character, as tokenizers show them."""
        rest = self._tokenizer.decode(self._window)[self._told :]
        self._told += len(rest)
        return rest


class Transcript:
    """The text of one request while it grows; ends before the first stop text that is complete.

    What may be the beginning of a stop text is held back until it is decided. Where the text is cut depends on its
    characters only and not on how tokens divide them: the stop text that is complete first, and of those that are
    complete with the same character the longest.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = tuple(stop)
        self._pieces: list[str] = []
        self._held = ""
        self.stopped = False
        """Whether a stop text was found: nothing follows."""

    @property
    def text(self) -> str:
        """All that was given out so far."""
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        """The text that can be shown now that ``token`` is there."""
        return "" if self.stopped else self._give(self._cut(self._detokenizer.push(token)))

    def finish(self) -> str:
        """The rest of the text when no token follows."""
        rest = "" if self.stopped else self._cut(self._detokenizer.finish()) + self._held
        self._held = ""
        return self._give(rest)

    def _give(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def _cut(self, new: str) -> str:
        """What of the text held back and the new is for sure no part of a stop text."""
        if not self._stop:
            return new
        text = self._held + new
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        held = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` are the beginning of ``stop``, which is not all there."""
    return next((count for count in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:count])), 0)
