"""Computations of ``benchmarks/decode_h200.py`` without measuring: limits, trace times, and tables."""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from attnplug.host import load_model
from attnplug_engine.checkpoints.random import RandomCheckpoint
from attnplug_engine.models.architectures import build_model

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from decode_h200 import merged
from decode_models import MODELS, cache_bytes, distinct_experts, limit_us, parameters, prefill_flops, smaller
from decode_report import prefill_table, rates_table, steps_table
from decode_trace import Work, analyse, gaps_between, group_of, own_times


class Counting(RandomCheckpoint):
    """Counts the elements of all requested tensors, except norms and other vectors."""

    def count(self) -> int:
        return sum(prod(shape) for shape in self._shapes.values() if len(shape) > 1)


@pytest.mark.parametrize("name", MODELS)
def test_the_parameters_that_a_limit_counts_are_those_of_the_model(name, tmp_path):
    config = smaller(MODELS[name])
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = Counting(config)
    build_model(source, load_model(str(tmp_path)), dtype=torch.float32, device="cpu")
    assert parameters(config) == source.count()


def test_the_models_have_about_the_parameters_that_they_are_said_to_have():
    sizes = {name: round(parameters(config) / 1e9, 1) for name, config in MODELS.items()}
    assert sizes == {"llama": 1.1, "mla": 1.2, "moe": 3.0, "hybrid": 3.0}


def test_a_step_reads_its_weights_without_the_embedding_and_its_rows():
    llama = MODELS["llama"]
    read = 2 * (parameters(llama) - 32000 * 2048)
    assert limit_us(llama, 4, 512) == pytest.approx((read + 4 * 512 * 16 * 2 * 8 * 64 * 2) / 4.2e6)


def test_a_step_reads_and_writes_linear_states_whatever_the_context():
    hybrid = MODELS["hybrid"]
    rows = 3 * 2 * 2 * 256 * 2
    assert cache_bytes(hybrid, 2, 100) - cache_bytes(hybrid, 2, 0) == 2 * 100 * rows
    assert cache_bytes(hybrid, 1, 0) == 9 * 2 * 4 * 32 * 128 * 128


def test_the_experts_of_a_batch_are_few_for_one_token_and_nearly_all_for_many():
    assert distinct_experts(64, 10, 1) == pytest.approx(10)
    assert distinct_experts(64, 10, 256) == pytest.approx(64)
    assert distinct_experts(4, 2, 2) == pytest.approx(3)


def test_prefill_counts_products_and_causal_attention():
    llama = MODELS["llama"]
    products = 2 * 8192 * (parameters(llama) - 2 * 32000 * 2048)
    assert prefill_flops(llama, 8192) == products + 16 * 32 * (64 + 64) * 8192**2


def kernel(name: str, start: float, end: float, launch: int, kind: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start, "args": {"correlation": launch}}


def test_a_trace_is_divided_into_groups_and_gaps():
    events = [
        kernel("cudaGraphLaunch", 0, 1, 7, "cuda_runtime"),
        kernel("nvjet_tst_64x8", 10, 20, 7),
        kernel("attend_low", 18, 30, 7),  # launched early: it waits until 20
        kernel("cudaGraphLaunch", 31, 32, 8, "cuda_runtime"),
        kernel("cudaEventSynchronize", 32, 52, 9, "cuda_runtime"),
        kernel("Memcpy HtoD", 33, 34, 10, "gpu_memcpy"),
        kernel("nvjet_tst_64x8", 40, 50, 8),
        kernel("rms_norm", 50, 54, 8),
        {"ph": "M", "name": "process_name"},
    ]
    found = analyse(events, steps=2, wall_us=60)
    assert found["parts_us"] == {
        "products": 10,
        "attention": 5,
        "copies": 0.5,
        "norms, rope, elementwise": 2,
        "idle": 4.5,
    }
    assert (found["between_replays_us"], found["host_us"], found["graph_launches"]) == (10, 20, 1)
    assert found["kernels_us"][0] == ["nvjet_tst_64x8", "products", 10]


def test_kernels_that_overlap_are_counted_once():
    work = [Work("a", 0, 10, 1, False), Work("b", 2, 6, 1, False), Work("c", 8, 12, 2, False)]
    assert own_times(work) == [10, 0, 2]
    assert gaps_between(work, [1, 2]) == [0]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("void pytorch_flash::flash_fwd_splitkv_kernel<cutlass::bfloat16_t>", "attention"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "products"),
        ("_look", "sampling"),
        ("fused_recurrent_gated_delta_rule_fwd_kernel", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, silu>", "norms, rope, elementwise"),
    ],
)
def test_a_kernel_belongs_to_a_group_by_its_name(name, group):
    assert group_of(name) == group


def point(**found: Any) -> dict[str, Any]:
    return {"model": "llama", "batch": 16, "context": 512, **found}


def result(engine: str, *points: dict[str, Any]) -> dict[str, Any]:
    prefill = {"llama": {"tokens": 8192, "tflops": 353.5}}
    return {"machine": {"gpu": "a"}, "engines": {engine: {"models": {}, "prefill": prefill, "points": list(points)}}}


def test_merging_keeps_a_measured_point_over_a_failed_one():
    whole = merged([result("ours", point(step_us=800.0)), result("ours", point(error="no memory"))])
    assert whole["engines"]["ours"]["points"] == [point(step_us=800.0)]


def test_the_tables_compare_engines_and_leave_out_what_was_not_measured():
    mine = point(step_us=800.0, parts_us={"products": 500.4, "idle": 3.0}, host_us=120.0)
    whole = merged([result("ours", mine), result("vllm", point(step_us=1600.0))])
    assert "| 20,000 | 70 % | 10,000 | 2.00 |  |" in rates_table(whole)
    assert "| 800 | 500 |  |  |  |  | 3 |  | 120 |  |" in steps_table(whole)
    assert "| llama | 8192 | 354 TFLOP/s, 50 % | 354 TFLOP/s, 50 % |" in prefill_table(whole)
    assert "failed" in rates_table(result("ours", point(error="RuntimeError: x")))
