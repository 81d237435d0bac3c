"""Rows as KV formats store them and read them back, by the formats' own reference code and without a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from attnplug import KVFormat
from attnplug.declare.kv_format import BUILT_IN, PLAIN_FORMATS
from attnplug.host import load_registry
from attnplug.kernels import torch_dtype
from attnplug.kv.buffer import load_codec


@cache
def _formats() -> dict[str, KVFormat]:
    """All formats that are installed when checks are collected: their names are part of the checks' names."""
    return BUILT_IN | {name: provided.value for name, provided in sorted(load_registry().kv_formats.items())}


def format_of(name: str) -> KVFormat:
    return _formats()[name]


def coded_formats(holds: str) -> tuple[KVFormat, ...]:
    """Return the formats that have a codec and hold rows of this kind."""
    return tuple(format for format in _formats().values() if format.codec is not None and holds in format.holds)


def only_coded(names: frozenset[str] | None) -> bool:
    """Return True if a backend claims no format that stores values as they are."""
    return names is not None and names.isdisjoint(PLAIN_FORMATS)


@dataclass(frozen=True)
class StoredRows:
    """Conversion of rows of ``width`` values to a format's parts. The last ``rope`` values are rotary columns."""

    format: KVFormat
    width: int
    rope: int = 0

    @property
    def _coded(self) -> int:
        return self.width - self.rope if self.format.rope is not None else self.width

    def encode(self, rows: Tensor, scale: float = 1.0) -> list[Tensor]:
        """Return the parts ``[rows, heads, elements]`` of rows ``[rows, heads, width]``."""
        if self.format.codec is None:
            return [rows.to(torch_dtype(self.format.parts[0].dtype))]
        coded = rows[..., : self._coded]
        if self.format.layer_scale:
            # A tensor: on a GPU torch multiplies by the inverse of a Python number, which rounds twice.
            coded = coded.float() / torch.tensor(scale, device=rows.device)
        parts = list(load_codec(self.format, self._coded).encode(coded))
        if self._coded < self.width:
            assert self.format.rope is not None
            parts.append(rows[..., self._coded :].to(torch_dtype(self.format.rope)))
        return parts

    def decode(self, parts: Sequence[Tensor], scale: float = 1.0, *, scaled: bool = True) -> Tensor:
        """Return the rows in float32. ``scaled=False`` ignores all scales, as a faulty backend might."""
        if self.format.codec is None:
            return parts[0].float()
        count = len(self.format.parts)
        coded = [part if scaled or not index else torch.ones_like(part) for index, part in enumerate(parts[:count])]
        rows = load_codec(self.format, self._coded).decode(coded).float()
        if self.format.layer_scale and scaled:
            rows = rows * scale
        return torch.cat((rows, *(part.float() for part in parts[count:])), -1)

    def read_back(self, rows: Tensor, scale: float = 1.0, *, scaled: bool = True) -> Tensor:
        """Return rows as they are read after a write, in float32."""
        return self.decode(self.encode(rows, scale), scale, scaled=scaled)
