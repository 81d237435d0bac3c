"""``attnplug warm``: fill the disk caches of kernels without serving, for instance for a container image."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from attnplug.cli.app import Commands, add_command
from attnplug_engine.cli.arguments import add_model, on_each_rank
from attnplug_engine.cli.run import add_engine_options, engine_options
from attnplug_engine.execution import signals

if TYPE_CHECKING:
    from attnplug_engine.options import EngineOptions


def declare(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command to core's command line."""
    parser = add_command(commands, "warm", "Compile every kernel that a model needs into the disk caches.", run)
    add_model(parser)
    add_engine_options(parser)
    # Weights are random, so that a config.json suffices: no kernel depends on their values.
    parser.set_defaults(prompts=None, prompts_format=None, random_weights=True, ignore_eos=True)


def run(parsed: argparse.Namespace) -> int:
    options = engine_options(parsed)
    return on_each_rank(parsed, lambda _: [], partial(_warm, options=options))


def _warm(parsed: argparse.Namespace, _lines: list[Any], options: EngineOptions) -> int:
    with signals.exit_immediately():
        from attnplug_engine.cli.generate import warm

    return warm(parsed, options)
