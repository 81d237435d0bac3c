"""The command ``attnplug``: its entry point, and subcommands with their options.

Each command's implementation is in its own module, imported when it runs. Exit codes: 0 success, 1 refusal or failed
check, 2 usage error.

Commands of other packages are found by entry points. A broken one is an error only for its own users. Uses argparse
instead of a friendlier library: ``attnplug backends`` must answer within 0.3 s with 50 plugins installed, and importing
typer with its dependencies would take a third of that.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import faulthandler
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module

from importlib_metadata import EntryPoint

from attnplug.cli import output
from attnplug.declare.errors import AttnplugError, PluginError, Refusal, Render, UsageError, describe_error
from attnplug.declare.problem import INVARIANCE, ExtendPath, Role
from attnplug.declare.spec import Source
from attnplug.machine import interrupt
from attnplug.registry.loading import Broken, attributed, find_entry_points, load_entry_point

EPILOG = "Exit codes: 0 success, 1 a refusal or a failed check, 2 a usage error."
DOCS = "https://github.com/attnplug/attnplug/blob/main/docs/commands.md"
COMMANDS_GROUP = "attnplug.commands"
"""Entry-point group of commands: name = the command's name, target = a function ``declare(commands)``."""

Commands = argparse._SubParsersAction  # argparse's class of subcommands, private but returned by add_subparsers


def option(setting: str) -> str:
    """Return ``--page-size`` for ``page_size``, or ``--backend-option NAME.KEY=…`` for an option of a backend."""
    return f"--backend-option {setting}=…" if "." in setting else f"--{setting.replace('_', '-')}"


def options_of(parser: argparse.ArgumentParser) -> Render:
    """Return a function that formats settings as options of one command, or as None if it has no such option.

    ``--enable-plan-stream`` is the option of ``plan_stream``.
    """

    def render(setting: str) -> str | None:
        spellings = (option(setting), option(f"enable_{setting}"))
        return next((text for text in spellings if text.partition(" ")[0] in parser._option_string_actions), None)

    return render


def refusal_as_json(refusal: Refusal, render: Render) -> dict[str, object]:
    """Return a refusal as JSON, with its setting as a key and as a command-line option."""
    return {**refusal.as_json(), "option": None if refusal.setting is None else render(refusal.setting)}


def command_claims() -> tuple[Mapping[str, list[EntryPoint]], list[Broken]]:
    """Return the entry points of every command by name, and installations that cannot be read."""
    points, broken = find_entry_points(COMMANDS_GROUP)
    found: dict[str, list[EntryPoint]] = {}
    for point in sorted(points, key=lambda point: point.name):
        found.setdefault(point.name, []).append(point)
    return found, broken


def command_conflict(name: str, points: Collection[EntryPoint]) -> str | None:
    """Return an error if several packages claim a command's name or attnplug itself has it; otherwise None."""
    claimants = " and ".join(f"{Source.of(point)} ({point.value})" for point in points)
    if name in OWN:
        return f"command {name!r} of {claimants} is not used: attnplug has a command of that name"
    if len(points) > 1:
        return f"command {name!r} is claimed by {claimants}, so neither is used; uninstall one"
    return None


def _add_loaded(commands: Commands[argparse.ArgumentParser], name: str, points: list[EntryPoint]) -> None:
    if (taken := command_conflict(name, points)) is not None:
        raise PluginError(taken)
    (point,) = points
    with attributed("command", point):
        load_entry_point(point)(commands)
        declared = commands.choices.get(name)
        if declared is None:
            raise PluginError("it adds no command of that name")
        if declared.get_default("command") is None or declared.get_default("json") is None:
            raise PluginError("it does not add its command with attnplug.cli.app.add_command")


class _Help(argparse.HelpFormatter):
    """Help formatter that shows the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if action.help is None or default is None or default is False or default in ([], argparse.SUPPRESS):
            return action.help
        return f"{action.help} (default: %(default)s)"


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import importlib_metadata as metadata

        from attnplug.declare.version import CONTRACT_VERSION

        print(f"attnplug {metadata.version('attnplug')}, contract {CONTRACT_VERSION}")
        parser.exit()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line. ``render`` of the result formats a setting as an option of the command, if it has one."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return make_parser(arguments).parse_args(arguments)


def run(parsed: argparse.Namespace) -> int:
    """Run a parsed command and return its exit code."""
    if parsed.json:
        output.reserve_for_json()
    command: Callable[[argparse.Namespace], int] = parsed.command
    with output.shown_as_lines():
        return command(parsed)


def make_parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of a command line. Commands of other packages are loaded only if it needs them.

    Raises UsageError if it names a command that no package provides.
    """
    parser = argparse.ArgumentParser(
        prog="attnplug", description="Attention backends for LLM inference as plugins.", epilog=EPILOG
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version of attnplug and of its contract")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for own, text in OWN.items():
        module = f"attnplug.cli.{own}"
        declared = add_command(commands, own, text, lambda parsed, module=module: import_module(module).run(parsed))
        _add_options(own, declared)
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    if name in OWN or (name is None and "--version" in arguments):
        return parser
    found, broken = command_claims()
    if name is None:  # all that can be loaded, and one line for each that cannot
        for fault in broken:
            print(f"warning: {fault.source}: {fault.error}", file=sys.stderr)
        for each, points in found.items():
            try:
                _add_loaded(commands, each, points)
            except PluginError as error:
                print(f"warning: {error}", file=sys.stderr)
    elif name in found:  # alone, without loading the others
        _add_loaded(commands, name, found[name])
    else:
        known = [*OWN, *found]
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands are {', '.join(known)}; packages add more, see {DOCS}"
        unreadable = "".join(f"\n  {fault.source}: {fault.error}" for fault in broken)
        raise UsageError(f"there is no command {name!r}; {hint}{unreadable}")
    return parser


def add_command(
    commands: Commands[argparse.ArgumentParser], name: str, text: str, call: Callable[..., int]
) -> argparse.ArgumentParser:
    """Add a command that runs ``call(parsed)`` and exits with the code that it returns.

    ``parsed.json`` is the option ``--json``, which every command has. ``parsed.render`` formats a setting as an option
    of the command, or returns None if the command has no such option. Example, for the entry-point group
    ``attnplug.commands``::

        def declare(commands):
            parser = add_command(commands, "hello", "Print a greeting.", lambda parsed: print("hello") or 0)
            parser.add_argument("--name")
    """
    # allow_abbrev=False: --device must not match a longer option that a later version adds.
    shown = text.replace("%", "%%")  # argparse formats the help, but not the description
    parser = commands.add_parser(
        name, help=shown, description=text, epilog=EPILOG, formatter_class=_Help, allow_abbrev=False
    )
    parser.add_argument(
        "--json", action="store_true", help="write JSON to standard output, everything else to standard error"
    )
    parser.set_defaults(command=call, render=options_of(parser))
    return parser


def _add_options(command: str, parser: argparse.ArgumentParser) -> None:
    """Add the options of one of core's own commands."""
    if command == "backends":
        parser.add_argument("--all", action="store_true", help="show broken and blocked plugins too")
        text = "print only the names of selectable backends, one per line"
        parser.add_argument("--names", action="store_true", help=text)
    if command == "completion":
        parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")
    if command != "explain":
        return
    text = "a config.json, a folder that contains one, or tiny:NAME"
    parser.add_argument("--model", required=True, metavar="CONFIG", help=text)
    text = "engine of a bridge: vllm, sglang or transformers (default: ours)"
    parser.add_argument("--host", metavar="NAME", help=text)
    add_backend_options(parser)
    for role in Role:
        otherwise = "auto" if role is Role.LINEAR else "as --attention-backend"
        text = f"backend for the role {role} only (default: {otherwise})"
        parser.add_argument(option(role.setting), metavar="NAME|auto", help=text)
    text = "compute capability, 90 for 9.0, of a GPU that may be absent (default: that of the first GPU)"
    parser.add_argument("--sm", type=int, metavar="90", help=text)
    parser.add_argument("--dtype", metavar="DTYPE", help="element type of activations (default: the model's)")
    text = "format of a sparse model's index keys (default: as --dtype)"
    parser.add_argument("--index-dtype", metavar="FORMAT", help=text)
    parser.add_argument("--speculative-tokens", type=int, default=0, metavar="N", help="draft tokens per step")
    text = "branches of a draft; drafts with more than 1 are trees"
    parser.add_argument("--speculative-topk", type=int, default=1, metavar="K", help=text)
    text = "keep latent rows in host memory, from which sparse layers select"
    parser.add_argument("--enable-hisparse", action="store_true", help=text)
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="ranks that share the heads")
    text = f"required MLA prefill path: {', '.join(ExtendPath)} (default: chosen by the backend's abilities)"
    parser.add_argument("--mla-extend", metavar="PATH", help=text)
    text = "required level: never, decode, uniform or always (default: what can be captured, as in run)"
    parser.add_argument("--cuda-graph", metavar="LEVEL", help=text)
    text = f"required levels of invariance: {', '.join(INVARIANCE)} (without a value: all of them)"
    parser.add_argument("--batch-invariant", nargs="?", const=",".join(INVARIANCE), metavar="LEVELS", help=text)


def add_backend_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that selects a backend."""
    parser.add_argument("--attention-backend", default="auto", metavar="NAME|auto", help="backend for full attention")
    add_device_option(parser)
    add_cache_options(parser)


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``."""
    text = "device type: cpu, cuda or one of a plugin (default: cuda if there is a GPU, otherwise cpu)"
    parser.add_argument("--device", metavar="DEVICE", help=text)


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the KV cache and of single backends."""
    parser.add_argument("--kv-dtype", metavar="FORMAT", help="format of the KV cache (default: as --dtype)")
    text = "tokens per cache page (default: a size that all backends support)"
    parser.add_argument("--page-size", type=int, metavar="TOKENS", help=text)
    text = "option of one backend; may be repeated"
    parser.add_argument("--backend-option", action="append", default=[], metavar="NAME.KEY=VALUE", help=text)


OWN = {
    "backends": "List the installed backends: what each supports, and whether it is usable here.",
    "plugins": "List the installed packages that provide backends, commands and hosts.",
    "explain": "Show the backend that each role gets for a model, and every reason against every candidate.",
    "doctor": "Report on Python, torch, devices, kernel libraries, plugins and caches. Always prints, never fails.",
    "completion": "Print a completion script for a shell.",
}
"""Core's own commands with their help texts. Module ``NAME`` has ``run(parsed)``."""


def main() -> None:
    """Run the command. A user's mistake ends in one message on standard error, without a traceback."""
    render: Render = option
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # the stack of a crash names the plugin that was loading; see load_entry_point
    try:
        with output.safe_streams():
            parsed = parse()
            render = parsed.render
            sys.exit(_run(parsed))
    except AttnplugError as error:
        print(f"error: {error.format(render)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt as error:  # its text may name the plugin that was loading
        print(f"interrupted {error}".rstrip(), file=sys.stderr)
        sys.exit(interrupt.EXIT_CODE)
    except BrokenPipeError:  # the reader closed the pipe, as in 'attnplug backends | head -1'
        _discard_output()
        sys.exit(1)
    except OSError as error:
        if error.errno is None or error.filename is not None:  # unrelated to our output
            raise
        _discard_output()
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def _run(parsed: argparse.Namespace) -> int:
    """Run the command. An error in a plugin's code names the plugin; one in our code keeps its traceback."""
    try:
        return run(parsed)
    except (AttnplugError, KeyboardInterrupt, interrupt.Terminated):
        raise
    except BaseException as error:
        packages: dict[str, Source] = {}  # top-level packages and modules of each plugin's target and distribution
        for point in find_entry_points()[0]:
            with contextlib.suppress(Exception):  # a damaged installation
                files = point.dist.files or [] if point.dist is not None else []
                owned = {point.module.partition(".")[0], *(file.parts[0].removesuffix(".py") for file in files)}
                packages |= dict.fromkeys(owned, Source.of(point))
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
            source = packages.get(str(frame.f_globals.get("__name__")).partition(".")[0])
            if source is not None and not source.embedded:
                place = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
                text = f"plugin {source.entry_point} ({source}) failed at {place}: {describe_error(error)}"
                raise PluginError(text) from error
        raise


def _discard_output() -> None:
    """Redirect standard output to null, because Python flushes it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
