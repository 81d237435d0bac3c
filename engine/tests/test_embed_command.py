"""``attnplug embed`` as a person types it."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from attnplug import BackendError, UsageError
from attnplug_engine import Embedder
from attnplug_engine.checkpoints.random import RandomCheckpoint
from attnplug_engine.execution.runner import ModelRunner
from attnplug_engine.models.architectures import build_model
from attnplug_engine.models.architectures import load_model as load
from attnplug_testing.command import Attnplug
from attnplug_testing.errors import missing_values, naming

TINY = ("--model", "tiny:llama", "--device", "cpu")
LINES = [{"prompt": "hello", "id": "a"}, {"prompt_token_ids": [1, 2, 3]}, {"prompt": "hello", "id": 7}]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"

    def write(*lines: object) -> str:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    return write


@pytest.fixture
def embedding_model(tmp_path):
    """A tiny Llama on disk with the files by which sentence-transformers would embed it."""
    source = RandomCheckpoint.tiny("tiny:llama")
    build_model(source, load("tiny:llama", dtype=torch.float32, device="cpu").spec, dtype=torch.float32, device="cpu")
    folder = tmp_path / "model"
    source.save(folder)
    types = (("Transformer", ""), ("Pooling", "1_Pooling"))
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in types]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean", "include_prompt": False}))
    prompts = {"prompts": {"query": "Q: ", "none": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


def test_json_gives_a_line_a_prompt_with_its_id_and_usage(attnplug: Attnplug, prompts):
    outcome = attnplug("embed", *TINY, "--prompts", prompts(*LINES), "--json")
    assert outcome.code == 0, outcome.err
    lines = [json.loads(line) for line in outcome.out.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert [line.get("id") for line in lines] == ["a", None, 7] and "id" not in lines[1]
    assert [line["usage"] for line in lines] == [{"prompt_tokens": count} for count in (5, 3, 5)]
    found = Embedder("tiny:llama", device="cpu").embed(["hello", [1, 2, 3], "hello"])
    for line, embedding in zip(lines, found, strict=True):
        assert line["embedding"] == embedding.vector.tolist()


def test_text_is_a_short_line_and_the_defaults_are_printed(attnplug: Attnplug):
    outcome = attnplug("embed", *TINY, "--prompt", "hello")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("[0] 64 dimensions, length 1.0000: ") and outcome.out.count("\n") == 1
    assert "prefill: torch_native" in outcome.err and "decode" not in outcome.err
    assert "pooling: last, normalised (the default, since the checkpoint has no modules.json)" in outcome.err


def test_a_pooling_that_was_asked_for_is_not_called_the_checkpoints(attnplug: Attnplug):
    outcome = attnplug("embed", *TINY, "--prompt", "hello", "--pooling", "mean", "--no-normalize")
    assert "pooling: mean, not normalised (by --pooling and --no-normalize; else the default" in outcome.err


def test_help_shows_each_default_once(attnplug: Attnplug):
    text = " ".join(attnplug("embed", "--help").out.split())
    assert "(default: 32)" in text and "(default: 32) (default" not in text


def test_prompts_come_from_standard_input(attnplug: Attnplug, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(LINES[0]).encode())))
    outcome = attnplug("embed", *TINY, "--prompts", "-", "--json")
    assert outcome.code == 0 and json.loads(outcome.out)["id"] == "a"


def test_a_closed_standard_input_is_an_error(attnplug: Attnplug, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    for ranks in ("1", "2"):
        outcome = attnplug("embed", *TINY, "--prompts", "-", "--tensor-parallel", ranks)
        assert outcome.code == 2 and "--prompts -" in outcome.err and "closed" in outcome.err


def test_a_command_line_is_read_without_torch(prompts):
    """A mistake in it is reported at once."""
    code = """
import sys
from attnplug.cli.app import main
for arguments in (["embed", "--help"], sys.argv[1:]):
    sys.argv = ["attnplug", *arguments]
    try:
        main()
    except SystemExit as ended:
        code = ended.code
print([name for name in ("torch", "numpy", "rich") if name in sys.modules], code)
"""
    arguments = ["embed", *TINY, "--prompts", prompts(*LINES), "--tensor-parallel", "2", "--page-size", "0"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 2"
    assert not missing_values(done.stderr, "--page-size 0")


def test_pooling_and_normalisation_are_the_checkpoints_unless_asked_for(attnplug: Attnplug, embedding_model, prompts):
    given = ("--model", str(embedding_model), "--device", "cpu", "--prompts", prompts(LINES[1]), "--json")

    def vector(*arguments: str) -> torch.Tensor:
        outcome = attnplug("embed", *given, *arguments)
        assert outcome.code == 0, outcome.err
        return torch.tensor(json.loads(outcome.out)["embedding"])

    mean = Embedder("tiny:llama", device="cpu", pooling="mean", normalize=False).embed([[1, 2, 3]])[0].vector
    last = Embedder("tiny:llama", device="cpu").embed([[1, 2, 3]])[0].vector
    assert_close(vector(), mean, atol=1e-6, rtol=0)
    assert_close(vector("--pooling", "last", "--normalize"), last, atol=1e-6, rtol=0)


def test_a_config_file_stands_for_its_folder(embedding_model):
    by_file, by_folder = (Embedder(path, device="cpu") for path in (embedding_model / "config.json", embedding_model))
    assert by_file.rules == by_folder.rules and by_file.rules.source is not None


def test_a_prompt_by_name_goes_before_the_text(embedding_model, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {character: index for index, character in enumerate("?Q:\u0120hi")}
    tokenizer = Tokenizer(models.WordLevel({**words, "Q: hi": 9, "hi": 10}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer.save(str(embedding_model / "tokenizer.json"))
    named = Embedder(str(embedding_model), device="cpu", pooling="last", prompt_name="query")
    assert named.tokens("hi") == (9,)
    with pytest.raises(UsageError, check=naming("query")):
        named.tokens([1])
    assert Embedder(str(embedding_model), device="cpu").tokens("hi") == (10,)


MISTAKES = [
    (["--model", "x" * 300, "--prompt", "x"], "x" * 300),
    (["--prompt", ""], "empty prompt"),
    (["--prompt", "x", "--pooling", "max"], "--pooling 'max'"),
    (["--prompt", "x", "--prompt-name", "query"], "query"),
    (["--prompt", "x", "--tensor-parallel", "0"], "--tensor-parallel 0"),
    (
        ["--prompt", "x", "--chunked-prefill-size", "0"],
        "--chunked-prefill-size 0",
    ),
    (["--prompt", "x", "--attention-backend", "nope"], "nope"),
    (["--prompts", "/no/such/file"], "/no/such/file"),
]


@pytest.mark.parametrize(("arguments", "named"), MISTAKES, ids=[named for _, named in MISTAKES])
def test_an_invalid_command_gives_one_message(attnplug: Attnplug, arguments, named):
    outcome = attnplug("embed", *TINY, *arguments)
    assert outcome.code == 2, outcome.err
    assert named in outcome.err and outcome.err.count("error: ") == 1


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ({"prompt": "x", "max_tokens": 1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ('{"prompt": "x", "prompt": "y"}', "prompt"),
    ],
)
def test_a_bad_line_is_an_error_with_its_number(attnplug: Attnplug, prompts, line, named):
    path = prompts(LINES[0], line)
    outcome = attnplug("embed", *TINY, "--prompts", path)
    assert outcome.code == 2 and not missing_values(outcome.err, f"{path}:2", named)


def test_a_prompt_that_cannot_be_embedded_is_answered_with_an_error(attnplug: Attnplug, prompts):
    path = prompts({"prompt_token_ids": [128]}, {"prompt": "fine"}, {"prompt": "x" * 65, "id": "long"})
    outcome = attnplug("embed", *TINY, "--prompts", path, "--json", "--context-length", "64")
    unknown, fine, long = map(json.loads, outcome.out.splitlines())
    assert outcome.code == 1 and "error" not in fine and len(fine["embedding"]) == 64
    assert unknown["embedding"] is None and not missing_values(unknown["error"], 128)
    assert (long["id"], long["index"]) == ("long", 2) and not missing_values(long["error"], 65, 64)
    assert f"{path}:3: {long['error']}" in outcome.err


def test_a_mean_that_leaves_the_prompt_out_is_refused(attnplug: Attnplug, embedding_model):
    (embedding_model / "tokenizer.json").touch()
    arguments = ("embed", "--model", str(embedding_model), "--device", "cpu", "--prompt", "x", "--prompt-name", "query")
    outcome = attnplug(*arguments)
    assert outcome.code == 2 and "'Q: '" in outcome.err


def test_what_is_finished_is_written_before_a_later_prompt_fails(attnplug: Attnplug, prompts, monkeypatch):
    steps = []
    original = ModelRunner.hidden_states

    def fail_later(runner, step):
        steps.append(step)
        if len(steps) == 2:
            raise BackendError("the second step fails")
        return original(runner, step)

    monkeypatch.setattr(ModelRunner, "hidden_states", fail_later)
    outcome = attnplug("embed", *TINY, "--prompts", prompts(*LINES), "--max-batch", "2", "--json")
    assert outcome.code == 1 and "the second step fails" in outcome.err
    assert [json.loads(line)["index"] for line in outcome.out.splitlines()] == [0, 1]


def test_hidden_states_that_are_not_finite_are_an_error_of_their_line(attnplug: Attnplug, embedding_model, prompts):
    weights = load_file(embedding_model / "model.safetensors")
    weights["model.embed_tokens.weight"][9] = float("nan")
    save_file(weights, embedding_model / "model.safetensors")
    path = prompts({"prompt_token_ids": [1, 9]}, {"prompt_token_ids": [1, 2]})
    outcome = attnplug("embed", "--model", str(embedding_model), "--device", "cpu", "--prompts", path, "--json")
    assert outcome.code == 1 and not missing_values(outcome.err, f"{path}:1", "prompt 0")
    bad, good = (json.loads(line) for line in outcome.out.splitlines())
    assert bad["embedding"] is None and "not finite" in bad["error"] and len(good["embedding"]) == 64
