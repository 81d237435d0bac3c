"""Early check of SGLang's ``ServerArgs``: the same selection as in the scheduler, but from the model's config."""

from __future__ import annotations

from typing import Any

from attnplug import DType, Problem, Role, Setting, UsageError
from attnplug.host import AttnplugError, ModelConfigError, load_model, load_registry, model_dtype
from attnplug_sglang.host import PREFIX, Refused, check_version, refuse, render, requested_invariance
from attnplug_sglang.selection import (
    check_options,
    choose,
    decode_graphs,
    drafts,
    raise_if_unsupported,
    resolved,
    served_roles,
)

_AUTO = ("auto", None)
_KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3")
"""Values of ``--kv-cache-dtype`` that the bridge supports, as SGLang spells them."""


def check_server_args(arguments: Any) -> None:
    """Raise :class:`Refused` with every reason if an ``attnplug:NAME`` is requested that cannot serve.

    A model that is not a local folder is checked later, by the scheduler.
    """
    arguments = resolved(arguments)
    prefill, decode = attention_backends(arguments)
    for name in dict.fromkeys((prefill, decode)):
        if name is None or not name.startswith(PREFIX):
            continue
        check_version(name)
        try:
            _check(name, served_roles(name, prefill, decode), arguments)
        except AttnplugError as error:
            raise Refused(f"{name}: {error.format(render)}", error=error) from None


def attention_backends(arguments: Any) -> tuple[Any, Any]:
    """Names of the prefill and the decode backend."""
    both = arguments.attention_backend
    return arguments.prefill_attention_backend or both, arguments.decode_attention_backend or both


def _check(name: str, roles: tuple[Role, ...], arguments: Any) -> None:
    registry = load_registry()
    check_options(registry)
    raise_if_unsupported(arguments, name)
    try:
        model = load_model(arguments.model_path, registry)
    except ModelConfigError:  # not a local folder, or a model that only SGLang can read
        model = None
    tokens, topk = drafts(arguments)
    dtype = arguments.dtype if arguments.dtype not in _AUTO else None
    own = None if model is None else model_dtype(model)
    problem = Problem(
        model,
        device=arguments.device,
        dtype=own if dtype is None else DType.parse(dtype, "dtype"),
        kv_dtype=_kv_dtype(arguments.kv_cache_dtype, model is not None and model.is_sparse),
        page_size=arguments.page_size,
        speculative_tokens=tokens,
        speculative_topk=topk,
        tensor_parallel=arguments.tp_size if not getattr(arguments, "enable_dp_attention", False) else 1,
        invariant=requested_invariance(arguments),
    )
    if refusals := refuse(problem):
        raise Refused(f"{name}: {refusals[0].format(render)}", refusals)
    graphs = problem.device == "cuda" and decode_graphs(
        arguments.cuda_graph_config, bool(getattr(arguments, "disable_cuda_graph", False))
    )
    verify = Role(arguments.speculative_attention_mode)
    if model is not None:
        choose(registry, name, roles, problem, verify=verify, graphs=graphs)
    elif name != PREFIX + "auto":
        registry.get(name.removeprefix(PREFIX))


def _kv_dtype(given: str | None, sparse: bool) -> DType | None:
    """dtype of the KV cache, if it is decided. The fp8 rows of a sparse model depend on the GPU."""
    if given in _AUTO:
        return None
    if (dtype := DType.spelled(str(given))) is None:
        raise UsageError(
            f"`{Setting.KV_DTYPE}` {given} is not supported by attnplug's bridge, only {', '.join(_KV_DTYPES)}",
            settings=[Setting.KV_DTYPE],
        )
    return None if sparse and dtype is DType.FLOAT8_E4M3 else dtype
