"""The face for engines and bridges: choosing and building backends, memory, and what a model's layers call.

Names that backends need too are in ``attnplug``. A name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.faces import face

if TYPE_CHECKING:
    from attnplug.auto.fastest import FastestBackend as FastestBackend
    from attnplug.auto.measured_ranking import default_ranking as default_ranking
    from attnplug.auto.ranking import Ranked as Ranked
    from attnplug.auto.ranking import Ranking as Ranking
    from attnplug.auto.schedule import BackendSchedule as BackendSchedule
    from attnplug.auto.table_files import TableError as TableError
    from attnplug.auto.table_files import TableFile as TableFile
    from attnplug.auto.table_files import read_tables as read_tables
    from attnplug.auto.table_files import write_tables as write_tables
    from attnplug.auto.table_store import load_tables as load_tables
    from attnplug.auto.table_store import table_path as table_path
    from attnplug.auto.table_store import versions_of as versions_of
    from attnplug.choose.assembly import build_chosen as build_chosen
    from attnplug.choose.assembly import build_selection as build_selection
    from attnplug.choose.assembly import choose_importable as choose_importable
    from attnplug.choose.building import backend_problems as backend_problems
    from attnplug.choose.building import build_backend as build_backend
    from attnplug.choose.explanation import explanation as explanation
    from attnplug.choose.hosts import HostSpec as HostSpec
    from attnplug.choose.hosts import load_host as load_host
    from attnplug.choose.models import load_model as load_model
    from attnplug.choose.models import tiny_config as tiny_config
    from attnplug.choose.registry import Registry as Registry
    from attnplug.choose.registry import load_registry as load_registry
    from attnplug.choose.select import SelectionError as SelectionError
    from attnplug.choose.select import explain as explain
    from attnplug.choose.select import select as select
    from attnplug.choose.selection import BackendRequest as BackendRequest
    from attnplug.choose.selection import Selection as Selection
    from attnplug.cli import output as output
    from attnplug.cli.app import Commands as Commands
    from attnplug.cli.app import add_backend_options as add_backend_options
    from attnplug.cli.app import add_command as add_command
    from attnplug.cli.backends import describe as describe
    from attnplug.cli.options import option as option
    from attnplug.cli.warn import warn_of_plugins as warn_of_plugins
    from attnplug.contract.backend import ChunkPlanning as ChunkPlanning
    from attnplug.contract.backend import GraphPlanning as GraphPlanning
    from attnplug.contract.backend import LinearBackend as LinearBackend
    from attnplug.contract.backend import LinearHooks as LinearHooks
    from attnplug.contract.backend import RaggedAttention as RaggedAttention
    from attnplug.contract.backend import bind_optional_hook as bind_optional_hook
    from attnplug.contract.backend import optional_hooks as optional_hooks
    from attnplug.contract.batch import BatchPlan as BatchPlan
    from attnplug.contract.batch import apply_skip_attn_backend_init as apply_skip_attn_backend_init
    from attnplug.contract.context import HostContext as HostContext
    from attnplug.contract.context import Limits as Limits
    from attnplug.contract.context import Parallel as Parallel
    from attnplug.contract.coordinator import Coordinator as Coordinator
    from attnplug.contract.geometry import HostLengths as HostLengths
    from attnplug.contract.geometry import spread as spread
    from attnplug.contract.hooks import bind_hook as bind_hook
    from attnplug.contract.plan import PlanRecord as PlanRecord
    from attnplug.contract.plan import plan_to_run as plan_to_run
    from attnplug.declare.errors import AttnplugError as AttnplugError
    from attnplug.declare.errors import HookError as HookError
    from attnplug.declare.errors import PluginError as PluginError
    from attnplug.declare.errors import PluginWarning as PluginWarning
    from attnplug.declare.errors import TableWarning as TableWarning
    from attnplug.declare.errors import UsageError as UsageError
    from attnplug.declare.errors import WorkspaceError as WorkspaceError
    from attnplug.declare.errors import describe_error as describe_error
    from attnplug.declare.lengths import EVERY_LENGTH as EVERY_LENGTH
    from attnplug.declare.lengths import LengthRange as LengthRange
    from attnplug.declare.lengths import TypicalLens as TypicalLens
    from attnplug.declare.lengths import is_ragged as is_ragged
    from attnplug.declare.model import LinearDims as LinearDims
    from attnplug.declare.model import MLADims as MLADims
    from attnplug.declare.options import parse_options as parse_options
    from attnplug.declare.options import split_settings as split_settings
    from attnplug.declare.problem import model_dtype as model_dtype
    from attnplug.declare.registered import Registered as Registered
    from attnplug.declare.settings import Render as Render
    from attnplug.hf.config_keys import Config as Config
    from attnplug.hf.config_keys import ModelConfigError as ModelConfigError
    from attnplug.hf.config_keys import show as show
    from attnplug.hf.json_files import MOST_BYTES as MOST_BYTES
    from attnplug.hf.json_files import read_json_object as read_json_object
    from attnplug.hf.json_files import read_text as read_text
    from attnplug.hf.json_files import regular_size as regular_size
    from attnplug.hf.rope_keys import rope_section as rope_section
    from attnplug.hf.rope_keys import rope_type as rope_type
    from attnplug.hf.rope_keys import rope_type_key as rope_type_key
    from attnplug.hf.tiny import TINY_CONFIGS as TINY_CONFIGS
    from attnplug.kv import CacheKey as CacheKey
    from attnplug.kv import KVPools as KVPools
    from attnplug.kv import LinearStatePool as LinearStatePool
    from attnplug.kv import PageCopy as PageCopy
    from attnplug.kv import PagedCache as PagedCache
    from attnplug.kv import PageLayout as PageLayout
    from attnplug.kv import torch_dtype as torch_dtype
    from attnplug.kv.workspace import WorkspaceOwner as WorkspaceOwner
    from attnplug.kv.workspace import WorkspaceUse as WorkspaceUse
    from attnplug.layers.model_attention import ModelAttention as ModelAttention
    from attnplug.layers.model_attention import active_attention as active_attention
    from attnplug.layers.model_attention import plan_forward as plan_forward
    from attnplug.machine import interrupt as interrupt
    from attnplug.machine.device import open_device as open_device
    from attnplug.machine.hardware import Processor as Processor
    from attnplug.machine.hardware import this_processor as this_processor
    from attnplug.mla import ExtendPolicy as ExtendPolicy
    from attnplug.mla import MLAWeights as MLAWeights
    from attnplug.mla import RowPlaces as RowPlaces
    from attnplug.mla import merge_partial as merge_partial
    from attnplug.mla.chunks import Chunk as Chunk
    from attnplug.mla.chunks import Span as Span
    from attnplug.mla.chunks import plan_prefix_chunks as plan_prefix_chunks
    from attnplug.torch_native.backend import TorchNativeBackend as TorchNativeBackend
    from attnplug.wrappers import HybridLinearBackend as HybridLinearBackend
    from attnplug.wrappers import SplitBackend as SplitBackend
    from attnplug.wrappers import captures_extends as captures_extends
    from attnplug.wrappers import length_ranges as length_ranges
    from attnplug.wrappers import limited_by as limited_by
    from attnplug.wrappers import merge_length_ranges as merge_length_ranges
    from attnplug.wrappers import plan_alike as plan_alike
    from attnplug.wrappers import planner_claims as planner_claims

_MODULES = {
    "choose.assembly": ("build_chosen", "build_selection", "choose_importable"),
    "choose.building": ("backend_problems", "build_backend"),
    "choose.explanation": ("explanation",),
    "choose.hosts": ("HostSpec", "load_host"),
    "declare.registered": ("Registered",),
    "auto.table_files": ("TableError", "TableFile", "read_tables", "write_tables"),
    "auto.measured_ranking": ("default_ranking",),
    "auto.table_store": ("load_tables", "table_path", "versions_of"),
    "choose.models": ("load_model", "tiny_config"),
    "auto.ranking": ("Ranked", "Ranking"),
    "choose.registry": ("Registry", "load_registry"),
    "choose.select": ("SelectionError", "explain", "select"),
    "choose.selection": ("BackendRequest", "Selection"),
    "cli": ("output",),
    "cli.app": ("Commands", "add_backend_options", "add_command"),
    "cli.backends": ("describe",),
    "cli.options": ("option",),
    "cli.warn": ("warn_of_plugins",),
    "contract.backend": (
        "ChunkPlanning",
        "GraphPlanning",
        "LinearBackend",
        "LinearHooks",
        "RaggedAttention",
        "bind_optional_hook",
        "optional_hooks",
    ),
    "contract.batch": ("BatchPlan", "apply_skip_attn_backend_init"),
    "contract.context": ("HostContext", "Limits", "Parallel"),
    "contract.coordinator": ("Coordinator",),
    "contract.geometry": ("HostLengths", "spread"),
    "contract.hooks": ("bind_hook",),
    "contract.plan": ("PlanRecord", "plan_to_run"),
    "declare.errors": (
        "AttnplugError",
        "HookError",
        "PluginError",
        "PluginWarning",
        "TableWarning",
        "UsageError",
        "WorkspaceError",
        "describe_error",
    ),
    "declare.model": ("LinearDims", "MLADims"),
    "declare.options": ("parse_options", "split_settings"),
    "declare.problem": ("model_dtype",),
    "auto.fastest": ("FastestBackend",),
    "auto.schedule": ("BackendSchedule",),
    "declare.lengths": ("EVERY_LENGTH", "LengthRange", "TypicalLens", "is_ragged"),
    "declare.settings": ("Render",),
    "hf.config_keys": ("Config", "ModelConfigError", "show"),
    "hf.json_files": ("MOST_BYTES", "read_json_object", "read_text", "regular_size"),
    "hf.rope_keys": ("rope_section", "rope_type", "rope_type_key"),
    "hf.tiny": ("TINY_CONFIGS",),
    "kv": (
        "CacheKey",
        "KVPools",
        "LinearStatePool",
        "PageCopy",
        "PageLayout",
        "PagedCache",
        "torch_dtype",
    ),
    "kv.workspace": ("WorkspaceOwner", "WorkspaceUse"),
    "layers.model_attention": ("ModelAttention", "active_attention", "plan_forward"),
    "machine": ("interrupt",),
    "machine.device": ("open_device",),
    "machine.hardware": ("Processor", "this_processor"),
    "mla": ("ExtendPolicy", "MLAWeights", "RowPlaces", "merge_partial"),
    "mla.chunks": ("Chunk", "Span", "plan_prefix_chunks"),
    "torch_native.backend": ("TorchNativeBackend",),
    "wrappers": (
        "HybridLinearBackend",
        "SplitBackend",
        "captures_extends",
        "merge_length_ranges",
        "plan_alike",
        "planner_claims",
        "length_ranges",
        "limited_by",
    ),
}

__getattr__, __dir__, __all__ = face(__name__, globals(), _MODULES, other="attnplug")
