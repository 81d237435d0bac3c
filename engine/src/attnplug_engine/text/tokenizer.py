"""Tokenizers of checkpoints and of the built-in tiny models."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as Implementation

from attnplug import UsageError
from attnplug.hf.config_keys import read_json_object, regular_size, show
from attnplug_engine.checkpoints.random import TINY
from attnplug_engine.checkpoints.safetensors import checkpoint_folder
from attnplug_engine.text.errors import PromptError
from attnplug_engine.text.tokenizer_config import TokenizerConfig

_MAX_TOKEN = 1 << 30
_MAX_BYTES = 1 << 29  # a tokenizer of 300,000 tokens has 35 MB


class Tokenizer(Protocol):
    """A tokenizer, as the engine uses it."""

    special_tokens: Mapping[str, int]
    """Ids of the tokens that ``decode`` leaves out, by their text: ``<|im_end|>``."""

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text, with the special tokens that the model expects around it unless
        ``special_tokens`` is off.

        Raises UsageError for a text that cannot be encoded, or whose tokens are not in the model's vocabulary.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """Tokenizer of the tiny models: a token is a byte. Their vocabulary ends at 128, so they read ASCII."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = min(vocab_size, 256)
        self.special_tokens: Mapping[str, int] = {}

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        tokens = list(text.encode())
        if tokens and max(tokens) >= self._vocab_size:
            odd = next(character for character in text if max(character.encode()) >= self._vocab_size)
            raise PromptError(f"the prompt holds {odd!r}; a built-in tiny model reads ASCII only")
        return tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


class FileTokenizer:
    """A checkpoint's ``tokenizer.json``, read by the tokenizers library.

    The file's truncation and padding are for training batches and are ignored, as in transformers. Tokens that only
    ``tokenizer_config.json`` names are added.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._path, self._vocab_size = path, vocab_size
        if regular_size(path) > _MAX_BYTES:
            raise UsageError(f"{path} is larger than {_MAX_BYTES} bytes: this is not a tokenizer.json")
        config = TokenizerConfig(path.parent)
        try:
            self._tokenizer = Implementation.from_file(str(path))
        except BaseException as error:
            raise _converted(error, UsageError, f"{path} cannot be read as a tokenizer") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.add_tokens(config.added_tokens())  # existing tokens stay unchanged
        self._tokenizer.encode_special_tokens = config.splits_special_tokens
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.special_tokens: Mapping[str, int] = {token.content: index for index, token in added if token.special}

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        try:
            tokens = self._tokenizer.encode(text, add_special_tokens=special_tokens).ids
        except BaseException as error:
            raise _converted(error, PromptError, f"{self._path} cannot encode the prompt") from error
        if tokens and max(tokens) >= self._vocab_size:
            raise PromptError(
                f"{self._path} gives the prompt token id {max(tokens)}, but the model's vocabulary ends at "
                f"{self._vocab_size - 1}; tokenizer.json and config.json belong to different models"
            )
        return list(tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids)))


def _converted(error: BaseException, kind: type[UsageError], what: str) -> BaseException:
    """Convert the library's errors, which are plain Exceptions, and its panics to ``kind``; return others unchanged."""
    ours = isinstance(error, Exception) or type(error).__name__ == "PanicException"
    return kind(f"{what}: {error}") if ours else error


def has_tokenizer(reference: str) -> bool:
    """Return True if ``find_tokenizer`` finds one."""
    return reference.startswith(TINY) or os.path.lexists(_file(reference))


def find_tokenizer(reference: str, vocab_size: int) -> Tokenizer | None:
    """Return the tokenizer of a model reference; None if the checkpoint has none."""
    if reference.startswith(TINY):
        return ByteTokenizer(vocab_size)
    return FileTokenizer(_file(reference), vocab_size) if has_tokenizer(reference) else None


def _file(reference: str) -> Path:
    return checkpoint_folder(reference) / "tokenizer.json"


def end_tokens(reference: str, config: Mapping[str, object]) -> frozenset[int]:
    """Return the checkpoint's end-of-text tokens.

    If there is a generation_config.json, only that file counts, as in transformers, even if it names none.
    """
    source, values = reference, config
    path = checkpoint_folder(reference) / "generation_config.json"
    if not reference.startswith(TINY) and os.path.lexists(path):
        source, values = str(path), read_json_object(path)
    value = values.get("eos_token_id")
    tokens = []
    for token in value if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(token, int) or isinstance(token, bool) or token > _MAX_TOKEN:
            raise UsageError(f"{source}: 'eos_token_id' is {show(value)}; it must be a token id, or a list of them")
        tokens.append(token)
    return frozenset(token for token in tokens if token >= 0)  # -1 stands for none
