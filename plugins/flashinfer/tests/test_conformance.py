"""Everything that flashinfer claims, by the conformance kit over stand-ins for FlashInfer: a test of planning."""

from __future__ import annotations

import pytest

from attnplug import DType
from attnplug_conformance import conformance_tests
from attnplug_testing.seam import over_stand_ins

SUBJECTS = [
    over_stand_ins(
        "flashinfer",
        "paged_reference:build",
        seam="over stand-ins for FlashInfer",
        kv_dtypes=(DType.FLOAT32, DType.FLOAT8_E4M3),
    )
]
test_conforms, test_enough_is_claimed = conformance_tests(SUBJECTS[0])
test_conforms = pytest.mark.sample(71)(test_conforms)
