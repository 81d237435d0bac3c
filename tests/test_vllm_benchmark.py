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
