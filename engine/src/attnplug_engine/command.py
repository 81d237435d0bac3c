"""``attnplug run``: its command line. Nothing here needs torch, so that a mistake is told, and ranks start, at once."""

from __future__ import annotations

import argparse
import sys

from attnplug import ExtendPath, Role
from attnplug.cli import output
from attnplug.cli.app import Commands, add_backend_options, add_command
from attnplug.errors import UsageError
from attnplug.options import split_settings
from attnplug.select import BackendRequest
from attnplug_engine.chat import Chat
from attnplug_engine.launch import check_division, kept_for_ranks, run_ranks, started_as_rank
from attnplug_engine.prompts import PromptLine, read_prompts
from attnplug_engine.request import DEFAULT_MAX_TOKENS, SamplingParams

_ROLES = (Role.PREFILL, Role.DECODE, Role.LINEAR)
"""Those that a user may give a backend of its own."""


def declare(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command to core's command line."""
    parser = add_command(commands, "run", "Generate with a model on any installed backend.", run)
    parser.add_argument("--model", required=True, metavar="PATH|tiny:NAME", help="a checkpoint's folder, or tiny:NAME")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="one prompt")
    what.add_argument(
        "--prompts",
        metavar="FILE.jsonl|-",
        help="one JSON object a line, with prompt, messages or prompt_token_ids, and its own id, max_tokens, stop and "
        "so on; - reads standard input",
    )
    parser.add_argument("--chat", action="store_true", help="a prompt is a user's message: use the chat template")
    add_backend_options(parser)
    for role in _ROLES:
        parser.add_argument(role.option, metavar="NAME|auto", help=f"backend for the role {role} alone")
    parser.add_argument(
        "--dtype", metavar="DTYPE", help="element type of weights and activations (default: the model's)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help="most new tokens a prompt"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="how freely tokens are drawn; 0 is greedy"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens; 0 keeps all")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens that together have this share"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of sampling and of tiny models' weights")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="a text that ends the answer, which is cut before it; may be repeated",
    )
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: log probability of every token, and of the N likeliest in its place",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the checkpoint's end-of-text token")
    parser.add_argument("--num-pages", type=int, metavar="N", help="pages of the cache (default: by memory)")
    parser.add_argument("--max-batch", type=int, default=32, metavar="N", help="requests at a time")
    parser.add_argument(
        "--chunked-prefill-size",
        type=int,
        default=2048,
        metavar="N",
        help="most tokens a step; -1: prompts in one piece",
    )
    parser.add_argument(
        "--context-length", type=int, metavar="N", help="most tokens a request, prompt included (default: the model's)"
    )
    parser.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt from its first token")
    parser.add_argument(
        "--state-slots",
        type=int,
        metavar="N",
        help="linear states, of requests and of snapshots (default: by --max-batch)",
    )
    parser.add_argument(
        "--state-checkpoint",
        type=int,
        default=1024,
        metavar="N",
        help="tokens from one snapshot of them to the next",
    )
    parser.add_argument("--mla-extend", metavar="PATH", help=f"force how MLA prefills: {', '.join(ExtendPath)}")
    parser.add_argument("--mla-chunk-capacity", type=int, metavar="N", help="most prefix rows up-projected at a time")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="processes that share the heads")
    parser.add_argument(
        "--check-layers", action="store_true", help="stop at the first layer whose output is not finite"
    )


def run(parsed: argparse.Namespace) -> int:
    if parsed.tensor_parallel < 1:
        raise UsageError(f"--tensor-parallel {parsed.tensor_parallel} is not a number of ranks; give 1 or more")
    if parsed.logprobs is not None and not parsed.json:
        raise UsageError(f"--logprobs {parsed.logprobs} is told in JSON lines only; give --json too")
    if parsed.tensor_parallel > 1 and not started_as_rank():
        with kept_for_ranks(parsed.prompts):
            _prompts(parsed)
            check_division(parsed.model, _request(parsed), parsed.tensor_parallel)
            output.release()
            return run_ranks(parsed.tensor_parallel, sys.argv[1:])
    lines = _prompts(parsed)
    from attnplug_engine.generate import generate

    return generate(parsed, lines)


def _request(parsed: argparse.Namespace) -> BackendRequest:
    named = {role: name for role in _ROLES if (name := getattr(parsed, f"{role}_attention_backend")) is not None}
    return BackendRequest(parsed.attention_backend, named, split_settings(parsed.backend_option))


def _prompts(parsed: argparse.Namespace) -> list[PromptLine]:
    defaults = SamplingParams(
        max_tokens=parsed.max_tokens,
        temperature=parsed.temperature,
        top_k=parsed.top_k,
        top_p=parsed.top_p,
        stop=tuple(parsed.stop),
        logprobs=parsed.logprobs,
    )
    if parsed.prompts is not None:
        return read_prompts(parsed.prompts, defaults, chat=parsed.chat)
    return [PromptLine(Chat.of_user(parsed.prompt) if parsed.chat else parsed.prompt, defaults, "--prompt")]
