"""Measuring attention backends: the commands ``tune`` and ``bench``, their tables, charts and reports."""
