"""``attnplug conform`` and ``attnplug new``, and the path from one to the other."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from attnplug import UsageError
from attnplug.cli.app import parse, run
from attnplug.declare.device import Processor
from attnplug.declare.errors import PluginError, RefusalCode
from attnplug.declare.version import CONTRACT_VERSION
from attnplug.host import SelectionError, load_registry
from attnplug.kernels import requirement_refusal
from attnplug_conformance.catalog import all_checks
from attnplug_conformance.new_command import KINDS, files
from attnplug_conformance.runner import Status, run_checks
from attnplug_conformance.selection import selected_backends
from attnplug_conformance.subject import Subject
from attnplug_testing.errors import raises_naming


def attnplug(*arguments: str) -> int:
    return run(parse(list(arguments)))


def test_conform_runs_one_check(capsys):
    assert attnplug("conform", "torch_native", "--device", "cpu", "--check", "mha.decode.one_request") == 0
    assert "torch_native conforms: 1 passed, 0 failed" in capsys.readouterr().out


def test_conform_requires_the_checks_of_a_contract(capsys):
    """D4"""
    arguments = ("--device", "cpu", "--check", "mha.decode.one_request", "--contract", CONTRACT_VERSION, "--json")
    assert attnplug("conform", "torch_native", *arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["contract"] == CONTRACT_VERSION and report["conforms"]


def test_conform_runs_all_below_a_name(capsys):
    assert attnplug("conform", "torch_native", "--device", "cpu", "--check", "mha.extras") == 0
    assert "4 passed" in capsys.readouterr().out


COMPARISON = {"level": "verify", "kind": "mla", "invariant": ["verify"], "first": {"before": 9, "new": 2}}
COMPARISON |= {"second": {"before": 10, "new": 1, "mode": "decode"}}


def test_conform_repeats_one_comparison_of_bits(capsys):
    """E3"""
    arguments = ("conform", "torch_native", "--device", "cpu", "--case")
    assert attnplug(*arguments, json.dumps(COMPARISON)) == 0
    assert "invariant verify 1 passed" in capsys.readouterr().out
    with raises_naming(UsageError, "'speed'"):
        attnplug(*arguments, json.dumps(COMPARISON | {"level": "speed"}))


def test_conform_requests_levels_in_every_check(capsys):
    """E3: a backend may run other kernels with a level. One without that level refuses every check."""
    arguments = ("conform", "torch_native", "--device", "cpu", "--check", "mha.decode.one_request")
    assert attnplug(*arguments, "--batch-invariant") == 0
    with raises_naming(UsageError, "'speed'"):
        attnplug(*arguments, "--batch-invariant", "speed")


@pytest.mark.parametrize("suffix", ["html", "json", "xml"])
def test_conform_writes_a_report(suffix, tmp_path, capsys):
    path = tmp_path / f"out.{suffix}"
    arguments = ("--device", "cpu", "--check", "mha.decode", "--report", str(path))
    assert attnplug("conform", "torch_native", *arguments) == 0
    assert "mha.decode.one_request" in path.read_text()
    if suffix == "json":
        assert json.loads(path.read_text())["conforms"] is True


@pytest.mark.long
def test_processes_find_what_one_finds(tmp_path):
    """Reports have the same order and measured errors, however the checks are divided among processes."""
    found = []
    for jobs in ("1", "2"):
        path = tmp_path / f"{jobs}.json"
        arguments = ("--device", "cpu", "--check", "mha.decode", "--check", "mha.sinks", "--jobs", jobs)
        assert attnplug("conform", "torch_native", *arguments, "--report", str(path)) == 0
        results = json.loads(path.read_text())["results"]
        assert all(result.pop("seconds") > 0 for result in results)
        found.append(results)
    assert found[0] == found[1] and len(results) > 10 and all(result["error"] > 0 for result in results)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["torch_nativ"], ["'torch_nativ'", "torch_native"]),
        (["torch_native", "--check", "mha.decod"], ["'mha.decod'", "mean mha."]),
        (["torch_native", "--check", "nonsense"], ["'nonsense'", "mha, mla"]),
        (["torch_native", "--report", "out.txt"], ["--report out.txt", ".html", ".json", ".xml"]),
        (["torch_native", "--report", "nowhere/out.html"], ["--report nowhere/out.html"]),
        (["torch_native", "--seed", "-1"], ["--seed -1", "from 0 to"]),
        (["torch_native", "--jobs", "0"], ["--jobs 0", "1 or more"]),
        (["torch_native", "--contract", "00.9"], ["--contract 00.9", f"give {CONTRACT_VERSION}"]),
        (["torch_native", "--expected-failures", "nowhere"], ["--expected-failures nowhere", "No such file"]),
    ],
)
def test_a_usage_error_names_the_value_and_the_allowed_ones(arguments, parts):
    with pytest.raises(UsageError) as raised:
        attnplug("conform", *arguments)
    assert all(part in str(raised.value) for part in parts)


def test_a_backend_that_needs_another_contract_is_refused_with_the_command(monkeypatch):
    """D4"""
    monkeypatch.setattr("attnplug.declare.version.CONTRACT_VERSION", "9.0")
    with raises_naming(PluginError, "torch_native", "9.0", "pip install"):
        attnplug("conform", "torch_native")


def test_a_file_that_cannot_be_written_is_a_usage_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder.html").mkdir()
    with raises_naming(UsageError, "--report", "folder.html"):
        attnplug("conform", "torch_native", "--report", "folder.html")

    def full(path: Path, *_, **__) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", full)
    with raises_naming(UsageError, "--report", "out.json", "No space left"):
        attnplug("conform", "torch_native", "--device", "cpu", "--check", "declared", "--report", "out.json")
    with raises_naming(UsageError, "fresh/pyproject.toml", "No space left"):
        attnplug("new", "fresh")


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_conforms(kind, tmp_path, monkeypatch, capsys):
    """D1: installed, it is selectable; and it passes the quick checks of everything that it claims."""
    name = f"fresh_{kind}"
    monkeypatch.chdir(tmp_path)
    assert attnplug("new", name, "--kind", kind) == 0
    project = tomllib.loads(Path(name, "pyproject.toml").read_text())["project"]
    assert requirement_refusal(project["dependencies"][0]) is None and "<" in project["dependencies"][0]
    source = Path(name, "src")
    info = source / f"{name}-0.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.9.0\n")
    (info / "entry_points.txt").write_text(f"[attnplug.plugins]\n{name} = {name}.plugin\n")
    monkeypatch.syspath_prepend(str(source.resolve()))
    verdict = run_checks(Subject(load_registry().backends[name], torch.device("cpu")), all_checks(), quick=True)
    failed = {result.check.name: result.message for result in verdict.results if result.status is Status.FAILED}
    assert not failed and verdict.holds, verdict.problems
    asked = ("auto", {"linear": name}) if kind == "linear" else (name, {})
    assert selected_backends(load_registry(), *asked, "cpu", Processor("cpu")) == [name]  # what check does
    for module in [each for each in sys.modules if each.split(".")[0] == name]:
        del sys.modules[module]


@pytest.mark.parametrize("kind", KINDS)
def test_an_author_starts_with_sixty_lines(kind):
    made = files("my_backend", kind)
    assert sum(text.count("\n") for path, text in made.items() if path.startswith("src/")) <= 60


def test_new_writes_over_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("taken").mkdir()
    with raises_naming(UsageError, "taken"):
        attnplug("new", "taken")


@pytest.mark.parametrize("name", ["My-Backend", "1st", "auto", "class"])
def test_new_refuses_a_name_that_no_backend_can_have(name):
    with raises_naming(UsageError, repr(name)):
        attnplug("new", name)


@pytest.mark.parametrize("name", ["torch_native", pytest.param("json", id="a module")])
def test_new_refuses_a_name_that_is_taken(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with raises_naming(UsageError, repr(name)):
        attnplug("new", name)
    assert not list(tmp_path.iterdir())


def test_options_of_another_backend_are_refused():
    """They would have no effect on the run."""
    with raises_naming(UsageError, "flashinfer_mla", "torch_native"):
        attnplug("conform", "torch_native", "--backend-option", "flashinfer_mla.disable_ragged=true")


class TestCheck:
    """The quick run, for the backends that a choice leads to."""

    def test_auto_checks_what_is_chosen_for_every_kind_of_layer(self, capsys):
        assert attnplug("check", "--device", "cpu", "--json") == 0
        (verdict,) = json.loads(capsys.readouterr().out)
        assert verdict["backend"] == "torch_native" and verdict["quick"] and verdict["conforms"]
        assert {"mha", "mla", "sparse"} <= set(verdict["claims"])

    @pytest.mark.long
    def test_linear_backends_are_checked_where_one_is_asked_for(self, capsys):
        assert attnplug("check", "--device", "cpu", "--linear-attention-backend", "torch") == 0
        assert "torch conforms (quick)" in capsys.readouterr().out

    def test_each_role_may_have_a_backend_of_its_own(self):
        registry = load_registry()
        chosen = selected_backends(
            registry, "auto", {"decode": "torch_native", "linear": "torch"}, "cpu", Processor("cpu")
        )
        assert chosen == ["torch", "torch_native"]

    def test_a_backend_that_cannot_be_chosen_is_refused_with_its_reasons(self):
        with pytest.raises(SelectionError) as raised:
            attnplug("check", "--device", "cpu", "--attention-backend", "flashmla")
        candidate = raised.value.selection.unserved[0].candidates[0]
        assert RefusalCode.DEVICE in {refusal.code for refusal in candidate.refusals}

    def test_options_reach_the_backend_they_name(self):
        with raises_naming(UsageError, "torch_native"):
            attnplug("check", "--device", "cpu", "--backend-option", "torch_native.speed=11")
