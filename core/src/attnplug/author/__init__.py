"""Bases for authors of backends: what backends of one family would write again."""
