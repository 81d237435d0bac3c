"""What several test files share. No test file can import another; this they can, by pytest's ``pythonpath``."""

import pytest

pytest.register_assert_rewrite("support.command", "support.configs", "support.plugins")
