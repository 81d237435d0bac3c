"""Simultaneous page copies have the effect of sequential ones."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.kernels import PageCopy
from attnplug.kv.buffer import settle_copies


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_settled_copies_do_what_one_after_another_would(pairs: list[tuple[int, int]]) -> None:
    one_by_one = list("abcdef")
    for source, target in pairs:
        one_by_one[target] = one_by_one[source]
    at_once = list("abcdef")
    sources, targets = settle_copies([PageCopy(source, target) for source, target in pairs])
    read = [at_once[source] for source in sources]
    for target, content in zip(targets, read, strict=True):
        at_once[target] = content
    assert at_once == one_by_one
    assert len(set(targets)) == len(targets)
