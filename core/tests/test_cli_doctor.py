"""``attnplug doctor``: the report always appears and contains every fault of the environment."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from attnplug.cli import doctor
from attnplug.cli.app import main
from attnplug.declare.version import CONTRACT_VERSION

Report = Callable[[], dict[str, dict[str, str]]]
Library = Callable[[str, str], None]
SECTIONS = [
    "environment",
    "torch",
    "devices",
    "kernel libraries",
    "plugins",
    "measured tables",
    "variables",
    "cache folders",
]
LIBRARIES = ("fla", "flash_attn", "flash_mla", "flashinfer", "tokenspeed_mla", "triton")
NO_PLUGINS: dict[str, Any] = {"findings": {}, "factories": {}, "devices": {}, "tables": {}}
NO_TORCH: dict[str, Any] = {"torch": {}, "failures": {}}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATTNPLUG_PLUGINS", "ATTNPLUG_STRICT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer sets its own; this puts it back


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs doctor in this process, insists on exit code 0, and gives its standard output."""

    def doctor_command(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["attnplug", "doctor", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main()
        assert exit.value.code in (0, None)
        return capsys.readouterr().out

    return doctor_command


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library is probed unless a test installs it: importing the real ones takes seconds."""
    monkeypatch.setattr(doctor, "_required_libraries", dict)


@pytest.fixture
def report(run: Callable[..., str], stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> Report:
    """The report as JSON, without the probes that import torch: they take seconds and have separate tests."""
    monkeypatch.setattr(doctor, "_probe_torch", lambda *_: NO_TORCH)

    def as_json() -> dict[str, dict[str, str]]:
        found: Any = json.loads(run("--json"))
        assert list(found) == SECTIONS
        return found

    return as_json


@pytest.fixture
def library(tmp_path: Path, stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Puts a fake kernel library on the path of this process and of those it starts. Plugins are not listed."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "_probe_plugins", lambda probes: NO_PLUGINS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    monkeypatch.setattr(doctor, "_required_libraries", lambda: {name: {"fast-dist"} for name in LIBRARIES})
    shown = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: shown(name) if name in written else None)
    written = set()

    def write(name: str, source: str) -> None:
        written.add(name)
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "top_level.txt").write_text(f"{name}\n")

    return write


def libraries(report: Report) -> dict[str, str]:
    """Kernel libraries of the report. All are listed, even if probing one of them fails."""
    found = report()["kernel libraries"]
    assert list(found) == list(LIBRARIES)
    return found


# ---- the report ----


@pytest.mark.usefixtures("stand_ins")
def test_the_report_names_every_section(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_probe_torch", lambda *_: NO_TORCH)
    text = run()
    for section in SECTIONS:
        assert section in text.splitlines()
    for name in ("python", "attnplug", f"contract {CONTRACT_VERSION}", "torch_native"):
        assert name in text


@pytest.mark.usefixtures("stand_ins")
def test_torch_is_reported_with_its_version(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_probe_plugins", lambda probes: NO_PLUGINS)
    found = json.loads(run("--json"))["torch"]
    assert found["version"]
    assert found["CUDA available"] in ("True", "False")


@pytest.mark.long
def test_a_torch_that_fails_to_import_is_reported(run: Callable[..., str], library: Library) -> None:
    library("torch", "raise RuntimeError('libcudart.so.13 is missing')")
    assert "libcudart.so.13 is missing" in json.loads(run("--json"))["torch"]["import failed"]


def test_a_library_that_is_absent_is_not_installed(report: Report, library: Library) -> None:
    assert libraries(report)["tokenspeed_mla"] == "not installed"


def test_a_library_that_imports_is_no_failure(report: Report, library: Library) -> None:
    library("flashinfer", "__version__ = '1'")
    assert "failed" not in libraries(report)["flashinfer"]


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("raise AssertionError('needs an H100')", "AssertionError: needs an H100"),
        ("raise RuntimeError('driver too old')", "RuntimeError: driver too old"),
        ("import no_such_dependency", "no_such_dependency"),
        ("import os; os.abort()", "signal 6"),
        ("import os; os._exit(7)", "7"),
        ("raise SystemExit(3)", "3"),
        ("def (", "SyntaxError"),
        ("raise ValueError('first line\\nsecond line')", "first line"),
        ("import atexit, sys\natexit.register(lambda: print('bye', file=sys.stderr))\nraise KeyError('real')", "real"),
    ],
)
@pytest.mark.sample(4)
def test_a_library_that_fails_to_import_is_reported_with_its_error(
    report: Report, library: Library, source: str, needs: str
) -> None:
    library("flashinfer", source)
    found = libraries(report)
    assert "import failed" in found["flashinfer"]
    assert needs in found["flashinfer"]
    assert found["flash_mla"] == "not installed"


@pytest.mark.parametrize("source", ["raise SystemExit(0)", "import os; os._exit(0)"])
@pytest.mark.sample(1)
def test_a_library_that_ends_the_process_quietly_has_not_been_imported(
    report: Report, library: Library, source: str
) -> None:
    library("flashinfer", source)
    assert "import failed" in libraries(report)["flashinfer"]


@pytest.mark.parametrize(
    "source",
    [
        "print('loading kernels')",
        "import sys; sys.stdout.buffer.write(bytes(range(256)))",
        "import os; os.write(2, b'\\xff\\xfe garbage'); os.write(1, b'\\xff' * 100000)",
        "import sys; sys.stdout.buffer.write(b'\\xff'); sys.stdout.flush(); raise RuntimeError('bad')",
    ],
)
@pytest.mark.sample(1)
def test_a_library_that_prints_garbage_does_not_spoil_the_report(report: Report, library: Library, source: str) -> None:
    library("flash_attn", source)
    assert ("import failed" in libraries(report)["flash_attn"]) == ("raise" in source)


def test_a_library_that_hangs_is_reported(report: Report, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TIMEOUT_SECONDS", 0.5)
    library("fla", "import time; time.sleep(60)")
    assert "no answer within 0.5 s" in libraries(report)["fla"]


@pytest.mark.long
def test_a_library_that_no_usable_backend_requires_is_not_imported(
    report: Report, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing FlashInfer takes over 3 s, which a machine without a GPU can save."""
    library("flashinfer", "raise RuntimeError('imported')")
    library("triton", "raise RuntimeError('imported')")
    needed = {"flashinfer": {"fast-dist"}, "triton": {"fast-dist", "other-dist"}}
    monkeypatch.setattr(doctor, "_required_libraries", lambda: needed)
    monkeypatch.setattr(doctor, "_probe_plugins", lambda probes: {**NO_PLUGINS, "usable": ["other-dist"]})
    found = report()["kernel libraries"]
    assert "import failed" in found["triton"]
    assert found["flashinfer"].startswith("1.0; not imported")


def test_torch_is_imported_once_for_its_section_and_all_factories(
    run: Callable[..., str], library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library("torch", "open(__file__ + '.imports', 'a').write('x'); raise ImportError('a stand-in')")
    found = {**NO_PLUGINS, "findings": {"a": "", "b": ""}, "factories": {"a": "json:dumps", "b": "json:nothing"}}
    monkeypatch.setattr(doctor, "_probe_plugins", lambda probes: found)
    report = json.loads(run("--json"))
    assert "a stand-in" in report["torch"]["import failed"]
    assert report["plugins"]["a"] == "" and "json:nothing" in report["plugins"]["b"]
    assert (tmp_path / "torch.py.imports").read_text() == "x"


def test_damaged_metadata_costs_one_library_at_most(report: Report, library: Library, tmp_path: Path) -> None:
    """An interrupted pip leaves a .dist-info without METADATA."""
    library("flashinfer", "")
    library("triton", "")
    (tmp_path / "flashinfer-1.0.dist-info" / "METADATA").unlink()
    found = libraries(report)
    assert (found["flashinfer"], found["triton"]) == ("not installed", "1.0")


def test_libraries_are_those_that_installed_plugins_require(plugin: Callable[[str, str], None], tmp_path: Path) -> None:
    """D1: no list of libraries; what core itself requires, our own packages and test requirements are left out."""
    plugin("fast", "")
    metadata = tmp_path / "fast_dist-1.2.3.dist-info" / "METADATA"
    lines = (
        "attnplug<1",
        "torch>=2",
        "fast-kernels>=3",
        'slow-kernels; extra == "all"',
        'pytest; extra == "test"',
        "?",
    )
    metadata.write_text(metadata.read_text() + "".join(f"Requires-Dist: {line}\n" for line in lines))
    found = doctor._required_libraries()
    assert {"fast-kernels", "slow-kernels"} <= set(found)
    assert not {"attnplug", "torch", "pytest"} & set(found)


@pytest.mark.long
def test_a_probe_that_fails_costs_its_own_section_only(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> dict[str, str]:
        raise OSError("no home")

    monkeypatch.setattr(doctor, "cache_folders", failing)
    found = report()
    assert found["cache folders"] == {"probe failed": "OSError: no home"}
    assert found["plugins"]


@pytest.mark.long
def test_variables_that_matter_are_shown(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_PLUGINS", "é✨")
    assert report()["variables"]["ATTNPLUG_PLUGINS"] == "'é✨'"


def test_cache_folders_are_shown_with_their_state(
    report: Report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "absent"))
    monkeypatch.setattr(doctor, "_FILES_COUNTED", 3)
    monkeypatch.setattr(doctor, "_probe_plugins", lambda probes: NO_PLUGINS)
    (tmp_path / "kernel").mkdir()
    for number in range(2):
        (tmp_path / "kernel" / f"{number}.cubin").write_bytes(bytes(1 << 20))
    found = report()["cache folders"]
    assert found["triton"] == f"{tmp_path} (writable, 2 files, 2.0 MiB)"
    assert "not there" in found["hugging face"] and "attnplug" in found and "flashinfer" in found
    for number in range(9):
        (tmp_path / f"{number}.cubin").touch()
    assert "at least 3 files" in report()["cache folders"]["triton"]


# ---- probes ----


@pytest.mark.usefixtures("stand_ins")
def test_sections_are_found_out_at_the_same_time_and_given_in_order(
    run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = threading.Barrier(3)

    def meet(*_: object) -> dict[str, Any]:
        meeting.wait(timeout=60)  # run one after the other, they would time out
        return {**NO_PLUGINS, **NO_TORCH}

    for name in ("_probe_torch", "_kernel_libraries", "_probe_plugins"):
        monkeypatch.setattr(doctor, name, meet)
    found = json.loads(run("--json"))
    assert list(found) == SECTIONS
    assert found["torch"] == {} and found["kernel libraries"] == {**NO_PLUGINS, **NO_TORCH}
    assert found["plugins"] == found["measured tables"] == {}


def test_a_terminal_shows_the_running_probes(capsys: pytest.CaptureFixture[str]) -> None:
    """The progress line is replaced by the next part of the report."""
    terminal = io.StringIO()
    probes = doctor.Probes(terminal)
    assert probes.run("flashinfer", "answer = {'a': 1}") == {"a": 1}
    probes.print("report")
    assert terminal.getvalue().split("\r\x1b[K") == ["", "probing flashinfer … 0/1", "", "", ""]
    assert capsys.readouterr().out == "report\n"


@pytest.mark.parametrize(("terminal", "arguments", "count"), [(True, [], 1), (True, ["--json"], 0), (False, [], 0)])
def test_progress_is_for_people_at_a_terminal(
    run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, terminal: bool, arguments: list[str], count: int
) -> None:
    shown: list[object] = []

    class Watched(doctor.Probes):
        def __init__(self, terminal: Any) -> None:
            shown.extend([] if terminal is None else [terminal])
            super().__init__(None)

    monkeypatch.setattr(doctor, "_probe_torch", lambda *_: NO_TORCH)
    monkeypatch.setattr(doctor, "_kernel_libraries", lambda *_: {})
    monkeypatch.setattr(doctor, "_probe_plugins", lambda probes: NO_PLUGINS)
    monkeypatch.setattr(doctor, "Probes", Watched)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    run(*arguments)
    assert len(shown) == count


def test_stop_kills_running_probes(tmp_path: Path) -> None:
    """An interrupt must not wait for a library that hangs."""
    probes, started = doctor.Probes(None), tmp_path / "started"
    code = f"open({str(started)!r}, 'w'); import time; time.sleep(1000)"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(probes.run, "flashinfer", code)
        while not started.exists():
            time.sleep(0.01)
        probes.stop()
        assert "killed by signal" in asked.result()["failed"]
    assert probes.run("triton", "answer = {}") == {"failed": "interrupted"}


def test_a_report_that_cannot_be_written_waits_for_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interrupt, or if the reader closed the pipe, running probes are killed and the command ends."""
    stopped = []

    class Watched(doctor.Probes):
        def print(self, text: str) -> None:
            raise BrokenPipeError

        def stop(self) -> None:
            stopped.append(True)

    for name in ("_probe_torch", "_kernel_libraries", "_probe_plugins"):
        monkeypatch.setattr(doctor, name, lambda *_: {**NO_PLUGINS, **NO_TORCH})
    monkeypatch.setattr(doctor, "Probes", Watched)
    with pytest.raises(BrokenPipeError):
        doctor.run(Namespace(json=False))
    assert stopped == [True]


# ---- plugins ----


def test_a_usable_backend_whose_factory_cannot_be_imported_is_reported(
    report: Report, plugin: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2: metadata alone does not show such a fault."""
    plugin("fast", PLUGIN.format(name="fast"))

    def probe(probes: doctor.Probes, factories: Callable[[], dict[str, str]]) -> dict[str, Any]:
        return {**NO_TORCH, "failures": {"fast": f"not {factories()['fast']}"}}

    monkeypatch.setattr(doctor, "_probe_torch", probe)
    text = "fast-dist 1.2.3: usable here, but its factory attnplug:nothing cannot be imported: not attnplug:nothing"
    assert report()["plugins"]["fast"] == text


@pytest.mark.long
def test_a_factory_that_takes_the_process_down_costs_its_own_backend_only(
    run: Callable[..., str], library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2"""
    library("torch", "raise ImportError('a stand-in')")
    (tmp_path / "crashing_factory.py").write_text("import os; os.abort()")
    factories = {"good": "json:dumps", "less": "json:nothing", "crash": "crashing_factory:x"}
    found = {**NO_PLUGINS, "findings": dict.fromkeys(factories, ""), "factories": factories}
    monkeypatch.setattr(doctor, "_probe_plugins", lambda probes: found)
    report = json.loads(run("--json"))
    assert "a stand-in" in report["torch"]["import failed"]
    assert report["plugins"]["good"] == ""
    assert "nothing" in report["plugins"]["less"] and "signal 6" in report["plugins"]["crash"]


PLUGIN = """
from attnplug import BackendSpec, Capabilities, hookimpl

@hookimpl
def attnplug_backends():
    can = Capabilities(kinds=["mha"], devices=["cpu"], dtypes=["float32"])
    return [BackendSpec("{name}", "a backend of a test", contract="1.0", factory="attnplug:nothing", capabilities=can)]
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Installs a plugin: real metadata in a folder on the path. Kernel libraries are not looked for."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "_kernel_libraries", lambda *_: {})
    modules: list[str] = []

    def install(name: str, source: str) -> None:
        module = f"doctor_plugin_{name}"
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{name}_dist-1.2.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: 1.2.3\n")
        (info / "entry_points.txt").write_text(f"[attnplug.plugins]\n{name} = {module}\n")

    yield install
    for module in modules:
        sys.modules.pop(module, None)


@pytest.mark.parametrize("strict", [None, "1"])
def test_a_broken_plugin_is_reported_and_no_failure_even_in_strict_mode(
    report: Report, plugin: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, strict: str | None
) -> None:
    """D2"""
    plugin("odd", "raise RuntimeError('no driver')")
    if strict:
        monkeypatch.setenv("ATTNPLUG_STRICT", strict)
    found = report()["plugins"]
    for text in ("odd-dist 1.2.3", "broken", "no driver"):
        assert text in found["odd"]
    assert "usable" in found["torch_native"]


def test_a_blocked_plugin_is_reported(
    report: Report, plugin: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin("extra", "")
    monkeypatch.setenv("ATTNPLUG_PLUGINS", "")
    assert "blocked" in report()["plugins"]["extra"]


def test_a_name_that_matches_nothing_hides_no_backend_of_that_name(
    report: Report, plugin: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is dropped silently: an entry point and its backend may have different names."""
    plugin("entry", PLUGIN.format(name="fast"))
    monkeypatch.setenv("ATTNPLUG_PLUGINS", "entry-dist,fast")
    found = report()["plugins"]
    text = json.dumps(found)
    assert "usable here" in found["fast"]
    assert "no installed plugin matches" in text


def test_a_plugin_that_takes_the_process_down_does_not_take_the_report(
    plugin: Callable[[str, str], None], tmp_path: Path
) -> None:
    """It always prints and never fails: a plugin may import a kernel library although it must not."""
    plugin("crash", "import os; os.abort()")
    for name in ("torch", "triton", "flashinfer"):  # their imports take seconds
        (tmp_path / f"{name}.py").write_text("raise ImportError('a stand-in')")
    done = subprocess.run(
        [sys.executable, "-m", "attnplug", "doctor"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    for section in SECTIONS:
        assert section in done.stdout
