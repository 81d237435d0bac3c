"""The pool of linear states: one slot per request, zeroed and copied in all layers together."""

from __future__ import annotations

import pytest
import torch

from attnplug import DType, LayerSpec, PoolError
from attnplug.linear import LinearStatePool
from attnplug_testing.devices import DEVICES
from attnplug_testing.errors import raises_naming
from support.pools import linear_layer


def linear_pool(*layers: LayerSpec, num_slots: int = 3, device: str = "cpu") -> LinearStatePool:
    return LinearStatePool(layers or [linear_layer()], num_slots=num_slots, dtype=DType.BFLOAT16, device=device)


def state(pool: LinearStatePool, layer_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    recurrent, conv = pool.recurrent(layer_id), pool.conv(layer_id)
    assert recurrent is not None
    assert conv is not None
    return recurrent, conv


def test_states_have_a_slot_per_request() -> None:
    recurrent, conv = state(linear_pool())
    assert (recurrent.shape, recurrent.dtype) == ((3, 2, 4, 5), torch.float32)
    assert (conv.shape, conv.dtype) == ((3, 6, 3), torch.bfloat16)


def test_a_state_the_layer_lacks_is_none() -> None:
    pool = linear_pool(linear_layer(0, heads=0), linear_layer(1, conv_width=0))
    assert pool.recurrent(0) is None
    assert pool.conv(1) is None
    assert pool.conv(0) is not None
    assert pool.recurrent(1) is not None


@pytest.mark.parametrize("device", DEVICES)
def test_a_slot_is_zeroed_in_every_layer_and_others_stay(device: str) -> None:
    pool = linear_pool(linear_layer(0), linear_layer(1, heads=0), linear_layer(2, conv_width=0), device=device)
    states = [pool.recurrent(0), pool.conv(0), pool.conv(1), pool.recurrent(2)]
    for each in states:
        assert each is not None
        each.fill_(torch.nan)
    slot = 1
    pool.zero(slot)
    for each in states:
        assert each is not None
        assert not each[slot].any()
        assert each[[s for s in range(3) if s != slot]].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_copied_state_is_a_snapshot(device: str) -> None:
    pool = linear_pool(device=device)
    source, target = 2, 0
    recurrent, conv = state(pool)
    recurrent[source], conv[source] = 3.0, 4.0
    pool.copy(source, target)
    recurrent[source], conv[source] = torch.nan, torch.nan
    assert (recurrent[target] == 3).all()
    assert (conv[target] == 4).all()


@pytest.mark.parametrize(("source", "target"), [(3, 0), (0, 3), (-1, 0), (0, -1)])
def test_slots_outside_the_pool_are_refused(source: int, target: int) -> None:
    with pytest.raises(PoolError):
        linear_pool().copy(source, target)


@pytest.mark.parametrize("slots", [0, -1])
def test_a_pool_without_slots_is_refused(slots: int) -> None:
    with pytest.raises(PoolError):
        linear_pool(num_slots=slots)


def test_a_linear_layer_the_pool_lacks_is_refused() -> None:
    with raises_naming(PoolError, "layer 9", 0):
        linear_pool().recurrent(9)


def test_convolution_states_in_fp8_are_refused() -> None:
    with raises_naming(PoolError, "float8_e4m3fn"):
        LinearStatePool([linear_layer()], num_slots=1, dtype=DType.FLOAT8_E4M3, device="cpu")
