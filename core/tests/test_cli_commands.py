"""Commands of other packages. A broken one is an error only for its own users."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attnplug.cli.app import OWN
from attnplug_testing.command import Attnplug

pytestmark = pytest.mark.usefixtures("plain_environment")

GOOD = """
from attnplug.cli.app import add_command

def declare(commands):
    add_command(commands, "greet", "Say hello.", lambda parsed: print("hello") or 0)
"""

Bring = Callable[..., None]


@pytest.fixture
def bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bring]:
    """Installs a distribution that claims a command, with the module that its entry point leads to."""
    monkeypatch.syspath_prepend(tmp_path)
    modules: list[str] = []

    def install(distribution: str, command: str = "greet", source: str = GOOD, *, entry: str | None = None) -> None:
        module = f"commands_of_{distribution}"
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{distribution}-4.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 4.5\n")
        entry = f"{command} = {module}:declare" if entry is None else entry
        (info / "entry_points.txt").write_text(f"[attnplug.commands]\n{entry}\n")

    yield install
    for module in modules:
        sys.modules.pop(module, None)


def test_a_command_of_another_package_is_listed_and_runs(attnplug: Attnplug, bring: Bring) -> None:
    bring("polite")
    listed = attnplug("--help")
    assert "greet" in listed.out and listed.err == ""
    assert attnplug("greet") == (0, "hello\n", "")


def test_a_text_with_a_per_cent_sign_is_shown_as_it_is(attnplug: Attnplug, bring: Bring) -> None:
    """Otherwise it would break the help of every command."""
    bring("polite", source=GOOD.replace('"Say hello."', '"Say hello, 100 %(sure)."'))
    for arguments in (["--help"], ["greet", "--help"]):
        assert "Say hello, 100 %(sure)." in " ".join(attnplug(*arguments).out.split())


BROKEN = {
    "raise RuntimeError('no driver')": "RuntimeError: no driver",
    "import sys; sys.exit('bye')": "SystemExit: bye",
    "": "declare",
    "declare = 7": "not callable",
    "def declare(commands): raise ValueError('bad day')": "ValueError: bad day",
    "def declare(commands): pass": "adds no command of that name",
    "def declare(commands): commands.add_parser('greet')": "add_command",
    "def declare(commands): commands.add_parser('backends')": "conflicting subparser",
    "def declare(commands): __import__('sys').path.clear()": "sys.path",
}


@pytest.mark.parametrize("source", BROKEN, ids=BROKEN.values())
@pytest.mark.sample(3)
def test_a_broken_command_is_one_warning_and_an_error_if_it_is_run(
    attnplug: Attnplug, bring: Bring, source: str
) -> None:
    """D2: the error has its distribution and version; help, version and other commands are unaffected."""
    bring("rude", source=source)
    bring("polite", "wave", GOOD.replace("greet", "wave"))
    listed = attnplug("--help")
    assert listed.code == 0 and "wave" in listed.out and "backends" in listed.out
    (line,) = listed.err.splitlines()
    asked = attnplug("greet")
    assert (asked.code, asked.out) == (1, "")
    for text in ("'greet'", "rude 4.5", BROKEN[source]):
        assert text in line and text in asked.err
    for arguments in (["--version"], ["wave"], ["backends"]):
        assert attnplug(*arguments)[::2] == (0, "")


@pytest.mark.parametrize("entry", ["no equals sign", "greet = ", "greet = not a module:"])
def test_entry_points_that_cannot_be_read_are_named(attnplug: Attnplug, bring: Bring, entry: str) -> None:
    """D2: Python itself raises there, for all packages together."""
    bring("rude", entry=entry)
    bring("polite", "wave", GOOD.replace("greet", "wave"))
    listed = attnplug("--help")
    assert listed.code == 0 and "wave" in listed.out
    assert "rude 4.5" in listed.err and len(listed.err.splitlines()) == 1
    assert attnplug("--version")[::2] == (0, "")
    assert attnplug("wave")[::2] == (0, "")
    asked = attnplug("greet")
    assert asked.code in (1, 2) and "rude 4.5" in asked.err


def test_the_version_needs_no_entry_points(attnplug: Attnplug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnplug.cli.app.find_entry_points", lambda group: pytest.fail("looked for"))
    assert attnplug("--version").code == 0


def test_a_command_that_two_packages_claim_belongs_to_neither(attnplug: Attnplug, bring: Bring) -> None:
    """D2: the error names both."""
    bring("one")
    bring("other")
    listed, asked = attnplug("--help"), attnplug("greet")
    assert listed.code == 0 and "greet" not in listed.out
    assert asked.code == 1
    for text in ("'greet'", "one 4.5", "other 4.5"):
        assert text in listed.err and text in asked.err


def test_a_command_with_a_name_of_core_is_reported_and_never_runs(attnplug: Attnplug, bring: Bring) -> None:
    """D2"""
    bring("rude", "backends")
    listed = attnplug("--help")
    assert "'backends'" in listed.err and "rude 4.5" in listed.err
    assert "torch_native" in attnplug("backends").out


def test_an_interrupt_names_the_command_that_was_loading(attnplug: Attnplug, bring: Bring) -> None:
    bring("rude", source="raise KeyboardInterrupt")
    outcome = attnplug("--help")
    assert (outcome.code, outcome.err) == (130, "interrupted while loading command greet (rude 4.5)\n")


@pytest.mark.parametrize(("asked", "meant"), [("Greet", "greet"), ("BACKENDS", "backends"), ("explains", "explain")])
def test_a_command_that_does_not_exist_gets_the_nearest(
    attnplug: Attnplug, bring: Bring, asked: str, meant: str
) -> None:
    bring("polite")
    outcome = attnplug(asked)
    assert outcome.code == 2
    assert f"did you mean {meant}?" in outcome.err


def test_core_alone_has_five_commands(attnplug: Attnplug, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1: they need no other package of ours."""
    monkeypatch.setattr("attnplug.cli.app.find_entry_points", lambda group: ([], []))
    listed = attnplug("--help").out
    assert list(OWN) == ["backends", "plugins", "explain", "doctor", "completion"]
    assert all(name in listed for name in OWN)


@pytest.mark.parametrize("command", ["conform", "run", "tune"])
def test_a_command_of_a_package_that_is_not_installed_is_one_line(
    attnplug: Attnplug, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("attnplug.cli.app.find_entry_points", lambda group: ([], []))
    outcome = attnplug(command)
    assert outcome.code == 2 and outcome.out == ""
    (line,) = outcome.err.splitlines()
    assert repr(command) in line and "commands.md" in line
