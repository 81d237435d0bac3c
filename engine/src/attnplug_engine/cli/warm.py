"""``attnplug warm``: fill the disk caches of kernels without serving, for instance for a container image."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnplug import UsageError
from attnplug.cli import output
from attnplug.cli.app import Commands, add_command
from attnplug_engine.cli.arguments import MODEL_HELP, check_division, number_of_ranks, on_each_rank
from attnplug_engine.cli.run import add_engine_options, engine_options
from attnplug_engine.execution import signals

if TYPE_CHECKING:
    from attnplug_engine.options import EngineOptions


def declare(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command to core's command line."""
    parser = add_command(commands, "warm", "Compile every kernel that a model needs into the disk caches.", run)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="PATH|tiny:NAME", help=MODEL_HELP)
    what.add_argument(
        "--describe-gpu", metavar="FILE", help="write a description of this machine's GPU for --gpu, as JSON"
    )
    parser.add_argument(
        "--gpu",
        metavar="FILE",
        help="compile Triton's kernels for the GPU that this file describes, on a machine without one",
    )
    add_engine_options(parser)
    # Weights are random, so that a config.json suffices: no kernel depends on their values.
    parser.set_defaults(prompts=None, prompts_format=None, random_weights=True, ignore_eos=True)


def run(parsed: argparse.Namespace) -> int:
    if parsed.describe_gpu is not None:
        return _describe_gpu(parsed)
    options = engine_options(parsed)
    if parsed.gpu is None:
        return on_each_rank(parsed, lambda _: [], partial(_warm, options=options), speculation=options.speculation)
    if parsed.device not in (None, "cuda"):
        raise UsageError(f"--gpu describes the device, and --device {parsed.device} is another; leave it out")
    if options.compile_processes == 0:
        raise UsageError("--compile-processes 0 compiles nothing ahead, and --gpu does nothing else; give 1 or more")
    if (ranks := number_of_ranks(parsed)) > 1:
        check_division(parsed, ranks, options.speculation)
    with signals.exit_immediately():
        from attnplug_engine.cli.warm_for_gpu import warm_for_gpu

    return warm_for_gpu(parsed, options)


def _describe_gpu(parsed: argparse.Namespace) -> int:
    if parsed.gpu is not None:
        raise UsageError("--gpu goes with --model; leave it out of --describe-gpu")
    with signals.exit_immediately():
        from attnplug_engine.cli.gpu_file import describe_gpu

    description, path = describe_gpu(), Path(parsed.describe_gpu)
    try:
        path.write_text(json.dumps(description, indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"--describe-gpu {path} cannot be written: {error.strerror}") from error
    output.write(description, f"{path} describes {description['properties']['name']}", json=parsed.json)
    return 0


def _warm(parsed: argparse.Namespace, _lines: list[Any], options: EngineOptions) -> int:
    with signals.exit_immediately():
        from attnplug_engine.cli.generate import warm

    return warm(parsed, options)
