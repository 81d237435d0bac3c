"""Measuring backends: points, chains of calls, tables, results, plots."""
