"""Refusals of the spec, on a machine without a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnplug import BackendError, DType, GraphLevel, ModelSpec, Problem, Refusal, Role
from attnplug.sparse import IndexerDims
from attnplug_flashmla import kernels
from attnplug_flashmla.backend import FlashMLABackend
from attnplug_flashmla.plugin import attnplug_backends
from attnplug_testing.command import Explained
from attnplug_testing.configs import DEEPSEEK_V3, KIMI_LINEAR, read
from attnplug_testing.libraries import install_library

SPEC, SPARSE = attnplug_backends()
BF16, FP16, FP32, FP8 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT8_E4M3
ON_AN_H200 = Problem(read(DEEPSEEK_V3), "cuda", 90, BF16, BF16, 64)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install a stand-in for the library with the right version, which raises when it is imported."""
    install_library(tmp_path, "sgl-flash-mla", "1.0.0", {"flash_mla": "raise OSError('libcudart.so.13')"})
    monkeypatch.syspath_prepend(tmp_path)
    kernels.load_library.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_mla", None)  # so that what a test imports by this name goes with it
    del sys.modules["flash_mla"]
    yield tmp_path
    kernels.load_library.cache_clear()


def refusals(role: Role | None = Role.DECODE, **changes: Any) -> list[Refusal]:
    """The reasons against DeepSeek-V3 on an H200, with these changes."""
    return SPEC.refusals(replace(ON_AN_H200, **changes), role)


# ---- yes ----


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": FP16, "kv_dtype": FP16},
        {"page_size": 128},
        {"model": read(KIMI_LINEAR)},
        {"cuda_graph": GraphLevel.UNIFORM, "speculative_tokens": 8},
        {"tensor_parallel": 8},
        {"tensor_parallel": 128},
    ],
    ids=["deepseek", "fp16", "pages-of-128", "kimi", "graphs", "16-heads", "1-head"],
)
def test_it_serves(changes: dict[str, Any]) -> None:
    """D3"""
    assert refusals(**changes) == []


# ---- no ----


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"device": "cpu", "sm": None}, [("device", "cpu", ["cuda"], "device")]),
        ({"sm": 80}, [("sm", 80, "SM 90", None)]),
        ({"sm": 100}, [("sm", 100, "SM 90", None)]),
        (
            {"model": read(DEEPSEEK_V3, kv_lora_rank=256)},
            [("mla_dims", [256, 64], [[512, 64]], "decode_attention_backend")],
        ),
        (
            {"dtype": FP32, "kv_dtype": FP32},
            [
                ("dtype", "float32", ["bfloat16", "float16"], "dtype"),
                ("kv_dtype", "float32", ["bfloat16", "float16"], "kv_dtype"),
            ],
        ),
        ({"kv_dtype": FP8}, [("kv_dtype", "float8_e4m3fn", ["bfloat16", "float16"], "kv_dtype")]),
        ({"kv_dtype": FP16}, [("kv_dtype", "float16", ["bfloat16"], "kv_dtype")]),
        ({"page_size": 32}, [("page_size", 32, [64], "page_size")]),
        ({"page_size": 96}, [("page_size", 96, [64], "page_size")]),
        (
            {"model": read(DEEPSEEK_V3, num_attention_heads=256, num_key_value_heads=256)},
            [("heads", 256, 128, "tensor_parallel")],
        ),
        ({"speculative_tokens": 9}, [("speculation", 9, 8, "speculative_tokens")]),
        (
            {"cuda_graph": GraphLevel.ALWAYS},
            [("cuda_graph", "ALWAYS", ["NEVER", "DECODE", "UNIFORM"], "cuda_graph")],
        ),
    ],
    ids=[
        "cpu",
        "ampere",
        "blackwell",
        "latent-256",
        "fp32",
        "fp8",
        "kv-fp16-with-bf16",
        "pages-of-32",
        "pages-of-96",
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


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DRAFT])
def test_other_roles_are_other_backends(role: Role) -> None:
    """D3"""
    (reason,) = refusals(role)
    assert (reason.code, reason.allowed, reason.setting) == ("role", ["decode"], f"{role}_attention_backend")


def test_layers_of_different_heads_are_refused_with_how_many() -> None:
    """D3: one schedule serves all layers."""
    model = read(DEEPSEEK_V3)
    first, *others = model.layers
    (reason,) = refusals(model=replace(model, layers=(replace(first, num_heads=64), *others)))
    assert (reason.code, reason.value) == ("layers", {"num_heads": [64, 128]})


# ---- sparse models ----


@pytest.fixture(scope="module")
def sparse_model() -> ModelSpec:
    """DeepSeek-V3.2 as attention sees it."""
    model = read(DEEPSEEK_V3)
    index = IndexerDims(heads=64, head_dim=128, topk=2048)
    return replace(model, layers=tuple(replace(layer, indexer=index) for layer in model.layers))


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.DRAFT])
@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 64},
        {"kv_dtype": "fp8_ds_mla", "index_dtype": FP8},
        {"tensor_parallel": 8, "cuda_graph": GraphLevel.UNIFORM, "speculative_tokens": 8, "exact_lengths": False},
    ],
    ids=["bf16", "fp8", "graphs"],
)
def test_a_sparse_model_is_served_in_every_role(sparse_model: ModelSpec, changes: dict[str, Any], role: Role) -> None:
    """A10, D3"""
    assert SPARSE.refusals(replace(ON_AN_H200, model=sparse_model, **changes), role) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sm": 80}, ("sm", 80, "SM 90", None)),
        ({"sm": 100}, ("sm", 100, "SM 90", None)),
        ({"dtype": FP16}, ("dtype", "float16", ["bfloat16"], "dtype")),
        ({"kv_dtype": FP8}, ("kv_dtype", "float8_e4m3fn", ["bfloat16", "fp8_ds_mla"], "kv_dtype")),
        ({"index_dtype": FP16}, ("index_dtype", "float16", ["bfloat16", "float8_e4m3fn"], "index_dtype")),
        ({"page_size": 32}, ("page_size", 32, [64], "page_size")),
        ({"speculative_tokens": 4, "speculative_topk": 2}, ("speculation", 2, 1, "speculative_topk")),
    ],
    ids=["ampere", "blackwell", "fp16", "fp8", "index", "pages", "trees"],
)
def test_what_the_sparse_kernels_do_not_take_is_refused(
    sparse_model: ModelSpec, changes: dict[str, Any], reason: tuple[str, object, object, str]
) -> None:
    """D3: every reason, and no other."""
    (found,) = SPARSE.refusals(replace(ON_AN_H200, model=sparse_model, **changes), Role.DECODE)
    assert (found.code, found.value, found.allowed, found.setting) == reason


def test_an_index_that_cannot_be_scored_is_refused(sparse_model: ModelSpec) -> None:
    """D3"""
    index = IndexerDims(heads=64, head_dim=128, topk=9000)
    model = replace(sparse_model, layers=tuple(replace(layer, indexer=index) for layer in sparse_model.layers))
    (found,) = SPARSE.refusals(replace(ON_AN_H200, model=model), Role.DECODE)
    assert (found.code, found.value, found.allowed) == ("feature", 9000, 8192)


def test_dense_layers_are_refused_by_how_many() -> None:
    """D3"""
    (found,) = SPARSE.refusals(ON_AN_H200, Role.DECODE)
    assert (found.code, found.value) == ("feature", list(range(61)))


def test_sparse_layers_are_not_for_the_dense_backend(sparse_model: ModelSpec) -> None:
    """A10, D3"""
    (found,) = refusals(model=sparse_model)
    assert (found.code, found.value) == ("feature", "sparse")


# ---- the library ----


def build(installed: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> Any:
    """Build by the spec's factory with a library of that source."""
    (installed / "flash_mla.py").write_text(source)
    module, _, name = SPEC.factory.partition(":")
    monkeypatch.delitem(sys.modules, module, raising=False)
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def has_legacy(): return False", "SM 90"),
        ("__version__ = '2026.9'", "has no attribute 'has_legacy'"),
    ],
    ids=["no legacy kernels", "another package of that name"],
)
def test_a_library_that_cannot_be_used_fails_with_the_factorys_module(
    installed: Path, monkeypatch: pytest.MonkeyPatch, source: str, text: str
) -> None:
    """D2: before anything is built."""
    with pytest.raises(BackendError) as caught:
        build(installed, monkeypatch, source)
    assert "sgl-flash-mla 1.0.0" in str(caught.value)
    assert text in str(caught.value) and "pip install 'sgl-flash-mla>=1.0,<2'" in str(caught.value)


def test_a_library_with_the_kernels_is_fine(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1"""
    names = ("flash_mla_with_kvcache", "get_mla_decoding_metadata", "get_mla_metadata", "flash_mla_sparse_fwd")
    source = "\n".join(["def has_legacy(): return True", *(f"{name} = None" for name in names)])
    assert build(installed, monkeypatch, source) is FlashMLABackend


# ---- installed ----


def test_it_is_asked_for_as_a_role_beside_a_backend_for_prefill(explained: Explained, installed: Path) -> None:
    """D1, D3: the answer needs no GPU, and the page size is one that both read."""
    (installed / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    roles = ("--prefill-attention-backend", "flashinfer_mla", "--decode-attention-backend", "flashmla")
    code, answer = explained("--model", str(installed), "--sm", "90", *roles)
    assert code == 0
    assert {role: choice["chosen"] for role, choice in answer.items()} == {
        "prefill": "flashinfer_mla",
        "decode": "flashmla",
    }
