"""The oracle itself, against torch's own attention in float64 and by hand."""

from __future__ import annotations

import pytest
import torch

from attnplug_conformance.reference import Rules, attention, tree_bits


def test_matches_torch_in_float64():
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(attention(q, k, v, Rules(0.3))[0], wanted.transpose(0, 1))


def test_log_sum_exp_by_hand():
    """C4: natural log."""
    q, k = torch.ones(1, 1, 1), torch.tensor([0.0, 1.0, 2.0]).view(3, 1, 1)
    assert float(attention(q, k, k, Rules(1.0))[1]) == pytest.approx(2.40760596)


def test_the_last_query_sees_the_last_key():
    v = torch.arange(5.0).view(5, 1, 1)
    out, _ = attention(torch.zeros(2, 1, 1), v * 0, v, Rules(1.0))
    assert out.flatten().tolist() == pytest.approx([1.5, 2.0])


def test_window_counts_the_query_itself():
    v = torch.arange(5.0).view(5, 1, 1)
    assert float(attention(torch.zeros(1, 1, 1), v * 0, v, Rules(1.0, window=2))[0]) == pytest.approx(3.5)


def test_cap_bounds_the_logits():
    q, k = torch.ones(1, 1, 1), torch.tensor([1000.0]).view(1, 1, 1)
    assert float(attention(q, k, k, Rules(1.0, cap=5.0))[1]) == pytest.approx(5.0)


def test_a_sink_is_one_more_key_without_a_value_and_not_in_the_log_sum_exp():
    v = torch.full((3, 2, 1), 4.0)
    out, lse = attention(torch.zeros(1, 2, 1), v * 0, v, Rules(1.0), torch.tensor([0.0, -1e9]))
    assert out.flatten().tolist() == pytest.approx([3.0, 4.0])
    assert lse.exp().flatten().tolist() == pytest.approx([3.0, 3.0])


def test_a_row_of_a_tree_sees_the_prefix_itself_and_its_ancestors():
    v = torch.tensor([0.0, 1.0, 10.0, 100.0]).view(4, 1, 1)
    out, _ = attention(torch.zeros(3, 1, 1), v * 0, v, Rules(1.0, parents=(-1, 0, 0)))
    assert out.flatten().tolist() == pytest.approx([1 / 2, 11 / 3, 101 / 3])
    assert tree_bits(((-1, 0, 0),), torch.device("cpu")).tolist() == [[0b1, 0b11, 0b101]]


def test_a_row_that_sees_no_key_gives_zero_and_minus_infinity():
    v = torch.ones(1, 1, 1)
    out, lse = attention(torch.zeros(1, 1, 1), v, v, Rules(1.0, hidden=1))
    assert float(out) == 0 and float(lse) == float("-inf")
