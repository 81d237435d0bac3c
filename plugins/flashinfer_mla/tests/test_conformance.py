"""Everything that flashinfer_mla claims, by the conformance kit over stand-ins for FlashInfer: a test of planning."""

from __future__ import annotations

import pytest

from attnplug_conformance import conformance_tests
from attnplug_testing.seam import over_stand_ins

SUBJECTS = [
    over_stand_ins(
        "flashinfer_mla", "attnplug_testing.references.flashinfer_mla:build", seam="over stand-ins for FlashInfer"
    )
]
test_conforms, test_enough_is_claimed = conformance_tests(SUBJECTS[0])
test_conforms = pytest.mark.sample(41)(test_conforms)
