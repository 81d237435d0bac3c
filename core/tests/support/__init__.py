"""Test support shared by the test files of core."""
