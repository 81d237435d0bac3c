"""Everything that torch claims, by the conformance kit, and fla, by its quick run, over a stand-in for its library's
chunks. ``docs/reports.py`` runs all of it."""

from __future__ import annotations

import pytest

from attnplug_conformance import conformance_tests
from attnplug_conformance.testing import subject_of
from attnplug_testing.devices import INTERPRETED
from attnplug_testing.seam import over_stand_ins

SUBJECTS = [
    subject_of("torch", "cpu"),
    over_stand_ins("fla", "linear_settings:interpreted", seam="in Triton's interpreter, chunks by a stand-in"),
]
test_torch_conforms, test_enough_of_torch_is_claimed = conformance_tests(SUBJECTS[0])
test_fla_conforms, test_enough_of_fla_is_claimed = map(INTERPRETED, conformance_tests(SUBJECTS[1], quick=True))
test_torch_conforms, test_fla_conforms = map(pytest.mark.sample(31), (test_torch_conforms, test_fla_conforms))
