"""Test support shared by the test files of core."""

import pytest

pytest.register_assert_rewrite("support.plugins")
