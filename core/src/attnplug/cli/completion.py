"""``attnplug completion``: shell scripts that complete commands, options and backend names.

Scripts are generated from the argument parser. They look up the installed backends on each completion.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from attnplug.cli import output
from attnplug.cli.app import make_parser
from attnplug.declare.problem import DType, GraphLevel
from attnplug.registry.registry import load_registry

_REGISTRY = load_registry()
_VALUES = {
    "DEVICE": " ".join(_REGISTRY.devices),
    "DTYPE": " ".join(DType),
    "FORMAT": " ".join(_REGISTRY.kv_formats),  # those of the time when the script is made
    "LEVEL": " ".join(level.name.lower() for level in GraphLevel),
    "NAME|auto": "auto $(attnplug backends --names 2>/dev/null)",
}
"""Completions of an option's value, by metavar. Other options take files or values that cannot be listed."""


class Option(NamedTuple):
    """One option of a command. ``value`` is the metavar of its value, or None for a flag."""

    name: str
    help: str
    value: str | None

    @property
    def words(self) -> str | None:
        return None if self.value is None else _VALUES.get(self.value)


class Command(NamedTuple):
    name: str
    help: str
    options: tuple[Option, ...]
    words: tuple[str, ...] = ()
    """Values of its positional arguments."""


def run(parsed: argparse.Namespace) -> int:
    script = SHELLS[parsed.shell](read_commands(make_parser()))
    output.write({"shell": parsed.shell, "script": script}, script, json=parsed.json)
    return 0


def read_commands(parser: argparse.ArgumentParser) -> list[Command]:
    """Return every command of a parser."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    texts = {action.dest: action.help or "" for action in commands._choices_actions}
    found = []
    for name, own in commands.choices.items():
        options, words = list[Option](), list[str]()
        for action in own._actions:
            value = None if action.nargs == 0 else str(action.metavar or action.dest)
            if action.option_strings:
                options.append(Option(action.option_strings[-1], (action.help or "").partition(" (")[0], value))
            else:
                words += map(str, action.choices or ())
        found.append(Command(name, texts.get(name, ""), tuple(options), tuple(words)))
    return found


def _filled(shell: str, **parts: str) -> str:
    """Return the script of a shell with each ``@PART@`` replaced."""
    script = Path(__file__).with_name(f"completion.{shell}").read_text("utf-8").removesuffix("\n")
    for name, text in parts.items():
        script = script.replace(f"@{name}@", text)
    return script


def bash(commands: list[Command]) -> str:
    found: dict[str | None, list[str]] = {}  # options that take a value, by its completions
    for option in (option for command in commands for option in command.options if option.value is not None):
        if option.name not in found.setdefault(option.words, []):
            found[option.words].append(option.name)
    values = (
        f"        {' | '.join(names)}) " + ("return ;;" if words is None else f'words="{words}" ;;')
        for words, names in found.items()
    )
    own = (
        f'            {command.name}) words="{" ".join([*command.words, *(o.name for o in command.options)])}" ;;'
        for command in commands
    )
    names = " ".join(command.name for command in commands)
    return _filled("bash", VALUES="\n".join(values), COMMANDS="\n".join(own), NAMES=names)


def zsh(commands: list[Command]) -> str:
    lines = []
    for command in commands:
        parts = [_quoted(f"*:what:({' '.join(command.words)})")] if command.words else []
        for option in command.options:
            text = f"{option.name}[{option.help.translate(_NO_BRACKETS)}]"
            if option.value is not None:
                action = "_files" if option.words is None else f"({option.words})"
                text += f":{option.value.replace(':', ' ')}:{action}"
            parts.append(_quoted(text))
        lines.append(f"        {command.name}) _arguments {' '.join(parts)} ;;")
    names = " ".join(_quoted(f"{command.name}:{command.help}") for command in commands)
    return _filled("zsh", NAMES=names, COMMANDS="\n".join(lines))


_NO_BRACKETS = str.maketrans("[]:", "() ")


def fish(commands: list[Command]) -> str:
    lines = ["# attnplug for fish: attnplug completion fish | source", "complete -c attnplug -f"]
    for command in commands:
        lines.append(f"complete -c attnplug -n __fish_use_subcommand -a {command.name} -d {_quoted(command.help)}")
        base = f"complete -c attnplug -n '__fish_seen_subcommand_from {command.name}'"
        if command.words:
            lines.append(f"{base} -a {_quoted(' '.join(command.words))}")
        for option in command.options:
            takes = ""
            if option.value is not None:
                takes = " -r -F" if option.words is None else f" -x -a {_quoted(option.words.replace('$(', '('))}"
            lines.append(f"{base} -l {option.name.removeprefix('--')}{takes} -d {_quoted(option.help)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """Quote for all three shells. An apostrophe becomes a typographic one."""
    return "'" + text.replace("'", "’") + "'"


SHELLS: dict[str, Callable[[list[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
