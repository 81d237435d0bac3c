"""Refusals of a spec by its claims: every code, every reason at once, and never an exception."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug import CacheLayout, Capabilities, DType, Feature, GraphLevel, PageSizes, Problem, RefusalCode, Role
from attnplug.sparse import IndexerDims
from attnplug_testing.specs import GDN, MHA, MLA, claiming, model, page_sizes, sizes, spec

# ---- each code, from real data ----


@pytest.mark.parametrize(
    ("claims", "problem", "role", "expected"),
    [
        (
            {"roles": {"prefill", "decode", "linear"}},
            Problem(model(MHA), speculative_tokens=4),
            Role.DRAFT,
            ("role", "draft", ["decode", "linear", "prefill"], "draft_attention_backend"),
        ),
        (
            {"kinds": {"mha", "gdn"}},
            Problem(model(MLA)),
            Role.PREFILL,
            ("kind", "mla", ["gdn", "mha"], "prefill_attention_backend"),
        ),
        (
            {"kinds": {"mha", "mamba2"}},
            Problem(model(GDN)),
            Role.LINEAR,
            ("kind", "gdn", ["mamba2", "mha"], "linear_attention_backend"),
        ),
        (
            {"features": {"logit_cap"}},
            Problem(model(replace(MHA, sliding_window=128))),
            Role.DECODE,
            ("feature", "sliding_window", ["logit_cap"], "decode_attention_backend"),
        ),
        (
            {"features": ()},
            Problem(model(replace(MLA, indexer=IndexerDims(4, 64, 2048)))),
            Role.DECODE,
            ("feature", "sparse", [], "decode_attention_backend"),
        ),
        (
            {"devices": {"cuda"}},
            Problem(device="cpu"),
            None,
            ("device", "cpu", ["cuda"], "device"),
        ),
        (
            {"min_sm": 100},
            Problem(device="cuda", sm=90),
            None,
            ("sm", 90, "SM 100 or newer", None),
        ),
        (
            {"max_sm": 90},
            Problem(device="cuda", sm=100),
            None,
            ("sm", 100, "SM 90 or older", None),
        ),
        (
            {"min_sm": 90, "max_sm": 90},
            Problem(device="cuda", sm=89),
            None,
            ("sm", 89, "SM 90", None),
        ),
        (
            {"min_sm": 80, "max_sm": 90},
            Problem(device="cuda", sm=100),
            None,
            ("sm", 100, "SM 80 to 90", None),
        ),
        (
            {"dtypes": {"bfloat16", "float16"}},
            Problem(dtype=DType.FLOAT32),
            None,
            ("dtype", "float32", ["bfloat16", "float16"], "dtype"),
        ),
        (
            {"kv_dtypes": {"float8_e4m3fn"}},
            Problem(kv_dtype=DType.BFLOAT16),
            None,
            ("kv_dtype", "bfloat16", ["float8_e4m3fn"], "kv_dtype"),
        ),
        (
            {"kv_dtypes": {"bfloat16", "acme_int4"}},
            Problem(kv_dtype="acme_int8"),
            None,
            ("kv_dtype", "acme_int8", ["acme_int4", "bfloat16"], "kv_dtype"),
        ),
        (
            {"features": {"sparse"}, "index_dtypes": {"bfloat16"}},
            Problem(model(replace(MLA, indexer=IndexerDims(4, 64, 2048))), index_dtype=DType.FLOAT8_E4M3),
            Role.DECODE,
            ("index_dtype", "float8_e4m3fn", ["bfloat16"], "index_dtype"),
        ),
        (
            {"page_sizes": PageSizes.of(32, 64)},
            Problem(page_size=16),
            None,
            ("page_size", 16, [32, 64], "page_size"),
        ),
        (
            {"head_dims": {(128, 128), (192, 128)}},
            Problem(model(MHA)),
            Role.PREFILL,
            ("head_dim", [64, 64], [[128, 128], [192, 128]], "prefill_attention_backend"),
        ),
        (
            {"mla_dims": {(256, 64)}},
            Problem(model(MLA)),
            Role.PREFILL,
            ("mla_dims", [512, 64], [[256, 64]], "prefill_attention_backend"),
        ),
        (
            {"max_speculative_tokens": 3},
            Problem(speculative_tokens=4),
            None,
            ("speculation", 4, 3, "speculative_tokens"),
        ),
        (
            {"trees": False},
            Problem(speculative_topk=2),
            None,
            ("speculation", 2, 1, "speculative_topk"),
        ),
        (
            {"features": {"sliding_window"}},
            Problem(model(replace(MHA, sliding_window=7)), speculative_topk=4),
            Role.DECODE,
            ("feature", 4, 1, "speculative_topk"),
        ),
        (
            {"cuda_graph": GraphLevel.DECODE},
            Problem(cuda_graph=GraphLevel.ALWAYS),
            None,
            ("cuda_graph", "ALWAYS", ["NEVER", "DECODE"], "cuda_graph"),
        ),
        (
            {},
            Problem(model(MHA), tensor_parallel=3),
            Role.PREFILL,
            ("tensor_parallel", 3, [1, 2, 4, 8], "tensor_parallel"),
        ),
        (
            {"max_heads": 3},
            Problem(model(MHA), tensor_parallel=2),
            Role.PREFILL,
            ("heads", 4, 3, "tensor_parallel"),
        ),
        (
            {"layers_alike": True},
            Problem(model(MLA, replace(MLA, num_heads=8, scale=0.5)), tensor_parallel=2),
            Role.DECODE,
            ("layers", {"num_heads": [8, 4], "scale": [0.07, 0.5]}, None, None),
        ),
        (
            {"kv_matches_dtype": True, "dtypes": {"bfloat16", "float16"}, "kv_dtypes": {"bfloat16", "float16"}},
            Problem(dtype=DType.BFLOAT16, kv_dtype=DType.FLOAT16),
            None,
            ("kv_dtype", "float16", ["bfloat16"], "kv_dtype"),
        ),
        ({}, Problem(exact_lengths=False), None, ("lengths", False, True, "exact_lengths")),
        (
            {"layouts": ["token_major", "head_major"]},
            Problem(layout=CacheLayout.STRIDED),
            None,
            ("layout", "strided", ["head_major", "token_major"], "layout"),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_a_refusal_has_code_value_allowed_and_setting(
    claims: dict[str, Any], problem: Problem, role: Role | None, expected: tuple[object, ...]
) -> None:
    """D3: a refusal has one reason, the offending value, the allowed ones and the setting to change, if there is
    one."""
    (refusal,) = claiming(**claims).refusals(problem, role)
    assert (refusal.code, refusal.value, refusal.allowed, refusal.setting) == expected
    assert (refusal.setting or refusal.message) in str(refusal)
    assert json.loads(json.dumps(refusal.as_json()))["code"] == expected[0]


def test_what_the_claims_meet_is_not_refused() -> None:
    """D3: bounds are inclusive, a larger page divides, a higher graph level includes the lower."""
    careful = claiming(
        min_sm=90,
        max_sm=100,
        page_sizes=PageSizes.of(64),
        head_dims={(64, 64)},
        max_heads=8,
        layers_alike=True,
        kv_matches_dtype=True,
        max_speculative_tokens=4,
        cuda_graph=GraphLevel.UNIFORM,
    )
    for sm in (90, 100):
        problem = Problem(model(MHA), "cuda", sm, DType.BFLOAT16, DType.BFLOAT16, 128, GraphLevel.DECODE, 4, 8)
        assert careful.refusals(problem, Role.PREFILL) == []


def test_what_is_not_decided_is_no_reason_to_refuse() -> None:
    """D3"""
    narrow = Capabilities({"mla"}, {"cuda"}, {"bfloat16"}, min_sm=100, page_sizes=PageSizes.of(64))
    assert spec(narrow).refusals(Problem()) == []
    assert spec(narrow).refusals(Problem(), Role.PREFILL) == []


def test_an_sm_is_no_reason_on_a_cpu() -> None:
    assert claiming(min_sm=100).refusals(Problem(device="cpu", sm=None)) == []
    assert claiming(min_sm=100).refusals(Problem(device="cpu", sm=90)) == []


def test_a_backend_that_only_prefills_takes_no_part_in_captured_decodes() -> None:
    """D3: it is not refused for graphs of decodes, but for those of verifies or of all batches."""
    eager = claiming(cuda_graph=GraphLevel.NEVER)
    for level, refused in ((GraphLevel.DECODE, False), (GraphLevel.UNIFORM, True), (GraphLevel.ALWAYS, True)):
        problem = Problem(device="cuda", cuda_graph=level)
        for role, expected in ((Role.PREFILL, refused), (Role.DECODE, True), (Role.LINEAR, True), (None, True)):
            codes = [refusal.code for refusal in eager.refusals(problem, role)]
            assert (RefusalCode.CUDA_GRAPH in codes) is expected, (level, role)


def test_every_reason_is_given_at_once() -> None:
    """D3: not only the first."""
    narrow = Capabilities(
        kinds={"mha"},
        devices={"cuda"},
        dtypes={"bfloat16"},
        roles={"decode"},
        page_sizes=PageSizes.of(64),
        head_dims={(128, 128)},
    )
    window = replace(MHA, sliding_window=8, logit_cap=30.0)
    problem = Problem(
        model(window), "cpu", None, DType.FLOAT32, DType.FLOAT8_E4M3, 16, GraphLevel.UNIFORM, 2, tensor_parallel=3
    )
    found = spec(narrow, requires=["no-such-distribution>=1"]).refusals(problem, Role.PREFILL)
    assert sorted(refusal.code for refusal in found) == sorted(
        [
            RefusalCode.REQUIREMENT,
            RefusalCode.DEVICE,
            RefusalCode.DTYPE,
            RefusalCode.KV_DTYPE,
            RefusalCode.PAGE_SIZE,
            RefusalCode.CUDA_GRAPH,
            RefusalCode.SPECULATION,
            RefusalCode.ROLE,
            RefusalCode.FEATURE,
            RefusalCode.FEATURE,
            RefusalCode.HEAD_DIM,
            RefusalCode.TENSOR_PARALLEL,
        ]
    )
    json.dumps([refusal.as_json() for refusal in found])


def test_a_kind_that_is_not_claimed_hides_no_other_reason() -> None:
    """D3: all reasons are given at once. Otherwise, a user who changes only the backend would fail next on the number
    of ranks."""
    found = claiming(kinds={"mha", "gdn"}).refusals(Problem(model(MLA), tensor_parallel=3), Role.PREFILL)
    assert {refusal.code for refusal in found} == {RefusalCode.KIND, RefusalCode.TENSOR_PARALLEL}


def test_an_fp8_cache_need_not_have_the_activations_type() -> None:
    """D3: an fp8 cache is always accepted, and is among the types offered if the requested one does not match."""
    matching = claiming(kv_matches_dtype=True, dtypes={"bfloat16", "float16"}, kv_dtypes={*DType, "acme_int4"})
    assert matching.refusals(Problem(dtype=DType.BFLOAT16, kv_dtype=DType.FLOAT8_E4M3)) == []
    (refusal,) = matching.refusals(Problem(dtype=DType.BFLOAT16, kv_dtype=DType.FLOAT32))
    assert refusal.allowed == ["acme_int4", "bfloat16", "float8_e4m3fn"]


def test_a_type_that_is_not_claimed_is_one_reason() -> None:
    """D3: a mismatch with the other type is not reported as well, since its advice would be wrong."""
    sixteen_bits = {"bfloat16", "float16"}
    matching = claiming(kv_matches_dtype=True, dtypes=sixteen_bits, kv_dtypes=sixteen_bits)
    for lacking in ("dtype", "kv_dtype"):
        types = {"dtype": DType.FLOAT16, "kv_dtype": DType.FLOAT16, lacking: DType.FLOAT32}
        (refusal,) = matching.refusals(Problem(**types))
        assert (refusal.code, refusal.allowed) == (lacking, sorted(sixteen_bits))


def test_layers_that_differ_are_described_by_the_difference() -> None:
    """D3: the message lists every property that plans may depend on, but no layer ids. Layers of kinds that the backend
    does not claim are not compared."""
    alike = claiming(kinds={"mla"}, roles={"decode"}, layers_alike=True, max_heads=16)
    windowed = replace(MLA, sliding_window=128, mla=replace(MLA.mla, qk_nope_head_dim=64))
    (refusal,) = alike.refusals(Problem(model(MLA, windowed)), Role.DECODE)
    printed = "one plan serves all layers, but they differ: sliding_window None, 128; qk_nope_head_dim 128, 64"
    assert refusal.message == printed
    with_others = Problem(model(MLA, GDN, replace(MHA, num_heads=32), MLA))
    assert {refusal.code for refusal in alike.refusals(with_others, Role.DECODE)} == {RefusalCode.KIND}


def test_layers_of_one_shape_give_one_reason() -> None:
    """D3"""
    found = claiming(kinds={"mha", "gdn"}).refusals(Problem(model(MLA, MLA, MLA)), Role.PREFILL)
    assert len(found) == 1


def test_head_dims_are_of_keys_and_values() -> None:
    wide = replace(MHA, head_dim=64, v_head_dim=128)
    assert [r.value for r in claiming(head_dims={(64, 64)}).refusals(Problem(model(MHA, wide)), Role.PREFILL)] == [
        [64, 128]
    ]


def test_head_dims_are_no_limit_of_mla_layers() -> None:
    """MLA layers have other dimensions."""
    assert claiming(head_dims={(64, 64)}).refusals(Problem(model(MHA, MLA)), Role.PREFILL) == []


def test_mla_layers_with_other_kv_heads_are_alike() -> None:
    """A latent row has no heads."""
    other = replace(MLA, num_kv_heads=1)
    assert claiming(layers_alike=True).refusals(Problem(model(MLA, other)), Role.DECODE) == []


def test_layers_of_different_shapes_give_a_reason_each() -> None:
    """D3"""
    wide = replace(MHA, head_dim=256, v_head_dim=256)
    found = claiming(head_dims={(128, 128)}).refusals(Problem(model(MHA, wide, MHA)), Role.PREFILL)
    assert [refusal.value for refusal in found] == [[64, 64], [256, 256]]


def test_a_role_is_checked_against_its_own_layers() -> None:
    """D3: full attention by MHA and MLA layers, linear attention by the others."""
    full = claiming(kinds={"mha"}, roles={"prefill", "decode"})
    hybrid = Problem(model(MHA, GDN))
    assert full.refusals(hybrid, Role.PREFILL) == []
    assert {refusal.code for refusal in full.refusals(hybrid, Role.LINEAR)} == {RefusalCode.ROLE, RefusalCode.KIND}


def test_without_a_role_layers_are_not_checked() -> None:
    assert claiming(kinds={"mha", "gdn"}).refusals(Problem(model(MLA))) == []


# ---- properties ----


layers = st.sampled_from(
    [
        MHA,
        MLA,
        GDN,
        replace(MHA, sliding_window=4, sinks=True),
        replace(MLA, logit_cap=1.0, indexer=IndexerDims(4, 64, 64)),
    ]
)
models = st.none() | st.lists(layers, min_size=1, max_size=4).map(lambda chosen: model(*chosen))


def problems(ranks: st.SearchStrategy[int]) -> st.SearchStrategy[Problem]:
    return st.builds(
        Problem,
        model=models,
        device=st.none() | st.sampled_from(["cpu", "cuda", "tpu", ""]),
        sm=st.none() | st.integers(10, 999),
        dtype=st.none() | st.sampled_from(DType),
        kv_dtype=st.none() | st.sampled_from(DType),
        page_size=st.none() | st.integers(1, 1 << 16),
        cuda_graph=st.sampled_from(GraphLevel),
        speculative_tokens=st.integers(0, 100),
        tensor_parallel=ranks,
    )


def subsets(members: Iterable[Any]) -> st.SearchStrategy[frozenset[Any]]:
    return st.frozensets(st.sampled_from(list(members)))


@st.composite
def narrowed(draw: st.DrawFn) -> Capabilities:
    """Capabilities of all sorts that do not contradict themselves."""
    full = draw(st.sampled_from([{"mha"}, {"mla"}, {"mha", "mla"}]))
    linear = draw(subsets(["gdn", "kda", "lightning", "mamba2", "short_conv"]))
    low, high = sorted([draw(st.integers(10, 200)), draw(st.integers(10, 200))])
    dims = st.none() | st.frozensets(st.tuples(sizes, sizes), min_size=1)
    return Capabilities(
        kinds=full | linear,
        devices=draw(st.sampled_from([{"cuda"}, {"cpu", "cuda"}])),
        dtypes=draw(st.frozensets(st.sampled_from(DType), min_size=1)),
        kv_dtypes=draw(subsets(DType)),
        roles=draw(st.frozensets(st.sampled_from(["prefill", "decode", "draft"]), min_size=1))
        | ({"linear"} if linear else set()),
        min_sm=draw(st.sampled_from([None, low])),
        max_sm=draw(st.sampled_from([None, high])),
        page_sizes=PageSizes(draw(page_sizes)),
        head_dims=draw(dims) if "mha" in full else None,
        mla_dims=draw(dims) if "mla" in full else None,
        features=draw(subsets(Feature)),
        max_heads=draw(st.none() | st.integers(1, 16)),
        layers_alike=draw(st.booleans()),
        max_speculative_tokens=draw(st.integers(1, 10)),
        cuda_graph=draw(st.sampled_from(GraphLevel)),
    )


@given(narrowed(), problems(st.integers(1, 9)), st.none() | st.sampled_from(Role))
def test_refusals_never_raise_and_always_survive_json(can: Capabilities, problem: Problem, role: Role | None) -> None:
    """D3"""
    for refusal in spec(can, requires=["no-such-distribution"]).refusals(problem, role):
        assert json.loads(json.dumps(refusal.as_json()))["message"]


@given(problems(st.sampled_from([1, 2, 4])), st.none() | st.sampled_from(Role))
def test_a_spec_that_claims_everything_refuses_nothing(problem: Problem, role: Role | None) -> None:
    """D3: a spec with every claim accepts all problems that a user can pose here."""
    if problem.device in ("tpu", ""):
        problem = replace(problem, device="cpu")
    assert spec().refusals(problem, role) == []


@given(narrowed(), problems(st.integers(1, 9)), st.none() | st.sampled_from(Role))
def test_refusals_are_the_same_each_time(can: Capabilities, problem: Problem, role: Role | None) -> None:
    assert spec(can).refusals(problem, role) == spec(can).refusals(problem, role)
