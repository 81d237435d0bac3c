"""Incremental detokenization: text that later tokens cannot change, up to the first stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnplug_engine.text.tokenizer import Tokenizer

_UNDECIDED = "\ufffd"
"""Replacement character that tokenizers return for the bytes of an incomplete character."""

_MAX_PENDING = 16
"""Most tokens to wait for a complete character, which has at most four bytes."""


class Detokenizer:
    """Incremental detokenizer. Its time per token does not grow with the text.

    The text of a token depends on preceding tokens: a leading space is dropped at the start, and a character may span
    tokens. So a window is decoded: the tokens of the last piece of text, and those behind it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._known = 0  # tokens of the window whose text was returned completely
        self._returned = 0  # characters of the window's text that were returned

    def push(self, token: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        sure = text
        if len(self._window) - self._known <= _MAX_PENDING:
            sure = text.rstrip(_UNDECIDED)
        new = sure[self._returned :]
        self._returned = max(self._returned, len(sure))
        if len(sure) == len(text) and (new or len(self._window) - self._known > _MAX_PENDING):
            del self._window[: self._known]
            self._known = len(self._window)
            self._returned = len(self._tokenizer.decode(self._window))
        return new

    def finish(self) -> str:
        """Return the rest when no token follows: the bytes of an incomplete character, as tokenizers show them."""
        rest = self._tokenizer.decode(self._window)[self._returned :]
        self._returned += len(rest)
        return rest


class Transcript:
    """Growing text of one request; ends before the first complete stop text.

    Text that may be the beginning of a stop text is held back until that is decided. The end depends on the characters
    only, not on token boundaries: the stop text that is complete first wins, and of those complete at the same
    character the longest.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = tuple(stop)
        self._pieces: list[str] = []
        self._held = ""
        self.stopped = False
        """True if a stop text was found; no text follows."""

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        """Return the text that can be shown with ``token``."""
        return "" if self.stopped else self._append(self._without_stop(self._detokenizer.push(token)))

    def finish(self) -> str:
        """Return the rest of the text when no token follows."""
        rest = "" if self.stopped else self._without_stop(self._detokenizer.finish()) + self._held
        self._held = ""
        return self._append(rest)

    def _append(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def _without_stop(self, new: str) -> str:
        """Return the part of held-back and new text that cannot belong to a stop text."""
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
    """Return the length of the longest end of ``text`` that is a proper prefix of ``stop``."""
    return next((count for count in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:count])), 0)
