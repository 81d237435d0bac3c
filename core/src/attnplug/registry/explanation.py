"""Text explanations of a selection: every role, every candidate and every refusal (D3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from attnplug.auto.schedule import BackendSchedule
from attnplug.declare.problem import GraphLevel, Problem, Role
from attnplug.declare.settings import Render
from attnplug.declare.spec import BackendSpec
from attnplug.registry.selection import AUTO, Candidate, RoleChoice, Selection

_SHOWN_BATCHES = {Role.PREFILL: ((1, 512), (1, 4096)), Role.DECODE: ((1, 1), (8, 1), (64, 1))}
"""Batches, as (requests, tokens), for which an explanation names the fastest backend of a schedule."""


def refusal_lines(selection: Selection, render: Render) -> Iterator[str]:
    """Yield why roles are not served: the refusals of the requested backend, or of every candidate under ``auto``."""
    by_name: dict[str, list[RoleChoice]] = {}
    for choice in selection.unserved:
        if choice.requested != AUTO:
            by_name.setdefault(choice.requested, []).append(choice)
    for choices in by_name.values():
        yield from _refused_by_name(choices, render)
        yield ""
    yield from _inputs(selection)
    for choice in selection.unserved:
        if choice.requested == AUTO:
            yield ""
            yield from _role_lines(choice, selection.problem, render)


def _refused_by_name(choices: Sequence[RoleChoice], render: Render) -> Iterator[str]:
    """Yield the refusals of a backend that was requested for these roles, and the backends usable instead."""
    asked = choices[0].candidates[0].backend
    roles = " and ".join(choice.role for choice in choices)
    by = " and ".join(dict.fromkeys(render(choice.setting) or choice.setting for choice in choices))
    yield f"{asked.spec.name} ({asked.source}) was asked for by {by} and cannot serve {roles}:"
    reasons: dict[str, list[RoleChoice]] = {}
    for choice in choices:
        for refusal in choice.candidates[0].refusals:
            reasons.setdefault(refusal.format(render), []).append(choice)
    for reason, concerned in reasons.items():
        yield f"  - {reason}" if len(concerned) == len(choices) else f"  - for {concerned[0].role}: {reason}"
    usable = [{c.backend.spec.name: None for c in choice.candidates if not c.refusals} for choice in choices]
    names = ", ".join(name for name in usable[0] if all(name in others for others in usable))
    yield f"usable instead: {names or 'none'}; 'attnplug explain' gives every reason against every other backend"


def explanation(selection: Selection, render: Render = str) -> Iterator[str]:
    """Yield the inputs of a selection, then every role with every candidate and every refusal, as lines.

    ``render`` spells settings as the host's users know them. Example::

        print("\\n".join(explanation(explain(registry, BackendRequest(), problem))))
    """
    yield from _inputs(selection)
    for choice in selection.choices.values():
        yield ""
        yield from _role_lines(choice, selection.problem, render)
    if selection.problem.wants_graphs and not selection.unserved:
        yield ""
        specs = [backend.spec for role in selection.choices for backend in selection.serving(role)]
        extenders = selection.graph_extenders(
            {spec.name: _declared_level(selection, spec, Role.PREFILL)[0] for spec in specs}
        )
        yield f"CUDA graphs: {_graph_level(selection)}" + (f"; short prefills by {extenders[0]}" if extenders else "")


def _graph_level(selection: Selection) -> str:
    """Return the CUDA graph level that all serving backends declare, and the backends that limit it."""
    levels: dict[str, tuple[GraphLevel, str]] = {}
    for role in selection.choices:
        for backend in selection.serving(role):
            name, limit = backend.spec.name, _declared_level(selection, backend.spec, role)
            levels[name] = min(limit, levels.get(name, limit))
    lowest, highest = min(levels.values())[0], max(levels.values())[0]
    if lowest is highest and lowest is not GraphLevel.NEVER:
        return lowest.name
    reasons: dict[str, list[str]] = {}
    for name, (level, why) in levels.items():
        if level is lowest:
            reasons.setdefault(why, []).append(name)
    limiting = "; ".join(f"by {' and '.join(names)} ({why})" for why, names in reasons.items())
    return f"{lowest.name}, {limiting}"


def _declared_level(selection: Selection, spec: BackendSpec, role: Role) -> tuple[GraphLevel, str]:
    """Return the highest graph level that a backend allows in a role, and the reason against the next one, if any."""
    allowed = GraphLevel.NEVER
    for level in list(GraphLevel)[1:]:
        problem = replace(selection.problem, cuda_graph=level)
        if refusals := spec.refusals(problem, role, selection.options.get(spec.name)):
            if problem.captured([role]) <= spec.capabilities.cuda_graph:
                return allowed, refusals[0].message
            return allowed, "no more is declared" if allowed else "none are declared"
        allowed = level
    return allowed, ""


def _role_lines(choice: RoleChoice, problem: Problem, render: Render) -> Iterator[str]:
    """Yield the outcome for one role and every candidate. Unrelated candidates are only named."""
    if choice.chosen is not None:
        outcome = f"{' or '.join(b.spec.name for b in choice.serving)} ({choice.why(render)})"
    elif choice.requested != AUTO:
        outcome = f"{choice.requested} was asked for and cannot serve"
    else:
        outcome = "no installed backend can serve" if choice.candidates else "no backend is installed"
    yield f"{choice.role}: {outcome}"
    if choice.schedule is not None:
        for requests, tokens in _SHOWN_BATCHES[choice.role]:
            size = f"{requests} × {tokens} new tokens" if tokens > 1 else f"{requests} request{'s' * (requests > 1)}"
            yield f"  {size}: {_by_batch(choice.schedule, choice.role, problem, requests, tokens)}"
    if (
        choice.chosen is None
        and choice.role is Role.LINEAR
        and not any(Role.LINEAR in candidate.backend.spec.capabilities.roles for candidate in choice.candidates)
    ):
        yield "  no available backend supports linear attention; 'attnplug plugins' shows broken and blocked ones too"
    unrelated = unrelated_candidates(choice)
    for candidate in choice.candidates:
        if candidate in unrelated:
            continue
        backend, status = candidate.backend, "refused" if candidate.refusals else "usable"
        yield f"  {backend.spec.name} ({backend.source}): {status}"
        for refusal in candidate.refusals:
            yield f"    - {refusal.format(render)}"
    if unrelated:
        names = ", ".join(candidate.backend.spec.name for candidate in unrelated)
        yield f"  for another role or kind of attention: {names}"


def _by_batch(schedule: BackendSchedule, role: Role, problem: Problem, requests: int, tokens: int) -> str:
    """Fastest backends for batches of one size, and the backend of its graph if one graph serves all lengths."""
    by_length = schedule.describe(requests, tokens)
    if problem.graphs_by_length or not problem.wants_graphs or role is not Role.DECODE or problem.model is None:
        return by_length
    captured = schedule.overall(requests, tokens, problem.model.context_length)
    return captured if captured == by_length else f"{captured} in a graph; without, {by_length}"


def unrelated_candidates(choice: RoleChoice) -> list[Candidate]:
    """Return the candidates that an explanation only names: unrelated ones, if ``auto`` chose a backend."""
    if choice.requested != AUTO or choice.chosen is None:
        return []
    return [candidate for candidate in choice.candidates if candidate.is_unrelated]


def _inputs(selection: Selection) -> Iterator[str]:
    problem = selection.problem
    if problem.model is not None:
        yield f"model      {problem.model.describe()}"
    device = problem.device or "any"
    if problem.device == "cuda" and problem.sm is not None:
        device += f", SM {problem.sm}"
    yield f"device     {device}"
    index = "" if problem.index_dtype is None else f", index keys {problem.index_dtype}"
    yield f"dtype      {problem.dtype or 'any'}, KV cache {problem.kv_dtype or 'any'}{index}"
    page_size = problem.page_size if problem.page_size is not None else f"{selection.page_size} (chosen)"
    yield f"page size  {page_size if selection.page_size is not None else 'any'}"
    extras = {
        f"{problem.speculative_tokens} speculative tokens": problem.speculative_tokens,
        f"trees of drafts with {problem.speculative_topk} branches": problem.speculative_topk > 1,
        f"{problem.tensor_parallel} tensor-parallel ranks": problem.tensor_parallel > 1,
        "embedding: no decode": problem.is_embedding,
        f"cache layout: {problem.layout}": problem.layout is not None,
        "upper bounds of lengths only": not problem.exact_lengths,
        f"CUDA graphs: {problem.cuda_graph.name}": problem.cuda_graph,
    }
    if any(extras.values()):
        yield f"also       {', '.join(text for text, applies in extras.items() if applies)}"
