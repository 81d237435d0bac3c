"""Backends by KV length: those of wrappers at any nesting, and of batches that several backends plan."""

from __future__ import annotations

from types import SimpleNamespace

from attnplug import AttentionKind, Claims, ForwardMode, LayerSpec, ModelSpec, Role
from attnplug.auto.fastest import FastestBackend
from attnplug.auto.schedule import BackendSchedule
from attnplug.contract.batch import BackendId
from attnplug.wrappers.forwarding import HybridLinearBackend, SplitBackend
from attnplug_engine.graphs.length_ranges import EVERY_LENGTH, LengthRange, length_ranges, merge_length_ranges
from attnplug_testing.specs import GDN as LINEAR

DECODE, EXTEND = ForwardMode.DECODE, ForwardMode.EXTEND


def backend(name: str) -> SimpleNamespace:
    return SimpleNamespace(backend_id=BackendId(name), claims=Claims())


def test_length_ranges_name_the_planners_at_any_nesting():
    model = ModelSpec("m", "test", (LINEAR, LayerSpec(1, AttentionKind.MHA, 1, 1, 8, 8, 1.0)), 64)
    times = {"a": {(1, 100, 1): 1.0, (1, 101, 1): 2.0}, "b": {(1, 100, 1): 2.0, (1, 101, 1): 1.0}}
    both = FastestBackend(
        {"a": backend("a"), "b": backend("b")}, {Role.PREFILL: "b", Role.DECODE: BackendSchedule(times)}
    )
    nested = HybridLinearBackend(SplitBackend(backend("p"), both), backend("linear"), model)
    assert length_ranges(backend("alone"), DECODE, 1, 1) == (LengthRange(EVERY_LENGTH, ("alone",)),)
    assert length_ranges(both, DECODE, 1, 1) == (LengthRange(100, ("a",)), LengthRange(EVERY_LENGTH, ("b",)))
    assert length_ranges(both, EXTEND, 1, 1) == (LengthRange(EVERY_LENGTH, ("b",)),)
    assert length_ranges(nested, DECODE, 1, 1) == (
        LengthRange(100, ("a", "linear")),
        LengthRange(EVERY_LENGTH, ("b", "linear")),
    )
    assert length_ranges(nested, EXTEND, 1, 1) == (LengthRange(EVERY_LENGTH, ("p", "linear")),)


def test_requests_that_differ_have_ranges_of_their_own():
    times = {"even": {(8, 64, 1): 1.0, (8, 64, 1, True): 3.0}, "ragged": {(8, 64, 1): 2.0, (8, 64, 1, True): 2.0}}
    both = FastestBackend({name: backend(name) for name in times}, {Role.DECODE: BackendSchedule(times)})
    assert [length_ranges(both, DECODE, 8, 1, ragged) for ragged in (False, True)] == [
        (LengthRange(EVERY_LENGTH, (name,)),) for name in ("even", "ragged")
    ]


def test_length_ranges_of_several_are_those_of_one():
    one, other = (LengthRange(4, ("a",)), LengthRange(9, ("b",))), (LengthRange(6, ("c",)), LengthRange(9, ("d",)))
    assert merge_length_ranges(one, other) == (
        LengthRange(4, ("a", "c")),
        LengthRange(6, ("b", "c")),
        LengthRange(9, ("b", "d")),
    )
