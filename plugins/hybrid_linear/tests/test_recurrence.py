"""Both implementations of the recurrence against float64, token by token, for any division of a request into steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import linear_float64
from attnplug import AttentionKind
from attnplug.linear import LinearDims, LinearInputs
from attnplug_hybrid_linear.recurrence import CHUNK, Tokens, advance, chunked, recurrent
from attnplug_testing.devices import DEVICES
from linear_float64 import relative_error
from linear_inputs import RECURRENT, random_inputs, tokens_of

TOLERANCE = 1e-5
SCALE = 0.5
WAYS = {"recurrent": recurrent, "chunked": chunked}
on_every_device = pytest.mark.parametrize("device", DEVICES)
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
every_kind = pytest.mark.parametrize("kind", RECURRENT)


@dataclass(frozen=True)
class Sequence:
    """A layer's inputs for one request, and the state it starts from."""

    inputs: LinearInputs
    state: Tensor

    @property
    def tokens(self) -> int:
        return self.inputs.v.shape[0]


def sequence(kind: AttentionKind, dims: LinearDims, tokens: int, seed: int = 0, **inputs: object) -> Sequence:
    random = torch.Generator().manual_seed(seed)
    state = torch.randn(dims.heads, dims.key_dim, dims.value_dim, generator=random)
    return Sequence(random_inputs(kind, dims, tokens, random, **inputs), state)


def as_tokens(inputs: LinearInputs, device: str) -> Tokens:
    """One request's inputs, as those of a group of one."""
    q, k, v, beta = (None if t is None else t[None].to(device) for t in (inputs.q, inputs.k, inputs.v, inputs.beta))
    decay = inputs.log_decay.to(device)
    decay = decay if decay.dim() == 1 else decay[None]
    return Tokens.of(q, k, v, decay, beta, scale=SCALE, normalize=inputs.normalize)


def run(way: Callable, inputs: LinearInputs, state: Tensor, device: str = "cpu") -> tuple[Tensor, Tensor]:
    out, after = way(as_tokens(inputs, device), state[None].to(device))
    return out[0], after[0]


def assert_exact(found: tuple[Tensor, Tensor], case: Sequence) -> None:
    """Errors are relative to 1 if sums of numbers of that size cancel."""
    for mine, wanted in zip(
        found, linear_float64.recurrence(case.inputs, case.state.double().numpy(), SCALE), strict=True
    ):
        largest = max(abs(wanted).max(initial=0.0), 1.0)
        assert abs(mine.double().cpu().numpy() - wanted).max(initial=0.0) <= TOLERANCE * largest


@st.composite
def sequences(draw: st.DrawFn, longest: int = 150) -> Sequence:
    key_heads = draw(st.integers(1, 3))
    dims = LinearDims(
        key_heads * draw(st.integers(1, 3)), key_heads, draw(st.integers(1, 24)), draw(st.integers(1, 24))
    )
    return sequence(
        draw(st.sampled_from(RECURRENT)),
        dims,
        draw(st.integers(1, longest)),
        draw(st.integers(0, 99)),
        decay=draw(st.sampled_from([0.0, 0.01, 1.0, 20.0])),
        normalize=draw(st.booleans()),
    )


@settings(max_examples=12)
@given(case=sequences())
def test_both_ways_are_the_recurrence(case: Sequence) -> None:
    """A7: key and value widths that differ, grouped key heads, decays of all strengths, a state to start from."""
    for way in WAYS.values():
        assert_exact(run(way, case.inputs, case.state), case)


@settings(max_examples=12)
@given(case=sequences(), data=st.data())
def test_a_request_may_be_cut_into_any_steps(case: Sequence, data: st.DataObject) -> None:
    """A7: extends and decodes in any order give what one extend gives."""
    start, state, outputs = 0, case.state, []
    while start < case.tokens:
        stop = data.draw(st.integers(start + 1, min(case.tokens, start + 100)))
        way = data.draw(st.sampled_from([recurrent, chunked, advance]))
        out, state = run(way, tokens_of(case.inputs, slice(start, stop)), state)
        outputs.append(out)
        start = stop
    assert_exact((torch.cat(outputs), state), case)


@on_every_device
@every_way
@every_kind
@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
@pytest.mark.sample(17)
def test_lengths_around_a_chunk(kind, tokens, way, device) -> None:
    case = sequence(kind, LinearDims(4, 2, 16, 24), tokens, decay=2.0, normalize=True)
    assert_exact(run(way, case.inputs, case.state, device), case)


@on_every_device
@every_way
@every_kind
def test_widths_of_published_models(kind, way, device) -> None:
    case = sequence(kind, LinearDims(2, 1, 128, 128), 100, decay=1.0, normalize=True)
    assert_exact(run(way, case.inputs, case.state, device), case)


@every_way
@every_kind
@pytest.mark.parametrize("log_decay", [-20.0, -87.0, -1e4, -torch.inf])
@pytest.mark.sample(10)
def test_the_strongest_decays_forget_and_stay_finite(kind, log_decay, way) -> None:
    case = sequence(kind, LinearDims(2, 2, 8, 8), 100, normalize=True)
    case = replace(case, inputs=replace(case.inputs, log_decay=torch.full_like(case.inputs.log_decay, log_decay)))
    assert_exact(run(way, case.inputs, case.state), case)


@every_way
@pytest.mark.parametrize("kind", [AttentionKind.GDN, AttentionKind.KDA, AttentionKind.MAMBA2])
def test_strong_decays_leave_later_weak_ones_exact(kind, way) -> None:
    """Float32 differences of cumulative log decays near -1000 would have an error of 6e-5."""
    case = sequence(kind, LinearDims(2, 2, 16, 16), CHUNK, normalize=True)
    decay = torch.full_like(case.inputs.log_decay, -0.0123)
    decay[:50] = -20.0123
    case = replace(case, inputs=replace(case.inputs, log_decay=decay))
    assert_exact(run(way, case.inputs, case.state), case)


@every_kind
def test_channels_and_heads_that_decay_beside_some_that_do_not(kind) -> None:
    case = sequence(kind, LinearDims(4, 4, 16, 8), 2 * CHUNK, decay=20.0)
    decay = case.inputs.log_decay.clone()
    decay[..., ::2] = 0.0
    case = replace(case, inputs=replace(case.inputs, log_decay=decay))
    assert_exact(run(chunked, case.inputs, case.state), case)


@every_way
@every_kind
@pytest.mark.parametrize("live", [0, 1, 7, 70, 80])
@pytest.mark.sample(13)
def test_what_is_not_live_leaves_the_state_alone(kind, live, way) -> None:
    """NaN in every token that must not be read."""
    case = sequence(kind, LinearDims(4, 2, 8, 12), 80)
    first = replace(case, inputs=tokens_of(case.inputs, slice(0, live)))
    for tensor in (case.inputs.k, case.inputs.v, case.inputs.beta):
        if tensor is not None:
            tensor[live:] = torch.nan
    mask = torch.arange(80)[None] < live
    _, state = way(as_tokens(case.inputs, "cpu").only(mask), case.state[None])
    _, wanted = linear_float64.recurrence(first.inputs, case.state.double().numpy(), SCALE)
    assert relative_error(state[0], wanted) <= TOLERANCE
    if not live:
        assert torch.equal(state[0], case.state)


@every_way
def test_requests_do_not_meet(way) -> None:
    cases = [sequence(AttentionKind.KDA, LinearDims(2, 1, 8, 8), 40, seed, normalize=True) for seed in range(3)]
    apart = [as_tokens(case.inputs, "cpu") for case in cases]
    together = Tokens(*(torch.cat([getattr(t, name) for t in apart]) for name in ("q", "k", "v", "log_decay", "beta")))
    out, state = way(together, torch.stack([case.state for case in cases]))
    for number, case in enumerate(cases):
        assert_exact((out[number], state[number]), case)


@every_way
def test_the_first_state_is_not_written_to(way) -> None:
    case = sequence(AttentionKind.GDN, LinearDims(2, 2, 8, 8), 20)
    before = case.state.clone()
    run(way, case.inputs, case.state)
    assert torch.equal(case.state, before)
