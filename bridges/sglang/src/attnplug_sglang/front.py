"""The check of SGLang's arguments in its front end: the same choice as in the scheduler, from the model's config."""

from __future__ import annotations

from typing import Any

from attnplug import DType, Problem, Role
from attnplug.host import AttnplugError, ModelConfigError, load_model, load_registry, model_dtype
from attnplug_sglang.choice import check_options, choose, decode_graphs, insist, resolved, served_roles
from attnplug_sglang.host import PREFIX, refuse, refuse_version, render

_AUTO = ("auto", None)


def refuse_arguments(arguments: Any) -> None:
    """Raise a ValueError with every reason if one of our names is asked for and cannot serve.

    A model that is not a local folder is not looked at here; the scheduler does.
    """
    arguments = resolved(arguments)
    prefill, decode = attention_backends(arguments)
    for name in dict.fromkeys((prefill, decode)):
        if name is None or not name.startswith(PREFIX):
            continue
        refuse_version(name)
        try:
            _check(name, served_roles(name, prefill, decode), arguments)
        except AttnplugError as error:
            raise ValueError(f"{name}: {error.told(render)}") from None


def attention_backends(arguments: Any) -> tuple[Any, Any]:
    """The names for prefill and decode."""
    both = arguments.attention_backend
    return arguments.prefill_attention_backend or both, arguments.decode_attention_backend or both


def _check(name: str, roles: tuple[Role, ...], arguments: Any) -> None:
    registry = load_registry()
    check_options(registry)
    insist(arguments, name)
    try:
        model = load_model(arguments.model_path, registry)
    except ModelConfigError:  # not a local folder, or a model that we cannot read but SGLang can
        model = None
    speculates = arguments.speculative_algorithm is not None
    dtype = arguments.dtype if arguments.dtype not in _AUTO else None
    own = None if model is None else model_dtype(model)
    problem = Problem(
        model,
        device=arguments.device if arguments.device in ("cuda", "cpu") else None,
        dtype=own if dtype is None else DType.parse(dtype, "dtype"),
        kv_dtype=None if arguments.kv_cache_dtype in _AUTO else DType.parse(arguments.kv_cache_dtype, "kv_dtype"),
        page_size=arguments.page_size,
        speculative_tokens=(arguments.speculative_num_draft_tokens or 0) if speculates else 0,
        tensor_parallel=arguments.tp_size if not getattr(arguments, "enable_dp_attention", False) else 1,
    )
    for refusal in refuse(problem):
        raise AttnplugError(refusal.message)
    graphs = problem.device == "cuda" and decode_graphs(
        arguments.cuda_graph_config, bool(getattr(arguments, "disable_cuda_graph", False))
    )
    verify = Role(arguments.speculative_attention_mode)
    if model is not None:
        choose(registry, name, roles, problem, verify=verify, graphs=graphs)
    elif name != PREFIX + "auto":
        registry.get(name.removeprefix(PREFIX))
