"""The modules that are built before the first request are those that FlashInfer's planning loads (E1)."""

from __future__ import annotations

import importlib
import inspect
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnplug import AttentionKind, DType, ExtendPath, LayerSpec, ModelSpec, Problem, RaggedCall, Role
from attnplug_flashinfer_mla import jit_modules, kernels
from attnplug_flashinfer_mla.options import FlashInferMLAOptions, KernelName
from recorded_library import SHAPE, Event, make, paged_call


class Requested(Exception):
    """Raised instead of compiling a module, with the arguments of its loader."""


def requesting(*arguments: Any) -> None:
    raise Requested(*arguments)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FlashInfer's wrappers plan without a GPU until they load a module."""
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **named: real(*shape, **named))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for references in jit_modules.LOADERS.values():
        for reference in references:
            module, _, name = reference.partition(":")
            with suppress(ImportError, AttributeError):
                monkeypatch.setattr(importlib.import_module(module), name, requesting)


def listed(kind: str, problem: Problem, options: FlashInferMLAOptions) -> tuple[Any, ...]:
    """Arguments of the only listed module of a kind."""
    builds = jit_modules.kernel_builds(problem, frozenset({Role.PREFILL, Role.DECODE}), options)
    (build,) = [build for build in builds if build.name.startswith(kind)]
    with pytest.raises(Requested) as caught:
        build.build()
    return caught.value.args


def problem(sm: int, kv_dtype: DType = DType.BFLOAT16) -> Problem:
    layer = LayerSpec(0, AttentionKind.MLA, 128, 1, 576, 128, SHAPE.scale, mla=SHAPE.dims)
    return Problem(ModelSpec("m", "m", (layer,), 4096), "cuda", sm, DType.BFLOAT16, kv_dtype)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(("sm", "kernel"), [(90, "fa3"), (80, "fa2")])
def test_the_modules_that_planning_asks_for_are_those_that_are_built(sm: int, kernel: str) -> None:
    """E1: FlashInfer's own planning decides, by the arguments of its loaders."""
    options, made = FlashInferMLAOptions(), make(kernel)
    ragged = RaggedCall.of(0, [4], [4], causal=True, device=torch.device("cpu"))
    with pytest.raises(Requested) as asked:
        made.ragged().plan(ragged)
    assert asked.value.args == listed("batch_prefill", problem(sm), options)
    if kernels.load_library().metadata is None:  # newer versions check for a GPU first
        with pytest.raises(Requested) as asked:
            made.paged(decode=True).plan(paged_call(causal=False))
        assert asked.value.args == listed("batch_mla", problem(sm), options)


@pytest.mark.parametrize(("sm", "kernel"), [(80, "auto"), (90, "auto"), (100, "cutlass")])
def test_the_functions_that_build_modules_exist_and_take_these_arguments(
    sm: int, kernel: KernelName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E1: an empty disk cache has none of them, and generating their sources needs neither GPU nor compiler."""
    from flashinfer.jit import core, env

    monkeypatch.setattr(core.current_compilation_context, "TARGET_CUDA_ARCHS", {(sm // 10, "0a")})
    for folder in ("FLASHINFER_GEN_SRC_DIR", "FLASHINFER_JIT_DIR"):
        monkeypatch.setattr(env, folder, tmp_path / folder)
    options = FlashInferMLAOptions(kernel=kernel)
    builds = jit_modules.kernel_builds(problem(sm), frozenset({Role.PREFILL, Role.DECODE}), options)
    assert len(builds) == (3 if kernel == "cutlass" else 2)
    assert not any(build.is_cached() for build in builds)
    for kind, references in jit_modules.LOADERS.items():
        given = next((build.build.args[1:] for build in builds if build.build.args[0] == kind), None)
        if given is not None:
            inspect.signature(jit_modules._resolve(references)).bind(*given)


@pytest.mark.parametrize(
    ("roles", "options", "path", "kinds"),
    [
        ({Role.DECODE}, {}, None, ["batch_mla"]),
        ({Role.PREFILL}, {}, ExtendPath.ABSORBED, ["batch_mla"]),
        ({Role.PREFILL}, {"disable_ragged": True}, None, ["batch_mla"]),
        ({Role.DRAFT}, {}, None, ["batch_mla", "batch_prefill"]),
    ],
)
def test_only_modules_that_a_request_can_reach_are_built(
    roles: set[Role], options: dict[str, Any], path: ExtendPath | None, kinds: list[str]
) -> None:
    """E1: each takes up to a minute."""
    given = replace(problem(90), mla_extend=path)
    builds = jit_modules.kernel_builds(given, frozenset(roles), FlashInferMLAOptions(**options))
    assert [build.name.partition("_fa")[0] for build in builds] == kinds
