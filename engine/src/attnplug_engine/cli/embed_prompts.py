"""Execution of ``attnplug embed`` on each rank: build an embedder, embed the prompts, print the vectors."""

from __future__ import annotations

import argparse
import json as jsonlib
import sys
from collections.abc import Sequence

from attnplug.cli import output
from attnplug.declare.settings import Render
from attnplug_engine.checkpoints.pooling import MODULES_FILE, Pooling
from attnplug_engine.cli.arguments import shared_settings
from attnplug_engine.cli.prompts import PromptLine
from attnplug_engine.embedding import Embedder, Embedding, EmbedOptions
from attnplug_engine.parallel.collectives import TensorParallel
from attnplug_engine.parallel.ranks import join_ranks, leave_ranks
from attnplug_engine.text.chat import Chat
from attnplug_engine.text.encoder import naming_prompt

_SHOWN = 4


def embed(parsed: argparse.Namespace, lines: Sequence[PromptLine]) -> int:
    """Embed the prompts of the command line; return the exit code."""
    options = EmbedOptions(
        **shared_settings(parsed),
        pooling=Pooling(parsed.pooling) if parsed.pooling is not None else None,
        normalize=parsed.normalize,
        prompt_name=parsed.prompt_name,
    )
    parallel = join_ranks(parsed.tensor_parallel, parsed.device)
    return leave_ranks(parallel, _embed(parsed, lines, options, parallel))


def _embed(
    parsed: argparse.Namespace, lines: Sequence[PromptLine], options: EmbedOptions, parallel: TensorParallel
) -> int:
    silent = parallel.rank != 0
    embedder = Embedder(parsed.model, options, parallel=parallel)
    tokens = []
    for line in lines:  # check all before any runs, so that a bad one is reported at once
        with naming_prompt(line.where):
            assert not isinstance(line.prompt, Chat)
            tokens.append(embedder.tokens(line.prompt))
    if not silent:
        _tell(embedder, options, parsed.render)
    failed = False
    for embedding in embedder.stream(tokens):
        finite = bool(embedding.vector.isfinite().all())
        failed |= not finite
        if not silent:
            _answer(embedding, lines[embedding.index], finite=finite, json=parsed.json)
    return 1 if failed else 0


def _tell(embedder: Embedder, asked: EmbedOptions, render: Render) -> None:
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


def _answer(embedding: Embedding, line: PromptLine, *, finite: bool, json: bool) -> None:
    """Write one prompt's line at once, so that it is not lost if a later prompt fails."""
    error = None
    if not finite:
        error = f"the hidden states of prompt {embedding.index} are not finite"
        print(f"error: {line.where}: {error}", file=sys.stderr)
    values = embedding.vector.tolist()
    if json:
        answer: dict[str, object] = {"index": embedding.index}
        if line.id is not None:
            answer["id"] = line.id
        answer["embedding"] = values if finite else None
        answer["usage"] = {"prompt_tokens": embedding.prompt_tokens}
        if error is not None:
            answer["error"] = error
        output.write_line(jsonlib.dumps(answer))
    elif finite:
        first = ", ".join(f"{value:.4f}" for value in values[:_SHOWN])
        length = float(embedding.vector.norm())
        rest = ", …" if len(values) > _SHOWN else ""
        print(f"[{embedding.index}] {len(values)} dimensions, length {length:.4f}: {first}{rest}", flush=True)
