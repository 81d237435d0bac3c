"""Execution of ``attnplug embed`` on each rank: build an embedder, embed the prompts, print the vectors."""

from __future__ import annotations

import argparse
import json as jsonlib
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from attnplug import PoolError
from attnplug.cli import output
from attnplug.declare.errors import Render
from attnplug_engine.checkpoints.pooling import MODULES_FILE
from attnplug_engine.cli.output import progress_bar
from attnplug_engine.cli.prompts import PromptLine, check_files
from attnplug_engine.engine import Embedder
from attnplug_engine.options import EmbedOptions
from attnplug_engine.parallel.collectives import TensorParallel
from attnplug_engine.parallel.ranks import join_ranks, leave_ranks
from attnplug_engine.serving.embedding import Embedding
from attnplug_engine.text.chat import Chat
from attnplug_engine.text.encoder import naming_prompt
from attnplug_engine.text.errors import PromptError

_SHOWN = 4


def embed(parsed: argparse.Namespace, lines: Sequence[PromptLine], options: EmbedOptions) -> int:
    """Embed the prompts of the command line; return the exit code."""
    parallel = join_ranks(parsed.tensor_parallel, parsed.device)
    return leave_ranks(parallel, _embed(parsed, lines, options, parallel))


def _embed(
    parsed: argparse.Namespace, lines: Sequence[PromptLine], options: EmbedOptions, parallel: TensorParallel
) -> int:
    silent = parallel.rank != 0
    check_files(parsed.model, lines)
    embedder = _start(parsed, options, parallel)
    tokens: list[tuple[int, ...]] = []
    rejected: dict[int, str] = {}
    for index, line in enumerate(lines):  # check all before any runs
        try:
            with naming_prompt(line.where):
                assert not isinstance(line.prompt, Chat)
                tokens.append(embedder.tokens(line.prompt))
        except (PromptError, PoolError) as error:
            if parsed.prompts is None:
                raise
            rejected[index] = error.format(parsed.render).removeprefix(f"{line.where}: ")
    if not silent:
        _tell(embedder, options, parsed.render)
    embeddings = embedder.stream(tokens)
    failed = False
    for index, line in enumerate(lines):
        embedding, message = None, rejected.get(index)
        if message is None:
            embedding = next(embeddings)
            if not embedding.vector.isfinite().all():
                message = f"the hidden states of prompt {index} are not finite"
        failed |= message is not None
        if not silent:
            _answer(index, embedding, line, message, json=parsed.json)
    return 1 if failed else 0


def _start(parsed: argparse.Namespace, options: EmbedOptions, parallel: TensorParallel) -> Embedder:
    """Build the embedder, with a progress bar for the parts of its start-up that take long on a GPU."""
    console = Console(stderr=True, highlight=False, markup=False, quiet=parallel.rank > 0)
    with progress_bar(console, "loading", shown=not parsed.json) as (bar, task):

        def phase(name: str) -> Callable[[int, int], None]:
            return lambda done, total: bar.update(task, completed=done, total=total, description=name)

        return Embedder(
            parsed.model,
            options,
            parallel=parallel,
            on_compile=phase("compiling kernels"),
            on_warm_up=phase("warming up"),
        )


def _tell(embedder: Embedder, asked: EmbedOptions, render: Render) -> None:
    for line in embedder.start_up.lines():
        print(line, file=sys.stderr)
    for role, choice in embedder.selection.choices.items():
        print(f"{role}: {choice.chosen_name} ({choice.why(render)})", file=sys.stderr)
    rules = embedder.rules
    source = rules.source or f"the default, since the checkpoint has no {MODULES_FILE}"
    options = [] if asked.pooling is None else ["--pooling"]
    if asked.normalize is not None:
        options.append("--normalize" if asked.normalize else "--no-normalize")
    if options:
        source = f"by {' and '.join(options)}; else {source}"
    norm = "normalised" if rules.normalize else "not normalised"
    print(f"pooling: {rules.pooling}, {norm} ({source})", file=sys.stderr)


def _answer(index: int, embedding: Embedding | None, line: PromptLine, error: str | None, *, json: bool) -> None:
    """Write one prompt's line at once, so that it is not lost if a later prompt fails."""
    if error is not None:
        print(f"error: {line.where}: {error}", file=sys.stderr)
    if json:
        answer: dict[str, object] = {"index": index}
        if line.id is not None:
            answer["id"] = line.id
        answer["embedding"] = None if error is not None or embedding is None else embedding.vector.tolist()
        answer["usage"] = {"prompt_tokens": 0 if embedding is None else embedding.prompt_tokens}
        if error is not None:
            answer["error"] = error
        output.write_line(jsonlib.dumps(answer))
    elif error is None and embedding is not None:
        values = embedding.vector.tolist()
        first = ", ".join(f"{value:.4f}" for value in values[:_SHOWN])
        length = float(embedding.vector.norm())
        rest = ", …" if len(values) > _SHOWN else ""
        print(f"[{index}] {len(values)} dimensions, length {length:.4f}: {first}{rest}", flush=True)
