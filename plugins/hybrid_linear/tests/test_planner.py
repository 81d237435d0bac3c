"""Groups: every request with new tokens once, little padding, and a way back to the batch's order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug_hybrid_linear.planner import Grouping, plan_groups

lengths = st.lists(st.integers(0, 300) | st.integers(0, 3), max_size=12)


def plan(query_lens: list[int], slots: list[int] | None = None) -> Grouping:
    return plan_groups(query_lens, torch.tensor(range(len(query_lens)) if slots is None else slots, dtype=torch.int64))


@given(query_lens=lengths)
def test_every_request_with_new_tokens_is_in_one_group(query_lens: list[int]) -> None:
    grouping = plan(query_lens)
    members = [request for group in grouping.groups for request in group.requests.tolist()]
    assert sorted(members) == [request for request, new in enumerate(query_lens) if new]


@given(query_lens=lengths)
def test_less_than_half_is_padding_and_groups_are_few(query_lens: list[int]) -> None:
    grouping = plan(query_lens)
    assert grouping.size < 2 * sum(query_lens) or grouping.size == 0
    assert len(grouping.groups) <= max(query_lens, default=0).bit_length()


@given(query_lens=lengths)
def test_rows_are_each_requests_own_in_order_and_lead_back(query_lens: list[int]) -> None:
    grouping = plan(query_lens)
    live = torch.cat([torch.zeros(0, dtype=torch.int64), *(group.rows[group.live] for group in grouping.groups)])
    assert sorted(live.tolist()) == list(range(sum(query_lens)))
    results = [group.rows.unsqueeze(-1) + 1 for group in grouping.groups]
    back = grouping.in_batch_order(results, torch.zeros(1, 1, dtype=torch.int64), sum(query_lens) + 2)
    assert back.flatten().tolist() == [*range(1, sum(query_lens) + 1), 0, 0]


@given(query_lens=lengths)
def test_padding_repeats_a_requests_own_row(query_lens: list[int]) -> None:
    first_rows = [sum(query_lens[:request]) for request in range(len(query_lens))]
    for group in plan(query_lens).groups:
        for request, rows in zip(group.requests.tolist(), group.rows.tolist(), strict=True):
            assert set(rows) == set(range(first_rows[request], first_rows[request] + query_lens[request]))


def test_equal_lengths_are_one_group_in_the_batchs_order() -> None:
    (group,) = plan([3, 3, 3], [7, 2, 5]).groups
    assert group.requests.tolist() == [0, 1, 2]
    assert group.slots.tolist() == [7, 2, 5]
    assert group.live.all()


def test_decoding_requests_do_not_wait_for_an_extending_one() -> None:
    assert [group.rows.shape for group in plan([1, 500, 1, 1]).groups] == [(1, 500), (3, 1)]


@given(query_lens=lengths, data=st.data())
def test_only_slots_of_requests_with_new_tokens_are_named(query_lens: list[int], data: st.DataObject) -> None:
    """A7: a padded request doubles a real one of its group, or has no live row and the slot of one in another group.

    If no other request has new tokens, it has the slot of any in the batch, or slot 0.
    """
    slots = [data.draw(st.sampled_from([-1, request + 10])) for request in range(len(query_lens))]
    grouping = plan(query_lens, slots)
    real = {slot for slot, new in zip(slots, query_lens, strict=True) if slot >= 0 and new}
    alive = set()
    for group in grouping.groups:
        for request, slot, own in zip(*(t.tolist() for t in (group.requests, group.slots, group.lens)), strict=True):
            if slots[request] >= 0:
                assert (slot, own) == (slots[request], query_lens[request])
                alive.add(slot)
            else:
                assert own == 0 and slot in (real or {0, *slots} - {-1})
    assert alive == real


def test_first_tokens_alone() -> None:
    long, short = plan([2, 5, 4]).groups
    kept = long.first(torch.tensor([1, 3, 9]))
    assert kept.lens.tolist() == [3, 4]
    assert kept.live.tolist() == [[True, True, True, False, False], [True, True, True, True, False]]
    assert short.first(torch.tensor([0, 3, 9])).lens.tolist() == [0]
