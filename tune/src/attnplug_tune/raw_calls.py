"""Direct calls of a backend's library, which ``attnplug bench`` compares with the backend.

A package provides them by an entry point of the group ``attnplug.raw``. Its name is the backend's. Its target is a
function that takes a :class:`RawScene` and returns :class:`RawCalls`, or None if the library has no such call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from attnplug import LayerSpec
from attnplug.host import KVPools

RAW_GROUP = "attnplug.raw"


@dataclass(frozen=True, slots=True, eq=False)
class RawScene:
    """Inputs of a library's calls. The calls read the caches and write no rows.

    ``page_table`` ``[requests, pages]`` int32 and ``lengths``, the KV length of each request including its ``tokens``
    new ones, cover the whole batch. ``q`` is ``[requests * tokens, heads, width]``, absorbed for MLA. ``captured``: the
    calls run in a CUDA graph. The benchmark owns all tensors. They stay at their addresses while calls are made.
    """

    layers: tuple[LayerSpec, ...]
    pools: KVPools
    page_size: int
    page_table: Tensor
    lengths: tuple[int, ...]
    tokens: int
    prefill: bool
    q: Tensor
    captured: bool


class RawCalls(Protocol):
    """A library's calls, planned for a scene."""

    def begin(self) -> None:
        """Do what a step needs before its first layer. It is captured with the calls."""
        ...

    def run(self, layer_id: int) -> Tensor:
        """Run one layer's attention and return its output."""
        ...
