"""Everything that flashmla claims, by the conformance kit over a stand-in for its library: a test of planning."""

from __future__ import annotations

from attnplug_conformance import conformance_tests
from support.seam import over_stand_ins

SUBJECTS = [over_stand_ins("flashmla", "reference_flashmla:build", seam="over a stand-in for FlashMLA")]
test_conforms, test_enough_is_claimed = conformance_tests(SUBJECTS[0])
