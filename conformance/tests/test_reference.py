"""The oracle itself, against torch's own attention in float64 and by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from attnplug import AttentionKind, DType, LayerSpec, MLAPool
from attnplug.host import MLADims
from attnplug.sparse import IndexerDims
from attnplug_conformance.catalog import all_checks
from attnplug_conformance.fp8_rows import pack_rows, round_index_keys, unpack_rows, write_index_keys
from attnplug_conformance.reference import Rules, attention, entry, tree_bits
from attnplug_conformance.scene import Scene
from attnplug_conformance.testing import subject_of
from attnplug_sparse.pools import IndexKeyPool, latent_format


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


def test_an_entry_is_the_turned_norm_of_what_a_window_and_the_one_before_bring():
    nothing, norm, turned = torch.zeros(2, 4), torch.tensor([1.0, 2.0]), torch.tensor([0.5])
    values = torch.tensor([[3.0, 4.0, 9.0, 9.0], [3.0, 4.0, 9.0, 9.0], [9.0, 9.0, 3.0, 4.0], [9.0, 9.0, 3.0, 4.0]])
    made = entry(1, values, torch.zeros(4, 4), nothing, norm, 0.0, turned, overlap=True)
    size = 12.5**0.5
    x, y = 3 / size, 2 * 4 / size
    wanted = [x * math.cos(1) - y * math.sin(1), x * math.sin(1) + y * math.cos(1)]
    assert made.tolist() == pytest.approx(wanted)


def test_packed_rows_are_what_a_pool_reads():
    layer = LayerSpec(0, AttentionKind.MLA, 1, 1, 192, 128, 1.0, mla=MLADims(256, 128, 64))
    rows = torch.randn(8, 1, 320) * torch.tensor([1.0, 9.0]).repeat_interleave(128).repeat(2)[:320]
    pool = MLAPool(
        [layer],
        num_pages=2,
        page_size=4,
        dtype=DType.FP8_DS_MLA,
        device="cpu",
        row_format=latent_format(DType.FP8_DS_MLA),
    )
    pool.rows(0).copy_(pack_rows(rows, 256).view(2, 4, 1, -1))
    assert torch.equal(pool.read_rows(0, torch.arange(8)), unpack_rows(pack_rows(rows, 256), 256).squeeze(1))
    before = pool.rows(0).clone()
    pool.write(0, torch.arange(8), rows)
    assert torch.equal(pool.rows(0), before)


def test_packed_index_keys_are_what_a_pool_reads():
    layer = LayerSpec(0, AttentionKind.MLA, 1, 1, 24, 16, 1.0, mla=MLADims(32, 16, 8), indexer=IndexerDims(2, 16, 4))
    pool = IndexKeyPool([layer], num_pages=2, page_size=4, dtype=DType.FLOAT8_E4M3, device="cpu")
    keys, slots = torch.randn(8, 16) * torch.arange(1, 9)[:, None], torch.tensor([7, 2, 0, 4, 1, 6, 5, 3])
    write_index_keys(pool.keys(0), slots // 4, slots % 4, keys)
    assert torch.equal(pool.read_keys(0, slots), round_index_keys(keys))


@pytest.mark.parametrize("name", ["large_inputs", "float16.large_inputs", "bfloat16.large_inputs"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_large_inputs_are_right_with_a_mask_that_no_model_comes_near(kind, name):
    """FlashInfer masks with -50,000, before logits are scaled; the checks ask for no row that this changes."""
    subject = subject_of("torch_native", "cpu")
    check = next(one for one in all_checks() if one.name == f"{kind}.{name}")
    case = check.case(64, 300)
    if kind == "mla":
        case = replace(case, mla=MLADims(512, 128, 64))
    scene = Scene(subject, subject.fit(case))
    rules = scene.rules()
    wanted, found = (scene.wanted(replace(rules, masked=mask))[0] for mask in (float("-inf"), -5e4 * rules.scale))
    assert torch.equal(wanted, found)
