"""An error in a plugin's own code, which nobody expected: it is told, and whose it is."""

from __future__ import annotations

import pytest

from support.command import PLUGIN, Attnplug, Package

pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.mark.parametrize("error", ["ValueError('no such tile')", "OSError(28, 'No space left')", "SystemExit(0)"])
def test_an_error_in_a_plugin_s_code_names_the_plugin_and_the_place(
    attnplug: Attnplug, package: Package, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """D2: without a traceback, and never in silence."""
    package("fast", PLUGIN.format(name="fast", fields="{}", capabilities="{}") + f"\ndef run(): raise {error}\n")

    def run_backend(json: bool) -> int:
        import plugin_module_fast

        return plugin_module_fast.run()

    assert attnplug("backends").code == 0
    monkeypatch.setattr("attnplug.cli.doctor.report", run_backend)
    outcome = attnplug("doctor")
    assert outcome.code == 1
    assert outcome.err.startswith("error: plugin fast (fast-dist 1.2.3) failed at ")
    assert f"plugin_module_fast.py:12, in run: {error.partition('(')[0]}" in outcome.err


def test_an_error_of_our_own_is_a_traceback(attnplug: Attnplug, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reports it needs one."""

    def fail(json: bool) -> int:
        raise ValueError("our own")

    monkeypatch.setattr("attnplug.cli.doctor.report", fail)
    with pytest.raises(ValueError, match="our own"):
        attnplug("doctor")
