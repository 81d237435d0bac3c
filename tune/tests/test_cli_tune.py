"""``attnplug tune`` and ``attnplug bench``, as users call them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from attnplug_tune.measure import run_job
from tuning import FACTORY, FakeClock

from attnplug.host import load_registry
from attnplug_testing.command import PLUGIN, Attnplug, Package

pytestmark = pytest.mark.usefixtures("plain_environment")
DYING = """
import os
from attnplug.torch_native.backend import TorchNativeBackend
built = []

def build(context):
    built.append(context)
    return TorchNativeBackend(context) if len(built) == 1 else os.kill(os.getpid(), 9)
"""
HERE = ("--device", "cpu", "--model", "tiny:llama")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The clock by which the command measures: toy is the faster one up to a length of 160."""
    times = {"toy": lambda point: point.length / 2, "torch_native": lambda point: 80.0, "auto": lambda point: 70.0}
    made = FakeClock(times, seconds=0.01)
    for command in ("tune", "bench"):
        monkeypatch.setattr(
            f"attnplug_tune.{command}_command.in_own_process", lambda job: run_job(job, load_registry(), made)
        )
    monkeypatch.setattr("attnplug_tune.bench_command.bandwidth", lambda device: 1e9)
    return made


@pytest.fixture
def toy(package: Package) -> None:
    package("toy", fields=f"dict(factory={FACTORY!r}, preference=1)")


def test_tuning_makes_auto_take_the_fastest_and_explain_say_so(
    attnplug: Attnplug, clock: FakeClock, toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNPLUG_CACHE_DIR", str(tmp_path / "cache"))
    assert "decode: toy (auto: preference 1" in attnplug("explain", *HERE).out
    done = attnplug("tune", *HERE, "--max-batch", "1", "--max-context", "1024", "--report", str(tmp_path / "r.html"))
    assert done.code == 0, done.err
    assert "1 × 64    toy" in done.out and "1 × 1024  torch_native" in done.out
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    (path,) = (tmp_path / "cache" / "tables").glob("*.json")
    assert str(path) in done.out
    after = attnplug("explain", *HERE).out
    assert "measured on this machine" in after and "toy" in after and "80.0" in after


def test_what_is_known_is_not_measured_again_unless_asked_for(
    attnplug: Attnplug, clock: FakeClock, toy: None, tmp_path: Path
) -> None:
    command = ("tune", *HERE, "--points", "1x64,1x128", "--tables", str(tmp_path / "t.json"))
    attnplug(*command)
    assert len(clock.ran) == 4
    again = attnplug(*command)
    assert len(clock.ran) == 4 and "2 known before" in again.out
    attnplug(*command, "--again")
    assert len(clock.ran) == 8
    printed = attnplug(*command, "--json").json
    assert printed["backends"][0] == {
        "backend": "toy", "rows": [], "left": 0, "compile_s": 0, "skipped": [], "failed": []
    }  # fmt: skip


def test_a_backend_that_cannot_be_built_is_reported_and_the_rest_is_measured(
    attnplug: Attnplug, clock: FakeClock, package: Package, tmp_path: Path
) -> None:
    """D2."""
    package("odd", fields="dict(factory='attnplug:CONTRACT_VERSION')")
    command = ("tune", *HERE, "--points", "1x64", "--tables", str(tmp_path / "t.json"))
    done = attnplug(*command)
    assert done.code == 0 and "odd: left out for decode" in done.out and "1 × 64  torch_native" in done.out
    tables = {table["backend"]: table for table in json.loads((tmp_path / "t.json").read_text())["tables"]}
    assert "rows" in tables["torch_native"] and tables["odd"]["failed"].startswith("at 1 × 64, ")


def test_what_failed_is_not_taken_until_it_is_measured_again(
    attnplug: Attnplug, clock: FakeClock, toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that fails at one point must not be chosen by its times at other points, nor by its preference."""
    monkeypatch.setenv("ATTNPLUG_CACHE_DIR", str(tmp_path))
    attnplug("tune", *HERE, "--points", "1x64")
    times = clock.times_us.pop("toy")  # so that measuring it raises
    assert "toy: left out for decode" in attnplug("tune", *HERE, "--points", "1x64,1x128").out
    printed = attnplug("explain", *HERE).out
    assert "decode: torch_native (auto: the only usable one; 1 refused)" in printed and "prefill: toy" in printed
    assert "it failed when it was measured on this machine" in printed and "at 1 × 128, KeyError: 'toy'" in printed
    assert "decode: toy (requested" in attnplug("explain", *HERE, "--attention-backend", "toy").out
    clock.times_us["toy"] = times
    attnplug("tune", *HERE, "--points", "1x64")
    assert "decode: toy or torch_native (auto: " in attnplug("explain", *HERE).out


def test_a_backend_that_ends_its_process_does_not_end_the_command(
    attnplug: Attnplug, package: Package, tmp_path: Path
) -> None:
    """D2: the whole role that it was measured for is left out. Its other role is measured in another process."""
    source = PLUGIN.format(name="odd", fields="dict(factory=__name__ + ':build')", capabilities="{}")
    package("odd", source + DYING)
    path = tmp_path / "t.json"
    done = attnplug("tune", *HERE, "--points", "1x64,1x128,1x8+8", "--backends", "odd", "--tables", str(path))
    assert done.code == 0 and "odd: 2 points measured" in done.out
    assert "odd: left out for decode" in done.out and "its process ended with signal 9" in done.out
    tables = {table["role"]: table for table in json.loads(path.read_text())["tables"]}
    assert tables["decode"]["failed"] == "at 1 × 128, its process ended with signal 9"
    assert len(tables["prefill"]["rows"]) == 1


@pytest.mark.parametrize(
    ("content", "named"),
    [("{", "JSON"), ('{"schema": 5, "device": "Other", "sm": 0, "tables": []}', "Other")],
)
def test_a_file_that_cannot_be_added_to_is_reported_before_anything_is_measured(
    content: str, named: str, attnplug: Attnplug, clock: FakeClock, tmp_path: Path
) -> None:
    (tmp_path / "t.json").write_text(content)
    done = attnplug("tune", *HERE, "--points", "1x64", "--tables", str(tmp_path / "t.json"))
    assert done.code == 1 and named in done.err and str(tmp_path / "t.json") in done.err
    assert not clock.ran and (tmp_path / "t.json").read_text() == content


def test_a_folder_that_cannot_be_written_is_reported_before_anything_is_measured(
    attnplug: Attnplug, clock: FakeClock, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    done = attnplug("tune", *HERE, "--points", "1x64", "--tables", str(tmp_path / "file" / "t.json"))
    assert done.code == 1 and str(tmp_path / "file") in done.err and not clock.ran


def test_an_interrupted_benchmark_keeps_what_there_is(
    attnplug: Attnplug, clock: FakeClock, toy: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(point: object) -> float:
        raise KeyboardInterrupt

    clock.times_us["torch_native"] = interrupted
    done = attnplug("bench", *HERE, "--points", "1x64", "--out", str(tmp_path / "r.json"))
    assert done.code == 130
    assert [row["side"] for row in json.loads((tmp_path / "r.json").read_text())["rows"]] == ["toy"]
    done = attnplug("tune", *HERE, "--points", "1x64", "--tables", str(tmp_path / "t.json"))
    assert done.code == 130 and str(tmp_path / "t.json") in done.err
    command = ("tune", *HERE, "--points", "1x64", "--backends", "torch_native", "--tables", str(tmp_path / "none.json"))
    done = attnplug(*command)
    assert done.code == 130 and "none.json" not in done.err and not (tmp_path / "none.json").exists()


def test_a_tuning_that_is_terminated_keeps_the_finished_points(
    attnplug: Attnplug, clock: FakeClock, toy: None, tmp_path: Path
) -> None:
    def ended(point: object) -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        return 1.0

    clock.times_us["torch_native"] = ended
    done = attnplug("tune", *HERE, "--points", "1x64", "--tables", str(tmp_path / "t.json"))
    assert done.code == 128 + signal.SIGTERM
    assert [table["backend"] for table in json.loads((tmp_path / "t.json").read_text())["tables"]] == ["toy"]


def test_bench_writes_results_that_compare(attnplug: Attnplug, clock: FakeClock, toy: None, tmp_path: Path) -> None:
    old, new, plot = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "plot.svg"
    command = ("bench", "--device", "cpu", "--shapes", "gqa:4/2x16", "--points", "1x64", "--backends", "toy,auto")
    first = attnplug(*command, "--out", str(old), "--plot", str(plot))
    assert first.code == 0, first.err
    printed = json.loads(old.read_text())
    assert {"device", "driver", "versions", "commit", "bandwidth_gb_per_s", "rows"} <= set(printed)
    assert [row["side"] for row in printed["rows"]] == ["toy", "auto"] and "xmlns" in plot.read_text()
    clock.times_us = {**clock.times_us, "toy": lambda point: 50.0}
    page = tmp_path / "plot.html"
    attnplug(*command, "--out", str(new), "--plot", str(page))
    assert page.read_text().startswith("<!doctype html>") and "toy" in page.read_text()
    assert attnplug("bench", "--compare", str(old), str(old)).code == 0
    compared = attnplug("bench", "--compare", str(old), str(new))
    assert compared.code == 1 and compared.out.startswith("slower: toy, decode 1 × 64")
    assert attnplug("bench", "--compare", str(new), str(old)).code == 0


def test_a_plot_without_its_libraries_is_one_message_before_anything_is_measured(
    attnplug: Attnplug, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring itself needs none of them."""
    monkeypatch.setattr("importlib.util.find_spec", {"altair": None}.get)
    for command, option in (("tune", "--report"), ("bench", "--plot")):
        done = attnplug(command, *HERE, "--points", "1x64", option, str(tmp_path / "plot"))
        assert done.code == 2 and all(text in done.err for text in (option, "altair", "pip install altair"))
    assert not clock.ran


WRONG = {
    ("tune",): "one of --model and --shapes",
    ("tune", *HERE, "--shapes", "mla:16"): "one of --model and --shapes",
    ("tune", *HERE, "--budget", "0"): "--budget 0",
    ("tune", *HERE, "--backends", "none"): "none",
    ("tune", *HERE, "--backends", "torch_native, auto"): "auto",
    ("tune", *HERE, "--kv-dtype", "fp8_ds_mla", "--backends", "torch_native"): "--kv-dtype",
    ("tune", *HERE, "--points", "99999999999x64"): "1048576",
    ("tune", *HERE, "--max-batch", "99999999999"): "1048576",
    ("tune", *HERE, "--report", "/nowhere/r.html"): "/nowhere",
    ("bench", "--compare", "old", "new", "--max-batch", "3"): "--max-batch",
    ("bench", *HERE, "--out", "/nowhere/r.json"): "/nowhere",
    ("bench", *HERE, "--plot", "/"): "Is a directory",
    ("bench", *HERE, "--plot", "plot.png"): "--plot plot.png",
    ("tune", *HERE, "--report", "report.svg"): "--report report.svg",
    ("bench", *HERE, "--page-size", "0"): "--page-size 0",
    ("tune", *HERE, "--max-batch", "none"): "'none'",
    ("tune", "--device", "cpu", "--shapes", "mla"): "'mla'",
    ("tune", "--device", "cpu", "--shapes", "gqa:4/3x16"): "'gqa:4/3x16'",
    ("tune", "--device", "cpu", "--shapes", "gqa:4/2x16w0"): "'gqa:4/2x16w0'",
    ("tune", "--device", "cpu", "--model", "tiny:mamba2"): "tiny:mamba2",
    ("tune", "--device", "cpu", "--model", "tiny:deepseek_v4"): "tiny:deepseek_v4",
    ("tune", *HERE, "--host", "nobody"): "nobody",
    ("tune", "--device", "cpu", "--shapes", "mla:4", "--host", "vllm", "--points", "1x32+16"): "vllm",
    ("tune", "--device", "cpu", "--model", "tiny:deepseek_v32", "--host", "vllm"): "sparse",
    ("tune", *HERE, "--points", "1x0+8&2x8"): "beside 2 × 8",
    ("tune", *HERE, "--mla-extend", "none"): "--mla-extend 'none'",
    ("tune", *HERE, "--mla-extend", "absorbed"): "no MLA layers",
    ("bench", "--device", "cpu", "--shapes", "mla:4", "--host", "vllm", "--mla-extend", "absorbed"): "--mla-extend",
    ("bench", *HERE, "--against", "them"): "--against 'them'",
    ("bench", "--compare", "no.json", "none.json"): "no.json",
    ("bench", "--compare", "a.json", "b.json", "--out", "c.json"): "--out",
    ("bench", "--compare", "a", "b", "--tensor-parallel", "2"): "--tensor-parallel",
}


@pytest.mark.parametrize("arguments", WRONG, ids=lambda arguments: " ".join(arguments))
def test_a_mistake_is_one_message(arguments: tuple[str, ...], attnplug: Attnplug) -> None:
    done = attnplug(*arguments)
    assert done.code == 2 and WRONG[arguments] in done.err and done.out == ""


EARLY = (
    *("--shapes=foo", "--points=3", "--page-size=0", "--device=tpu", "--kv-dtype=x", "--plot=x.png"),
    *("--max-batch=9999999", "--tensor-parallel=0", "--against=x", "--out=/nowhere/x", "--backend-option=x"),
)


def test_wrong_options_are_rejected_without_torch_and_altair() -> None:
    """Importing torch takes seconds."""
    code = """
import sys
from attnplug.cli.app import parse, run
from attnplug.host import AttnplugError

parse(["tune", "--shapes", "mla:1"])
for wrong in sys.argv[1:]:
    name, _, value = wrong.partition("=")
    try:
        run(parse(["bench", "--shapes=mla:1", wrong]))
    except AttnplugError as error:
        told = error.format(lambda key: "--" + key.replace("_", "-"))
        assert value in told and (name in told or name == "--out"), told
    else:
        sys.exit(f"{wrong} is accepted")
sys.exit("torch" in sys.modules or "altair" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code, *EARLY], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
