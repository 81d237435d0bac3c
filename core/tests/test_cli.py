"""The command as a whole: help, version, streams, and that no mistake of a person ends in a traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.command import Attnplug, in_own_process

pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.mark.parametrize("command", [[], ["backends"], ["explain"], ["doctor"], ["check"]])
def test_every_command_has_help(attnplug: Attnplug, command: list[str]) -> None:
    outcome = attnplug(*command, "--help")
    assert outcome.code == 0
    assert outcome.out.startswith(f"usage: attnplug {' '.join(command)}".rstrip())
    assert outcome.err == ""


def test_the_version_is_that_of_the_distribution_and_the_contract(attnplug: Attnplug) -> None:
    """D4"""
    outcome = attnplug("--version")
    assert outcome.code == 0
    assert outcome.out == "attnplug 0.1.0, contract 1.0\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nosuch"],
        [""],
        ["backends", "--jsno"],
        ["backends", "extra"],
        ["explain"],
        ["explain", "--model"],
        ["explain", "--model", "tiny:llama", "--page-size", "many"],
        ["explain", "--model", "tiny:llama", "--sm", ""],
        ["check", "--seed", "x"],
        ["--nosuch"],
    ],
)
def test_a_command_line_that_cannot_be_read_is_wrong_usage(attnplug: Attnplug, arguments: list[str]) -> None:
    outcome = attnplug(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err


def test_python_m_attnplug_is_the_command() -> None:
    outcome = in_own_process("--version")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("attnplug ")


@pytest.mark.parametrize(
    "arguments", [["backends"], ["backends", "--json"], ["explain", "--model", "tiny:llama"], ["--help"]]
)
def test_a_reader_that_goes_away_gets_no_traceback(arguments: list[str]) -> None:
    """As in 'attnplug backends | head -1'."""
    reading, writing = os.pipe()
    os.close(reading)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "attnplug", *arguments],
            env=environment,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.stderr == ""


def test_a_full_disk_is_an_error_for_a_person() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "attnplug", "backends"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert "No space left" in done.stderr


@pytest.mark.parametrize("arguments", [["backends"], ["explain", "--model", "tiny:llama"]])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_gets_its_answer(arguments: list[str], encoding: str) -> None:
    outcome = in_own_process(*arguments, PYTHONIOENCODING=encoding)
    assert outcome.code == 0
    assert "torch_native" in outcome.out
    assert "Traceback" not in outcome.err


def test_listing_and_explaining_import_neither_torch_nor_a_kernel_library() -> None:
    """With every plugin that is installed here, for any hardware: explaining needs metadata, not imports."""
    code = (
        "import sys\nfrom attnplug.cli.main import main\n"
        "asked = ['explain', '--model', 'tiny:deepseek_v3', '--dtype', 'bf16']\n"
        "more = [['--sm', '90'], ['--sm', '100', '--kv-dtype', 'fp8'], ['--sm', '90', '--cuda-graph', 'decode']]\n"
        "for arguments in (['backends'], ['backends', '--json'], asked, *([*asked, *each] for each in more)):\n"
        "    sys.argv = ['attnplug', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'triton', 'rich', 'flashinfer', 'fla', 'flash_attn', 'flash_mla', 'cutlass'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
