"""The same greedy tokens as transformers, in a real SGLang on the CPU.

Needs an environment of its own (``make sglang-test`` makes it). ``stand_ins`` has torchvision, which SGLang imports and
does not use here, and the few compiled kernels that it calls. Its Triton kernels, which write its tables, run in
Triton's interpreter. With ``as_on_arm`` on the path, SGLang takes the code paths of an Arm host on any machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    reason = "SGLang is not installed; make sglang-test installs it, in its own environment"
    pytest.skip(reason, allow_module_level=True)

import tiny_checkpoints
from attnplug import DType
from attnplug.host import load_model
from attnplug_testing.measured import measured_twins

HERE = Path(__file__).parent
OURS = "attnplug:torch_native"


def serve(folder: Path, *cases: dict[str, Any], paths: Sequence[str] = (), **environment: str) -> list[dict[str, Any]]:
    """Run each case in its own engine. ``paths``: further folders from which the engine's processes import."""
    found = results(["serve.py", str(folder), *map(json.dumps, cases)], len(cases), paths, environment)
    assert len(found) == len(cases)
    return found


def results(
    command: list[str], cases: int = 1, paths: Sequence[str] = (), environment: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run a script of this folder against the installed SGLang, and return the results that it prints."""
    given = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(HERE / name) for name in ("stand_ins", *paths)),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    script = [sys.executable, str(HERE / command[0]), *command[1:]]
    done = subprocess.run(script, env=given, capture_output=True, text=True, timeout=600 * cases, check=False)
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(found) >= cases, done.stderr[-4000:]
    return found


@pytest.mark.parametrize("name", ["llama", "deepseek", "gemma2"])
def test_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """Batches of eight, chunks of 64 tokens, pages of 16, rows from the prefix cache; MHA, MLA, windows and caps."""
    folder = tiny_checkpoints.save(name, tmp_path)
    case = {"attention_backend": OURS, "page_size": 16, "chunked_prefill_size": 64}
    (found,) = serve(folder, case)
    assert found["tokens"] == tiny_checkpoints.expected(folder)
    assert found["again"] == found["tokens"][6:]
    assert found["cached"] == [64, 96]


def test_tokens_equal_sglangs_own_backend_and_split_with_it(tmp_path: Path) -> None:
    """Pages of one token. Our backend serves both roles, or one role with SGLang's for the other."""
    folder = tiny_checkpoints.save("llama", tmp_path)
    theirs, ours, prefill, decode = serve(
        folder,
        {"attention_backend": "torch_native"},
        {"attention_backend": OURS},
        {"prefill_attention_backend": OURS, "decode_attention_backend": "torch_native"},
        {"prefill_attention_backend": "torch_native", "decode_attention_backend": "attnplug:auto"},
    )
    assert theirs["tokens"] == ours["tokens"] == prefill["tokens"] == decode["tokens"]
    assert ours["cached"] == [78, 109]


def test_mla_with_a_prefix_in_one_shot(tmp_path: Path) -> None:
    """C2: from the threshold on, a prefix is gathered and up-projected instead of attended to in latent space."""
    folder = tiny_checkpoints.save("deepseek", tmp_path)
    case = {"attention_backend": OURS, "chunked_prefill_size": 64}
    (found,) = serve(folder, case, SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD="1")
    assert found["tokens"] == tiny_checkpoints.expected(folder)
    assert found["again"] == found["tokens"][6:]


def installed(plugin: str, folder: Path) -> list[str]:
    """Return folders with a plugin's module, which is beside this one, and with the metadata of its distribution."""
    metadata = folder / "site" / f"{plugin}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {plugin}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[attnplug.plugins]\n{plugin} = {plugin}\n")
    return [str(HERE.parent), str(metadata.parent)]


def test_mla_with_queries_and_rows_in_two_parts(tmp_path: Path) -> None:
    """Prefixes, chunks and decodes. The backend accepts nothing else; SGLang's pool writes the rows."""
    folder = tiny_checkpoints.save("deepseek", tmp_path)
    ours = {"attention_backend": "attnplug:in_parts"}
    small, large = serve(
        folder,
        {**ours, "chunked_prefill_size": 64},
        {**ours, "page_size": 16, "chunked_prefill_size": 64},
        paths=installed("in_parts", tmp_path),
    )
    assert small["tokens"] == large["tokens"] == tiny_checkpoints.expected(folder)
    assert small["again"] == large["again"] == small["tokens"][6:]
    assert large["cached"] == [64, 96]


def test_auto_runs_each_batch_on_the_backend_that_was_measured_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes move from one backend to the other as requests grow, over one cache."""
    folder = tiny_checkpoints.save("deepseek", tmp_path)
    layer = load_model(str(folder)).layers[0]
    times = {"alpha": {8: 10.0, 512: 90.0}, "beta": {8: 90.0, 512: 10.0}}
    measured_twins(monkeypatch, tmp_path / "cache", layer, DType.FLOAT32, times)
    plans = tmp_path / "plans"
    case = {"attention_backend": "attnplug:auto", "page_size": 16, "chunked_prefill_size": 64}
    (found,) = serve(folder, case, paths=installed("twins", tmp_path), TWINS_PLANS=str(plans))
    assert found["tokens"] == tiny_checkpoints.expected(folder)
    assert found["again"] == found["tokens"][6:]
    assert {"decode alpha", "decode beta", "extend beta"} <= set(plans.read_text().splitlines())


def drafting(folder: Path, topk: int, tokens: int) -> dict[str, Any]:
    """Case with drafts of three steps by a noisy copy of the model, on SGLang's own backend."""
    return {
        "attention_backend": OURS,
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(tiny_checkpoints.save_draft(folder)),
        "speculative_draft_attention_backend": "intel_amx",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": tokens,
    }


def test_drafts_of_mha_are_verified_as_chains_and_trees(tmp_path: Path) -> None:
    """Trees of eight tokens and three branches take fewer steps than chains of the same draft."""
    folder = tiny_checkpoints.save("llama", tmp_path)
    chains, trees = serve(folder, drafting(folder, 1, 4), drafting(folder, 3, 8))
    assert chains["tokens"] == trees["tokens"] == tiny_checkpoints.expected(folder)
    assert trees["again"] == trees["tokens"][6:] and trees["cached"] == [78, 109]
    assert 0 < trees["verified"] < chains["verified"] < tiny_checkpoints.TOKENS * len(trees["tokens"])


def test_draft_trees_of_mla_are_verified(tmp_path: Path) -> None:
    folder = tiny_checkpoints.save("deepseek", tmp_path)
    (found,) = serve(folder, drafting(folder, 3, 8))
    assert found["tokens"] == tiny_checkpoints.expected(folder)
    assert found["again"] == found["tokens"][6:]
    assert 0 < found["verified"] < tiny_checkpoints.TOKENS * len(found["tokens"])


def test_sparse_mla_with_sglangs_own_classes() -> None:
    """A10, E2: extend, decode and verify over SGLang's pool and selection, with bfloat16 and fp8 rows, against float64.

    SGLang scores rows in bfloat16, so that few selected rows differ from an exact selection.
    """
    found = results(["drive_sparse.py"], 6)
    assert len(found) == 6
    for case in found:
        fp8 = "float8" in case["case"]
        assert case["error"] < (0.02 if fp8 else 0.01), case
        assert case["misselected"] < 0.01, case
        assert case["written"] < 0.07 if fp8 else case["written"] == 0, case


@pytest.mark.parametrize("paths", [(), ("as_on_arm",)], ids=["this machine", "as on Arm"])
def test_two_ranks(paths: Sequence[str], tmp_path: Path) -> None:
    """On Arm, SGLang binds threads and runs collectives with its compiled kernels even without AMX."""
    folder = tiny_checkpoints.save("llama", tmp_path)
    case = {"attention_backend": OURS, "tp_size": 2}
    (found,) = serve(folder, case, paths=paths, SGLANG_CPU_OMP_THREADS_BIND="0|1")
    assert found["tokens"] == tiny_checkpoints.expected(folder)


def test_what_cannot_serve_is_refused_before_processes_start(tmp_path: Path) -> None:
    """D3: the front end refuses it in one message, with SGLang's own option names."""
    folder = tiny_checkpoints.save("llama", tmp_path)
    by_device, by_option = serve(
        folder,
        {"attention_backend": "attnplug:triton_mla"},
        {"attention_backend": OURS, "enable_pdmux": True},
    )
    assert "requested by --attention-backend" in by_device["refused"]
    assert "change --device" in by_device["refused"]
    assert "--enable-pdmux" in by_option["refused"]
