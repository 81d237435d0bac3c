"""``tokenizer_config.json``: named special tokens and further added tokens of a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken

from attnplug import UsageError
from attnplug.hf.config_keys import read_json_object, show

_NAME = "tokenizer_config.json"
_DECODER = "added_tokens_decoder"
_EXTRA = "extra_special_tokens"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


class TokenizerConfig:
    """Config of a checkpoint's folder; empty if it has none. Raises UsageError for invalid values.

    The rules are those of transformers (5.22), so that the same text has the same tokens.
    """

    def __init__(self, folder: Path) -> None:
        path, older = folder / _NAME, folder / "special_tokens_map.json"
        self._path = path
        self.values = read_json_object(path) if os.path.lexists(path) else {}
        # Older tokenizers keep their special tokens in this file; a list of added tokens marks a newer one.
        if _DECODER not in self.values and os.path.lexists(older):
            self.values |= read_json_object(older)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of the special tokens by name, e.g. ``bos_token``."""
        return {name: token.content for name, token in self._named().items()}

    @property
    def splits_special_tokens(self) -> bool:
        """True if texts of special tokens are plain text in a prompt."""
        return self.values.get("split_special_tokens") is True

    def added_tokens(self) -> list[AddedToken]:
        """Return the added tokens, in the order in which they get their ids."""
        named = list(self._named().values())
        for token in named:
            token.special = True
        return [*self._decoder(), *named, *self._unnamed()]

    def _decoder(self) -> list[AddedToken]:
        entries = self.values.get(_DECODER) or {}
        if not isinstance(entries, Mapping) or not all(key.isascii() and key.isdigit() for key in entries):
            raise self._wrong(_DECODER, entries, "an object from token ids to tokens")
        numbered = sorted(entries.items(), key=lambda entry: (len(entry[0].lstrip("0")), entry[0].lstrip("0")))
        return [self._token(_DECODER, value) for _, value in numbered]

    def _named(self) -> dict[str, AddedToken]:
        extra = self.values.get(_EXTRA)
        values = {name: value for name, value in self.values.items() if name.endswith("_token")}
        values |= extra if isinstance(extra, Mapping) else {}
        return {
            name: self._token(name, value)
            for name, value in values.items()
            if isinstance(value, str) or (isinstance(value, Mapping) and "content" in value)
        }

    def _unnamed(self) -> list[AddedToken]:
        key = "additional_special_tokens" if isinstance(self.values.get(_EXTRA) or {}, Mapping) else _EXTRA
        values = self.values.get(key) or []
        if not isinstance(values, list):
            raise self._wrong(key, values, "a list of tokens")
        return [self._token(key, value) for value in values]

    def _token(self, key: str, value: object) -> AddedToken:
        if isinstance(value, str):
            return AddedToken(value, special=True)
        content = value.get("content") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(content, str):
            raise self._wrong(key, value, 'a text, or an object with a text as "content"')
        flags = {flag: value[flag] for flag in _FLAGS if flag in value}
        if not all(isinstance(flag, bool) for flag in flags.values()):
            raise self._wrong(key, value, f"a token whose {', '.join(_FLAGS)} are true or false")
        return AddedToken(content, **flags)

    def _wrong(self, key: str, value: object, allowed: str) -> UsageError:
        return UsageError(f"{self._path}: {key!r:.80} has {show(value)}; it must be {allowed}")
