"""Continuous batching: scheduler, page allocator, slot table, prefix cache."""
