"""Everything that torch_native claims, by the conformance kit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnplug.declare.problem import INVARIANCE
from attnplug_conformance import conformance_tests
from attnplug_conformance.catalog import all_checks
from attnplug_conformance.runner import Status, run_checks
from attnplug_conformance.testing import subject_of

SUBJECTS = [subject_of("torch_native", "cpu")]
test_conforms, test_enough_is_claimed = conformance_tests(SUBJECTS[0])


@pytest.mark.long
def test_conforms_with_every_level_of_invariance_requested() -> None:
    """E3: it then runs other operations, which must agree with float64, too."""
    verdict = run_checks(replace(SUBJECTS[0], invariant=frozenset(INVARIANCE), budget=5.0), all_checks())
    assert not [result.message for result in verdict.results if result.status is Status.FAILED]
    assert not verdict.problems
