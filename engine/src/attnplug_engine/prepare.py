"""Selection of backends and loading of weights, shared by engine and embedder."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from attnplug import BackendError, DType, ModelSpec, Problem, Refusal, Serving, Setting, UsageError
from attnplug.auto.ranking import Ranking
from attnplug.declare.problem import INVARIANCE
from attnplug.host import (
    BackendRequest,
    ExtendPolicy,
    Registry,
    Selection,
    choose_importable,
    default_ranking,
    load_registry,
    model_dtype,
)
from attnplug.kernels import torch_dtype
from attnplug.machine.runtime import DeviceRuntime, open_device, runtime_of
from attnplug.registry.assembly import build_chosen
from attnplug_engine.checkpoints.safetensors import Checkpoint
from attnplug_engine.execution.runner import ModelRunner
from attnplug_engine.kernels import usable
from attnplug_engine.memory.capacity import Capacity
from attnplug_engine.memory.pools import check_codecs
from attnplug_engine.models.architectures import load_model, load_spec, open_source
from attnplug_engine.models.decoder import LoadedModel
from attnplug_engine.options import EngineOptions
from attnplug_engine.parallel.collectives import RankOrder, TensorParallel
from attnplug_engine.sizing import MemoryPlan, check_buffers, plan_memory
from attnplug_engine.speculation.backend_choice import DraftChoice, choose_draft, target_problem, target_request
from attnplug_engine.speculation.draft_runner import DraftRunner
from attnplug_engine.speculation.drafts.loading import draft_spec, load_draft, naming_draft
from attnplug_engine.speculation.drafts.model import DraftModel
from attnplug_engine.speculation.options import Speculation


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model whose weights are loaded, and the backends that were selected for it."""

    loaded: LoadedModel
    device: torch.device
    dtype: torch.dtype
    kv_dtype: str
    index_dtype: str | None
    parallel: TensorParallel
    registry: Registry
    request: BackendRequest
    problem: Problem
    failed: Mapping[str, Refusal]
    ranking: Ranking
    """Ranking of ``auto``. Measured tables are read once, so the backends that are built are those that were
    selected."""
    draft: DraftModel | None = None
    draft_choice: DraftChoice | None = None

    @property
    def runtime(self) -> DeviceRuntime:
        return runtime_of(self.device)

    @property
    def draft_cache(self) -> ModelSpec | None:
        """Layers of the draft that have rows of their own, on the target's pages; None if there are none."""
        return None if self.draft is None or self.draft.reads_target else self.draft.spec

    def build(
        self,
        capacity: Callable[[Selection], Capacity],
        serving: Serving,
        policy: ExtendPolicy | None = None,
        *,
        check_layers: bool = False,
        seed: int = 0,
        two_batch_overlap: bool = False,
    ) -> tuple[Selection, ModelRunner]:
        """Build the selected backends and a runner on them; the selection is the same on all ranks."""
        policy = replace(policy or ExtendPolicy(), forced=self.problem.extend_path)

        def build(selection: Selection) -> ModelRunner:
            return ModelRunner(
                self.loaded,
                selection,
                capacity(selection),
                device=self.device,
                dtype=self.dtype,
                kv_dtype=self.kv_dtype,
                index_dtype=self.index_dtype,
                parallel=self.parallel,
                policy=policy,
                serving=serving,
                check_layers=check_layers,
                seed=seed,
                two_batch_overlap=two_batch_overlap,
            )

        selection, runner = build_chosen(self.registry, self.request, self.problem, build, self.failed, self.ranking)
        if self.parallel.size > 1:
            check_same_choice(selection, self.parallel, self.device)
        return selection, runner

    def build_draft(
        self, target: ModelRunner, speculation: Speculation, serving: Serving, policy: ExtendPolicy
    ) -> tuple[Selection, DraftRunner] | None:
        """Build the draft's backend and a runner on it, over the target's pages; return None if there is no draft
        model."""
        draft, choice = self.draft, self.draft_choice
        if draft is None or choice is None:
            return None
        problem = replace(choice.problem, page_size=target.capacity.page_size)

        def build(selection: Selection) -> DraftRunner:
            return DraftRunner(
                draft,
                target.pools,
                selection,
                target.capacity,
                speculation,
                device=self.device,
                dtype=self.dtype,
                kv_dtype=self.kv_dtype,
                index_dtype=self.index_dtype,
                workspace=target.workspace,
                parallel=self.parallel,
                policy=policy,
                serving=serving,
            )

        selection, runner = build_chosen(self.registry, choice.request, problem, build, choice.failed, self.ranking)
        if self.parallel.size > 1:
            check_same_choice(selection, self.parallel, self.device)
        return selection, runner


def prepare(
    model: str,
    options: EngineOptions,
    parallel: TensorParallel,
    *,
    progress: Callable[[int, int], None] | None = None,
    on_memory: Callable[[MemoryPlan], None] | None = None,
    is_embedding: bool = False,
) -> Prepared:
    """Select backends for a model, then read its weights. An embedding model needs no output head.

    ``on_memory`` gets the estimate of an engine's memory before weights are read. Raises PoolError if it cannot fit.
    """
    spec = load_spec(model)
    if (options.context_length or 0) > spec.context_length:
        raise UsageError(
            f"`context_length` {options.context_length} is more than the model's {spec.context_length} tokens; give up "
            f"to {spec.context_length}, or change the model's rope scaling in its config",
            settings=[Setting.CONTEXT_LENGTH],
        )
    registry, speculation = load_registry(), options.speculation
    device, processor = open_device(options.device, registry.device)
    graphs = runtime_of(device).graph is not None
    dtype = options.dtype or model_dtype(spec) or DType.FLOAT32
    kv_dtype = options.kv_dtype or dtype
    if options.batch_invariant and device.type == "cuda" and not usable(device):
        raise UsageError(
            "`batch_invariant` multiplies matrices by Triton kernels on a GPU, and Triton is not installed; install "
            "Triton, or leave the option out",
            settings=["batch_invariant"],
        )
    if options.batch_invariant and parallel.size > 2:  # two numbers have the same sum in either order
        parallel = RankOrder(parallel)
    problem = Problem(
        spec,
        device.type,
        processor.sm or None,
        dtype,
        kv_dtype,
        index_dtype=options.index_dtype,
        page_size=options.page_size,
        tensor_parallel=parallel.size,
        is_embedding=is_embedding,
        cuda_graph=options.demanded_graphs,
        wants_graphs=graphs and options.captures and not is_embedding,
        wants_prefill_graphs=graphs and options.captures_prefills and not is_embedding,
        coordinator="hisparse" if options.enable_hisparse else None,
        mla_extend=options.extend_policy.forced,
        architecture=processor.architecture,
        invariant=frozenset(INVARIANCE if options.batch_invariant else ()),
    )
    if problem.cuda_graph and not graphs:
        name = "cuda_graph_batch_sizes" if options.cuda_graph_batch_sizes is not None else "cuda_graph_prefill_sizes"
        raise UsageError(
            f"`{name}` demands CUDA graphs, and the device is {device.type}; leave it out, or choose another `device`",
            settings=[name, Setting.DEVICE],
        )
    if options.enable_hisparse:
        check_buffers(spec, options)
    asked = BackendRequest(options.attention_backend, options.role_backends, options.backend_options)
    problem = target_problem(problem, speculation)
    ranking = default_ranking(registry, problem, per_batch=True)
    request = target_request(registry, asked, problem, speculation, ranking)
    # Refusals, broken formats and kernel libraries that cannot be imported are reported before a checkpoint is read.
    selection = choose_importable(registry, request, problem, ranking)
    check_codecs(spec.layers, registry.kv_format(kv_dtype))
    failed = selection.failed
    draft_choice = draft_layers = None
    if speculation is not None and speculation.has_model:
        with naming_draft(speculation):
            draft_layers = draft_spec(speculation, model)
        draft_choice = choose_draft(registry, asked, problem, speculation, draft_layers, ranking)
    source = open_source(model, device=device, seed=options.seed, random_weights=options.random_weights)
    if options.batch_invariant and device.type != "cpu" and source.config.get("quantization_config") is not None:
        raise UsageError(
            "`batch_invariant` is not available for quantized weights on a GPU, whose kernels differ by the number of "
            "tokens; leave the option out, use `device` cpu, or a checkpoint in bfloat16",
            settings=["batch_invariant"],
        )
    if not is_embedding:
        sources = [source]
        if speculation is not None and speculation.has_model and speculation.draft_model is not None:
            with naming_draft(speculation):
                sources.append(
                    open_source(speculation.draft_model, device=device, random_weights=options.random_weights)
                )
        sizes = [one.nbytes(torch_dtype(dtype), parallel.size) for one in sources if isinstance(one, Checkpoint)]
        weights = sum(sizes) if len(sizes) == len(sources) else None
        rows = None if draft_layers is None else draft_layers.for_rank(parallel.size)
        rank, config = spec.for_rank(parallel.size), source.config
        plan = plan_memory(rank, config, options, selection, torch_dtype(dtype), kv_dtype, device, weights, rows)
        if on_memory is not None:
            on_memory(plan)
    loaded = load_model(
        model,
        dtype=torch_dtype(dtype),
        device=device,
        parallel=parallel,
        seed=options.seed,
        random_weights=options.random_weights,
        progress=progress,
        head=not is_embedding,
        source=source,
    )
    loaded.module.batch_invariant = options.batch_invariant
    draft = None
    if speculation is not None and draft_choice is not None:
        with naming_draft(speculation):
            draft = load_draft(
                speculation,
                loaded,
                model,
                dtype=torch_dtype(dtype),
                device=device,
                parallel=parallel,
                seed=options.seed,
                random_weights=options.random_weights,
            )
    return Prepared(
        loaded,
        device,
        torch_dtype(dtype),
        kv_dtype,
        options.index_dtype,
        parallel,
        registry,
        request,
        problem,
        failed,
        ranking,
        draft,
        draft_choice,
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
