"""A device type of another package: the one of docs/devices.md, which emulates a torch device on a CPU.

torch's device types belong to a process, so all commands run in one process of their own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "devices.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
KERNELS = f"""
from attnplug import BackendSpec, Capabilities, hookimpl

@hookimpl
def attnplug_backends():
    can = {BLOCKS[1].strip()}
    factory = "attnplug_acme.kernels:Made"
    return [BackendSpec("acme_kernels", "for newer devices", contract="1.0", factory=factory, capabilities=can)]
"""
GENERATE = ("--random-weights", "--ignore-eos", "--max-tokens", "6", "--prompt", "hello world, hello", "--json")
MODELS = {"llama": ["tiny:llama", "--temperature", "0.8"], "invariant": ["tiny:llama", "--batch-invariant"]}
MORE_MODELS = {
    "latent": ["tiny:deepseek_v3"],
    "linear": ["tiny:qwen3_next"],
    "drafts": ["tiny:llama", "--speculative-algorithm", "ngram"],
    "sparse": ["tiny:deepseek_v32", "--enable-hisparse"],
}
COMMANDS: dict[str, list[str]] = {
    "backends": ["backends", "--json"],
    "plugins": ["plugins", "--json"],
    "explain": ["explain", "--model", "tiny:llama", "--device", "acme", "--dtype", "bfloat16", "--json"],
    "unknown": ["run", "--model", "tiny:llama", "--device", "tpu", *GENERATE],
    "captured": ["run", "--model", "tiny:llama", "--device", "acme", "--cuda-graph-batch-sizes", "1", *GENERATE],
}


def generating(models: dict[str, list[str]]) -> dict[str, list[str]]:
    return {
        f"{name} on {device}": ["run", "--device", device, *GENERATE, "--model", *options]
        for name, options in models.items()
        for device in ("cpu", "acme")
    }


SCRIPT = """
import contextlib, io, json, sys
from attnplug.cli.app import main

def run(arguments):
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["attnplug", *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        try:
            code = main()
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()

done = {name: run(arguments) for name, arguments in json.load(sys.stdin).items()}
from attnplug.cli.doctor import plugin_answer
done["doctor"] = (0, json.dumps(plugin_answer()["devices"]), "")
print(json.dumps(done))
"""


class Done:
    """Outcomes of the commands by name: exit code, standard output and standard error."""

    def __init__(self, found: dict[str, tuple[int | None, str, str]]) -> None:
        self.found = found

    def json(self, name: str) -> Any:
        code, out, err = self.found[name]
        assert not code, err
        return json.loads(out)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the two packages, as pip installs them."""
    folder = tmp_path_factory.mktemp("site")
    for distribution, plugin in (("acme", "plugin"), ("acme_kernels", "backends")):
        info = folder / f"attnplug_{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: attnplug-{distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[attnplug.plugins]\n{distribution} = attnplug_acme.{plugin}\n")
    package = folder / "attnplug_acme"
    package.mkdir()
    modules = {"plugin": BLOCKS[0], "torch_acme": BLOCKS[2], "backends": KERNELS}
    for name, source in {**modules, "__init__": "", "kernels": "def Made(context): ..."}.items():
        (package / f"{name}.py").write_text(source)
    return folder


def run(site: Path, commands: dict[str, list[str]], plugins: str) -> Done:
    environment = {
        "PYTHONPATH": str(site),
        "ATTNPLUG_PLUGINS": plugins,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return Done(json.loads(ended.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def done(site: Path) -> Done:
    return run(site, COMMANDS | generating(MODELS), "acme,acme_kernels")


@pytest.fixture(scope="module")
def more(site: Path) -> Done:
    return run(site, generating(MORE_MODELS), "acme,attnplug-sparse,attnplug-hybrid-linear")


def check_same_tokens(done: Done, name: str) -> None:
    here, there = (done.json(f"{name} on {device}") for device in ("cpu", "acme"))
    assert len(here["token_ids"]) == 6
    assert here["token_ids"] == there["token_ids"]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_generates_the_same_tokens_on_a_device_of_another_package(done: Done, name: str) -> None:
    """E2: on torch_native. The emulation raises if an operation mixes devices."""
    check_same_tokens(done, name)


@pytest.mark.long
@pytest.mark.parametrize("name", MORE_MODELS)
def test_other_backends_of_torch_operations_run_there_too(more: Done, name: str) -> None:
    """E2"""
    check_same_tokens(more, name)


def test_a_backend_is_refused_by_the_comparison_of_the_devices_plugin(done: Done) -> None:
    """E2, D3"""
    answer = done.json("explain")
    assert answer["problem"]["architecture"] == "generation 2"
    assert answer["decode"]["chosen"] == "torch_native"
    (refused,) = (each for each in answer["decode"]["candidates"] if each["name"] == "acme_kernels")
    found = [(each["code"], each["value"], each["allowed"]) for each in refused["refusals"]]
    assert found == [("architecture", "generation 2", "generation 3 or newer")]
    assert f"requires {found[0][2]}; this device is {found[0][1]}" in PAGE


def test_an_unknown_device_is_refused_in_one_line_with_the_installed_ones(done: Done) -> None:
    """E2"""
    code, out, err = done.found["unknown"]
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    for text in ("--device", "'tpu'", "acme, cpu, cuda"):
        assert text in line


def test_graphs_are_refused_on_a_device_that_declares_none(done: Done) -> None:
    code, _, err = done.found["captured"]
    assert code == 2
    assert "--cuda-graph-batch-sizes" in err and "acme" in err


def test_commands_show_the_installed_devices(done: Done) -> None:
    assert done.json("doctor")["acme"] == "Acme A2 (generation 2)"
    brought = {
        package["distribution"]: [(each["kind"], each["name"]) for each in package["brings"]]
        for package in done.json("plugins")["installed"]
    }
    assert brought["attnplug-acme"] == [("device", "acme")]
    status = {row["name"]: [reason["code"] for reason in row["reasons"]] for row in done.json("backends")}
    assert status["acme_kernels"] == ["architecture"]
    assert status["torch_native"] == []
