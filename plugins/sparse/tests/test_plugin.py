"""The spec of torch_sparse: models that it serves, and models that torch_native serves."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from attnplug import DType, Feature, Problem, RefusalCode, Role
from attnplug.declare.problem import INVARIANCE
from attnplug.host import BackendRequest, load_model, load_registry, select
from attnplug_sparse.plugin import attnplug_backends

(SPEC,) = attnplug_backends()
SPARSE = ("tiny:deepseek_v32", "tiny:glm_moe_dsa", "tiny:deepseek_v4")


def problem(name: str, **changes: object) -> Problem:
    return replace(Problem(load_model(name), "cpu", None, DType.FLOAT32, DType.FLOAT32), **changes)


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_serves_models_with_sparse_and_compressed_layers_whole(name: str, device: str) -> None:
    """D3"""
    sm = 90 if device == "cuda" else None
    for role in (Role.PREFILL, Role.DECODE, Role.DRAFT):
        assert SPEC.refusals(problem(name, device=device, sm=sm), role) == []


@pytest.mark.parametrize("name", SPARSE)
def test_on_a_cpu_auto_chooses_it_for_them_and_torch_native_is_refused_by_the_feature(name: str) -> None:
    """D3"""
    registry = load_registry()
    selection = select(registry, BackendRequest("auto"), problem(name))
    assert {selection.chosen(role).spec.name for role in (Role.PREFILL, Role.DECODE)} == {"torch_sparse"}
    reasons = registry.backends["torch_native"].spec.refusals(problem(name), Role.DECODE)
    assert {reason.value for reason in reasons} <= {Feature.SPARSE.value, Feature.COMPRESSED.value} and reasons


@pytest.mark.parametrize("name", SPARSE)
def test_levels_of_invariance(name: str) -> None:
    """E3: all of them, but those of compressed layers have not been compared on a GPU."""
    levels = frozenset(INVARIANCE)
    assert SPEC.refusals(problem(name, invariant=levels), Role.DECODE) == []
    codes = {each.code for each in SPEC.refusals(problem(name, device="cuda", sm=90, invariant=levels), Role.DECODE)}
    assert codes == ({RefusalCode.INVARIANCE} if name == "tiny:deepseek_v4" else set())
    assert SPEC.refusals(problem(name, device="cuda", sm=90, invariant=frozenset({"run"})), Role.DECODE) == []


def test_a_model_without_such_layers_is_left_to_torch_native() -> None:
    """D3"""
    (reason,) = SPEC.refusals(problem("tiny:deepseek_v3"), Role.DECODE)
    assert (reason.code, reason.setting) == ("feature", "decode_attention_backend")
    selection = select(load_registry(), BackendRequest("auto"), problem("tiny:deepseek_v3"))
    assert selection.chosen(Role.DECODE).spec.name == "torch_native"


def test_its_entry_point_imports_no_torch() -> None:
    """D1"""
    code = "import sys; import attnplug_sparse.plugin, attnplug_sparse.refusals; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
