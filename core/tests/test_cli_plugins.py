"""attnplug plugins: the packages that are installed."""

from __future__ import annotations

import pytest

from attnplug_testing.command import Attnplug, Package

pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.fixture(autouse=True)
def no_commands_or_hosts_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine and bridges may be installed together with core."""
    monkeypatch.setattr("attnplug.cli.plugins.command_claims", lambda: ({}, []))
    monkeypatch.setattr("attnplug.cli.plugins.find_entry_points", lambda _: ([], []))


def test_core_alone_lists_what_it_provides(attnplug: Attnplug) -> None:
    """D1: installed plugins are listed from entry points; there is no list of available ones."""
    outcome = attnplug("plugins")
    assert (outcome.code, outcome.err) == (0, "")
    assert "attnplug 1.0.0rc1" in outcome.out and "torch_native" in outcome.out
    assert set(attnplug("plugins", "--json").json) == {"installed"}


def test_what_is_installed_is_listed_by_package_with_its_state(
    attnplug: Attnplug, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1, D2"""
    package("fast")
    package("needy", fields='{"requires": ["no-such-library>=2"]}')
    package("odd", "raise RuntimeError('no driver')")
    package("extra")
    monkeypatch.setenv("ATTNPLUG_PLUGINS", "fast,needy,odd")
    found = {one["distribution"]: one for one in attnplug("plugins", "--json").json["installed"]}
    assert [name for name in found if name.endswith("-dist")] == ["extra-dist", "fast-dist", "needy-dist", "odd-dist"]
    assert next(iter(found)) == "attnplug"
    assert found["fast-dist"] == {
        "distribution": "fast-dist",
        "version": "1.2.3",
        "brings": [{"kind": "backend", "name": "fast", "status": "usable", "text": "usable here"}],
    }
    states = {name: one["brings"][0]["status"] for name, one in found.items()}
    assert states["needy-dist"] == "refused" and states["odd-dist"] == "broken" and states["extra-dist"] == "blocked"
    text = attnplug("plugins").out
    assert "RuntimeError: no driver" in text and "pip install 'no-such-library>=2'" in text


def test_items_other_than_backends_are_listed(attnplug: Attnplug, package: Package) -> None:
    package(
        "acme",
        "from attnplug import WorkspaceKind, hookimpl\n"
        "attnplug_workspace_kinds = hookimpl(specname='attnplug_workspace_kinds')(lambda: [WorkspaceKind('counts')])\n"
        "attnplug_tiny_models = hookimpl(specname='attnplug_tiny_models')(lambda: {'acme': {'model_type': 'llama'}})\n",
    )
    (found,) = [one for one in attnplug("plugins", "--json").json["installed"] if one["distribution"] == "acme-dist"]
    assert [(one["kind"], one["name"]) for one in found["brings"]] == [
        ("model", "tiny:acme"),
        ("workspace kind", "counts"),
    ]
