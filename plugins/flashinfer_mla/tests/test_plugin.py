"""Specs of the plugin: supported problems, and every refusal, before anything is built."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnplug import DType, GraphLevel, ModelSpec, Problem, Refusal, Role, UsageError
from attnplug.declare.options import parse_options
from attnplug_flashinfer_mla.options import FlashInferMLAOptions
from attnplug_flashinfer_mla.plugin import attnplug_backends
from attnplug_testing.command import Explained
from attnplug_testing.configs import DEEPSEEK_V3, KIMI_LINEAR, read
from attnplug_testing.errors import raises_naming
from attnplug_testing.libraries import install_library

(SPEC,) = attnplug_backends()
BF16, FP16, FP32, FP8 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT8_E4M3
ON_AN_H200 = Problem(read(DEEPSEEK_V3), "cuda", 90, BF16, BF16, 64)


def refusals(role: Role | None = Role.DECODE, **changes: Any) -> list[Refusal]:
    """The reasons against DeepSeek-V3 on an H200, with these changes."""
    return SPEC.refusals(replace(ON_AN_H200, **changes), role)


def uneven(model: ModelSpec) -> ModelSpec:
    """The same model with a scale of 0.5 in its first layer."""
    first, *others = model.layers
    return replace(model, layers=(replace(first, scale=0.5), *others))


# ---- yes ----


@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.DRAFT])
def test_it_serves_deepseek_v3_on_an_h200(role: Role, page_size: int, kv_dtype: DType) -> None:
    """D3: decided by installed packages, without a GPU."""
    assert refusals(role, page_size=page_size, kv_dtype=kv_dtype) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"sm": 80},
        {"sm": 100},
        {"sm": 120},
        {"dtype": FP16, "kv_dtype": FP16},
        {"model": read(KIMI_LINEAR)},
        {"cuda_graph": GraphLevel.UNIFORM, "speculative_tokens": 4},
        {"tensor_parallel": 8},
    ],
    ids=["ampere", "blackwell", "consumer", "fp16", "kimi", "graphs", "ranks"],
)
def test_it_serves(changes: dict[str, Any]) -> None:
    """D3"""
    assert refusals(**changes) == []


# ---- no ----


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"device": "cpu", "sm": None}, [("device", "cpu", ["cuda"], "device")]),
        ({"sm": 75}, [("sm", 75, "SM 80 or newer", None)]),
        (
            {"model": read(DEEPSEEK_V3, kv_lora_rank=32, qk_rope_head_dim=8)},
            [("mla_dims", [32, 8], [[512, 64]], "decode_attention_backend")],
        ),
        (
            {"model": read(DEEPSEEK_V3, kv_lora_rank=256)},
            [("mla_dims", [256, 64], [[512, 64]], "decode_attention_backend")],
        ),
        (
            {"dtype": FP32, "kv_dtype": FP32},
            [
                ("dtype", "float32", ["bfloat16", "float16"], "dtype"),
                ("kv_dtype", "float32", ["bfloat16", "float16", "float8_e4m3fn"], "kv_dtype"),
            ],
        ),
        ({"dtype": FP16, "kv_dtype": FP8}, [("dtype", "float16", ["bfloat16"], "dtype")]),
        ({"kv_dtype": FP8, "sm": 80}, [("kv_dtype", "float8_e4m3fn", ["bfloat16"], "kv_dtype")]),
        ({"kv_dtype": FP8, "sm": 100}, [("kv_dtype", "float8_e4m3fn", ["bfloat16"], "kv_dtype")]),
        ({"kv_dtype": FP16}, [("kv_dtype", "float16", ["bfloat16", "float8_e4m3fn"], "kv_dtype")]),
        (
            {"model": read(DEEPSEEK_V3, num_attention_heads=256, num_key_value_heads=256)},
            [("heads", 256, 128, "tensor_parallel")],
        ),
        ({"speculative_tokens": 65}, [("speculation", 65, 64, "speculative_tokens")]),
        (
            {"cuda_graph": GraphLevel.ALWAYS},
            [("cuda_graph", "ALWAYS", ["NEVER", "DECODE", "UNIFORM"], "cuda_graph")],
        ),
    ],
    ids=[
        "cpu",
        "turing",
        "tiny",
        "latent-256",
        "fp32",
        "fp8-with-fp16",
        "fp8-on-ampere",
        "fp8-on-blackwell",
        "kv-fp16-with-bf16",
        "256-heads",
        "speculation",
        "graphs-of-prefill",
    ],
)
def test_it_refuses_with_value_and_what_is_allowed_and_the_setting(
    changes: dict[str, Any], reasons: list[tuple[str, object, object, str]]
) -> None:
    """D3: every reason, and no other."""
    found = refusals(**changes)
    assert [(reason.code, reason.value, reason.allowed, reason.setting) for reason in found] == reasons


def test_layers_that_differ_are_refused_with_how() -> None:
    """D3: one plan serves all layers, the scale included."""
    (reason,) = refusals(model=uneven(read(DEEPSEEK_V3)))
    assert (reason.code, list(reason.value)) == ("layers", ["scale"])


# ---- the library ----


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One on the path before the library that is installed here."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("version", "reads"), [("0.6.12", False), ("0.6.13.post1", False), ("0.6.14", True)])
def test_a_library_that_reads_no_fp8_is_a_refusal_with_the_one_that_does(
    folder: Path, version: str, reads: bool
) -> None:
    """D3"""
    install_library(folder, "flashinfer-python", version)
    assert refusals() == []
    found = refusals(kv_dtype=FP8)
    if not reads:
        (reason,) = found
        assert (reason.code, reason.value) == ("kv_dtype", "float8_e4m3fn")
        assert version in reason.message
        assert (reason.setting, reason.advice) == ("kv_dtype", "pip install 'flashinfer-python<0.8,>=0.6.14'")
    else:
        assert found == []


# ---- options ----


def test_workspace_of_no_bytes_is_refused() -> None:
    """D3"""
    with raises_naming(UsageError, "workspace_mib=0"):
        parse_options(SPEC.name, SPEC.options, {"workspace_mib": "0"})


def kernel_refusals(kernel: str, **changes: Any) -> list[Refusal]:
    """Refusals of a kernel for DeepSeek-V3, without YaRN's scale, on a B200."""
    plain = read(DEEPSEEK_V3, rope_scaling=None)
    problem = replace(ON_AN_H200, **{"model": plain, "sm": 100, **changes})
    options = FlashInferMLAOptions(kernel=kernel)  # type: ignore[arg-type]
    found = SPEC.refusals(problem, Role.DECODE, options)
    assert all(reason.setting == "flashinfer_mla.kernel" for reason in found)
    return found


@pytest.mark.parametrize(
    ("kernel", "changes", "code", "value"),
    [
        ("fa3", {}, "kernel", "SM 100"),
        ("cutlass", {"sm": 90}, "kernel", "SM 90"),
        ("cutlass", {"cuda_graph": GraphLevel.DECODE}, "cuda_graph", "DECODE"),
        ("cutlass", {"tensor_parallel": 8}, "kernel", "16"),
        ("cutlass", {"page_size": 96}, "kernel", "96"),
        ("cutlass", {"model": read(DEEPSEEK_V3)}, "kernel", "0.072169"),
    ],
)
def test_a_kernel_that_does_not_suit_is_refused_before_anything_is_built(
    folder: Path, kernel: str, changes: dict[str, Any], code: str, value: str
) -> None:
    """D3: the refusal names the option that requests the kernel."""
    install_library(folder, "flashinfer-python", "0.7.0")
    (reason,) = kernel_refusals(kernel, **changes)
    assert reason.code == code and value in reason.message
    assert kernel_refusals("auto", **changes) == []


def test_a_library_that_does_not_plan_cutlass_is_a_refusal_with_the_one_that_does(folder: Path) -> None:
    """D3"""
    install_library(folder, "flashinfer-python", "0.7.0")
    assert kernel_refusals("cutlass") == []
    (folder / "flashinfer_python-0.7.0.dist-info" / "METADATA").write_text("Name: flashinfer-python\nVersion: 0.6.18\n")
    (folder / "flashinfer_python-0.7.0.dist-info").rename(folder / "flashinfer_python-0.6.18.dist-info")
    (reason,) = kernel_refusals("cutlass")
    assert (reason.code, reason.value) == ("kernel", "cutlass") and "0.6.18" in reason.message


# ---- installed ----


def test_asked_for_on_a_cpu_it_says_why_not(explained: Explained) -> None:
    """D3"""
    code, roles = explained("--model", "tiny:deepseek_v3", "--attention-backend", "flashinfer_mla", "--device", "cpu")
    assert code == 1
    for role in ("prefill", "decode"):
        assert roles[role]["chosen"] is None
        (reasons,) = (c["refusals"] for c in roles[role]["candidates"] if c["name"] == "flashinfer_mla")
        assert [reason["code"] for reason in reasons] == ["device", "dtype", "kv_dtype", "mla_dims"]
        assert all(reason["option"] and reason["allowed"] for reason in reasons)


def test_auto_takes_it_on_an_h200(explained: Explained, tmp_path: Path) -> None:
    """D1, D3: the answer needs no GPU."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    code, roles = explained("--model", str(tmp_path), "--sm", "90", "--kv-dtype", "fp8")
    assert code == 0
    assert {choice["chosen"] for choice in roles.values()} == {"flashinfer_mla"}
