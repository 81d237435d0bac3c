"""The points at which backends are measured."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
from attnplug_tune.points import PREFILLS, Point, default_points, parse_points

from attnplug import Role, UsageError
from attnplug.auto.schedule import ExtendSchedule
from attnplug_testing.errors import raises_naming


def test_points_are_read_as_users_write_them() -> None:
    assert parse_points("64x4096, 8x~4k,16x4kv4,1x8k+512,1x0+2k&32x4k") == (
        Point(Role.DECODE, 64, 4096),
        Point(Role.DECODE, 8, 4096, ragged=True),
        Point(Role.DECODE, 16, 4096, 4),
        Point(Role.PREFILL, 1, 8192 + 512, 512),
        Point(Role.PREFILL, 1, 2048, 2048, decodes=32, decode_length=4096),
    )


@pytest.mark.parametrize(
    "text",
    [
        *("", "64", "0x64", "1x0", "1x2v3", "1x64+0", "64*4096", "1x64,1x64", "1xk", "1x~64", "8x~64+8"),
        *("1x64&4x8", "1x0+8&0x8", "1x0+8&4x0", "1x0+8&4x~8"),
    ],
)
def test_a_point_that_cannot_be_is_refused_with_its_text(text: str) -> None:
    with raises_naming(UsageError, "--points"):
        parse_points(text)


def test_a_grid_begins_with_its_corners() -> None:
    """A small budget therefore covers the whole grid coarsely."""
    decodes = [point for point in default_points(True, 256, 65536) if point.role is Role.DECODE]
    assert {(point.requests, point.length) for point in decodes[:4]} == {
        (requests, length) for requests in (1, 256) for length in (512, 65536)
    }
    even = [point for point in decodes if not point.ragged]
    assert len(even) == 20 and len(decodes) == len(set(decodes))


def test_each_batch_of_several_requests_is_measured_with_different_lengths_too() -> None:
    """If the longest of them fits into the context."""
    points = default_points(True, 4, 4096, 4)
    ragged = [point for point in points if point.ragged]
    assert {(point.requests, point.length, point.tokens) for point in ragged} == {(4, 512, 1), (4, 512, 4)}
    assert max(length for point in ragged for length in point.lengths) <= 4096
    assert all(points.index(point) > points.index(replace(point, ragged=False)) for point in ragged)


def test_a_grid_ends_at_the_largest_batch_and_context() -> None:
    points = default_points(True, 32, 8192)
    decodes = [point for point in points if point.role is Role.DECODE]
    assert max(point.requests for point in decodes) == 32 and max(point.length for point in points) == 8192
    assert Point(Role.DECODE, 32, 8192) in decodes[:4]


def test_a_grid_goes_on_to_a_batch_and_context_beyond_the_usual_ones() -> None:
    decodes = [point for point in default_points(True, 512, 1 << 20) if point.role is Role.DECODE]
    assert sorted({point.requests for point in decodes})[-2:] == [256, 512]
    assert sorted({point.length for point in decodes})[-3:] == [65536, 4 * 65536, 1 << 20]


def test_a_verify_is_measured_where_drafts_are_checked() -> None:
    assert not [p for p in default_points(True, 4, 4096) if p.role is Role.DECODE and p.tokens > 1]
    verifies = [p for p in default_points(True, 4, 4096, 4) if p.role is Role.DECODE and p.tokens > 1]
    assert verifies and {point.tokens for point in verifies} == {4}


def test_prefills_are_prompts_prefixes_and_the_decodes_of_mixed_batches() -> None:
    prefills = [point for point in default_points(True, 256, 65536) if point.role is Role.PREFILL]
    assert max(point.rows for point in prefills) == 32768 and len(set(prefills)) == len(prefills)
    kinds = [(point.requests > 1, point.length > point.tokens, point.tokens == 1) for point in prefills]
    assert {(many, prefix, False) for many in (False, True) for prefix in (False, True)} < set(kinds)
    assert kinds.count((True, True, True)) > 3, "requests that decode beside a prefill"
    assert {point.requests for point in default_points(True, 8, 1024) if point.role is Role.PREFILL} == {1, 8}


Kernel = Callable[[Point], float]


def kernel(fixed: float, per_row: float, per_pair: float, tiles: int) -> Kernel:
    """Microseconds of a kernel that needs ``tiles`` tiles of 128 query rows, over 32 heads, to fill a GPU."""

    def time(point: Point) -> float:
        lens = list(zip(point.query_lens, point.lengths, strict=True))
        pairs = sum(new * (2 * length - new + 1) / 2 for new, length in lens)
        used = min(sum(32 * -(-new // 128) for new, _ in lens) / tiles, 1)
        return fixed + per_row * point.rows + per_pair * pairs / used

    return time


KERNELS = {
    "simple": kernel(12, 2e-3, 5.5e-5, 264),
    "tuned": kernel(18, 1.5e-3, 3.4e-5, 528),
    "persistent": kernel(35, 1e-3, 2.9e-5, 792),
}


def test_between_the_prefill_points_auto_takes_nearly_the_fastest_backend() -> None:
    """Three synthetic kernels, at random prompts, prefixes and mixed batches. The benchmark does it on a GPU."""
    grid = [Point(Role.PREFILL, requests, new + prefix, new) for requests, new, prefix in PREFILLS]
    schedule = ExtendSchedule(
        {name: {(p.requests, p.length, p.tokens): time(p) for p in grid} for name, time in KERNELS.items()}
    )
    draw = random.Random(0)

    def between(low: int, high: int) -> int:
        return round(math.exp(draw.uniform(math.log(low), math.log(high))))

    shares: dict[str, list[float]] = {}
    for _ in range(300):
        requests, prefix, decodes = draw.choice([(1, 0, 0), (0, 0, 0), (0, 1, 0), (1, 0, 1)])
        requests = requests or between(2, 128)
        new, prefix = between(16, 32768 // requests), between(64, 32768 // requests) if prefix else 0
        beside = (between(2, 128), between(64, 8192)) if decodes else ()
        point = Point(Role.PREFILL, requests, new + prefix, new, False, *beside)
        expected = schedule.expected_extend(point.query_lens, point.lengths)
        times = {name: time(point) for name, time in KERNELS.items()}
        for name, time in {**times, "auto": times[min(expected, key=lambda each: expected[each])]}.items():
            shares.setdefault(name, []).append(min(times.values()) / time)
    means = {name: math.exp(statistics.fmean(map(math.log, found))) for name, found in shares.items()}
    assert means["auto"] > 0.985 and max(mean for name, mean in means.items() if name != "auto") < 0.9
