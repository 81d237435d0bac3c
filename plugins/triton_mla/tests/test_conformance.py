"""Claims of triton_mla, checked by the quick run of the conformance kit, with kernels in Triton's interpreter.

``docs/reports.py`` runs all of it.
"""

from __future__ import annotations

import pytest

from attnplug import DType
from attnplug_conformance import conformance_tests
from attnplug_testing.devices import INTERPRETED
from attnplug_testing.seam import over_stand_ins
from attnplug_triton_mla.plugin import FP8_PER_TOKEN_HEAD, NVFP4

pytestmark = INTERPRETED
SUBJECTS = [
    over_stand_ins(
        "triton_mla",
        "attnplug_testing.references.triton_mla:build",
        seam="in Triton's interpreter",
        kv_dtypes=(DType.FLOAT32, DType.FLOAT8_E4M3, FP8_PER_TOKEN_HEAD, NVFP4),
        longest=100,
        mla_dims=frozenset({(32, 16)}),
    )
]
test_conforms, test_enough_is_claimed = conformance_tests(SUBJECTS[0], quick=True)
test_conforms = pytest.mark.sample(29)(test_conforms)
