"""Everything that flashattention claims, by the conformance kit over stand-ins for its libraries: a test of planning.

With another library than flash-attn-4 it claims less: no graphs, and torch's kernel no logit cap.
"""

from __future__ import annotations

import pytest

from attnplug import AttentionKind, Feature, GraphLevel
from attnplug_conformance import Subject, conformance_tests
from attnplug_conformance.catalog import all_checks
from attnplug_conformance.runner import Status, run_checks
from attnplug_testing.seam import over_stand_ins

LESS = {"kinds": frozenset({AttentionKind.MHA}), "cuda_graph": GraphLevel.NEVER}
NO_CAP = {**LESS, "features": frozenset({Feature.SLIDING_WINDOW, Feature.SINKS})}


def subject(factory: str, **claims: object) -> Subject:
    return over_stand_ins(
        "flashattention", f"attnplug_testing.references.flashattention:{factory}", seam="over stand-ins", **claims
    )


OTHERS = {
    "fa2": subject("on_fa2", **LESS),
    "torch": subject("on_torch", **NO_CAP),
    "torch before paging": subject("on_torch_before_paging", **NO_CAP),
}

SUBJECTS = [subject("on_fa4")]
test_conforms, test_enough_is_claimed = conformance_tests(SUBJECTS[0])
test_conforms = pytest.mark.sample(113)(test_conforms)


@pytest.mark.long
@pytest.mark.parametrize("kernel", OTHERS)
def test_other_libraries_conform(kernel):
    verdict = run_checks(OTHERS[kernel], all_checks())
    failed = {result.check.name: result.message for result in verdict.results if result.status is Status.FAILED}
    assert not failed and not verdict.problems
