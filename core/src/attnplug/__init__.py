"""attnplug: attention backends for LLM inference as plugins.

This is the face for authors of backends: what they need is importable from here. ``attnplug.host`` is the one for
engines and bridges. Nothing deeper is promised. A name is imported when it is first used: a plugin's entry point, and
``attnplug backends``, load without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.faces import face

if TYPE_CHECKING:
    from attnplug.author.attention import PlannedAttention as PlannedAttention
    from attnplug.author.graphs import GraphLimits as GraphLimits
    from attnplug.author.planned import PlannedBackend as PlannedBackend
    from attnplug.author.served_layers import MLAShape as MLAShape
    from attnplug.author.served_layers import NewRows as NewRows
    from attnplug.author.served_layers import check_lse as check_lse
    from attnplug.author.served_layers import check_rows as check_rows
    from attnplug.choose.plugin_hooks import hookimpl as hookimpl
    from attnplug.contract.backend import AttentionBackend as AttentionBackend
    from attnplug.contract.backend import ForwardExtras as ForwardExtras
    from attnplug.contract.batch import ForwardBatch as ForwardBatch
    from attnplug.contract.context import BackendContext as BackendContext
    from attnplug.contract.context import Serving as Serving
    from attnplug.contract.geometry import Geometry as Geometry
    from attnplug.contract.linear import DeltaInputs as DeltaInputs
    from attnplug.contract.linear import DeltaWeights as DeltaWeights
    from attnplug.contract.linear import LinearInputs as LinearInputs
    from attnplug.contract.mode import ForwardMode as ForwardMode
    from attnplug.contract.plan import BackendId as BackendId
    from attnplug.contract.plan import Plan as Plan
    from attnplug.contract.ragged import RaggedCall as RaggedCall
    from attnplug.declare.capabilities import Capabilities as Capabilities
    from attnplug.declare.claims import Claims as Claims
    from attnplug.declare.claims import PageSizes as PageSizes
    from attnplug.declare.errors import BackendError as BackendError
    from attnplug.declare.errors import PlanError as PlanError
    from attnplug.declare.errors import PoolError as PoolError
    from attnplug.declare.model import AttentionKind as AttentionKind
    from attnplug.declare.model import Feature as Feature
    from attnplug.declare.model import LayerSpec as LayerSpec
    from attnplug.declare.model import ModelSpec as ModelSpec
    from attnplug.declare.problem import CacheLayout as CacheLayout
    from attnplug.declare.problem import DType as DType
    from attnplug.declare.problem import ExtendPath as ExtendPath
    from attnplug.declare.problem import GraphLevel as GraphLevel
    from attnplug.declare.problem import Problem as Problem
    from attnplug.declare.problem import Role as Role
    from attnplug.declare.refusal import Refusal as Refusal
    from attnplug.declare.refusal import RefusalCode as RefusalCode
    from attnplug.declare.requirement import import_library as import_library
    from attnplug.declare.requirement import requirement_refusal as requirement_refusal
    from attnplug.declare.settings import Setting as Setting
    from attnplug.declare.spec import BackendSpec as BackendSpec
    from attnplug.declare.version import CONTRACT_VERSION as CONTRACT_VERSION
    from attnplug.declare.workspace_kind import SCRATCH as SCRATCH
    from attnplug.declare.workspace_kind import WorkspaceKind as WorkspaceKind
    from attnplug.kv import MHAPool as MHAPool
    from attnplug.kv import MLAPool as MLAPool
    from attnplug.kv import split_table as split_table
    from attnplug.kv.workspace import Workspace as Workspace
    from attnplug.machine.transfer import on_host as on_host
    from attnplug.machine.transfer import to_device as to_device
    from attnplug.wrappers import ForwardingBackend as ForwardingBackend

_MODULES = {
    "author.attention": ("PlannedAttention",),
    "author.graphs": ("GraphLimits",),
    "author.planned": ("PlannedBackend",),
    "author.served_layers": ("MLAShape", "NewRows", "check_lse", "check_rows"),
    "choose.plugin_hooks": ("hookimpl",),
    "contract.backend": ("AttentionBackend", "ForwardExtras"),
    "contract.batch": ("ForwardBatch",),
    "contract.context": ("BackendContext", "Serving"),
    "contract.geometry": ("Geometry",),
    "contract.linear": ("DeltaInputs", "DeltaWeights", "LinearInputs"),
    "contract.mode": ("ForwardMode",),
    "contract.plan": ("BackendId", "Plan"),
    "contract.ragged": ("RaggedCall",),
    "declare.capabilities": ("Capabilities",),
    "declare.claims": ("Claims", "PageSizes"),
    "declare.errors": ("BackendError", "PlanError", "PoolError"),
    "declare.model": ("AttentionKind", "Feature", "LayerSpec", "ModelSpec"),
    "declare.problem": ("CacheLayout", "DType", "ExtendPath", "GraphLevel", "Problem", "Role"),
    "declare.refusal": ("Refusal", "RefusalCode"),
    "declare.requirement": ("import_library", "requirement_refusal"),
    "declare.settings": ("Setting",),
    "declare.spec": ("BackendSpec",),
    "declare.version": ("CONTRACT_VERSION",),
    "declare.workspace_kind": ("SCRATCH", "WorkspaceKind"),
    "kv": ("MHAPool", "MLAPool", "split_table"),
    "kv.workspace": ("Workspace",),
    "machine.transfer": ("on_host", "to_device"),
    "wrappers": ("ForwardingBackend",),
}

_REMOVED = {
    "CUTE_DSL_SCRATCH": "declare a WorkspaceKind of your own (hook attnplug_workspace_kinds)",
    "Captures": "subclass PlannedBackend or PlannedAttention, and define capture and refill",
    "LinearAttention": "attnplug.host.ModelAttention has convolve and attend_linear",
    "MLAAttention": "attnplug.host.ModelAttention plans, and has attend_mla",
    "MLALayers": "subclass PlannedAttention, which checks each call; MLAShape.of(context) has heads and widths",
    "TRTLLM_SEMAPHORES": "declare a WorkspaceKind of your own (hook attnplug_workspace_kinds)",
    "active_backend": "attnplug.host.active_attention().backend",
    "attend_linear": "attnplug.host.active_attention().attend_linear",
    "attend_mla": "attnplug.host.active_attention().attend_mla",
    "claim_plan": "batch.plan_for, or attnplug.host.plan_to_run",
    "convolve": "attnplug.host.active_attention().convolve",
    "forward_context": "attnplug.host.ModelAttention.running",
    "module_refusal": "requirement_refusal(requirement, module), or a pair in BackendSpec.requires",
}
"""Names that contract 1.0, the draft, had here, and what to use in place of each."""

__getattr__, __dir__, __all__ = face(__name__, globals(), _MODULES, other="attnplug.host", removed=_REMOVED)
