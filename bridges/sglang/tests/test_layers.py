"""SGLang's attention modules as layers, with stand-ins for ``RadixAttention``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from attnplug import AttentionKind, BackendError
from attnplug.host import MLADims
from attnplug_sglang.layers import Layers, with_sinks
from attnplug_testing.errors import naming
from sglang_fakes import Module, module

MLA = MLADims(16, 8, 4)


def test_heads_are_the_ranks_own_and_a_window_counts_the_query_too() -> None:
    given = module(3, sliding_window_size=31, logit_cap=50.0)
    (spec,) = Layers([given], None, 0).specs
    assert (spec.layer_id, spec.num_heads, spec.num_kv_heads, spec.scale) == (3, 4, 2, 0.25)
    assert (spec.sliding_window, spec.logit_cap, spec.sinks) == (32, 50.0, False)
    assert [Layers([module(sliding_window_size=n)], None, 0).specs[0].sliding_window for n in (-1, 0)] == [None, 1]


def test_values_may_be_narrower_than_keys_and_layers_may_have_sinks() -> None:
    plain, given = Layers([module(2), module(3, v_head_dim=4)], None, 0, sinks=(3,)).specs
    assert (given.head_dim, given.v_head_dim, given.sinks) == (8, 4, True)
    assert not plain.sinks


def test_an_mla_layer_is_one_spec_with_two_modules() -> None:
    latent = module(tp_k_head_num=1, head_dim=20, qk_head_dim=20, v_head_dim=16)
    as_mha = module(tp_k_head_num=4, head_dim=12, qk_head_dim=12, v_head_dim=8)
    layers = Layers([as_mha, latent], MLA, 8)
    (spec,) = layers.specs
    assert (spec.kind, spec.head_dim, spec.v_head_dim, spec.mla) == (AttentionKind.MLA, 12, 8, MLA)
    assert layers.spec(as_mha) is layers.spec(latent) is spec
    assert [layers.runs_as_mha(given) for given in (as_mha, latent)] == [True, False]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": SimpleNamespace(value="encoder_only")}, "both directions"),
        ({"use_irope": True}, "chunks"),
        ({"logit_cap": 1.0, "logit_capping_method": "sigmoid"}, "sigmoid"),
        ({"pos_encoding_mode": "ALIBI"}, "ALIBI"),
        ({"xai_temperature_len": 8}, "xai_temperature_len 8"),
    ],
)
def test_what_the_contract_lacks_is_refused_by_name(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(BackendError, check=naming("layer 2", reason)):
        Layers([module(2, **change)], None, 0)


def test_two_kinds_of_attention_over_one_cache_are_refused() -> None:
    with pytest.raises(BackendError, check=naming("layer 0")):
        Layers([module(), module(sliding_window_size=3)], None, 0)


def test_an_mla_module_as_mha_without_its_latent_one_is_refused() -> None:
    with pytest.raises(BackendError, check=naming("layer 2")):
        Layers([module(2)], MLA, 8)


def test_a_module_of_another_model_is_refused() -> None:
    layers = Layers([module()], None, 0)
    with pytest.raises(BackendError, check=naming("layer 5")):
        layers.spec(module(5))


@pytest.mark.parametrize("name", ["sinks", "attention_sink_bias", "attn_sink", "learnable_sink_param"])
def test_sinks_are_found_beside_the_attention(name: str) -> None:
    attention = module(4)
    parent = SimpleNamespace(**{name: object()}, children=lambda: [attention, object()])
    plain = SimpleNamespace(children=lambda: [module(5)])
    assert list(with_sinks([("a", parent), ("b", plain)], Module)) == [4]
