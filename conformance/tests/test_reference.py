"""The oracle itself, against torch's own attention in float64 and by hand."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from attnplug import AttentionKind, LayerSpec, MHAPool, MLAPool
from attnplug.host import MLADims
from attnplug_conformance.arithmetic import as_bytes
from attnplug_conformance.case import Case
from attnplug_conformance.catalog import all_checks
from attnplug_conformance.diagnosis import check_output
from attnplug_conformance.failure import CheckFailure
from attnplug_conformance.reference import Rules, attention, entries, tree_bits
from attnplug_conformance.scene import Output, Scene
from attnplug_conformance.stored_rows import StoredRows, coded_formats
from attnplug_conformance.testing import subject_of


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
    made = entries(values, torch.zeros(4, 4), nothing, norm, 0.0, turned, overlap=True)
    size = 12.5**0.5
    x, y = 3 / size, 2 * 4 / size
    wanted = [x * math.cos(1) - y * math.sin(1), x * math.sin(1) + y * math.cos(1)]
    assert made[1].tolist() == pytest.approx(wanted)
    assert made[0].tolist() == pytest.approx([1.0, 2.0])  # of its own tokens, and not turned


@pytest.mark.parametrize("format", [*coded_formats("mha"), *coded_formats("mla")], ids=str)
def test_rows_are_read_back_as_a_pool_reads_them(format):
    """E2: every installed format, with several parts and a layer scale."""
    layer = LayerSpec(0, AttentionKind.MLA, 1, 1, 192, 128, 1.0, mla=MLADims(256, 128, 64))
    if "mla" not in format.holds:
        layer = replace(layer, kind=AttentionKind.MHA, head_dim=256, v_head_dim=256, mla=None)
    scale, slots = 0.4 if format.layer_scale else 1.0, torch.tensor([7, 2, 0, 4, 1, 6, 5, 3])
    sizes = {"num_pages": 2, "page_size": 4, "dtype": format, "device": "cpu"}
    if layer.mla is not None:
        pool, rows = MLAPool([layer], **sizes, scales={0: scale}), torch.randn(8, 1, 320)
        pool.write(0, slots, rows)
        found, parts, stored = pool.read_rows(0, slots).unsqueeze(1), pool.parts(0), StoredRows(format, 320, 64)
    else:
        pool, rows = MHAPool([layer], **sizes, scales={0: (scale, scale)}), torch.randn(8, 1, 256)
        pool.write(0, slots, rows, rows)
        found, parts, stored = pool.read_keys(0, slots), pool.parts(0)[0], StoredRows(format, 256)
    assert torch.equal(found.float(), stored.read_back(rows, scale))
    for part, cells in zip(parts, stored.encode(rows, scale), strict=True):
        assert torch.equal(as_bytes(part).flatten(0, 1)[slots], as_bytes(cells))
    assert not format.in_bytes or not torch.equal(found.float(), stored.read_back(rows, scale, scaled=False))


@pytest.mark.parametrize("name", ["large_inputs", "float16.large_inputs", "bfloat16.large_inputs"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_large_inputs_are_right_with_a_mask_that_no_model_comes_near(kind, name):
    """FlashInfer masks with -50,000 before logits are scaled; no row of the checks is changed by this."""
    subject = subject_of("torch_native", "cpu")
    check = next(one for one in all_checks() if one.name == f"{kind}.{name}")
    case = check.case(64, 300)
    if kind == "mla":
        case = replace(case, mla=MLADims(512, 128, 64))
    scene = Scene(subject, subject.fit(case))
    rules = scene.rules()
    wanted, found = (scene.wanted(replace(rules, masked=mask))[0] for mask in (float("-inf"), -5e4 * rules.scale))
    assert torch.equal(wanted, found)


def test_an_error_just_above_the_tolerance_is_shown_as_larger():
    subject = subject_of("torch_native", "cpu")
    scene = Scene(subject, subject.fit(Case(((5, 3),))))
    wanted = scene.wanted()[0]
    with pytest.raises(CheckFailure) as raised:
        check_output(scene, Output((wanted * (1 + 1.04 * scene.tolerance)).float(), None, 0.0, 0.0))
    error, allowed = re.findall(r"\d\.\d+e-\d+", str(raised.value))
    assert float(error) > float(allowed)
