"""attnplug completion: scripts that shells can read, and what bash completes by its own."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attnplug.cli.app import make_parser
from attnplug.cli.completion import SHELLS, read_commands
from attnplug_testing.command import Attnplug

pytestmark = pytest.mark.usefixtures("plain_environment")
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")


@pytest.mark.parametrize("shell", list(SHELLS))
def test_a_script_knows_every_command_and_option(attnplug: Attnplug, shell: str) -> None:
    outcome = attnplug("completion", shell)
    assert (outcome.code, outcome.err) == (0, "")
    for command in read_commands(make_parser()):
        assert command.name in outcome.out
        for option in command.options:
            assert (f"-l {option.name[2:]} " if shell == "fish" else option.name) in outcome.out
    assert "attnplug backends --names" in outcome.out


@needs_bash
@pytest.mark.parametrize("shell", ["bash", "zsh"])  # the zsh script uses syntax of bash only
def test_a_script_is_well_formed(attnplug: Attnplug, shell: str) -> None:
    subprocess.run(["bash", "-n"], input=attnplug("completion", shell).out, text=True, check=True)


def test_every_line_for_fish_is_one_command(attnplug: Attnplug) -> None:
    for line in attnplug("completion", "fish").out.splitlines()[1:]:
        words = shlex.split(line)
        assert words[:3] == ["complete", "-c", "attnplug"]


@needs_bash
@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("ex", ["explain"]),
        ("--v", ["--version"]),
        ("explain --mod", ["--model"]),
        ("explain --device ", ["cpu", "cuda"]),
        ("explain --model tiny:llama --decode-attention-backend torch_n", ["torch_native"]),
        ("explain --attention-backend a", ["auto"]),
        ("explain --attention-backend = torch_n", ["torch_native"]),  # how bash reads --attention-backend=torch_n
        ("explain --device =", ["cpu", "cuda"]),
        ("check --cuda-g", []),
        ("completion f", ["fish"]),
        ("explain --model /nosu", []),
    ],
)
def test_bash_completes(attnplug: Attnplug, typed: str, found: list[str]) -> None:
    words = shlex.join(["attnplug", *typed.split(" ")])
    script = (
        f"{attnplug('completion', 'bash').out}\nCOMP_WORDS=({words})\nCOMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
        '_attnplug\nprintf "%s\\n" "${COMPREPLY[@]}"'
    )
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert done.stdout.split() == found
