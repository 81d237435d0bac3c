"""Test support shared by the packages of this repository."""

import pytest

pytest.register_assert_rewrite("attnplug_testing.command", "attnplug_testing.configs")
