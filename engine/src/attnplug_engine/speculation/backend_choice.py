"""Selection of backends for a target and its draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from attnplug import GraphLevel, ModelSpec, Problem, Refusal, Role, UsageError
from attnplug.auto.ranking import Ranking
from attnplug.host import BackendRequest, Registry, choose_importable, explain
from attnplug_engine.settings.speculation import ALGORITHM, TOPK, Speculation


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """A draft's problem and backend request, checked before weights are read. The page size, once known, is the
    target's."""

    request: BackendRequest
    problem: Problem
    failed: Mapping[str, Refusal]


def target_problem(problem: Problem, speculation: Speculation | None) -> Problem:
    """Return the target's problem with the rows that it verifies. The draft has a problem of its own."""
    if speculation is None:
        return problem
    level = GraphLevel.UNIFORM if problem.cuda_graph else problem.cuda_graph
    model = problem.model
    if speculation.topk > 1 and model is not None and model.linear_layers:
        raise UsageError(
            f"`{TOPK}` {speculation.topk} makes trees of drafts, and {model.name} has linear-attention layers, whose "
            f"states follow one path only; give a `{TOPK}` of 1",
            settings=[TOPK],
        )
    return replace(
        problem,
        speculative_tokens=speculation.nodes,
        speculative_topk=speculation.topk,
        drafts_by_host=True,
        cuda_graph=level,
    )


def target_request(
    registry: Registry, request: BackendRequest, problem: Problem, speculation: Speculation | None, ranking: Ranking
) -> BackendRequest:
    """Return the backend request of the target alone."""
    name = request.roles.get(Role.DRAFT)
    if speculation is None and name is not None:
        raise UsageError(
            f"`{Role.DRAFT.setting}` {name} is given, but speculation is off; leave it out, or turn speculation on by "
            f"`{ALGORITHM}`",
            settings=[Role.DRAFT.setting, ALGORITHM],
        )
    if speculation is None or (name is None and not request.options):
        return request
    if name is not None and not speculation.has_model:
        raise UsageError(
            f"`{Role.DRAFT.setting}` {name} is given, but `{ALGORITHM}` {speculation.algorithm} has no model; leave it "
            "out",
            settings=[Role.DRAFT.setting, ALGORITHM],
        )
    roles: dict[Role, str] = {role: other for role, other in request.roles.items() if role is not Role.DRAFT}
    request = replace(request, roles=roles)
    if name is None or name not in request.options:
        return request
    bare = explain(registry, replace(request, options={}), problem, ranking=ranking)
    if name in {backend.spec.name for choice in bare.choices.values() for backend in choice.serving}:
        return request
    return replace(request, options={other: given for other, given in request.options.items() if other != name})


def choose_draft(
    registry: Registry,
    request: BackendRequest,
    target: Problem,
    speculation: Speculation,
    spec: ModelSpec,
    ranking: Ranking,
) -> DraftChoice:
    """Choose the backend of a draft model with layers ``spec``, in the role draft.

    Raises SelectionError with every reason.
    """
    _refuse_states(spec, speculation)
    index_dtype = target.index_dtype if spec.index_layers else None
    problem = replace(
        target,
        model=spec,
        index_dtype=index_dtype,
        is_draft=True,
        drafts_by_host=False,
        coordinator=None,
        mla_extend=None,
        invariant=frozenset(),  # a draft changes no token
    )
    roles: dict[Role, str] = {role: name for role, name in request.roles.items() if role is Role.DRAFT}
    bare = BackendRequest(request.attention, roles)
    chosen = choose_importable(registry, bare, problem, ranking)
    name = chosen.chosen(Role.DRAFT).spec.name
    options = {name: request.options[name]} if name in request.options else {}
    return DraftChoice(replace(bare, options=options), problem, chosen.failed)


def _refuse_states(spec: ModelSpec, speculation: Speculation) -> None:
    if spec.linear_layers:
        raise UsageError(
            f"the draft {spec.name} has linear-attention layers, whose states cannot be rolled back; give another "
            f"draft, or another `{ALGORITHM}` than {speculation.algorithm}",
            settings=[ALGORITHM],
        )
