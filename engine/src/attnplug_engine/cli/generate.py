"""Execution of ``attnplug run`` on each rank: build an engine, run the prompts, print the completions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from attnplug import PoolError
from attnplug.auto.table_store import cache_folders
from attnplug.cli import output
from attnplug.cli.output import warn_of_plugins
from attnplug.declare.errors import Render
from attnplug.host import ForwardingBackend, load_registry
from attnplug.machine import interrupt
from attnplug.machine.runtime import open_device, runtime_of
from attnplug_engine.cli.output import CompletionWriter, for_terminal, logprob_lines, progress_bar
from attnplug_engine.cli.prompts import PromptLine, check_files
from attnplug_engine.completion import Completion, Usage
from attnplug_engine.engine import Engine
from attnplug_engine.execution.compilations import describe
from attnplug_engine.models.architectures import load_spec
from attnplug_engine.options import EngineOptions
from attnplug_engine.parallel.collectives import TensorParallel
from attnplug_engine.parallel.ranks import join_ranks, leave_ranks
from attnplug_engine.request import FinishReason, Request
from attnplug_engine.text.encoder import naming_prompt
from attnplug_engine.text.errors import PromptError
from attnplug_engine.text.transcript import Transcript

INTERRUPTED = 130


def generate(parsed: argparse.Namespace, lines: list[PromptLine], options: EngineOptions) -> int:
    """Run the prompts of the command line; return the exit code."""
    parallel = join_ranks(parsed.tensor_parallel, parsed.device)
    code = _run(parsed, lines, options, parallel)
    return code if code == INTERRUPTED else leave_ranks(parallel, code)


def warm(parsed: argparse.Namespace, options: EngineOptions) -> int:
    """Start an engine, which compiles everything, and print what it compiled and where it is cached."""
    load_spec(parsed.model)  # a mistake in the model is reported on any device
    device, _ = open_device(options.device, load_registry().device)
    if runtime_of(device).module is None:
        text = f"there is nothing to compile for device {device.type}"
        if parsed.json:
            output.write_json({"device": device.type, "compiled": [], "loaded": 0, "caches": {}})
        else:
            print(f"{text}; run this on a machine with a GPU, or describe one by --gpu FILE")
        return 0
    parallel = join_ranks(parsed.tensor_parallel, parsed.device)
    start_up = _start(parsed, options, parallel, _console(parallel)).start_up
    compiled = sorted((each for each in start_up.compiled if not each.cached), key=lambda each: -each.seconds)
    loaded, folders = len(start_up.compiled) - len(compiled), cache_folders()
    if parallel.rank == 0 and parsed.json:
        rows = [{"name": each.name, "seconds": each.seconds} for each in compiled]
        caches = {name: str(folder) for name, folder in folders.items()}
        output.write_json({"device": device.type, "compiled": rows, "loaded": loaded, "caches": caches})
    elif parallel.rank == 0:
        for each in compiled:
            print(f"{each.seconds:6.1f} s  {each.name}")
        print(f"{describe(compiled) or 'compiled nothing'}; loaded {loaded} from the caches")
        for line in start_up.lines()[bool(compiled) :]:
            print(line)
        for name, folder in folders.items():
            print(f"{name} cache: {folder}")
    return leave_ranks(parallel, 0)


def _console(parallel: TensorParallel) -> Console:
    return Console(stderr=True, highlight=False, markup=False, quiet=parallel.rank > 0)


def _start(parsed: argparse.Namespace, options: EngineOptions, parallel: TensorParallel, console: Console) -> Engine:
    """Build the engine, with a progress bar for each phase of its start-up."""
    with progress_bar(console, "loading", shown=not parsed.json) as (bar, task):

        def phase(name: str) -> Callable[[int, int], None]:
            return lambda done, total: bar.update(task, completed=done, total=total, description=name)

        engine = Engine(
            parsed.model,
            options,
            parallel=parallel,
            progress=phase("loading"),
            on_memory=lambda plan: console.print(f"memory: {plan}", soft_wrap=True),
            on_compile=phase("compiling kernels"),
            on_capture=phase("capturing CUDA graphs"),
            on_warm_up=phase("warming up"),
        )
    if parallel.rank == 0:
        warn_of_plugins(engine.registry)
    return engine


def _run(parsed: argparse.Namespace, lines: list[PromptLine], options: EngineOptions, parallel: TensorParallel) -> int:
    speaks = parallel.rank == 0
    console = _console(parallel)
    check_files(parsed.model, lines)
    engine = _start(parsed, options, parallel, console)
    requests: dict[int, Request] = {}
    rejected: list[Completion] = []
    for index, line in enumerate(lines):  # queue all before any runs, so that a bad one is reported at once
        try:
            with naming_prompt(line.where):
                requests[index] = engine.add(line.prompt, line.params)
        except (PromptError, PoolError) as error:
            if parsed.prompts is None:
                raise
            message = error.format(parsed.render).removeprefix(f"{line.where}: ")
            rejected.append(Completion(index, [], "", FinishReason.ERROR.value, Usage(0, 0, 0), message))
    if parsed.prompt is not None and not parsed.json:
        code = _stream(engine, requests[0], lines[0].where, speaks)
    else:
        writer = None
        if speaks:
            writer = CompletionWriter(lines, engine.statistics.backend_usage, engine.tokenizer, json=parsed.json)
        code = _generate(engine, requests, rejected, writer, console)
    if speaks and code != INTERRUPTED:
        _summary(engine, console, parsed.render)
    return code


def _stream(engine: Engine, request: Request, where: str, speaks: bool) -> int:
    """Run one prompt and print its text as it is generated. Returns the exit code."""
    transcript = None if engine.tokenizer is None else Transcript(engine.tokenizer, request.params.stop)
    for update in engine.follow([request]):
        if update.token is None:
            new = "\n" if transcript is None else transcript.finish() + "\n"
        else:
            new = f"{update.token} " if transcript is None else transcript.push(update.token)
        if speaks and new:
            print(for_terminal(new), end="", flush=True)
    completion = engine.completion(0, request)
    if speaks:
        for shown in logprob_lines(completion, engine.tokenizer):
            print(shown)
        if completion.error is not None:
            print(f"error: {where}: {completion.error}", file=sys.stderr)
    return 0 if completion.error is None else 1


def _generate(
    engine: Engine,
    requests: Mapping[int, Request],
    rejected: Sequence[Completion],
    writer: CompletionWriter | None,
    console: Console,
) -> int:
    """Run all prompts and write each completion when it is finished. Returns the exit code.

    ``requests`` are by index of the prompt. Completions of ``rejected`` prompts are written first.
    """
    code = 1 if rejected else 0
    indices = list(requests)
    shown = len(requests) > 1 and not output.on_terminal()
    try:
        with interrupt.raise_on_sigterm(), progress_bar(console, "generating", shown, len(requests)) as (bar, task):
            if writer is not None:
                for completion in rejected:
                    writer.add(completion)
            for update in engine.follow(list(requests.values())):
                if update.token is not None:
                    continue
                completion = engine.completion(indices[update.index], update.request)
                code = code if completion.error is None else 1
                if writer is not None:
                    writer.add(completion)
                bar.advance(task)
    except BrokenPipeError:  # the reader closed the pipe
        raise
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if writer is not None:
            if not isinstance(error, OSError):  # otherwise output itself has failed
                writer.close()
            what = "interrupted" if interrupted else "stopped"
            console.print(
                f"{what}: {writer.written} of {len(requests) + len(rejected)} prompts were finished and are written"
            )
        if not interrupted:
            raise
        code = INTERRUPTED
    return code


def _summary(engine: Engine, console: Console, render: Render) -> None:
    for line in engine.start_up.lines():
        console.print(line)
    for role, choice in engine.selection.choices.items():
        console.print(f"{role}: {choice.chosen_name} ({choice.why(render)})")
    for role, choice in ({} if engine.draft_selection is None else engine.draft_selection.choices).items():
        console.print(f"{role}: {choice.chosen_name} ({choice.why(render)})")
    counts = engine.statistics
    for name, tokens, seconds in (
        ("prefill", counts.prefill_tokens, counts.prefill_seconds),
        ("decode", counts.decode_tokens, counts.decode_seconds),
    ):
        rate = f"{tokens / seconds:.0f} tokens/s" if seconds else "–"
        console.print(f"{name}: {tokens} tokens, {rate}")
    if counts.rounds is not None:
        console.print(f"speculation: {counts.rounds}")
        console.print(f"a round: {counts.rounds.times}")
    if engine.rounds is not None and (names := engine.rounds.planned_in_order):
        needing = " and ".join(dict.fromkeys(names))
        console.print(f"plan stream: none, since {needing} plans by lengths on the host")
    for kind, steps in counts.backend_usage.by_backend().items():
        console.print(f"{kind} steps by backend: {', '.join(f'{name} {count}' for name, count in steps.items())}")
    if isinstance(engine.runner.backend, ForwardingBackend):
        for name, why in engine.runner.backend.left_out.items():
            console.print(f"without {name}: {why}")
    if runtime_of(engine.runner.device).graph is not None:
        console.print(f"CUDA graphs: {engine.graphs}")
        console.print(f"decode steps: {counts.replayed_steps} replayed, {counts.eager_steps} eager")
        console.print(f"prefill steps: {counts.replayed_prefills} replayed, {counts.eager_prefills} eager")
    if engine.runner.coordinator is not None:
        console.print(f"HiSparse: {engine.runner.coordinator.statistics()}")
    cache = engine.cache_statistics
    if cache is not None:
        console.print(f"prefix cache: {cache.hit_tokens} of {cache.tokens} prompt tokens found ({cache.hits} hits)")
    if engine.scheduler.preemptions:
        console.print(f"preempted: {engine.scheduler.preemptions} times, for lack of pages")
