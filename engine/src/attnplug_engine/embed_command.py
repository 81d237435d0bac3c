"""``attnplug embed``: its command line. Nothing here needs torch: a mistake is told, and ranks start, at once."""

from __future__ import annotations

import argparse
import sys

from attnplug import Role
from attnplug.cli import output
from attnplug.cli.app import Commands, add_backend_options, add_command
from attnplug.errors import UsageError
from attnplug.options import split_settings
from attnplug.select import BackendRequest
from attnplug_engine.launch import check_division, kept_for_ranks, run_ranks, started_as_rank
from attnplug_engine.pooling import Pooling
from attnplug_engine.prompts import PromptLine, read_prompts
from attnplug_engine.request import SamplingParams

_ROLES = (Role.PREFILL, Role.LINEAR)


def declare(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command to core's command line."""
    parser = add_command(commands, "embed", "Embed texts by a model's hidden states on any installed backend.", run)
    parser.add_argument("--model", required=True, metavar="PATH|tiny:NAME", help="a checkpoint's folder, or tiny:NAME")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="one prompt")
    what.add_argument(
        "--prompts",
        metavar="FILE.jsonl|-",
        help="one JSON object a line, with prompt or prompt_token_ids, and maybe id; - is standard input",
    )
    parser.add_argument(
        "--pooling", metavar="|".join(Pooling), help="which hidden states (default: the checkpoint's, else last)"
    )
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="vectors of length 1 (default: as the checkpoint says, else yes)",
    )
    parser.add_argument("--prompt-name", metavar="NAME", help="the checkpoint's text to put before each prompt")
    add_backend_options(parser)
    for role in _ROLES:
        parser.add_argument(role.option, metavar="NAME|auto", help=f"backend for the role {role} alone")
    parser.add_argument(
        "--dtype", metavar="DTYPE", help="element type of weights and activations (default: the model's)"
    )
    parser.add_argument(
        "--max-batch", type=int, default=32, metavar="N", help="prompts at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--chunked-prefill-size",
        type=int,
        default=-1,
        metavar="N",
        help="most tokens a step; -1: prompts in one piece (default: %(default)s)",
    )
    parser.add_argument("--context-length", type=int, metavar="N", help="most tokens a prompt (default: the model's)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of tiny models' weights (default: %(default)s)"
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="processes that share the heads (default: %(default)s)",
    )


def run(parsed: argparse.Namespace) -> int:
    if parsed.tensor_parallel < 1:
        raise UsageError(f"--tensor-parallel {parsed.tensor_parallel} is not a number of ranks; give 1 or more")
    if parsed.pooling is not None:
        Pooling.parse(parsed.pooling, "--pooling")
    if parsed.tensor_parallel > 1 and not started_as_rank():
        with kept_for_ranks(parsed.prompts):
            _prompts(parsed)
            check_division(parsed.model, backend_request(parsed), parsed.tensor_parallel, is_embedding=True)
            output.release()
            return run_ranks(parsed.tensor_parallel, sys.argv[1:])
    lines = _prompts(parsed)
    from attnplug_engine.embed import embed

    return embed(parsed, lines)


def backend_request(parsed: argparse.Namespace) -> BackendRequest:
    """Which backends the command line asks for."""
    named = {role: name for role in _ROLES if (name := getattr(parsed, f"{role}_attention_backend")) is not None}
    return BackendRequest(parsed.attention_backend, named, split_settings(parsed.backend_option))


def _prompts(parsed: argparse.Namespace) -> list[PromptLine]:
    sampling = SamplingParams(max_tokens=1)
    if parsed.prompts is None:
        return [PromptLine(parsed.prompt, sampling, "--prompt")]
    lines = read_prompts(parsed.prompts, sampling)
    for line in lines:
        if line.params != sampling:
            raise UsageError(f"{line.where}: nothing is sampled for an embedding; give prompt or prompt_token_ids only")
    return lines
