"""``attnplug conform``: check everything that a backend claims against float64."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

from attnplug import Problem, UsageError
from attnplug.cli.app import Commands, add_command
from attnplug.declare.problem import INVARIANCE


def declare_conform(commands: Commands[argparse.ArgumentParser]) -> None:
    text = "Check everything that a backend claims against float64, and diagnose what is wrong."
    parser = add_command(commands, "conform", text, _conform)
    parser.add_argument("name", metavar="NAME", nargs="?", help="the backend, as attnplug backends lists it")
    parser.add_argument("--kv-format", metavar="FORMAT", help="check this KV format, without a backend")
    parser.add_argument(
        "--device", metavar="DEVICE", help="where to run (default: cuda if there is a GPU, otherwise cpu)"
    )
    parser.add_argument(
        "--contract",
        metavar="VERSION",
        help="require the checks of this contract; newer ones are advisory (default: that of the installed attnplug)",
    )
    parser.add_argument("--quick", action="store_true", help="only the checks that find most mistakes; takes seconds")
    parser.add_argument(
        "--check",
        action="append",
        default=[],
        metavar="CHECK",
        help="a check, or all below a prefix; may be repeated",
    )
    parser.add_argument(
        "--report", metavar="FILE", help="write a report: out.html (self-contained), out.json or out.xml (JUnit)"
    )
    parser.add_argument(
        "--expected-failures",
        metavar="FILE",
        help="known failures, one line each: CHECK: REASON; a listed check that passes is an error",
    )
    parser.add_argument(
        "--backend-option",
        action="append",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="an option of the backend; may be repeated",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="run checks in N processes, so that kernels compile in parallel",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random inputs and random cases")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="S",
        help="CPU seconds (on a GPU: seconds) for random cases; 0 for none (default: 10, with --quick 1)",
    )
    parser.add_argument("--case", metavar="JSON", help="run only this random case, as a failure prints it")
    parser.add_argument(
        "--batch-invariant",
        nargs="?",
        const=",".join(INVARIANCE),
        metavar="LEVELS",
        help=f"request these levels of invariance in every check: {', '.join(INVARIANCE)} (without a value: all)",
    )


_BACKEND_ONLY = (
    *("name", "report", "expected_failures", "backend_option", "case", "budget", "check", "quick"),
    *("batch_invariant", "contract"),
)


def _conform_format(parsed: argparse.Namespace) -> int:
    """Check a KV format by its declaration alone."""
    if given := [name for name in _BACKEND_ONLY if getattr(parsed, name)]:
        other = "a backend" if given[0] == "name" else f"--{given[0].replace('_', '-')}"
        raise UsageError(f"--kv-format {parsed.kv_format} checks a format without a backend; leave out {other}")
    from attnplug.cli import output
    from attnplug.host import load_registry
    from attnplug.registry.loading import guarded

    registry = load_registry()
    format = registry.kv_format(parsed.kv_format, "kv_format")
    from attnplug.machine.runtime import open_device  # imports torch, which takes seconds
    from attnplug_conformance.format_checks import check_format

    device = open_device(parsed.device, registry.device)[0]
    with guarded():  # what a codec prints must not end up in our output
        results = list(check_format(format, device))
    failed = [result for result in results if result.message]
    for result in failed:
        print(f"FAILED {result.kind}.{result.check}: {result.message}", file=sys.stderr if parsed.json else None)
        print(f"  must hold: {result.requirement}", file=sys.stderr if parsed.json else None)
    if parsed.json:
        output.write_json({"format": format.name, "results": [result.as_json() for result in results]})
    else:
        verdict = f"does not conform: {len(failed)} of {len(results)} checks failed"
        held = ", ".join(sorted(format.holds))
        print(
            f"KV format {format.name} ({held} rows) {verdict if failed else f'conforms: {len(results)} checks passed'}"
        )
    return 1 if failed else 0


def _conform(parsed: argparse.Namespace) -> int:
    if parsed.kv_format is not None:
        return _conform_format(parsed)
    if parsed.name is None:
        raise UsageError("give the NAME of a backend, or a format by --kv-format")
    report = None if parsed.report is None else _report_path(parsed.report)
    from attnplug.cli import output
    from attnplug.cli.output import warn_of_plugins
    from attnplug.host import load_registry, split_settings

    if not 0 <= parsed.seed < 1 << 63:
        raise UsageError(f"--seed {parsed.seed} is not a seed; give a number from 0 to {(1 << 63) - 1}")
    if parsed.jobs < 1:
        raise UsageError(f"--jobs {parsed.jobs} is not a number of processes; give 1 or more")
    registry = load_registry()
    if parsed.device is not None:
        registry.device(parsed.device)  # reports an unknown name before the import of torch, which takes seconds
    warn_of_plugins(registry)
    backend = registry.get(parsed.name)
    budget = parsed.budget if parsed.budget is not None else 1.0 if parsed.quick else 10.0
    if not 0 <= budget < math.inf:
        raise UsageError(f"--budget {budget} is not a time; give seconds, or 0 for no random cases")

    from attnplug_conformance.catalog import all_checks  # imports torch, which takes seconds
    from attnplug_conformance.invariant_case import check_of_case
    from attnplug_conformance.processes import in_processes
    from attnplug_conformance.report import as_html, as_json, as_junit, lines
    from attnplug_conformance.runner import read_expected, required_contract, run_checks
    from attnplug_conformance.selection import check_options
    from attnplug_conformance.subject import Subject

    checks = all_checks()
    if parsed.case is not None:
        if parsed.check or parsed.budget is not None:
            other = "--check" if parsed.check else "--budget"
            raise UsageError(f"--case runs one random case and nothing else; leave out {other}")
        try:
            wanted = check_of_case(parsed.case)
        except ValueError as error:
            raise UsageError(f"--case is not a random case: {error}; give one as a failure prints it") from None
        checks = tuple(check for check in checks if check.name == wanted)
    elif not budget:
        checks = tuple(check for check in checks if check.claim != "random")
    contract = required_contract(parsed.contract, backend.spec)
    for name in parsed.check:
        if not any(_is_below(check.name, name) for check in checks):
            near = difflib.get_close_matches(name, [check.name for check in checks], n=1)
            groups = dict.fromkeys(check.name.split(".")[0] for check in checks)
            hint = f"did you mean {near[0]}?" if near else f"there are those below {', '.join(groups)}"
            raise UsageError(f"there is no check {name!r}; {hint}")
    if parsed.check:
        checks = tuple(check for check in checks if any(_is_below(check.name, name) for name in parsed.check))
    expected: dict[str, str] = {}
    if parsed.expected_failures is not None:
        try:
            expected = read_expected(Path(parsed.expected_failures).read_text(), parsed.expected_failures)
        except OSError as error:
            name = parsed.expected_failures
            raise UsageError(f"--expected-failures {name} cannot be read: {error.strerror}; give a file") from None
        except ValueError as error:
            raise UsageError(f"--expected-failures: {error}") from None
    check_options(registry, parsed.backend_option)
    if others := [name for name in split_settings(parsed.backend_option) if name != parsed.name]:
        raise UsageError(
            f"--backend-option {others[0]}.… is of another backend than {parsed.name}, which is checked; leave it out, "
            f"or give {parsed.name}.KEY=VALUE"
        )
    subject = replace(
        Subject.installed(backend, parsed.device, parsed.backend_option),
        budget=budget,
        random_case=parsed.case,
        invariant=Problem(invariant=frozenset((parsed.batch_invariant or "").replace(",", " ").split())).invariant,
    )
    verdict = run_checks(
        subject,
        checks,
        quick=parsed.quick,
        seed=parsed.seed,
        expected=expected,
        floors=not parsed.check and parsed.case is None,
        runner=in_processes(parsed.jobs, subject) if parsed.jobs > 1 else None,
        contract=contract,
    )
    for line in lines(verdict):
        print(line, file=sys.stderr if parsed.json else None)
    if report is not None:
        if report.suffix == ".json":
            text = json.dumps(as_json(verdict), indent=1) + "\n"
        else:
            text = as_junit(verdict) if report.suffix == ".xml" else as_html(verdict)
        try:
            report.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--report {report} cannot be written: {error.strerror}; give another file") from None
        print(f"wrote {report}", file=sys.stderr)
    if parsed.json:
        output.write_json(as_json(verdict))
    return 0 if verdict.holds else 1


def _is_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _report_path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".html", ".json", ".xml"):
        raise UsageError(f"--report {text} is neither a .html nor a .json nor a .xml file")
    if path.is_dir():
        raise UsageError(f"--report {text} is a folder; give a file")
    if not path.parent.is_dir():
        raise UsageError(f"--report {text}: there is no folder {path.parent}")
    return path
