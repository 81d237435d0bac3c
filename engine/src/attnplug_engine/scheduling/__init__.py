"""Continuous batching: scheduler, page allocator, slot table, prefix cache, slots of linear states."""
