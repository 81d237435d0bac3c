"""A rank's part of a model: the layers that its pools, its context and its forward calls have."""

from __future__ import annotations

import pytest

from attnplug import AttentionKind, DType, LayerSpec, MHAPool, ModelSpec, UsageError
from attnplug.linear import LinearDims
from attnplug_testing.errors import raises_naming
from support.pools import mha_layer, mla_layer


def linear_layer(kind: AttentionKind, dims: LinearDims) -> LayerSpec:
    return LayerSpec(0, kind, dims.heads, dims.key_heads, dims.key_dim, dims.value_dim, 1.0, linear=dims)


@pytest.mark.parametrize(("ranks", "heads"), [(1, (16, 4)), (2, (8, 2)), (4, (4, 1)), (8, (2, 1))])
def test_kv_heads_are_divided_and_each_rank_has_at_least_one(ranks: int, heads: tuple[int, int]) -> None:
    own = mha_layer(kv_heads=4).for_rank(ranks)
    assert (own.num_heads, own.num_kv_heads) == heads
    pool = MHAPool([own], num_pages=1, page_size=2, dtype=DType.FLOAT32, device="cpu")
    assert pool.keys(0).shape == (1, 2, heads[1], 8)


def test_a_latent_is_whole_on_every_rank() -> None:
    own = mla_layer().for_rank(2)
    assert (own.num_heads, own.num_kv_heads, own.mla) == (2, 2, mla_layer().mla)


def test_a_linear_layer_has_the_channels_of_its_own_heads() -> None:
    layer = linear_layer(AttentionKind.GDN, LinearDims(4, 2, 16, 16, conv_channels=128, conv_width=4))
    parts = [layer.for_rank(ranks).linear for ranks in (1, 2, 4)]
    assert [(d.heads, d.key_heads, d.conv_channels) for d in parts] == [(4, 2, 128), (2, 1, 64), (1, 1, 48)]
    assert layer.for_rank(4).num_heads == 1


def test_a_convolution_without_heads_is_divided_by_channels() -> None:
    layer = linear_layer(AttentionKind.SHORT_CONV, LinearDims(0, 0, 0, 0, conv_channels=128, conv_width=3))
    assert layer.for_rank(4).linear == LinearDims(0, 0, 0, 0, conv_channels=32, conv_width=3)


@pytest.mark.parametrize("ranks", [3, 6])
def test_ranks_that_cannot_share_the_kv_heads_are_refused(ranks: int) -> None:
    layer = LayerSpec(7, AttentionKind.MHA, 12, 4, 8, 8, 1.0)
    with raises_naming(UsageError, "layer 7", "4 KV heads", f"{ranks} ranks", "multiple"):
        layer.for_rank(ranks)


def test_ranks_that_cannot_share_the_query_heads_are_refused() -> None:
    with raises_naming(UsageError, "layer 0", 4, 8):
        mla_layer().for_rank(8)


def test_no_rank_is_not_a_number_of_ranks() -> None:
    with raises_naming(UsageError, "ranks", 0):
        mha_layer().for_rank(0)


def test_a_model_says_whose_heads_its_layers_have() -> None:
    whole = ModelSpec("test", "test", (mha_layer(0, kv_heads=4), mla_layer(1)), 1 << 10)
    own = whole.for_rank(2)
    assert (whole.ranks, own.ranks) == (1, 2)
    assert own.layers == tuple(layer.for_rank(2) for layer in whole.layers)
    assert whole.for_rank(1) == whole
    with raises_naming(ValueError, "2 ranks"):
        own.for_rank(2)
