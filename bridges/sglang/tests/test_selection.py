"""Selection by SGLang's arguments, and refusals in its option names. Arguments are stand-ins for ``ServerArgs``."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnplug import (
    BackendError,
    CacheLayout,
    DType,
    Feature,
    GraphLevel,
    Problem,
    RefusalCode,
    Role,
    Setting,
    UsageError,
)
from attnplug.declare.errors import PluginWarning
from attnplug.host import TINY_CONFIGS, BuildError, Registry, Selection, SelectionError, load_model, load_registry
from attnplug.registry.hosts import load_host
from attnplug_sglang.host import HOST, OPTIONS, Refused, fit, given_options, render
from attnplug_sglang.selection import choose, choose_and_build, decode_graphs, served_roles, unsupported
from attnplug_sglang.server_args import check_server_args
from attnplug_testing.claiming import registry_claiming
from attnplug_testing.errors import having, missing_values, naming
from attnplug_testing.measured import measured_twins
from attnplug_testing.specs import GDN, MHA, model

LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def arguments(folder: str, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "model_path": folder,
        "attention_backend": "attnplug:torch_native",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_dtype": "auto",
        "page_size": 1,
        "tp_size": 1,
        "speculative_algorithm": None,
        "speculative_num_draft_tokens": None,
        "speculative_attention_mode": "prefill",
        "speculative_eagle_topk": None,
        "speculative_draft_attention_backend": None,
        "cuda_graph_config": None,
        "enable_deterministic_inference": False,
    }
    return SimpleNamespace(**{**values, **changes})


def test_the_host_is_declared_and_loads_without_torch_and_sglang() -> None:
    found, _ = load_host("sglang")
    assert found is HOST
    code = "import sys, attnplug_sglang.host; sys.exit('torch' in sys.modules or 'sglang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sglang_calls_the_plugin_by_an_entry_point() -> None:
    from importlib.metadata import entry_points

    (found,) = entry_points(group="sglang.srt.plugins", name="attnplug")
    assert found.load().__name__ == "register"


def test_the_problem_is_as_sglang_poses_it() -> None:
    fitted = fit(Problem(device="cuda", speculative_tokens=4))
    assert fitted.page_size == 1
    assert fitted.layout is CacheLayout.TOKEN_MAJOR
    assert fitted.cuda_graph is GraphLevel.UNIFORM
    assert not fitted.exact_lengths
    assert fit(fitted) == fitted
    assert fit(Problem(device="cpu", speculative_tokens=4)).exact_lengths, "SGLang does not schedule ahead on a CPU"


def test_refusals_are_in_sglangs_words(folder: str) -> None:
    """D3."""
    with pytest.raises(ValueError, check=naming("--dtype", "float64")):
        check_server_args(arguments(folder, dtype="float64"))
    with pytest.raises(Refused) as refused:
        check_server_args(arguments(folder, attention_backend="attnplug:triton_mla"))
    text = str(refused.value)
    assert text.startswith("attnplug:triton_mla: triton_mla")
    assert not missing_values(text, "--attention-backend", "--device")


def test_a_wrong_name_is_refused_in_the_front_end(folder: str) -> None:
    with pytest.raises(ValueError, check=naming("torch_natve", "torch_native")):
        check_server_args(arguments(folder, attention_backend="attnplug:torch_natve"))


def test_other_backends_are_sglangs_own_matter(folder: str) -> None:
    with pytest.raises(Refused):
        check_server_args(arguments(folder, speculative_algorithm="NGRAM"))
    assert check_server_args(arguments(folder, attention_backend="triton", speculative_algorithm="NGRAM")) is None


def test_a_model_that_is_not_here_is_left_to_the_scheduler() -> None:
    check_server_args(arguments("organisation/model"))
    with pytest.raises(ValueError, check=naming("nobody")):
        check_server_args(arguments("organisation/model", attention_backend="attnplug:nobody"))


def test_each_role_is_checked_by_itself(folder: str) -> None:
    """A backend that only decodes is chosen for decode, and prefill is left to the other one."""
    assert served_roles("a", "a", "b") == (Role.PREFILL,)
    assert served_roles("a", "a", "a") == (Role.PREFILL, Role.DECODE)
    problem = Problem(load_model(folder), device="cpu", dtype=DType.FLOAT32, page_size=1)
    selection = choose(load_registry(), "attnplug:auto", (Role.DECODE,), problem, verify=Role.DECODE, graphs=False)
    assert list(selection.choices) == [Role.DECODE]
    with pytest.raises(SelectionError) as refused:
        choose(load_registry(), "attnplug:triton_mla", (Role.DECODE,), problem, verify=Role.DECODE, graphs=False)
    assert refused.value.selection.choices[Role.DECODE].setting is Setting.DECODE_ATTENTION_BACKEND


@pytest.fixture
def measured(folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Registry, Problem]:
    """Two backends, each of which was measured the fastest for some batches of a model."""
    problem = Problem(load_model(folder), device="cpu", dtype=DType.FLOAT32, page_size=1)
    assert problem.model is not None
    return measured_twins(monkeypatch, tmp_path, problem.model.layers[0], DType.FLOAT32), problem


def test_auto_shares_a_role_between_the_backends_that_were_measured_the_fastest(
    measured: tuple[Registry, Problem],
) -> None:
    twins, problem = measured
    found = choose(twins, "attnplug:auto", (Role.DECODE,), problem, verify=Role.DECODE, graphs=False)
    assert [backend.spec.name for backend in found.serving(Role.DECODE)] == ["beta", "alpha"]


def test_auto_continues_without_a_backend_that_cannot_be_built(measured: tuple[Registry, Problem]) -> None:
    """D2: a backend that shares a role by batch does not end a start, such as one whose kernel library is broken."""
    twins, problem = measured

    def build(selection: Selection) -> list[str]:
        found = [backend.spec.name for backend in selection.serving(Role.DECODE)]
        if "alpha" in found:
            raise BuildError(twins.get("alpha"), BackendError("CUDA graph level DECODE is requested"))
        return found

    def built(name: str) -> list[str]:
        return choose_and_build(twins, name, (Role.DECODE,), problem, build, verify=Role.DECODE, graphs=False)

    with pytest.warns(PluginWarning, match="alpha .* CUDA graph level DECODE .* auto continues without it"):
        assert built("attnplug:auto") == ["beta"]
    with pytest.raises(BuildError):
        built("attnplug:alpha")


def test_graphs_are_demanded_unless_they_are_off(folder: str) -> None:
    problem = Problem(load_model(folder), device="cuda", sm=90, dtype=DType.BFLOAT16, page_size=1)
    roles = (Role.PREFILL, Role.DECODE)
    choose(load_registry(), "attnplug:torch_native", roles, problem, verify=Role.DECODE, graphs=False)
    with pytest.raises(SelectionError) as refused:
        choose(load_registry(), "attnplug:torch_native", roles, problem, verify=Role.DECODE, graphs=True)
    assert "--disable-cuda-graph" in refused.value.format(render)


@pytest.mark.parametrize(
    ("config", "disabled", "captured"),
    [
        (None, False, True),
        (None, True, False),
        (SimpleNamespace(decode=SimpleNamespace(backend="disabled")), False, False),
        ({"decode": {"backend": "full"}}, False, True),
    ],
)
def test_whether_decode_is_captured(config: Any, disabled: bool, captured: bool) -> None:
    assert decode_graphs(config, disabled) is captured


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-draft-attention-backend"),
        (
            {"speculative_algorithm": "EAGLE", "speculative_draft_attention_backend": "attnplug:auto"},
            "attnplug:auto",
        ),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"dllm_algorithm": "x"}, "--dllm-algorithm"),
        ({"dcp_size": 2}, "--dcp-size 2"),
        ({"attn_cp_size": 2}, "--attn-cp-size 2"),
        ({"enable_mis": True}, "--enable-mis"),
        ({"enable_hisparse": True}, "--enable-hisparse"),
        ({"enable_unified_memory": True}, "--enable-unified-memory"),
        ({"cuda_graph_config": {"prefill": {"backend": "full"}}}, "--cuda-graph-backend-prefill"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(folder: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, check=naming(named)):
        check_server_args(arguments(folder, **change))


CHAIN = {
    "speculative_algorithm": "EAGLE",
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 65,
    "speculative_draft_attention_backend": "triton",
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tp_size": 3}, "--tp-size"),
        (CHAIN, "--speculative-num-draft-tokens"),
        ({**CHAIN, "speculative_eagle_topk": 2}, "--speculative-eagle-topk 2"),
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            "--kv-cache-dtype fp8_e5m2 is not supported by attnplug's bridge, only auto, ",
        ),
        ({"attention_backend": None, "decode_attention_backend": "attnplug:nobody"}, "'nobody'"),
        ({"page_size": 1 << 40}, "--page-size"),
    ],
)
def test_arguments_of_the_server_are_checked(folder: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, check=naming(named)):
        check_server_args(arguments(folder, **change))


def test_heads_are_not_divided_where_attention_is_data_parallel(folder: str) -> None:
    with pytest.raises(Refused):
        check_server_args(arguments(folder, tp_size=3))
    assert check_server_args(arguments(folder, tp_size=3, enable_dp_attention=True)) is None


def test_a_model_of_linear_layers_alone_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnplug_sglang.server_args.load_model", lambda *_: model(GDN))
    with pytest.raises(Refused) as refused:
        check_server_args(arguments(folder))
    assert [(reason.code, reason.value) for reason in refused.value.refusals] == [(RefusalCode.KIND, "gdn")]


def test_linear_layers_and_drafts_are_left_to_sglang() -> None:
    fitted = fit(Problem(model(MHA, GDN), speculative_tokens=4))
    assert fitted.roles() == (Role.PREFILL, Role.DECODE)


def test_graphs_that_are_asked_for_are_not_taken_back() -> None:
    assert fit(Problem(device="cuda", cuda_graph=GraphLevel.ALWAYS)).cuda_graph is GraphLevel.ALWAYS


def test_drafts_are_verified_by_the_backend_of_the_role_that_is_named(folder: str) -> None:
    problem = Problem(load_model(folder), device="cpu", dtype=DType.FLOAT32, page_size=1)
    for role in (Role.PREFILL, Role.DECODE):
        roles = (Role.PREFILL, Role.DECODE)
        found = choose(load_registry(), "attnplug:torch_native", roles, problem, verify=role, graphs=False)
        assert found.verify is role


def test_options_of_backends_that_are_not_asked_for_are_left_alone(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OPTIONS, "flashinfer_mla.disable_ragged=true")
    assert check_server_args(arguments(folder)) is None


@pytest.mark.parametrize("topk", [1, 4])
def test_drafts_by_a_backend_of_sglangs_are_supported(folder: str, topk: int) -> None:
    given = arguments(folder, **{**CHAIN, "speculative_eagle_topk": topk, "speculative_num_draft_tokens": 8})
    assert list(unsupported(given)) == []
    assert check_server_args(given) is None


def test_trees_need_a_backend_that_verifies_them(folder: str) -> None:
    trees = {**CHAIN, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
    with pytest.raises(Refused, check=naming("chains", "--speculative-eagle-topk")):
        check_server_args(arguments(folder, attention_backend="attnplug:flashinfer", **trees))


def test_the_range_ends_with_what_was_read() -> None:
    versions = ["0.5.13", "0.5.14", "0.5.23", "0.5.24"]
    assert [HOST.version_refusal(version) is None for version in versions] == [False, True, True, False]


def test_a_version_outside_the_range_is_refused_with_the_range(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnplug.registry.hosts.installed_version", lambda name: "0.5.9")
    with pytest.raises(Refused) as refused:
        check_server_args(arguments(folder))
    assert [(reason.code, reason.value) for reason in refused.value.refusals] == [(RefusalCode.REQUIREMENT, "0.5.9")]


def test_options_come_from_the_environment(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS, "flashinfer_mla.disable_ragged=true a.b=1")
    assert given_options() == {"flashinfer_mla": {"disable_ragged": "true"}, "a": {"b": "1"}}
    with pytest.raises(ValueError, check=naming("'a'")):
        check_server_args(arguments(folder))
    monkeypatch.setenv(OPTIONS, "torch_native.speed=1")
    with pytest.raises(ValueError, check=naming("torch_native.speed", OPTIONS)):
        check_server_args(arguments(folder))
    with pytest.raises(UsageError, check=having("nonsense", settings=("backend_option",))):
        given_options({OPTIONS: "nonsense"})


def test_a_sparse_model_is_refused_whatever_the_backend_claims(folder) -> None:
    """A10: SGLang's indexer would not find a backend, so its layers would get no selection."""
    config = {**TINY_CONFIGS["deepseek_v32"], "num_hidden_layers": 1}
    (Path(folder) / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused) as refused:
        check_server_args(arguments(folder))
    assert [(reason.code, reason.value) for reason in refused.value.refusals] == [(RefusalCode.FEATURE, Feature.SPARSE)]


def test_a_kv_format_that_sglang_has_no_pages_for_is_refused() -> None:
    """E2"""
    (reason,) = HOST.refusals(Problem(model(MHA), kv_dtype="acme_int4"))
    assert (reason.code, reason.value, reason.setting) == ("kv_dtype", "acme_int4", "kv_dtype")
    assert not HOST.refusals(Problem(model(MHA), kv_dtype=DType.FLOAT8_E4M3))


@pytest.mark.parametrize("claimed", [(), ("run", "graph"), ("run", "batch", "graph")])
def test_deterministic_inference_needs_a_backend_that_claims_it(folder, monkeypatch, claimed):
    """E3"""
    claiming = registry_claiming("torch_native", claimed)
    monkeypatch.setattr("attnplug_sglang.server_args.load_registry", lambda: claiming)
    given = arguments(folder, enable_deterministic_inference=True)
    refused = pytest.raises(Refused, check=naming("batch", "--enable-deterministic-inference"))
    with nullcontext() if "batch" in claimed else refused:
        check_server_args(given)
    check_server_args(arguments(folder))
