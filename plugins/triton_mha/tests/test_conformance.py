"""Everything that triton_mha claims, by the conformance kit: its kernels in Triton's interpreter."""

from __future__ import annotations

import pytest

from attnplug import DType
from attnplug_conformance import conformance_tests
from attnplug_testing.devices import INTERPRETED
from attnplug_testing.seam import over_stand_ins

pytestmark = INTERPRETED
SUBJECTS = [
    over_stand_ins(
        "triton_mha",
        "interpreted_mha:build",
        seam="in Triton's interpreter",
        kv_dtypes=(DType.FLOAT32, DType.FLOAT8_E4M3, "fp8_per_token_head", "nvfp4"),
        longest=100,
    )
]
test_conforms, test_enough_is_claimed = conformance_tests(SUBJECTS[0])
test_conforms = pytest.mark.sample(22)(test_conforms)
