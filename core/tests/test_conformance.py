"""Everything that torch_native claims, by the conformance kit."""

from __future__ import annotations

from attnplug_conformance import conformance_tests
from attnplug_conformance.testing import subject_of

SUBJECTS = [subject_of("torch_native", "cpu")]
test_conforms, test_enough_is_claimed = conformance_tests(SUBJECTS[0])
