"""Refusals of the spec, on a machine without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnplug import CacheLayout, DType, GraphLevel, Problem, Refusal, Role
from attnplug.host import BackendRequest, load_registry, select
from attnplug.kernels import requirement_refusal
from attnplug_testing.command import in_own_process
from attnplug_testing.configs import DEEPSEEK_V3, LLAMA_3_8B, QWEN3_NEXT, read
from attnplug_triton_mha.plugin import attnplug_backends

(SPEC,) = attnplug_backends()
FA4 = "flash-attn-4>=4.0.0b36"
BF16, FP16, FP32, FP8 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT8_E4M3
BY_ROW = "fp8_per_token_head"
ON_AN_H200 = Problem(read(LLAMA_3_8B), "cuda", 90, BF16, BF16, 64)


def refusals(role: Role | None = Role.DECODE, **changes: Any) -> list[Refusal]:
    """The reasons against Llama 3 on an H200, with these changes."""
    return SPEC.refusals(replace(ON_AN_H200, **changes), role)


def with_layers(**changes: Any) -> Any:
    model = read(LLAMA_3_8B)
    return replace(model, layers=tuple(replace(layer, **changes) for layer in model.layers))


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.DRAFT])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": FP16, "kv_dtype": FP16},
        {"kv_dtype": FP8},
        {"kv_dtype": BY_ROW},
        {"kv_dtype": "nvfp4", "sm": 80},
        {"kv_dtype": FP8, "dtype": FP16, "sm": 89, "layout": CacheLayout.STRIDED},
        {"page_size": 1},
        {"page_size": 48},
        {"layout": CacheLayout.STRIDED},
        {"sm": 80},
        {"sm": 120},
        {"model": read(QWEN3_NEXT)},
        {"model": with_layers(sliding_window=100, logit_cap=30.0, sinks=True)},
        {"model": with_layers(head_dim=192, v_head_dim=128)},
        {"cuda_graph": GraphLevel.ALWAYS, "speculative_tokens": 64, "speculative_topk": 8},
        {"tensor_parallel": 8},
    ],
    ids=[
        *(
            "llama",
            "fp16",
            "fp8",
            "fp8-by-row",
            "nvfp4-on-ampere",
            "fp8-on-ada",
            "pages-of-1",
            "pages-of-48",
            "strided",
        ),
        *("ampere", "blackwell", "qwen3-next", "features", "192-128", "graphs", "one-kv-head"),
    ],
)
def test_it_serves(changes: dict[str, Any], role: Role) -> None:
    """D3"""
    assert refusals(role, **changes) == []


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"device": "cpu", "sm": None}, [("device", "cpu", ["cuda"], "device")]),
        ({"sm": 75}, [("sm", 75, "SM 80 or newer", None)]),
        (
            {"model": with_layers(head_dim=72, v_head_dim=72)},
            [("head_dim", [72, 72], "multiples of 16 up to 256", "decode_attention_backend")],
        ),
        (
            {"model": with_layers(head_dim=512, v_head_dim=512)},
            [("head_dim", [512, 512], "multiples of 16 up to 256", "decode_attention_backend")],
        ),
        (
            {"model": with_layers(head_dim=64, v_head_dim=128)},
            [("head_dim", [64, 128], "multiples of 16 up to 256", "decode_attention_backend")],
        ),
        (
            {"kv_dtype": FP16},
            [("kv_dtype", "float16", ["bfloat16", "float8_e4m3fn", "fp8_per_token_head", "nvfp4"], "kv_dtype")],
        ),
        ({"sm": 80, "kv_dtype": FP8}, [("kv_dtype", "float8_e4m3fn", ["bfloat16", "nvfp4"], "kv_dtype")]),
        ({"sm": 80, "kv_dtype": BY_ROW}, [("kv_dtype", "fp8_per_token_head", ["bfloat16", "nvfp4"], "kv_dtype")]),
        ({"speculative_tokens": 65}, [("speculation", 65, 64, "speculative_tokens")]),
    ],
    ids=[
        "cpu",
        "turing",
        "dim-72",
        "dim-512",
        "wide-values",
        "kv-fp16-with-bf16",
        "fp8-on-ampere",
        "fp8-rows-on-ampere",
        "speculation",
    ],
)
def test_it_refuses_with_value_and_what_is_allowed_and_the_setting(
    changes: dict[str, Any], reasons: list[tuple[str, object, object, str]]
) -> None:
    """D3: every reason, and no other."""
    found = refusals(**changes)
    assert [(reason.code, reason.value, reason.allowed, reason.setting) for reason in found] == reasons


def test_trees_on_layers_with_a_window_are_refused_with_the_window() -> None:
    """D3: once for all layers."""
    windowed = with_layers(sliding_window=128)
    assert refusals(model=windowed, speculative_tokens=8) == []
    (reason,) = refusals(model=windowed, speculative_tokens=8, speculative_topk=2)
    assert (reason.code, reason.value, reason.allowed, reason.setting) == ("feature", 2, 1, "speculative_topk")
    assert "128" in reason.message


def test_mla_is_refused_by_its_kind_alone() -> None:
    assert [reason.code for reason in refusals(model=read(DEEPSEEK_V3))] == ["kind"]


@pytest.mark.parametrize(
    ("roles", "chosen"),
    [
        (("--cuda-graph", "never"), {"prefill": "flashattention", "decode": "flashattention"}),
        ((), {"prefill": "flashattention", "decode": "triton_mha"}),  # without flash-attn-4, which would capture
    ],
    ids=["eager", "captured"],
)
def test_auto_prefers_flashattention_where_it_can_run(roles: tuple[str, ...], chosen: object, tmp_path: Path) -> None:
    """D1, D3: the answer needs no GPU."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    outcome = in_own_process(
        "explain", "--model", str(tmp_path), "--sm", "90", *roles, "--json", CUDA_VISIBLE_DEVICES=""
    )
    assert outcome.code == 0, outcome
    assert {role: outcome.json[role]["chosen"] for role in ("prefill", "decode")} == chosen


def test_auto_takes_it_for_graphs_that_flashattention_cannot_capture_without_its_library() -> None:
    """D3: in both roles, because requested graphs are checked per role."""
    if requirement_refusal(FA4, "flash_attn.cute") is None:
        pytest.skip("flash-attn-4 is installed, and captures")
    problem = replace(ON_AN_H200, cuda_graph=GraphLevel.UNIFORM)
    chosen = select(load_registry(), BackendRequest(), problem).choices
    assert {role: choice.chosen_name for role, choice in chosen.items()} == {
        Role.PREFILL: "triton_mha",
        Role.DECODE: "triton_mha",
    }


def test_its_counters_are_a_kind_of_memory_of_its_own() -> None:
    """A2"""
    counters = load_registry(environment={}).workspace_kinds["triton-mha-counters"]
    assert counters.value.zeroed and counters.source.distribution == "attnplug-triton-mha"
