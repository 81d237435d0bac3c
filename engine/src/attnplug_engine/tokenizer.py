"""Text to tokens and back, for checkpoints that bring a tokenizer and for the built-in tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from attnplug.errors import UsageError
from attnplug_engine.random_checkpoint import TINY


class Tokenizer(Protocol):
    """What the engine needs of one."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """The tiny models' own: a token is a byte. Their vocabulary ends at 128, so they read ASCII."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = min(vocab_size, 256)

    def encode(self, text: str) -> list[int]:
        tokens = list(text.encode())
        if tokens and max(tokens) >= self._vocab_size:
            odd = next(character for character in text if max(character.encode()) >= self._vocab_size)
            raise UsageError(f"the prompt holds {odd!r}; a built-in tiny model reads ASCII only")
        return tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


class FileTokenizer:
    """A checkpoint's ``tokenizer.json``, by the tokenizers library."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Implementation
        except ImportError:
            raise UsageError(
                f"{path} needs the package tokenizers, which is not installed; "
                "pip install 'attnplug-engine[tokenizer]', or give prompts as token ids"
            ) from None
        try:
            self._tokenizer: Any = Implementation.from_file(str(path))
        except Exception as error:  # the library raises its own errors as plain Exception
            raise UsageError(f"{path} cannot be read as a tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids)))


def find_tokenizer(reference: str, vocab_size: int) -> Tokenizer | None:
    """The tokenizer of a model reference; ``None`` where the checkpoint has none."""
    if reference.startswith(TINY):
        return ByteTokenizer(vocab_size)
    folder = Path(reference)
    path = (folder if folder.is_dir() else folder.parent) / "tokenizer.json"
    return FileTokenizer(path) if path.exists() else None
