"""All checks, in the order in which they run."""

from __future__ import annotations

from functools import cache

from attnplug import AttentionKind
from attnplug_conformance.check import Check
from attnplug_conformance.checks.accuracy import head_checks, input_checks, shape_checks
from attnplug_conformance.checks.cache import cache_checks
from attnplug_conformance.checks.compressed import compressed_checks
from attnplug_conformance.checks.declared import declared_checks
from attnplug_conformance.checks.graphs import graph_checks
from attnplug_conformance.checks.hisparse import hisparse_checks
from attnplug_conformance.checks.invariance import invariance_checks
from attnplug_conformance.checks.linear import linear_checks
from attnplug_conformance.checks.mla_paths import path_checks
from attnplug_conformance.checks.plans import plan_checks
from attnplug_conformance.checks.random import random_checks
from attnplug_conformance.checks.sparse import sparse_checks

MHA, MLA = AttentionKind.MHA, AttentionKind.MLA


@cache
def all_checks() -> tuple[Check, ...]:
    """Return every check. Duplicate names are an error."""
    checks = [
        check
        for kind in (MHA, MLA)
        for check in (
            *input_checks(kind),
            *(shape_checks() if kind is MHA else (*head_checks(), *path_checks())),
            *cache_checks(kind),
            *plan_checks(kind),
            *graph_checks(kind),
        )
    ]
    checks += [*sparse_checks(), *hisparse_checks(), *compressed_checks(), *linear_checks(), *declared_checks()]
    checks += [*invariance_checks(), *random_checks()]
    # A kernel that truncates offsets may make a GPU unusable, so that nothing else runs.
    checks.sort(key=lambda check: ".wide" in check.name)
    names = [check.name for check in checks]
    assert len(set(names)) == len(names), sorted({name for name in names if names.count(name) > 1})
    return tuple(checks)
