"""Compilation ahead: launches of a start-up are recorded on shapes alone and compiled in parallel processes (E1)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from quantized_checkpoints import CASES, FP8

from attnplug.host import TINY_CONFIGS
from attnplug_engine import Embedder, Engine
from attnplug_engine import engine as engine_module
from attnplug_engine.execution import compile_ahead
from attnplug_engine.execution.compilations import Compilation
from attnplug_engine.execution.compile_ahead import GPU, AheadReport, AheadRequest, fill_cache
from attnplug_engine.options import EmbedOptions, EngineOptions
from attnplug_engine.parallel.collectives import SINGLE
from attnplug_testing.triton_mode import compiled_by

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
H200 = GPU({"name": "NVIDIA H200"}, 140 << 30, ("cuda", 90, 32))
REQUEST = AheadRequest("tiny:llama", EngineOptions(), H200, 1, 2)
SMALL = {"dtype": "bfloat16", "max_batch": 2, "context_length": 64, "chunked_prefill_size": 32}
WIDE = {
    "llama": {"head_dim": 128},
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
}


@pytest.mark.long
@needs_triton
def test_processes_fill_the_cache_and_a_later_one_compiles_nothing(tmp_path):
    """E1: at the same time, every variant once; a kernel that cannot be compiled costs no other one."""
    found = compiled_by(Path(__file__).with_name("compile_ahead_toy.py"), str(tmp_path))
    reports = [json.loads(line) for line in found["reports"]]
    failed = {report["name"]: report["error"] for report in reports if "error" in report}
    assert list(failed) == ["broken"] and "ZeroDivisionError" in failed["broken"]
    compiled = Counter(report["name"].rpartition(".")[2] for report in reports if not report.get("cached", True))
    assert compiled == {"copy": 4, "tuned": 2}
    assert found["hits"] == [["copy", True]] * 4 + [["tuned", True]] * 2


def recorded(tmp_path: Path, model: str, **settings: object) -> Counter[str]:
    """Kernels that an engine on a model with heads of a usual width launches at start-up, by name."""
    config = {**TINY_CONFIGS[model], **WIDE.get(model, {}), **settings.pop("config", {})}  # type: ignore[dict-item]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = compiled_by(Path(__file__).with_name("record_engine.py"), str(tmp_path), json.dumps({**SMALL, **settings}))
    return Counter(found)


@pytest.mark.long
@needs_triton
def test_a_start_up_without_a_gpu_launches_what_one_with_a_gpu_does(tmp_path):
    """E1: layers, attention, sampling, and the first and last kernels of captured steps; layers alike run once."""
    settings, heads = {"attention_backend": "triton_mha", "num_pages": 64}, {"num_key_value_heads": 1}
    found = recorded(tmp_path, "llama", config=heads, **settings)
    assert {"attend", "_plan", "_rms_norm", "_rotate_heads", "_write_pairs", "_silu_and_mul"} <= found.keys()
    assert {"attend_extend", "_begin", "_end", "_look", "_choose"} <= found.keys()
    deeper = recorded(tmp_path, "llama", config={**heads, "num_hidden_layers": 9}, **settings)
    assert deeper == found


@pytest.mark.long
@needs_triton
def test_prefills_of_mla_as_mha_are_recorded(tmp_path):
    """E1: ragged and absorbed attention, and experts."""
    found = recorded(tmp_path, "deepseek_v3", attention_backend="triton_mla", num_pages=64)
    assert {"attend_ragged_rows", "order_tiles", "_latent_rows", "_up_projection", "_sort_pairs"} <= found.keys()


@pytest.mark.long
@needs_triton
def test_a_start_up_reads_and_writes_a_coded_cache(tmp_path):
    """E1, E2: what checks a format's codec on numbers passes on a GPU without any."""
    settings = {"attention_backend": "triton_mha", "num_pages": 64, "kv_dtype": "fp8_e4m3"}
    assert {"attend", "_write_pairs"} <= recorded(tmp_path, "llama", **settings).keys()


@pytest.mark.long
@needs_triton
@pytest.mark.parametrize(
    ("scheme", "kernels"),
    [
        ({**FP8, "weight_block_size": [128, 128]}, {"_skinny_fp8_gemm", "_split_gemm", "_quantized_gemm"}),
        (CASES["fp8 tensors"][2], {"_skinny_fp8_gemm", "_quantized_gemm"}),
        (CASES["int4, groups of 128"][2], {"_quantized_gemm"}),
        (CASES["MXFP4"][2], {"_quantized_gemm"}),
    ],
    ids=["fp8 blocks", "fp8 tensors", "int4", "MXFP4"],
)
def test_a_quantized_checkpoint_is_recorded(scheme, kernels, tmp_path):
    """E1, E5: scales are checked while weights are loaded, and a fake GPU has no values."""
    config = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"quantization_config": scheme}
    found = recorded(tmp_path, "llama", config=config, attention_backend="triton_mha", num_pages=64)
    assert kernels <= found.keys()


@pytest.mark.long
@needs_triton
def test_preloaded_products_of_codes_are_recorded(tmp_path):
    """E1: of the matrices that have a configuration: q, k, v and gate-up."""
    config = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    config |= {"head_dim": 64, "quantization_config": {**FP8, "weight_block_size": [128, 128]}}
    found = recorded(tmp_path, "llama", config=config, attention_backend="triton_mha", num_pages=64)
    assert found["_preloaded_gemm"] == 2


@pytest.mark.long
@needs_triton
def test_batch_invariant_arithmetic_is_recorded(tmp_path):
    """E1: operators that are replaced inside torch's dispatcher."""
    found = recorded(tmp_path, "llama", attention_backend="triton_mha", num_pages=64, batch_invariant=True)
    assert {"_invariant_gemm", "merge_splits"} <= found.keys()


@pytest.mark.long
@needs_triton
@pytest.mark.parametrize(
    ("model", "settings", "kernel"),
    [
        ("llama", {"check_layers": True}, "_choose"),
        ("llama", {"speculative_algorithm": "ngram", "plan_stream": True}, "_propose"),
        ("deepseek_v3", {"speculative_algorithm": "mtp"}, "_accept"),
        ("deepseek_v32", {"enable_hisparse": True}, "_swap_in"),
    ],
    ids=["checked layers", "a plan stream", "lengths on the host", "rows in host memory"],
)
def test_a_start_up_is_recorded_to_its_end(tmp_path, model, settings, kernel):
    """E1: this includes every option that reads values of the device or registers host memory."""
    assert kernel in recorded(tmp_path, model, **settings)


@pytest.mark.long
@needs_triton
@pytest.mark.parametrize("kind", ["operator", "dlpack"])
def test_a_start_up_is_recorded_although_a_library_cannot_run_on_shapes(tmp_path, kind):
    """E1: operators of torch without a fake implementation, and functions that read memory by DLPack. Triton's kernels
    of the same backend, and of all that comes later, are recorded."""
    small = {"max_batch": 1, "context_length": 16, "chunked_prefill_size": 8, "num_pages": 16}
    found = recorded(tmp_path, "llama", attention_backend="opaque", opaque=kind, **small)
    assert {"_write_pairs", "_choose", "_end"} <= found.keys()
    assert found["double"] == 2, "of the layer, and of the captured part of planning"
    (why,) = (text for text in found if text.startswith("backend opaque: "))
    assert {"operator": "opaque.schedule", "dlpack": "no memory"}[kind] in why


@pytest.mark.long
@needs_triton
@pytest.mark.parametrize(("model", "backend"), [("llama", "triton_mha"), ("deepseek_v3", "triton_mla")])
def test_no_kernel_depends_on_the_number_of_pages(tmp_path, model, backend):
    """E1: free memory decides about it, which only the GPU's machine knows. Multiples of 16 or not, and offsets in the
    cache that exceed 32 bits or not."""
    settings = {"attention_backend": backend, "page_size": 64, "variants": True, "max_batch": 1}
    found = [recorded(tmp_path, model, num_pages=pages, **settings) for pages in (64, 67, 300001)]
    assert found[0] == found[1] == found[2] and len(found[0]) > 20


@pytest.mark.long
@needs_triton
def test_prompts_of_any_lengths_launch_what_a_start_up_launched(tmp_path):
    """E1: also prefills that are not captured, of several prompts, with odd numbers of tokens, and behind prefixes of
    earlier prompts that are in the cache."""
    settings = {"attention_backend": "triton_mha", "max_batch": 5, "context_length": 4096, "chunked_prefill_size": 128}
    prompts = [[70, 31], [3, 90], [7, 7, 9], [40, 41, 42], [100, 1, 2, 3, 4], [200, 9], [77], [119], [5] * 5]
    prompts += [[3000, 3000], [3033, 3033], [3005], [3097], [2000], [3100]]
    late = recorded(tmp_path, "llama", cuda_graph_prefill_sizes=[16], prompts=prompts, **settings)
    assert not late


@pytest.mark.long
@needs_triton
def test_prefills_whose_graphs_a_start_up_drops_are_recorded(tmp_path):
    """E1: which graphs save time is known on the GPU only, so prefills are recorded with their graphs and without."""
    settings = {"attention_backend": "triton_mha", "num_pages": 64, "context_length": 256}
    captured = recorded(tmp_path, "llama", **settings)
    assert recorded(tmp_path, "llama", disable_prefill_cuda_graph=True, **settings) <= captured


def test_fake_tensors_have_addresses_within_their_memory():
    """E1: Triton has a variant of a kernel for addresses at multiples of 16. Runs in a separate process, because a fake
    GPU cannot be removed."""
    script = """if True:
        import torch
        from attnplug_engine.execution.compile_ahead import GPU
        from attnplug_engine.recording.fake_gpu import fake_gpu
        with fake_gpu(GPU({"name": "NVIDIA H200", "major": 9, "minor": 0}, 140 << 30, ("cuda", 90, 32))):
            rows = torch.empty(4, 64, dtype=torch.bfloat16, device="cuda")
            print([tensor.data_ptr() for tensor in (rows, rows[1:], rows[:, 3:], rows[2, 8:])])"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [0, 128, 6, 272]


@needs_triton
@pytest.mark.long
def test_an_embedder_is_recorded(tmp_path):
    """E1: its warm-up runs prompts of every kind, and samples nothing."""
    found = recorded(tmp_path, "llama", embed=True)
    assert "_rms_norm" in found and "_choose" not in found


EVENTS = [
    {"found": 1},
    {"found": 2},
    {"name": "attend", "seconds": 2.5, "cached": False},
    {"name": "merge", "seconds": 0.0, "cached": True},
    {"found": 3},
    {"name": "plan", "error": "CompilationError: no"},
]


def test_a_cache_is_filled_once_for_equal_requests(recorder, tmp_path):
    """E1: it reports what was compiled and for how long; another model or GPU is another request."""
    recorder(*EVENTS, {"finished": 3})
    seen: list[tuple[int, int]] = []
    report = fill_cache(REQUEST, lambda *counts: seen.append(counts))
    failed = {"plan": "CompilationError: no"}
    assert report == AheadReport((Compilation("attend", 2.5, cached=False),), cached=1, failed=failed)
    assert seen == [(0, 1), (0, 2), (1, 2), (2, 2), (2, 3), (3, 3), (3, 3)]
    assert fill_cache(REQUEST) == AheadReport() and (tmp_path / "started").read_text() == "x"
    other = AheadRequest("tiny:llama", EngineOptions(dtype="bfloat16"), H200, 1, 2)
    assert fill_cache(other) == report
    ten = AheadRequest("tiny:llama", EngineOptions(), GPU({"name": "B200"}, 1, ("cuda", 100, 32)), 1, 2)
    assert fill_cache(ten) == report and (tmp_path / "started").read_text() == "xxx"


def test_a_recording_that_fails_is_told_and_tried_again(recorder, tmp_path):
    """E1: the failure is reported, and the next start records again. Missing kernels are compiled at their launch."""
    recorder(*EVENTS, {"stopped": "PlanError: why"}, {"finished": 3})
    report = fill_cache(REQUEST)
    assert report.problem == "PlanError: why" and [each.name for each in report.compiled] == ["attend"]
    recorder(*EVENTS[:1], end="sys.exit('no memory')")
    assert "no memory" in str(fill_cache(REQUEST).problem)
    recorder(*EVENTS[:1], end="import os; os.abort()")
    assert "ended early" in str(fill_cache(REQUEST).problem)
    assert (tmp_path / "started").read_text() == "xxx"


def test_a_recording_that_skips_kernels_says_so_and_is_not_repeated(recorder, tmp_path):
    """E1: a kernel of another library is missing in every recording, so a later one would find no more."""
    why = "backend fast: no kernels were recorded behind another library's in plan"
    recorder(*EVENTS, {"skipped": why}, {"skipped": why}, {"finished": 3})
    assert fill_cache(REQUEST).not_recorded == why
    assert fill_cache(REQUEST) == AheadReport() and (tmp_path / "started").read_text() == "x"


def test_real_and_random_weights_launch_the_same_kernels(recorder, tmp_path):
    """E1: `attnplug warm` has random weights and no stop tokens; the serving engine finds the recorded kernels."""
    recorder(*EVENTS, {"finished": 3})
    for options in (EngineOptions(random_weights=True, ignore_eos=True), EngineOptions(device="cuda")):
        fill_cache(AheadRequest("tiny:llama", options, H200, 1, 2))
    assert (tmp_path / "started").read_text() == "x"


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.13.0+cu129", "2.13.1+cpu"])
def test_builds_of_one_torch_share_a_recording(recorder, tmp_path, monkeypatch, version):
    """E1: a container image may be built with torch for CPUs. Another version is recorded again."""
    recorder(*EVENTS, {"finished": 3})
    for each in ("2.13.0", version):
        torch_only = SimpleNamespace(name="torch", version=each)
        monkeypatch.setattr(compile_ahead, "distributions", lambda found=torch_only: [found])
        fill_cache(REQUEST)
    assert len((tmp_path / "started").read_text()) == 1 + (version == "2.13.1+cpu")


def test_a_recording_imports_no_file_of_the_working_directory(recorder, tmp_path, monkeypatch):
    recorder(*EVENTS, {"finished": 3})
    own = tmp_path / "own"
    own.mkdir()
    (own / "pathlib.py").write_text("raise RuntimeError('a file of the user')")
    monkeypatch.chdir(own)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert fill_cache(REQUEST).problem is None


def test_without_a_home_folder_kernels_are_compiled_where_they_are_launched(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "ATTNPLUG_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert "home folder" in str(fill_cache(REQUEST).problem)


def test_memory_limits_the_number_of_compilers(monkeypatch):
    """A container may have less memory than its machine."""
    monkeypatch.setattr(compile_ahead, "available_memory", lambda: 3 << 30)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    assert compile_ahead.compile_workers() == 3


def test_a_recording_that_hangs_is_ended(recorder, monkeypatch):
    monkeypatch.setattr(compile_ahead, "_TIMEOUT_SECONDS", 0.5)
    recorder(*EVENTS, end="import time; sys.stdout.flush(); time.sleep(60)")
    assert "ended early" in str(fill_cache(REQUEST).problem)


@pytest.mark.long
def test_a_cache_that_cannot_be_written_is_no_error(recorder, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder would be")
    recorder(*EVENTS, {"finished": 3})
    assert [fill_cache(REQUEST).problem for _ in range(2)] == [None, None]
    assert (tmp_path / "started").read_text() == "xx"


@needs_triton
@pytest.mark.cross_compile
def test_a_second_recording_finds_everything_in_the_cache(tmp_path, monkeypatch):
    """E1: a whole embedder, compiled for an H200 by two processes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps({**TINY_CONFIGS["llama"], **WIDE["llama"]}))
    properties = {"major": 9, "minor": 0, "multi_processor_count": 132, "shared_memory_per_block_optin": 232448}
    options = EmbedOptions(dtype="bfloat16", max_batch=1, context_length=8)
    gpu = GPU({**H200.properties, **properties}, H200.memory, H200.target)
    request, seen = AheadRequest(str(tmp_path), options, gpu, 1, 2), []
    first = fill_cache(request, lambda *counts: seen.append(counts))
    assert first.not_recorded is None and len(first.compiled) > 4
    assert seen[-1] == (len(first.compiled), len(first.compiled))
    (marker,) = (tmp_path / "cache").glob("attnplug-*.json")
    marker.unlink()
    again = fill_cache(request)
    assert (again.compiled, again.cached) == ((), len(first.compiled))


def test_an_interrupt_ends_the_compilers(recorder, tmp_path):
    recorder({"found": 1}, end=f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))")
    script = (tmp_path / "recorder.py").read_text()
    (tmp_path / "recorder.py").write_text(script + "\nprint('{\"found\": 2}', flush=True)\ntime.sleep(60)")

    def interrupt(_done: int, found: int) -> None:
        if found == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill_cache(REQUEST, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_an_engine_reports_what_was_compiled_ahead_and_what_was_not(monkeypatch):
    """E1"""
    ahead = AheadReport((Compilation("attend", 2.5, cached=False),), "PlanError: why")
    monkeypatch.setattr(engine_module, "compile_ahead", lambda *_: ahead)
    start_up = Engine("tiny:llama", device="cpu").start_up
    assert start_up.compiled == ahead.compiled and start_up.not_ahead == ahead.problem
    assert [("1 kernel in 2.5 s" in line, "why" in line) for line in start_up.lines()] == [(True, False), (False, True)]


def test_nothing_is_compiled_ahead_for_a_cpu_or_by_no_processes(monkeypatch):
    monkeypatch.setattr(compile_ahead, "fill_cache", lambda *_: pytest.fail("it started a process"))
    assert compile_ahead.compile_ahead("m", EngineOptions(), torch.device("cpu"), SINGLE) == AheadReport()
    monkeypatch.setattr(compile_ahead, "usable", lambda _: True)
    none = EngineOptions(compile_processes=0)
    assert compile_ahead.compile_ahead("m", none, torch.device("cuda"), SINGLE) == AheadReport()


def test_rank_0_compiles_for_all_ranks_which_wait(monkeypatch):
    """E1"""
    gathered, report = [], AheadReport((Compilation("attend", 1.0, cached=False),))

    class Rank:
        size = 2

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
            gathered.append(self.rank)
            return tensor

    monkeypatch.setattr(compile_ahead, "usable", lambda _: True)
    monkeypatch.setattr(GPU, "of", lambda _: H200)
    monkeypatch.setattr(compile_ahead, "fill_cache", lambda *_: report)
    found = [compile_ahead.compile_ahead("m", EngineOptions(), torch.device("cpu"), Rank(rank)) for rank in (0, 1)]
    assert found == [report, AheadReport()] and gathered == [0, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize("kind", [Engine, Embedder])
@pytest.mark.parametrize("model", WIDE)
def test_a_first_start_compiles_nothing_itself(kind, model, tmp_path, monkeypatch):
    """E1: the recording process found every kernel, so the engine loads all of them from the cache."""
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps({**TINY_CONFIGS[model], **WIDE[model], "hidden_size": 1024}))
    settings = {"max_batch": 8, "dtype": "bfloat16", "context_length": 512}
    if kind is Engine:
        settings |= {"random_weights": True, "num_pages": 64}
    else:
        from attnplug_engine.checkpoints.random import RandomCheckpoint
        from attnplug_engine.models.architectures import build_model, load_spec

        source = RandomCheckpoint.of_folder(str(tmp_path))
        build_model(source, load_spec(str(tmp_path)), dtype=torch.float32, device="cpu")
        source.save(tmp_path)
    ahead: list[AheadReport] = []
    fill = fill_cache
    monkeypatch.setattr(compile_ahead, "fill_cache", lambda *given: ahead.append(fill(*given)) or ahead[0])
    start_up = kind(str(tmp_path), device="cuda", **settings).start_up
    assert ahead[0].problem is None and ahead[0].compiled
    late = [each.name for each in start_up.compiled[len(ahead[0].compiled) :] if not each.cached]
    assert late == []
