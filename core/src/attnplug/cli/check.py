"""``attnplug check``: run a backend on real pages and compare every result with float64."""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from attnplug.backend import AttentionBackend, BackendContext, ForwardExtras, Limits, build_backend
from attnplug.batch import ForwardBatch
from attnplug.capabilities import DEVICES
from attnplug.cli import output
from attnplug.cli.warn import warn_of_plugins
from attnplug.context import forward_context, plan_forward
from attnplug.errors import BackendError, UsageError, describe_error
from attnplug.kv import KVPools, MHAPool, MLAPool, PageAllocator, SlotTable, torch_dtype
from attnplug.model import AttentionKind, LayerSpec, MLADims, ModelSpec
from attnplug.options import split_settings
from attnplug.plan import ForwardMode
from attnplug.problem import DType, Problem, Role
from attnplug.reference import attention_float64
from attnplug.registry import Registry, load_registry
from attnplug.select import AUTO, BackendRequest, Selection, SelectionError, select
from attnplug.workspace import WorkspaceOwner
from attnplug.wrappers import SplitBackend

_TOLERANCE = {DType.FLOAT32: 2e-6, DType.FLOAT16: 5e-3, DType.BFLOAT16: 2e-2}
_MODEL_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The command line of ``check``, as given."""

    attention: str = AUTO
    device: str | None = None
    dtype: str = "float32"
    kv_dtype: str | None = None
    page_size: int | None = None
    seed: int = 0
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One batch: how many new tokens each request gets; requests that are absent get none."""

    title: str
    mode: ForwardMode
    new_tokens: dict[int, int]


# Request 0 starts without a prefix and then decodes; 1 comes in two parts; 2 arrives while the others run.
STEPS = (
    Step("prefill, no prefix", ForwardMode.EXTEND, {0: 37, 1: 100}),
    Step("prefill with prefix", ForwardMode.EXTEND, {1: 29}),
    Step("mixed", ForwardMode.MIXED, {0: 1, 1: 33, 2: 50}),
    Step("decode", ForwardMode.DECODE, {2: 1, 0: 1, 1: 1}),
)

LAYERS = {
    "MHA 4 heads": LayerSpec(0, AttentionKind.MHA, 4, 4, 64, 64, 64**-0.5),
    "GQA 8/2 heads": LayerSpec(0, AttentionKind.MHA, 8, 2, 64, 64, 64**-0.5),
    "GQA, window 24": LayerSpec(0, AttentionKind.MHA, 8, 2, 64, 64, 64**-0.5, sliding_window=24),
    "GQA, logit cap 30": LayerSpec(0, AttentionKind.MHA, 8, 2, 64, 64, 64**-0.5, logit_cap=30.0),
    "MLA 16 heads, 512+64": LayerSpec(
        0,
        AttentionKind.MLA,
        16,
        16,
        192,
        128,
        192**-0.5,
        mla=MLADims(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64),
    ),
}


@dataclass(frozen=True, slots=True)
class Result:
    """One layer in one step: the largest errors and the time of plan and forward, or what went wrong instead."""

    layer: str
    step: str
    rows: int
    tolerance: float
    error: float = math.nan
    lse_error: float | None = None
    plan_ms: float = math.nan
    forward_ms: float = math.nan
    failure: str | None = None

    @property
    def holds(self) -> bool:
        # written so that NaN fails
        return self.error <= self.tolerance and (self.lse_error is None or self.lse_error <= self.tolerance)


def run_check(options: CheckOptions, *, json: bool) -> int:
    console = Console(stderr=json, width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)
    registry = load_registry()
    warn_of_plugins(registry)
    device, sm = _device(options.device)
    dtype = DType.parse(options.dtype, "--dtype")
    if not 0 <= options.seed < 1 << 63:
        raise UsageError(f"--seed {options.seed} is no seed; give a number from 0 to {(1 << 63) - 1}")
    if dtype not in _TOLERANCE:
        raise UsageError(f"--dtype {dtype} is a type for caches; use one of {', '.join(_TOLERANCE)}")
    request = BackendRequest(options.attention, {}, split_settings(options.settings))
    kv_dtype = DType.parse(options.kv_dtype, "--kv-dtype") if options.kv_dtype is not None else dtype
    _introduce(console, registry, device, sm)
    served: dict[str, Selection] = {}
    refused: dict[str, SelectionError] = {}
    for name, layer in LAYERS.items():
        model = ModelSpec(name, "check", (layer,), _MODEL_CONTEXT)
        problem = Problem(model, device.type, sm, dtype, kv_dtype, options.page_size)
        try:
            served[name] = select(registry, request, problem)
        except SelectionError as error:
            refused[name] = error
    if not served:
        raise next(iter(refused.values()))
    for name, selection in served.items():
        for outcome in sorted({f"{choice.chosen_name}, {choice.why}" for choice in selection.choices.values()}):
            console.print(f"{name}: {outcome}")
    for name, refusal in refused.items():
        first = [choice.candidates[0] for choice in refusal.selection.unserved]
        reasons = dict.fromkeys(str(reason) for candidate in first for reason in candidate.refusals)
        console.print(f"{name}: refused by {first[0].backend.spec.name}: {'; '.join(reasons)}", style="yellow")
    results = _run(console, served, device, options.seed)
    _show(console, results, json)
    return 0 if all(result.holds for result in results) else 1


def _device(asked: str | None) -> tuple[torch.device, int | None]:
    if asked is not None and asked not in DEVICES:
        raise UsageError(f"--device {asked!r} is unknown; use one of {', '.join(DEVICES)}")
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise UsageError(
            f"--device cuda is asked for, but torch {torch.__version__} sees no CUDA device; "
            "use --device cpu, or see 'attnplug doctor' for what is missing"
        )
    if asked == "cpu" or not available:
        return torch.device("cpu"), None
    major, minor = torch.cuda.get_device_capability()
    return torch.device("cuda"), major * 10 + minor


def _introduce(console: Console, registry: Registry, device: torch.device, sm: int | None) -> None:
    place = torch.cuda.get_device_name(device) + f", SM {sm}" if device.type == "cuda" else "cpu"
    console.print(f"attnplug check on {place}, torch {torch.__version__}", style="bold")
    for name, backend in registry.backends.items():
        console.print(f"found {name} ({backend.source}): {backend.spec.summary}")


def _run(console: Console, served: dict[str, Selection], device: torch.device, seed: int) -> list[Result]:
    results: list[Result] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("checking", total=len(served) * len(STEPS))
        for name, selection in served.items():
            progress.update(task, description=name)
            for result in _check_layer(name, selection, device, seed):
                results.append(result)
                progress.advance(task)
    return results


def _check_layer(name: str, selection: Selection, device: torch.device, seed: int) -> Iterator[Result]:
    problem = selection.problem
    assert problem.model is not None and problem.dtype is not None and problem.kv_dtype is not None
    assert selection.page_size is not None
    scene = Scene(problem.model.layers[0], problem.dtype, problem.kv_dtype, selection.page_size, device, seed)
    backend = _build(selection, scene)
    chosen = [selection.chosen(role) for role in selection.choices]
    with_lse = all("lse" in registered.spec.capabilities.extras for registered in chosen)
    tolerance = _TOLERANCE[problem.dtype]
    with forward_context(backend):
        for step in STEPS:
            try:
                yield scene.run(name, step, backend, with_lse, tolerance)
            except Exception as error:
                failure = f"{backend.backend_id.name}: {describe_error(error)}{_place(error)}"
                yield Result(name, step.title, sum(step.new_tokens.values()), tolerance, failure=failure)
                return  # what the cache holds now is anybody's guess


def _build(selection: Selection, scene: Scene) -> AttentionBackend:
    """The chosen backend, or a split of two where prefill and decode got different ones."""
    problem = selection.problem
    assert problem.model is not None and problem.kv_dtype is not None
    built: dict[Role, AttentionBackend] = {}
    for role in selection.choices:
        registered = selection.chosen(role)
        same = [other for other in built if selection.chosen(other) is registered]
        context = BackendContext(
            name=registered.spec.name,
            roles=frozenset(other for other in selection.choices if selection.chosen(other) is registered),
            model=problem.model,
            device=scene.device,
            dtype=scene.dtype,
            kv_dtype=problem.kv_dtype,
            page_size=scene.table.page_size,
            limits=Limits(max_requests=3, max_tokens=256, max_context=_MODEL_CONTEXT),
            pools=scene.pools,
            workspace=scene.workspace,
            options=selection.options.get(registered.spec.name),
        )
        built[role] = built[same[0]] if same else build_backend(registered, context)
    prefill, decode = built[Role.PREFILL], built[Role.DECODE]
    return prefill if prefill is decode else SplitBackend(prefill, decode)


class Scene:
    """Requests with random rows in permuted pages of a poisoned pool: whatever is read without reason turns NaN."""

    def __init__(
        self, layer: LayerSpec, dtype: DType, kv_dtype: DType, page_size: int, device: torch.device, seed: int
    ) -> None:
        self.layer, self.kv_dtype, self.device = layer, kv_dtype, device
        self.dtype = torch_dtype(dtype)
        self.workspace = WorkspaceOwner()
        self._random = torch.Generator().manual_seed(seed)
        pages = 4 * (_MODEL_CONTEXT // page_size + 4)
        self.pools = _poisoned_pools(layer, pages, page_size, kv_dtype, device)
        allocator = PageAllocator(pages)
        self.table = SlotTable(allocator, page_size=page_size, max_requests=3, max_pages=pages, device=device)
        # Pages come back in an order of chance, so that no request's pages are neighbours.
        taken = allocator.allocate(pages)
        order = torch.randperm(pages, generator=self._random).tolist()
        allocator.release([taken[index] for index in order])
        self.rows = {request: self.table.admit() for request in (0, 1, 2)}
        self.keys: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
        self.values: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}

    def run(self, name: str, step: Step, backend: AttentionBackend, with_lse: bool, tolerance: float) -> Result:
        for request, count in step.new_tokens.items():
            self.pools.copy_pages(self.table.extend(self.rows[request], count))
        q, k, v = self._inputs(step)
        batch = self._batch(step)
        started = self._now()
        plan_forward(backend, batch)
        planned = self._now()
        forward = backend.forward_decode if step.mode.is_decode else backend.forward_extend
        out = forward(q, k, v, self.layer, batch)
        finished = self._now()
        wanted, wanted_lse = self._wanted(step, q)
        error, lse_error = _largest_error(out, wanted), None
        if with_lse:  # often another path of the same backend, so its output is checked again
            lse = torch.full(q.shape[:2], float("nan"), device=self.device)
            extras = ForwardExtras(lse=lse)
            again = forward(q, None, None, self.layer, batch, save_kv_cache=False, extras=extras)
            error = max(error, _largest_error(again, wanted), key=_nan_is_largest)
            lse_error = _largest_error(lse, wanted_lse)
        return Result(
            layer=name,
            step=step.title,
            rows=q.shape[0],
            error=error,
            lse_error=lse_error,
            tolerance=tolerance,
            plan_ms=1e3 * (planned - started),
            forward_ms=1e3 * (finished - planned),
        )

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random).to(self.dtype)

    def _inputs(self, step: Step) -> tuple[Tensor, Tensor, Tensor | None]:
        """Random q, k and v of a step on the device; keys and values are remembered as the cache will hold them."""
        layer, tokens = self.layer, sum(step.new_tokens.values())
        if layer.mla is not None:
            # Absorbing spreads a query of head_dim over a whole cache row; its length stays, and so do the logits'.
            shrink = (layer.head_dim / layer.mla.row_dim) ** 0.5
            q = self._normal(tokens, layer.num_heads, layer.mla.row_dim) * shrink
            k = self._normal(tokens, 1, layer.mla.row_dim)
            v, remembered = None, k[..., : layer.mla.kv_lora_rank]
        else:
            q = self._normal(tokens, layer.num_heads, layer.head_dim)
            k = self._normal(tokens, layer.num_kv_heads, layer.head_dim)
            v = remembered = self._normal(tokens, layer.num_kv_heads, layer.v_head_dim)
        stored = torch_dtype(self.kv_dtype)
        lengths = list(step.new_tokens.values())
        for request, keys, values in zip(step.new_tokens, k.split(lengths), remembered.split(lengths), strict=True):
            self.keys[request].append(keys.to(stored).double())
            self.values[request].append(values.to(stored).double())
        return q.to(self.device), k.to(self.device), None if v is None else v.to(self.device)

    def _batch(self, step: Step) -> ForwardBatch:
        rows = [self.rows[request] for request in step.new_tokens]
        page_table, seq_lens = self.table.batch(rows)
        new = torch.tensor(list(step.new_tokens.values()), dtype=torch.int32)
        return ForwardBatch(
            forward_mode=step.mode,
            input_ids=torch.zeros(int(new.sum()), dtype=torch.int64, device=self.device),
            page_table=page_table,
            seq_lens=seq_lens,
            seq_lens_cpu=self.table.lengths_cpu(rows),
            extend_seq_lens=None if step.mode.is_decode else new.to(self.device),
            extend_seq_lens_cpu=None if step.mode.is_decode else new,
        )

    def _wanted(self, step: Step, q: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer
        outputs = []
        for request, queries in zip(step.new_tokens, q.split(list(step.new_tokens.values())), strict=True):
            keys, values = torch.cat(self.keys[request]), torch.cat(self.values[request])
            outputs.append(
                attention_float64(
                    queries,
                    keys,
                    values,
                    scale=layer.scale,
                    first_position=keys.shape[0] - queries.shape[0],
                    window=layer.sliding_window,
                    cap=layer.logit_cap,
                )
            )
        return torch.cat([out for out, _ in outputs]), torch.cat([lse for _, lse in outputs])


def _poisoned_pools(layer: LayerSpec, pages: int, page_size: int, kv_dtype: DType, device: torch.device) -> KVPools:
    if layer.kind is AttentionKind.MLA:
        mla = MLAPool([layer], num_pages=pages, page_size=page_size, dtype=kv_dtype, device=device)
        mla.rows(layer.layer_id).copy_(torch.full((), float("nan")))
        return KVPools(mla=mla)
    mha = MHAPool([layer], num_pages=pages, page_size=page_size, dtype=kv_dtype, device=device)
    mha.keys(layer.layer_id).copy_(torch.full((), float("nan")))
    mha.values(layer.layer_id).copy_(torch.full((), float("nan")))
    return KVPools(mha=mha)


def _place(error: BaseException) -> str:
    """Where an exception was raised: its last frame."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _largest_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest magnitude where that is above 1. NaN anywhere gives NaN."""
    if not isinstance(found, Tensor) or found.shape != wanted.shape:
        shape = tuple(found.shape) if isinstance(found, Tensor) else repr(found)
        raise BackendError(f"the result has shape {shape} and should have {tuple(wanted.shape)}")
    difference = (found.detach().cpu().double() - wanted).abs().max()
    return float(difference / wanted.abs().max().clamp(min=1.0))


def _nan_is_largest(error: float) -> float:
    return math.inf if math.isnan(error) else error


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
