"""Backend selection for SGLang's options, before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from attnplug import GraphLevel, Problem, Role, UsageError
from attnplug.host import BackendRequest, Registry, Selection, build_chosen, default_ranking
from attnplug_sglang.host import HOST, PREFIX, fit, given_options

Built = TypeVar("Built")
_DRAFTERS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "FROZEN_KV_MTP")
"""Speculative algorithms whose drafts are chains, or trees with ``--speculative-eagle-topk`` branches."""


def served_roles(name: str, prefill: str, decode: str) -> tuple[Role, ...]:
    """Roles for which SGLang's two options name ``name``."""
    return tuple(role for role, given in ((Role.PREFILL, prefill), (Role.DECODE, decode)) if given == name)


def choose(
    registry: Registry, name: str, roles: tuple[Role, ...], problem: Problem, *, verify: Role, graphs: bool
) -> Selection:
    """Select the backend for ``attnplug:NAME``. Raises :class:`SelectionError` with every reason against it.

    ``graphs`` is False if the user turned them off. Roles with another backend of SGLang's are not considered.
    """
    return choose_and_build(registry, name, roles, problem, lambda selection: selection, verify=verify, graphs=graphs)


def choose_and_build(
    registry: Registry,
    name: str,
    roles: tuple[Role, ...],
    problem: Problem,
    build: Callable[[Selection], Built],
    *,
    verify: Role,
    graphs: bool,
) -> Built:
    """Select as ``choose`` does, and build. ``auto`` continues without a backend that cannot be built, and warns."""
    requested = name.removeprefix(PREFIX)
    own = {role: requested for role in roles if len(roles) == 1}
    options = {of: given for of, given in given_options().items() if requested in ("auto", of)}
    request = BackendRequest("auto" if own else requested, own, options, verify)
    fitted = fit(problem)
    if not graphs:
        fitted = replace(fitted, cuda_graph=GraphLevel.NEVER, wants_graphs=False)
    ranking = default_ranking(registry, fitted, per_batch=HOST.per_batch(fitted))
    return build_chosen(registry, request, fitted, build, ranking=ranking, roles=roles)[1]


def check_options(registry: Registry) -> None:
    """Raise for options of backends that are not installed. The others are parsed when a backend is selected."""
    for name in given_options():
        registry.get(name)


def resolved(arguments: Any) -> Any:
    """Server arguments with SGLang's overrides. Older versions change the arguments in place."""
    try:
        from sglang.srt.arg_groups.overrides import resolved_view
    except ImportError:
        return arguments
    return resolved_view(arguments)


def drafts(arguments: Any) -> tuple[int, int]:
    """Return the rows per request of a verify, and the branches of a draft per step; ``(0, 1)`` without drafts."""
    if arguments.speculative_algorithm is None:
        return 0, 1
    return arguments.speculative_num_draft_tokens or 0, arguments.speculative_eagle_topk or 1


def unsupported(arguments: Any) -> Iterator[str]:
    """Reasons against SGLang's ``ServerArgs``: options that this bridge does not support."""

    def given(name: str) -> Any:
        return getattr(arguments, name, None)

    if algorithm := given("speculative_algorithm"):
        yield from _speculation(str(algorithm), given)
    if given("enable_pdmux"):
        yield "--enable-pdmux splits a prefill by layers"
    if given("dllm_algorithm"):
        yield "--dllm-algorithm: diffusion language models attend in both directions"
    for option in ("dcp_size", "attn_cp_size"):
        if (given(option) or 1) > 1:
            named = f"--{option.replace('_', '-')} {given(option)}"
            yield f"{named} divides the context over ranks, which SGLang implements inside its own backends; give 1"
    if given("enable_hisparse"):
        yield "--enable-hisparse keeps part of the cache on the host"
    if given("enable_unified_memory"):
        yield "--enable-unified-memory uses its own slot numbering"
    if given("enable_mis"):
        yield "--enable-mis: multi-item scoring needs its own mask"
    if _prefill_graphs(given("cuda_graph_config")) == "full":
        yield "--cuda-graph-backend-prefill full captures attention of prefill; use breakable or disabled"


def _speculation(algorithm: str, given: Any) -> Iterator[str]:
    if algorithm not in _DRAFTERS:
        yield f"--speculative-algorithm {algorithm} is not supported; it must be one of {', '.join(_DRAFTERS)}"
        return
    draft = given("speculative_draft_attention_backend")
    if draft is None or draft.startswith(PREFIX):
        yield (
            f"drafts run on one of SGLang's own backends, not on {draft or 'that of the target'}; give "
            "--speculative-draft-attention-backend, such as triton"
        )


def _prefill_graphs(config: Any) -> str | None:
    phase = config.get("prefill") if isinstance(config, dict) else getattr(config, "prefill", None)
    return phase.get("backend") if isinstance(phase, dict) else getattr(phase, "backend", None)


def decode_graphs(config: Any, disabled: bool) -> bool:
    """Return True if SGLang captures decode steps in CUDA graphs."""
    phase = config.get("decode") if isinstance(config, dict) else getattr(config, "decode", None)
    backend = phase.get("backend") if isinstance(phase, dict) else getattr(phase, "backend", None)
    return not disabled and backend != "disabled"


def raise_if_unsupported(arguments: Any, name: str) -> None:
    """Raise one :class:`UsageError` with every unsupported option."""
    if reasons := list(unsupported(arguments)):
        raise UsageError(f"{name} cannot serve this in SGLang:\n" + "\n".join(f"  - {reason}" for reason in reasons))
