"""Command-line arguments that ``attnplug run`` and ``attnplug embed`` share: model, prompts, backends, ranks.

Nothing here imports torch, so that mistakes are reported, and ranks started, at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from attnplug import DType, Problem, RefusalCode, Role, Setting, UsageError
from attnplug.cli import output
from attnplug.cli.app import add_backend_options, option
from attnplug.host import (
    AttnplugError,
    BackendRequest,
    SelectionError,
    load_model,
    load_registry,
    select,
    split_settings,
)
from attnplug_engine.cli.prompts import PromptLine
from attnplug_engine.execution import signals
from attnplug_engine.parallel.ranks import prompts_for_ranks, run_ranks, started_as_rank
from attnplug_engine.settings.speculation import Speculation

JSONL, TEXT = "jsonl", "text"
MODEL_HELP = "a checkpoint's folder, or tiny:NAME"


def add_model_and_prompts(parser: argparse.ArgumentParser, line: str) -> None:
    """Add the model and the prompts. ``line`` describes the keys of a JSON line."""
    parser.add_argument("--model", required=True, metavar="PATH|tiny:NAME", help=MODEL_HELP)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="one prompt")
    what.add_argument(
        "--prompts", metavar="FILE|-", help=f"one JSON object per line, with {line}; - reads standard input"
    )
    parser.add_argument(
        "--prompts-format",
        choices=(JSONL, TEXT),
        help=f"format of --prompts: JSON lines, or plain text with one prompt per line (default: {JSONL})",
    )


def add_serving_options(
    parser: argparse.ArgumentParser, roles: tuple[Role, ...], *, chunked_prefill_size: int | None, seeded: str
) -> None:
    """Add backends, dtypes and sizes. ``seeded`` describes what the seed is for."""
    add_backend_options(parser)
    for role in roles:
        parser.add_argument(option(role.setting), metavar="NAME|auto", help=f"backend for the role {role} only")
    parser.add_argument(
        "--dtype", metavar="DTYPE", help="element type of weights and activations (default: the model's)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=f"seed of {seeded}")
    parser.add_argument("--max-batch", type=int, default=32, metavar="N", help="most concurrent prompts")
    parser.add_argument(
        "--chunked-prefill-size",
        type=int,
        default=chunked_prefill_size,
        metavar="N",
        help="most tokens per step; -1: do not chunk prompts",
    )
    parser.add_argument(
        "--context-length", type=int, metavar="N", help="most tokens per prompt, with new ones (default: the model's)"
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="the same bits of a prompt's results, whatever else runs; slower, and some backends are refused",
    )
    parser.add_argument(
        "--compile-processes",
        type=int,
        metavar="N",
        help="processes that compile kernels at the first start on a GPU; 0: none (default: by cores and memory)",
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="ranks that share the heads")


def shared_settings(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the parsed options as fields of ``EngineOptions`` and ``EmbedOptions``."""
    request = backend_request(parsed)
    if parsed.device is not None:
        load_registry().device(parsed.device)  # an unknown one is refused before torch is imported
    return {
        "attention_backend": request.attention,
        "role_backends": request.roles,
        "backend_options": request.options,
        "device": parsed.device,
        "dtype": DType.parse(parsed.dtype, Setting.DTYPE) if parsed.dtype is not None else None,
        "kv_dtype": parsed.kv_dtype and (DType.spelled(parsed.kv_dtype) or parsed.kv_dtype),
        "page_size": parsed.page_size,
        "max_batch": parsed.max_batch,
        "chunked_prefill_size": parsed.chunked_prefill_size,
        "context_length": parsed.context_length,
        "seed": parsed.seed,
        "compile_processes": parsed.compile_processes,
        "batch_invariant": parsed.batch_invariant,
    }


def on_each_rank(
    parsed: argparse.Namespace,
    read: Callable[[argparse.Namespace], list[PromptLine]],
    work: Callable[[argparse.Namespace, list[PromptLine]], int],
    *,
    is_embedding: bool = False,
    speculation: Speculation | None = None,
) -> int:
    """Run ``work`` in this process if it is the only one or a rank; otherwise start the ranks. Returns the exit
    code."""
    if parsed.prompts is None and parsed.prompts_format is not None:
        raise UsageError(f"--prompts-format {parsed.prompts_format} is given without --prompts; leave it out")
    size = number_of_ranks(parsed)
    if size == 1 or started_as_rank():
        return work(parsed, read(parsed))
    with prompts_for_ranks(parsed.prompts):
        read(parsed)
        check_division(parsed, size, speculation, is_embedding=is_embedding)
        output.release()
        return run_ranks(size, sys.argv[1:])


def check_division(
    parsed: argparse.Namespace, size: int, speculation: Speculation | None, *, is_embedding: bool = False
) -> None:
    """Raise if no backend can serve the model on ``size`` ranks, before any is started.

    Device, dtypes and weights are checked by the ranks. torch is imported only to name other numbers of ranks.
    """
    request = backend_request(parsed)
    # The draft is another model.
    request = replace(request, roles={role: name for role, name in request.roles.items() if role is not Role.DRAFT})
    problem = Problem(load_model(parsed.model), tensor_parallel=size, is_embedding=is_embedding)
    try:
        select(load_registry(), request, problem)
    except SelectionError as error:
        candidates = [c for choice in error.selection.unserved for c in choice.candidates]
        for refusal in (refusal for candidate in candidates for refusal in candidate.refusals):
            if refusal.code == RefusalCode.TENSOR_PARALLEL:  # a property of the model, independent of the backend
                raise AttnplugError(
                    f"{parsed.model}: {refusal.message}; {_allowed_ranks(parsed, speculation)}"
                ) from error
        raise


def _allowed_ranks(parsed: argparse.Namespace, speculation: Speculation | None) -> str:
    """Return the advice to use a number of ranks that divides all heads and weights of a model, and of its draft."""
    with signals.exit_immediately():
        from attnplug_engine.models.architectures import load_spec, open_source, rank_counts
        from attnplug_engine.parallel.collectives import allowed_ranks
        from attnplug_engine.speculation.drafts.loading import divide_draft, open_draft
    random = getattr(parsed, "random_weights", False)
    source, divided = open_source(parsed.model, device="cpu", random_weights=random), None
    if speculation is not None and speculation.has_model:
        draft = open_draft(speculation, parsed.model, device="cpu", random_weights=random)
        divided = partial(divide_draft, speculation=speculation, source=draft, target_reference=parsed.model)
    return allowed_ranks(rank_counts(source, load_spec(parsed.model), divided))


def number_of_ranks(parsed: argparse.Namespace) -> int:
    size: int = parsed.tensor_parallel
    if size < 1:
        raise UsageError(f"--tensor-parallel {size} is not a number of ranks; give 1 or more")
    return size


def backend_request(parsed: argparse.Namespace) -> BackendRequest:
    given = {role: getattr(parsed, f"{role}_attention_backend", None) for role in Role}
    named = {role: name for role, name in given.items() if name is not None}
    return BackendRequest(parsed.attention_backend, named, split_settings(parsed.backend_option))
