"""Benchmarks: results as a file, what became slower, libraries called directly, and plots."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.dom import minidom

import pytest
import torch
import vl_convert
from attnplug_tune import raw
from attnplug_tune.charts import LIMIT, chart_spec, rows_as_svg
from attnplug_tune.measure import Failed, Job, Timed, run_job
from attnplug_tune.place import bandwidth
from attnplug_tune.points import Point, parse_points
from attnplug_tune.raw_calls import RawScene
from attnplug_tune.report import report_page
from attnplug_tune.results import BenchRow, Results, by_point, compare, read_results, row_of, standings
from torch import Tensor
from tuning import FakeClock, tasks, toys

from attnplug import UsageError
from attnplug_testing.errors import raises_naming
from attnplug_testing.plugins import Install

ROW = BenchRow("fast", "mha 4/2 heads of 16", "decode", 1, 64, 1, False, 10.0, 9.8, 10.2, 5.0)
HEADER = {"device": "a GPU", "versions": {"torch": "2.11"}, "commit": "abc"}


def results(*rows: BenchRow, **header: object) -> Results:
    return Results({**HEADER, **header}, rows)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results(ROW).as_json()))
    assert read_results(path) == results(ROW)
    assert json.loads(path.read_text())["rows"][0]["share"] == 0.5


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": 1}', '{"schema": 3}', '{"schema": 3, "rows": [{}], "failed": []}']
)
def test_a_file_that_holds_no_results_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text)
    with raises_naming(UsageError, path):
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
    """``None`` means a row that occurs twice."""
    printed = results(ROW, ROW).as_json()
    if changes is not None:
        printed["rows"] = [{**printed["rows"][0], **changes}]  # type: ignore[index] # a list
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(printed))
    with raises_naming(UsageError, path):
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


def test_what_is_no_longer_measured_is_reported() -> None:
    found = compare(results(ROW, replace(ROW, length=128)), results(ROW))
    assert found.common == 1 and "1 × 128" in found.gone[0]


def test_results_of_two_devices_are_not_compared() -> None:
    with raises_naming(UsageError, "a GPU", "another"):
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


def grid(side: str, us: Callable[[int], float]) -> list[BenchRow]:
    return [replace(ROW, side=side, length=n, us=us(n), low=us(n), high=us(n), limit_us=n / 99) for n in (64, 128, 256)]


def test_a_device_without_memory_for_its_bandwidth_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "ones", full)
    with raises_naming(UsageError, "cpu", "256 MiB"):
        bandwidth(torch.device("cpu"))


def texts_of(svg: str) -> set[str]:
    drawn = minidom.parseString(svg)
    return {node.firstChild.data for node in drawn.getElementsByTagName("text") if node.firstChild is not None}


def values_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Data that a chart draws."""
    (values,) = spec["datasets"].values() if "datasets" in spec else [spec["data"]["values"]]
    return values


def test_a_plot_is_svg_with_a_panel_for_each_number_of_requests() -> None:
    others = [replace(ROW, side=side, requests=4) for side in ("fast", "slow <&>")]
    texts = texts_of(rows_as_svg([*grid("fast", float), *grid("slow <&>", lambda n: 2.0 * n), *others]))
    assert {"fast", "slow <&>", LIMIT, "64", "1 request", "4 requests"} <= texts


def test_points_of_different_batches_are_not_joined() -> None:
    """A line runs along one panel: all numbers of a batch but its length are in the panel's title."""
    batches = [{}, {"requests": 4}, {"requests": 4, "ragged": True}, {"requests": 4, "tokens": 3}]
    rows = [replace(ROW, length=length, **changes) for changes in batches for length in (64, 128)]
    prefills = [replace(ROW, role="prefill", length=prefix + new, tokens=new) for prefix in (0, 64) for new in (8, 16)]
    for group, panels in ((rows, 4), (prefills, 2)):
        (points,) = by_point(group).values()
        found: dict[str, set[Point]] = {}
        for value in values_of(chart_spec(points, ["fast"])):
            found.setdefault(value["panel"], set()).add(value["point"])
        assert len(found) == panels and {len(points) for points in found.values()} == {2}


def test_a_plot_of_nothing_says_so() -> None:
    assert "Nothing was measured." in texts_of(rows_as_svg([]))


def test_a_report_loads_nothing_and_escapes_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = vl_convert.javascript_bundle()
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda: bundle)  # bundling takes a second
    page = report_page("on <this> GPU", grid("</script><b>", float), ["one & note"])
    assert "<title>on &lt;this&gt; GPU</title>" in page and "one &amp; note" in page and "</script><b>" not in page
    assert not re.search(r"(src|href)=", page.replace(bundle, ""))
    assert page.count('vegaEmbed("#chart') == 1
