"""Everything that trtllm_mla claims, by the conformance kit over stand-ins for FlashInfer: a test of planning."""

from __future__ import annotations

import pytest

from attnplug import DType
from attnplug_conformance import conformance_tests
from attnplug_testing.seam import over_stand_ins

SUBJECTS = [
    over_stand_ins(
        "trtllm_mla",
        "attnplug_testing.references.trtllm_mla:reference_trtllm",
        seam="over stand-ins for FlashInfer's functions",
        dtypes=(DType.BFLOAT16,),
        kv_dtypes=(DType.BFLOAT16, DType.FLOAT8_E4M3),
    )
]
test_conforms, test_enough_is_claimed = conformance_tests(SUBJECTS[0])
test_conforms = pytest.mark.sample(37)(test_conforms)
