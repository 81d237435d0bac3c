"""Test support shared by the packages of this repository."""

import pkgutil

import pytest

# Failed assertions of these modules show their values, as those of test files do.
pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))
