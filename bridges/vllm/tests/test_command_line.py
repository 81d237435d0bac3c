"""Refusals of the command line, before vLLM starts a process."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

from attnplug import RefusalCode, Setting, UsageError
from attnplug.host import TINY_CONFIGS, load_registry
from attnplug_testing.claiming import registry_claiming
from attnplug_testing.errors import naming
from attnplug_vllm.command_line import (
    _problem,
    additional_config,
    check_command_line,
    options_of,
    requests_attnplug,
)
from attnplug_vllm.host import Feature
from vllm_stage import codes

TRITON = ("--attention-backend", "CUSTOM", "--additional-config.attnplug.backend", "triton_mha")
ASKED = ["--attention-backend", "CUSTOM", "--additional-config", '{"attnplug": {"backend": "torch_native"}}']


def check(*arguments: str, device: str = "cuda", sm: int | None = 90) -> None:
    argv = ["vllm", "serve", *arguments]
    if requests_attnplug(options_of(argv), custom_is_ours=True):
        check_command_line(argv, load_registry(), device, sm)


@pytest.fixture
def llama(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS["llama"]))
    return str(tmp_path)


def test_options_are_read_as_vllm_reads_them():
    argv = [
        "serve",
        "m",
        "--block_size=32",
        "--dtype",
        "half",
        "--enforce-eager",
        "--additional-config.attnplug.backend",
        "x",
    ]
    assert options_of(argv) == {
        "block-size": "32",
        "dtype": "half",
        "enforce-eager": "",
        "additional-config.attnplug.backend": "x",
    }
    assert additional_config(options_of(argv)) == {"attnplug": {"backend": "x"}}


def test_who_does_not_ask_for_attnplug_is_left_alone():
    assert check("m", "--additional-config", '{"other": 1}', "--block-size", "3") is None
    assert check("m", "--additional-config", "no json") is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], []),
        (["--attention-backend", "auto"], []),
        (["--attention-backend", "FLASH_ATTN"], ["FLASH_ATTN"]),
        (["-ac.backend", "flash_attn"], ["FLASH_ATTN"]),
        (["--attention-config", '{"flash_attn_version": 3}'], []),
    ],
)
def test_asking_without_custom_is_refused(arguments, named):
    with pytest.raises(UsageError, check=naming(*named, "--attention-backend CUSTOM")):
        check("m", *ASKED[2:], *arguments)


@pytest.mark.parametrize(
    "named",
    [
        ["--attention-config", '{"backend": "CUSTOM"}'],
        ["--attention-config.backend=custom"],
        ["-ac.backend", "CUSTOM"],
        ["--attention-config.backend_per_kind.full_attention", "CUSTOM"],
        ["--config", "no_file.yaml"],  # vLLM reports that
    ],
)
def test_custom_may_be_named_in_another_way(named):
    assert check("m", *ASKED[2:], *named) is None


def test_short_names_are_read():
    assert options_of(["-tp", "2", "-ac.backend=x"]) == {"tensor-parallel-size": "2", "attention-config.backend": "x"}


def test_a_wrong_name_is_refused_with_the_right_ones():
    with pytest.raises(UsageError, check=naming("torch_nativ", "torch_native")):
        check("m", "--attention-backend", "custom", "--additional-config.attnplug.backend", "torch_nativ")


def test_a_configuration_file_is_read_too(llama, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"model: {llama}\nattention-backend: CUSTOM\nkv_cache_dtype: fp8_e5m2\nenable-dbo: false\n"
        "additional-config:\n  attnplug:\n    backend: torch_native\n"
    )
    with pytest.raises(UsageError, check=naming("fp8_e5m2")):
        check("--config", str(file))
    check("--config", str(file), "--kv-cache-dtype", "auto")
    check("--config", str(file), "--kv-cache-dtype", "auto", "--no-enable-dbo")
    with pytest.raises(UsageError, check=naming("'torch_nativ'")):
        check("--config", str(file), "--kv-cache-dtype", "auto", "--additional-config.attnplug.backend", "torch_nativ")


def test_custom_alone_is_checked_unless_another_package_may_mean_it():
    argv = ["vllm", "serve", "m", "--attention-backend", "CUSTOM", "--kv-cache-dtype", "fp8_e5m2"]
    assert requests_attnplug(options_of(argv), custom_is_ours=True)
    assert not requests_attnplug(options_of(argv), custom_is_ours=False)
    with pytest.raises(UsageError, check=naming("fp8_e5m2")):
        check_command_line(argv, load_registry(), "cpu", None)


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "fp8_inc", "turboquant_k8v4", "int8_per_token_head"])
def test_cache_dtypes_that_the_bridge_lacks_are_refused_for_any_model(dtype):
    with pytest.raises(UsageError, check=naming(dtype, "fp8_e4m3")) as raised:
        check("some/model", *ASKED, "--kv-cache-dtype", dtype)
    assert raised.value.settings == (Setting.KV_DTYPE,)


def test_formats_of_plugins_are_accepted_for_mha_and_refused_for_latent_rows(llama, tmp_path):
    """E2"""
    asked = (*ASKED, "--kv-cache-dtype", "fp8_per_token_head", "--dtype", "float32")
    check(llama, *asked, device="cpu", sm=None)
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS["deepseek_v3"]))
    with pytest.raises(UsageError, check=naming("latent rows", "fp8_per_token_head", "--kv-cache-dtype")):
        check(str(tmp_path), *asked, device="cpu", sm=None)


@pytest.mark.parametrize(
    ("given", "feature"),
    [
        (["--prefill-context-parallel-size=2"], Feature.PCP),
        (["--enable-dbo"], Feature.DBO),
        (["--ubatch-size", "2"], Feature.DBO),
        (["-ac.use_non_causal", "true"], Feature.NON_CAUSAL),
        (["--kv-sharing-fast-prefill"], Feature.FAST_PREFILL),
        (["--calculate-kv-scales"], Feature.COMPUTED_SCALES),
    ],
)
def test_options_that_the_contract_lacks_are_refused(llama, given, feature):
    with pytest.raises(UsageError, check=naming(feature)):
        check(llama, *ASKED, *given)


@pytest.mark.parametrize(
    ("model", "given", "named"),
    [
        ("gemma2", [], "sliding windows"),
        ("gpt_oss", ["--disable-sliding-window"], "attention sinks"),
        ("llama", ["-sc.num_speculative_tokens", "3", "-sc.method", "ngram"], "--speculative-config"),
        ("llama", ["--cp-kv-cache-interleave-size", "16"], "interleave-size 16"),
        ("llama", [], None),
        ("gemma2", ["--disable-sliding-window"], None),
        ("deepseek_v3", ["-sc.num_speculative_tokens", "3"], None),
    ],
)
def test_what_ranks_with_shared_rows_lack_is_refused(tmp_path, model, given, named):
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS[model]))
    refused = nullcontext() if named is None else pytest.raises(UsageError, check=naming("context parallelism", named))
    with refused:
        check(str(tmp_path), *ASKED, "-tp", "2", "-dcp", "2", *given, device="cpu", sm=None)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["-tp", "2", "-dcp", "2"], "--decode-context-parallel-size"),
        (["--attention-config", '{"hisparse_config": {"size": 4096}}'], "--attention-config.hisparse_config"),
        (["-ac.hisparse_config.size", "4096"], "--attention-config.hisparse_config"),
    ],
)
def test_what_sparse_mla_lacks_is_refused(tmp_path, given, named):
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS["deepseek_v32"]))
    with pytest.raises(UsageError, check=naming(named)):
        check(str(tmp_path), "--attention-backend", "CUSTOM", *given)


@pytest.mark.parametrize(
    "given",
    [
        ["-dcp", "1"],
        ["--enable-dbo", "--no-enable-dbo"],
        ["--ubatch-size", "0"],
        ["--enforce-eager"],
        ["--kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1"}'],
    ],
)
def test_features_that_are_off_or_supported_are_not_refused(llama, given):
    check(llama, *ASKED, *given)


@pytest.mark.parametrize("claimed", [(), ("run", "graph"), ("run", "batch", "graph")])
def test_batch_invariance_needs_a_backend_that_claims_it(llama, monkeypatch, claimed):
    """E3"""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    argv, claiming = ["vllm", "serve", llama, *ASKED], registry_claiming("torch_native", claimed)
    refused = pytest.raises(UsageError, check=naming("batch", "VLLM_BATCH_INVARIANT"))
    with nullcontext() if "batch" in claimed else refused:
        check_command_line(argv, claiming, "cpu", None)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    check_command_line(argv, claiming, "cpu", None)


def test_chunked_attention_of_a_local_model_is_refused(tmp_path):
    config = {"model_type": "llama4", "text_config": {"attention_chunk_size": 8192}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, check=naming(Feature.CHUNKED_ATTENTION)):
        check(str(tmp_path), *ASKED)
    (tmp_path / "config.json").write_text("[]")
    check(str(tmp_path), *ASKED)


def test_what_mla_lacks_is_refused(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS["deepseek_v3"]))
    connector = ["--kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1"}']
    check(str(tmp_path), *ASKED, *connector, device="cpu", sm=None)
    with pytest.raises(UsageError, check=naming(Feature.MLA_FP8_ON_CPU)):
        check(str(tmp_path), *ASKED, "--kv-cache-dtype", "fp8", device="cpu", sm=None)
    prefill = ["--additional-config.attnplug.prefill", "torch_native"]
    with pytest.raises(UsageError, check=naming("FLASH_ATTN")):
        check(str(tmp_path), *ASKED, *prefill, "-ac.mla_prefill_backend", "flash_attn", device="cpu", sm=None)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(UsageError, check=naming("--additional-config.attnplug.prefill", "VLLM_BATCH_INVARIANT")):
        check(str(tmp_path), *ASKED, *prefill, device="cpu", sm=None)


@pytest.mark.parametrize("flag", ["--async-scheduling", "--no-async-scheduling"])
def test_speculation_is_part_of_the_check(flag):
    """A backend that needs exact lengths is refused only if vLLM certainly schedules ahead."""
    problem = _problem(options_of(["-sc.num_speculative_tokens", "3", flag]), None, "cuda", 90)
    assert problem.speculative_tokens == 4
    assert problem.exact_lengths is (flag == "--no-async-scheduling")


def test_an_option_that_a_backend_does_not_have_is_refused():
    with pytest.raises(UsageError, check=naming("--additional-config.attnplug.options.torch_native.x")):
        check("m", *ASKED[:2], "--additional-config", '{"attnplug": {"options": {"torch_native": {"x": 1}}}}')


def test_a_local_model_is_checked_with_every_reason(llama):
    check(llama, *ASKED)
    with pytest.raises(UsageError) as raised:
        check(llama, "--attention-backend", "CUSTOM", "--additional-config.attnplug.backend", "triton_mha", sm=75)
    assert codes(raised.value, "triton_mha") == {RefusalCode.SM}
    assert "--additional-config.attnplug.backend" in str(raised.value)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (("--tensor-parallel-size", "3"), RefusalCode.TENSOR_PARALLEL),
        (("--kv-cache-dtype", "fp8"), RefusalCode.KV_DTYPE),
        (("--dtype", "float32"), RefusalCode.DTYPE),
    ],
)
def test_vllms_options_are_part_of_the_check(llama, given, code):
    with pytest.raises(UsageError, check=naming(given[0])) as raised:
        check(llama, *TRITON, *given, sm=80)
    assert code in codes(raised.value, "triton_mha")


def test_a_model_may_be_given_by_its_option(llama):
    with pytest.raises(UsageError) as raised:
        check_command_line(["vllm", "bench", "--model", llama, *TRITON], load_registry(), "cuda", 75)
    assert codes(raised.value, "triton_mha") == {RefusalCode.SM}


def test_a_float32_checkpoint_is_not_refused_since_vllm_takes_a_smaller_type(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**TINY_CONFIGS["llama"], "torch_dtype": "float32"}))
    with pytest.raises(UsageError) as raised:
        check(str(tmp_path), *TRITON, sm=75)
    assert codes(raised.value, "triton_mha") == {RefusalCode.SM}


def test_block_sizes_are_checked_too(llama):
    with pytest.raises(UsageError, check=naming(24, 16, "--block-size")):
        check(llama, *ASKED, "--block-size", "24")


def test_a_model_with_overridden_config_is_not_checked(llama, monkeypatch):
    """It is checked when its layers are made."""
    asked = [llama, "--attention-backend", "CUSTOM", "--additional-config.attnplug.backend", "triton_mla"]
    with pytest.raises(UsageError) as raised:
        check(*asked)
    assert RefusalCode.KIND in codes(raised.value, "triton_mla")
    check(*asked, "--hf-overrides.model_type", "deepseek_v3")
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    check(*asked)
