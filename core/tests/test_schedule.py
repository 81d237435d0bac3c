"""Per-batch schedules: the fastest backend for each batch shape."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.auto.schedule import BackendSchedule, BatchPoint, ExtendSchedule
from attnplug.contract.geometry import TypicalLens, is_ragged

SHORT_AND_LONG = BackendSchedule(
    {"short": {(1, 100, 1): 1.0, (1, 10000, 1): 9.0}, "long": {(1, 100, 1): 3.0, (1, 10000, 1): 3.0}}
)

POINTS = st.builds(BatchPoint, st.integers(1, 300), st.integers(1, 1 << 17), st.integers(1, 300), st.booleans()).map(
    lambda point: point._replace(ragged=point.ragged and point.requests > 1)
)
TIMES = st.floats(0.5, 5000).map(lambda time: round(time, 1))


@st.composite
def schedules(draw: st.DrawFn) -> BackendSchedule:
    """Two or three backends with different points, which may not form a grid."""
    points = draw(st.lists(POINTS, min_size=1, max_size=8, unique=True))
    times = {}
    for name in draw(st.permutations(["a", "b", "c"]))[: draw(st.integers(2, 3))]:
        own = draw(st.lists(st.sampled_from(points), min_size=1, unique=True))
        times[name] = {point: draw(TIMES) for point in own}
    return BackendSchedule(times)


def best(times: dict[str, float]) -> str:
    return min(times, key=lambda name: (times[name], name))


@settings(max_examples=12)
@given(schedules())
def test_at_a_measured_point_it_is_the_one_measured_fastest(schedule: BackendSchedule) -> None:
    """A backend without a measurement there can win only by interpolation between its own points."""
    for point in {point for times in schedule.times.values() for point in times}:
        measured = {name: times[point] for name, times in schedule.times.items() if point in times}
        expected = schedule.expected(*point)
        assert measured.items() <= expected.items()
        assert schedule.fastest(*point) == best(expected)


@settings(max_examples=12)
@given(
    schedules(), st.integers(1, 400), st.integers(1, 400), st.booleans(), st.lists(st.integers(1, 1 << 18), max_size=5)
)
def test_length_ranges_agree_with_expected_times_everywhere(
    schedule: BackendSchedule, requests: int, tokens: int, ragged: bool, lengths: list[int]
) -> None:
    ends, names = schedule.length_ranges(requests, tokens, ragged)
    assert list(ends) == sorted(set(ends)) and ends[-1] == sys.maxsize and len(ends) == len(names)
    assert all(one != following for one, following in itertools.pairwise(names))
    beside = [end + more for end in ends[:-1] for more in (0, 1)]
    for length in (*lengths, *beside):
        name = next(name for end, name in zip(ends, names, strict=True) if length <= end)
        assert schedule.fastest(requests, length, tokens, ragged) == name
        expected = schedule.expected(requests, length, tokens, ragged)
        low = min(expected.values())
        assert expected[name] == low or math.isclose(expected[name], low, rel_tol=1e-9)


@given(
    st.lists(st.integers(1, 1 << 17), min_size=1, max_size=5, unique=True),
    st.lists(st.tuples(TIMES, TIMES, TIMES), min_size=10, max_size=10),
    st.integers(1, 1 << 18),
)
def test_the_best_over_all_lengths_has_the_smallest_mean_slowness(
    lengths: list[int], times: list[tuple[float, float, float]], longest: int
) -> None:
    """Over uniform and ragged requests, up to the longest; or at the shortest measured length."""
    points = [BatchPoint(8, length, 1, ragged) for length in lengths for ragged in (False, True)]
    at = dict(zip(points, times, strict=False))
    schedule = BackendSchedule({name: {point: row[n] for point, row in at.items()} for n, name in enumerate("abc")})
    rows = [row for point, row in at.items() if point.length <= max(longest, min(lengths))]
    slowness = {name: math.prod(row[n] / min(row) for row in rows) for n, name in enumerate("abc")}
    name = schedule.overall(8, 1, longest)
    assert math.isclose(slowness[name], min(slowness.values()), rel_tol=1e-9)
    assert schedule.overall(8, 1, longest) == name


@settings(max_examples=12)
@given(schedules(), st.integers(1, 400), st.integers(1, 400))
def test_who_is_the_fastest_at_every_length_is_the_best_over_all(
    schedule: BackendSchedule, requests: int, tokens: int
) -> None:
    names = {name for ragged in (False, True) for name in schedule.length_ranges(requests, tokens, ragged)[1]}
    assert len(names) > 1 or names == {schedule.overall(requests, tokens, sys.maxsize)}


def test_the_best_over_all_lengths_depends_on_how_far_they_go() -> None:
    """With both lengths, each backend is three times slower at one of them, and the name decides."""
    found = [SHORT_AND_LONG.overall(1, 1, longest) for longest in (1, 100, 9999, 10000)]
    assert found == ["short", "short", "short", "long"]


def test_the_best_over_all_lengths_is_that_of_equal_and_ragged_requests() -> None:
    at = {(8, 64, 1): (2, 3), (8, 64, 1, True): (4, 1)}
    schedule = BackendSchedule(
        {name: {point: float(each[n]) for point, each in at.items()} for n, name in enumerate("ab")}
    )
    assert schedule.fastest(8, 64, 1) == "a" and schedule.overall(8, 1, 64) == "b"


def test_who_was_not_measured_at_some_length_does_not_serve_all() -> None:
    schedule = BackendSchedule({"small": {(1, 100, 1): 1.0}, "all": {(1, 100, 1): 5.0, (1, 200, 1): 5.0}})
    assert [schedule.overall(1, 1, longest) for longest in (199, 200)] == ["small", "all"]


def test_between_points_times_are_linear_in_logarithms() -> None:
    assert math.isclose(SHORT_AND_LONG.expected(1, 1000, 1)["short"], 3.0)
    ends, names = SHORT_AND_LONG.length_ranges(1, 1, ragged=False)
    assert names == ("short", "long")
    assert ends[0] in (999, 1000)  # equal at 1000, but for rounding


def test_requests_that_differ_are_a_grid_of_their_own_but_for_one_request() -> None:
    at = {(1, 64, 1): (1, 2), (4, 64, 1): (1, 2), (4, 64, 1, True): (4, 1)}
    schedule = BackendSchedule(
        {name: {point: float(each[n]) for point, each in at.items()} for n, name in enumerate("ab")}
    )
    assert [schedule.fastest(requests, 64, 1, True) for requests in (1, 4, 8)] == ["a", "b", "b"]
    assert [schedule.fastest(requests, 64, 1) for requests in (1, 4, 8)] == ["a", "a", "a"]
    assert math.isclose(schedule.expected(2, 64, 1, True)["b"], math.sqrt(2))
    assert schedule.describe(4, 1) == "a; of different lengths b"


def test_where_only_one_kind_was_measured_it_stands_for_both() -> None:
    for kind in (False, True):
        schedule = BackendSchedule({"a": {(4, 64, 1, kind): 2.0}, "b": {(4, 64, 1, kind): 1.0}})
        assert {schedule.fastest(4, 64, 1, ragged) for ragged in (False, True)} == {"b"}


@given(st.integers(0, 1 << 20), st.booleans())
def test_typical_lengths_around_a_mean_are_distinguished(mean: int, ragged: bool) -> None:
    """A graph captured for one kind is planned as that kind."""
    assert is_ragged(*TypicalLens.around(mean, ragged=ragged)) is (ragged and mean > 0)
    assert not is_ragged(*TypicalLens.of([])) and TypicalLens.of([4, 8]) == (6, 8)


def test_beyond_what_was_measured_it_stays_as_at_the_border() -> None:
    assert SHORT_AND_LONG.fastest(1, 1, 1) == SHORT_AND_LONG.fastest(64, 1, 8) == "short"
    assert SHORT_AND_LONG.fastest(1, 1 << 20, 1) == SHORT_AND_LONG.fastest(64, 1 << 20, 8) == "long"


def test_equal_times_are_settled_by_name_whatever_the_order() -> None:
    for names in ("ab", "ba"):
        assert BackendSchedule({name: {(1, 1, 1): 2.0} for name in names}).fastest(5, 5, 5) == "a"


def test_a_backend_is_not_used_where_only_others_were_measured() -> None:
    """It may have failed there."""
    schedule = BackendSchedule({"small": {(1, 100, 1): 1.0}, "all": {(1, 100, 1): 5.0, (1, 200, 1): 5.0}})
    assert schedule.length_ranges(1, 1, ragged=False) == ((100, sys.maxsize), ("small", "all"))


def test_length_ranges_are_cached_for_a_bounded_number_of_batches() -> None:
    """A prefill may have any number of tokens."""
    for tokens in range(1, 9000):
        SHORT_AND_LONG.fastest(3, 100, tokens)
    assert SHORT_AND_LONG._ranges.cache_info().currsize < 4500


def extends(*, fixed: dict[str, float], per_pair: dict[str, float]) -> ExtendSchedule:
    """Backends with a fixed time and one for each pair, over prompts, prefixes, many requests and decodes."""
    prompts = [(1, 512, 512), (1, 2048, 2048), (1, 8192, 8192), (8, 512, 512), (32, 256, 256), (128, 256, 256)]
    prefixes = [(1, 8704, 512), (1, 4352, 256), (8, 4352, 256), (1, 34816, 2048), (32, 2112, 64)]
    points = [*prompts, *prefixes, (1, 4097, 1), (32, 4097, 1), (32, 513, 1), (128, 4097, 1), (8, 16385, 1)]
    pairs = [n * tokens * (2 * length - tokens + 1) // 2 for n, length, tokens in points]
    return ExtendSchedule(
        {
            name: {point: fixed[name] + per_pair[name] * many for point, many in zip(points, pairs, strict=True)}
            for name in fixed
        }
    )


SMALL_AND_LARGE = extends(fixed={"small": 10.0, "large": 100.0}, per_pair={"small": 1e-4, "large": 2e-5})
"""Equal at 1.1 million pairs."""


class TestExtends:
    def test_measured_points_have_their_times(self) -> None:
        for name, times in SMALL_AND_LARGE.times.items():
            for point, time in times.items():
                assert math.isclose(SMALL_AND_LARGE.expected(*point)[name], time, rel_tol=1e-4)

    def test_prompts_and_prefixes_of_equal_work_are_compared_with_each_other(self) -> None:
        """2000 × 2000 pairs each: one prompt, many, and a chunk behind a prefix."""
        batches = [(1, 2828, 2828), (50, 400, 400), (1, 16000, 250), (8, 2010, 250)]
        assert {SMALL_AND_LARGE.fastest(*batch) for batch in batches} == {"large"}
        assert {SMALL_AND_LARGE.fastest(*batch) for batch in [(1, 700, 700), (1, 2000, 100), (6, 256, 256)]} == {
            "small"
        }

    @pytest.mark.parametrize(("decodes", "name"), [(4, "small"), (100, "large")])
    def test_a_mixed_batch_is_a_prefill_and_its_decodes(self, decodes: int, name: str) -> None:
        """Neither the chunk of 500 tokens nor the mean request alone determines the faster backend."""
        times = SMALL_AND_LARGE.expected_extend([500, *[1] * decodes], [500, *[20000] * decodes])
        assert min(times, key=lambda each: times[each]) == name

    def test_times_grow_with_the_work_beyond_what_was_measured(self) -> None:
        """An engine compares them with the launches that a graph saves."""
        times = [SMALL_AND_LARGE.expected(1, length, length)["large"] for length in (8192, 16384, 32768)]
        assert times[1] > 3 * times[0] and times[2] > 3 * times[1]

    def test_a_backend_is_not_chosen_near_a_batch_that_it_was_not_measured_at(self) -> None:
        times = {"all": {(1, 512, 512): 50.0, (1, 8192, 8192): 900.0}, "short": {(1, 512, 512): 10.0}}
        schedule = ExtendSchedule(times)
        assert math.isinf(schedule.expected(1, 8192, 8192)["short"]) and schedule.fastest(1, 8000, 8000) == "all"

    @pytest.mark.parametrize("sparse", ["small", "large"])
    def test_points_that_one_backend_lacks_change_no_comparison(self, sparse: str) -> None:
        """A backend that was measured again has other points than those that were not."""
        times = {name: dict(of_backend) for name, of_backend in SMALL_AND_LARGE.times.items()}
        for point in [(1, 2048, 2048), (32, 2112, 64), (8, 4352, 256), (32, 256, 256)]:
            del times[sparse][BatchPoint(*point)]
        schedule = ExtendSchedule(times)
        for batch in [(1, 4000, 4000), (1, 400, 400), (16, 3000, 100), (50, 400, 400), (32, 513, 1), (128, 4097, 1)]:
            assert schedule.fastest(*batch) == SMALL_AND_LARGE.fastest(*batch), batch
            assert math.isfinite(max(schedule.expected(*batch).values()))

    def test_what_remains_of_it_is_of_its_kind(self) -> None:
        three = extends(fixed=dict.fromkeys("abc", 1.0), per_pair=dict.fromkeys("abc", 1.0))
        assert isinstance(three.only(["a", "c"]), ExtendSchedule) and three.only(["a"]) is None

    def test_places_that_are_kept_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("attnplug.auto.schedule._MOST_CACHED", 3)
        schedule = extends(fixed={"a": 1.0, "b": 2.0}, per_pair={"a": 1.0, "b": 1.0})
        for length in range(1, 2000, 100):
            schedule.fastest(1, length, length)
        assert schedule._nearby.cache_info().currsize <= 3
