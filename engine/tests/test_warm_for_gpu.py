"""``attnplug warm --gpu``: kernels for a GPU that a file describes, on a machine without one (E1)."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attnplug_engine.cli import gpu_file, warm_for_gpu
from attnplug_engine.cli.gpu_file import read_gpu
from attnplug_engine.execution import compile_ahead
from attnplug_engine.execution.compile_ahead import GPU, AheadReport, AheadRequest, fill_cache
from attnplug_engine.options import EngineOptions

PROPERTIES = {"name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132}
H200 = GPU(PROPERTIES, 140 << 30, ("cuda", 90, 32))
HERE = {"cpu": platform.machine()} | {name: version(name).partition("+")[0] for name in ("torch", "triton")}
EVENTS = [
    {"found": 1},
    {"found": 2},
    {"name": "attend", "seconds": 2.5, "cached": False},
    {"name": "merge", "seconds": 0.0, "cached": True},
    {"name": "plan", "error": "CompilationError: no\nin line 1"},
    {"skipped": "backend fast: decode is compiled by another compiler"},
]
CHOSEN = {"role": "prefill", "backend": "triton_mha"}


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "h200.json"
    path.write_text(json.dumps(asdict(H200) | HERE))
    return path


@pytest.fixture
def never(monkeypatch) -> None:
    """Fail if a start-up is recorded."""
    monkeypatch.setattr(warm_for_gpu, "record", lambda *_: pytest.fail("it recorded a start-up"))


def test_a_described_gpu_is_read_as_it_is(attnplug, monkeypatch, tmp_path):
    """A recording depends on the name, for the marker; on the rest of it, for kernels."""
    found = SimpleNamespace(**PROPERTIES, total_memory=140 << 30, uuid=object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: found)
    target = SimpleNamespace(backend="cuda", arch=90, warp_size=32)
    monkeypatch.setattr("triton.runtime.driver._active", SimpleNamespace(get_current_target=lambda: target))
    path = tmp_path / "gpu.json"
    outcome = attnplug("warm", "--describe-gpu", str(path))
    assert outcome.code == 0 and "NVIDIA H200" in outcome.out
    assert read_gpu(str(path)) == GPU.of(torch.device("cuda"))
    assert attnplug("warm", "--describe-gpu", str(path), "--json").json == json.loads(path.read_text())
    unwritable = attnplug("warm", "--describe-gpu", str(tmp_path / "no" / "folder"))
    assert unwritable.code == 2 and "folder" in unwritable.err
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "NVIDIA" in attnplug("warm", "--describe-gpu", str(path)).err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_there_is_nothing_to_describe(attnplug, tmp_path):
    outcome = attnplug("warm", "--describe-gpu", str(tmp_path / "gpu.json"))
    assert outcome.code == 2 and "a machine with the GPU" in outcome.err and not list(tmp_path.iterdir())


def test_it_compiles_what_a_start_up_on_that_gpu_looks_for(attnplug, recorder, file, tmp_path):
    """E1: the engine on the GPU skips its own recording. Every kernel that is missing is listed."""
    recorder(*EVENTS, CHOSEN, {"finished": 3})
    outcome = attnplug("warm", "--model", "tiny:llama", "--gpu", str(file), "--max-batch", "4")
    assert outcome.code == 0
    for text in (
        "2.5 s  attend",
        "for NVIDIA H200: compiled 1 kernel in 2.5 s",
        "found 1 in the cache",
        "prefill: triton_mha",
        "not compiled: plan: CompilationError: no\n",
        "not compiled: backend fast",
        str(tmp_path / "cache"),
    ):
        assert text in outcome.out
    serving = AheadRequest("tiny:llama", EngineOptions(max_batch=4), H200, 1, 8, num_pages=99)
    assert fill_cache(serving) == AheadReport() and (tmp_path / "started").read_text() == "x"


def test_another_cpu_architecture_does_not_find_it(attnplug, recorder, file, monkeypatch, tmp_path):
    """E1: Triton's cache keys depend on its build, so a folder that two architectures share has both kernels."""
    recorder(*EVENTS, CHOSEN, {"finished": 3})
    assert attnplug("warm", "--model", "tiny:llama", "--gpu", str(file)).code == 0
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    fill_cache(AheadRequest("tiny:llama", EngineOptions(), H200, 1, 2))
    assert (tmp_path / "started").read_text() == "xx"


def test_it_records_again_although_it_was_done(attnplug, recorder, file, tmp_path):
    """Files of the cache may have been deleted."""
    recorder(*EVENTS, CHOSEN, {"finished": 3})
    for _ in range(2):
        found = attnplug("warm", "--model", "tiny:llama", "--gpu", str(file), "--json").json
    assert (tmp_path / "started").read_text() == "xx"
    assert found["compiled"] == [{"name": "attend", "seconds": 2.5}] and found["loaded"] == 1
    assert found["failed"].keys() == {"plan"} and len(found["skipped"]) == 1 and found["stopped"] is None
    assert found["backends"] == {"prefill": "triton_mha"} and found["gpu"] == "NVIDIA H200"


@pytest.mark.parametrize(
    ("events", "code", "text"),
    [
        ([{"stopped": "no backend serves it"}], 1, "no backend serves it"),
        ([CHOSEN, {"left_out": "fast", "why": "no libcuda"}], 0, "without fast, which the GPU's machine may choose"),
    ],
    ids=["it stops", "a backend cannot be imported here"],
)
def test_what_is_not_complete_is_recorded_again_on_the_gpu(attnplug, recorder, file, tmp_path, events, code, text):
    """E1"""
    recorder(*EVENTS, *events, {"finished": 3})
    outcome = attnplug("warm", "--model", "tiny:llama", "--gpu", str(file))
    assert outcome.code == code and text in (outcome.err if code else outcome.out)
    fill_cache(AheadRequest("tiny:llama", EngineOptions(), H200, 1, 2))
    assert (tmp_path / "started").read_text() == "xx"


def test_options_reach_the_recording(attnplug, recorder, file, monkeypatch):
    """Ranks are not started: the first one compiles for all. Pages that are given are those of the GPU."""
    recorder(*EVENTS, CHOSEN, {"finished": 3})
    requests, follow = [], compile_ahead._follow
    monkeypatch.setattr(compile_ahead, "_follow", lambda *given: requests.append(given[1]) or follow(*given))
    options = ("--tensor-parallel", "2", "--num-pages", "48", "--compile-processes", "3", "--device", "cuda")
    assert attnplug("warm", "--model", "tiny:llama", "--gpu", str(file), *options).code == 0
    (request,) = requests
    assert (request.gpu, request.ranks, request.num_pages, request.workers) == (H200, 2, 48, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": None},
        {"memory": 0},
        {"properties": []},
        {"properties": {**PROPERTIES, "multi_processor_count": "132"}},
        {"properties": {**PROPERTIES, "multi_processor_count": 0}},
        {"properties": {"name": "NVIDIA H200"}},
        {"target": ["hip", "gfx942", 64]},
        {"target": ["cuda", 100, 32]},
        {"target": "cuda"},
        {"cpu": "riscv64"},
        {"torch": "2.1.0"},
        {"triton": "3.1.0"},
        {"more": 1},
    ],
    ids=str,
)
@pytest.mark.usefixtures("never")
def test_a_wrong_description_is_one_line_with_the_remedy(attnplug, file, changes):
    file.write_text(json.dumps(asdict(H200) | HERE | changes))
    outcome = attnplug("warm", "--model", "tiny:llama", "--gpu", str(file))
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert str(file) in outcome.err and "attnplug warm --describe-gpu" in outcome.err


@pytest.mark.parametrize(
    "content", [b"", b"H200", b"[]", b"3", b"\xff\xfe", b"[" * 99999, None], ids=lambda content: str(content)[:9]
)
@pytest.mark.usefixtures("never")
def test_a_file_without_a_description_is_one_line_with_the_remedy(attnplug, file, content):
    file.unlink() if content is None else file.write_bytes(content)
    outcome = attnplug("warm", "--model", "tiny:llama", "--gpu", str(file))
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert str(file) in outcome.err and "attnplug warm --describe-gpu" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--model", "tiny:llama", "--device", "cpu"), "--device cpu"),
        (("--model", "tiny:llama", "--compile-processes", "0"), "--compile-processes 0"),
        (("--model", "tiny:llama", "--tensor-parallel", "0"), "--tensor-parallel 0"),
        (("--model", "tiny:llama", "--tensor-parallel", "3"), "3"),
        (("--model", "/nowhere"), "/nowhere"),
        (("--describe-gpu", "other.json"), "leave it out"),
        ((), "--model"),
    ],
)
@pytest.mark.usefixtures("never")
def test_options_that_do_not_go_with_a_description_are_refused(attnplug, file, arguments, text):
    outcome = attnplug("warm", *arguments, "--gpu", str(file))
    assert outcome.code in (1, 2) and text in outcome.err


@pytest.mark.usefixtures("never")
def test_without_triton_nothing_is_compiled(attnplug, file, monkeypatch):
    monkeypatch.setattr(gpu_file, "find_spec", lambda _name: None)
    outcome = attnplug("warm", "--model", "tiny:llama", "--gpu", str(file))
    assert outcome.code == 2 and "install Triton" in outcome.err
