"""Specs of the plugin: supported problems, and every refusal, before anything is built."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnplug import CacheLayout, DType, Feature, GraphLevel, ModelSpec, Problem, Refusal, Role, UsageError
from attnplug.declare.installed import installed_version
from attnplug.declare.options import parse_options
from attnplug.sparse import IndexerDims
from attnplug_flashattention.options import FlashAttentionOptions
from attnplug_flashattention.plugin import attnplug_backends
from attnplug_testing.command import Explained
from attnplug_testing.configs import DEEPSEEK_V3, KIMI_LINEAR, LLAMA_3_8B, QWEN3_NEXT, read
from attnplug_testing.errors import raises_naming
from attnplug_testing.libraries import install_library

(SPEC,) = attnplug_backends()
BF16, FP16, FP32, FP8 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT8_E4M3
ON_AN_H200 = Problem(read(LLAMA_3_8B), "cuda", 90, BF16, BF16, 64)


def refusals(role: Role | None = Role.DECODE, **changes: Any) -> list[Refusal]:
    """The reasons against Llama on an H200, with these changes."""
    return SPEC.refusals(replace(ON_AN_H200, **changes), role)


def changed(model: ModelSpec, **changes: Any) -> ModelSpec:
    """The same model, its first layer changed."""
    first, *others = model.layers
    return replace(model, layers=(replace(first, **changes), *others))


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither library is installed, and torch has the kernel. Returns a folder on the path in which to install one."""

    def version(name: str) -> str | None:
        if name == "torch":
            return "2.11.0"
        if name.startswith("flash-attn") and not list(tmp_path.glob(f"{name.replace('-', '_')}-*")):
            return None
        return installed_version(name)

    monkeypatch.setattr("attnplug.declare.installed.installed_version", version)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def fa4(no_library: Path) -> Path:
    install_library(no_library, "flash-attn-4", "4.0.0b36", {"flash_attn.cute.__init__": "raise SystemExit"})
    return no_library


# ---- yes ----


@pytest.mark.parametrize("page_size", [1, 16, 48, 64, 128, 256])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.DRAFT])
def test_it_serves_llama_on_an_h200(role: Role, page_size: int) -> None:
    """D3"""
    assert refusals(role, page_size=page_size) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"sm": 80},
        {"sm": 100},
        {"sm": 120},
        {"dtype": FP16, "kv_dtype": FP16},
        {"model": read(QWEN3_NEXT)},
        {"speculative_tokens": 4},
        {"speculative_tokens": 64, "speculative_topk": 8},
        {"tensor_parallel": 2},
        {"model": changed(read(LLAMA_3_8B), sliding_window=128, sinks=True)},
    ],
    ids=[
        "ampere",
        "blackwell",
        "consumer",
        "fp16",
        "qwen3-next",
        "speculation",
        "trees",
        "ranks",
        "window",
    ],
)
def test_it_serves(changes: dict[str, Any]) -> None:
    """D3: with or without flash-attn-4."""
    assert refusals(**changes) == []


def test_with_flash_attn_4_it_captures_graphs_and_caps_logits(fa4: Path) -> None:
    """D3"""
    model = changed(read(LLAMA_3_8B), logit_cap=50.0)
    assert refusals(cuda_graph=GraphLevel.UNIFORM, model=model) == []


# ---- no ----


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"device": "cpu", "sm": None}, [("device", "cpu", ["cuda"], "device")]),
        ({"sm": 75}, [("sm", 75, "SM 80 or newer", None)]),
        (
            {"dtype": FP32, "kv_dtype": FP32},
            [
                ("dtype", "float32", ["bfloat16", "float16"], "dtype"),
                ("kv_dtype", "float32", ["bfloat16", "float16"], "kv_dtype"),
            ],
        ),
        ({"kv_dtype": FP8}, [("kv_dtype", "float8_e4m3fn", ["bfloat16", "float16"], "kv_dtype")]),
        ({"kv_dtype": FP16}, [("kv_dtype", "float16", ["bfloat16"], "kv_dtype")]),
        ({"speculative_tokens": 65}, [("speculation", 65, 64, "speculative_tokens")]),
        (
            {"model": changed(read(LLAMA_3_8B), indexer=IndexerDims(4, 64, 64))},
            [("feature", "sparse", ["logit_cap", "sinks", "sliding_window"], "decode_attention_backend")],
        ),
    ],
    ids=["cpu", "turing", "fp32", "fp8", "kv-fp16-with-bf16", "speculation", "sparse"],
)
def test_it_refuses_with_value_and_what_is_allowed_and_the_setting(
    changes: dict[str, Any], reasons: list[tuple[str, object, object, str]]
) -> None:
    """D3: every reason, and no other."""
    found = refusals(**changes)
    assert [(reason.code, reason.value, reason.allowed, reason.setting) for reason in found] == reasons


@pytest.mark.parametrize("dims", [(72, 72), (320, 320), (64, 128), (8, 8)])
def test_heads_of_other_widths_are_refused_once(dims: tuple[int, int]) -> None:
    """D3"""
    layers = tuple(replace(layer, head_dim=dims[0], v_head_dim=dims[1]) for layer in read(LLAMA_3_8B).layers)
    (reason,) = refusals(model=replace(read(LLAMA_3_8B), layers=layers))
    assert (reason.code, reason.value) == ("head_dim", list(dims))
    assert reason.allowed == "multiples of 16 up to 256"


@pytest.mark.parametrize("role", [Role.DECODE, Role.DRAFT])
def test_mla_is_prefilled_here_and_decoded_by_another_backend(role: Role) -> None:
    """D3: MLA roles other than prefill are refused with the setting of that role."""
    assert refusals(Role.PREFILL, model=read(DEEPSEEK_V3)) == []
    assert refusals(Role.PREFILL, model=read(KIMI_LINEAR)) == []
    (reason,) = refusals(role, model=read(DEEPSEEK_V3))
    assert (reason.code, reason.value, reason.allowed, reason.setting) == ("mla_role", role, ["prefill"], role.setting)


def test_mla_with_a_window_or_sinks_is_refused() -> None:
    """D3"""
    found = refusals(Role.PREFILL, model=changed(read(DEEPSEEK_V3), sliding_window=64, sinks=True))
    assert [(reason.code, reason.value) for reason in found] == [
        ("feature", Feature.SINKS),
        ("feature", Feature.SLIDING_WINDOW),
    ]


# ---- the library ----


def test_what_needs_flash_attn_4_is_refused_without_it(no_library: Path) -> None:
    """D3: with its error, and with how to get it."""
    model = changed(read(LLAMA_3_8B), logit_cap=50.0)
    found = refusals(cuda_graph=GraphLevel.DECODE, model=model)
    assert [(reason.code, reason.value) for reason in found] == [("feature", "logit_cap"), ("cuda_graph", "DECODE")]
    for reason in found:
        assert "flash-attn-4" in reason.message
        assert reason.advice == "pip install 'flash-attn-4>=4.0.0b36'"


def test_a_flash_attn_4_that_is_too_old_or_in_pieces_is_none(no_library: Path) -> None:
    """D3: such a version counts as missing, and the reason names the fault."""
    install_library(no_library, "flash-attn-4", "4.0.0b1", {"flash_attn.cute.__init__": ""})
    (reason,) = refusals(cuda_graph=GraphLevel.DECODE)
    assert "4.0.0b1" in reason.message and reason.advice == "pip install 'flash-attn-4>=4.0.0b36'"
    (no_library / "flash_attn_4-4.0.0b1.dist-info").rename(no_library / "flash_attn_4-4.0.0b36.dist-info")
    (no_library / "flash_attn_4-4.0.0b36.dist-info" / "METADATA").write_text("Name: flash-attn-4\nVersion: 4.0.0b36\n")
    assert refusals(cuda_graph=GraphLevel.DECODE) == []
    (no_library / "flash_attn" / "cute" / "__init__.py").unlink()
    (no_library / "flash_attn" / "cute").rmdir()
    (reason,) = refusals(cuda_graph=GraphLevel.DECODE)
    assert "flash_attn.cute" in reason.message
    assert reason.advice == "pip install --force-reinstall 'flash-attn-4>=4.0.0b36'"


def test_graphs_of_an_mla_decode_need_no_flash_attn_4_for_the_prefill(no_library: Path) -> None:
    """D3: nothing of the prefill is captured. A verify would be, which the level UNIFORM includes."""
    assert refusals(Role.PREFILL, model=read(DEEPSEEK_V3), cuda_graph=GraphLevel.DECODE) == []
    (reason,) = refusals(Role.PREFILL, model=read(DEEPSEEK_V3), cuda_graph=GraphLevel.UNIFORM)
    assert (reason.code, reason.value, reason.allowed) == ("cuda_graph", "UNIFORM", ["NEVER", "DECODE"])
    assert reason.setting == "cuda_graph"


def test_flash_attn_2_caps_logits_where_flash_attn_4_cannot(no_library: Path) -> None:
    """D3: on any GPU that it supports. If it is missing and flash-attn-4 does not support the GPU, the advice is to
    install it."""
    model = changed(read(LLAMA_3_8B), logit_cap=50.0)
    (reason,) = refusals(model=model, sm=80)
    assert (reason.code, reason.value) == ("feature", "logit_cap")
    assert reason.advice == "pip install 'flash-attn<3,>=2.8'"
    modules = {"flash_attn.__init__": "raise SystemExit", "flash_attn.flash_attn_interface": ""}
    install_library(no_library, "flash-attn", "2.8.3", modules)
    assert refusals(model=model, sm=80) == refusals(model=model, sm=90) == []
    assert [reason.code for reason in refusals(model=model, cuda_graph=GraphLevel.DECODE)] == ["cuda_graph"]


def test_what_flash_attn_4_is_not_for_is_not_to_be_installed(fa4: Path) -> None:
    """D3: the GPU is the reason, not the library."""
    (reason,) = refusals(cuda_graph=GraphLevel.DECODE, sm=80)
    assert "SM 80" in reason.message
    assert (reason.setting, reason.advice) == ("cuda_graph", None)


# ---- options ----


def test_a_negative_number_of_splits_is_refused() -> None:
    """D3"""
    with raises_naming(UsageError, "most_parts=-1"):
        parse_options(SPEC.name, SPEC.options, {"most_parts": "-1"})


def kernel_refusals(kernel: str, **changes: Any) -> list[tuple[str, str | None, object]]:
    """Code, setting and value of the refusals of a kernel for Llama on an H200, with these changes."""
    options = FlashAttentionOptions(kernel=kernel)  # type: ignore[arg-type]
    found = SPEC.refusals(replace(ON_AN_H200, **changes), Role.DECODE, options)
    return [(reason.code, reason.setting, reason.value) for reason in found]


@pytest.mark.parametrize(
    ("kernel", "changes", "code", "value"),
    [
        ("fa4", {"sm": 80}, "kernel", "fa4"),
        ("fa2", {}, "requirement", "fa2"),
        ("torch", {"cuda_graph": GraphLevel.DECODE}, "cuda_graph", "DECODE"),
        ("torch", {"model": changed(read(LLAMA_3_8B), logit_cap=50.0)}, "feature", "logit_cap"),
    ],
)
def test_a_kernel_that_does_not_suit_is_refused_before_anything_is_built(
    fa4: Path, kernel: str, changes: dict[str, Any], code: str, value: str
) -> None:
    """D3: the refusal names the option that requests the kernel."""
    assert kernel_refusals(kernel, **changes) == [(code, "flashattention.kernel", value)]


def test_a_kernel_whose_library_is_not_installed_is_refused_with_what_to_install(no_library: Path) -> None:
    """D3"""
    (reason,) = SPEC.refusals(ON_AN_H200, Role.DECODE, FlashAttentionOptions(kernel="fa4"))
    assert (reason.code, reason.advice) == ("requirement", "pip install 'flash-attn-4>=4.0.0b36'")


@pytest.mark.parametrize("layout", [CacheLayout.HEAD_MAJOR, CacheLayout.STRIDED])
def test_pages_that_flash_attn_4_reads_in_parts_have_evenly_spaced_tokens(layout: CacheLayout, fa4: Path) -> None:
    """D3: the kernel reads pages of 128 tokens as smaller ones. Other pages and kernels take any layout."""
    assert kernel_refusals("auto", layout=layout, page_size=128) == [("layout", "page_size", layout)]
    assert kernel_refusals("torch", layout=layout, page_size=128) == []
    assert kernel_refusals("fa4", layout=layout, page_size=64) == []


def test_kernels_that_suit_are_not_refused(fa4: Path) -> None:
    """D3"""
    assert kernel_refusals("fa4", cuda_graph=GraphLevel.UNIFORM) == []
    assert kernel_refusals("torch") == kernel_refusals("auto") == []


# ---- installed ----


def test_auto_takes_it_on_an_h200(explained: Explained, tmp_path: Path) -> None:
    """D1, D3: the answer needs no GPU."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    common = ("--model", str(tmp_path), "--sm", "90", "--dtype", "bf16")
    code, roles = explained(*common, "--cuda-graph", "never")
    assert code == 0
    assert {choice["chosen"] for choice in roles.values()} == {"flashattention"}


def test_roles_of_mla_are_divided(explained: Explained, tmp_path: Path) -> None:
    """D3: this backend prefills and another one decodes. A request for both roles is refused with the reason and the
    alternative."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    common = ("--model", str(tmp_path), "--sm", "90", "--dtype", "bf16")
    code, roles = explained(*common, "--prefill-attention-backend", "flashattention")
    assert code == 0
    assert {role: choice["chosen"] for role, choice in roles.items()} == {
        "prefill": "flashattention",
        "decode": "flashinfer_mla",
    }
    code, roles = explained(*common, "--attention-backend", "flashattention")
    assert code == 1
    assert roles["prefill"]["chosen"] == "flashattention"
    (reasons,) = (c["refusals"] for c in roles["decode"]["candidates"] if c["name"] == "flashattention")
    assert [reason["code"] for reason in reasons] == ["mla_role"]
