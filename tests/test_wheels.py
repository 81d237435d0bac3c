"""Real wheels of good and broken plugins in one environment without network, driven by the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnplug.declare.version import CONTRACT_VERSION
from attnplug_testing.environments import Environment
from tiny_plugins import BROKEN, CHATTY, GOOD, NEEDY, TinyPlugin, by_status, refused_politely

pytestmark = pytest.mark.long

KEYS = ["name", "distribution", "version", "contract", "status", "reasons", "error"]


# Not -X importtime: it leaves out what importlib.import_module imports, and that is how plugins are loaded.
_RUN_AND_NAME_MODULES = """
import atexit, runpy, sys
atexit.register(lambda: print("imported:", *{name.partition(".")[0] for name in sys.modules}, file=sys.stderr))
from attnplug.cli.app import main
main()
"""


@pytest.fixture(scope="module")
def crowd(wheels: Path, fresh_environment: Callable[..., Environment]) -> Environment:
    """Environment with the good plugin, all broken ones, one that prints and one that lacks a library. Tests only read
    it."""
    return fresh_environment(wheels, GOOD, CHATTY.distribution, NEEDY.distribution, *names(BROKEN))


@pytest.fixture(scope="module")
def listed(crowd: Environment) -> dict[str, dict[str, Any]]:
    """Rows of ``backends --all --json`` in the crowd, by name."""
    rows = crowd.backends("--all")
    assert len({row["name"] for row in rows}) == len(rows)
    return {row["name"]: row for row in rows}


def names(plugins: Any) -> list[str]:
    return [plugin.distribution for plugin in plugins]


class TestGoodBackend:
    def test_it_passes_the_check_for_what_it_claims_and_refuses_the_rest(
        self, wheels: Path, fresh_environment: Callable[..., Environment]
    ) -> None:
        """D1: an installed third-party backend runs through the real command. D3: cases that it does not claim are
        refused."""
        arguments = ("--attention-backend", "acme", "--device", "cpu", "--backend-option", "acme.accumulate=float64")
        done = fresh_environment(wheels, GOOD, "attnplug-sparse").attnplug("check", *arguments, "--json")
        assert done.returncode == 0, done.stderr
        (verdict,) = json.loads(done.stdout)
        results = {row["check"]: row for row in verdict["results"]}
        assert verdict["conforms"] and results["mha.gqa.decode"]["status"] == "passed"
        assert results["mha.window.decode"]["status"] == "refused"
        assert "sliding_window" in results["mha.window.decode"]["words"]
        # The typed option reached the backend: all that is left is the rounding of the result.
        assert results["mha.gqa.decode"]["error"] < 1e-7, results["mha.gqa.decode"]

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ("acme.accumulate=float8", "must be one of float32, float64, not 'float8'"),
            ("acme.speed=11", "backend acme has no option 'speed'"),
        ],
    )
    def test_a_wrong_option_is_refused_with_the_valid_ones(self, crowd: Environment, option: str, message: str) -> None:
        """D3: an option that the plugin's dataclass does not have is an error that lists the valid ones."""
        arguments = ("--attention-backend", "acme", "--model", "tiny:llama", "--backend-option", option)
        error = refused_politely(crowd.attnplug("explain", *arguments), 2)
        assert message in error and "accumulate: one of float32, float64 = 'float32'" in error

    def test_explain_gives_the_choice_and_every_candidate(self, crowd: Environment) -> None:
        """D1, D3: the installed plugin is chosen if it is requested; each candidate has every reason."""
        arguments = ("--attention-backend", "acme", "--model", "tiny:llama", "--device", "cpu", "--dtype", "float32")
        done = crowd.attnplug("explain", *arguments, "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        for choice in (found["prefill"], found["decode"]):
            assert choice["chosen"] == "acme"
            candidates = {candidate["name"]: candidate for candidate in choice["candidates"]}
            assert set(candidates) == {"acme", "chatty", "needy", "torch_native"}
            assert candidates["acme"] == {
                "name": "acme",
                "distribution": "acme-attention",
                "version": "1.2.0",
                "invariant": [],
                "refusals": [],
            }
            assert [refusal["code"] for refusal in candidates["needy"]["refusals"]] == ["requirement"]
        for plugin in BROKEN:
            assert f"({plugin.distribution} {plugin.version})" in done.stderr  # a warning each

    def test_it_is_refused_where_it_cannot_serve(self, crowd: Environment) -> None:
        """D3: exit code 1 and a coded reason if the requested backend cannot serve the model."""
        arguments = ("--attention-backend", "acme", "--model", "tiny:deepseek_v3", "--device", "cpu", "--json")
        done = crowd.attnplug("explain", *arguments)
        assert done.returncode == 1
        choice = json.loads(done.stdout)["prefill"]
        assert choice["chosen"] is None
        assert "kind" in [refusal["code"] for refusal in choice["candidates"][0]["refusals"]]


class TestBrokenPlugins:
    @pytest.mark.parametrize(("plugin", "fragments"), BROKEN.items(), ids=names(BROKEN))
    def test_it_is_listed_with_distribution_version_and_error(
        self, listed: dict[str, dict[str, Any]], plugin: TinyPlugin, fragments: tuple[str, ...]
    ) -> None:
        """D2: a broken plugin is reported with its distribution, version and error, and its author's own signature."""
        row = listed[plugin.entry_point]
        assert list(row) == KEYS
        assert (row["distribution"], row["version"]) == (plugin.distribution, plugin.version)
        assert (row["status"], row["reasons"]) == ("broken", [])
        for fragment in fragments:
            assert fragment in row["error"]

    @pytest.mark.parametrize("plugin", BROKEN, ids=names(BROKEN))
    def test_asking_for_it_by_name_says_why_not(self, crowd: Environment, plugin: TinyPlugin) -> None:
        """D2: an error with distribution, version and error, exit code 1, no traceback."""
        arguments = ("--attention-backend", plugin.entry_point, "--model", "tiny:llama")
        error = refused_politely(crowd.attnplug("explain", *arguments), 1)
        assert f"{plugin.distribution} {plugin.version}" in error
        for fragment in BROKEN[plugin]:
            assert fragment in error

    def test_check_refuses_a_broken_backend_too(self, crowd: Environment) -> None:
        """D2: every command that takes a name answers in the same way."""
        done = crowd.attnplug("check", "--attention-backend", "bad_import")
        assert done.returncode == 1
        assert "bad-import 0.1" in done.stderr.split("error: ")[1] and "Traceback" not in done.stderr

    def test_they_disturb_no_other_plugin(self, listed: dict[str, dict[str, Any]]) -> None:
        """D2: good plugins are listed as usual, together with every kind of broken plugin."""
        assert {name: row["status"] for name, row in listed.items() if row["status"] != "broken"} == {
            "acme": "usable",
            "chatty": "usable",
            "needy": "refused",
            "torch_native": "usable",
        }
        assert len(listed) == len(BROKEN) + 4

    def test_the_contract_that_a_plugin_speaks_is_listed(self, listed: dict[str, dict[str, Any]]) -> None:
        """D2, D4: the version of a plugin written for another contract is shown, not only that it is another."""
        assert listed["bad_contract"]["contract"] == "2.0"
        assert listed["acme"]["contract"] == CONTRACT_VERSION

    def test_strict_mode_makes_them_an_error_that_lists_them_all(self, crowd: Environment) -> None:
        """D2: ATTNPLUG_STRICT=1 turns broken plugins into an error with each of them."""
        for command in (("backends", "--json"), ("explain", "--model", "tiny:llama")):
            error = refused_politely(crowd.attnplug(*command, ATTNPLUG_STRICT="1"), 1)
            for plugin, fragments in BROKEN.items():
                assert f"{plugin.distribution} {plugin.version}" in error
                assert all(fragment in error for fragment in fragments)
        assert crowd.attnplug("backends", ATTNPLUG_STRICT="0").returncode == 0

    def test_strict_mode_is_content_without_broken_plugins(self, crowd: Environment) -> None:
        """D2: plugins that the allow-list blocks are not loaded, so they cannot be broken either."""
        rows = crowd.backends("--all", ATTNPLUG_STRICT="1", ATTNPLUG_PLUGINS=f"{GOOD},needy")
        assert {row["status"] for row in rows} == {"usable", "refused", "blocked"}

    def test_doctor_reports_them_and_does_not_fail(self, crowd: Environment) -> None:
        """D2: the environment report holds every plugin with its error, even in strict mode."""
        done = crowd.attnplug("doctor", "--json", ATTNPLUG_STRICT="1")
        assert done.returncode == 0, done.stderr
        plugins = json.loads(done.stdout)["plugins"]
        for plugin in BROKEN:
            assert plugins[plugin.entry_point].startswith(f"{plugin.distribution} {plugin.version}: broken: ")
        assert plugins["acme"] == "acme-attention 1.2.0: usable here"


class TestListing:
    def test_broken_plugins_are_counted_and_shown_with_all(self, crowd: Environment) -> None:
        """D2: without --all the list omits broken plugins, but a message gives their number and names the option."""
        done = crowd.attnplug("backends")
        assert done.returncode == 0
        assert "bad" not in done.stdout
        assert f"{len(BROKEN)} broken not shown" in done.stderr and "--all" in done.stderr
        lines = {line.split()[0]: line for line in done.stdout.splitlines() if not line.startswith(" ")}
        assert "acme-attention 1.2.0" in lines["acme"] and "usable here" in lines["acme"]
        assert "refused here" in lines["needy"]
        everything = crowd.attnplug("backends", "--all")
        assert everything.returncode == 0
        for plugin in BROKEN:
            row = next(line for line in everything.stdout.splitlines() if line.startswith(f"{plugin.entry_point} "))
            assert f"{plugin.distribution} {plugin.version}" in row and "broken: " in row

    def test_json_has_exactly_the_promised_keys(self, crowd: Environment) -> None:
        """D2: machines read the same keys for every status."""
        rows = crowd.backends("--all", ATTNPLUG_PLUGINS="acme,needy,bad-import")
        assert {row["status"] for row in rows} == {"usable", "refused", "broken", "blocked"}
        for row in rows:
            assert list(row) == KEYS
            assert (row["error"] is not None) == (row["status"] in ("broken", "blocked"))
            assert bool(row["reasons"]) == (row["status"] == "refused")

    def test_a_plugin_that_prints_does_not_spoil_the_json(self, crowd: Environment) -> None:
        """D2: output of a plugin while it is loaded goes to standard error."""
        done = crowd.attnplug("backends", "--json")
        assert "chatty" in [row["name"] for row in json.loads(done.stdout)]
        assert "hello from chatty" in done.stderr and "hello" not in done.stdout

    def test_a_missing_requirement_is_a_refusal_that_says_what_to_install(
        self, listed: dict[str, dict[str, Any]]
    ) -> None:
        """D2, D3: a plugin without its library is not broken: it is refused here, with the requirement."""
        (reason,) = listed["needy"]["reasons"]
        assert reason["code"] == "requirement"
        assert (reason["value"], reason["allowed"]) == (None, ">=7")
        assert "unobtainium" in reason["message"] and "pip install" in reason["advice"]

    @pytest.mark.parametrize("flags", [(), ("--json", "--all")], ids=["table", "json"])
    def test_it_imports_neither_torch_nor_a_kernel_library(self, crowd: Environment, flags: tuple[str, ...]) -> None:
        """D1: listing the installed backends does not import the libraries that they run on."""
        done = crowd.run("python", "-c", _RUN_AND_NAME_MODULES, "backends", *flags)
        assert done.returncode == 0, done.stderr
        imported = set(done.stderr.rpartition("imported: ")[2].split())
        assert {"attnplug", "acme_attention", "chatty"} <= imported
        assert not imported & {"torch", "numpy", "triton", "flashinfer", "flash_attn", "sgl_kernel", "cutlass", "fla"}


class TestAllowList:
    @pytest.mark.parametrize(
        "allowed", ["acme-attention", "Acme_Attention", "acme", " acme , needy-not "], ids=lambda text: repr(text)
    )
    def test_it_allows_by_distribution_and_by_name(self, crowd: Environment, allowed: str) -> None:
        """D1: ATTNPLUG_PLUGINS blocks all plugins that it does not name, except the embedded backend."""
        rows = crowd.backends("--all", ATTNPLUG_PLUGINS=allowed)
        assert {row["name"] for row in rows if row["status"] == "usable"} == {"acme", "torch_native"}
        assert {row["status"] for row in rows if row["name"] not in ("acme", "torch_native")} == {"blocked"}
        assert len(rows) == len(BROKEN) + 4

    def test_empty_it_leaves_only_the_embedded_backend(self, crowd: Environment) -> None:
        """D1: with an empty list nothing of any plugin is imported."""
        assert by_status(crowd.backends(ATTNPLUG_PLUGINS="")) == {"torch_native from attnplug": "usable"}
        done = crowd.attnplug("backends", ATTNPLUG_PLUGINS="")
        assert "hello from chatty" not in done.stderr
        assert f"{len(BROKEN) + 3} blocked not shown" in done.stderr

    def test_a_name_that_matches_nothing_is_a_warning(self, crowd: Environment) -> None:
        """D1: a misspelled allow-list is not silently an empty one; in strict mode it is an error."""
        done = crowd.attnplug("backends", "--json", ATTNPLUG_PLUGINS="acme,amce")
        assert done.returncode == 0
        assert by_status(json.loads(done.stdout))["acme from acme-attention"] == "usable"
        assert "warning: ATTNPLUG_PLUGINS" in done.stderr and "'amce'" in done.stderr
        done = crowd.attnplug("backends", ATTNPLUG_PLUGINS="acme,amce", ATTNPLUG_STRICT="1")
        assert "'amce'" in refused_politely(done, 1)

    def test_asking_for_a_blocked_backend_names_the_variable(self, crowd: Environment) -> None:
        """D1: a blocked backend is not an unknown one."""
        arguments = ("--attention-backend", "acme", "--model", "tiny:llama")
        error = refused_politely(crowd.attnplug("explain", *arguments, ATTNPLUG_PLUGINS="needy"), 2)
        assert "acme-attention 1.2.0" in error and "ATTNPLUG_PLUGINS" in error
