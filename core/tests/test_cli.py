"""The command as a whole: help, version, streams, and that no mistake of a person ends in a traceback."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import importlib_metadata as metadata
import pytest

from attnplug.declare.installed import requirement_refusal
from attnplug.declare.version import CONTRACT_VERSION, contract_problem, core_range, parse_contract
from attnplug_testing.command import Attnplug, in_own_process

pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.mark.parametrize("command", [[], ["backends"], ["plugins"], ["explain"], ["doctor"], ["completion"]])
def test_every_command_has_help(attnplug: Attnplug, command: list[str]) -> None:
    outcome = attnplug(*command, "--help")
    assert outcome.code == 0
    assert outcome.out.startswith(f"usage: attnplug {' '.join(command)}".rstrip())
    assert outcome.err == ""


def test_help_shows_every_default_there_is(attnplug: Attnplug) -> None:
    text = " ".join(attnplug("explain", "--help").out.split())
    for line in ("backend for full attention (default: auto)", "draft tokens per step (default: 0)", "as in run)"):
        assert line in text
    for nothing in ("default: None", "default: False", "default: []", "SUPPRESS"):
        assert nothing not in text


def test_the_version_is_that_of_the_distribution_and_the_contract(attnplug: Attnplug) -> None:
    """D4"""
    outcome = attnplug("--version")
    assert outcome.code == 0
    version = metadata.version("attnplug")  # as pip show prints it
    assert outcome.out == f"attnplug {version}, contract {CONTRACT_VERSION}\n"
    assert version.startswith(f"{CONTRACT_VERSION}.")
    assert contract_problem(".".join(version.split(".")[:2])) is None, "the gate runs plugins of this version"
    if "rc" not in version:  # pip sorts it below its version
        assert requirement_refusal(f"attnplug{core_range(parse_contract(CONTRACT_VERSION))}") is None


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
        ["--nosuch"],
    ],
)
def test_a_command_line_that_cannot_be_read_is_wrong_usage(attnplug: Attnplug, arguments: list[str]) -> None:
    outcome = attnplug(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err


def test_a_crash_in_native_code_prints_a_stack(attnplug: Attnplug, monkeypatch: pytest.MonkeyPatch) -> None:
    """D2: faulthandler is enabled once, on standard error. One line of its stack names the plugin that was loading."""
    enabled: list[int] = []
    monkeypatch.setattr("faulthandler.is_enabled", lambda: bool(enabled))
    monkeypatch.setattr("faulthandler.enable", enabled.append)
    attnplug("--version")
    attnplug("--version")
    assert enabled == [2]


def test_python_m_attnplug_is_the_command() -> None:
    outcome = in_own_process("--version")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("attnplug ")


@pytest.mark.parametrize("arguments", [["backends", "--json"], ["explain", "--model", "tiny:llama"]])
def test_a_reader_that_goes_away_gets_no_traceback(arguments: list[str]) -> None:
    """Same as 'attnplug backends | head -1'."""
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


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_closed_standard_output_is_an_error(
    attnplug: Attnplug, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """Same as ``>&-``: results would be lost with exit code 0."""
    monkeypatch.setattr(sys, "stdout", None)
    outcome = attnplug("backends", *options)
    assert outcome.code == 2 and "standard output is closed" in outcome.err
    monkeypatch.setattr(sys, "stderr", None)
    assert attnplug("backends", *options).code == 2


def test_a_closed_standard_error_is_none(attnplug: Attnplug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    outcome = attnplug("backends", "--json")
    assert outcome.code == 0 and outcome.json


def test_a_full_disk_is_an_error_for_a_person() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "attnplug", "backends"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert "No space left" in done.stderr


@pytest.mark.parametrize(
    ("file", "room", "reason"), [("/dev/full", 1000, "No space left on device"), ("answer", 100, "File too large")]
)
def test_a_full_disk_under_json_is_one_message(tmp_path: Path, file: str, room: int, reason: str) -> None:
    """A result that fits into a buffer: a failed write must not fail again at exit, unreported."""
    with open(tmp_path / file, "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "attnplug", "backends", "--json"],
            env={**os.environ, "ATTNPLUG_PLUGINS": ""},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, f"error: the output cannot be written: {reason}\n")


@pytest.mark.parametrize("mode", ["w", "a"])
def test_a_line_truncated_by_a_full_disk_is_removed(tmp_path: Path, mode: str) -> None:
    """JSON lines are written completely or not at all, also behind lines that were in the file before."""
    code = """
import resource
from attnplug.cli import output
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
output.reserve_for_json()
output.write_line("a" * 50)
output.write_line("b" * 50)
"""
    file = tmp_path / "lines"
    file.write_text("before\n")
    with open(file, mode) as stdout:
        done = subprocess.run([sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, check=False)
    assert b"File too large" in done.stderr
    assert file.read_text() == ("before\n" if mode == "a" else "") + "a" * 50 + "\n"


@pytest.mark.parametrize(
    ("command", "module", "caught"),
    [
        ("attnplug", "attnplug.declare.capabilities", "raise RuntimeError"),  # as in a class body in Python 3.11
        ("attnplug", "attnplug.cli.backends", "raise"),
        ("-m attnplug", "attnplug.cli.app", "pass"),
    ],
)
def test_an_interrupt_while_the_command_is_imported_gets_no_traceback(
    tmp_path: Path, command: str, module: str, caught: str
) -> None:
    """Ctrl-C in the first tenths of a second: by its script, and by ``python -m``."""
    (tmp_path / "sitecustomize.py").write_text(f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it is ignored, as in the background of a shell

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                {caught}

sys.meta_path.insert(0, Interrupting())
""")
    script = str(Path(sys.executable).with_name("attnplug"))
    done = subprocess.run(
        [sys.executable, *(command.split() if command.startswith("-") else [script]), "backends"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "encoding"), [(["backends"], "ascii"), (["explain", "--model", "tiny:llama"], "latin-1")]
)
def test_a_terminal_without_unicode_gets_its_answer(arguments: list[str], encoding: str) -> None:
    outcome = in_own_process(*arguments, PYTHONIOENCODING=encoding)
    assert outcome.code == 0
    assert "torch_native" in outcome.out
    assert "Traceback" not in outcome.err


def test_listing_and_explaining_import_neither_torch_nor_a_kernel_library() -> None:
    """All installed plugins, any hardware: explaining needs metadata, not imports."""
    code = (
        "import sys\nfrom attnplug.cli.app import main\n"
        "asked = ['explain', '--model', 'tiny:deepseek_v3', '--dtype', 'bf16']\n"
        "more = [['--sm', '90'], ['--sm', '100', '--kv-dtype', 'fp8'], ['--sm', '90', '--cuda-graph', 'decode']]\n"
        "listed = [['backends'], ['backends', '--json'], ['plugins']]\n"
        "for arguments in (*listed, asked, *([*asked, *each] for each in more)):\n"
        "    sys.argv = ['attnplug', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'triton', 'rich', 'flashinfer', 'fla', 'flash_attn', 'flash_mla', 'cutlass'}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
