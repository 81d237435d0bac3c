"""``attnplug explain``: show the choice for each role and every refusal of every candidate."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace

from attnplug.auto.ranking import default_ranking
from attnplug.cli import output
from attnplug.cli.app import refusal_as_json
from attnplug.declare.device import Processor
from attnplug.declare.errors import Render, Setting, UsageError
from attnplug.declare.model import ModelSpec
from attnplug.declare.options import split_settings
from attnplug.declare.problem import DType, ExtendPath, GraphLevel, Problem, Role, model_dtype, sorted_levels
from attnplug.registry.hosts import load_host
from attnplug.registry.registry import Registry, load_model, load_registry
from attnplug.registry.select import explain
from attnplug.registry.selection import BackendRequest, RoleChoice, explanation


def request_of(parsed: argparse.Namespace) -> BackendRequest:
    roles = {role: name for role in Role if (name := getattr(parsed, f"{role}_attention_backend")) is not None}
    return BackendRequest(parsed.attention_backend, roles, split_settings(parsed.backend_option))


def problem_of(parsed: argparse.Namespace, model: ModelSpec, registry: Registry) -> Problem:
    """Return the problem that the options describe. Without ``--cuda-graph``, backends run in graphs if they can."""
    device, processor = "cuda", Processor("", parsed.sm or 0)  # the requested one, which may be absent
    if parsed.sm is None:
        device = ("cuda" if registry.processors("cuda") else "cpu") if parsed.device is None else parsed.device
        registry.device(device)  # an unknown one is an error
        found = registry.processors(device)
        processor = found[0] if found else Processor(device)
        if device == "cuda" and not found:
            raise UsageError(
                "--device cuda is requested, but this machine has no CUDA device; "
                "give the target's --sm (90 for an H100 or H200, 100 for a B200)"
            )
    elif parsed.device not in (None, "cuda"):
        raise UsageError(f"--sm {parsed.sm} names a GPU, but --device is {parsed.device}; leave one of them out")
    levels = {level.name.lower(): level for level in GraphLevel}
    if parsed.cuda_graph is not None and parsed.cuda_graph.lower() not in levels:
        raise UsageError(f"--cuda-graph {parsed.cuda_graph!r} is unknown; use one of {', '.join(levels)}")
    dtype = DType.parse(parsed.dtype, Setting.DTYPE) if parsed.dtype is not None else model_dtype(model)
    if parsed.speculative_topk > 1 and not parsed.speculative_tokens:
        raise UsageError(
            f"--speculative-topk {parsed.speculative_topk} is given, but speculation is off (--speculative-tokens "
            "turns it on); leave it out"
        )
    return Problem(
        model=model,
        device=device,
        sm=processor.sm or None if parsed.sm is None else parsed.sm,
        architecture=processor.architecture,
        dtype=dtype,
        kv_dtype=dtype if parsed.kv_dtype is None else registry.kv_format(parsed.kv_dtype).name,
        index_dtype=parsed.index_dtype and registry.kv_format(parsed.index_dtype, Setting.INDEX_DTYPE, "index").name,
        page_size=parsed.page_size,
        cuda_graph=GraphLevel.NEVER if parsed.cuda_graph is None else levels[parsed.cuda_graph.lower()],
        wants_graphs=registry.device(device).graphs is not None and parsed.cuda_graph is None,
        wants_prefill_graphs=True,
        speculative_tokens=parsed.speculative_tokens,
        speculative_topk=parsed.speculative_topk,
        coordinator="hisparse" if parsed.enable_hisparse else None,
        tensor_parallel=parsed.tensor_parallel,
        mla_extend=None if parsed.mla_extend is None else ExtendPath.parse(parsed.mla_extend),
        invariant=frozenset((parsed.batch_invariant or "").replace(",", " ").split()),
    )


def run(parsed: argparse.Namespace) -> int:
    if parsed.host is not None and parsed.mla_extend is not None:
        raise UsageError(
            f"--mla-extend {parsed.mla_extend} is for our own engine, but {parsed.host} decides itself how MLA "
            "prefills; leave one of them out"
        )
    registry, request = load_registry(), request_of(parsed)
    problem = problem_of(parsed, load_model(parsed.model, registry), registry)
    output.warn_of_plugins(registry)
    render, per_batch, refusals, host = parsed.render, True, [], {}
    if parsed.host is not None:
        spec, bridge = load_host(parsed.host)
        refusals, installed, render = spec.refusals(problem), spec.installed(), spec.render
        if not parsed.json:
            print(f"host       {spec.title} {spec.versions}, {installed or 'not installed here'} ({bridge})")
            print("".join(f"  - {refusal.format(render)}\n" for refusal in refusals), end="")
        shown = [refusal_as_json(refusal, render) for refusal in refusals]
        host = {"name": parsed.host, "version": installed, "versions": spec.versions, "refusals": shown}
        problem = spec.fit(replace(problem, wants_prefill_graphs=False))
        per_batch = spec.per_batch(problem)
    ranking = default_ranking(registry, problem, per_batch=per_batch)
    selection = explain(registry, request, problem, ranking=ranking)
    if parsed.json:
        roles = {role.value: _as_json(choice, render) for role, choice in selection.choices.items()}
        problem, model = selection.problem, selection.problem.model
        assert model is not None, "--model is required"
        shown_problem = {
            **{field.name: getattr(problem, field.name) for field in fields(problem)},
            "architecture": None if problem.architecture is None else str(problem.architecture),
            "model": {"name": model.name, "type": model.model_type, "description": model.describe()},
            "cuda_graph": None if problem.wants_graphs else problem.cuda_graph.name.lower(),  # None: as far as possible
            "page_size": selection.page_size,  # the one that is used
            "page_size_requested": problem.page_size,
            "invariant": sorted_levels(problem.invariant),
        }
        inputs = {"problem": shown_problem, "cuda_graph": selection.captured_graphs()}
        output.write_json(
            {**inputs, "kv_formats": sorted(registry.kv_formats), **roles, **({"host": host} if host else {})}
        )
    else:
        print("\n".join(explanation(selection, render)))
        print(f"\nKV formats, by --kv-dtype: {', '.join(sorted(registry.kv_formats))}")
        if any(choice.unrelated for choice in selection.choices.values()):
            print("\n--json has every reason against backends for another role or kind of attention")
    return 1 if refusals or selection.unserved else 0


def _as_json(choice: RoleChoice, render: Render) -> dict[str, object]:
    return {
        "requested": choice.requested,
        "chosen": choice.chosen_name,
        "why": choice.why(render),
        "serving": [backend.spec.name for backend in choice.serving],
        "candidates": [
            {
                "name": candidate.backend.spec.name,
                "distribution": candidate.backend.source.distribution,
                "version": candidate.backend.source.version,
                "invariant": sorted_levels(candidate.backend.spec.capabilities.invariant),
                "refusals": [refusal_as_json(refusal, render) for refusal in candidate.refusals],
            }
            for candidate in choice.candidates
        ],
    }
