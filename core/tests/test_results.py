"""Results of a backend: checked at the first call of each layer, with the plugin's name, and never afterwards (D2)."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnplug import BackendError, DType, ForwardBatch, ForwardExtras, ForwardMode, LayerSpec, PlanError
from attnplug.author.served_layers import bind_forward
from attnplug.host import KVPools, ModelAttention
from attnplug.linear import DeltaInputs, DeltaWeights, LinearInputs, LinearStatePool
from attnplug.wrappers.forwarding import HybridLinearBackend, SplitBackend
from attnplug_testing.errors import raises_naming
from support.pools import linear_layer, mha_layer
from support.recorder import Recorder, batch_in

Q = torch.zeros(2, 2, 8)


def square(layer_id: int = 0) -> LayerSpec:
    return mha_layer(layer_id, v_head_dim=8)


def returning(result: object, name: str = "fast") -> Recorder:
    backend = Recorder(name)
    backend.backend_id.source = "fast-attention 1.2.3"
    backend.result = result
    return backend


def planned(attention: ModelAttention, mode: ForwardMode) -> ForwardBatch:
    batch = batch_in(mode)
    attention.plan(batch)
    return batch


def attend(attention: ModelAttention, layer: LayerSpec | None = None, mode=ForwardMode.DECODE, **given: Any) -> object:
    return attention.attend(Q, None, None, layer or square(), planned(attention, mode), **given)


class Holder:
    run: Any = None


async def forward() -> None: ...


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (lambda: None, "None"),
        (lambda: (Q, Q), "a tuple of 2 (Tensor, Tensor)"),
        (lambda: [], "a list of 0"),
        (forward, "a coroutine"),
        (lambda: 7, "7 (int)"),
        (lambda: Q[:1], "torch.float32 of shape (1, 2, 8) on cpu"),
        (lambda: Q.flatten(1), "(2, 16)"),
        (lambda: Q.double(), "torch.float64"),
        (lambda: Q.to("meta"), "on meta"),
    ],
)
def test_a_result_of_another_form_names_plugin_and_method(mode, result, shown):
    """D2: in one line, and without the numbers of a tensor."""
    attention = ModelAttention(returning(result()), KVPools())
    wanted = "torch.float32 of shape (2, 2, 8) on cpu"
    with raises_naming(BackendError, f"forward_{mode} of backend fast (fast-attention 1.2.3)", shown, wanted) as raised:
        attend(attention, mode=mode)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 250


def test_each_layer_is_checked_once_and_then_the_method_itself_is_called():
    """A model's layers may differ: the first wrong one is found in the first step."""
    attention, layers = ModelAttention(returning(Q), KVPools()), [square(0), square(1)]
    for layer in layers:
        attend(attention, layer)
    assert attention._decode != attention.backend.forward_decode
    attend(attention, layers[0])
    assert attention._decode == attention.backend.forward_decode, "nothing is between caller and method"
    attention = ModelAttention(returning(Q), KVPools())
    attend(attention, layers[0])
    attention.backend.result = None
    with raises_naming(BackendError, "fast", "layer 1"):
        attend(attention, layers[1])


def test_a_result_beside_the_given_memory_is_an_error():
    """Hosts that give ``out`` read the result there."""
    attention = ModelAttention(returning(Q.clone()), KVPools())
    with raises_naming(BackendError, "fast (fast-attention 1.2.3)", "extras.out"):
        attend(attention, extras=ForwardExtras(out=Q.clone()))
    attention.backend.result = Q
    assert attend(attention, extras=ForwardExtras(out=Q)) is Q


def test_a_wrapper_is_not_blamed_for_its_child():
    good, bad = returning(Q, "good"), returning(None)
    attention = ModelAttention(SplitBackend(good, bad), KVPools())
    assert attend(attention, mode=ForwardMode.EXTEND) is Q
    with raises_naming(BackendError, "forward_decode of backend fast (fast-attention 1.2.3)"):
        attend(attention)


WEIGHTS = DeltaWeights(*torch.zeros(4, 1), eps=0.0, silu=True)
LINEAR = {
    "conv": lambda attention, *given: attention.convolve(Q[0], None, None, *given),
    "linear": lambda attention, *given: attention.attend_linear(LinearInputs(Q, Q, Q, Q), *given),
    "delta": lambda attention, *given: attention.attend_delta(DeltaInputs(Q[0], Q, Q, Q, WEIGHTS), *given),
}


@pytest.mark.parametrize("name", LINEAR)
def test_results_of_linear_layers_are_checked(name):
    layer = linear_layer()
    pool = LinearStatePool([layer], num_slots=1, dtype=DType.FLOAT32, device="cpu")
    hybrid = HybridLinearBackend(returning(Q, "full"), returning(Q[0, 0]), SimpleNamespace(layers=[layer]))
    attention = ModelAttention(hybrid, KVPools(linear=pool))
    with raises_naming(BackendError, f"forward_{name} of backend fast (fast-attention 1.2.3)", "(8,)"):
        LINEAR[name](attention, layer, planned(attention, ForwardMode.DECODE))


@pytest.mark.parametrize("result", [None, (Q, Q), Q[:1]])
def test_results_of_ragged_calls_are_checked_for_hosts_that_make_them(result):
    holder = Holder()
    holder.run = bind_forward(holder, "run", returning(result), "forward_ragged")
    with raises_naming(BackendError, "forward_ragged of backend fast (fast-attention 1.2.3)", "(2, 2, 8)"):
        holder.run(Q, Q, Q, square(), None, None, None)


@pytest.mark.parametrize("value", [None, -1, "1"])
def test_a_padding_length_that_is_none_names_plugin_and_method(value):
    backend = returning(Q)
    backend.fill = value
    attention = ModelAttention(backend, KVPools())
    with raises_naming(BackendError, "get_cuda_graph_seq_len_fill_value of backend fast (fast-attention 1.2.3)", value):
        attention.padding_length()


def test_a_plan_that_is_a_coroutine_names_plugin_and_method():
    class Late(Recorder):
        async def init_forward_metadata(self, batch):
            return None

    backend = Late("fast")
    backend.backend_id.source = "fast-attention 1.2.3"
    with raises_naming(PlanError, "init_forward_metadata of backend fast (fast-attention 1.2.3)", "a coroutine"):
        ModelAttention(backend, KVPools()).plan(batch_in(ForwardMode.DECODE))


def test_the_check_keeps_nothing_in_memory():
    """Pools are freed with the last reference to the attention, without a garbage collection."""
    gc.disable()
    try:
        attention = ModelAttention(returning(Q), KVPools())
        kept = weakref.ref(attention)
        del attention
        assert kept() is None
    finally:
        gc.enable()
