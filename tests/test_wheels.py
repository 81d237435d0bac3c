"""Real wheels of good and broken plugins in a fresh environment without network, driven by the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from zipfile import ZipFile

import pytest

from attnplug.declare.version import CONTRACT_VERSION
from attnplug_testing.environments import Environment

pytestmark = pytest.mark.long

KEYS = ["name", "distribution", "version", "contract", "status", "reasons", "error"]
GOOD = "acme-attention"
ROOT = Path(__file__).parent.parent
FLASHINFER_MLA = ROOT / "plugins" / "flashinfer_mla"


@dataclass(frozen=True)
class TinyPlugin:
    """A distribution with one module: its name, version, entry point and source."""

    distribution: str
    version: str
    entry_point: str
    body: str

    def write(self, folder: Path) -> None:
        """Write its wheel. A builder takes longer for all of them than the tests that they are for."""
        module = self.distribution.replace("-", "_")
        info = f"{module}-{self.version}.dist-info"
        files = {
            f"{module}.py": self.body,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {self.distribution}\nVersion: {self.version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/entry_points.txt": f"[attnplug.plugins]\n{self.entry_point} = {module}\n",
        }
        files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
        with ZipFile(folder / f"{module}-{self.version}-py3-none-any.whl", "w") as wheel:
            for name, text in files.items():
                wheel.writestr(name, text)


_SPEC = """
from attnplug import AttentionKind, BackendSpec, Capabilities, DType, hookimpl

def spec(name, contract="1.0", devices=("cpu",), dtypes=(DType.FLOAT32,), requires=(), **more):
    can = Capabilities(kinds={AttentionKind.MHA}, devices=devices, dtypes=dtypes, **more)
    return BackendSpec(name, "nothing runs", contract, "attnplug:nothing", can, requires)
"""

_HOOK = """
@hookimpl
def attnplug_backends():
    return [{spec}]
"""

# Plugins that cannot be used, and the text that each one's error must contain.
BROKEN: dict[TinyPlugin, tuple[str, ...]] = {
    TinyPlugin("bad-import", "0.1", "bad_import", "import a_kernel_library_nobody_has"): (
        "ModuleNotFoundError",
        "a_kernel_library_nobody_has",
    ),
    TinyPlugin("bad-syntax", "0.2", "bad_syntax", "def attnplug_backends(:"): ("SyntaxError", "bad_syntax.py"),
    TinyPlugin("bad-assertion", "0.3", "bad_assertion", "assert 1 == 2, 'needs a newer GPU'"): (
        "AssertionError",
        "needs a newer GPU",
    ),
    TinyPlugin("bad-exit", "0.4", "bad_exit", "import sys; sys.exit('no GPU, goodbye')"): (
        "SystemExit",
        "no GPU, goodbye",
    ),
    TinyPlugin("bad-type", "0.5", "bad_type", _SPEC + _HOOK.format(spec="{'name': 'bad_type'}")): (
        "def attnplug_backends()",
        "bad_type.py:8",
        "{'name': 'bad_type'} (dict)",
        "not a BackendSpec",
    ),
    TinyPlugin("bad-list", "0.6", "bad_list", _SPEC + _HOOK.format(spec="").replace("[]", "spec('bad_list')")): (
        "def attnplug_backends()",
        "return a list",
    ),
    TinyPlugin("bad-contract", "0.7", "bad_contract", _SPEC + _HOOK.format(spec="spec('bad_contract', '2.0')")): (
        "contract 2.0",
        f"this attnplug has contract {CONTRACT_VERSION}",
    ),
    TinyPlugin(
        "bad-hook",
        "0.8",
        "bad_hook",
        _SPEC + _HOOK.format(spec="spec('bad_hook')").replace("attnplug_backends", "attnplug_backend"),
    ): ("def attnplug_backend()", "bad_hook.py:8", "did you mean attnplug_backends?"),
    TinyPlugin(
        "bad-default", "0.9", "bad_default", _SPEC + _HOOK.format(spec="spec('bad_default')").replace("()", "(sm=90)")
    ): ("def attnplug_backends(sm=90)", "bad_default.py:8", "sm would never be passed"),
    TinyPlugin(
        "bad-mark", "0.10", "bad_mark", _SPEC + _HOOK.format(spec="spec('bad_mark')").replace("@hookimpl", "")
    ): ("def attnplug_backends()", "not marked", "@attnplug.hookimpl"),
    TinyPlugin(
        "bad-claims",
        "0.11",
        "bad_claims",
        _SPEC + _HOOK.format(spec="spec('bad_claims', devices={'cuda'}, min_sm=100, max_sm=90)"),
    ): ("'bad_claims'", "min_sm 100 is above max_sm 90"),
}

CHATTY = TinyPlugin(
    "chatty", "2.0", "chatty", "print('hello from chatty')" + _SPEC + _HOOK.format(spec="spec('chatty')")
)
NEEDY = TinyPlugin("needy", "3.0", "needy", _SPEC + _HOOK.format(spec="spec('needy', requires=('unobtainium>=7',))"))
IMPOSTOR = TinyPlugin("impostor", "6.6.6", "other", _SPEC + _HOOK.format(spec="spec('acme')"))
USURPER = TinyPlugin("usurper", "6.6.7", "usurper", _SPEC + _HOOK.format(spec="spec('torch_native')"))

# Not -X importtime: it leaves out what importlib.import_module imports, and that is how plugins are loaded.
_RUN_AND_NAME_MODULES = """
import atexit, runpy, sys
atexit.register(lambda: print("imported:", *{name.partition(".")[0] for name in sys.modules}, file=sys.stderr))
from attnplug.cli.app import main
main()
"""


@pytest.fixture(scope="module")
def wheels(build_wheels: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good plugin and ours, built from their projects, and all tiny ones."""
    good = shutil.copytree(Path(__file__).parent / "wheels" / GOOD, tmp_path_factory.mktemp("sources") / GOOD)
    folder = build_wheels(good, FLASHINFER_MLA, ROOT / "tune")
    for plugin in (*BROKEN, CHATTY, NEEDY, IMPOSTOR, USURPER):
        plugin.write(folder)
    return folder


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


def by_status(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {f"{row['name']} from {row['distribution']}": row["status"] for row in rows}


def refused_politely(done: CompletedProcess[str], exit_code: int) -> str:
    """Error message of a command that fails: one message, nothing on standard output, no traceback."""
    assert (done.returncode, done.stdout) == (exit_code, ""), done
    assert "Traceback" not in done.stderr
    assert "error: " in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("package", "data"),
    [
        ("core", "attnplug/py.typed"),
        ("core", "attnplug/cli/completion.bash"),
        ("core", "attnplug/cli/completion.zsh"),
        ("core", "attnplug/hf/class_defaults.json"),
        ("core", "attnplug/hf/tiny.json"),
        ("tune", "attnplug_tune/report.html.jinja"),
        ("plugins/flashinfer_mla", "attnplug_flashinfer_mla/tables/nvidia-h200.json"),
    ],
)
def test_a_wheel_has_the_data_beside_its_modules(package: str, data: str, wheels: Path) -> None:
    source = ROOT / package / "src"
    files = {str(path.relative_to(source)) for path in source.glob("**/*.*") if path.suffix != ".pyc"}
    (wheel,) = wheels.glob(f"{data.partition('/')[0]}-[0-9]*.whl")
    assert {data} < files < set(ZipFile(wheel).namelist())


def test_tune_measures_once_installed_and_is_no_command_once_uninstalled(
    wheels: Path, fresh_environment: Callable[..., Environment]
) -> None:
    environment = fresh_environment(wheels, "attnplug-tune", "attnplug-sparse")
    command = ("tune", "--model", "tiny:llama", "--device", "cpu", "--points", "1x64", "--json")
    done = environment.attnplug(*command)
    assert done.returncode == 0, done.stderr
    (measured,) = json.loads(done.stdout)["backends"]
    assert measured["backend"] == "torch_native" and len(measured["rows"]) == 1
    environment.uninstall("attnplug-tune")
    assert "there is no command 'tune'" in refused_politely(environment.attnplug(*command), 2)


def test_sparse_models_are_served_while_attnplug_sparse_is_installed(
    wheels: Path, fresh_environment: Callable[..., Environment]
) -> None:
    """D1, A10"""
    environment = fresh_environment(wheels, "attnplug-sparse")
    command = ("explain", "--model", "tiny:deepseek_v32", "--device", "cpu", "--json")
    chosen = json.loads(environment.attnplug(*command).stdout)
    assert chosen["decode"]["chosen"] == "torch_sparse"
    environment.uninstall("attnplug-sparse")
    refused = environment.attnplug(*command)
    assert refused.returncode == 1
    (candidate,) = json.loads(refused.stdout)["decode"]["candidates"]
    assert candidate["name"] == "torch_native"
    assert [reason["code"] for reason in candidate["refusals"]] == ["feature"]


class TestInstallAndUninstall:
    def test_a_backend_is_selectable_once_installed_and_gone_once_uninstalled(
        self, wheels: Path, fresh_environment: Callable[..., Environment]
    ) -> None:
        """D1: pip install makes it selectable by name, pip uninstall removes it, and nothing else changes."""
        environment = fresh_environment(wheels)
        choose = ("explain", "--attention-backend", "acme", "--model", "tiny:llama", "--device", "cpu", "--json")
        before = environment.backends("--all")
        assert by_status(before) == {"torch_native from attnplug": "usable"}
        assert "there is no backend 'acme'" in refused_politely(environment.attnplug(*choose), 2)

        environment.install(GOOD)
        installed = environment.backends("--all")
        assert [row for row in installed if row["name"] != "acme"] == before
        chosen = environment.attnplug(*choose)
        assert chosen.returncode == 0, chosen.stderr
        found = json.loads(chosen.stdout)
        assert [found[role]["chosen"] for role in ("prefill", "decode")] == ["acme", "acme"]

        environment.uninstall(GOOD)
        assert environment.backends("--all") == before
        assert "there is no backend 'acme'" in refused_politely(environment.attnplug(*choose), 2)

    def test_our_flashinfer_plugin_comes_and_goes_with_its_wheel(
        self, wheels: Path, fresh_environment: Callable[..., Environment]
    ) -> None:
        """D1, D3: installed where it cannot serve it is refused with every reason, the missing library among them."""
        environment = fresh_environment(wheels, "attnplug-flashinfer-mla")
        choose = ("explain", "--attention-backend", "flashinfer_mla", "--model", "tiny:deepseek_v3", "--device", "cpu")
        done = environment.attnplug(*choose, "--json")
        assert done.returncode == 1, done.stderr
        found = json.loads(done.stdout)
        for role in ("prefill", "decode"):
            (ours,) = (candidate for candidate in found[role]["candidates"] if candidate["name"] == "flashinfer_mla")
            assert ours["distribution"] == "attnplug-flashinfer-mla"
            reasons = {refusal["code"]: refusal for refusal in ours["refusals"]}
            assert set(reasons) == {"requirement", "device", "dtype", "kv_dtype", "mla_dims"}
            assert reasons["requirement"]["advice"].startswith("pip install 'flashinfer-python")

        environment.uninstall("attnplug-flashinfer-mla")
        assert by_status(environment.backends("--all")) == {"torch_native from attnplug": "usable"}
        assert "there is no backend 'flashinfer_mla'" in refused_politely(environment.attnplug(*choose), 2)

    def test_each_broken_plugin_is_gone_once_uninstalled(
        self, wheels: Path, fresh_environment: Callable[..., Environment]
    ) -> None:
        """D1, D2: an uninstall removes exactly that plugin from the list, whether it fails on import, ends the process
        or returns something other than a spec."""
        gone = ("bad-import", "bad-exit", "bad-type")
        environment = fresh_environment(wheels, "bad-mark", *gone)
        left = {"bad-mark", *gone}
        for distribution in gone:
            environment.uninstall(distribution)
            left.remove(distribution)
            assert {row["distribution"] for row in environment.backends("--all")} == {"attnplug", *left}

    def test_a_taken_name_belongs_to_neither_until_one_of_them_goes(
        self, wheels: Path, fresh_environment: Callable[..., Environment]
    ) -> None:
        """D2: a taken name is an error that names both distributions; neither wins, and others are undisturbed."""
        environment = fresh_environment(wheels, GOOD, IMPOSTOR.distribution)
        assert by_status(environment.backends()) == {"torch_native from attnplug": "usable"}
        rows = environment.backends("--all")
        assert by_status(rows) == {
            "torch_native from attnplug": "usable",
            "acme from acme-attention": "broken",
            "acme from impostor": "broken",
        }
        for row in rows[1:]:
            assert "acme-attention 1.2.0" in row["error"] and "impostor 6.6.6" in row["error"]
            assert row["contract"] == CONTRACT_VERSION
        done = environment.attnplug("explain", "--attention-backend", "acme", "--model", "tiny:llama")
        error = refused_politely(done, 1)
        assert "acme-attention 1.2.0" in error and "impostor 6.6.6" in error

        # both remedies that the error names work: allow one plugin, or uninstall the other
        assert by_status(environment.backends(ATTNPLUG_PLUGINS=GOOD))["acme from acme-attention"] == "usable"
        assert by_status(environment.backends(ATTNPLUG_PLUGINS="impostor"))["acme from impostor"] == "usable"
        environment.uninstall(IMPOSTOR.distribution)
        assert by_status(environment.backends("--all")) == {
            "acme from acme-attention": "usable",
            "torch_native from attnplug": "usable",
        }

    def test_no_plugin_takes_the_embedded_backend_s_name(
        self, wheels: Path, fresh_environment: Callable[..., Environment]
    ) -> None:
        """D2: a plugin with this name is broken, its error names both distributions, and the default stays usable."""
        environment = fresh_environment(wheels, GOOD, USURPER.distribution)
        rows = environment.backends("--all")
        assert by_status(rows) == {
            "acme from acme-attention": "usable",
            "torch_native from attnplug": "usable",
            "torch_native from usurper": "broken",
        }
        (broken,) = (row for row in rows if row["status"] == "broken")
        assert "attnplug 1.0.0rc1" in broken["error"] and "usurper 6.6.7" in broken["error"]


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
        """D1, D3: the installed plugin is chosen where it is asked for; each candidate carries every reason."""
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
        """D3: exit code 1 and a coded reason when the backend asked for cannot serve the model."""
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
        """D2: next to every kind of broken plugin, the good ones are listed as they are when alone."""
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
        """D2, D3: a plugin whose library is absent is whole: it is refused here, with the requirement."""
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
