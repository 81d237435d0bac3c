"""What the plugin says before anything is built: what it serves, and every reason why not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from attnplug import AttentionKind, DType, GraphLevel, Problem, Role, load_registry
from attnplug_hybrid_linear.plugin import attnplug_backends
from support.command import in_own_process
from support.configs import DEEPSEEK_V3, KIMI_LINEAR, NEMOTRON_H_8B, QWEN3_NEXT, read

(SPEC,) = attnplug_backends()
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
    """D3: beside an MLA backend with an fp8 cache."""
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


def test_full_attention_is_somebody_elses() -> None:
    """D3"""
    problem = replace(ON_A_CPU, model=read(DEEPSEEK_V3))
    assert {reason.code for reason in SPEC.refusals(problem, Role.PREFILL)} == {"role", "kind"}


def test_nothing_is_imported_to_list_it() -> None:
    code = """
import sys
from attnplug import Problem, Role
from attnplug_hybrid_linear import plugin
(spec,) = plugin.attnplug_backends()
assert not spec.refusals(Problem(device="cpu"), Role.LINEAR)
print([name for name in ("torch", "numpy", "triton", "fla") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_it_is_found_by_its_entry_point() -> None:
    """D1"""
    found = load_registry().backends["torch"]
    assert found.spec == SPEC
    assert found.source.distribution == "attnplug-hybrid-linear"


def test_auto_takes_it_for_linear_layers_on_a_cpu() -> None:
    """D1, D3: and leaves the others to the embedded default."""
    outcome = in_own_process("explain", "--model", "tiny:qwen3_next", "--json", CUDA_VISIBLE_DEVICES="")
    assert outcome.code == 0
    chosen = {role: choice["chosen"] for role, choice in outcome.json.items()}
    assert chosen == {"prefill": "torch_native", "decode": "torch_native", "linear": "torch"}
