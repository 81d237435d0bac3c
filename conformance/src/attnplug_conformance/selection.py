"""Backends that a request selects, for layers of every kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnplug import AttentionKind, DType, LayerSpec, ModelSpec, Problem, Role, UsageError
from attnplug.declare.device import Processor
from attnplug.declare.options import parse_options
from attnplug.host import BackendRequest, MLADims, Registry, SelectionError, select, split_settings
from attnplug_conformance.subject import linear_dims

AUTO = "auto"
MLA = MLADims(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64)
LAYERS = {
    "MHA": LayerSpec(0, AttentionKind.MHA, 8, 2, 64, 64, 64**-0.5),
    "MLA": LayerSpec(0, AttentionKind.MLA, 16, 16, 192, 128, 192**-0.5, mla=MLA),
}


def _linear_layer(kind: AttentionKind) -> LayerSpec:
    dims = linear_dims(kind, 64, 64)
    return LayerSpec(0, kind, dims.heads, dims.key_heads, dims.key_dim, dims.value_dim, 64**-0.5, linear=dims)


LINEAR = {kind: _linear_layer(kind) for kind in AttentionKind if kind.is_linear}


def selected_backends(
    registry: Registry,
    attention: str,
    roles: Mapping[str, str],
    device: str,
    processor: Processor,
    settings: Sequence[str] = (),
) -> list[str]:
    """Return the selected backends, without duplicates. Raises SelectionError if no layer kind has one."""
    found: dict[str, None] = {}
    refused: list[SelectionError] = []
    full = {Role(role): name for role, name in roles.items() if role != Role.LINEAR}
    linear = {Role.LINEAR: roles[Role.LINEAR]} if Role.LINEAR in roles else {}
    given: tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]] = ({}, {})
    for name, values in split_settings(settings).items():
        known = registry.backends.get(name)
        given[known is not None and Role.LINEAR in known.spec.capabilities.roles][name] = values
    wanted = [(layer, BackendRequest(AUTO, linear, given[1])) for layer in LINEAR.values()] if linear else []
    if not linear or attention != AUTO or full:
        wanted += [(layer, BackendRequest(attention, full, given[0])) for layer in LAYERS.values()]
    for layer, request in wanted:
        for dtype in (DType.BFLOAT16, DType.FLOAT32):
            model, sm = ModelSpec("check", "check", (layer,), 4096), processor.sm or None
            problem = Problem(model, device, sm, dtype, dtype, architecture=processor.architecture)
            try:
                selection = select(registry, request, problem)
            except SelectionError as error:
                refused.append(error)
                continue
            found |= {selection.chosen(role).spec.name: None for role in selection.choices}
            break
    if not found:
        raise min(refused, key=_reasons)
    return list(found)


def _reasons(error: SelectionError) -> int:
    """Number of refusals. The layer with the fewest is closest to what the backend supports."""
    return sum(len(choice.candidates[0].refusals) for choice in error.selection.unserved if choice.candidates)


def check_options(registry: Registry, settings: Sequence[str]) -> None:
    """Raise UsageError for options of unknown backends and for unknown options."""
    for name, values in split_settings(settings).items():
        if name not in registry.backends:
            raise UsageError(f"--backend-option {name}.…: there is no backend {name!r}")
        parse_options(name, registry.backends[name].spec.options, values)
