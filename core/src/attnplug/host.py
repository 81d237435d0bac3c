"""The face for engines and bridges: choosing and building backends, memory, and what a model's layers call.

Names that backends need too are in ``attnplug``. A name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.faces import face

if TYPE_CHECKING:
    from attnplug.choose.assembly import build_chosen as build_chosen
    from attnplug.choose.assembly import build_selection as build_selection
    from attnplug.choose.assembly import choose_importable as choose_importable
    from attnplug.choose.building import backend_problems as backend_problems
    from attnplug.choose.building import build_backend as build_backend
    from attnplug.choose.explanation import explanation as explanation
    from attnplug.choose.hosts import HostSpec as HostSpec
    from attnplug.choose.hosts import load_host as load_host
    from attnplug.choose.loading import Registered as Registered
    from attnplug.choose.measured.files import TableError as TableError
    from attnplug.choose.measured.files import TableFile as TableFile
    from attnplug.choose.measured.files import read_tables as read_tables
    from attnplug.choose.measured.files import write_tables as write_tables
    from attnplug.choose.measured.ranking import default_ranking as default_ranking
    from attnplug.choose.measured.store import load_tables as load_tables
    from attnplug.choose.measured.store import table_path as table_path
    from attnplug.choose.measured.store import versions_of as versions_of
    from attnplug.choose.models import load_model as load_model
    from attnplug.choose.models import tiny_config as tiny_config
    from attnplug.choose.ranking import Ranked as Ranked
    from attnplug.choose.ranking import Ranking as Ranking
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
    from attnplug.contract.backend import RaggedAttention as RaggedAttention
    from attnplug.contract.backend import RowSelection as RowSelection
    from attnplug.contract.backend import optional_hooks as optional_hooks
    from attnplug.contract.batch import BatchPlan as BatchPlan
    from attnplug.contract.batch import apply_skip_attn_backend_init as apply_skip_attn_backend_init
    from attnplug.contract.context import HostContext as HostContext
    from attnplug.contract.context import Limits as Limits
    from attnplug.contract.context import Parallel as Parallel
    from attnplug.contract.geometry import HostLengths as HostLengths
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
    from attnplug.declare.model import MLADims as MLADims
    from attnplug.declare.options import parse_options as parse_options
    from attnplug.declare.options import split_settings as split_settings
    from attnplug.declare.problem import model_dtype as model_dtype
    from attnplug.declare.schedule import EVERY_LENGTH as EVERY_LENGTH
    from attnplug.declare.schedule import Schedule as Schedule
    from attnplug.declare.schedule import TypicalLens as TypicalLens
    from attnplug.declare.schedule import is_ragged as is_ragged
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
    from attnplug.hisparse import HOST_ROWS as HOST_ROWS
    from attnplug.hisparse import HiSparse as HiSparse
    from attnplug.hisparse import HostRows as HostRows
    from attnplug.hisparse import HotPool as HotPool
    from attnplug.hisparse import HotSizes as HotSizes
    from attnplug.hisparse import HotStatistics as HotStatistics
    from attnplug.hisparse import LogicalSlots as LogicalSlots
    from attnplug.kv import CacheKey as CacheKey
    from attnplug.kv import Coordinator as Coordinator
    from attnplug.kv import KVPools as KVPools
    from attnplug.kv import OutOfPages as OutOfPages
    from attnplug.kv import PageAllocator as PageAllocator
    from attnplug.kv import PageCopy as PageCopy
    from attnplug.kv import PagedCache as PagedCache
    from attnplug.kv import PageLayout as PageLayout
    from attnplug.kv import SlotTable as SlotTable
    from attnplug.kv.compressed import compressed_page_bytes as compressed_page_bytes
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
    from attnplug.mla.chunks import Chunk as Chunk
    from attnplug.mla.chunks import Span as Span
    from attnplug.mla.chunks import plan_prefix_chunks as plan_prefix_chunks
    from attnplug.torch_native.backend import TorchNativeBackend as TorchNativeBackend
    from attnplug.tune.page import html_page as html_page
    from attnplug.tune.plot import Mark as Mark
    from attnplug.tune.plot import Panel as Panel
    from attnplug.tune.plot import Series as Series
    from attnplug.tune.plot import figure as figure
    from attnplug.tune.raw import RawCalls as RawCalls
    from attnplug.tune.raw import RawScene as RawScene
    from attnplug.wrappers import FastestBackend as FastestBackend
    from attnplug.wrappers import HybridLinearBackend as HybridLinearBackend
    from attnplug.wrappers import SplitBackend as SplitBackend
    from attnplug.wrappers import Turn as Turn
    from attnplug.wrappers import captures_extends as captures_extends
    from attnplug.wrappers import merged_turns as merged_turns
    from attnplug.wrappers import plan_alike as plan_alike
    from attnplug.wrappers import planner_claims as planner_claims
    from attnplug.wrappers import turns as turns
    from attnplug.wrappers import who_forced as who_forced

_MODULES = {
    "choose.assembly": ("build_chosen", "build_selection", "choose_importable"),
    "choose.building": ("backend_problems", "build_backend"),
    "choose.explanation": ("explanation",),
    "choose.hosts": ("HostSpec", "load_host"),
    "choose.loading": ("Registered",),
    "choose.measured.files": ("TableError", "TableFile", "read_tables", "write_tables"),
    "choose.measured.ranking": ("default_ranking",),
    "choose.measured.store": ("load_tables", "table_path", "versions_of"),
    "choose.models": ("load_model", "tiny_config"),
    "choose.ranking": ("Ranked", "Ranking"),
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
        "RaggedAttention",
        "RowSelection",
        "optional_hooks",
    ),
    "contract.batch": ("BatchPlan", "apply_skip_attn_backend_init"),
    "contract.context": ("HostContext", "Limits", "Parallel"),
    "contract.geometry": ("HostLengths",),
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
    "declare.model": ("MLADims",),
    "declare.options": ("parse_options", "split_settings"),
    "declare.problem": ("model_dtype",),
    "declare.schedule": ("EVERY_LENGTH", "Schedule", "TypicalLens", "is_ragged"),
    "declare.settings": ("Render",),
    "hf.config_keys": ("Config", "ModelConfigError", "show"),
    "hf.json_files": ("MOST_BYTES", "read_json_object", "read_text", "regular_size"),
    "hf.rope_keys": ("rope_section", "rope_type", "rope_type_key"),
    "hf.tiny": ("TINY_CONFIGS",),
    "hisparse": (
        "HOST_ROWS",
        "HiSparse",
        "HostRows",
        "HotPool",
        "HotSizes",
        "HotStatistics",
        "LogicalSlots",
    ),
    "kv": (
        "CacheKey",
        "Coordinator",
        "KVPools",
        "OutOfPages",
        "PageAllocator",
        "PageCopy",
        "PageLayout",
        "PagedCache",
        "SlotTable",
    ),
    "kv.compressed": ("compressed_page_bytes",),
    "kv.workspace": ("WorkspaceOwner", "WorkspaceUse"),
    "layers.model_attention": ("ModelAttention", "active_attention", "plan_forward"),
    "machine": ("interrupt",),
    "machine.device": ("open_device",),
    "machine.hardware": ("Processor", "this_processor"),
    "mla": ("ExtendPolicy", "MLAWeights", "RowPlaces"),
    "mla.chunks": ("Chunk", "Span", "plan_prefix_chunks"),
    "torch_native.backend": ("TorchNativeBackend",),
    "tune.page": ("html_page",),
    "tune.plot": ("Mark", "Panel", "Series", "figure"),
    "tune.raw": ("RawCalls", "RawScene"),
    "wrappers": (
        "FastestBackend",
        "HybridLinearBackend",
        "SplitBackend",
        "Turn",
        "captures_extends",
        "merged_turns",
        "plan_alike",
        "planner_claims",
        "turns",
        "who_forced",
    ),
}

__getattr__, __dir__, __all__ = face(__name__, globals(), _MODULES, other="attnplug")
