"""Path of an MLA extend, chosen by lengths, thresholds and declared abilities, never by name (C1). Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnplug.contract.mode import ForwardMode
from attnplug.declare.errors import PlanError, UsageError
from attnplug.declare.problem import ExtendPath


@dataclass(frozen=True, slots=True)
class ExtendPolicy:
    """Choice of the fastest path of an extend.

    Absorbed attention reads the cache directly, but multiplies rows of ``kv_lora_rank``. As MHA, rows are up-projected
    first, which pays for long prefixes, from ``chunk_threshold`` prefix rows per batch, and if many queries read each
    row: from ``query_threshold`` new tokens per prefix row, on average. (With 512 latent columns and heads of 192 and
    128, 171 queries are as much arithmetic on both paths.) ``chunk_capacity`` is the maximum number of prefix rows to
    up-project at a time. ``forced`` overrides all.
    """

    chunk_threshold: int = 8192
    query_threshold: int = 192
    chunk_capacity: int = 131072
    disable_chunked_prefix_cache: bool = False
    disable_ragged: bool = False
    forced: ExtendPath | None = None

    def __post_init__(self) -> None:
        if self.chunk_capacity < 1:
            message = f"a chunk capacity of {self.chunk_capacity} rows holds nothing; give 1 or more"
            raise UsageError(message, settings=["mla_chunk_capacity"])
        if self.chunk_threshold < 0:
            raise UsageError(f"a chunk threshold of {self.chunk_threshold} rows is negative; give 0 or more")

    def choose(
        self,
        mode: ForwardMode,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        abilities: frozenset[ExtendPath],
        requested: ExtendPath | None = None,
    ) -> ExtendPath:
        """Return the path of one batch: the requested one, if any.

        Decoding is absorbed. A backend that can extend absorbed runs only a plain extend as MHA, because other modes
        have few queries per request. A backend that cannot runs everything as MHA. Raises PlanError if no path is left.
        """
        if mode.is_decode:
            return ExtendPath.ABSORBED
        able = ", ".join(sorted(abilities))
        forced = requested or (self.forced if mode is ForwardMode.EXTEND else None)
        if forced is not None:
            if forced not in abilities:
                raise PlanError(f"the extend path {forced} is asked for, but the backend can run {able}")
            return forced
        absorbed = ExtendPath.ABSORBED in abilities
        total, prefix = sum(kv_lens), sum(kv_lens) - sum(query_lens)
        chunks_allowed = not self.disable_chunked_prefix_cache
        reads = sum(new * (kv - new) for new, kv in zip(query_lens, kv_lens, strict=True))
        enough = prefix >= self.chunk_threshold or reads >= self.query_threshold * prefix
        pays = not prefix or (chunks_allowed and enough)
        if absorbed and (self.disable_ragged or mode is not ForwardMode.EXTEND or not pays):
            return ExtendPath.ABSORBED
        if self.disable_ragged:
            raise PlanError(f"ragged attention is disabled, but the backend can only run {able}")
        if total <= self.chunk_capacity and ExtendPath.ONE_SHOT in abilities:
            return ExtendPath.ONE_SHOT
        if ExtendPath.CHUNKED in abilities and (chunks_allowed or not prefix):
            return ExtendPath.CHUNKED
        if absorbed:
            return ExtendPath.ABSORBED
        # More rows than the capacity, or disabled chunks, but the backend supports nothing else.
        return ExtendPath.ONE_SHOT if ExtendPath.ONE_SHOT in abilities else ExtendPath.CHUNKED
