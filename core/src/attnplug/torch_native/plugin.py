"""Core's own plugin: the default backend, KV formats, scratch memory, devices and tiny models."""

from __future__ import annotations

from collections.abc import Mapping

from attnplug.declare.capabilities import Capabilities
from attnplug.declare.device import DeviceSpec
from attnplug.declare.kv_format import BUILT_IN, SCRATCH, KVFormat, WorkspaceKind
from attnplug.declare.model import AttentionKind, Feature
from attnplug.declare.problem import INVARIANCE, CacheLayout, DType, ExtendPath, Role
from attnplug.declare.spec import BackendSpec
from attnplug.hf.config_keys import TINY_CONFIGS
from attnplug.machine.hardware import CPU, CUDA
from attnplug.registry.loading import hookimpl


@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [
        BackendSpec(
            name="torch_native",
            summary="MHA, GQA and MLA with torch alone: correct everywhere, the reference for the rest",
            contract="1.0",
            factory="attnplug.torch_native.backend:TorchNativeBackend",
            capabilities=Capabilities(
                kinds=frozenset({AttentionKind.MHA, AttentionKind.MLA}),
                devices=None,
                dtypes=frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16}),
                kv_dtypes=None,
                roles=frozenset({Role.PREFILL, Role.DECODE, Role.DRAFT}),
                features=frozenset(Feature) - {Feature.SPARSE, Feature.COMPRESSED},
                max_speculative_tokens=64,
                extras=frozenset({"lse", "out", "sinks"}),
                mla_extend=frozenset(ExtendPath),
                layouts=frozenset(CacheLayout),
                trees=True,
                invariant=frozenset(INVARIANCE),
            ),
        )
    ]


@hookimpl
def attnplug_kv_formats() -> list[KVFormat]:
    return list(BUILT_IN.values())


@hookimpl
def attnplug_workspace_kinds() -> list[WorkspaceKind]:
    return [SCRATCH]


@hookimpl
def attnplug_devices() -> list[DeviceSpec]:
    return [CPU, CUDA]


@hookimpl
def attnplug_tiny_models() -> Mapping[str, Mapping[str, object]]:
    return TINY_CONFIGS
