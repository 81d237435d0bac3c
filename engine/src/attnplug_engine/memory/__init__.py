"""Sizes of the KV cache, and the pools that hold it."""
