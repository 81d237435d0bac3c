"""Packages and plugins come with their wheels and go with them, in fresh environments without network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

from attnplug.declare.version import CONTRACT_VERSION
from attnplug_testing.environments import Environment
from tiny_plugins import GOOD, IMPOSTOR, USURPER, by_status, refused_politely

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent


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
