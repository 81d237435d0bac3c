"""Builds attnplug backends from SGLang's model runner, over its caches."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from attnplug import BackendError, DType, ExtendPath, ModelSpec, Problem, Role, Serving
from attnplug.host import (
    AttnplugError,
    HostContext,
    Limits,
    MLADims,
    ModelAttention,
    Parallel,
    Selection,
    WorkspaceOwner,
    build_selection,
    compile_progress,
    load_registry,
)
from attnplug_sglang.backend import AttnplugBackend
from attnplug_sglang.host import Refused, refuse_sparse_trees, render, requested_invariance
from attnplug_sglang.kv_pools import PageTable, kv_format, kv_groups, pools_over
from attnplug_sglang.layers import Layers, with_sinks
from attnplug_sglang.mla_prefill import extend_path
from attnplug_sglang.selection import (
    choose_and_build,
    decode_graphs,
    drafts,
    raise_if_unsupported,
    resolved,
    served_roles,
)
from attnplug_sglang.sparse import SelectPositions, indexer_dims

logger = logging.getLogger(__name__)


def build(name: str, runner: Any) -> AttnplugBackend:
    """Build the backend ``attnplug:NAME`` for SGLang's registry. Raises :class:`Refused` with every reason."""
    try:
        return _build(name, runner)
    except AttnplugError as error:
        raise Refused(f"{name}: {error.format(render)}", error=error) from error


def _build(name: str, runner: Any) -> AttnplugBackend:
    arguments = resolved(runner.server_args)
    if runner.is_draft_worker:
        raise BackendError(
            "it cannot run drafts: SGLang's draft workers support only its own backends; give "
            "`draft_attention_backend`, such as triton",
            settings=["draft_attention_backend"],
        )
    raise_if_unsupported(arguments, name)
    layers, model = _model(runner)
    roles = served_roles(name, runner.prefill_attention_backend_str, runner.decode_attention_backend_str)
    problem = _problem(runner, model)
    if refusal := refuse_sparse_trees(problem):
        raise Refused(f"{name}: {refusal.format(render)}", [refusal])
    selection, groups = choose_and_build(
        load_registry(),
        name,
        roles,
        problem,
        lambda selection: (selection, _groups(runner, layers, model, selection)),
        verify=Role(arguments.speculative_attention_mode),
        graphs=problem.device == "cuda" and decode_graphs(arguments.cuda_graph_config, _graphs_disabled(arguments)),
    )
    by_batch = any(len(choice.serving) > 1 for choice in selection.choices.values())
    select = _index_select(arguments) if model.is_sparse else None
    backend = AttnplugBackend(runner, layers, groups, select, by_batch=by_batch)
    if runner.use_mla_backend:  # selected rows are read from the cache in place: absorbed only
        _register_prefill(name, backend, ExtendPath.ABSORBED if model.is_sparse else problem.extend_path)
        _pass_parts(name, backend.takes_q_rope and _may_pass_parts(runner.model, arguments))
    logger.info("%s: %s", name, _summary(selection))
    return backend


def _groups(
    runner: Any, layers: Layers, model: ModelSpec, selection: Selection
) -> list[tuple[ModelAttention, PageTable, tuple[int, ...]]]:
    """Build the backends of every KV group. Each has its page table and the ids of its layers."""
    groups = []
    workspace = WorkspaceOwner()
    for group in kv_groups(runner.token_to_kv_pool, layers.specs):
        part = ModelSpec(model.name, model.model_type, group.layers, model.context_length, model.dtype, model.ranks)
        pools = pools_over(runner.token_to_kv_pool, group, runner.page_size, _scales(runner))
        context = _context(runner, part, pools, workspace)
        with compile_progress(partial(logger.info, "attnplug has compiled %d of %d kernels")):
            attention = ModelAttention(build_selection(selection, context), pools)
        table = PageTable(runner.req_to_token_pool.req_to_token, runner.page_size, group.translate)
        groups.append((attention, table, tuple(layer.layer_id for layer in group.layers)))
    return groups


def _model(runner: Any) -> tuple[Layers, ModelSpec]:
    """Attention layers of this rank, read from the loaded model: their heads are the rank's own."""
    config, model = runner.model_config, runner.model
    modules = [module for module in model.modules() if isinstance(module, RadixAttention)]
    dims, v_head_dim, indexer = None, 0, None
    if runner.use_mla_backend:
        dims = MLADims(config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim)
        v_head_dim, indexer = config.v_head_dim, indexer_dims(config.hf_text_config)
    layers = Layers(modules, dims, v_head_dim, with_sinks(model.named_modules(), RadixAttention), indexer)
    if not layers.specs:
        raise BackendError(f"{type(model).__name__} has no attention layer that SGLang's backends serve")
    total, own = config.num_attention_heads, layers.specs[0].num_heads
    ranks = total // own if own and total % own == 0 else 1
    kind = getattr(config.hf_config, "model_type", type(model).__name__)
    spec = ModelSpec(kind, kind, layers.specs, config.context_len, str(runner.dtype).removeprefix("torch."), ranks)
    return layers, spec


def _problem(runner: Any, model: ModelSpec) -> Problem:
    device, sm = torch.device(runner.device).type, None
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability(runner.gpu_id)
        sm = major * 10 + minor
    arguments = resolved(runner.server_args)
    tokens, topk = drafts(arguments)
    return Problem(
        model,
        device=device,
        sm=sm,
        dtype=DType.parse(str(runner.dtype), "dtype"),
        kv_dtype=kv_format(runner.token_to_kv_pool),
        page_size=runner.page_size,
        speculative_tokens=tokens,
        speculative_topk=topk,
        is_embedding=not runner.is_generation,
        invariant=requested_invariance(arguments),
    )


def _index_select(arguments: Any) -> SelectPositions:
    """Return SGLang's top-k function over its indexer's scores (``--dsa-topk-backend``)."""
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend

    select: SelectPositions = DSATopKBackend(arguments.dsa_topk_backend).topk_func
    return select


def _graphs_disabled(arguments: Any) -> bool:
    return bool(getattr(arguments, "disable_cuda_graph", False))


def _scales(runner: Any) -> dict[int, tuple[float, float]]:
    """fp8 scales from the checkpoint, by layer id."""
    if runner.kv_cache_dtype is not torch.float8_e4m3fn:
        return {}
    modules = (module for module in runner.model.modules() if isinstance(module, RadixAttention))
    return {
        module.layer_id: (module.k_scale_float or 1.0, module.v_scale_float or 1.0)
        for module in modules
        if module.k_scale_float is not None or module.v_scale_float is not None
    }


def _context(runner: Any, model: ModelSpec, pools: Any, workspace: WorkspaceOwner) -> HostContext:
    arguments, table = resolved(runner.server_args), runner.req_to_token_pool
    chunk = arguments.chunked_prefill_size
    requests, context = int(table.size) + 1, int(table.req_to_token.shape[1])
    prompt = chunk if chunk and chunk > 0 else max(context, arguments.max_prefill_tokens)
    tokens = max(1, drafts(arguments)[0])
    return HostContext(
        model=model,
        device=torch.device(runner.device, runner.gpu_id) if runner.device == "cuda" else torch.device(runner.device),
        dtype=runner.dtype,
        kv_dtype=kv_format(runner.token_to_kv_pool),
        page_size=runner.page_size,
        limits=Limits(requests, max(prompt + requests, requests * tokens), context),
        pools=pools,
        workspace=workspace,
        parallel=Parallel(getattr(runner, "tp_rank", 0) % model.ranks, model.ranks),
        serving=Serving(
            disaggregation_mode=arguments.disaggregation_mode,
            disable_chunked_prefix_cache=bool(arguments.disable_chunked_prefix_cache),
            is_embedding=not runner.is_generation,
            chunked_prefill_size=chunk,
            disable_radix_cache=bool(arguments.disable_radix_cache),
        ),
    )


def _register_prefill(name: str, backend: AttnplugBackend, path: ExtendPath | None) -> None:
    """Register the function that chooses the extend path of SGLang's MLA models (C1).

    It depends on the backend's claims and SGLang's thresholds. ``path``: the only one that may run, if results must not
    depend on the batch.
    """
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import is_in_tc_piecewise_cuda_graph
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    abilities = backend.attention[0].backend.claims.mla_extend
    if path is not None:
        abilities &= {path}
    methods = {
        ExtendPath.ONE_SHOT: AttnForwardMethod.MHA_ONE_SHOT,
        ExtendPath.CHUNKED: AttnForwardMethod.MHA_CHUNKED_KV,
    }

    def handle(layer: Any, batch: Any) -> Any:
        captured = is_in_breakable_cuda_graph() or is_in_tc_piecewise_cuda_graph()
        return methods.get(extend_path(batch, layer, abilities, captured), AttnForwardMethod.MLA)

    handlers.AttentionBackendRegistry.register(name, handle)


def _may_pass_parts(model: Any, arguments: Any) -> bool:
    """Return True if SGLang's path with queries in two parts computes the same as the one that concatenates them."""
    if torch.version.hip is not None:
        return False  # 0.5.14 leaves the rotary embedding of dense models to fused kernels of its own backends (aiter)
    if arguments.speculative_algorithm is not None:
        return False  # 0.5.14: layers of a draft look up the target's backend, but run on a backend of SGLang's
    # Only the concatenated path scales queries by position for every backend (Mistral Large 3).
    return all(getattr(module, "llama_4_scaling_config", None) is None for module in model.modules())


def _pass_parts(name: str, parts: bool) -> None:
    """Have SGLang's MLA models pass queries and new rows to backend ``name`` in two parts, or concatenated.

    SGLang has no function for it; models read the list in every forward. Its other uses do not concern this bridge:
    queries quantized early require a method of SGLang's sparse backend, merging over a divided context requires
    ``--dcp-size``, which is refused, and prefill graphs of sparse models only move the absorption of queries.
    """
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS as in_parts

    if name in in_parts:
        in_parts.remove(name)  # of a model that this process had before
    if parts:
        in_parts.append(name)


def _summary(selection: Selection) -> str:
    return ", ".join(
        f"{role} by {' or '.join(backend.spec.name for backend in choice.serving)} ({choice.why(render)})"
        for role, choice in selection.choices.items()
    )
