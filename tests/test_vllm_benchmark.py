"""``benchmarks/vllm_h200.py`` without vLLM: its options, merge and table. Measuring needs a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("os.environ", dict(__import__("os").environ))  # it sets vLLM's variables
    import vllm_h200

    yield vllm_h200
    sys.modules.pop("vllm_h200")


def test_backends_are_options_of_vllm(benchmark):
    assert benchmark.options_of("FLASHMLA") == {"attention_backend": "FLASHMLA"}
    assert benchmark.options_of("TRITON_MLA@64") == {"attention_backend": "TRITON_MLA", "block_size": 64}
    ours = {"attention_backend": "CUSTOM", "additional_config": {"attnplug": {"backend": "auto"}}}
    assert benchmark.options_of("attnplug:auto") == ours


@pytest.mark.parametrize(("model", "row"), [("mla", 1152), ("llama", 2048), ("sparse", 1152 + 132)])
def test_models_have_the_layers_heads_and_rows_that_are_measured(benchmark, model, row):
    config = benchmark.config_of(model, 32, 48)
    assert (config["num_hidden_layers"], config["num_attention_heads"]) == (48, 32)
    assert ("index_topk" in config) is (model == "sparse")
    fixed = benchmark._cache_bytes(config, 0)
    assert benchmark._cache_bytes(config, 1000) - fixed == int(1.05 * row * 48 * 1000)
    names = benchmark.BACKENDS[model].split(",")
    assert any(name.startswith("attnplug:") for name in names) and not names[0].startswith("attnplug:")


def test_a_prefill_is_reported_by_its_own_tokens(benchmark):
    from decode_points import Point

    config, point = benchmark.config_of("llama", 32, 16), Point("llama32", 1, 512, {"step_us": 1000.0})
    entry = benchmark._entry(config, "FLASH_ATTN", point, prefill=True)
    assert entry["tokens_per_s"] == 512_000 and "limit_us" not in entry


def result(backend: str, *points: tuple[int, float | None]) -> dict[str, Any]:
    entries = []
    for batch, rate in points:
        entry = {"heads": 16, "backend": backend, "batch": batch, "context": 1024}
        entries.append({**entry, "error": "none"} if rate is None else {**entry, "step_us": 1.0, "tokens_per_s": rate})
    return {"machine": {"gpu": "H200"}, "starts": [{"heads": 16, "backend": backend}], "points": entries}


def test_of_duplicate_points_the_last_without_an_error_counts(benchmark):
    parts = [result("FLASHMLA", (1, 100.0), (4, None)), result("FLASHMLA", (1, None), (4, 300.0))]
    found = benchmark.merged(parts)
    assert [point["tokens_per_s"] for point in found["points"]] == [100.0, 300.0]
    assert len(found["starts"]) == 1


def test_ours_are_reported_as_multiples_of_the_best_of_vllms_own(benchmark):
    own = [result("FLASHMLA", (1, 100.0)), result("TRITON_MLA", (1, 80.0))]
    found = benchmark.merged([result("attnplug:triton_mla", (1, 110.0)), *own])
    assert "| 16 | 1024 | 1 | 100 | 80 | 110 | triton_mla 1.100 |" in benchmark.table(found)
