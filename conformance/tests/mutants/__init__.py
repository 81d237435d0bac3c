"""Broken backends as data: each a small change to the text of a good one, and the check that catches it.

To add one, add a line.
"""

from __future__ import annotations

from mutants import linear, mha, mla, random_cases, reported, sparse
from mutants.mutant import Mutant

__all__ = ["MUTANTS", "Mutant"]

MUTANTS = [
    *mha.MUTANTS,
    *mla.MUTANTS,
    *sparse.MUTANTS,
    *linear.MUTANTS,
    *reported.MUTANTS,
    *random_cases.MUTANTS,
]
