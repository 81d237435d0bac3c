"""``attnplug explain``: output and exit code for a model, and errors for invalid requests."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from attnplug.host import TINY_CONFIGS
from attnplug_testing.command import PLUGIN, Attnplug, Package, in_own_process

pytestmark = pytest.mark.usefixtures("plain_environment")

OPTIONS = """
import dataclasses

@dataclasses.dataclass(frozen=True)
class Options:
    split: int = 1
"""


def config_file(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**TINY_CONFIGS["llama"], **changes}))
    return path


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v2", "deepseek_v3"])
def test_explain_serves_tiny_models_of_full_attention(attnplug: Attnplug, name: str) -> None:
    outcome = attnplug("explain", "--model", f"tiny:{name}")
    assert (outcome.code, outcome.err) == (0, "")
    assert "prefill: torch_native" in outcome.out and "decode: torch_native" in outcome.out


@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_next", "qwen3_5_text", "minimax", "mamba2", "nemotron_h"])
def test_explain_says_where_nothing_serves_linear_layers(attnplug: Attnplug, name: str) -> None:
    """D3"""
    outcome = attnplug("explain", "--model", f"tiny:{name}", "--json")
    assert outcome.code == 1
    assert outcome.json["linear"]["chosen"] is None
    codes = {refusal["code"] for refusal in outcome.json["linear"]["candidates"][0]["refusals"]}
    assert codes == {"role", "kind"}


def test_explain_reads_a_file_and_its_folder(attnplug: Attnplug, tmp_path: Path) -> None:
    path = config_file(tmp_path)
    by_file, by_folder = attnplug("explain", "--model", str(path)), attnplug("explain", "--model", str(tmp_path))
    assert by_file == by_folder
    assert by_file.code == 0


def test_explain_as_json_has_a_fixed_shape(attnplug: Attnplug, package: Package) -> None:
    """D3"""
    package("fast", capabilities='{"devices": ["cuda"], "min_sm": 90, "head_dims": [(128, 128)]}')
    outcome = attnplug("explain", "--model", "tiny:llama", "--device", "cpu", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert set(outcome.json) == {"problem", "cuda_graph", "kv_formats", "prefill", "decode"}
    for role in (outcome.json["prefill"], outcome.json["decode"]):
        assert role["chosen"] == "torch_native"
        candidates = {candidate["name"]: candidate["refusals"] for candidate in role["candidates"]}
        assert candidates["torch_native"] == []
        assert {refusal["code"] for refusal in candidates["fast"]} == {"device", "head_dim"}
        for refusal in candidates["fast"]:
            assert set(refusal) == {"code", "message", "value", "allowed", "setting", "option", "advice"}


def test_explain_as_json_has_the_inputs_of_the_text(attnplug: Attnplug, package: Package) -> None:
    package(
        "fast",
        capabilities='{"devices": ["cuda"], "cuda_graph": __import__("attnplug").GraphLevel.UNIFORM}',
        fields='{"preference": 100}',
    )
    arguments = ("explain", "--model", "tiny:llama", "--sm", "90", "--kv-dtype", "float32", "--dtype", "float32")
    found, text = attnplug(*arguments, "--json").json, attnplug(*arguments).out
    problem = found["problem"]
    assert problem["model"]["name"] == "tiny:llama" and problem["model"]["type"] == "llama"
    assert f"model      {problem['model']['description']}\n" in text
    assert [problem[key] for key in ("device", "sm", "dtype", "kv_dtype")] == ["cuda", 90, "float32", "float32"]
    assert f"page size  {problem['page_size']} (chosen)" in text and problem["page_size_requested"] is None
    assert problem["cuda_graph"] is None
    assert found["cuda_graph"] == {"level": "uniform", "limited_by": {}, "short_prefills": None}
    assert "CUDA graphs: UNIFORM\n" in text
    named = attnplug(*arguments, "--decode-attention-backend", "torch_native", "--page-size", "32", "--json").json
    assert named["problem"]["page_size"] == named["problem"]["page_size_requested"] == 32
    assert named["cuda_graph"]["level"] == "never" and list(named["cuda_graph"]["limited_by"]) == ["torch_native"]
    required = attnplug(*arguments, "--cuda-graph", "decode", "--json").json
    assert required["problem"]["cuda_graph"] == "decode" and required["cuda_graph"] is None


def test_explain_works_for_hardware_that_is_not_here(attnplug: Attnplug, package: Package) -> None:
    """D3"""
    package("blackwell", capabilities='{"devices": ["cuda"], "min_sm": 100}', fields='{"preference": 100}')
    for arguments in (["--sm", "100"], ["--device", "cuda", "--sm", "100"]):
        outcome = attnplug("explain", "--model", "tiny:llama", *arguments, "--json")
        assert outcome.code == 0
        assert outcome.json["prefill"]["chosen"] == "blackwell"
    older = attnplug("explain", "--model", "tiny:llama", "--sm", "90", "--json").json["prefill"]
    assert older["chosen"] == "torch_native"


def test_explain_takes_a_backend_for_each_role(attnplug: Attnplug, package: Package) -> None:
    """D3"""
    package("fast")
    arguments = ("--attention-backend", "torch_native", "--decode-attention-backend", "fast", "--json")
    found = attnplug("explain", "--model", "tiny:llama", *arguments).json
    assert {role: found[role]["chosen"] for role in ("prefill", "decode")} == {
        "prefill": "torch_native",
        "decode": "fast",
    }


def test_a_backend_asked_for_and_refused_is_exit_code_1_with_every_reason(attnplug: Attnplug, package: Package) -> None:
    """D3"""
    package("fast", capabilities='{"devices": ["cuda"], "min_sm": 90, "dtypes": ["bfloat16"]}')
    outcome = attnplug("explain", "--model", "tiny:llama", "--attention-backend", "fast")
    assert outcome.code == 1
    for text in ("--device", "--dtype", "--kv-dtype", "fast-dist 1.2.3"):
        assert text in outcome.out
    assert "torch_native (attnplug 1.0.0rc1)" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ([], "--attention-backend"),
        (["--attention-backend", "other"], "--attention-backend"),
        (["--prefill-attention-backend", "other"], "--prefill-attention-backend"),
    ],
)
def test_a_refusal_names_the_option_that_decides_the_role(
    attnplug: Attnplug, package: Package, arguments: list[str], option: str
) -> None:
    """D3: not an option that was not given."""
    package("other", capabilities='{"kinds": ["mla"]}')
    outcome = attnplug("explain", "--model", "tiny:llama", *arguments, "--json")
    (reasons,) = (c["refusals"] for c in outcome.json["prefill"]["candidates"] if c["name"] == "other")
    assert [(reason["code"], reason["option"]) for reason in reasons] == [("kind", option)]


def test_levels_of_invariance_are_shown_and_requested(attnplug: Attnplug, package: Package) -> None:
    """E3"""
    package("fast", capabilities='{"invariant": ["run"]}', fields='{"preference": 100}')
    arguments = ("explain", "--model", "tiny:llama", "--device", "cpu")
    assert "usable, invariant: run\n" in attnplug(*arguments).out
    outcome = attnplug(*arguments, "--attention-backend", "fast", "--batch-invariant")
    assert outcome.code == 1 and "batch, graph, chunks, verify" in outcome.out and "--batch-invariant" in outcome.out
    found = attnplug(*arguments, "--batch-invariant", "run", "--json").json
    (fast,) = (each for each in found["decode"]["candidates"] if each["name"] == "fast")
    assert fast["invariant"] == ["run"] == found["problem"]["invariant"] and not fast["refusals"]


def test_a_gpu_that_does_not_suit_is_not_an_option_to_change(attnplug: Attnplug, package: Package) -> None:
    """D3: this refusal names no option, because the user cannot exchange the GPU."""
    package("blackwell", capabilities='{"devices": ["cuda"], "min_sm": 100}')
    arguments = ("explain", "--model", "tiny:llama", "--sm", "90", "--attention-backend", "blackwell")
    (found,) = (c for c in attnplug(*arguments, "--json").json["prefill"]["candidates"] if c["name"] == "blackwell")
    assert [(reason["code"], reason["value"], reason["option"]) for reason in found["refusals"]] == [("sm", 90, None)]


def test_an_extend_path_that_is_asked_for_is_a_reason(attnplug: Attnplug, package: Package) -> None:
    """C1, D3: as in run."""
    package("absorbs", capabilities='{"kinds": ["mla"]}')
    arguments = ("explain", "--model", "tiny:deepseek_v3", "--mla-extend", "chunked")
    prefill = attnplug(*arguments, "--json").json["prefill"]
    assert prefill["chosen"] == "torch_native"
    (found,) = (candidate for candidate in prefill["candidates"] if candidate["name"] == "absorbs")
    assert [(each["code"], each["value"], each["option"]) for each in found["refusals"]] == [
        ("feature", "chunked", "--mla-extend")
    ]
    assert attnplug(*arguments, "--attention-backend", "absorbs").code == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--mla-extend", "sideways"], ["'sideways'", "absorbed, one_shot, chunked"]),
        (["--mla-extend", "chunked"], ["tiny:llama", "MLA"]),
        (["--mla-extend", "chunked", "--host", "vllm"], ["chunked", "engine"]),
        (["--cuda-graph", ""], ["''"]),
        (["--batch-invariant", "run,btach"], ["'btach'", "batch"]),
    ],
)
def test_usage_errors_of_explain_are_reported(attnplug: Attnplug, arguments: list[str], named: list[str]) -> None:
    outcome = attnplug("explain", "--model", "tiny:llama", *arguments)
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert all(text in outcome.err for text in (arguments[0], *named))


@pytest.mark.parametrize(
    ("capabilities", "option"),
    [
        ('{"kinds": ["gdn"], "roles": ["linear"]}', "--linear-attention-backend"),
        ('{"roles": ["decode"]}', "--decode-attention-backend"),
        ("{}", "--attention-backend"),
    ],
)
def test_an_option_for_a_backend_that_is_not_chosen_says_how_to_ask_for_it(
    attnplug: Attnplug, package: Package, capabilities: str, option: str
) -> None:
    """D3: by the roles that it has."""
    package("slow", OPTIONS + PLUGIN.format(name="slow", capabilities=capabilities, fields='{"options": Options}'))
    taken = ("--prefill-attention-backend", "torch_native", "--decode-attention-backend", "torch_native")
    outcome = attnplug("explain", "--model", "tiny:llama", *taken, "--backend-option", "slow.split=2")
    assert outcome.code == 2
    assert f"{option} slow" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "needs"),
    [
        (["--device", "cuda"], ["--device cuda", "--sm"]),
        (["--device", "tpu"], ["'tpu'", "cpu, cuda"]),
        (["--device", ""], ["''", "cpu, cuda"]),
        (["--device", "cpu", "--sm", "90"], ["--sm 90", "--device"]),
        (["--sm", "9"], ["--sm 9", "90"]),
        (["--sm", "-1"], ["--sm -1"]),
        (["--dtype", "int8"], ["--dtype", "'int8'", "bfloat16"]),
        (["--dtype", ""], ["--dtype", "''", "bfloat16"]),
        (["--kv-dtype", "int4"], ["--kv-dtype", "'int4'", "float8_e4m3fn"]),
        (["--page-size", "0"], ["--page-size 0"]),
        (["--page-size", "-16"], ["--page-size -16"]),
        (["--speculative-tokens", "-1"], ["--speculative-tokens -1"]),
        (["--speculative-topk", "0"], ["--speculative-topk 0"]),
        (["--tensor-parallel", "0"], ["--tensor-parallel 0"]),
        (["--cuda-graph", "sometimes"], ["--cuda-graph", "'sometimes'", "always"]),
        (["--attention-backend", "torch_nativ"], ["'torch_nativ'", "did you mean torch_native?"]),
        (["--attention-backend", ""], ["''", "torch_native"]),
        (["--attention-backend", "é✨"], ["'é✨'", "torch_native"]),
        (["--decode-attention-backend", "x" * 3000], ["xxx", "torch_native"]),
        (["--linear-attention-backend", "torch_native"], ["--linear-attention-backend", "linear"]),
        (["--draft-attention-backend", "torch_native"], ["--draft-attention-backend", "--speculative-tokens"]),
        (["--backend-option", "torch_native.x=1"], ["torch_native.x"]),
        (["--backend-option", "="], ["'='", "NAME.KEY=VALUE"]),
        (["--backend-option", ""], ["''", "NAME.KEY=VALUE"]),
        (["--backend-option", "nosuch.x=1"], ["'nosuch'", "torch_native"]),
        (["--backend-option", "a.x=1", "--backend-option", "a.x=2"], ["a.x", "'1'", "'2'"]),
    ],
)
def test_a_wrong_option_is_exit_code_2_with_value_and_allowed(
    attnplug: Attnplug, arguments: list[str], needs: list[str]
) -> None:
    """D3"""
    outcome = attnplug("explain", "--model", "tiny:llama", *arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    for text in needs:
        assert text in outcome.err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--tensor-parallel", "3"], "tensor_parallel"),
        (["--speculative-tokens", "1000"], "speculation"),
        (["--cuda-graph", "uniform"], "cuda_graph"),
        (["--dtype", "fp8"], "dtype"),
    ],
)
def test_what_nothing_serves_is_exit_code_1_with_the_code(attnplug: Attnplug, arguments: list[str], code: str) -> None:
    """D3"""
    outcome = attnplug("explain", "--model", "tiny:llama", *arguments, "--json")
    assert outcome.code == 1
    refusals = outcome.json["prefill"]["candidates"][0]["refusals"]
    assert [refusal["code"] for refusal in refusals] == [code]
    assert refusals[0]["option"] == arguments[0]


@pytest.mark.parametrize(
    ("content", "needs"),
    [
        (b"", ["JSON", "line 1"]),
        (b"{", ["JSON"]),
        (b"hidden_size: 64", ["JSON"]),
        (b"[1, 2]", ["[1, 2]"]),
        (bytes(range(256)), ["UTF-8"]),
        (b"{}", ["'model_type'"]),
        (b'{"model_type": "llama"}', ["'num_attention_heads'"]),
        (b'{"model_type": 7}', ["'model_type'", "7"]),
    ],
)
def test_a_config_that_cannot_be_read_is_exit_code_2_with_the_file_and_the_key(
    attnplug: Attnplug, tmp_path: Path, content: bytes, needs: list[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    outcome = attnplug("explain", "--model", str(path))
    assert outcome.code == 2
    assert outcome.out == ""
    for text in (str(path), *needs):
        assert text in outcome.err


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "num_attention_heads"])
def test_a_key_that_is_missing_is_named(attnplug: Attnplug, tmp_path: Path, key: str) -> None:
    """D3: a latent-attention model without its latent width must not be explained as one of plain heads."""
    config = {name: value for name, value in TINY_CONFIGS["deepseek_v3"].items() if name != key}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    outcome = attnplug("explain", "--model", str(path))
    assert outcome.code == 2
    assert repr(key) in outcome.err


@pytest.mark.parametrize("reference", ["", "nosuch/config.json", "tiny:", "tiny:lama", "a\nb", "é✨", "x" * 5000, "\0"])
def test_a_model_that_does_not_exist_is_exit_code_2(attnplug: Attnplug, reference: str) -> None:
    outcome = attnplug("explain", "--model", reference)
    assert outcome.code == 2
    assert "tiny:llama" in outcome.err


def test_a_folder_without_config_says_what_it_lacks(attnplug: Attnplug, tmp_path: Path) -> None:
    outcome = attnplug("explain", "--model", str(tmp_path))
    assert outcome.code == 2
    assert "config.json" in outcome.err and str(tmp_path) in outcome.err


def test_a_data_type_of_the_model_that_is_unknown_asks_for_one(attnplug: Attnplug, tmp_path: Path) -> None:
    path = config_file(tmp_path, dtype="int8")
    outcome = attnplug("explain", "--model", str(path))
    assert outcome.code == 2
    assert "'int8'" in outcome.err and "--dtype" in outcome.err
    assert attnplug("explain", "--model", str(path), "--dtype", "float32").code == 0


def test_a_folder_whose_name_is_no_text_can_be_explained(tmp_path: Path) -> None:
    folder = os.path.join(os.fsencode(tmp_path), b"odd\xff")
    os.mkdir(folder)
    config_file(Path(os.fsdecode(folder)))
    outcome = in_own_process("explain", "--model", os.fsdecode(folder), PYTHONIOENCODING="utf-8:strict")
    assert outcome.code == 0, outcome.err
    assert "Traceback" not in outcome.err


def test_a_broken_plugin_is_a_warning_that_leaves_stdout_clean(attnplug: Attnplug, package: Package) -> None:
    """D2"""
    package("odd", "raise RuntimeError('no driver')")
    outcome = attnplug("explain", "--model", "tiny:llama", "--json")
    assert outcome.code == 0
    assert set(outcome.json) == {"problem", "cuda_graph", "kv_formats", "prefill", "decode"}
    for text in ("warning", "odd-dist 1.2.3", "no driver"):
        assert text in outcome.err


def test_an_unknown_backend_beside_a_broken_plugin_warns_of_it_too(attnplug: Attnplug, package: Package) -> None:
    """D2: a missing backend must not look like a wrong name, even if its name differs from that of its entry point."""
    package("odd", "raise RuntimeError('no driver')")
    outcome = attnplug("explain", "--model", "tiny:llama", "--attention-backend", "odd_mla")
    assert outcome.code == 2
    assert "no driver" in outcome.err


def test_asking_for_a_broken_backend_is_exit_code_1(attnplug: Attnplug, package: Package) -> None:
    """D2"""
    package("odd", "raise RuntimeError('no driver')")
    outcome = attnplug("explain", "--model", "tiny:llama", "--attention-backend", "odd")
    assert outcome.code == 1
    assert "'odd'" in outcome.err and "no driver" in outcome.err


def test_an_option_of_a_backend_reaches_its_class(attnplug: Attnplug, package: Package) -> None:
    package("fast", OPTIONS + PLUGIN.format(name="fast", capabilities="{}", fields='{"options": Options}'))
    base = ["explain", "--model", "tiny:llama", "--attention-backend", "fast", "--backend-option"]
    assert attnplug(*base, "fast.split=2").code == 0
    for wrong in ("fast.splt=2", "fast.split=two"):
        outcome = attnplug(*base, wrong)
        assert outcome.code == 2
        assert "split: int = 1" in outcome.err


def test_an_option_for_a_backend_that_is_not_chosen_is_exit_code_2(attnplug: Attnplug, package: Package) -> None:
    package("fast", fields='{"preference": 1}')
    package("slow", OPTIONS + PLUGIN.format(name="slow", capabilities="{}", fields='{"options": Options}'))
    outcome = attnplug("explain", "--model", "tiny:llama", "--backend-option", "slow.split=2")
    assert outcome.code == 2
    assert "slow.split" in outcome.err and "--attention-backend slow" in outcome.err
