"""``attnplug check``: quick conformance run of the backends that selection chooses."""

from __future__ import annotations

import argparse
import sys

from attnplug import UsageError
from attnplug.cli.app import Commands, add_command, option


def declare_check(commands: Commands[argparse.ArgumentParser]) -> None:
    text = "Run the quick checks of the selected backends against float64; conform runs all."
    parser = add_command(commands, "check", text, _check)
    parser.add_argument("--attention-backend", default="auto", metavar="NAME|auto", help="backend for full attention")
    for role in ("prefill", "decode", "linear"):
        setting = option(f"{role}_attention_backend")
        parser.add_argument(setting, metavar="NAME|auto", help=f"backend for the role {role} alone")
    parser.add_argument(
        "--device", metavar="DEVICE", help="where to run (default: cuda if there is a GPU, otherwise cpu)"
    )
    parser.add_argument(
        "--backend-option",
        action="append",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="an option of one backend; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random inputs")


def _check(parsed: argparse.Namespace) -> int:
    from attnplug.cli import output
    from attnplug.cli.output import warn_of_plugins
    from attnplug.host import load_registry

    if not 0 <= parsed.seed < 1 << 63:
        raise UsageError(f"--seed {parsed.seed} is not a seed; give a number from 0 to {(1 << 63) - 1}")
    registry = load_registry()
    if parsed.device is not None:
        registry.device(parsed.device)  # reports an unknown name before the import of torch, which takes seconds
    warn_of_plugins(registry)
    roles = {role: getattr(parsed, f"{role}_attention_backend") for role in ("prefill", "decode", "linear")}
    requested = {role: name for role, name in roles.items() if name is not None}
    for name in (parsed.attention_backend, *requested.values()):
        if name != "auto":
            registry.get(name)  # reports an unknown name before the import of torch, which takes seconds

    from attnplug.machine.runtime import open_device
    from attnplug_conformance.catalog import all_checks
    from attnplug_conformance.report import as_json, lines
    from attnplug_conformance.runner import run_checks
    from attnplug_conformance.selection import check_options, selected_backends
    from attnplug_conformance.subject import Subject

    device, processor = open_device(parsed.device, registry.device)
    check_options(registry, parsed.backend_option)
    verdicts = []
    for name in selected_backends(
        registry, parsed.attention_backend, requested, device.type, processor, parsed.backend_option
    ):
        subject = Subject.installed(registry.backends[name], device.type, parsed.backend_option)
        verdict = run_checks(subject, all_checks(), quick=True, seed=parsed.seed)
        verdicts.append(verdict)
        for line in lines(verdict):
            print(line, file=sys.stderr if parsed.json else None)
    if parsed.json:
        output.write_json([as_json(verdict) for verdict in verdicts])
    return 0 if all(verdict.holds for verdict in verdicts) else 1
