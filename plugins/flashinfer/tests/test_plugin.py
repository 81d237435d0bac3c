"""Refusals of the spec, on a machine without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnplug import BackendContext, BackendError, CacheLayout, DType, GraphLevel, Problem, Refusal, Role
from attnplug.host import BackendRequest, load_registry, select
from attnplug_conformance.case import LAYER
from attnplug_flashinfer.backend import FlashInferBackend
from attnplug_flashinfer.kernels import FlashInferLibrary
from attnplug_flashinfer.options import FlashInferOptions
from attnplug_flashinfer.plugin import attnplug_backends
from attnplug_testing.configs import DEEPSEEK_V3, LLAMA_3_8B, read
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelCase, KernelScene, mha

(SPEC,) = attnplug_backends()
BF16, FP16, FP32, FP8 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT8_E4M3
ON_AN_H200 = Problem(read(LLAMA_3_8B), "cuda", 90, BF16, BF16, 64)


def refusals(role: Role | None = Role.DECODE, kernel: str = "auto", **changes: Any) -> list[Refusal]:
    """The reasons against Llama 3 on an H200, with these changes."""
    return SPEC.refusals(replace(ON_AN_H200, **changes), role, FlashInferOptions(kernel))


def with_layers(**changes: Any) -> Any:
    model = read(LLAMA_3_8B)
    return replace(model, layers=tuple(replace(layer, **changes) for layer in model.layers))


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.DRAFT])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": FP16, "kv_dtype": FP16, "page_size": 1},
        {"kv_dtype": FP8, "sm": 80},
        {"layout": CacheLayout.STRIDED, "page_size": 48},
        {"sm": 120},
        {"model": with_layers(sliding_window=100, logit_cap=30.0)},
        {"model": with_layers(head_dim=256, v_head_dim=256)},
        {"cuda_graph": GraphLevel.UNIFORM, "speculative_tokens": 64},
        {"tensor_parallel": 8},
    ],
    ids=["llama", "fp16", "fp8", "strided", "blackwell", "features", "wide", "graphs", "one-kv-head"],
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
            {"model": with_layers(head_dim=96, v_head_dim=96)},
            [("head_dim", [96, 96], [[64, 64], [128, 128], [256, 256]], "decode_attention_backend")],
        ),
        (
            {"model": with_layers(head_dim=192, v_head_dim=128)},
            [("head_dim", [192, 128], [[64, 64], [128, 128], [256, 256]], "decode_attention_backend")],
        ),
        ({"kv_dtype": FP16}, [("kv_dtype", "float16", ["bfloat16", "float8_e4m3fn"], "kv_dtype")]),
        (
            {"cuda_graph": GraphLevel.ALWAYS},
            [("cuda_graph", "ALWAYS", ["NEVER", "DECODE", "UNIFORM"], "cuda_graph")],
        ),
        ({"kernel": "fa3", "sm": 80}, [("kernel", "fa3", ["auto", "fa2"], "flashinfer.kernel")]),
        ({"kernel": "fa3", "kv_dtype": FP8}, [("kernel", "fa3", ["auto", "fa2"], "flashinfer.kernel")]),
    ],
    ids=["cpu", "turing", "dim-96", "192-128", "kv-fp16-with-bf16", "extends", "fa3-on-ampere", "fa3-of-fp8"],
)
def test_it_refuses_with_value_and_what_is_allowed_and_the_setting(
    changes: dict[str, Any], reasons: list[tuple[str, object, object, str]]
) -> None:
    """D3: every reason, and no other."""
    found = refusals(**changes)
    assert [(reason.code, reason.value, reason.allowed, reason.setting) for reason in found] == reasons


def test_sinks_and_trees_and_mla_are_refused() -> None:
    """D3: the library's kernels for pages take no sinks, and its masks for trees cannot be made on the device."""
    assert [reason.code for reason in refusals(model=with_layers(sinks=True))] == ["feature"]
    assert [reason.code for reason in refusals(speculative_tokens=8, speculative_topk=2)] == ["speculation"]
    assert [reason.code for reason in refusals(model=read(DEEPSEEK_V3))] == ["kind"]


def test_auto_takes_others_first() -> None:
    """Installing the plugin changes no choice of auto, as its kernels take a minute to compile."""
    chosen = select(load_registry(), BackendRequest(), replace(ON_AN_H200, cuda_graph=GraphLevel.UNIFORM)).choices
    assert "flashinfer" not in {choice.chosen_name for choice in chosen.values()}


# ---- building it, as if there were a GPU ----


class Properties:
    major, minor, multi_processor_count = 9, 0, 132


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernel names of the wrappers that are made. The GPU is an H200 unless ``Properties`` is changed."""
    names: list[str] = []

    def wrapper(workspace: torch.Tensor, kv_layout: str, backend: str) -> None:
        names.append(backend)

    monkeypatch.setattr(
        "attnplug_flashinfer.backend.load_library", lambda: FlashInferLibrary(wrapper, None, lambda: None)
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    return names


def context(case: KernelCase, kernel: str = "auto") -> BackendContext:
    """Context of the backend for a model with two layer shapes."""
    (given,) = KernelScene(case, "cpu", lambda context: context).made.contexts
    return replace(given, declared=SPEC.capabilities, options=FlashInferOptions(kernel))


@pytest.mark.parametrize(
    ("kernel", "major", "kv_dtype", "prefill"),
    [("auto", 9, BF16, "fa3"), ("auto", 8, BF16, "fa2"), ("auto", 9, FP8, "fa2"), ("fa2", 9, BF16, "fa2")],
)
def test_the_kernel_for_prefill_is_chosen_by_gpu_and_cache(made, monkeypatch, kernel, major, kv_dtype, prefill) -> None:
    monkeypatch.setattr(Properties, "major", major)
    FlashInferBackend(context(mha(((3, 1),), kv_dtype=kv_dtype), kernel))
    assert set(made) == {"fa2", prefill}
    assert len(made) == 2 * len(set(made)), "one wrapper for each kernel and each of two shapes"


@pytest.mark.parametrize(("major", "kv_dtype", "value"), [(8, BF16, "SM 80"), (9, FP8, "float8_e4m3fn")])
def test_a_kernel_that_does_not_fit_is_refused_when_it_is_built_too(made, monkeypatch, major, kv_dtype, value):
    """The host may not know the GPU."""
    monkeypatch.setattr(Properties, "major", major)
    with raises_naming(BackendError, value) as caught:
        FlashInferBackend(context(mha(((3, 1),), kv_dtype=kv_dtype), "fa3"))
    assert caught.value.settings == ("flashinfer.kernel",)


def test_fa3_is_left_alone_where_keys_and_values_have_other_strides(made, monkeypatch) -> None:
    """It would read values by the strides of keys, or raise in the middle of a prefill."""
    given = context(mha(((3, 1),)))
    wide = torch.zeros(*given.pools.mha.values(LAYER).shape[:3], 128, dtype=torch.bfloat16)
    monkeypatch.setattr(given.pools.mha, "values", lambda layer_id: wide[..., :64])
    FlashInferBackend(given)
    assert set(made) == {"fa2"}
    with raises_naming(BackendError, "strides") as caught:
        FlashInferBackend(replace(given, options=FlashInferOptions("fa3")))
    assert caught.value.settings == ("flashinfer.kernel",)


def test_scratch_is_as_much_as_the_model_needs(made) -> None:
    """64 heads over 8: their parts take more than the 128 MiB that FlashInfer recommends."""
    given = context(mha(((3, 1),), heads=64, kv_heads=8, head_dim=128))
    FlashInferBackend(given)
    parts = 4 * 64 * 33 * 128 * 129
    assert 128 << 20 < parts < given.workspace.nbytes <= parts + (1 << 20)
