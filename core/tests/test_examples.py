"""Examples in docstrings of the contract and the pools."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from attnplug.contract import batch, geometry
from attnplug.kv import row_pool


@pytest.mark.parametrize("module", [geometry, batch, row_pool], ids=lambda module: module.__name__)
def test_examples_give_what_they_show(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
