"""Validation of specs and capabilities: types, contradictions, and the resulting claims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from importlib_metadata import EntryPoint

from attnplug import (
    AttentionKind,
    BackendSpec,
    CacheLayout,
    Capabilities,
    Claims,
    DType,
    Feature,
    ForwardExtras,
    GraphLevel,
    PageSizes,
    Problem,
    Role,
    hookimpl,
)
from attnplug.declare.capabilities import weakest
from attnplug.declare.errors import PluginError
from attnplug.registry.loading import Broken
from attnplug_testing.plugins import Install, module, place, spec
from attnplug_testing.specs import EVERYTHING, claiming, page_sizes

# ---- what a spec must be ----


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({"name": "Fast"}, "name"),
        ({"name": ""}, "name"),
        ({"name": "fast-mla"}, "name"),
        ({"name": "1fast"}, "name"),
        ({"name": "fast\n"}, "name"),
        ({"name": None}, "name"),
        ({"name": "auto"}, "auto"),
        ({"summary": ""}, "summary"),
        ({"summary": "two\nlines"}, "summary"),
        ({"summary": None}, "summary"),
        ({"factory": "module"}, "factory"),
        ({"factory": "module:"}, "factory"),
        ({"factory": spec}, "factory"),
        ({"preference": "high"}, "preference"),
        ({"preference": 1.5}, "preference"),
        ({"preference": True}, "preference"),
        ({"preference": 10**5000}, "preference"),
        ({"preference": -(10**9) - 1}, "preference"),
        ({"name": "a" * 65}, "name"),
        ({"summary": "\x1b[31mred"}, "summary"),
        ({"factory": "a..b:c"}, "factory"),
        ({"factory": ".:."}, "factory"),
        ({"check": 7}, "check"),
        ({"capabilities": {"kinds": ["mha"]}}, "capabilities"),
        ({"requires": "torch"}, "requires"),
        ({"requires": ["not a requirement!"]}, "not a requirement!"),
        ({"requires": [7]}, "7"),
        ({"requires": [("torch", 7)]}, "('torch', 7)"),
        ({"requires": [("torch", "a module")]}, "module"),
        ({"requires": [("torch", "torch", "triton")]}, "pair"),
        ({"options": dict}, "frozen dataclass"),
    ],
)
def test_a_field_of_the_wrong_type_is_an_error_that_names_it(changes: dict[str, Any], needs: str) -> None:
    """D2: at load time, not in the middle of a choice."""
    with pytest.raises(PluginError) as caught:
        spec(**changes)
    assert needs in str(caught.value)


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(PluginError) as caught:
        spec(name="Fast", factory="module", preference="high")
    for field in ("name", "factory", "preference"):
        assert field in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kinds": "mha"},
        {"kinds": {"mhaa"}},
        {"kinds": 7},
        {"devices": "cpu"},
        {"devices": {7}},
        {"devices": {"cuda:0"}},
        {"architectures": ["gen2"]},
        {"dtypes": {"int8"}},
        {"kv_dtypes": {8}},
        {"kv_dtypes": "int8"},
        {"roles": {"prefil"}},
        {"features": {"windows"}},
        {"min_sm": "90"},
        {"max_sm": "90"},
        {"min_sm": 9.0},
        {"min_sm": 9},
        {"max_sm": 1000},
        {"page_sizes": {64}},
        {"page_sizes": 64},
        {"page_sizes": PageSizes.of("64")},
        {"page_sizes": PageSizes(64)},
        {"head_dims": {64}},
        {"head_dims": {(64,)}},
        {"head_dims": {(True, True)}},
        {"head_dims": {(64, -64)}},
        {"head_dims": {(64, 64, 64)}},
        {"head_dims": {("64", "64")}},
        {"mla_dims": {512}},
        {"mla_dims": {(512,)}},
        {"max_speculative_tokens": "8"},
        {"max_speculative_tokens": None},
        {"trees": 1},
        {"ragged_graphs": 1},
        {"max_heads": "128"},
        {"layers_alike": None},
        {"kv_matches_dtype": "fp8"},
        {"extras": "lse"},
        {"needs_cpu_seq_lens": "no"},
        {"mla_extend": []},
    ],
    ids=str,
)
def test_a_capability_of_the_wrong_type_is_an_error_that_names_it(wrong: dict[str, Any]) -> None:
    """D2: a wrong type is rejected at load time, so that it cannot raise during selection."""
    with pytest.raises(PluginError) as caught:
        claiming(**wrong)
    assert next(iter(wrong)) in str(caught.value)


@pytest.mark.parametrize("level", ["always", "nonsense", 2, 9, True, None])
def test_a_graph_level_is_read_or_refused_at_load_time(level: Any) -> None:
    """D2: it must not raise in the middle of a choice."""
    try:
        loaded = claiming(cuda_graph=level)
    except PluginError as error:
        assert "cuda_graph" in str(error)
    else:
        loaded.refusals(Problem(cuda_graph=GraphLevel.ALWAYS))


def test_names_stand_for_members() -> None:
    """A plugin may write plain strings, in any collection."""
    plain = Capabilities(kinds=["mha"], devices=("cpu",), dtypes=["float32"], roles=["prefill"], features=["sinks"])
    exact = Capabilities(
        kinds=frozenset({AttentionKind.MHA}),
        devices=frozenset({"cpu"}),
        dtypes=frozenset({DType.FLOAT32}),
        roles=frozenset({Role.PREFILL}),
        features=frozenset({Feature.SINKS}),
    )
    assert plain == exact


def test_cache_types_left_out_are_those_of_the_activations() -> None:
    assert Capabilities({"mha"}, {"cpu"}, {"float16"}).kv_dtypes == {DType.FLOAT16}


def test_token_major_and_head_major_are_one_layout_of_mla_alone() -> None:
    """A latent row has one head, so both layouts describe the same MLA pages. For MHA they differ."""
    one_head, many = Capabilities({"mla"}, {"cpu"}, {"float16"}), Capabilities({"mla", "mha"}, {"cpu"}, {"float16"})
    assert one_head.layouts == {CacheLayout.TOKEN_MAJOR, CacheLayout.HEAD_MAJOR}
    assert many.layouts == {CacheLayout.TOKEN_MAJOR}
    assert replace(one_head, layouts={"strided"}).layouts == {CacheLayout.STRIDED}


def test_capabilities_become_claims() -> None:
    """A9: the capabilities that a spec declares become the claims of its backend."""
    sizes = PageSizes.of(64)
    capabilities = replace(
        EVERYTHING, page_sizes=sizes, needs_cpu_seq_lens=False, cuda_graph=GraphLevel.DECODE, extras={"lse"}
    )
    assert capabilities.claims == Claims(
        cuda_graph=GraphLevel.DECODE, page_sizes=sizes, needs_cpu_seq_lens=False, extras={"lse"}, trees=True
    )


# ---- capabilities that contradict themselves ----

CUDA = {"kinds": {"mha"}, "devices": {"cuda"}, "dtypes": {"float32"}}
CPU = {**CUDA, "devices": {"cpu"}}
LINEAR = {**CUDA, "kinds": {"gdn"}, "roles": {"linear"}}


@pytest.mark.parametrize(
    ("capabilities", "needs"),
    [
        ({**CPU, "kinds": ()}, ["kinds", "empty"]),
        ({**CPU, "devices": ()}, ["devices", "empty"]),
        ({**CPU, "dtypes": ()}, ["dtypes", "empty"]),
        ({**CPU, "roles": ()}, ["roles", "empty"]),
        ({**CPU, "head_dims": ()}, ["head_dims", "empty"]),
        ({**CPU, "kinds": {"mla"}, "mla_dims": ()}, ["mla_dims", "empty"]),
        ({**CPU, "architectures": {"acme": "gen2"}}, ["architectures", "'acme'"]),
        ({**CUDA, "architectures": {"cuda": 90}}, ["architectures", "'cuda'", "min_sm"]),
        ({**CPU, "kinds": {"mha", "gdn"}}, ["gdn", "role linear"]),
        ({**CPU, "roles": {"prefill", "linear"}}, ["role linear", "mha"]),
        ({**CPU, "kinds": {"mha", "gdn"}, "roles": {"linear"}}, ["mha", "only the role linear"]),
        ({**LINEAR, "roles": {"linear", "decode"}}, ["decode", "only linear kinds"]),
        ({**CPU, "min_sm": 90}, ["SM", "cpu"]),
        ({**CPU, "max_sm": 90}, ["SM", "cpu"]),
        ({**CUDA, "min_sm": 100, "max_sm": 90}, ["100", "90"]),
        ({**CPU, "cuda_graph": GraphLevel.DECODE}, ["DECODE", "cpu"]),
        ({**CPU, "page_sizes": PageSizes.of(1 << 17, 16)}, ["[16, 131072]"]),
        ({**CPU, "page_sizes": PageSizes.of()}, ["page_sizes"]),
        ({**CPU, "mla_dims": {(512, 64)}}, ["mla_dims", "mha"]),
        ({**CPU, "kinds": {"mla"}, "head_dims": {(64, 64)}}, ["head_dims", "mla"]),
        ({**CPU, "max_heads": 0}, ["max_heads 0"]),
        ({**CPU, "kv_dtypes": {"float16"}, "kv_matches_dtype": True}, ["kv_matches_dtype", "float16"]),
        ({**CPU, "max_speculative_tokens": -1}, ["max_speculative_tokens", "-1"]),
        ({**CPU, "roles": {"prefill", "draft"}}, ["draft", "max_speculative_tokens"]),
        ({**CPU, "trees": True}, ["trees", "max_speculative_tokens"]),
    ],
)
def test_a_capability_that_contradicts_itself_is_reported(
    install: Install, only_fault: Callable[[EntryPoint], Broken], capabilities: dict[str, Any], needs: list[str]
) -> None:
    """D2"""

    @hookimpl
    def attnplug_backends() -> list[BackendSpec]:
        return [spec("torn", capabilities=Capabilities(**capabilities))]

    error = only_fault(install(module(attnplug_backends=attnplug_backends))).error
    assert "'torn'" in error
    for text in needs:
        assert text in error


def test_every_contradiction_is_reported_at_once() -> None:
    torn = Capabilities(kinds=(), devices={"tpu"}, dtypes=(), min_sm=9, max_speculative_tokens=-1)
    with pytest.raises(PluginError) as caught:
        spec(capabilities=torn)
    for text in ("kinds", "tpu", "dtypes", "SM", "max_speculative_tokens"):
        assert text in str(caught.value)


def test_a_contradiction_leads_to_the_hook(install: Install, only_fault: Callable[[EntryPoint], Broken]) -> None:
    @hookimpl
    def attnplug_backends() -> list[BackendSpec]:
        return [spec(capabilities=Capabilities(**{**CPU, "min_sm": 90}))]

    assert place(attnplug_backends) in only_fault(install(module(attnplug_backends=attnplug_backends))).error


def test_capabilities_without_contradiction_are_accepted() -> None:
    everything = Capabilities(
        kinds=set(AttentionKind),
        devices={"cpu", "cuda"},
        dtypes=set(DType),
        roles=set(Role),
        min_sm=80,
        max_sm=80,
        page_sizes=PageSizes.of(1),
        head_dims={(64, 64)},
        mla_dims={(512, 64)},
        max_speculative_tokens=1,
        cuda_graph=GraphLevel.ALWAYS,
    )
    assert list(everything.contradictions()) == []


# ---- page sizes and claims ----


@given(page_sizes, page_sizes, st.integers(1, 1024))
def test_the_intersection_serves_what_both_serve(
    mine: frozenset[int] | None, theirs: frozenset[int] | None, page_size: int
) -> None:
    """A9"""
    both = PageSizes(mine).intersection(PageSizes(theirs))
    served = PageSizes(mine).kernel_size(page_size) is not None and PageSizes(theirs).kernel_size(page_size) is not None
    assert (both.kernel_size(page_size) is not None) == served


def test_the_largest_kernel_page_is_taken() -> None:
    assert PageSizes.of(16, 32, 64).kernel_size(96) == 32
    assert PageSizes.of(64).kernel_size(32) is None
    assert PageSizes().kernel_size(7) == 7


def test_page_sizes_read_as_a_sentence() -> None:
    assert str(PageSizes()) == "any"
    assert str(PageSizes.of(64, 32, 96)) == "a multiple of 32"
    assert str(PageSizes.of(32, 48)) == "a multiple of 32 or a multiple of 48"
    assert str(PageSizes.of(1, 64)) == "any"


def test_every_extra_that_a_caller_may_ask_for_may_be_declared() -> None:
    assert not list(replace(EVERYTHING, extras=frozenset(ForwardExtras.__slots__)).contradictions())


def test_the_weaker_claim_is_taken_and_its_child_named() -> None:
    """A9"""
    strong = Claims(
        cuda_graph=GraphLevel.ALWAYS,
        page_sizes=PageSizes(),
        needs_cpu_seq_lens=False,
        extras={"lse", "sinks"},
        trees=True,
        ragged_graphs=True,
    )
    weak = Claims(cuda_graph=GraphLevel.DECODE, page_sizes=PageSizes.of(64), needs_cpu_seq_lens=True, extras={"lse"})
    combined = weakest({"strong": strong, "weak": weak})
    assert combined.claims == weak
    assert combined.limited_by == {
        "cuda_graph": ("weak",),
        "page_sizes": ("weak",),
        "needs_cpu_seq_lens": ("weak",),
        "extras": ("weak",),
        "trees": ("weak",),
        "ragged_graphs": ("weak",),
    }


def test_claims_on_which_all_agree_have_no_limiting_backend() -> None:
    """A9"""
    assert weakest({"one": Claims(), "other": Claims()}).limited_by == {}


def test_page_sizes_that_two_force_together_name_both() -> None:
    """A9"""
    combined = weakest({"a": Claims(page_sizes=PageSizes.of(32)), "b": Claims(page_sizes=PageSizes.of(48))})
    assert combined.claims.page_sizes == PageSizes.of(96)
    assert combined.limited_by == {"page_sizes": ("a", "b")}
