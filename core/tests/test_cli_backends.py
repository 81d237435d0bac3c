"""``attnplug backends``: contents of the list, and that no plugin can spoil it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from attnplug import Capabilities
from attnplug.cli.backends import describe
from attnplug.declare.version import CONTRACT_VERSION
from attnplug_testing.command import PLUGIN, Attnplug, Package, in_own_process

pytestmark = pytest.mark.usefixtures("plain_environment")


def test_backends_shows_name_distribution_contract_and_status(attnplug: Attnplug) -> None:
    """D1"""
    outcome = attnplug("backends")
    assert outcome.code == 0
    assert outcome.err == ""
    for text in ("torch_native", "attnplug 1.0.0rc1", CONTRACT_VERSION, "mha/mla", "usable here"):
        assert text in outcome.out


def test_an_installed_plugin_is_listed_and_gone_without_it(attnplug: Attnplug, package: Package) -> None:
    """D1"""
    assert [row["name"] for row in attnplug("backends", "--json").json] == ["torch_native"]
    package("fast")
    rows = attnplug("backends", "--json").json
    assert [row["name"] for row in rows] == ["fast", "torch_native"]
    assert rows[0] == {
        "name": "fast",
        "distribution": "fast-dist",
        "version": "1.2.3",
        "contract": CONTRACT_VERSION,
        "status": "usable",
        "reasons": [],
        "error": None,
    }


def test_a_backend_that_is_refused_here_says_why(attnplug: Attnplug, package: Package) -> None:
    """D3"""
    package("fast", capabilities='{"devices": ["cuda"], "min_sm": 90}', fields='{"requires": ["no-such-library>=2"]}')
    row = attnplug("backends", "--json").json[0]
    assert row["status"] == "refused"
    assert {reason["code"] for reason in row["reasons"]} == {"device", "requirement"}
    assert set(row["reasons"][0]) == {"code", "message", "value", "allowed", "setting", "option", "advice"}
    text = attnplug("backends").out
    assert "refused here" in text and "pip install 'no-such-library>=2'" in " ".join(text.split())
    assert "--" not in text  # it has no option that would change its answer


def test_formats_of_the_cache_are_listed() -> None:
    can = Capabilities({"mha"}, {"cuda"}, {"float16"}, {"float8_e4m3fn", "acme_int4"}, min_sm=80)
    assert "SM 80–, float16, KV acme_int4/float8_e4m3fn, page" in describe(can)
    assert "KV in any format, page" in describe(replace(can, kv_dtypes=None))


def test_broken_and_blocked_plugins_are_counted_and_shown_with_all(
    attnplug: Attnplug, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2"""
    package("odd", "raise RuntimeError('no driver')")
    package("extra")
    monkeypatch.setenv("ATTNPLUG_PLUGINS", "odd-dist")
    short = attnplug("backends", "--json")
    assert short.code == 0
    assert [row["name"] for row in short.json] == ["torch_native"]
    assert "1 broken and 1 blocked" in short.err
    rows = {row["name"]: row for row in attnplug("backends", "--all", "--json").json}
    assert (rows["odd"]["status"], rows["odd"]["distribution"], rows["odd"]["version"]) == (
        "broken",
        "odd-dist",
        "1.2.3",
    )
    assert "RuntimeError: no driver" in rows["odd"]["error"]
    assert rows["extra"]["status"] == "blocked"
    assert "ATTNPLUG_PLUGINS" in rows["extra"]["error"]
    assert "broken: RuntimeError: no driver" in attnplug("backends", "--all").out


def test_a_name_in_the_allow_list_that_matches_nothing_is_a_warning(
    attnplug: Attnplug, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNPLUG_PLUGINS", "fsat")
    outcome = attnplug("backends", "--json")
    assert outcome.code == 0
    assert "'fsat'" in outcome.err
    assert outcome.json


def test_in_strict_mode_a_broken_plugin_ends_the_command(
    attnplug: Attnplug, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2"""
    package("odd", "raise RuntimeError('no driver')")
    monkeypatch.setenv("ATTNPLUG_STRICT", "1")
    for command in (["backends"], ["explain", "--model", "tiny:llama"]):
        outcome = attnplug(*command)
        assert outcome.code == 1
        assert outcome.out == ""
        assert "odd-dist 1.2.3" in outcome.err and "no driver" in outcome.err


def test_in_strict_mode_a_check_that_raises_ends_the_command(
    attnplug: Attnplug, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2"""
    package("odd", fields='{"check": lambda problem, role, options: 1 / 0}')
    package("good")
    monkeypatch.setenv("ATTNPLUG_STRICT", "1")
    for command in (["backends"], ["explain", "--model", "tiny:llama"]):
        outcome = attnplug(*command)
        assert (outcome.code, outcome.out) == (1, "")
        assert "odd-dist 1.2.3" in outcome.err and "ZeroDivisionError" in outcome.err and "good" not in outcome.err


def test_a_backend_whose_factory_is_not_there_is_refused_and_auto_goes_on(attnplug: Attnplug, package: Package) -> None:
    """D2: however high its preference."""
    package("odd", fields='{"factory": "no_such_module:build", "preference": 1000}')
    row = attnplug("backends", "--json").json[0]
    assert (row["status"], [reason["code"] for reason in row["reasons"]]) == ("refused", ["factory"])
    assert "there is no module no_such_module" in attnplug("backends").out
    choice = attnplug("explain", "--model", "tiny:llama", "--json").json["prefill"]
    assert choice["chosen"] == "torch_native"
    assert [one["refusals"][0]["code"] for one in choice["candidates"] if one["refusals"]] == ["factory"]


def test_a_refusal_names_no_option_that_the_command_lacks(attnplug: Attnplug, package: Package) -> None:
    package("fast", capabilities='{"devices": ["cuda"]}', fields='{"requires": ["no-such-library>=2"]}')
    text = attnplug("backends").out
    assert "--device" not in text and "no-such-library>=2" in text


@pytest.mark.parametrize("arguments", [["backends"], ["explain", "--model", "tiny:llama"], ["plugins"]])
def test_a_plugin_that_takes_long_to_load_is_a_warning(
    attnplug: Attnplug, package: Package, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    package("slow")
    clock = itertools.count(step=3.14159)
    monkeypatch.setattr("attnplug.registry.registry.monotonic", lambda: next(clock))
    outcome = attnplug(*arguments)
    assert (outcome.code, outcome.err) == (0, "warning: plugin slow (slow-dist 1.2.3) took 3.1 s to load\n")


def test_a_plugin_that_interrupts_is_named(attnplug: Attnplug, package: Package) -> None:
    package("odd", "raise KeyboardInterrupt")
    outcome = attnplug("backends")
    assert (outcome.code, outcome.err) == (130, "interrupted while loading plugin odd (odd-dist 1.2.3)\n")


@pytest.mark.parametrize(
    ("arguments", "on_import", "in_check"),
    [
        (["backends", "--json"], "print('hello')", "None"),
        (["explain", "--model", "tiny:llama", "--json"], "import os; os.write(1, b'hello')", "None"),
        (["explain", "--model", "tiny:llama", "--json"], "", "print('hello')"),
    ],
    ids=["on import", "on import, below Python", "in its check"],
)
@pytest.mark.sample(2)
def test_a_plugin_that_prints_does_not_spoil_json(
    package: Package, tmp_path: Path, arguments: list[str], on_import: str, in_check: str
) -> None:
    """Output below Python is redirected, too: what prints on import is mostly a C library."""
    fields = f'{{"check": lambda problem, role, options: {in_check} or []}}'
    package("noisy", on_import + PLUGIN.format(name="noisy", capabilities="{}", fields=fields))
    outcome = in_own_process(*arguments, path=tmp_path)
    assert outcome.json
    assert "hello" in outcome.err


def test_a_plugin_s_odd_values_do_not_spoil_json(attnplug: Attnplug, package: Package) -> None:
    """D2: one plugin's set must not take the report with it."""
    package(
        "odd",
        fields='{"check": lambda problem, role, options: [Refusal("own", "own", value={1, 2}, allowed=object())]}',
    )
    assert len(attnplug("backends", "--json").json) == 2
    assert attnplug("explain", "--model", "tiny:llama", "--json").json["prefill"]["chosen"] == "torch_native"


def test_a_plugin_s_check_cannot_end_the_command(attnplug: Attnplug, package: Package) -> None:
    """D2"""
    package("odd", fields='{"check": lambda problem, role, options: exit(0)}')
    assert "torch_native" in attnplug("backends").out


def test_damaged_metadata_of_another_installation_is_isolated(package: Package, tmp_path: Path) -> None:
    """D2: an interrupted pip leaves such a folder behind."""
    package("fast")
    damaged = tmp_path / "gone_dist-1.0.dist-info"
    damaged.mkdir()
    (damaged / "entry_points.txt").write_text("[attnplug.plugins]\ngone = plugin_module_gone\n")
    for command in (["backends"], ["explain", "--model", "tiny:llama"]):
        outcome = in_own_process(*command, path=tmp_path)
        assert outcome.code == 0, outcome.err
        assert "fast-dist" in outcome.out


def test_a_file_of_entry_points_that_cannot_be_read_is_named(package: Package, tmp_path: Path) -> None:
    """Python itself raises there. The error names the file and shows that attnplug is not at fault."""
    package("fast")
    (tmp_path / "fast_dist-1.2.3.dist-info" / "entry_points.txt").write_text("[attnplug.plugins]\nno equals sign\n")
    outcome = in_own_process("backends", "--all", path=tmp_path)
    assert (outcome.code, outcome.err) == (0, "")
    assert "fast" in outcome.out and "its entry points" in outcome.out


def test_the_names_of_backends_are_those_to_choose_from(attnplug: Attnplug, package: Package) -> None:
    """D1"""
    package("fast")
    assert attnplug("backends", "--names").out == "fast\ntorch_native\n"
    assert attnplug("backends", "--names", "--json").json == ["fast", "torch_native"]
