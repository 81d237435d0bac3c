"""attnplug explain --host: engines that bridges lead to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attnplug import Problem, UsageError
from attnplug.auto.ranking import BY_PREFERENCE
from attnplug.host import HostSpec
from attnplug.registry.hosts import load_host
from attnplug_testing.command import Attnplug
from attnplug_testing.errors import raises_naming

pytestmark = pytest.mark.usefixtures("plain_environment")

HOST = """
from dataclasses import replace
from attnplug import CacheLayout, Refusal
from attnplug.host import HostSpec

def refuse(problem):
    if problem.page_size == 16:
        yield Refusal("page_size", "pages of 16 do not exist there", 16, [32], "page_size")

HOST = HostSpec(
    title="Engine", distributions=("engine-of-a-test",), versions=">=2,<3",
    render=lambda key: {"page_size": "--block", "attention_backend": "--attn"}.get(key),
    fit=lambda problem: replace(problem, exact_lengths=False, layout=CacheLayout.STRIDED), refuse=refuse,
)
"""
Bridge = Callable[..., None]


@pytest.fixture
def bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bridge:
    """Installs a bridge to ``engine``, and the engine itself if it has a version."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(source: str = HOST, name: str = "bridge", engine: str | None = None) -> None:
        module = f"{name}_of_{tmp_path.name}"
        (tmp_path / f"{module}.py").write_text(source)
        entries = f"[attnplug.hosts]\nengine = {module}:HOST\n"
        for dist, version, text in ((name, "1.0", entries), ("engine-of-a-test", engine, "")):
            if version is not None:
                info = tmp_path / f"{dist.replace('-', '_')}-{version}.dist-info"
                info.mkdir()
                (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
                (info / "entry_points.txt").write_text(text)

    return install


EXPLAIN = ("explain", "--model", "tiny:llama", "--device", "cpu", "--host", "engine")


def test_the_hosts_problem_is_explained_with_its_setting_names(attnplug: Attnplug, bridge: Bridge) -> None:
    """D3: torch_native needs exact lengths, which this host has not."""
    bridge()
    outcome = attnplug(*EXPLAIN, "--attention-backend", "torch_native")
    assert outcome.out.splitlines()[0] == "host       Engine >=2,<3, not installed here (bridge 1.0)"
    assert "cache layout: strided" in outcome.out and "upper bounds of lengths only" in outcome.out


@pytest.mark.parametrize("per_batch", [True, False])
def test_backends_share_roles_where_the_host_goes_by_batch(
    attnplug: Attnplug, bridge: Bridge, monkeypatch: pytest.MonkeyPatch, per_batch: bool
) -> None:
    """D3: ``explain`` ranks backends per batch exactly if the bridge does so at run time."""
    asked: list[bool] = []

    def ranking(registry: object, problem: Problem, *, per_batch: bool = False) -> object:
        asked.append(per_batch)
        return BY_PREFERENCE

    monkeypatch.setattr("attnplug.cli.explain.default_ranking", ranking)
    bridge(HOST.replace("refuse=refuse,", f"refuse=refuse, per_batch=lambda problem: {per_batch},"))
    attnplug(*EXPLAIN)
    assert asked == [per_batch]


def test_what_the_host_cannot_carry_is_a_refusal(attnplug: Attnplug, bridge: Bridge) -> None:
    """D3"""
    bridge()
    outcome = attnplug(*EXPLAIN, "--page-size", "16")
    assert outcome.code == 1
    assert outcome.out.splitlines()[1] == "  - pages of 16 do not exist there (change --block)"
    as_json = attnplug(*EXPLAIN, "--page-size", "16", "--json").json["host"]
    assert (as_json["name"], as_json["version"], as_json["versions"]) == ("engine", None, ">=2,<3")
    assert [refusal["option"] for refusal in as_json["refusals"]] == ["--block"]


@pytest.mark.parametrize(("version", "refused"), [("2.4", False), ("3.0", True), ("2.9rc1", False)])
def test_a_version_outside_the_range_is_refused(
    attnplug: Attnplug, bridge: Bridge, version: str, refused: bool
) -> None:
    bridge(engine=version)
    outcome = attnplug(*EXPLAIN)
    assert f"host       Engine >=2,<3, {version} (bridge 1.0)" in outcome.out
    message = f"this is Engine {version}, but the bridge is made for >=2,<3 (pip install 'engine-of-a-test>=2,<3'"
    assert (message in outcome.out) is refused


def test_a_host_that_is_not_there(attnplug: Attnplug, bridge: Bridge) -> None:
    outcome = attnplug("explain", "--model", "tiny:llama", "--host", "sglang-of-nobody")
    assert outcome.code == 2 and "'sglang-of-nobody'" in outcome.err
    bridge()
    outcome = attnplug("explain", "--model", "tiny:llama", "--host", "Engin")
    assert outcome.code == 2 and "did you mean engine?" in outcome.err


def test_an_unknown_host_is_answered_with_the_installed_ones(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1: what could be installed is in the documentation, not in a list of names."""
    bridge()
    with raises_naming(UsageError, "'ENGINE'", "engine?"):
        load_host("ENGINE")
    with raises_naming(UsageError, "engine", "hosts.md"):
        load_host("qqq")
    monkeypatch.setattr("attnplug.registry.hosts.find_entry_points", lambda group: ([], []))
    with raises_naming(UsageError, "vllm", "hosts.md"):
        load_host("vllm")


def test_what_a_bridge_prints_stays_out_of_the_answer(bridge: Bridge, capsys: pytest.CaptureFixture[str]) -> None:
    bridge(f"print('noise')\n{HOST}")
    assert load_host("engine")[0].title == "Engine" and not capsys.readouterr().out


def test_an_interrupt_while_a_bridge_loads_is_one(bridge: Bridge) -> None:
    bridge("raise KeyboardInterrupt\n")
    with raises_naming(KeyboardInterrupt, "engine (bridge 1.0)"):
        load_host("engine")


@pytest.mark.parametrize(
    ("source", "expected"),
    [("HOST = 3\n", "it is 3, not a HostSpec"), ("raise SystemExit('gone')\n", "SystemExit: gone")],
)
def test_a_broken_bridge_is_named(attnplug: Attnplug, bridge: Bridge, source: str, expected: str) -> None:
    bridge(source)
    outcome = attnplug(*EXPLAIN)
    assert outcome.code == 1 and "host 'engine' (bridge 1.0" in outcome.err and expected in outcome.err


def test_two_bridges_to_one_host_are_both_named(attnplug: Attnplug, bridge: Bridge) -> None:
    bridge()
    bridge(name="other")
    outcome = attnplug(*EXPLAIN)
    assert outcome.code == 1 and "bridge 1.0" in outcome.err and "other 1.0" in outcome.err


def test_installed_bridges_are_listed(attnplug: Attnplug, bridge: Bridge) -> None:
    bridge()
    assert "host engine" in attnplug("plugins").out


def test_the_first_name_that_is_installed_gives_the_version(bridge: Bridge) -> None:
    bridge(engine="2.5")
    spec = HostSpec(
        title="E",
        distributions=("nothing-of-a-test", "engine-of-a-test"),
        versions=">=2",
        render=str,
        fit=lambda problem: problem,
        refuse=lambda problem: (),
    )
    assert spec.installed() == "2.5" and spec.refusals(Problem()) == []
