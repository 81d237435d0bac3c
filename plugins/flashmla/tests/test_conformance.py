"""Everything that the two backends claim, by the conformance kit over stand-ins for FlashMLA: a test of planning."""

from __future__ import annotations

import pytest

from attnplug import DType
from attnplug_conformance import conformance_tests
from attnplug_testing.seam import over_stand_ins

SUBJECTS = [
    over_stand_ins("flashmla", "attnplug_testing.references.flashmla:build", seam="over a stand-in for FlashMLA"),
    over_stand_ins(
        "flashmla_sparse",
        "reference_sparse:build",
        seam="over a stand-in for FlashMLA",
        dtypes=(DType.BFLOAT16,),
        kv_dtypes=(DType.BFLOAT16, "fp8_ds_mla"),
    ),
]
test_conforms, test_enough_is_claimed = conformance_tests(SUBJECTS[0])
test_sparse_conforms, test_enough_of_sparse_is_claimed = conformance_tests(SUBJECTS[1])
test_conforms, test_sparse_conforms = map(pytest.mark.sample(41), (test_conforms, test_sparse_conforms))
