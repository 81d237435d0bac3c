"""Everything that tokenspeed_mla claims, by the conformance kit over stand-ins for its library: a test of planning."""

from __future__ import annotations

import pytest

from attnplug import DType
from attnplug_conformance import conformance_tests
from attnplug_testing.seam import over_stand_ins

SUBJECTS = [
    over_stand_ins(
        "tokenspeed_mla",
        "attnplug_testing.references.tokenspeed_mla:reference_tokenspeed",
        seam="over stand-ins for tokenspeed-mla",
        dtypes=(DType.BFLOAT16,),
        kv_dtypes=(DType.FLOAT8_E4M3,),
    )
]
test_conforms, test_enough_is_claimed = conformance_tests(SUBJECTS[0])
test_conforms = pytest.mark.sample(37)(test_conforms)
