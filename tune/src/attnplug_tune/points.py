"""Points at which backends are measured: shapes of batches, the most informative first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from attnplug.declare.errors import UsageError
from attnplug.declare.problem import Role

DECODE_REQUESTS = (1, 4, 16, 64, 256)
DECODE_LENGTHS = (512, 4096, 16384, 65536)
PREFILLS = (
    *((1, 512, 0), (1, 8192, 0), (1, 512, 8192), (128, 256, 0), (32, 1, 4096), (1, 2048, 0), (8, 512, 0)),
    *((32, 64, 2048), (1, 32768, 0), (1, 2048, 32768), (8, 256, 4096), (32, 512, 0), (1, 32, 0), (128, 1, 4096)),
    *((1, 256, 0), (1, 1024, 0), (1, 4096, 0), (1, 8192, 8192), (8, 2048, 0), (1, 2048, 8192), (1, 1, 4096)),
    *((32, 32, 0), (4, 8192, 0), (8, 128, 0), (1, 256, 4096), (1, 32, 4096), (32, 256, 4096), (32, 1, 512)),
    *((128, 1, 512), (128, 64, 1024), (128, 32, 0), (8, 1, 16384), (4, 1024, 4096), (2, 4096, 0), (8, 32, 16384)),
    *((1, 256, 32768),),
)
"""(requests, new tokens, prefix), the most informative first. One new token: mixed batches have many such requests."""
CPU_REQUESTS, CPU_LENGTHS = (1, 4, 16), (64, 256, 1024)
CPU_PREFILLS = ((1, 32, 0), (1, 256, 0), (1, 32, 256), (4, 32, 0), (4, 1, 256))
_PATTERN = re.compile(r"(\d+)x(~?)(\d+)(k?)(?:\+(\d+)(k?)(?:&(\d+)x(\d+)(k?))?|v(\d+))?", re.ASCII)
_MOST_REQUESTS = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """Shape of a batch: number of requests, KV length of each including its new tokens, and new tokens of each.

    A decode has one new token. A verify has the role decode and several. ``ragged``: KV lengths are spread evenly from
    half to one and a half times ``length``. A mixed batch has further ``decodes``, of ``decode_length`` rows each.
    """

    role: Role
    requests: int
    length: int
    tokens: int = 1
    ragged: bool = False
    decodes: int = 0
    decode_length: int = 0

    @property
    def rows(self) -> int:
        """Number of query rows."""
        return self.requests * self.tokens + self.decodes

    @property
    def query_lens(self) -> tuple[int, ...]:
        """New tokens of each request."""
        return (self.tokens,) * self.requests + (1,) * self.decodes

    @property
    def lengths(self) -> tuple[int, ...]:
        """KV length of each request."""
        if not self.ragged:
            return (self.length,) * self.requests + (self.decode_length,) * self.decodes
        spread = [0.5 + place / (self.requests - 1) for place in range(self.requests)]
        return tuple(max(round(self.length * part), self.tokens) for part in spread)

    def __str__(self) -> str:
        if self.role is Role.PREFILL:
            prefix = self.length - self.tokens
            beside = f" beside {self.decodes} × {self.decode_length}" * bool(self.decodes)
            return f"{self.requests} × {self.tokens} new" + f" after {prefix}" * bool(prefix) + beside
        return f"{self.requests} × {'~' * self.ragged}{self.length}" + f", {self.tokens} tokens" * (self.tokens > 1)


def parse_points(text: str) -> tuple[Point, ...]:
    """Parse points separated by commas.

    ``64x4096`` is a decode, ``64x~4096`` one with lengths spread around 4096, ``64x4096v4`` verifies 4 tokens,
    ``1x8k+512`` prefills 512 tokens after a prefix of 8192 rows, ``1x8k+512&32x4k`` beside 32 decodes of 4096 rows.
    Raises UsageError.
    """
    found = tuple(_parsed(part.strip()) for part in text.split(","))
    if len(set(found)) < len(found):
        raise UsageError(f"--points {text!r} names a point twice; keep one")
    return found


def _parsed(text: str) -> Point:
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--points: {text!r} is not a point; write 64x4096 (decode), 64x~4096 (with different lengths), 64x4096v4 "
            "(verify of 4 tokens), 1x8k+512 (prefill of 512 tokens after 8192 rows) or 1x8k+512&32x4k (beside 32 "
            "decodes of 4096 rows)"
        )
    requests, about, length, thousand, new, new_thousand, decodes, decode_rows, decode_thousand, drafts = match.groups()
    rows, beside = _rows(length, thousand), tuple[int, ...]()
    if new is not None:
        tokens = _rows(new, new_thousand)
        beside = () if decodes is None else (int(decodes), _rows(decode_rows, decode_thousand))
        point = Point(Role.PREFILL, int(requests), rows + tokens, tokens, False, *beside)
    else:
        point = Point(Role.DECODE, int(requests), rows, int(drafts or 1), bool(about))
    if not point.requests or not point.tokens or point.length < point.tokens or not all(beside):
        raise UsageError(f"--points: {text!r} has no request, no token, or fewer rows than new tokens")
    if point.requests + point.decodes > _MOST_REQUESTS:
        raise UsageError(f"--points: {text!r} has more than {_MOST_REQUESTS} requests")
    if about and (new is not None or point.requests == 1):
        raise UsageError(f"--points: {text!r}: ~ is for decode and verify of several requests; leave it out")
    return point


def _rows(number: str, thousand: str) -> int:
    return int(number) * (1024 if thousand else 1)


def check_requests(max_batch: int) -> None:
    """Raise UsageError if ``--max-batch`` exceeds the requests of a point."""
    if max_batch > _MOST_REQUESTS:
        raise UsageError(f"--max-batch {max_batch} is more than {_MOST_REQUESTS} requests; give a lower number")


def default_points(on_gpu: bool, max_batch: int, max_context: int, speculative_tokens: int = 0) -> tuple[Point, ...]:
    """Grid of points up to a batch size and a context, coarse to fine, so that a short run covers the corners.

    ``speculative_tokens``: tokens per request of a verify; 0 leaves verifies out.
    """
    requests = _up_to(DECODE_REQUESTS if on_gpu else CPU_REQUESTS, max_batch)
    lengths = _up_to(DECODE_LENGTHS if on_gpu else CPU_LENGTHS, max_context)
    grid = [
        (max(first, second), Point(Role.DECODE, count, length))
        for first, count in _levels(requests)
        for second, length in _levels(lengths)
    ]
    if speculative_tokens > 1:
        grid += [
            (level + 1, Point(Role.DECODE, p.requests, p.length, speculative_tokens))
            for level, p in grid
            if p.length >= speculative_tokens
        ]
    grid += [
        (level + 1, replace(point, ragged=True))
        for level, point in grid
        if point.requests > 1 and 3 * point.length <= 2 * max_context
    ]
    prefills = [
        Point(Role.PREFILL, count, prefix + new, new)
        for count, new, prefix in (PREFILLS if on_gpu else CPU_PREFILLS)
        if prefix + new <= max_context and count <= max_batch
    ]
    grid += [(place // 2, point) for place, point in enumerate(prefills)]
    return tuple(point for _, point in sorted(grid, key=lambda both: both[0]))


def _up_to(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Sizes below a limit, extended by factors of four, and the limit itself."""
    below = [size for size in sizes if size < most]
    while below and below[-1] >= sizes[-1] and 4 * below[-1] < most:
        below.append(4 * below[-1])
    return (*below, most)


def _levels(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each value with its refinement level: the ends first, then the middle of each interval, and so on."""
    places = {0: 0, len(values) - 1: 0}
    level, known = 0, sorted(places)
    while len(places) < len(values):
        level += 1
        for left, right in pairwise(known):
            if right - left > 1:
                places[(left + right) // 2] = level
        known = sorted(places)
    yield from ((places[place], value) for place, value in enumerate(values))
