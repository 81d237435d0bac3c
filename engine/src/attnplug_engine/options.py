"""Settings of engines and embedders. Nothing here imports torch, so that commands check their options at once."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from attnplug import DType, GraphLevel, Role, UsageError
from attnplug.declare.problem import LARGEST_PAGE
from attnplug.hf.config_keys import show
from attnplug.host import ExtendPolicy, load_registry
from attnplug_engine.request import LARGEST_SEED
from attnplug_engine.settings.capture_sizes import BATCH_SIZES, PREFILL_SIZES, SizeOption
from attnplug_engine.settings.hisparse import HiSparseConfig
from attnplug_engine.settings.pooling import Pooling
from attnplug_engine.settings.speculation import Speculation, read_speculation

LARGEST_BATCH = 1 << 16
LARGEST_COUNT = 1 << 40  # of pages, slots or tokens; torch's sizes do not overflow
_GPU_STEP_TOKENS, _CPU_STEP_TOKENS = 8192, 2048
_LONGEST_LATENCY = 5.0  # longer ones are milliseconds by mistake

_SWITCHES = (
    "disable_cuda_graph",
    "disable_prefill_cuda_graph",
    "two_batch_overlap",
    "plan_stream",
    "enable_hisparse",
    "batch_invariant",
)
_WITHOUT_PREFILLS = (("disable_prefill_cuda_graph", "leave out one of them"),)


def _dtype_or_format(setting: str, text: str) -> str:
    """Return the dtype or KV format that a user's spelling names. Only formats of other packages load plugins."""
    if setting == "dtype":
        return DType.parse(text, setting)
    holds = "index" if setting == "index_dtype" else None
    return DType.spelled(text) or load_registry().kv_format(text, setting, holds).name


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of an engine. None means: chosen automatically."""

    attention_backend: str = "auto"
    role_backends: Mapping[Role, str] = field(default_factory=dict)
    backend_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    device: str | None = None
    dtype: DType | None = None
    """Dtype of weights and activations. None: as the checkpoint's config says, or else its files."""
    kv_dtype: str | None = None
    """Name of the KV cache's format. None: the model's dtype."""
    index_dtype: str | None = None
    """Name of the format of a sparse model's index keys. None: the model's dtype."""
    page_size: int | None = None
    num_pages: int | None = None
    max_batch: int = 32
    chunked_prefill_size: int | None = None
    """Most tokens of one step; -1 for prompts that are not chunked. None: 8192 on a GPU and 2048 on a CPU."""
    inter_token_latency: float = 0.05
    """Seconds by which prefill may delay requests that decode: a step with both has as many prefill tokens as the
    GPU runs in this time, attention over their context included, measured at start-up. A CPU is not measured."""
    prefix_cache: bool = True
    state_slots: int | None = None
    """Slots for the states of linear layers: those of running requests and of snapshots."""
    state_checkpoint: int = 1024
    """Tokens between two snapshots of linear states, rounded up to whole pages."""
    context_length: int | None = None
    extend_policy: ExtendPolicy = field(default_factory=ExtendPolicy)
    seed: int = 0
    batch_invariant: bool = False
    """Give a request the same bits of tokens and log probabilities regardless of the other requests, chunking, prefix
    hits, preemption, CUDA graphs and speculation. Backends that do not claim every level of invariance are refused. A
    request that samples needs its own seed: the default depends on the number of earlier requests."""
    random_weights: bool = False
    """Read only a checkpoint's config, and draw the weights from ``seed`` on the device: for speed measurements."""
    ignore_eos: bool = False
    """Continue beyond the checkpoint's end-of-text tokens."""
    check_layers: bool = False
    compile_processes: int | None = None
    """Processes that compile Triton's kernels at the first start on a GPU. None: as many as cores and memory allow. 0:
    none, each kernel is compiled when it is first launched."""
    overlap: bool | None = None
    """Schedule and launch a step while the previous one runs. None: on a GPU; on a CPU it only wastes rows."""
    two_batch_overlap: bool = False
    """Run steps as two halves, on two streams on a GPU. Steps of few tokens and replayed decode steps are not split
    there."""
    cuda_graph_batch_sizes: tuple[int, ...] | None = None
    """Numbers of requests for which decode steps are captured. None: several up to ``max_batch``, if the backends can
    be captured. If given, backends that cannot be captured are refused."""
    cuda_graph_prefill_sizes: tuple[int, ...] | None = None
    """Numbers of tokens up to which steps with prefill are captured. None: several up to the tokens of a step, at most
    8192, if the backends can capture any batch, and only where the GPU runs them faster than the host launches them. If
    given, backends that cannot capture them are refused."""
    disable_cuda_graph: bool = False
    disable_prefill_cuda_graph: bool = False
    enable_hisparse: bool = False
    """Keep latent rows in host memory, and on the device those that sparse layers select."""
    hisparse_config: str | Mapping[str, Any] | None = None
    """Settings of HiSparse: JSON text or a mapping with the keys of ``HiSparseConfig``."""
    speculative_algorithm: str | None = None
    """Speculation algorithm: ``mtp``, ``eagle``, ``eagle3``, ``standalone`` or ``ngram``. None: no speculation."""
    speculative_draft_model: str | os.PathLike[str] | None = None
    """The draft's checkpoint, if the algorithm has one."""
    speculative_num_steps: int | None = None
    """Depth of a draft in tokens."""
    speculative_topk: int | None = None
    """Branches of a draft; more than 1 make it a tree."""
    speculative_num_draft_tokens: int | None = None
    """Rows of a request that the target verifies at once, the newest token's included."""
    plan_stream: bool = False
    """Plan the next part of a round on a side stream, in rounds that are not replayed."""

    def __post_init__(self) -> None:
        for name in ("dtype", "kv_dtype", "index_dtype"):
            value = getattr(self, name)
            if value is not None:  # "bf16" and torch.bfloat16 stand for the member
                object.__setattr__(self, name, _dtype_or_format(name, str(value)))
        self._check_whole("max_batch", 1, LARGEST_BATCH)
        for name in ("num_pages", "context_length", "state_slots", "state_checkpoint"):
            if getattr(self, name) is not None:
                self._check_whole(name, 1, LARGEST_COUNT)
        if self.compile_processes is not None:
            self._check_whole("compile_processes", 0, LARGEST_BATCH)
        if self.page_size is not None:
            self._check_whole("page_size", 1, LARGEST_PAGE)
        self._check_whole("seed", 0, LARGEST_SEED)
        _ = self.speculation  # raises if a setting is wrong
        for name in _SWITCHES:
            if not isinstance(value := getattr(self, name), bool):
                raise UsageError(f"`{name}` {show(value)} is not allowed; give True or False", settings=[name])
        if self.plan_stream and self.speculative_algorithm is None:
            raise UsageError(
                "`plan_stream` plans rounds ahead, and there are none without `speculative_algorithm`; leave it out",
                settings=["plan_stream", "speculative_algorithm"],
            )
        if self.batch_invariant and (speculation := self.speculation) is not None and speculation.topk > 1:
            raise UsageError(
                f"`speculative_topk` {speculation.topk} makes trees of drafts, and the rows of a tree are not in the "
                "order in which decode reads them, so `batch_invariant` cannot be kept; give a `speculative_topk` of 1",
                settings=["speculative_topk", "batch_invariant"],
            )
        self._check_hisparse()
        if self.overlap is not None and not isinstance(self.overlap, bool):
            raise UsageError(
                f"`overlap` {show(self.overlap)} is not allowed; give True, False, or None to choose by the device",
                settings=["overlap"],
            )
        if self.chunked_prefill_size not in (None, -1):
            self._check_whole("chunked_prefill_size", 1, LARGEST_COUNT, ", or -1 for prompts that are not chunked")
        latency = self.inter_token_latency
        is_number = isinstance(latency, int | float) and not isinstance(latency, bool)
        if not is_number or not (0 < latency <= _LONGEST_LATENCY or latency == math.inf):
            raise UsageError(
                f"`inter_token_latency` {show(latency)} is not allowed; give seconds above 0 and up to "
                f"{_LONGEST_LATENCY:g}, such as 0.05, or inf for no limit",
                settings=["inter_token_latency"],
            )
        chunk = LARGEST_COUNT if self.chunked_prefill_size == -1 else self.step_tokens(on_gpu=True)
        self._check_graphs(BATCH_SIZES, self.max_batch, ())
        self._check_graphs(PREFILL_SIZES, max(chunk, self.max_batch), _WITHOUT_PREFILLS)

    def _check_hisparse(self) -> None:
        _ = self.hisparse  # raises if a setting is wrong
        if self.hisparse_config is not None and not self.enable_hisparse:
            raise UsageError(
                "`hisparse_config` is given, and HiSparse is off; leave it out, or give `enable_hisparse`",
                settings=["hisparse_config", "enable_hisparse"],
            )
        if self.enable_hisparse and self.two_batch_overlap:
            raise UsageError(
                "`enable_hisparse` keeps the rows of one running layer on the device, and "
                "`two_batch_overlap` runs two; leave out one of them",
                settings=["enable_hisparse", "two_batch_overlap"],
            )

    def _check_graphs(self, option: SizeOption, most: int, without: Collection[tuple[str, str]]) -> None:
        """Check requested capture sizes, if any. ``without`` are settings that exclude them, with the remedy."""
        if (sizes := getattr(self, option.name)) is None:
            return
        object.__setattr__(self, option.name, option.check(sizes, most))
        for name, remedy in (
            ("disable_cuda_graph", "leave out one of them"),
            ("check_layers", "a graph stops at no layer: leave out one of them"),
            *without,
        ):
            if getattr(self, name):
                raise UsageError(
                    f"`{option.name}` demands CUDA graphs, and `{name}` is given; {remedy}",
                    settings=[option.name, name],
                )

    def step_tokens(self, *, on_gpu: bool) -> int:
        """Return the most tokens of a step, on a GPU or another device; -1 for prompts that are not chunked."""
        if self.chunked_prefill_size is None:
            return _GPU_STEP_TOKENS if on_gpu else _CPU_STEP_TOKENS
        return self.chunked_prefill_size

    @property
    def speculation(self) -> Speculation | None:
        """Settings of speculation; None if it is off. Raises UsageError."""
        return read_speculation(
            self.speculative_algorithm,
            self.speculative_draft_model,
            self.speculative_num_steps,
            self.speculative_topk,
            self.speculative_num_draft_tokens,
        )

    @property
    def hisparse(self) -> HiSparseConfig:
        """Settings of HiSparse. Raises UsageError."""
        return HiSparseConfig.read(self.hisparse_config)

    @property
    def captures(self) -> bool:
        """True if graphs are captured where that is possible."""
        return not self.disable_cuda_graph and not self.check_layers

    @property
    def captures_prefills(self) -> bool:
        """True if prefills are captured where that is possible."""
        return self.captures and not self.disable_prefill_cuda_graph

    @property
    def demanded_graphs(self) -> GraphLevel:
        """Level that all backends must be able to capture. Captured prefills need only one backend."""
        given = self.cuda_graph_batch_sizes is not None or self.cuda_graph_prefill_sizes is not None
        return GraphLevel.DECODE if given else GraphLevel.NEVER

    def _check_whole(self, name: str, lowest: int, highest: int, or_else: str = "") -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
            raise UsageError(
                f"`{name}` {show(value)} is not allowed; give a number from {lowest} to {highest}{or_else}",
                settings=[name],
            )


@dataclass(frozen=True, slots=True)
class EmbedOptions:
    """Settings of an embedder. None means: chosen automatically; for the last three, as the checkpoint says."""

    attention_backend: str = "auto"
    role_backends: Mapping[Role, str] = field(default_factory=dict)
    backend_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    device: str | None = None
    dtype: DType | None = None
    kv_dtype: str | None = None
    page_size: int | None = None
    max_batch: int = 32
    chunked_prefill_size: int = -1
    """Most tokens of one step; -1 for prompts that are not chunked, which some backends run without a cache (A6)."""
    context_length: int | None = None
    seed: int = 0
    """Seed of a tiny model's weights."""
    compile_processes: int | None = None
    """As in ``EngineOptions``."""
    batch_invariant: bool = False
    """Give a prompt's vector the same bits regardless of the other prompts and of chunking."""
    pooling: Pooling | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    """Name of the checkpoint's text that is put before each prompt that is a text."""

    def __post_init__(self) -> None:
        if self.pooling is not None:  # "mean" stands for the member
            object.__setattr__(self, "pooling", Pooling.parse(self.pooling, "pooling"))

    def for_engine(self) -> EngineOptions:
        """Return the settings that an engine also has, checked and with parsed types."""
        shared = {field.name for field in fields(EmbedOptions)} & {field.name for field in fields(EngineOptions)}
        return EngineOptions(**{name: getattr(self, name) for name in shared}, prefix_cache=False)
