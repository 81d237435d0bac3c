"""Invalid requests for speculation: one message each, which names the option at fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnplug import Role, UsageError
from attnplug_engine import Engine
from attnplug_engine.options import EngineOptions
from attnplug_testing.command import Attnplug
from attnplug_testing.errors import having, missing_values

ALGORITHM, DRAFT, NODES = "--speculative-algorithm", "--speculative-draft-model", "--speculative-num-draft-tokens"


def refusal(attnplug: Attnplug, *arguments: str) -> str:
    """Return ``run``'s error message, which is one line. The memory estimate may precede it."""
    outcome = attnplug("run", "--model", "tiny:llama", "--prompt", "x", "--device", "cpu", *arguments)
    line = outcome.err.splitlines()[-1]
    assert outcome.code == 2 and line.startswith("error: ") and outcome.err.count("error: ") == 1
    return line.removeprefix("error: ")


@pytest.mark.parametrize("value", ["-3", "1", "100"])
def test_a_number_of_rows_is_refused_by_its_own_name(value, attnplug: Attnplug):
    """Not the number of steps that follows from it."""
    assert refusal(attnplug, ALGORITHM, "ngram", NODES, value).startswith(f"{NODES} {value} ")


def test_rows_that_are_no_number_are_a_mistake_of_the_user():
    with pytest.raises(UsageError, check=having("4", settings=("speculative_num_draft_tokens",))):
        EngineOptions(speculative_algorithm="ngram", speculative_num_draft_tokens="4")  # type: ignore[arg-type] # the mistake


@pytest.mark.parametrize("algorithm", ["standalone", "eagle", "eagle3", "mtp"])
def test_a_draft_that_does_not_exist_names_its_option(algorithm, attnplug: Attnplug):
    line = refusal(attnplug, ALGORITHM, algorithm, DRAFT, "/nowhere")
    assert "/nowhere" in line and line.endswith(f"({DRAFT})")


def test_a_draft_without_weights_names_its_option(tmp_path, attnplug: Attnplug):
    (tmp_path / "config.json").write_text(_CONFIG)
    line = refusal(attnplug, ALGORITHM, "standalone", DRAFT, str(tmp_path))
    assert "model.safetensors" in line and line.endswith(f"({DRAFT})")


def test_a_draft_of_another_vocabulary_names_its_option(tmp_path, attnplug: Attnplug):
    (tmp_path / "config.json").write_text(_CONFIG.replace('"vocab_size": 128', '"vocab_size": 96'))
    line = refusal(attnplug, ALGORITHM, "standalone", DRAFT, str(tmp_path), "--random-weights")
    assert not missing_values(line, 96, 128, "tiny:llama") and line.endswith(DRAFT)


def test_a_backend_for_drafts_without_speculation_names_the_algorithm_option(attnplug: Attnplug):
    line = refusal(attnplug, "--draft-attention-backend", "torch_native")
    assert line == (
        "--draft-attention-backend torch_native is given, but speculation is off; leave it out, or turn speculation on "
        f"by {ALGORITHM}"
    )


def test_too_few_pages_for_proposed_tokens_name_their_option(attnplug: Attnplug):
    arguments = ("--model", "tiny:llama", "--prompt", "x", "--device", "cpu", "--num-pages", "2", "--page-size", "4")
    outcome = attnplug("run", *arguments, "--max-tokens", "5", ALGORITHM, "ngram")
    assert outcome.code == 1
    assert not missing_values(outcome.err, "4 pages", 1, 5, 8, "--max-tokens", "--num-pages")


def test_branches_without_tokens_are_refused_by_explain_too(attnplug: Attnplug):
    outcome = attnplug("explain", "--model", "tiny:llama", "--device", "cpu", "--speculative-topk", "2")
    assert outcome.code == 2
    assert not missing_values(outcome.err, "--speculative-topk 2", "--speculative-tokens")


def test_a_draft_may_be_given_as_a_path(tmp_path):
    (tmp_path / "config.json").write_text(_CONFIG)
    settings: dict[str, Any] = {"speculative_algorithm": "standalone", "speculative_draft_model": Path(tmp_path)}
    one = Engine("tiny:llama", device="cpu", random_weights=True, **settings)
    assert one.draft_selection is not None and one.draft_selection.chosen(Role.DRAFT).spec.name == "torch_native"


def test_a_draft_that_is_no_path_is_a_mistake_of_the_user():
    with pytest.raises(UsageError, check=having(5, settings=("speculative_draft_model",))):
        EngineOptions(speculative_algorithm="standalone", speculative_draft_model=5)  # type: ignore[arg-type] # the mistake


_CONFIG = """{
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-06, "hidden_act": "silu"
}"""
