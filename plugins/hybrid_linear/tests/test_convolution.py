"""The short convolution against float64, for any division of a request into steps."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import linear_float64
from attnplug_hybrid_linear.convolution import convolve, newest_rows
from attnplug_testing.devices import DEVICES
from linear_float64 import relative_error

TOLERANCE = 1e-6


@settings(max_examples=12)
@given(
    tokens=st.integers(1, 40),
    channels=st.integers(1, 9),
    width=st.integers(1, 5),
    bias=st.booleans(),
    silu=st.booleans(),
    cuts=st.lists(st.integers(0, 40)),
    seed=st.integers(0, 99),
)
def test_a_request_may_be_cut_into_any_steps(tokens, channels, width, bias, silu, cuts, seed) -> None:
    """A7: one token or many at a time give what all at once give; a step without tokens changes nothing."""
    random = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(*shape, generator=random) for shape in ((tokens, channels), (channels, width)))
    b = torch.randn(channels, generator=random) if bias else None
    first = torch.randn(channels, width, generator=random)
    state, outputs = first[None], []
    for start, stop in pairwise(sorted([0, *(cut for cut in cuts if cut < tokens), tokens])):
        rows = x[None, start:stop]
        outputs.append(convolve(rows, state, weight, b, silu=silu)[0])
        state = newest_rows(rows, state, torch.tensor([stop - start]))
    wanted, last = linear_float64.convolution(x, weight, b, silu, first.double().numpy())
    assert relative_error(torch.cat(outputs), wanted) <= TOLERANCE
    assert torch.equal(state[0].double(), torch.from_numpy(last))


@pytest.mark.parametrize("device", DEVICES)
def test_each_request_ends_where_its_own_rows_do(device) -> None:
    """Rows behind a request's own reach neither its rows nor its state."""
    lens = [0, 1, 2, 3, 4, 7]
    x = torch.randn(len(lens), 7, 5, generator=torch.Generator().manual_seed(0))
    state = torch.randn(len(lens), 5, 4, generator=torch.Generator().manual_seed(1))
    weight, bias = torch.linspace(-1, 1, 20).view(5, 4), torch.linspace(0, 1, 5)
    for request, own in enumerate(lens):
        x[request, own:] = torch.nan
    moved = [tensor.to(device) for tensor in (x, state, weight, bias)]
    out = convolve(*moved, silu=True)
    after = newest_rows(moved[0], moved[1], torch.tensor(lens, device=device))
    for request, own in enumerate(lens):
        wanted, last = linear_float64.convolution(x[request, :own], weight, bias, True, state[request].double().numpy())
        assert relative_error(out[request, :own], wanted) <= TOLERANCE
        assert torch.equal(after[request].cpu().double(), torch.from_numpy(last))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_types_are_summed_in_float32(dtype) -> None:
    random = torch.Generator().manual_seed(0)
    x, state, weight = (torch.randn(*shape, generator=random).to(dtype) for shape in ((1, 50, 6), (1, 6, 4), (6, 4)))
    out = convolve(x, state, weight, None, silu=False)
    wanted, _ = linear_float64.convolution(x[0], weight, None, False, state[0].double().numpy())
    assert out.dtype is dtype
    assert torch.equal(out[0], torch.from_numpy(wanted).to(dtype))
