"""Attention as a model's layers call it."""
