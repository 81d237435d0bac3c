"""What is refused from the command line, before vLLM starts a process."""

from __future__ import annotations

import json
import re

import pytest

from attnplug.host import TINY_CONFIGS, UsageError, load_registry
from attnplug_vllm.front_end import additional_config, check_command_line, options_of

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
    check("m", "--additional-config", '{"other": 1}', "--block-size", "3")
    check("m", "--additional-config", "no json")


@pytest.mark.parametrize(
    ("named", "instead"),
    [
        ([], "is not told to use it"),
        (["--attention-backend", "auto"], "is not told to use it"),
        (["--attention-backend", "FLASH_ATTN"], "uses FLASH_ATTN"),
        (["-ac.backend", "flash_attn"], "uses FLASH_ATTN"),
        (["--attention-config", '{"flash_attn_version": 3}'], "is not told to use it"),
    ],
)
def test_asking_without_custom_is_refused(named, instead):
    with pytest.raises(UsageError, match=f"but vLLM {instead}; give --attention-backend CUSTOM"):
        check("m", *ASKED[2:], *named)


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
    check("m", *ASKED[2:], *named)


def test_short_names_are_read():
    assert options_of(["-tp", "2", "-ac.backend=x"]) == {"tensor-parallel-size": "2", "attention-config.backend": "x"}


def test_a_wrong_name_is_refused_with_the_right_ones():
    with pytest.raises(UsageError, match=re.escape("there is no backend 'torch_nativ'; did you mean torch_native")):
        check("m", "--attention-backend", "custom", "--additional-config.attnplug.backend", "torch_nativ")


def test_an_option_that_a_backend_does_not_have_is_refused():
    with pytest.raises(UsageError, match=re.escape("--additional-config.attnplug.options.torch_native.x is given")):
        check("m", *ASKED[:2], "--additional-config", '{"attnplug": {"options": {"torch_native": {"x": 1}}}}')


def test_a_model_that_lies_here_is_judged_with_every_reason(llama):
    check(llama, *ASKED)
    with pytest.raises(UsageError) as raised:
        check(llama, "--attention-backend", "CUSTOM", "--additional-config.attnplug.backend", "triton_mha", sm=75)
    assert "triton_mha" in str(raised.value) and "SM 75" in str(raised.value)
    assert "--additional-config.attnplug.backend" in str(raised.value)


TRITON = ("--attention-backend", "CUSTOM", "--additional-config.attnplug.backend", "triton_mha")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--tensor-parallel-size", "3"), "cannot be divided among 3 ranks (change --tensor-parallel-size)"),
        (("--kv-cache-dtype", "fp8"), "(change --kv-cache-dtype)"),
        (("--dtype", "float32"), "(change --dtype)"),
    ],
)
def test_what_a_model_is_run_with_is_judged_by_vllms_options(llama, given, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        check(llama, *TRITON, *given, sm=80)


def test_a_model_may_be_given_by_its_option(llama):
    with pytest.raises(UsageError, match="SM 75"):
        check_command_line(["vllm", "bench", "--model", llama, *TRITON], load_registry(), "cuda", 75)


def test_a_float32_checkpoint_is_not_refused_since_vllm_takes_a_smaller_type(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**TINY_CONFIGS["llama"], "torch_dtype": "float32"}))
    with pytest.raises(UsageError) as raised:
        check(str(tmp_path), *TRITON, sm=75)
    assert "dtype" not in str(raised.value).partition("usable instead")[0].replace("dtype      any", "")


def test_block_sizes_are_judged_too(llama):
    with pytest.raises(UsageError, match=re.escape("only multiples of 16 (change --block-size)")):
        check(llama, *ASKED, "--block-size", "24")


def test_a_model_that_vllm_is_told_to_see_in_another_way_is_not_judged(llama, monkeypatch):
    """It is judged when its layers are made."""
    asked = [llama, "--attention-backend", "CUSTOM", "--additional-config.attnplug.backend", "triton_mla"]
    with pytest.raises(UsageError, match="attention kind mha is not supported"):
        check(*asked)
    check(*asked, "--hf-overrides.model_type", "deepseek_v3")
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    check(*asked)
