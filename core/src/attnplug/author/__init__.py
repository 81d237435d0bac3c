"""Bases for authors of backends: what every backend would otherwise write again."""
