"""Refusals of the command line, before vLLM starts a process."""

from __future__ import annotations

import json

import pytest

from attnplug import RefusalCode, UsageError
from attnplug.host import TINY_CONFIGS, load_registry
from attnplug_testing.errors import naming
from attnplug_vllm.command_line import additional_config, check_command_line, options_of
from vllm_stage import codes

ASKED = ["--attention-backend", "CUSTOM", "--additional-config", '{"attnplug": {"backend": "torch_native"}}']


def check(*arguments: str, device: str = "cuda", sm: int | None = 90) -> None:
    check_command_line(["vllm", "serve", *arguments], load_registry(), device, sm)


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
        ["--config", "a_file.yaml"],
    ],
)
def test_custom_may_be_named_in_another_way(named):
    assert check("m", *ASKED[2:], *named) is None


def test_short_names_are_read():
    assert options_of(["-tp", "2", "-ac.backend=x"]) == {"tensor-parallel-size": "2", "attention-config.backend": "x"}


def test_a_wrong_name_is_refused_with_the_right_ones():
    with pytest.raises(UsageError, check=naming("torch_nativ", "torch_native")):
        check("m", "--attention-backend", "custom", "--additional-config.attnplug.backend", "torch_nativ")


def test_an_option_that_a_backend_does_not_have_is_refused():
    with pytest.raises(UsageError, check=naming("--additional-config.attnplug.options.torch_native.x")):
        check("m", *ASKED[:2], "--additional-config", '{"attnplug": {"options": {"torch_native": {"x": 1}}}}')


def test_a_local_model_is_checked_with_every_reason(llama):
    check(llama, *ASKED)
    with pytest.raises(UsageError) as raised:
        check(llama, "--attention-backend", "CUSTOM", "--additional-config.attnplug.backend", "triton_mha", sm=75)
    assert codes(raised.value, "triton_mha") == {RefusalCode.SM}
    assert "--additional-config.attnplug.backend" in str(raised.value)


TRITON = ("--attention-backend", "CUSTOM", "--additional-config.attnplug.backend", "triton_mha")


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
