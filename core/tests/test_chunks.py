"""The chunk planner's invariants (C3)."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from attnplug.mla.attention import plan_prefix_chunks

prefixes = st.lists(st.one_of(st.just(0), st.integers(1, 50), st.integers(1, 5000)), max_size=20)
capacities = st.one_of(st.integers(1, 20), st.integers(1, 10_000))


@given(prefixes, capacities)
def test_every_prefix_row_is_covered_exactly_once_in_order(prefix_lens, capacity):
    """C3"""
    covered = {request: [] for request in range(len(prefix_lens))}
    for chunk in plan_prefix_chunks(prefix_lens, capacity):
        for span in chunk:
            covered[span.request] += range(span.start, span.start + span.length)
    assert covered == {request: list(range(length)) for request, length in enumerate(prefix_lens)}


@given(prefixes, capacities)
def test_capacity_is_never_exceeded(prefix_lens, capacity):
    """C3"""
    assert all(sum(span.length for span in chunk) <= capacity for chunk in plan_prefix_chunks(prefix_lens, capacity))


@given(prefixes, capacities)
def test_no_span_is_empty_and_no_chunk_is(prefix_lens, capacity):
    """C3: kernels return garbage for zero-length spans."""
    for chunk in plan_prefix_chunks(prefix_lens, capacity):
        assert chunk
        assert all(span.length > 0 for span in chunk)


@given(prefixes, capacities)
def test_a_request_appears_once_per_chunk_in_the_order_of_the_batch(prefix_lens, capacity):
    for chunk in plan_prefix_chunks(prefix_lens, capacity):
        requests = [span.request for span in chunk]
        assert requests == sorted(set(requests))


@given(prefixes, capacities)
def test_as_few_chunks_as_can_be_whatever_the_skew(prefix_lens, capacity):
    """C3: packs skewed batches well."""
    assert len(plan_prefix_chunks(prefix_lens, capacity)) == math.ceil(sum(prefix_lens) / capacity)


def test_skewed_batch_wastes_nothing():
    """C3: an even split of the capacity among these requests would take 63 chunks."""
    assert len(plan_prefix_chunks([100_000] + [10] * 7, 12_800)) == 8


def test_batch_without_prefixes_has_no_chunks():
    assert plan_prefix_chunks([0, 0], 16) == ()
