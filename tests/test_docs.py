"""Run the examples of the documentation unchanged."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import DType, Problem, Role
from attnplug.declare.version import CONTRACT_VERSION
from attnplug.host import (
    TINY_CONFIGS,
    ModelAttention,
    Registry,
    WorkspaceOwner,
    installed_format,
    load_model,
    load_registry,
)
from attnplug.registry.loading import find_entry_points
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug_testing.environments import Environment
from attnplug_testing.plugins import entry_point
from documentation import GENERATED, GUIDE, README, ROOT, blocks, files

WRAPPING = (ROOT / "docs" / "guide" / "wrapping.md").read_text()
HOSTING = (ROOT / "docs" / "hosting.md").read_text()
TOUR = (ROOT / "docs" / "tour.md").read_text()
ENGINE = (ROOT / "engine" / "README.md").read_text()
MYPY_CACHE = ROOT / ".mypy_cache"
"""Cache that ``make types`` leaves behind. It covers torch, which is almost all of the work."""


def mypy_config(*checked: str) -> str:
    """Strict, and like the workspace's for all that is not checked: a cache holds for the options it was made with."""
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    excluded = ", ".join(ours["untyped_calls_exclude"])
    libraries = [
        f"[mypy-{','.join(each['module'])}]\n"
        f"ignore_missing_imports = {each.get('ignore_missing_imports', False)}\n"
        f"follow_imports = {each['follow_imports']}\n"
        for each in ours["overrides"]
        if "follow_imports" in each
    ]
    return (
        f"[mypy]\nstrict = true\nuntyped_calls_exclude = {excluded}\n{''.join(libraries)}"
        f"[mypy-{','.join(checked)}]\nuntyped_calls_exclude =\n"
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guide's plugin: the files that its first screen gives, and no other."""
    folder = tmp_path_factory.mktemp("my-attention")
    for name, text in files(GUIDE.split("Install it")[0]).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(scope="module")
def installed(
    project: Path, build_wheels: Callable[..., Path], fresh_environment: Callable[..., Environment]
) -> Environment:
    return fresh_environment(build_wheels(project), "attnplug-sparse", "my-attention")


def test_the_guides_plugin_is_selectable_once_pip_has_installed_it(installed: Environment) -> None:
    """D1"""
    done = installed.attnplug("backends", ATTNPLUG_STRICT="1")
    assert done.returncode == 0, done.stderr
    assert "my-attention 0.1.0" in done.stdout


@pytest.mark.long
def test_the_guides_backend_is_right(installed: Environment) -> None:
    done = installed.attnplug("conform", "my_attention", "--device", "cpu", "--budget", "0.2", ATTNPLUG_STRICT="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "my_attention conforms: " in done.stdout


@pytest.mark.long
def test_the_page_on_conformance_leads_from_nothing_to_a_report(installed: Environment) -> None:
    """Every command of its first block, as it stands there; pip has no network here."""
    page = (ROOT / "docs" / "conformance.md").read_text()
    commands = [line.removeprefix("$ ").split() for line in blocks(page, "console")[0].splitlines()]
    assert [command[0] for command in commands] == ["pip", "attnplug", "pip", "attnplug", "attnplug"]
    for program, *arguments in commands:
        if program == "pip":
            offline = ("--no-index", "--no-deps", "--no-build-isolation", "--find-links", str(installed.wheels))
            installed.run_pip(arguments[0], *offline, *arguments[1:])
        else:
            briefly = ("--budget", "1") if arguments[0] == "conform" else ()
            done = installed.attnplug(*arguments, *briefly)
            assert done.returncode == 0, done.stdout + done.stderr
    assert "my_backend conforms" in (installed.folder / "report.html").read_text()


def test_the_guides_plugin_passes_strict_type_checks(project: Path, installed: Environment, tmp_path: Path) -> None:
    """Types come from attnplug's wheel, and the built object must be a backend. The guide's wrapper and the hosts' code
    are checked as well."""
    use, wrapper, host = (tmp_path / f"{name}.py" for name in ("use", "wrapper", "host"))
    wrapper.write_text(blocks(WRAPPING, "python")[0])
    host.write_text(blocks(HOSTING, "python")[0])
    use.write_text(
        "from attnplug import AttentionBackend, BackendContext\n"
        "from my_attention.backend import MyBackend\n"
        "from wrapper import ByWindow\n"
        "def build(context: BackendContext) -> AttentionBackend:\n"
        "    return ByWindow(context.name, MyBackend(context), MyBackend(context))\n"
    )
    config, cache = tmp_path / "mypy.ini", tmp_path / "cache"
    config.write_text(mypy_config("my_attention.*", "use", "wrapper", "host"))
    if MYPY_CACHE.exists():
        shutil.copytree(MYPY_CACHE, cache)
    mypy = [installed.python, "-m", "mypy", "--config-file", config, "--cache-dir", cache]
    # Not by the environment's own run, which is limited in time: a first run reads all of torch.
    checked = ("my_attention", use, wrapper, host)
    done = subprocess.run([*mypy, *checked], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pages_speak_the_contract_of_this_version() -> None:
    """D4"""
    assert set(re.findall(r'contract="(.+?)"', README)) == {CONTRACT_VERSION}
    assert f"\n### Contract {CONTRACT_VERSION}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_readmes_plugin_is_the_guides():
    assert blocks(README, "python") == blocks(GUIDE, "python")[:1]


def test_the_readmes_plugin_has_ten_lines():
    assert len([line for line in blocks(README, "python")[0].splitlines() if line.strip()]) <= 10


@pytest.mark.parametrize(("block", "printed"), [(0, r"\[(\d+, ){7}\d+\]\n"), (1, "torch_native 64\n")])
def test_the_tours_python_runs(capsys, block, printed):
    exec(compile(blocks(TOUR, "python")[block], "docs/tour.md", "exec"), {})
    assert re.fullmatch(printed, capsys.readouterr().out)


@pytest.fixture(scope="module")
def hosted() -> dict[str, Any]:
    """Names defined by the code of the hosts' page."""
    (block,) = blocks(HOSTING, "python")
    names: dict[str, Any] = {}
    exec(compile(block, "docs/hosting.md", "exec"), names)
    return names


def attended(q: Tensor, rows: Tensor, scale: float) -> Tensor:
    """One request in float64: q ``[queries, heads, dim]`` over keys and values ``[2, rows, kv_heads, dim]``, causal."""
    keys, values = rows.double().repeat_interleave(q.shape[1] // rows.shape[2], 2)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    last = torch.arange(len(q)) + keys.shape[0] - len(q)
    scores = scores.where(torch.arange(keys.shape[0]) <= last[:, None], -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def test_the_hosts_page_attends_as_float64_does(hosted: dict[str, Any]) -> None:
    """The example has its own page table, lengths and output memory; padding gives zeros."""
    cache, q, out, scale = hosted["cache"], hosted["q"], hosted["out"], hosted["layer"].scale
    first = torch.cat([cache[:, 4], cache[:, 7, :4]], 1)
    wanted = torch.cat([attended(q[:3], first, scale), attended(q[3:12], cache[:, 9, :9], scale)])
    torch.testing.assert_close(out[:12].double(), wanted, rtol=1e-5, atol=1e-5)
    assert not out[12:].any()


def test_the_hosts_page_writes_new_rows_where_the_host_says(hosted: dict[str, Any]) -> None:
    cache = hosted["cache"]
    for part, rows in enumerate((hosted["k"], hosted["v"])):
        assert torch.equal(torch.cat([cache[part, 7, 1:4], cache[part, 9, :9]]), rows[:12])


def test_the_hosts_page_settles_every_misfit() -> None:
    assert re.findall(r"^\| (\d+) \|", HOSTING, re.MULTILINE) == [str(number) for number in range(1, 18)]


def test_the_guides_wrapper_runs(hosted: dict[str, Any]) -> None:
    """A9: all that it defines is the route."""
    names: dict[str, Any] = {}
    exec(compile(blocks(WRAPPING, "python")[0], "docs/guide/wrapping.md", "exec"), names)
    spec = hosted["load_registry"]().get("torch_native").spec
    one, other = (TorchNativeBackend(hosted["context"].for_backend(n, spec.capabilities)) for n in ("one", "other"))
    attention = ModelAttention(names["ByWindow"]("by_window", one, other), hosted["context"].pools)
    batch = hosted["ForwardBatch"](hosted["geometry"])
    plan = attention.plan(batch)
    assert plan is not None and plan.attention.planner_names() == ["one", "other"]
    out = attention.attend(hosted["q"], hosted["k"], hosted["v"], hosted["layer"], batch)
    assert torch.equal(out, hosted["out"])


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Registry]:
    """Return a function that writes a page's files, or its first block as ``acme.py``, and loads them as a plugin."""

    def load(page: str) -> Registry:
        text = (ROOT / "docs" / f"{page}.md").read_text()
        for name, content in (files(text.split("Install it")[0]) or {"acme.py": blocks(text, "python")[0]}).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(content)
        (tmp_path / "tables").mkdir()
        monkeypatch.syspath_prepend(tmp_path)
        for name in ("acme", "my_int4", "my_int4.plugin", "my_int4.codec"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        target = "my_int4.plugin" if (tmp_path / "my_int4").exists() else "acme"
        code = f"import sys, {target}; sys.exit('torch' in sys.modules)"  # `attnplug backends` loads plugins
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
        point = entry_point("acme", target, "acme", "1.0")
        points, broken = find_entry_points()
        monkeypatch.setattr("attnplug.registry.registry.find_entry_points", lambda: ([*points, point], broken))
        installed_format.cache_clear()
        registry = load_registry()
        assert [fault for fault in registry.broken if fault.source.distribution == "acme"] == []
        return registry

    return load


def test_the_format_of_the_page_conforms_and_the_engine_serves_it(extension: Callable[[str], Registry]) -> None:
    """E2"""
    from attnplug_conformance.format_checks import check_format
    from attnplug_engine import Engine, SamplingParams

    page = (ROOT / "docs" / "writing-a-kv-format.md").read_text()
    assert sum(len(text.splitlines()) for text in files(page.split("Install it")[0]).values()) <= 60
    format = extension("writing-a-kv-format").kv_format("int4_groups")
    assert [result.message for result in check_format(format, torch.device("cpu")) if result.message] == []
    assert format.row_nbytes(32) == 18
    config = dict(TINY_CONFIGS["llama"], hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TINY_CONFIGS, "wide", config)
        engine = Engine("tiny:wide", device="cpu", kv_dtype="int4_groups", ignore_eos=True)
        assert len(engine.generate(["Hello"], SamplingParams(max_tokens=4))[0].token_ids) == 4
    installed_format.cache_clear()


def test_the_page_on_workspace_kinds_declares_and_requests_one(extension: Callable[[str], Registry]) -> None:
    """A2"""
    kind = extension("writing-a-workspace-kind").workspace_kinds["acme-counters"].value
    (_, backend), owner = (
        blocks((ROOT / "docs" / "writing-a-workspace-kind.md").read_text(), "python"),
        WorkspaceOwner(),
    )
    names: dict[str, Any] = {}
    exec(compile(backend, "docs/writing-a-workspace-kind.md", "exec"), names)
    context = SimpleNamespace(workspace=owner, device=torch.device("cpu"), name="acme")
    assert names["reserve"](context).kind is names["COUNTERS"] and kind.zeroed
    assert not names["reserve"](context).buffer.any() and len(owner.report()) == 1


def test_the_page_on_rankings_ships_a_folder(extension: Callable[[str], Registry], tmp_path: Path) -> None:
    assert tmp_path / "tables" in [folder.value for folder in extension("writing-a-ranking").table_folders]


def test_the_page_on_tiny_models_adds_one(extension: Callable[[str], Registry]) -> None:
    (layer, _) = load_model("tiny:acme_gqa", extension("writing-a-tiny-model")).layers
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (8, 1, 8)


def test_the_engines_python_runs():
    (block,) = blocks(ENGINE, "python")
    exec(compile(block, "engine/README.md", "exec"), names := {})
    assert names["loaded"].spec.describe()


def test_the_engines_readme_has_every_architecture():
    from attnplug_engine.models.architectures import ARCHITECTURES

    assert set(ARCHITECTURES) <= set(re.findall(r"^\| `(\w+)`", ENGINE, re.MULTILINE))
    assert set(ARCHITECTURES) <= set(re.findall(r"`(\w+)`", README.split("## Models")[1].split("## Results")[0]))


def test_the_page_on_invariance_requests_levels() -> None:
    (block,) = blocks((ROOT / "docs" / "invariance.md").read_text(), "python")
    names: dict[str, Any] = {"Problem": Problem, "model": None}
    exec(compile(block, "docs/invariance.md", "exec"), names)
    assert names["problem"].invariant


def test_the_page_on_architectures_adds_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last block compares tokens with those of transformers."""
    from attnplug_engine.models.architectures import ARCHITECTURES

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(ARCHITECTURES, "arcee", None)  # so that it is removed afterwards
    names: dict[str, Any] = {}
    for block in blocks((ROOT / "docs" / "adding-an-architecture.md").read_text(), "python"):
        exec(compile(block, "docs/adding-an-architecture.md", "exec"), names)
    assert len(names["completion"].token_ids) == 8


def test_the_guides_list_of_kernels_compiles_each_once(tmp_path: Path) -> None:
    """E1"""
    (block,) = blocks((ROOT / "docs" / "guide" / "compiling.md").read_text(), "python")
    names: dict[str, Any] = {}
    exec(compile(block, "docs/guide/compiling.md", "exec"), names)
    names["CACHE"] = tmp_path / "kernels"
    (build,) = names["kernel_builds"](Problem(dtype=DType.BFLOAT16), frozenset({Role.DECODE}), None)
    assert not build.is_cached()
    build.build()
    assert build.is_cached()


RUN = {
    *("README.md", "docs/writing-a-backend.md", "docs/guide/compiling.md", "docs/guide/wrapping.md"),
    *("docs/hosting.md", "docs/tour.md", "docs/conformance.md", "docs/devices.md", "docs/writing-a-kv-format.md"),
    *("docs/writing-a-ranking.md", "docs/writing-a-tiny-model.md", "docs/writing-a-workspace-kind.md"),
    *("docs/getting-started/engine.md", "docs/adding-an-architecture.md", "docs/invariance.md"),
}
"""Pages whose code is run here, in tests/test_devices.py or in conformance/tests/test_page.py."""


def test_code_of_every_page_is_run() -> None:
    """Code from files is run as files, by tests/test_examples.py."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    with_code = {
        page.relative_to(ROOT).as_posix() for page in pages if "```python" in GENERATED.sub("", page.read_text())
    }
    assert with_code == RUN


def test_the_page_for_engines_prints_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """D3"""
    (block,) = blocks((ROOT / "docs" / "getting-started" / "engine.md").read_text(), "python")
    exec(compile(block, "docs/getting-started/engine.md", "exec"), {})
    assert "device cpu is not supported" in capsys.readouterr().out
