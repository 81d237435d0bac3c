"""Command line of ``attnplug embed``. Imports no torch, so that mistakes are reported, and ranks started, at once."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from attnplug import Role
from attnplug.cli.app import Commands, add_command
from attnplug_engine.cli.arguments import (
    TEXT,
    add_model_and_prompts,
    add_serving_options,
    on_each_rank,
    shared_settings,
)
from attnplug_engine.cli.prompts import PromptLine, read_prompts
from attnplug_engine.execution import signals
from attnplug_engine.request import SamplingParams
from attnplug_engine.settings.pooling import Pooling

if TYPE_CHECKING:
    from attnplug_engine.options import EmbedOptions

_NOTHING = SamplingParams(max_tokens=1)
"""Placeholder: embedding samples no tokens."""


def declare(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command to core's command line."""
    parser = add_command(commands, "embed", "Embed texts by a model's hidden states on any installed backend.", run)
    add_model_and_prompts(parser, "prompt or prompt_token_ids, and maybe id")
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
    roles = (Role.PREFILL, Role.LINEAR)
    add_serving_options(parser, roles, chunked_prefill_size=-1, seeded="tiny models' weights")


def run(parsed: argparse.Namespace) -> int:
    from attnplug_engine.options import EmbedOptions  # imported here, as --help does not need it

    options = EmbedOptions(
        **shared_settings(parsed),
        pooling=None if parsed.pooling is None else Pooling.parse(parsed.pooling, "--pooling"),
        normalize=parsed.normalize,
        prompt_name=parsed.prompt_name,
    )
    options.for_engine()  # raises if a setting is wrong
    return on_each_rank(parsed, _prompts, partial(_embed, options=options), is_embedding=True)


def _embed(parsed: argparse.Namespace, lines: list[PromptLine], options: EmbedOptions) -> int:
    with signals.exit_immediately():
        from attnplug_engine.cli.embed_prompts import embed

    return embed(parsed, lines, options)


def _prompts(parsed: argparse.Namespace) -> list[PromptLine]:
    if parsed.prompts is None:
        return [PromptLine(parsed.prompt, _NOTHING, "--prompt")]
    return read_prompts(parsed.prompts, _NOTHING, embedded=True, plain=parsed.prompts_format == TEXT)
