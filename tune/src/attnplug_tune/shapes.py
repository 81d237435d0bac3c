"""Layer shapes to measure, from a model or from ``--shapes``, and the tasks of each backend."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnplug.auto.table_store import MeasuredShape
from attnplug.declare.errors import UsageError
from attnplug.declare.model import AttentionKind, IndexerDims, LayerSpec, MLADims, ModelSpec
from attnplug.declare.problem import DEFAULT_PAGE_SIZE, DType, Problem, Role
from attnplug.declare.spec import Registered
from attnplug.registry.registry import installed_format
from attnplug_tune.points import Point

_MLA = re.compile(r"mla:(\d+)(?:k(\d+))?", re.ASCII)
_HEADS = re.compile(r"(?:gqa|mha):(\d+)(?:/(\d+))?(?:x(\d+))?(?:w(\d+))?", re.ASCII)
_NOPE, _ROPE, _LATENT, _VALUE = 128, 64, 512, 128
"""Widths of DeepSeek's layers, which most MLA models share."""
_INDEX_HEADS, _INDEX_DIM = 64, 128
"""Heads and their width in the index of DeepSeek-V3.2."""
_CONTEXT = 1 << 20


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement: a layer, as one rank has it, at one point."""

    layer: LayerSpec
    shape: MeasuredShape
    point: Point

    def __str__(self) -> str:
        return f"{self.point.role} {self.point} ({self.shape})"

    def moved_bytes(self) -> float:
        """Bytes of attended cache rows, queries, new rows and outputs, each moved once."""
        shape, point = self.shape, self.point
        most = min((most + point.tokens for most in (shape.window, shape.topk) if most), default=1 << 62)
        seen = sum(min(length, most) for length in point.lengths)
        row, widths = installed_format(shape.kv_dtype).token_nbytes(self.layer), (shape.head_dim, shape.value_dim)
        moved = shape.num_heads * sum(map(installed_format(shape.dtype).row_nbytes, widths)) + row
        return seen * row + point.rows * moved


def parse_shapes(text: str) -> tuple[ModelSpec, ...]:
    """Parse ``--shapes`` into models of one layer each. Commas separate them.

    ``mla:16`` has 16 heads over DeepSeek's latent rows, with ``k2048`` at the end over 2048 rows that DeepSeek's index
    selects. ``gqa:32/8x128`` has 32 query and 8 KV heads of 128; ``w4096`` at the end is a sliding window.
    """
    return tuple(ModelSpec(part.strip(), "shape", (_layer(part.strip()),), _CONTEXT) for part in text.split(","))


def _layer(text: str) -> LayerSpec:
    if match := _MLA.fullmatch(text):
        heads, width, topk = int(match[1]), _NOPE + _ROPE, None if match[2] is None else int(match[2])
        if heads and topk != 0:
            dims = MLADims(_LATENT, _NOPE, _ROPE)
            index = None if topk is None else IndexerDims(_INDEX_HEADS, _INDEX_DIM, topk)
            return LayerSpec(0, AttentionKind.MLA, heads, heads, width, _VALUE, width**-0.5, mla=dims, indexer=index)
    elif match := _HEADS.fullmatch(text):
        heads, kv_heads, dim = int(match[1]), int(match[2] or match[1]), int(match[3] or 128)
        window = None if match[4] is None else int(match[4])
        if heads and kv_heads and dim and window != 0 and not heads % kv_heads:
            return LayerSpec(0, AttentionKind.MHA, heads, kv_heads, dim, dim, dim**-0.5, sliding_window=window)
    raise UsageError(
        f"--shapes: {text!r} is not a layer; write mla:16, gqa:32/8x128 or mha:8x64 (heads, KV heads that divide them, "
        "width of a head), with w4096 at the end for a sliding window, or mla:16k2048 for 2048 rows that an index "
        "selects"
    )


def layers_to_measure(model: ModelSpec) -> tuple[tuple[LayerSpec, ...], tuple[str, ...]]:
    """One layer of each distinct shape that can be measured, and a description of the others.

    Layers that share an index are left out if the model has one: another layer like them is measured with it.
    """
    found: dict[LayerSpec, None] = {}
    left_out: dict[str, int] = {}
    for layer in model.layers:
        other = None
        if layer.linear is not None:
            other = f"{layer.kind} layers"
        elif layer.compressed is not None or (layer.mla is not None and layer.sinks):
            other = "layers of models with compressed entries"
        if other is not None:
            left_out[other] = left_out.get(other, 0) + 1
        elif layer.indexer is None or layer.indexer.shares is None or not model.index_layers:
            found[replace(layer, layer_id=0)] = None
    return tuple(found), tuple(f"{count} {other}" for other, count in left_out.items())


def page_size_for(registered: Registered, problem: Problem) -> int:
    """Requested page size, or the default, or else the smallest one that a backend supports."""
    if problem.page_size is not None:
        return problem.page_size
    sizes = registered.spec.capabilities.page_sizes
    multiple = 1 if problem.model is None else problem.model.page_multiple
    multiple = math.lcm(multiple, installed_format(problem.kv_dtype or DType.FLOAT32).page_multiple)
    default = math.lcm(DEFAULT_PAGE_SIZE, multiple)
    if sizes.kernel is None or sizes.kernel_size(default) is not None:
        return default
    return math.lcm(min(sizes.kernel), multiple)


def tasks_of(registered: Registered, problems: Sequence[Problem], points: Sequence[Point]) -> tuple[Task, ...]:
    """Tasks of a backend: the points in order, and at each point every layer shape.

    Roles that the backend refuses for a model are left out. So is the prefill of MLA if the host has its own kernels.
    """
    found: dict[Task, None] = {}
    served = {
        (number, role)
        for number, problem in enumerate(problems)
        for role in {point.role for point in points}
        if not (role is Role.PREFILL and problem.prefilled_by_host) and not registered.spec.refusals(problem, role)
    }
    for point in points:
        for number, problem in enumerate(problems):
            if (number, point.role) not in served or problem.model is None:
                continue
            dtype, path = problem.dtype or DType.FLOAT32, problem.mla_extend if point.role is Role.PREFILL else None
            page_size = page_size_for(registered, problem)
            for layer in layers_to_measure(problem.model.for_rank(problem.tensor_parallel))[0]:
                types = dtype, problem.kv_dtype or dtype
                shape = MeasuredShape.of(layer, types, page_size, problem.absorbed_by_host, path)
                found[Task(layer, shape, point)] = None
    return tuple(found)
