"""Specs of the plugin: supported problems, and every refusal, before anything is built."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import replace
from typing import Any

import pytest

from attnplug import AttentionKind, BackendError, DType, GraphLevel, Problem, Refusal, RefusalCode, Role
from attnplug_hybrid_linear.plugin import attnplug_backends
from attnplug_testing.command import Explained
from attnplug_testing.configs import DEEPSEEK_V3, KIMI_LINEAR, NEMOTRON_H_8B, QWEN3_NEXT, read
from attnplug_testing.errors import raises_naming
from attnplug_testing.libraries import install_library

SPECS = {spec.name: spec for spec in attnplug_backends()}
SPEC, FLA = SPECS["torch"], SPECS["fla"]
ON_A_CPU = Problem(read(QWEN3_NEXT), "cpu", None, DType.FLOAT32, DType.FLOAT32, 16)


@pytest.mark.parametrize("config", [QWEN3_NEXT, KIMI_LINEAR, NEMOTRON_H_8B], ids=lambda config: config["model_type"])
@pytest.mark.parametrize(("device", "sm"), [("cpu", None), ("cuda", 75), ("cuda", 90)])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16])
def test_it_serves_the_linear_layers_of_hybrid_models(config, device, sm, dtype) -> None:
    """A7, D3"""
    problem = replace(ON_A_CPU, model=read(config), device=device, sm=sm, dtype=dtype, kv_dtype=dtype)
    assert SPEC.refusals(problem, Role.LINEAR) == []


def test_it_serves_every_linear_kind_and_no_other() -> None:
    """A7"""
    families = {"gdn", "kda", "lightning", "mamba2", "short_conv"}
    assert {str(kind) for kind in SPEC.capabilities.kinds} == families
    assert {kind for kind in AttentionKind if kind.is_linear} == SPEC.capabilities.kinds


def test_the_type_of_a_cache_it_does_not_read_is_no_reason() -> None:
    """D3: together with an MLA backend with an fp8 cache."""
    assert SPEC.refusals(replace(ON_A_CPU, kv_dtype=DType.FLOAT8_E4M3), Role.LINEAR) == []


@pytest.mark.parametrize(
    ("role", "changes", "code"),
    [
        (Role.LINEAR, {"cuda_graph": GraphLevel.DECODE, "device": "cuda"}, "cuda_graph"),
        (Role.LINEAR, {"speculative_tokens": 65}, "speculation"),
        (Role.LINEAR, {"dtype": DType.FLOAT8_E4M3}, "dtype"),
        (Role.DECODE, {"model": None}, "role"),
    ],
)
def test_it_refuses(role: Role, changes: dict[str, Any], code: str) -> None:
    """D3"""
    assert [reason.code for reason in SPEC.refusals(replace(ON_A_CPU, **changes), role)] == [code]


def test_full_attention_is_refused() -> None:
    """D3"""
    problem = replace(ON_A_CPU, model=read(DEEPSEEK_V3))
    assert {reason.code for reason in SPEC.refusals(problem, Role.PREFILL)} == {"role", "kind"}


def test_auto_takes_it_for_linear_layers_on_a_cpu(explained: Explained) -> None:
    """D1, D3: and leaves the others to the embedded default."""
    code, answer = explained("--model", "tiny:qwen3_next")
    assert code == 0
    chosen = {role: choice["chosen"] for role, choice in answer.items()}
    assert chosen == {"prefill": "torch_native", "decode": "torch_native", "linear": "torch"}


ON_A_GPU = replace(ON_A_CPU, device="cuda", sm=90, dtype=DType.BFLOAT16, kv_dtype=DType.BFLOAT16)


def _without_library(reasons: list[Refusal]) -> list[Refusal]:
    """Refusals that do not depend on installed libraries."""
    return [reason for reason in reasons if reason.code not in (RefusalCode.REQUIREMENT, "import")]


@pytest.mark.parametrize("config", [QWEN3_NEXT, KIMI_LINEAR, NEMOTRON_H_8B], ids=lambda config: config["model_type"])
@pytest.mark.parametrize("changes", [{}, {"dtype": DType.FLOAT16}, {"sm": 80}, {"cuda_graph": GraphLevel.UNIFORM}])
def test_fla_serves_the_linear_layers_of_hybrid_models(config, changes) -> None:
    """A7, D3"""
    problem = replace(ON_A_GPU, model=read(config), **changes)
    assert _without_library(FLA.refusals(problem, Role.LINEAR)) == []


@pytest.mark.parametrize(
    ("changes", "code", "allowed"),
    [
        ({"device": "cpu", "sm": None}, "device", ["cuda"]),
        ({"sm": 75}, "sm", None),
        ({"dtype": DType.FLOAT32}, "dtype", ["bfloat16", "float16"]),
    ],
)
def test_fla_refuses(changes, code, allowed) -> None:
    """D3: before anything is imported."""
    (reason,) = _without_library(FLA.refusals(replace(ON_A_GPU, **changes), Role.LINEAR))
    assert reason.code == code
    assert allowed is None or sorted(reason.allowed) == allowed


def test_fla_refuses_keys_wider_than_its_kernels_take() -> None:
    """D3"""
    problem = replace(ON_A_GPU, model=read(QWEN3_NEXT | {"linear_key_head_dim": 512}))
    (reason,) = _without_library(FLA.refusals(problem, Role.LINEAR))
    assert (reason.code, reason.value, reason.allowed) == ("key_dim", 512, 256)


def test_a_library_in_pieces_is_a_refusal_and_one_that_fails_to_import_fails_with_the_factorys_module(
    tmp_path, monkeypatch
) -> None:
    """D2, D3: before anything is built."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    install_library(tmp_path, "fla-core", "0.6.9")
    if importlib.util.find_spec("fla") is None:
        (reason,) = FLA.refusals(ON_A_GPU, Role.LINEAR)
        assert (reason.code, reason.value) == ("import", "fla")
    (tmp_path / "fla.py").write_text("raise OSError('libcudart.so.13')")
    importlib.invalidate_caches()
    assert FLA.refusals(ON_A_GPU, Role.LINEAR) == []  # metadata cannot tell
    with raises_naming(BackendError, "fla-core 0.6.9", "OSError: libcudart.so.13", "pip install 'fla-core>=0.6,<0.7'"):
        importlib.import_module(FLA.factory.partition(":")[0])
