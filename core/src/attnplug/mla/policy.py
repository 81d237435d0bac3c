"""Which way an MLA extend runs: a function of lengths, thresholds and declared abilities, never of a name (C1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnplug.claims import ExtendPath
from attnplug.errors import PlanError, UsageError
from attnplug.plan import ForwardMode


@dataclass(frozen=True, slots=True)
class ExtendPolicy:
    """When which path pays.

    Absorbed attention reads the cache as it is but multiplies rows of ``kv_lora_rank``; as MHA the rows are
    up-projected first, which pays once there is enough to attend to. ``chunk_threshold`` is the sum of prefixes from
    which it does; ``chunk_capacity`` the most prefix rows that are up-projected at a time. ``forced`` overrules both.
    """

    chunk_threshold: int = 8192
    chunk_capacity: int = 131072
    disable_chunked_prefix_cache: bool = False
    disable_ragged: bool = False
    forced: ExtendPath | None = None

    def __post_init__(self) -> None:
        if self.chunk_capacity < 1:
            raise UsageError(f"a chunk capacity of {self.chunk_capacity} rows holds nothing; give 1 or more")
        if self.chunk_threshold < 0:
            raise UsageError(f"a chunk threshold of {self.chunk_threshold} rows is negative; give 0 or more")

    def choose(
        self,
        mode: ForwardMode,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        abilities: frozenset[ExtendPath],
    ) -> ExtendPath:
        """The path of one batch. Only a plain extend runs as MHA: the other modes bring few queries a request."""
        if mode is not ForwardMode.EXTEND:
            return ExtendPath.ABSORBED
        if self.forced is not None:
            if self.forced not in abilities:
                able = ", ".join(sorted(abilities))
                raise PlanError(f"the extend path {self.forced} is forced, but the backend can only run {able}")
            return self.forced
        total, prefix = sum(kv_lens), sum(kv_lens) - sum(query_lens)
        chunks_allowed = not self.disable_chunked_prefix_cache and not self.disable_ragged
        if self.disable_ragged or (prefix and not (chunks_allowed and prefix >= self.chunk_threshold)):
            return ExtendPath.ABSORBED
        if total <= self.chunk_capacity and ExtendPath.ONE_SHOT in abilities:
            return ExtendPath.ONE_SHOT
        return ExtendPath.CHUNKED if ExtendPath.CHUNKED in abilities else ExtendPath.ABSORBED
