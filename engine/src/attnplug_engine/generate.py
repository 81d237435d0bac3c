"""What ``attnplug run`` does on each rank: an engine by its options, the prompts through it, and what is printed."""

from __future__ import annotations

import argparse
import json as jsonlib
import sys
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from attnplug import DType, ExtendPath, ExtendPolicy, Role
from attnplug.cli import output
from attnplug.cli.warn import warn_of_plugins
from attnplug.device import open_device
from attnplug.errors import AttnplugError, UsageError
from attnplug.options import split_settings
from attnplug_engine.engine import Completion, Engine, EngineOptions, naming
from attnplug_engine.launch import join_ranks
from attnplug_engine.parallel import TensorParallel
from attnplug_engine.prompts import PromptLine


def generate(parsed: argparse.Namespace, lines: list[PromptLine]) -> int:
    """Run the prompts by the command line; returns the exit code."""
    options = _options(parsed)
    parallel = join_ranks(parsed.tensor_parallel, open_device(parsed.device)[0].type)
    try:
        return _run(parsed, lines, options, parallel)
    except RuntimeError as error:
        if parallel.size == 1:
            raise
        first = str(error).partition("\n")[0]
        raise AttnplugError(f"rank {parallel.rank} lost the others, or one of them failed: {first}") from error


def _run(parsed: argparse.Namespace, lines: list[PromptLine], options: EngineOptions, parallel: TensorParallel) -> int:
    silent = parallel.rank != 0
    engine = Engine(parsed.model, options, parallel=parallel)
    if not silent:
        warn_of_plugins(engine.registry)
    console = Console(stderr=True, highlight=False, markup=False, quiet=silent)
    completions = _generate(engine, lines, console, stream=parsed.prompt is not None and not parsed.json and not silent)
    if not silent:
        _answer(completions, lines, parsed.json, streamed=parsed.prompt is not None)
        _summary(engine, console)
    return 1 if any(completion.error for completion in completions) else 0


def _options(parsed: argparse.Namespace) -> EngineOptions:
    policy = ExtendPolicy()
    if parsed.mla_extend is not None:
        if parsed.mla_extend not in list(ExtendPath):
            raise UsageError(f"--mla-extend {parsed.mla_extend!r} is unknown; use one of {', '.join(ExtendPath)}")
        policy = replace(policy, forced=ExtendPath(parsed.mla_extend))
    if parsed.mla_chunk_capacity is not None:
        policy = replace(policy, chunk_capacity=parsed.mla_chunk_capacity)
    names = {role: getattr(parsed, f"{role}_attention_backend", None) for role in Role}
    return EngineOptions(
        attention_backend=parsed.attention_backend,
        role_backends={role: name for role, name in names.items() if name is not None},
        backend_options=split_settings(parsed.backend_option),
        device=parsed.device,
        dtype=DType.parse(parsed.dtype, "--dtype") if parsed.dtype is not None else None,
        kv_dtype=DType.parse(parsed.kv_dtype, "--kv-dtype") if parsed.kv_dtype is not None else None,
        page_size=parsed.page_size,
        num_pages=parsed.num_pages,
        max_batch=parsed.max_batch,
        chunked_prefill_size=parsed.chunked_prefill_size,
        prefix_cache=not parsed.no_prefix_cache,
        state_slots=parsed.state_slots,
        state_checkpoint=parsed.state_checkpoint,
        context_length=parsed.context_length,
        extend_policy=policy,
        seed=parsed.seed,
        ignore_eos=parsed.ignore_eos,
        check_layers=parsed.check_layers,
    )


def _generate(engine: Engine, lines: list[PromptLine], console: Console, *, stream: bool) -> list[Completion]:
    """Run all prompts; one prompt streams as it comes, many show a progress bar."""
    requests = []
    for line in lines:  # all are queued before any runs: a bad one is told at once
        with naming(line.where):
            requests.append(engine.add(line.prompt, line.params))
    updates = engine.follow(requests)
    ended: dict[int, Completion] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, disable=len(lines) == 1) as progress:
        task = progress.add_task("generating", total=len(lines))
        shown = ""
        for update in updates:
            if update.token is None:
                ended[update.index] = engine.completion(update.index, update.request)
                progress.advance(task)
            elif stream:
                if engine.tokenizer is None:
                    print(update.token, end=" ", flush=True)
                else:  # decoded anew, since a token may be part of a character
                    text = engine.tokenizer.decode(update.request.output)
                    if text.startswith(shown) and not text.endswith("\ufffd"):
                        print(text[len(shown) :], end="", flush=True)
                        shown = text
        if stream:
            rest = ended[0].text or ""
            print(rest[len(shown) :] if rest.startswith(shown) else "", flush=True)
    return [ended[index] for index in range(len(lines))]


def _answer(completions: list[Completion], lines: list[PromptLine], json: bool, *, streamed: bool) -> None:
    for completion, line in zip(completions, lines, strict=True):
        if completion.error is not None:
            print(f"error: {line.where}: {completion.error}", file=sys.stderr)
        if json:
            output.write_line(
                jsonlib.dumps(
                    {
                        "index": completion.index,
                        "token_ids": completion.token_ids,
                        "text": completion.text,
                        "finish_reason": completion.finish_reason,
                    }
                )
            )
        elif not streamed:
            told = completion.text if completion.text is not None else " ".join(map(str, completion.token_ids))
            print(f"[{completion.index}] {told}")


def _summary(engine: Engine, console: Console) -> None:
    for role, choice in engine.selection.choices.items():
        console.print(f"{role}: {choice.chosen_name} ({choice.why})")
    counts = engine.statistics
    for name, tokens, seconds in (
        ("prefill", counts.prefill_tokens, counts.prefill_seconds),
        ("decode", counts.decode_tokens, counts.decode_seconds),
    ):
        rate = f"{tokens / seconds:.0f} tokens/s" if seconds else "–"
        console.print(f"{name}: {tokens} tokens, {rate}")
    cache = engine.cache_statistics
    if cache is not None:
        console.print(f"prefix cache: {cache.hit_tokens} of {cache.tokens} prompt tokens found ({cache.hits} hits)")
    if engine.scheduler.preemptions:
        console.print(f"preempted: {engine.scheduler.preemptions} times, for lack of pages")
