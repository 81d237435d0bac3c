"""Unexpected errors in a plugin's code are reported with the plugin's name."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from attnplug_testing.command import PLUGIN, Attnplug, Package

pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.mark.parametrize("error", ["ValueError('no such tile')", "OSError(28, 'No space left')", "SystemExit(0)"])
def test_an_error_in_a_plugin_s_code_names_the_plugin_and_the_place(
    attnplug: Attnplug, package: Package, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """D2: without a traceback, and never in silence."""
    package("fast", PLUGIN.format(name="fast", fields="{}", capabilities="{}") + f"\ndef run(): raise {error}\n")
    monkeypatch.setattr("attnplug.cli.backends.run", lambda parsed: importlib.import_module("plugin_module_fast").run())
    outcome = attnplug("backends")
    assert outcome.code == 1
    assert outcome.err.startswith("error: plugin fast (fast-dist 1.2.3) failed at ")
    assert f"plugin_module_fast.py:12, in run: {error.partition('(')[0]}" in outcome.err


def test_a_plugin_s_other_modules_are_its_own_too(
    attnplug: Attnplug, package: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """D2: known by the files that were installed."""
    package("fast")
    (tmp_path / "fast_kernels.py").write_text("def run(): raise ValueError('no such tile')\n")
    (tmp_path / "fast_dist-1.2.3.dist-info" / "RECORD").write_text("fast_kernels.py,,\nplugin_module_fast.py,,\n")
    monkeypatch.setattr("attnplug.cli.backends.run", lambda parsed: importlib.import_module("fast_kernels").run())
    assert "plugin fast (fast-dist 1.2.3) failed at" in attnplug("backends").err


def test_an_error_of_our_own_is_a_traceback(attnplug: Attnplug, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug report needs one."""

    def fail(parsed: object) -> int:
        raise ValueError("our own")

    monkeypatch.setattr("attnplug.cli.backends.run", fail)
    with pytest.raises(ValueError, match="our own"):
        attnplug("backends")
