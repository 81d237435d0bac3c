"""Everything that torch_sparse claims, by the conformance kit.

The spec refuses models without sparse or compressed layers, but the backend has to serve dense layers of models that
have both. So the kit runs without that check, on dense MLA too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnplug_conformance import conformance_tests
from attnplug_conformance.catalog import all_checks
from attnplug_conformance.runner import Status, run_check
from attnplug_conformance.testing import assert_floors, subject_of

SUBJECTS = [subject_of("torch_sparse", "cpu")]
REGISTERED = SUBJECTS[0].registered
DENSE_TOO = replace(SUBJECTS[0], registered=replace(REGISTERED, spec=replace(REGISTERED.spec, check=None)))
test_conforms, test_enough_is_claimed = conformance_tests(DENSE_TOO)


def test_the_quick_run_has_enough_checks():
    """A model's sparse layers are all that the spec admits, and ``attnplug check`` runs quick checks."""
    assert_floors(SUBJECTS[0], {}, quick=True)


@pytest.mark.parametrize("level", ["all", "batch", "chunks", "verify"])
@pytest.mark.sample(1)
def test_levels_of_all_compressed_layers(level: str) -> None:
    """E3: entries that an index selects, all entries, and bfloat16; the default budget is spent on the first."""
    (check,) = (each for each in all_checks() if each.name == f"mla.compressed.invariant.{level}")
    result = run_check(check, replace(SUBJECTS[0], budget=8.0))
    assert result.status is Status.PASSED, result.message
