"""Path of an MLA extend, by lengths, thresholds and declared abilities, never by a backend's name (C1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnplug.declare.errors import PlanError, UsageError
from attnplug.declare.problem import ExtendPath, ForwardMode


@dataclass(frozen=True, slots=True)
class ExtendPolicy:
    """Choice of the fastest path of an extend: ``ExtendPolicy(chunk_threshold=4096)``.

    Absorbed attention reads the cache directly, but multiplies rows of ``kv_lora_rank``. As MHA, rows are up-projected
    first, up to ``chunk_capacity`` prefix rows at a time. That pays from ``chunk_threshold`` prefix rows per batch, or
    from ``query_threshold`` pairs of a new token and a row it attends to per prefix row, pairs of two new tokens
    included. (With 512 latent columns and heads of 192 and 128, 171 pairs are as much arithmetic on both paths.)

    Decodes of a mixed batch run apart, absorbed, if the other requests have ``split_threshold`` pairs: by default those
    of a prompt of 1024 tokens, which 16 heads run 50 µs faster as MHA on an H200. ``forced`` overrides all.
    """

    chunk_threshold: int = 8192
    query_threshold: int = 192
    chunk_capacity: int = 131072
    split_threshold: int = 1 << 19
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
                raise PlanError(f"the extend path {forced} is requested, but the backend can run {able}")
            return forced
        absorbed = ExtendPath.ABSORBED in abilities
        total, prefix = sum(kv_lens), sum(kv_lens) - sum(query_lens)
        chunks_allowed = not self.disable_chunked_prefix_cache
        enough = prefix >= self.chunk_threshold or _pairs(query_lens, kv_lens) >= self.query_threshold * prefix
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

    def decodes_apart(self, query_lens: Sequence[int], kv_lens: Sequence[int], abilities: frozenset[ExtendPath]) -> int:
        """Return how many requests at the front of a mixed batch decode apart from the others, which extend as MHA; 0
        if all run together. As MHA, 32 decodes behind 4096 rows take an H200 2.2 ms per layer, absorbed 0.08."""
        first = next((request for request, new in enumerate(query_lens) if new != 1), 0)
        new, lens = query_lens[first:], kv_lens[first:]
        if not first or min(new) < 2 or self.choose(ForwardMode.EXTEND, new, lens, abilities) is ExtendPath.ABSORBED:
            return 0
        pays = _pairs(new, lens) >= max(self.query_threshold * (sum(lens) - sum(new)), self.split_threshold)
        return first if pays or self.forced is not None or ExtendPath.ABSORBED not in abilities else 0


def _pairs(query_lens: Sequence[int], kv_lens: Sequence[int]) -> int:
    """Return the number of pairs of a new token and a row it attends to, within half a pair per token."""
    return sum(new * kv - new * new // 2 for new, kv in zip(query_lens, kv_lens, strict=True))
