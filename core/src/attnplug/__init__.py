"""attnplug: attention backends for LLM inference as plugins.

Everything a backend's author needs is importable from here and nothing deeper is promised. Names that need torch
are imported when they are first used: a plugin's entry point, and ``attnplug backends``, load without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from attnplug import interrupt  # noqa: F401 (first of all: what follows takes a tenth of a second)
from attnplug.capabilities import Capabilities
from attnplug.chunks import Chunk, Span, plan_prefix_chunks
from attnplug.claims import Claims, ExtendPath, PageSizes
from attnplug.contract import CONTRACT_VERSION
from attnplug.errors import (
    AttnplugError,
    BackendError,
    HookError,
    PlanError,
    PluginError,
    PluginWarning,
    PoolError,
    UsageError,
    WorkspaceError,
)
from attnplug.hooks import bind_hook
from attnplug.hookspecs import hookimpl
from attnplug.loading import Registered
from attnplug.model import AttentionKind, Feature, LayerSpec, LinearDims, MLADims, ModelSpec
from attnplug.plan import BackendId, ForwardMode, Plan, PlanRecord, claim_plan
from attnplug.problem import DType, GraphLevel, Problem, Role
from attnplug.refusal import Refusal, RefusalCode
from attnplug.registry import Registry, load_registry
from attnplug.requirement import import_library, module_refusal, requirement_refusal
from attnplug.select import BackendRequest, Selection, SelectionError, explain, select
from attnplug.spec import BackendSpec

if TYPE_CHECKING:
    from attnplug.assembly import build_chosen, build_selection, choose_importable
    from attnplug.backend import (
        AttentionBackend,
        BackendContext,
        ChunkPlanning,
        ForwardExtras,
        GraphPlanning,
        Limits,
        LinearBackend,
        LinearHooks,
        Parallel,
        RaggedAttention,
        Serving,
        build_backend,
    )
    from attnplug.batch import ForwardBatch
    from attnplug.context import active_backend, forward_context, plan_forward
    from attnplug.geometry import Geometry
    from attnplug.graphs import Captures, GraphLimits
    from attnplug.kv import (
        KVPools,
        LinearStatePool,
        MHAPool,
        MLAPool,
        OutOfPages,
        PageAllocator,
        PageCopy,
        PageLayout,
        SlotTable,
        split_table,
    )
    from attnplug.linear import LinearAttention, LinearInputs, attend_linear, convolve
    from attnplug.mla import (
        ExtendPolicy,
        MLAAttention,
        MLALayers,
        MLAWeights,
        attend_mla,
        check_lse,
        merge_partial,
    )
    from attnplug.planned import PlannedBackend
    from attnplug.ragged import RaggedCall
    from attnplug.transfer import on_host, to_device
    from attnplug.workspace import (
        CUTE_DSL_SCRATCH,
        SCRATCH,
        TRTLLM_SEMAPHORES,
        Workspace,
        WorkspaceKind,
        WorkspaceOwner,
        WorkspaceUse,
    )
    from attnplug.wrappers import ForwardingBackend, HybridLinearBackend, SplitBackend

_NEEDS_TORCH = {
    "assembly": ("build_chosen", "build_selection", "choose_importable"),
    "backend": (
        "AttentionBackend",
        "BackendContext",
        "ChunkPlanning",
        "ForwardExtras",
        "GraphPlanning",
        "Limits",
        "LinearBackend",
        "LinearHooks",
        "Parallel",
        "RaggedAttention",
        "Serving",
        "build_backend",
    ),
    "batch": ("ForwardBatch",),
    "context": ("active_backend", "forward_context", "plan_forward"),
    "geometry": ("Geometry",),
    "graphs": ("Captures", "GraphLimits"),
    "kv": (
        "KVPools",
        "LinearStatePool",
        "MHAPool",
        "MLAPool",
        "OutOfPages",
        "PageAllocator",
        "PageCopy",
        "PageLayout",
        "SlotTable",
        "split_table",
    ),
    "linear": ("LinearAttention", "LinearInputs", "attend_linear", "convolve"),
    "mla": ("ExtendPolicy", "MLAAttention", "MLALayers", "MLAWeights", "attend_mla", "check_lse", "merge_partial"),
    "planned": ("PlannedBackend",),
    "ragged": ("RaggedCall",),
    "transfer": ("on_host", "to_device"),
    "workspace": (
        "CUTE_DSL_SCRATCH",
        "SCRATCH",
        "TRTLLM_SEMAPHORES",
        "Workspace",
        "WorkspaceKind",
        "WorkspaceOwner",
        "WorkspaceUse",
    ),
    "wrappers": ("ForwardingBackend", "HybridLinearBackend", "SplitBackend"),
}
_MODULE_OF = {name: module for module, names in _NEEDS_TORCH.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'attnplug' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"attnplug.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})


__all__ = [
    "CONTRACT_VERSION",
    "CUTE_DSL_SCRATCH",
    "SCRATCH",
    "TRTLLM_SEMAPHORES",
    "AttentionBackend",
    "AttentionKind",
    "AttnplugError",
    "BackendContext",
    "BackendError",
    "BackendId",
    "BackendRequest",
    "BackendSpec",
    "Capabilities",
    "Captures",
    "Chunk",
    "ChunkPlanning",
    "Claims",
    "DType",
    "ExtendPath",
    "ExtendPolicy",
    "Feature",
    "ForwardBatch",
    "ForwardExtras",
    "ForwardMode",
    "ForwardingBackend",
    "Geometry",
    "GraphLevel",
    "GraphLimits",
    "GraphPlanning",
    "HookError",
    "HybridLinearBackend",
    "KVPools",
    "LayerSpec",
    "Limits",
    "LinearAttention",
    "LinearBackend",
    "LinearDims",
    "LinearHooks",
    "LinearInputs",
    "LinearStatePool",
    "MHAPool",
    "MLAAttention",
    "MLADims",
    "MLALayers",
    "MLAPool",
    "MLAWeights",
    "ModelSpec",
    "OutOfPages",
    "PageAllocator",
    "PageCopy",
    "PageLayout",
    "PageSizes",
    "Parallel",
    "Plan",
    "PlanError",
    "PlanRecord",
    "PlannedBackend",
    "PluginError",
    "PluginWarning",
    "PoolError",
    "Problem",
    "RaggedAttention",
    "RaggedCall",
    "Refusal",
    "RefusalCode",
    "Registered",
    "Registry",
    "Role",
    "Selection",
    "SelectionError",
    "Serving",
    "SlotTable",
    "Span",
    "SplitBackend",
    "UsageError",
    "Workspace",
    "WorkspaceError",
    "WorkspaceKind",
    "WorkspaceOwner",
    "WorkspaceUse",
    "active_backend",
    "attend_linear",
    "attend_mla",
    "bind_hook",
    "build_backend",
    "build_chosen",
    "build_selection",
    "check_lse",
    "choose_importable",
    "claim_plan",
    "convolve",
    "explain",
    "forward_context",
    "hookimpl",
    "import_library",
    "load_registry",
    "merge_partial",
    "module_refusal",
    "on_host",
    "plan_forward",
    "plan_prefix_chunks",
    "requirement_refusal",
    "select",
    "split_table",
    "to_device",
]
