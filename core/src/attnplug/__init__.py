"""attnplug: attention backends for LLM inference as plugins.

This is the face for authors of backends: what they need is importable from here. ``attnplug.host`` is the one for
engines and bridges. Nothing deeper is promised. A name is imported when it is first used: a plugin's entry point, and
``attnplug backends``, load without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.machine import interrupt as _interrupt  # noqa: F401 (first of all: what follows takes a tenth of a second)

# isort: split
from attnplug.faces import face

if TYPE_CHECKING:
    from attnplug.author.attention import PlannedAttention as PlannedAttention
    from attnplug.author.graphs import GraphLimits as GraphLimits
    from attnplug.author.planned import PlannedBackend as PlannedBackend
    from attnplug.author.served_layers import MLAShape as MLAShape
    from attnplug.author.served_layers import NewRows as NewRows
    from attnplug.author.sparse import SparseAttention as SparseAttention
    from attnplug.choose.plugin_hooks import hookimpl as hookimpl
    from attnplug.contract.backend import AttentionBackend as AttentionBackend
    from attnplug.contract.backend import ForwardExtras as ForwardExtras
    from attnplug.contract.batch import ForwardBatch as ForwardBatch
    from attnplug.contract.compressed import CompressorInputs as CompressorInputs
    from attnplug.contract.compressed import CompressorWeights as CompressorWeights
    from attnplug.contract.context import BackendContext as BackendContext
    from attnplug.contract.context import Serving as Serving
    from attnplug.contract.geometry import Geometry as Geometry
    from attnplug.contract.mode import ForwardMode as ForwardMode
    from attnplug.contract.plan import BackendId as BackendId
    from attnplug.contract.plan import Plan as Plan
    from attnplug.contract.ragged import RaggedCall as RaggedCall
    from attnplug.contract.sparse import IndexInputs as IndexInputs
    from attnplug.contract.sparse import SelectedPositions as SelectedPositions
    from attnplug.contract.sparse import SelectedRows as SelectedRows
    from attnplug.contract.sparse import SelectedSlots as SelectedSlots
    from attnplug.declare.capabilities import Capabilities as Capabilities
    from attnplug.declare.claims import Claims as Claims
    from attnplug.declare.claims import PageSizes as PageSizes
    from attnplug.declare.errors import BackendError as BackendError
    from attnplug.declare.errors import PlanError as PlanError
    from attnplug.declare.errors import PoolError as PoolError
    from attnplug.declare.measured import LayerShape as LayerShape
    from attnplug.declare.measured import MeasuredTable as MeasuredTable
    from attnplug.declare.measured import Measurement as Measurement
    from attnplug.declare.model import AttentionKind as AttentionKind
    from attnplug.declare.model import CompressedDims as CompressedDims
    from attnplug.declare.model import Feature as Feature
    from attnplug.declare.model import IndexerDims as IndexerDims
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
    from attnplug.declare.settings import Setting as Setting
    from attnplug.declare.spec import BackendSpec as BackendSpec
    from attnplug.declare.version import CONTRACT_VERSION as CONTRACT_VERSION
    from attnplug.declare.workspace_kind import SCRATCH as SCRATCH
    from attnplug.declare.workspace_kind import WorkspaceKind as WorkspaceKind
    from attnplug.index.plan import IndexPlan as IndexPlan
    from attnplug.index.refusals import index_refusals as index_refusals
    from attnplug.index.sparse_index import ScoreInputs as ScoreInputs
    from attnplug.index.sparse_index import SparseIndex as SparseIndex
    from attnplug.index.sparse_index import schedule_kernels as schedule_kernels
    from attnplug.kv import COMPRESSED as COMPRESSED
    from attnplug.kv import INDEX_KEYS as INDEX_KEYS
    from attnplug.kv import CompressedPool as CompressedPool
    from attnplug.kv import EntryCache as EntryCache
    from attnplug.kv import IndexKeyPool as IndexKeyPool
    from attnplug.kv import MHAPool as MHAPool
    from attnplug.kv import MLAPool as MLAPool
    from attnplug.kv.workspace import Workspace as Workspace
    from attnplug.wrappers import ForwardingBackend as ForwardingBackend

_MODULES = {
    "author.attention": ("PlannedAttention",),
    "author.graphs": ("GraphLimits",),
    "author.planned": ("PlannedBackend",),
    "author.served_layers": ("MLAShape", "NewRows"),
    "author.sparse": ("SparseAttention",),
    "choose.plugin_hooks": ("hookimpl",),
    "contract.backend": ("AttentionBackend", "ForwardExtras"),
    "contract.batch": ("ForwardBatch",),
    "contract.compressed": ("CompressorInputs", "CompressorWeights"),
    "contract.context": ("BackendContext", "Serving"),
    "contract.geometry": ("Geometry",),
    "contract.mode": ("ForwardMode",),
    "contract.plan": ("BackendId", "Plan"),
    "contract.ragged": ("RaggedCall",),
    "contract.sparse": ("IndexInputs", "SelectedPositions", "SelectedRows", "SelectedSlots"),
    "declare.capabilities": ("Capabilities",),
    "declare.claims": ("Claims", "PageSizes"),
    "declare.errors": ("BackendError", "PlanError", "PoolError"),
    "declare.measured": ("LayerShape", "MeasuredTable", "Measurement"),
    "declare.model": ("AttentionKind", "CompressedDims", "Feature", "IndexerDims", "LayerSpec", "ModelSpec"),
    "declare.problem": ("CacheLayout", "DType", "ExtendPath", "GraphLevel", "Problem", "Role"),
    "declare.refusal": ("Refusal", "RefusalCode"),
    "declare.settings": ("Setting",),
    "declare.spec": ("BackendSpec",),
    "declare.version": ("CONTRACT_VERSION",),
    "declare.workspace_kind": ("SCRATCH", "WorkspaceKind"),
    "index.plan": ("IndexPlan",),
    "index.refusals": ("index_refusals",),
    "index.sparse_index": ("ScoreInputs", "SparseIndex", "schedule_kernels"),
    "kv": (
        "COMPRESSED",
        "INDEX_KEYS",
        "CompressedPool",
        "EntryCache",
        "IndexKeyPool",
        "MHAPool",
        "MLAPool",
    ),
    "kv.workspace": ("Workspace",),
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
