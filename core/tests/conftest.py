"""Fixtures that several files of core's tests use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for core/tests/support

from attnplug.choose.loading import find_plugins
from support.board import board
from support.plugins import install, install_source, only_fault

__all__ = ["board", "install", "install_source", "only_fault"]


@pytest.fixture(autouse=True)
def core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the plugins installed beside core: a test finds core and what the test itself installs."""

    def find():
        points, broken = find_plugins()
        return [point for point in points if not point.value.startswith("attnplug_")], broken

    monkeypatch.setattr("attnplug.choose.registry.find_plugins", find)
