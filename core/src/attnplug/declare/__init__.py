"""Declarations of plugins and hosts, as plain data. Nothing here imports torch."""
