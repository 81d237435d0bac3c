"""vLLM's metadata of a step as a geometry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnplug import ForwardMode, PlanError
from attnplug_testing.errors import naming
from attnplug_vllm.geometry import GeometryBuilder, leading_decodes, split
from vllm_stage import metadata

GEOMETRIES = GeometryBuilder(page_size=16, pages=16)


def test_a_decode():
    found = GEOMETRIES.eager(metadata([(20, 1), (3, 1), (16, 1)]))
    assert (found.mode, found.rows, found.max_new, found.max_seq_len) == (ForwardMode.DECODE, 3, 1, 21)
    assert found.new_lens is None and found.host is None
    assert found.slots is not None and found.slots.tolist() == replace(found, slots=None).new_slots().tolist()


def test_a_mixed_batch_has_lengths_on_the_device():
    found = GEOMETRIES.eager(metadata([(20, 1), (0, 9), (5, 3)]))
    assert (found.mode, found.rows, found.max_new) == (ForwardMode.MIXED, 13, 9)
    assert found.new_lens is not None and found.new_lens.tolist() == [1, 9, 3]
    assert found.slots is not None and found.slots.tolist() == replace(found, slots=None).new_slots().tolist()


def test_equal_lengths_are_a_verify_where_vllm_speculates_and_an_extend_elsewhere():
    batch = metadata([(20, 3), (0, 3)])
    assert GEOMETRIES.eager(batch).mode is ForwardMode.EXTEND
    found = replace(GEOMETRIES, verify=3).eager(batch)
    assert found.mode is ForwardMode.TARGET_VERIFY and found.new_lens is None
    assert replace(GEOMETRIES, verify=4).eager(batch).mode is ForwardMode.EXTEND


def test_padded_tokens_do_not_make_a_mixed_batch_look_uniform():
    """Two requests of 1 and 3 tokens, padded to 6: as many as two of 3 have."""
    found = GEOMETRIES.eager(metadata([(20, 1), (0, 3)], padding=(0, 2)))
    assert (found.mode, found.rows) == (ForwardMode.MIXED, 4)


def test_padded_requests_outside_of_a_graph_have_no_rows():
    found = GEOMETRIES.eager(metadata([(20, 1), (4, 1)], padding=(2, 2)))
    assert found.rows == 2 and found.new_lens is not None and found.new_lens.tolist() == [1, 1, 0, 0]


def test_exact_lengths_are_given_to_backends_that_need_them():
    found = replace(GEOMETRIES, exact=True).eager(metadata([(20, 1), (0, 9)]))
    assert found.host is not None and (found.host.query_lens, found.host.kv_lens) == ([1, 9], [21, 9])


def test_a_block_table_is_read_as_far_as_requests_reach():
    found = GeometryBuilder(page_size=16, pages=4).eager(metadata([(40, 1)], width=9))
    assert found.page_table.shape == (1, 4)


def test_bounds_past_the_block_table_are_cut():
    batch = metadata([(40, 1)], width=4)
    assert GEOMETRIES.eager(batch.replace(max_seq_len=70)).max_seq_len == 64


def test_a_captured_decode_lies_in_vllms_own_tensors():
    batch = metadata([(0, 1)] * 4)
    found = GEOMETRIES.captured(batch)
    assert found.captured and (found.mode, found.rows, found.host) == (ForwardMode.DECODE, 4, None)
    assert found.seq_lens.data_ptr() == batch.seq_lens.data_ptr()
    assert found.page_table.data_ptr() == batch.block_table_tensor.data_ptr()
    assert found.slots is not None and found.slots.data_ptr() == batch.slot_mapping.data_ptr()


def test_a_captured_batch_may_have_more_rows_than_requests_have():
    """vLLM pads 5 requests, all that it takes, to 8 tokens."""
    found = GEOMETRIES.captured(metadata([(0, 1)] * 5, padding=(0, 3)))
    assert found.rows == 5 and found.slots is not None and len(found.slots) == 5


def test_a_captured_batch_of_different_lengths_is_refused():
    with pytest.raises(PlanError, check=naming(7, 2, 4)):
        GEOMETRIES.captured(metadata([(0, 4), (0, 3)]))


def test_requests_that_decode_come_first_and_are_split_off():
    batch = metadata([(20, 1), (7, 2), (0, 9), (3, 5)])
    assert (leading_decodes(batch, 1), leading_decodes(batch, 2), leading_decodes(batch, 9)) == (1, 2, 4)
    front, back = split(batch, 2)
    assert (front.num_reqs, front.num_actual_tokens, front.max_query_len) == (2, 3, 2)
    assert (back.num_reqs, back.num_actual_tokens, back.max_query_len) == (2, 14, 9)
    assert back.query_start_loc_cpu.tolist() == [0, 9, 14]
    whole = GEOMETRIES.eager(batch).new_slots().tolist()
    found = [GEOMETRIES.eager(part) for part in (front, back)]
    assert [slot for part in found for slot in part.new_slots().tolist()] == whole
    assert [slot for part in found for slot in replace(part, slots=None).new_slots().tolist()] == whole


def test_each_part_of_a_split_batch_has_its_own_exact_lengths():
    exact = replace(GEOMETRIES, exact=True)
    front, back = (exact.eager(part) for part in split(metadata([(20, 1), (0, 9), (3, 5)]), 1))
    assert front.host is not None and (front.host.query_lens, front.host.kv_lens) == ([1], [21])
    assert back.host is not None and (back.host.query_lens, back.host.kv_lens) == ([9, 5], [9, 8])
