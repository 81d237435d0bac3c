"""Everything that flashattention claims, by the conformance kit over stand-ins for flash-attn-4: a test of planning."""

from __future__ import annotations

from attnplug_conformance import conformance_tests
from support.seam import over_stand_ins

test_conforms, test_enough_is_claimed = conformance_tests(
    over_stand_ins("flashattention", "flash_references:on_fa4", seam="over stand-ins for flash-attn-4")
)
