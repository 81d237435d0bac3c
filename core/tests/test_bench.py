"""Benchmarks: results as a file, what became slower, libraries called directly, and plots."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.dom import minidom

import pytest
import torch
from torch import Tensor

from attnplug.host import Mark, Panel, Series, UsageError, figure
from attnplug.tables import RawScene
from attnplug.tune import raw
from attnplug.tune.measure import Failed, Job, Timed, run_job
from attnplug.tune.page import plot_rows, report_page
from attnplug.tune.place import bandwidth
from attnplug.tune.points import parse_points
from attnplug.tune.results import Results, Row, compare, read_results, row_of, standings
from support.plugins import Install
from support.tuning import FakeClock, tasks, toys

ROW = Row("fast", "mha 4/2 heads of 16", "decode", 1, 64, 1, False, 10.0, 9.8, 10.2, 5.0)
HEADER = {"device": "a GPU", "versions": {"torch": "2.11"}, "commit": "abc"}


def results(*rows: Row, **header: object) -> Results:
    return Results({**HEADER, **header}, rows)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results(ROW).as_json()))
    assert read_results(path) == results(ROW)
    assert json.loads(path.read_text())["rows"][0]["share"] == 0.5


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": 1}', '{"schema": 2}', '{"schema": 2, "rows": [{}], "failed": []}']
)
def test_a_file_that_holds_no_results_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"odd\.json"):
        read_results(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"us": 0},
        {"us": -1.0},
        {"us": 10**400},
        {"low": float("nan")},
        {"requests": 1.5},
        {"ragged": 0},
        {"length": 0},
        {"low": 9e9},
        {"layer": "\x1b[31m"},
        None,
    ],
)
def test_a_row_that_cannot_be_is_refused(changes: dict[str, object] | None, tmp_path: Path) -> None:
    """``None``: one that is there twice."""
    told = results(ROW, ROW).as_json()
    if changes is not None:
        told["rows"] = [{**told["rows"][0], **changes}]  # type: ignore[index] # a list
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(told))
    with pytest.raises(UsageError, match=r"odd\.json has"):
        read_results(path)


def test_slower_is_what_is_past_noise_and_five_per_cent() -> None:
    noisy = replace(ROW, us=12, low=10.1, high=14)  # its middle half overlaps the old one's
    little = replace(ROW, us=10.4, low=10.3, high=10.5)
    slower = replace(ROW, us=12, low=11.8, high=12.2)
    for after, count in ((ROW, 0), (noisy, 0), (little, 0), (slower, 1)):
        assert len(compare(results(ROW), results(after)).slower) == count
    assert len(compare(results(slower), results(ROW)).faster) == 1
    assert "× 1.20" in compare(results(ROW), results(slower)).slower[0]


def test_a_side_stands_by_its_distance_from_the_fastest_backend() -> None:
    """A library that is faster than all of them does not count."""
    times = {"raw fast": (1, 1), "fast": (10, 40), "slow": (20, 20)}
    rows = [
        replace(ROW, side=side, length=length, us=us)
        for side, both in times.items()
        for length, us in zip((64, 128), both, strict=True)
    ]
    raw_fast, fast, slow = standings(rows)
    assert (fast.side, fast.mean, fast.worst) == ("fast", pytest.approx(2**0.5), 2) and "1 × 128" in fast.where
    assert (slow.side, slow.worst, slow.points) == ("slow", 2, 2) and raw_fast.mean < 1


def test_what_is_no_longer_measured_is_told() -> None:
    found = compare(results(ROW, replace(ROW, length=128)), results(ROW))
    assert found.common == 1 and "1 × 128" in found.gone[0]


def test_results_of_two_devices_are_not_compared() -> None:
    with pytest.raises(UsageError, match=r"a GPU.*another"):
        compare(results(ROW), results(ROW, device="another"))


def test_equal_lengths_are_not_compared_with_ragged_ones() -> None:
    even, ragged = (replace(ROW, requests=4, ragged=kind) for kind in (False, True))
    found = compare(results(ROW, even), results(ROW, ragged))
    assert found.common == 1 and "4 × 64" in found.gone[0]


def test_results_without_anything_in_common_are_not_equal() -> None:
    with pytest.raises(UsageError, match="no measurement in common"):
        compare(results(ROW), results(replace(ROW, side="slow")))


class Library:
    """A library that is called directly: it gives the queries back."""

    def __init__(self, scene: RawScene) -> None:
        self.scene, self.begun = scene, 0

    def begin(self) -> None:
        self.begun += 1

    def run(self, layer_id: int) -> Tensor:
        assert self.scene.pools.mha is not None and layer_id in self.scene.pools.mha.layer_ids
        return self.scene.q


def test_a_library_is_measured_on_the_caches_of_its_backend(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point is looked up by the backend's name."""
    registry, made = toys(install, "fast"), list[Library]()

    def calls(scene: RawScene) -> Library | None:
        made.append(Library(scene))
        return None if scene.prefill else made[-1]

    monkeypatch.setattr(raw, "raw_calls", lambda name: calls if name == "fast" else None)
    asked = tasks(registry, "fast", *parse_points("2x64,1x8+8"))
    clock = FakeClock({"fast": lambda _: 12, "raw fast": lambda _: 10}, runs=True)
    found = list(run_job(Job("fast", asked, "cpu", 64, raw=True), registry, clock))
    assert [each.side for each in found] == ["fast", "raw fast", "fast"]
    assert made[0].scene.lengths == (64, 64) and made[0].begun == 1


def test_a_library_that_fails_does_not_take_its_backend_along(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = toys(install, "fast")
    monkeypatch.setattr(raw, "raw_calls", lambda name: lambda scene: 1 / 0)
    asked = tasks(registry, "fast", *parse_points("1x64,1x128"))
    clock = FakeClock({"fast": lambda _: 12})
    found = list(run_job(Job("fast", asked, "cpu", 128, raw=True), registry, clock))
    assert [type(each) for each in found] == [Timed, Failed, Timed] and found[1].side == "raw fast"


def test_the_limit_of_a_decode_is_its_bytes_at_the_bandwidth(install: Install) -> None:
    registry = toys(install, "fast")
    (timed,) = run_job(
        Job("fast", tasks(registry, "fast", *parse_points("2x64")), "cpu", 64),
        registry,
        FakeClock({"fast": lambda _: 8}),
    )
    assert isinstance(timed, Timed)
    rows, queries, new = 2 * 64 * 2 * 2 * 16, 2 * 4 * 2 * 16, 2 * 2 * 2 * 16  # keys and values, q and out, new rows
    assert row_of(timed, 1e9).limit_us == pytest.approx(4 * (rows + queries + new) / 1e3)


def grid(side: str, us: Callable[[int], float]) -> list[Row]:
    return [replace(ROW, side=side, length=n, us=us(n), low=us(n), high=us(n), limit_us=n / 99) for n in (64, 128, 256)]


def test_a_device_without_memory_for_its_bandwidth_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "ones", full)
    with pytest.raises(UsageError, match="cpu has no 256 MiB of free memory"):
        bandwidth(torch.device("cpu"))


def test_a_plot_is_svg_with_a_line_for_each_side_and_the_limit() -> None:
    others = [replace(ROW, side=side, requests=4) for side in ("fast", "slow <&>")]
    drawn = minidom.parseString(plot_rows([*grid("fast", float), *grid("slow <&>", lambda n: 2.0 * n), *others]))
    texts = {node.firstChild.data for node in drawn.getElementsByTagName("text") if node.firstChild is not None}
    assert {"fast", "slow <&>", "64", "4×64"} <= texts
    lines = drawn.getElementsByTagName("polyline")
    assert len(lines) == 3 and [line.getAttribute("stroke-dasharray") for line in lines].count("5 4") == 1


def test_a_plot_leaves_out_what_has_no_logarithm() -> None:
    marks = (Mark.at(1, 0), Mark.at(0, 1), Mark.at(1, float("inf")), Mark.at(4, float("nan")))
    assert "Nothing was measured" in figure([Panel("title", "x", "y", (Series("s", marks),))])
    assert "Nothing was measured" in figure([])


def test_a_report_needs_no_other_file() -> None:
    page = report_page("on <this> GPU", grid("fast", float), ["one note"])
    assert "&lt;this&gt;" in page and "one note" in page and "<svg" in page and "http" not in page
