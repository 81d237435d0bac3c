"""Which backend SGLang's options ask for, for which roles, and whether it can serve; nothing is built here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from attnplug import GraphLevel, Problem, Role
from attnplug.host import BackendRequest, Registry, Selection, SelectionError, UsageError, default_ranking, explain
from attnplug_sglang.host import PREFIX, fit, given_options

_CHAINS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "FROZEN_KV_MTP")
"""Speculation whose drafts are chains, if ``--speculative-eagle-topk`` is 1."""


def served_roles(name: str, prefill: str, decode: str) -> tuple[Role, ...]:
    """The roles that SGLang's two options give to ``name``."""
    return tuple(role for role, given in ((Role.PREFILL, prefill), (Role.DECODE, decode)) if given == name)


def choose(
    registry: Registry, name: str, roles: tuple[Role, ...], problem: Problem, *, verify: Role, graphs: bool
) -> Selection:
    """The backend for ``attnplug:NAME``, or an error with every reason against it.

    ``graphs`` is False if the user turned them off. Roles that SGLang gives to another backend are left to that one.
    """
    asked = name.removeprefix(PREFIX)
    own = {role: asked for role in roles if len(roles) == 1}
    options = {of: given for of, given in given_options().items() if asked in ("auto", of)}
    request = BackendRequest("auto" if own else asked, own, options, verify)
    fitted = fit(problem)
    if not graphs:
        fitted = replace(fitted, cuda_graph=GraphLevel.NEVER, wants_graphs=False)
    selection = explain(registry, request, fitted, ranking=default_ranking(registry, fitted))
    selection = replace(
        selection, choices={role: selection.choices[role] for role in roles if role in selection.choices}
    )
    if selection.unserved:
        raise SelectionError(selection)
    return selection


def check_options(registry: Registry) -> None:
    """Refuse options of backends that are not installed. Those of installed ones are read when they are chosen."""
    for name in given_options():
        registry.get(name)


def resolved(arguments: Any) -> Any:
    """SGLang's arguments with what it decided about them. Before it kept the two apart, it changed them in place."""
    try:
        from sglang.srt.arg_groups.overrides import resolved_view
    except ImportError:
        return arguments
    return resolved_view(arguments)


def unsupported(arguments: Any) -> Iterator[str]:
    """What SGLang is asked for that this bridge cannot carry, by its options. ``arguments`` is its ``ServerArgs``."""

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
            yield f"--{option.replace('_', '-')} {given(option)} divides the context over ranks"
    if given("enable_hisparse"):
        yield "--enable-hisparse keeps part of the cache on the host"
    if given("enable_unified_memory"):
        yield "--enable-unified-memory numbers slots in its own way"
    if given("enable_mis"):
        yield "--enable-mis: multi-item scoring needs a mask of its own"
    if _prefill_graphs(given("cuda_graph_config")) == "full":
        yield "--cuda-graph-backend-prefill full captures attention of prefill; use breakable or disabled"


def _speculation(algorithm: str, given: Any) -> Iterator[str]:
    if algorithm not in _CHAINS:
        yield f"--speculative-algorithm {algorithm} verifies trees of drafts; it must be one of {', '.join(_CHAINS)}"
        return
    if (given("speculative_eagle_topk") or 1) > 1:
        yield (
            f"--speculative-eagle-topk {given('speculative_eagle_topk')} makes trees of drafts, and only chains are "
            "verified; give 1"
        )
    draft = given("speculative_draft_attention_backend")
    if draft is None or draft.startswith(PREFIX):
        yield (
            f"drafts run on a backend of SGLang's own, not on {draft or 'the one of the target'}; give "
            "--speculative-draft-attention-backend, such as triton"
        )


def _prefill_graphs(config: Any) -> str | None:
    phase = config.get("prefill") if isinstance(config, dict) else getattr(config, "prefill", None)
    return phase.get("backend") if isinstance(phase, dict) else getattr(phase, "backend", None)


def decode_graphs(config: Any, disabled: bool) -> bool:
    """Whether SGLang captures decode."""
    phase = config.get("decode") if isinstance(config, dict) else getattr(config, "decode", None)
    backend = phase.get("backend") if isinstance(phase, dict) else getattr(phase, "backend", None)
    return not disabled and backend != "disabled"


def insist(arguments: Any, name: str) -> None:
    """Raise one error with everything that cannot be carried."""
    if problems := list(unsupported(arguments)):
        raise UsageError(f"{name} cannot serve this in SGLang:\n" + "\n".join(f"  - {problem}" for problem in problems))
