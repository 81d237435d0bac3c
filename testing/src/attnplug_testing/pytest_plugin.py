"""Pytest plugin of this repository's tests: process settings, and the fixtures that several packages share.

The entry point ``pytest11`` loads it wherever attnplug-testing is installed. It acts only if pytest's root directory is
a checkout of this repository: the runs that tests start elsewhere, and other projects' tests, stay as they are.
"""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Prepare the process before any conftest is imported: Triton decides how a kernel runs when it is defined."""
    if not (early_config.rootpath / "testing/src/attnplug_testing").is_dir():
        return
    import hypothesis

    from attnplug_testing.triton_mode import settle_triton

    settle_triton()
    # Seeds differ from run to run, so 15 examples each find what 100 do, a few runs later, in a fifth of the time.
    # A shared machine may stall any example for a second; slowness is measured in benchmarks/, not here.
    hypothesis.settings.register_profile("attnplug", deadline=None, print_blob=True, max_examples=15)
    hypothesis.settings.load_profile("attnplug")
    early_config.pluginmanager.import_plugin("attnplug_testing.command")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but ``n`` of the parameter sets of a test with ``sample(n)`` as long, those for a GPU aside.

    The ``n`` sets are evenly spaced.
    """
    tests: dict[str, list[tuple[pytest.Item, int]]] = {}
    for item in items:
        marker = item.get_closest_marker("sample")
        if marker is not None and item.get_closest_marker("gpu") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append((item, *marker.args))
    for sets in tests.values():
        for place, (item, count) in enumerate(sets):
            if place * count % len(sets) >= count:
                item.add_marker("long")
