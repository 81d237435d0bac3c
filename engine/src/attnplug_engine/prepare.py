"""Selection of backends and loading of weights, shared by engine and embedder."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from attnplug import BackendError, DType, ModelSpec, Problem, Refusal, Serving, Setting, UsageError
from attnplug.auto.ranking import Ranking
from attnplug.declare.device import Processor
from attnplug.declare.problem import INVARIANCE
from attnplug.host import (
    BackendRequest,
    Registry,
    Selection,
    SelectionError,
    build_chosen,
    choose_importable,
    default_ranking,
    load_registry,
    model_dtype,
)
from attnplug.kernels import torch_dtype
from attnplug.machine.runtime import DeviceRuntime, open_device, runtime_of
from attnplug_engine.checkpoints.random import TINY
from attnplug_engine.checkpoints.safetensors import CheckpointError, WeightSource, quantization_key, stored_dtype
from attnplug_engine.execution.extend_times import measured_extends
from attnplug_engine.execution.runner import ModelRunner
from attnplug_engine.kernels import usable
from attnplug_engine.memory.capacity import Capacity
from attnplug_engine.memory.pools import check_codecs
from attnplug_engine.models.architectures import (
    DivideDraft,
    load_model,
    load_spec,
    open_source,
    rank_counts,
    rank_nbytes,
    read_config,
)
from attnplug_engine.models.decoder import LoadedModel
from attnplug_engine.options import EngineOptions
from attnplug_engine.parallel.collectives import RankOrder, TensorParallel
from attnplug_engine.serving.embedding import embedding_capacity
from attnplug_engine.serving.sizing import MemoryPlan, capacity, check_buffers, plan_memory
from attnplug_engine.settings.speculation import Speculation
from attnplug_engine.speculation.backend_choice import DraftChoice, choose_draft, target_problem, target_request
from attnplug_engine.speculation.draft_runner import DraftRunner
from attnplug_engine.speculation.drafts.loading import divide_draft, draft_spec, load_draft, naming_draft, open_draft
from attnplug_engine.speculation.drafts.model import DraftModel
from attnplug_engine.speculation.rounds import RoundRunner
from attnplug_engine.text.encoder import PromptEncoder
from attnplug_engine.text.tokenizer import end_tokens

_Runner = TypeVar("_Runner", ModelRunner, DraftRunner)
_STORED = {"F16": DType.FLOAT16, "BF16": DType.BFLOAT16}


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Backends selected for a model and its draft, before weights are read."""

    model: str
    options: EngineOptions
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    kv_dtype: str
    parallel: TensorParallel
    registry: Registry
    request: BackendRequest
    problem: Problem
    selection: Selection
    ranking: Ranking
    """Ranking of ``auto``. Measured tables are read once, so the backends that are built are those that were
    selected."""
    source: WeightSource
    """Source of the weights, which ranks can divide."""
    weights: int
    """Bytes of a rank's weights, a draft's included."""
    draft: DraftChoice | None
    draft_source: WeightSource | None

    @property
    def runtime(self) -> DeviceRuntime:
        return runtime_of(self.device)

    @property
    def serving(self) -> Serving:
        """Serving mode of the backends."""
        return Serving(
            is_embedding=self.problem.is_embedding,
            chunked_prefill_size=self.options.step_tokens(on_gpu=self.runtime.module is not None),
            disable_radix_cache=not self.options.prefix_cache,
        )

    def build(
        self,
        request: BackendRequest,
        problem: Problem,
        build: Callable[[Selection], _Runner],
        failed: Mapping[str, Refusal],
    ) -> tuple[Selection, _Runner]:
        """Build the backends of a request and a runner on them; the selection is the same on all ranks."""
        selection, runner = build_chosen(self.registry, request, problem, build, failed, self.ranking)
        if self.parallel.size > 1:
            check_same_choice(selection, self.parallel, self.device)
        return selection, runner


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model whose weights are loaded, and the backends that were selected for it."""

    choice: BackendChoice
    encoder: PromptEncoder
    end_tokens: frozenset[int]
    """End-of-text tokens of the checkpoint that end a request."""
    loaded: LoadedModel
    draft: DraftModel | None

    def build(self) -> tuple[Selection, ModelRunner]:
        """Build the selected backends and a runner on them."""
        choice, options = self.choice, self.choice.options

        def build(selection: Selection) -> ModelRunner:
            return ModelRunner(
                self.loaded,
                selection,
                self._capacity(selection),
                device=choice.device,
                dtype=choice.dtype,
                kv_dtype=choice.kv_dtype,
                index_dtype=options.index_dtype,
                parallel=choice.parallel,
                policy=replace(options.extend_policy, forced=choice.problem.extend_path),
                serving=choice.serving,
                check_layers=options.check_layers,
                seed=options.seed,
                two_batch_overlap=options.two_batch_overlap,
            )

        selection, runner = choice.build(choice.request, choice.problem, build, choice.selection.failed)
        if not choice.problem.is_embedding:
            runner.extend_times = measured_extends(choice.ranking, selection, runner.attention, runner.spec)
        return selection, runner

    def build_rounds(self, target: ModelRunner) -> tuple[RoundRunner | None, Selection | None]:
        """Build the runner of speculative rounds, with the draft's backend over the target's pages. Return it and the
        draft's selection; both are None without speculation, the selection also without a draft model."""
        options = self.choice.options
        if (speculation := options.speculation) is None:
            return None, None
        selection = runner = None
        if self.draft is not None and self.choice.draft is not None:
            selection, runner = self._build_draft(self.draft, self.choice.draft, target, speculation)
        return RoundRunner(target, runner, speculation, plan_stream=options.plan_stream), selection

    def _build_draft(
        self, draft: DraftModel, draft_choice: DraftChoice, target: ModelRunner, speculation: Speculation
    ) -> tuple[Selection, DraftRunner]:
        choice = self.choice
        problem = replace(draft_choice.problem, page_size=target.capacity.page_size)

        def build(selection: Selection) -> DraftRunner:
            return DraftRunner(
                draft,
                target.pools,
                selection,
                target.capacity,
                speculation,
                device=choice.device,
                dtype=choice.dtype,
                kv_dtype=choice.kv_dtype,
                index_dtype=choice.options.index_dtype,
                workspace=target.workspace,
                parallel=choice.parallel,
                policy=choice.options.extend_policy,
                serving=choice.serving,
            )

        return choice.build(draft_choice.request, problem, build, draft_choice.failed)

    def _capacity(self, selection: Selection) -> Capacity:
        choice = self.choice
        sizes = (self.loaded.spec, choice.options, selection, choice.dtype, choice.kv_dtype, choice.device)
        if choice.problem.is_embedding:
            return embedding_capacity(*sizes)
        # A draft that does not read the target's rows has its own rows, on the target's pages.
        return capacity(*sizes, None if self.draft is None or self.draft.reads_target else self.draft.spec)


def prepare(
    model: str,
    options: EngineOptions,
    parallel: TensorParallel,
    *,
    progress: Callable[[int, int], None] | None = None,
    on_memory: Callable[[MemoryPlan], None] | None = None,
    is_embedding: bool = False,
) -> Prepared:
    """Select backends for a model, read its tokenizer, then its weights. An embedding model needs no output head.

    ``on_memory`` gets the estimate of an engine's memory before weights are read. Raises PoolError if it cannot fit.
    """
    choice = _choose_backends(model, options, parallel, is_embedding=is_embedding)
    source = choice.source
    vocab_size = read_config(source.config, source.name, choice.spec).integer("vocab_size")
    encoder = PromptEncoder(model, vocab_size)
    ends = frozenset[int]() if is_embedding or options.ignore_eos else end_tokens(model, source.config)
    if not is_embedding:
        plan = _memory_plan(choice)
        if on_memory is not None:
            on_memory(plan)
    loaded = load_model(
        model,
        dtype=choice.dtype,
        device=choice.device,
        parallel=choice.parallel,
        progress=progress,
        head=not is_embedding,
        source=source,
    )
    loaded.module.batch_invariant = options.batch_invariant
    draft, speculation = None, options.speculation
    if speculation is not None and choice.draft_source is not None:
        with naming_draft(speculation):
            draft = load_draft(
                speculation,
                choice.draft_source,
                loaded,
                model,
                dtype=choice.dtype,
                device=choice.device,
                parallel=choice.parallel,
            )
    return Prepared(choice, encoder, ends, loaded, draft)


def _choose_backends(
    model: str, options: EngineOptions, parallel: TensorParallel, *, is_embedding: bool
) -> BackendChoice:
    """Select backends, and check all that can be checked without reading weights: refusals, formats, imports of kernel
    libraries, and that ranks can divide the model and its draft."""
    spec, registry, speculation = load_spec(model), load_registry(), options.speculation
    device, processor = open_device(options.device, registry.device)
    if options.batch_invariant and parallel.size > 2:  # two numbers have the same sum in either order
        parallel = RankOrder(parallel)
    dtype = options.dtype or model_dtype(spec) or _default_dtype(model, device)
    kv_dtype = options.kv_dtype or dtype
    problem = _problem(spec, options, device, processor, dtype, kv_dtype, parallel.size, is_embedding=is_embedding)
    _check_model(spec, options, device)
    asked = BackendRequest(options.attention_backend, options.role_backends, options.backend_options)
    ranking = default_ranking(registry, problem, per_batch=True)
    request, head = target_request(registry, asked, problem, speculation, ranking), not is_embedding
    try:
        selection = choose_importable(registry, request, problem, ranking)
    except SelectionError:
        # Backends refuse heads that cannot be divided. They do not know which rank counts divide all weights.
        if parallel.size > 1:
            _open_sources(model, options, spec, device, parallel.size, torch_dtype(dtype), head=head)
        raise
    named = options.index_dtype
    formats = registry.kv_format(kv_dtype), device, None if named is None else registry.kv_format(named)
    check_codecs(spec.layers, *formats)
    source, draft_source, weights = _open_sources(
        model, options, spec, device, parallel.size, torch_dtype(dtype), head=head
    )
    draft = None
    if speculation is not None and speculation.has_model:
        layers = draft_spec(speculation, model)
        draft = choose_draft(registry, asked, problem, speculation, layers, ranking)
        check_codecs(layers.layers, *formats)
    return BackendChoice(
        model,
        options,
        spec,
        device,
        torch_dtype(dtype),
        kv_dtype,
        parallel,
        registry,
        request,
        problem,
        selection,
        ranking,
        source,
        weights,
        draft,
        draft_source,
    )


def _default_dtype(model: str, device: torch.device) -> DType:
    """Return the dtype of a model whose config has none (gpt-oss): that of its files, also if weights are random, so
    that a start-up which is only recorded compiles the kernels of the real one."""
    if not model.startswith(TINY):
        with suppress(CheckpointError):  # reported later, unless weights are random
            return _STORED.get(stored_dtype(model) or "", DType.FLOAT32)
    return DType.FLOAT32 if runtime_of(device).module is None else DType.BFLOAT16


def _check_model(spec: ModelSpec, options: EngineOptions, device: torch.device) -> None:
    """Raise UsageError for settings that the model or the device cannot serve."""
    if (options.context_length or 0) > spec.context_length:
        raise UsageError(
            f"`context_length` {options.context_length} is more than the model's {spec.context_length} tokens; give up "
            f"to {spec.context_length}, or change the model's rope scaling in its config",
            settings=[Setting.CONTEXT_LENGTH],
        )
    if options.kv_dtype is not None and not spec.full_layers:
        raise UsageError(
            f"`{Setting.KV_DTYPE}` {options.kv_dtype} is given, but {spec.name} has linear layers only, and no KV "
            "cache; leave it out",
            settings=[Setting.KV_DTYPE],
        )
    if options.batch_invariant and device.type == "cuda" and not usable(device):
        raise UsageError(
            "`batch_invariant` multiplies matrices by Triton kernels on a GPU, and Triton is not installed; install "
            "Triton, or leave the option out",
            settings=["batch_invariant"],
        )
    if options.demanded_graphs and runtime_of(device).graph is None:
        name = "cuda_graph_batch_sizes" if options.cuda_graph_batch_sizes is not None else "cuda_graph_prefill_sizes"
        raise UsageError(
            f"`{name}` demands CUDA graphs, and the device is {device.type}; leave it out, or choose another `device`",
            settings=[name, Setting.DEVICE],
        )
    if options.enable_hisparse:
        check_buffers(spec, options)


def _problem(
    spec: ModelSpec,
    options: EngineOptions,
    device: torch.device,
    processor: Processor,
    dtype: DType,
    kv_dtype: str,
    ranks: int,
    *,
    is_embedding: bool,
) -> Problem:
    """Return the problem that backends are selected for."""
    graphs = runtime_of(device).graph is not None and not is_embedding
    problem = Problem(
        spec,
        device.type,
        processor.sm or None,
        dtype,
        kv_dtype,
        index_dtype=options.index_dtype,
        page_size=options.page_size,
        tensor_parallel=ranks,
        is_embedding=is_embedding,
        cuda_graph=options.demanded_graphs,
        wants_graphs=graphs and options.captures,
        wants_prefill_graphs=graphs and options.captures_prefills,
        coordinator="hisparse" if options.enable_hisparse else None,
        mla_extend=options.extend_policy.forced,
        architecture=processor.architecture,
        invariant=frozenset(INVARIANCE if options.batch_invariant else ()),
    )
    return target_problem(problem, options.speculation)


def _open_source(model: str, options: EngineOptions, device: torch.device) -> WeightSource:
    source = open_source(model, device=device, seed=options.seed, random_weights=options.random_weights)
    if options.batch_invariant and device.type != "cpu" and quantization_key(source.config) is not None:
        raise UsageError(
            "`batch_invariant` is not available for quantized weights on a GPU, whose kernels differ by the number of "
            "tokens; leave the option out, use `device` cpu, or a checkpoint in bfloat16",
            settings=["batch_invariant"],
        )
    return source


def _open_sources(
    model: str,
    options: EngineOptions,
    spec: ModelSpec,
    device: torch.device,
    ranks: int,
    dtype: torch.dtype,
    *,
    head: bool,
) -> tuple[WeightSource, WeightSource | None, int]:
    """Return the sources of a model and of its draft, and the bytes of a rank's weights. No weight is read.

    Raises ParallelError if the ranks cannot divide both.
    """
    source, draft, speculation = _open_source(model, options, device), None, options.speculation
    if speculation is not None and speculation.has_model:
        draft = open_draft(speculation, model, device=device, seed=options.seed, random_weights=options.random_weights)
    return source, draft, rank_nbytes(source, spec, ranks, dtype, _divided_draft(model, options, draft), head=head)


def _divided_draft(model: str, options: EngineOptions, draft: WeightSource | None) -> DivideDraft | None:
    speculation = options.speculation
    if speculation is None or draft is None:
        return None
    return partial(divide_draft, speculation=speculation, source=draft, target_reference=model)


def _memory_plan(choice: BackendChoice) -> MemoryPlan:
    """Estimate the memory of an engine before weights are read. Raises PoolError if it cannot fit."""
    options, device, ranks = choice.options, choice.device, choice.parallel.size
    draft = None if choice.draft is None else choice.draft.problem.model
    divided = _divided_draft(choice.model, options, choice.draft_source)
    return plan_memory(
        choice.spec.for_rank(ranks),
        choice.source.config,
        options,
        choice.selection,
        choice.dtype,
        choice.kv_dtype,
        device,
        choice.weights,
        None if draft is None else draft.for_rank(ranks),
        rank_counts=partial(rank_counts, choice.source, choice.spec, divided),
    )


def check_same_choice(selection: Selection, parallel: TensorParallel, device: torch.device) -> None:
    """Raise if ranks disagree on page size or backends. They run the same steps, so all must choose alike.

    They differ if a backend can be built on some ranks only, or if their measured tables differ.
    """
    schedules = [choice.schedule for choice in selection.choices.values()]
    serving = {
        str(role): choice.chosen_name if choice.schedule is None else " and ".join(choice.schedule.candidates)
        for role, choice in selection.choices.items()
    }
    digest = torch.tensor([zlib.crc32(repr((serving, schedules, selection.page_size)).encode())], device=device)
    if len(set(parallel.all_gather(digest, 0).tolist())) > 1:
        raise BackendError(
            f"rank {parallel.rank} runs {', '.join(f'{role} on {names}' for role, names in serving.items())}, and "
            "other ranks differ: a backend could be built on some ranks only, or measured tables differ between "
            "machines; request one by `attention_backend`",
            settings=["attention_backend"],
        )
