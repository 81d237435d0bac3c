"""``attnplug check``: run a backend on real pages and compare every result with float64."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from attnplug.choose.assembly import build_chosen, build_selection
from attnplug.choose.registry import Registry, load_registry
from attnplug.choose.select import AUTO, BackendRequest, Selection, SelectionError, select
from attnplug.cli import output
from attnplug.cli.linear_scene import LINEAR_LAYERS, LinearScene
from attnplug.cli.scene import CHECKED_DTYPES, CONTEXT, STEPS, Result, Scene
from attnplug.cli.sparse_scene import SPARSE_LAYERS, SparseScene
from attnplug.cli.warn import warn_of_plugins
from attnplug.contract.backend import AttentionBackend
from attnplug.contract.context import HostContext, Limits
from attnplug.declare.errors import UsageError, describe_error
from attnplug.declare.model import AttentionKind, LayerSpec, MLADims, ModelSpec
from attnplug.declare.options import split_settings
from attnplug.declare.problem import DType, Problem, Role
from attnplug.declare.settings import Render, Setting
from attnplug.machine.device import open_device


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The command line of ``check``, as given."""

    attention: str = AUTO
    roles: Mapping[Role, str] = field(default_factory=dict)
    device: str | None = None
    dtype: str = "float32"
    kv_dtype: str | None = None
    page_size: int | None = None
    seed: int = 0
    settings: tuple[str, ...] = ()

    def layers(self) -> dict[str, LayerSpec]:
        """What to check: full attention, and linear attention if a backend for it is asked for. If no other backend is
        asked for, linear attention alone."""
        linear = LINEAR_LAYERS if Role.LINEAR in self.roles else {}
        asked_for_full = self.attention != AUTO or set(self.roles) - {Role.LINEAR}
        return (LAYERS if asked_for_full or not linear else {}) | linear

    def request(self, layer: LayerSpec, registry: Registry) -> BackendRequest:
        """The part of the request that concerns a layer."""
        linear = layer.kind.is_linear
        settings = {
            name: values
            for name, values in split_settings(self.settings).items()
            if name not in registry.backends or _for_linear(registry, name) == linear
        }
        roles = {role: name for role, name in self.roles.items() if (role is Role.LINEAR) == linear}
        return BackendRequest(AUTO if linear else self.attention, roles, settings)


def _for_linear(registry: Registry, name: str) -> bool:
    return Role.LINEAR in registry.backends[name].spec.capabilities.roles


Staged = tuple[Selection, tuple[Scene | LinearScene, AttentionBackend]]

# Each follows a layer like it to which nothing is written: whoever reads the first layer's cache gets NaN.
LAYERS = {
    "MHA 4 heads": LayerSpec(1, AttentionKind.MHA, 4, 4, 64, 64, 64**-0.5),
    "GQA 8/2 heads": LayerSpec(1, AttentionKind.MHA, 8, 2, 64, 64, 64**-0.5),
    "GQA, window 24": LayerSpec(1, AttentionKind.MHA, 8, 2, 64, 64, 64**-0.5, sliding_window=24),
    "GQA, logit cap 30": LayerSpec(1, AttentionKind.MHA, 8, 2, 64, 64, 64**-0.5, logit_cap=30.0),
    "MLA 16 heads, 512+64": LayerSpec(
        1,
        AttentionKind.MLA,
        16,
        16,
        192,
        128,
        192**-0.5,
        mla=MLADims(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64),
    ),
    **SPARSE_LAYERS,
}


def run_check(options: CheckOptions, render: Render, *, json: bool) -> int:
    console = Console(stderr=json, width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)
    registry = load_registry()
    warn_of_plugins(registry)
    device, sm = open_device(options.device)
    dtype = DType.parse(options.dtype, Setting.DTYPE)
    if not 0 <= options.seed < 1 << 63:
        raise UsageError(f"--seed {options.seed} is not a seed; give a number from 0 to {(1 << 63) - 1}")
    if dtype not in CHECKED_DTYPES:
        raise UsageError(f"--dtype {dtype} is a type for caches; use one of {', '.join(CHECKED_DTYPES)}")
    kv_dtype = DType.parse(options.kv_dtype, Setting.KV_DTYPE) if options.kv_dtype is not None else dtype
    _introduce(console, registry, device, sm)
    served: dict[str, Selection] = {}
    refused: dict[str, SelectionError] = {}
    for name, layer in options.layers().items():
        before = (replace(layer, layer_id=0),) if layer.layer_id else ()
        model = ModelSpec(name, "check", (*before, layer), CONTEXT)
        problem = Problem(model, device.type, sm, dtype, kv_dtype, options.page_size)
        try:
            served[name] = select(registry, options.request(layer, registry), problem)
        except SelectionError as error:
            refused[name] = error
    if not served:
        raise min(refused.values(), key=_refusals)
    for name, selection in served.items():
        _tell_choice(console, name, selection, render)
    for name, refusal in refused.items():
        first = [choice.candidates[0] for choice in refusal.selection.unserved]
        reasons = dict.fromkeys(reason.told(render) for candidate in first for reason in candidate.refusals)
        console.print(f"{name}: refused by {first[0].backend.spec.name}: {'; '.join(reasons)}", style="yellow")

    def stage(name: str) -> Staged:
        problem = served[name].problem
        assert problem.model is not None
        request = options.request(problem.model.layers[-1], registry)
        return build_chosen(registry, request, problem, lambda choice: _build(choice, device, options.seed))

    results = _run(console, served, stage, render)
    _show(console, results, json)
    return 0 if all(result.holds for result in results) else 1


def _refusals(error: SelectionError) -> int:
    """How many reasons there are: the layer with the fewest is the one that a backend was made for."""
    return sum(len(choice.candidates[0].refusals) for choice in error.selection.unserved if choice.candidates)


def _introduce(console: Console, registry: Registry, device: torch.device, sm: int | None) -> None:
    place = torch.cuda.get_device_name(device) + f", SM {sm}" if device.type == "cuda" else "cpu"
    console.print(f"attnplug check on {place}, torch {torch.__version__}", style="bold")
    found = ", ".join(f"{name} ({backend.source})" for name, backend in registry.backends.items())
    console.print(f"found {found}")


def _tell_choice(console: Console, name: str, selection: Selection, render: Render) -> None:
    for outcome in sorted({f"{choice.chosen_name}, {choice.why(render)}" for choice in selection.choices.values()}):
        console.print(f"{name}: {outcome}")


def _run(
    console: Console,
    served: dict[str, Selection],
    stage: Callable[[str], Staged],
    render: Render,
) -> list[Result]:
    results: list[Result] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("checking", total=len(served) * len(STEPS))
        for name, first in served.items():
            progress.update(task, description=name)
            selection, (scene, backend) = stage(name)
            if selection.choices != first.choices:  # the first choice could not be built
                _tell_choice(console, name, selection, render)
            for result in _check_layer(name, selection, scene, backend):
                results.append(result)
                progress.advance(task)
    return results


def _check_layer(
    name: str, selection: Selection, scene: Scene | LinearScene, backend: AttentionBackend
) -> Iterator[Result]:
    chosen = [selection.chosen(role) for role in selection.choices]
    with_lse = all("lse" in registered.spec.capabilities.extras for registered in chosen)
    for step in STEPS:
        try:
            yield scene.run(name, step, backend, with_lse)
        except Exception as error:
            failure = f"{backend.backend_id.name}: {describe_error(error)}{_place(error)}"
            yield Result(name, step.title, sum(step.new_tokens.values()), scene.tolerance, failure=failure)
            return  # the cache may hold anything now


def _build(selection: Selection, device: torch.device, seed: int) -> tuple[Scene | LinearScene, AttentionBackend]:
    problem = selection.problem
    assert problem.model is not None and problem.dtype is not None and problem.kv_dtype is not None
    assert selection.page_size is not None
    layer = problem.model.layers[-1]
    stage = LinearScene if layer.kind.is_linear else Scene if layer.indexer is None else SparseScene
    scene = stage(layer, problem.dtype, problem.kv_dtype, selection.page_size, device, seed)
    context = HostContext(
        model=problem.model,
        device=scene.device,
        dtype=scene.dtype,
        kv_dtype=problem.kv_dtype,
        page_size=scene.page_size,
        limits=Limits(max_requests=3, max_tokens=256, max_context=CONTEXT),
        pools=scene.pools,
        workspace=scene.workspace,
    )
    return scene, build_selection(selection, context)


def _place(error: BaseException) -> str:
    """Where an exception was raised: its last frame."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _show(console: Console, results: list[Result], json: bool) -> None:
    table = Table(box=None)
    for column in ("layer", "step"):
        table.add_column(column)
    for column in ("rows", "error", "lse error", "allowed", "plan ms", "run ms"):
        table.add_column(column, justify="right")
    table.add_column("")
    for result in results:
        table.add_row(
            result.layer,
            result.step,
            str(result.rows),
            f"{result.error:.1e}",
            "–" if result.lse_error is None else f"{result.lse_error:.1e}",
            f"{result.tolerance:.0e}",
            f"{result.plan_ms:.2f}",
            f"{result.forward_ms:.2f}",
            Text("ok", style="green") if result.holds else Text("WRONG", style="bold red"),
        )
    console.print(table)
    for result in results:
        if result.failure is not None:
            console.print(f"{result.layer}, {result.step}: {result.failure}", style="red")
    wrong = sum(not result.holds for result in results)
    console.print(f"{len(results) - wrong} of {len(results)} checks hold against float64")
    if json:
        output.write_json([_as_json(result) for result in results])


def _as_json(result: Result) -> dict[str, object]:
    """The result's fields and whether it holds; NaN, which JSON lacks, becomes null."""
    values = {**asdict(result), "holds": result.holds}
    return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in values.items()}
