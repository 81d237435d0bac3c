"""What a spec claims and what it therefore refuses: every code, every reason at once, and never an exception."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug import (
    CONTRACT_VERSION,
    AttentionKind,
    BackendSpec,
    Capabilities,
    Claims,
    DType,
    Feature,
    GraphLevel,
    LayerSpec,
    LinearDims,
    MLADims,
    ModelSpec,
    PageSizes,
    PluginError,
    Problem,
    Refusal,
    RefusalCode,
    Role,
    UsageError,
)
from attnplug.claims import weakest
from attnplug.requirement import requirement_refusal

MHA = LayerSpec(0, AttentionKind.MHA, 8, 2, 64, 64, 0.125)
MLA = LayerSpec(0, AttentionKind.MLA, 16, 16, 192, 128, 0.07, mla=MLADims(512, 128, 64))
GDN = LayerSpec(0, AttentionKind.GDN, 4, 4, 16, 16, 0.25, linear=LinearDims(4, 2, 16, 16, 8, 4))

EVERYTHING = Capabilities(
    kinds=set(AttentionKind),
    devices={"cpu", "cuda"},
    dtypes=set(DType),
    roles=set(Role),
    features=set(Feature),
    max_speculative_tokens=1 << 40,
    cuda_graph=GraphLevel.ALWAYS,
)


def spec(capabilities: Capabilities = EVERYTHING, **changes: Any) -> BackendSpec:
    fields: dict[str, Any] = {
        "name": "fast",
        "summary": "a backend of a test",
        "contract": CONTRACT_VERSION,
        "factory": "nowhere:build",
    }
    return BackendSpec(**{**fields, "capabilities": capabilities, **changes})


def model(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec("m", "test", tuple(replace(layer, layer_id=i) for i, layer in enumerate(layers)), 4096)


def claiming(**less: Any) -> BackendSpec:
    """A spec that claims everything but for these."""
    return spec(replace(EVERYTHING, **less))


# ---- each code, from real data ----


@pytest.mark.parametrize(
    ("claims", "problem", "role", "expected"),
    [
        (
            {"roles": {"prefill", "decode", "linear"}},
            Problem(model(MHA), speculative_tokens=4),
            Role.DRAFT,
            ("role", "draft", ["decode", "linear", "prefill"], "--draft-attention-backend"),
        ),
        (
            {"kinds": {"mha", "gdn"}},
            Problem(model(MLA)),
            Role.PREFILL,
            ("kind", "mla", ["gdn", "mha"], "--prefill-attention-backend"),
        ),
        (
            {"kinds": {"mha", "mamba2"}},
            Problem(model(GDN)),
            Role.LINEAR,
            ("kind", "gdn", ["mamba2", "mha"], "--linear-attention-backend"),
        ),
        (
            {"features": {"logit_cap"}},
            Problem(model(replace(MHA, sliding_window=128))),
            Role.DECODE,
            ("feature", "sliding_window", ["logit_cap"], "--decode-attention-backend"),
        ),
        (
            {"features": ()},
            Problem(model(replace(MLA, sparse_topk=2048))),
            Role.DECODE,
            ("feature", "sparse", [], "--decode-attention-backend"),
        ),
        (
            {"devices": {"cuda"}},
            Problem(device="cpu"),
            None,
            ("device", "cpu", ["cuda"], "--device"),
        ),
        (
            {"min_sm": 100},
            Problem(device="cuda", sm=90),
            None,
            ("sm", 90, "SM 100 or newer", "--sm"),
        ),
        (
            {"max_sm": 90},
            Problem(device="cuda", sm=100),
            None,
            ("sm", 100, "SM 90 or older", "--sm"),
        ),
        (
            {"min_sm": 90, "max_sm": 90},
            Problem(device="cuda", sm=89),
            None,
            ("sm", 89, "SM 90", "--sm"),
        ),
        (
            {"min_sm": 80, "max_sm": 90},
            Problem(device="cuda", sm=100),
            None,
            ("sm", 100, "SM 80 to 90", "--sm"),
        ),
        (
            {"dtypes": {"bfloat16", "float16"}},
            Problem(dtype=DType.FLOAT32),
            None,
            ("dtype", "float32", ["bfloat16", "float16"], "--dtype"),
        ),
        (
            {"kv_dtypes": {"float8_e4m3fn"}},
            Problem(kv_dtype=DType.BFLOAT16),
            None,
            ("kv_dtype", "bfloat16", ["float8_e4m3fn"], "--kv-dtype"),
        ),
        (
            {"page_sizes": PageSizes.of(32, 64)},
            Problem(page_size=16),
            None,
            ("page_size", 16, [32, 64], "--page-size"),
        ),
        (
            {"head_dims": {(128, 128), (192, 128)}},
            Problem(model(MHA)),
            Role.PREFILL,
            ("head_dim", [64, 64], [[128, 128], [192, 128]], "--prefill-attention-backend"),
        ),
        (
            {"mla_dims": {(256, 64)}},
            Problem(model(MLA)),
            Role.PREFILL,
            ("mla_dims", [512, 64], [[256, 64]], "--prefill-attention-backend"),
        ),
        (
            {"max_speculative_tokens": 3},
            Problem(speculative_tokens=4),
            None,
            ("speculation", 4, 3, "--speculative-tokens"),
        ),
        (
            {"cuda_graph": GraphLevel.DECODE},
            Problem(cuda_graph=GraphLevel.ALWAYS),
            None,
            ("cuda_graph", "ALWAYS", ["NEVER", "DECODE"], "--cuda-graph"),
        ),
        (
            {},
            Problem(model(MHA), tensor_parallel=3),
            Role.PREFILL,
            ("tensor_parallel", 3, [1, 2, 4, 8], "--tensor-parallel"),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_a_refusal_has_code_value_allowed_and_option(
    claims: dict[str, Any], problem: Problem, role: Role | None, expected: tuple[object, ...]
) -> None:
    """D3: one reason, with the offending value, the allowed ones and the option to change."""
    (refusal,) = claiming(**claims).refusals(problem, role)
    assert (refusal.code, refusal.value, refusal.allowed, refusal.option) == expected
    assert str(refusal.option) in str(refusal)
    assert json.loads(json.dumps(refusal.as_json()))["code"] == expected[0]


def test_what_the_claims_meet_is_not_refused() -> None:
    """D3: bounds are inclusive, a larger page divides, a higher graph level includes the lower."""
    careful = claiming(
        min_sm=90,
        max_sm=100,
        page_sizes=PageSizes.of(64),
        head_dims={(64, 64)},
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
        model(window), "cpu", None, DType.FLOAT32, DType.FLOAT8_E4M3, 16, GraphLevel.DECODE, 2, tensor_parallel=3
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
    """D3: whoever changes the backend alone would meet the ranks next."""
    found = claiming(kinds={"mha", "gdn"}).refusals(Problem(model(MLA), tensor_parallel=3), Role.PREFILL)
    assert {refusal.code for refusal in found} == {RefusalCode.KIND, RefusalCode.TENSOR_PARALLEL}


def test_layers_of_one_shape_give_one_reason() -> None:
    """D3"""
    found = claiming(kinds={"mha", "gdn"}).refusals(Problem(model(MLA, MLA, MLA)), Role.PREFILL)
    assert len(found) == 1


def test_layers_of_different_shapes_give_a_reason_each() -> None:
    """D3"""
    wide = replace(MHA, head_dim=256, v_head_dim=256)
    found = claiming(head_dims={(128, 128)}).refusals(Problem(model(MHA, wide, MHA)), Role.PREFILL)
    assert [refusal.value for refusal in found] == [[64, 64], [256, 256]]


def test_a_role_is_judged_by_its_own_layers() -> None:
    """D3: full attention by MHA and MLA layers, linear attention by the others."""
    full = claiming(kinds={"mha"}, roles={"prefill", "decode"})
    hybrid = Problem(model(MHA, GDN))
    assert full.refusals(hybrid, Role.PREFILL) == []
    assert {refusal.code for refusal in full.refusals(hybrid, Role.LINEAR)} == {RefusalCode.ROLE, RefusalCode.KIND}


def test_without_a_role_layers_are_not_judged() -> None:
    assert claiming(kinds={"mha", "gdn"}).refusals(Problem(model(MLA))) == []


# ---- requirements ----


def test_a_distribution_that_is_missing_is_a_refusal() -> None:
    """D3"""
    (refusal,) = spec(requires=["no-such-distribution>=1.2"]).refusals(Problem())
    assert refusal.code == RefusalCode.REQUIREMENT
    assert (refusal.value, refusal.allowed) == (None, ">=1.2")
    assert refusal.option == "pip install 'no-such-distribution>=1.2'"
    json.dumps(refusal.as_json())


def test_a_distribution_that_is_too_old_is_a_refusal_with_its_version() -> None:
    """D3"""
    (refusal,) = spec(requires=["pluggy>=999"]).refusals(Problem())
    assert (refusal.code, refusal.value) == (RefusalCode.REQUIREMENT, metadata.version("pluggy"))


def test_every_missing_distribution_is_a_refusal() -> None:
    """D3"""
    assert len(spec(requires=["no-such-one", "pluggy", "no-such-two"]).refusals(Problem())) == 2


@pytest.mark.parametrize("requirement", ["pluggy", "Pluggy>=1", "no-such-one; sys_platform == 'mars'", "pluggy[x]"])
def test_a_requirement_that_is_met_or_not_meant_is_none(requirement: str) -> None:
    assert requirement_refusal(requirement) is None


def test_a_prerelease_that_is_installed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.7.0rc1")
    assert requirement_refusal("flashinfer-python>=0.6") is None


@pytest.mark.parametrize("version", ["not-a-version", "1.0-custom_build_x!", ""])
def test_an_installed_version_that_is_none_is_a_refusal(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """D2: local builds of kernel libraries carry such versions; one must not take all candidates with it."""
    monkeypatch.setattr(metadata, "version", lambda name: version)
    (refusal,) = spec(requires=["flash-attn>=2.8"]).refusals(Problem())
    assert (refusal.code, refusal.value) == (RefusalCode.REQUIREMENT, version)


def test_the_advice_keeps_the_extras() -> None:
    """What it says to install must be what is asked for."""
    refusal = requirement_refusal("no-such-one[cu13]>=2")
    assert refusal is not None
    assert refusal.option == "pip install 'no-such-one[cu13]>=2'"


# ---- the plugin's own check ----


def own(check: Callable[..., Any], problem: Problem = Problem(), role: Role | None = Role.PREFILL) -> list[Refusal]:
    return spec(check=check).refusals(problem, role)


def test_a_check_adds_its_own_refusals() -> None:
    reason = Refusal("odd_heads", "an even number of heads is needed", 7, "even", "--tensor-parallel")
    assert own(lambda problem, role: [reason]) == [reason]


def test_a_check_may_be_a_generator_that_gives_nothing() -> None:
    def check(problem: Problem, role: Role | None) -> Iterable[Refusal]:
        yield from ()

    assert own(check) == []


def test_a_check_sees_the_problem_and_the_role() -> None:
    seen = []

    def check(problem: Problem, role: Role | None) -> Iterable[Refusal]:
        seen.append((problem, role))
        return ()

    problem = Problem(device="cpu")
    own(check, problem, Role.DRAFT)
    own(check, problem, None)
    assert seen == [(problem, Role.DRAFT), (problem, None)]


def test_a_check_does_not_hide_what_the_capabilities_refuse() -> None:
    """D3"""
    reason = Refusal("own", "own")
    found = spec(replace(EVERYTHING, devices={"cuda"}), check=lambda problem, role: [reason]).refusals(
        Problem(device="cpu")
    )
    assert [refusal.code for refusal in found] == [RefusalCode.DEVICE, "own"]


@pytest.mark.parametrize("error", [ValueError("bad day"), KeyError("k"), AssertionError(), SystemExit(0)])
def test_a_check_that_raises_is_a_refusal(error: BaseException) -> None:
    """D2: it must not take the other candidates with it, nor end the process."""

    def check(problem: Problem, role: Role | None) -> Iterable[Refusal]:
        raise error

    (refusal,) = own(check)
    assert (refusal.code, refusal.value) == (RefusalCode.CHECK_FAILED, type(error).__name__)
    assert str(error) in refusal.message


def test_a_check_that_raises_midway_is_a_refusal() -> None:
    """D2"""

    def check(problem: Problem, role: Role | None) -> Iterable[Refusal]:
        yield Refusal("own", "own")
        raise ValueError("midway")

    assert RefusalCode.CHECK_FAILED in {refusal.code for refusal in own(check)}


class _NoText:
    def __repr__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    "returned",
    [None, 7, True, "no", ["no"], [Refusal], [None], {"code": "x"}, [Refusal("own", "own"), "no"], [_NoText()]],
    ids=lambda value: type(value).__name__,
)
def test_a_check_that_returns_garbage_is_a_refusal(returned: Any) -> None:
    """D2"""
    (refusal,) = own(lambda problem, role: returned)
    assert refusal.code == RefusalCode.CHECK_FAILED
    json.dumps(refusal.as_json())


def test_a_check_that_returns_none_is_told_what_to_return() -> None:
    """The likeliest mistake: a function that falls off its end where all is well."""
    (refusal,) = own(lambda problem, role: None)
    assert "None" in refusal.message
    assert "Refusal" in refusal.message


def test_a_check_of_another_signature_is_a_refusal() -> None:
    """D2"""
    assert [refusal.code for refusal in own(lambda problem: [])] == [RefusalCode.CHECK_FAILED]


@pytest.mark.parametrize("value", [{1, 2}, object(), frozenset({64}), {(1, 2): 3}, b"x", math.nan, DType.FLOAT32])
def test_a_check_s_values_survive_json(value: object) -> None:
    """D2: one plugin's set must not take the whole report with it."""
    (refusal,) = own(lambda problem, role: [Refusal("own", "own", value=value, allowed=[value])])
    text = json.dumps(refusal.as_json())
    json.loads(text, parse_constant=pytest.fail)


def test_a_check_that_prints_does_not_reach_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output is for --json."""

    def check(problem: Problem, role: Role | None) -> Iterable[Refusal]:
        print("looking at the problem")
        return []

    assert own(check) == []
    assert capsys.readouterr().out == ""


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
        ({"check": 7}, "check"),
        ({"capabilities": {"kinds": ["mha"]}}, "capabilities"),
        ({"requires": "torch"}, "requires"),
        ({"requires": ["not a requirement!"]}, "not a requirement!"),
        ({"requires": [7]}, "7"),
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
        {"dtypes": {"int8"}},
        {"kv_dtypes": {"int8"}},
        {"roles": {"prefil"}},
        {"features": {"windows"}},
        {"min_sm": "90"},
        {"max_sm": "90"},
        {"min_sm": 9.0},
        {"page_sizes": {64}},
        {"page_sizes": 64},
        {"page_sizes": PageSizes.of("64")},  # type: ignore[arg-type]
        {"page_sizes": PageSizes(64)},  # type: ignore[arg-type]
        {"head_dims": {64}},
        {"head_dims": {(64,)}},
        {"head_dims": {(64, 64, 64)}},
        {"head_dims": {("64", "64")}},
        {"mla_dims": {512}},
        {"mla_dims": {(512,)}},
        {"max_speculative_tokens": "8"},
        {"max_speculative_tokens": None},
        {"extras": "lse"},
        {"needs_cpu_seq_lens": "no"},
    ],
    ids=str,
)
def test_a_capability_of_the_wrong_type_is_an_error_that_names_it(wrong: dict[str, Any]) -> None:
    """D2: what is wrong at load time must not raise in the middle of a choice."""
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


def test_capabilities_become_claims() -> None:
    """A9: what a spec says is what a backend claims."""
    sizes = PageSizes.of(64)
    capabilities = replace(EVERYTHING, page_sizes=sizes, needs_cpu_seq_lens=False, cuda_graph=GraphLevel.DECODE)
    assert capabilities.claims == Claims(GraphLevel.DECODE, sizes, False)


# ---- problems ----


@pytest.mark.parametrize(
    ("wrong", "option"),
    [
        ({"page_size": 0}, "--page-size 0"),
        ({"page_size": -16}, "--page-size -16"),
        ({"speculative_tokens": -1}, "--speculative-tokens -1"),
        ({"tensor_parallel": 0}, "--tensor-parallel 0"),
        ({"sm": 9}, "--sm 9"),
        ({"sm": 9000}, "--sm 9000"),
    ],
)
def test_a_number_out_of_range_is_an_error_with_its_option(wrong: dict[str, Any], option: str) -> None:
    with pytest.raises(UsageError) as caught:
        Problem(**wrong)
    assert option in str(caught.value)


@pytest.mark.parametrize(
    ("layers", "tokens", "roles"),
    [
        ((MHA,), 0, (Role.PREFILL, Role.DECODE)),
        ((GDN,), 0, (Role.LINEAR,)),
        ((MLA, GDN), 0, (Role.PREFILL, Role.DECODE, Role.LINEAR)),
        ((MLA,), 4, (Role.PREFILL, Role.DECODE, Role.DRAFT)),
    ],
)
def test_a_problem_needs_the_roles_of_its_layers(
    layers: tuple[LayerSpec, ...], tokens: int, roles: tuple[Role, ...]
) -> None:
    """D3"""
    assert Problem(model(*layers), speculative_tokens=tokens).roles() == roles


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("float32", DType.FLOAT32),
        ("torch.bfloat16", DType.BFLOAT16),
        ("BF16", DType.BFLOAT16),
        ("half", DType.FLOAT16),
        ("fp8", DType.FLOAT8_E4M3),
    ],
)
def test_usual_spellings_of_a_data_type_are_read(text: str, dtype: DType) -> None:
    assert DType.parse(text, "--dtype") is dtype


def test_an_unknown_data_type_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        DType.parse("int8", "--kv-dtype")
    assert "--kv-dtype" in str(caught.value) and "'int8'" in str(caught.value)
    assert all(dtype in str(caught.value) for dtype in DType)


# ---- properties ----

sizes = st.sampled_from([1, 2, 8, 16, 48, 64, 128])
page_sizes = st.none() | st.frozensets(sizes, min_size=1)
layers = st.sampled_from(
    [MHA, MLA, GDN, replace(MHA, sliding_window=4, sinks=True), replace(MLA, logit_cap=1.0, sparse_topk=64)]
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
    """D3: of what a user can ask for here."""
    if problem.device in ("tpu", ""):
        problem = replace(problem, device="cpu")
    assert spec().refusals(problem, role) == []


@given(narrowed(), problems(st.integers(1, 9)), st.none() | st.sampled_from(Role))
def test_refusals_are_the_same_each_time(can: Capabilities, problem: Problem, role: Role | None) -> None:
    assert spec(can).refusals(problem, role) == spec(can).refusals(problem, role)


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
    assert str(PageSizes.of(32, 64)) == "a multiple of 32 or a multiple of 64"
    assert str(PageSizes.of(1, 64)) == "any"


def test_the_weaker_claim_is_taken_and_its_child_named() -> None:
    """A9"""
    strong = Claims(GraphLevel.ALWAYS, PageSizes(), needs_cpu_seq_lens=False)
    weak = Claims(GraphLevel.DECODE, PageSizes.of(64), needs_cpu_seq_lens=True)
    combined = weakest({"strong": strong, "weak": weak})
    assert combined.claims == weak
    assert combined.forced_by == {
        "cuda_graph": ("weak",),
        "page_sizes": ("weak",),
        "needs_cpu_seq_lens": ("weak",),
    }


def test_claims_on_which_all_agree_are_forced_by_nobody() -> None:
    """A9"""
    assert weakest({"one": Claims(), "other": Claims()}).forced_by == {}


def test_page_sizes_that_two_force_together_name_both() -> None:
    """A9"""
    combined = weakest({"a": Claims(page_sizes=PageSizes.of(32)), "b": Claims(page_sizes=PageSizes.of(48))})
    assert combined.claims.page_sizes == PageSizes.of(96)
    assert combined.forced_by == {"page_sizes": ("a", "b")}
