"""Examples in docstrings of the contract."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from attnplug.contract import geometry, plan


@pytest.mark.parametrize("module", [geometry, plan], ids=lambda module: module.__name__)
def test_examples_give_what_they_show(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
