"""``attnplug run`` as a person types it."""

from __future__ import annotations

import errno
import io
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnplug.cli import app, output
from attnplug.declare.spec import Source
from attnplug.host import AttnplugError, load_registry
from attnplug.registry.loading import Broken
from attnplug_engine.execution.runner import ModelRunner
from attnplug_engine.execution.sampler import Sampler
from attnplug_engine.text.tokenizer import ByteTokenizer
from attnplug_testing.command import Attnplug
from attnplug_testing.errors import missing_values


def in_own_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attnplug", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def prompts(tmp_path: Path):
    def write(*lines: object) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return str(path)

    return write


def test_one_prompt_streams_text_and_ends_with_figures(attnplug: Attnplug):
    outcome = attnplug("run", "--model", "tiny:llama", "--prompt", "hello", "--max-tokens", "8", "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert outcome.out.strip("\n")
    for printed in ("prefill: torch_native", "decode: torch_native", "tokens/s", "prefix cache:"):
        assert printed in outcome.err


def test_json_gives_one_line_a_prompt_as_they_finish_and_nothing_else(attnplug: Attnplug, prompts):
    path = prompts(
        {"prompt": "hello", "max_tokens": 9},
        {"prompt_token_ids": [1, 2, 3], "max_tokens": 2},
        "",
        {"prompt": "x", "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop_token_ids": [1]},
    )
    arguments = ("--model", "tiny:deepseek_v3", "--prompts", path, "--max-tokens", "5", "--json", "--device", "cpu")
    outcome = attnplug("run", *arguments)
    assert outcome.code == 0, outcome.err
    lines = [json.loads(line) for line in outcome.out.splitlines()]
    assert [line["index"] for line in lines] == [1, 2, 0]
    assert [line["usage"] for line in lines[::2]] == [
        {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0},
        {"prompt_tokens": 5, "completion_tokens": 9, "cached_tokens": 0},
    ]
    keys = ["index", "token_ids", "text", "finish_reason", "usage", "error"]
    assert all(list(line) == keys and line["error"] is None for line in lines)


def test_two_ranks_give_the_same_tokens_as_one(attnplug: Attnplug, prompts):
    """Heads split, one all-reduce a block, launched by the command itself, over gloo. That every architecture is split
    right is for threads to show, in ``test_models_parallel`` and ``test_hybrid_models``."""
    path = prompts({"prompt": "hello there"}, {"prompt": "hi"}, {"prompt": "hello again"})
    arguments = ("--model", "tiny:kimi_linear", "--prompts", path, "--max-tokens", "24", "--json", "--device", "cpu")
    arguments += ("--stop", "zz")
    one, two = attnplug("run", *arguments), in_own_process(*arguments, "--tensor-parallel", "2")
    assert (one.code, two.returncode) == (0, 0), two.stderr
    assert one.out == two.stdout
    assert len(two.stdout.splitlines()) == 3


RUN = ("run", "--model", "tiny:llama", "--device", "cpu")


class TestAnswers:
    """Every prompt is answered when it is finished, and an end of the command loses no answer."""

    @pytest.fixture
    def uneven(self, prompts) -> str:
        """Three prompts: the second one finishes first, and the first one last."""
        return prompts(*({"prompt": "hello", "max_tokens": tokens} for tokens in (9, 2, 5)))

    @pytest.fixture
    def end_with(self, monkeypatch):
        """Makes the sixth step of every engine raise."""

        def end_with(error: BaseException | signal.Signals) -> None:
            original, steps = ModelRunner.launch, []

            def launch(self, step):
                steps.append(step)
                if len(steps) == 6:
                    if isinstance(error, signal.Signals):
                        signal.raise_signal(error)
                    else:
                        raise error
                return original(self, step)

            monkeypatch.setattr(ModelRunner, "launch", launch)

        return end_with

    def test_texts_come_in_the_order_of_their_prompts(self, attnplug: Attnplug, uneven, monkeypatch):
        """On standard output, also with a progress bar on standard error."""
        monkeypatch.setenv("FORCE_COLOR", "1")
        outcome = attnplug(*RUN, "--prompts", uneven)
        assert outcome.code == 0, outcome.err
        assert [line[:3] for line in outcome.out.splitlines()] == ["[0]", "[1]", "[2]"]
        assert "generating" in outcome.err

    @pytest.mark.parametrize("json", [True, False])
    @pytest.mark.parametrize(
        ("error", "code", "fragment"),
        [
            (KeyboardInterrupt(), 130, "interrupted: 2 of 3 prompts were finished"),
            (AttnplugError("the device is gone"), 1, "stopped: 2 of 3 prompts were finished"),
        ],
    )
    def test_what_is_finished_is_written(self, attnplug: Attnplug, uneven, end_with, json, error, code, fragment):
        end_with(error)
        outcome = attnplug(*RUN, "--prompts", uneven, *(["--json"] if json else []))
        assert outcome.code == code and fragment in outcome.err and str(error) in outcome.err
        indices = [int(line.split('"index": ' if json else "[")[1][0]) for line in outcome.out.splitlines()]
        assert indices == [1, 2]

    def test_what_is_finished_is_written_when_the_command_is_terminated(self, attnplug: Attnplug, uneven, end_with):
        """SIGTERM comes from ``timeout`` or a batch system."""
        end_with(signal.SIGTERM)
        outcome = attnplug(*RUN, "--prompts", uneven)
        assert outcome.code == 143 and "stopped: 2 of 3 prompts were finished" in outcome.err
        assert [line[:3] for line in outcome.out.splitlines()] == ["[1]", "[2]"]

    def test_output_that_cannot_be_written_ends_the_generation(self, uneven, end_with, monkeypatch, capsys):
        def full(_text: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(output, "write_line", full)
        end_with(AssertionError("it went on"))
        with output.safe_streams(), pytest.raises(OSError, match="No space left on device"):
            app.run(app.parse([*RUN, "--prompts", uneven, "--json"]))
        assert "stopped: 0 of 3 prompts were finished" in capsys.readouterr().err

    @pytest.mark.usefixtures("interruptible")
    def test_an_interrupt_leaves_whole_lines(self, prompts):
        path = prompts(*({"prompt": "hello", "max_tokens": 100 + number} for number in range(400)))
        command = [sys.executable, "-m", "attnplug", *RUN, "--prompts", path, "--json", "--max-batch", "4"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
            first = started.stdout.readline()
            started.send_signal(signal.SIGINT)
            # Not communicate(): it loses what readline() has buffered.
            rest, printed = started.stdout.read(), started.stderr.read()
        lines = [json.loads(line) for line in (first + rest).splitlines()]
        assert started.returncode == 130 and "Traceback" not in printed
        assert f"interrupted: {len(lines)} of 400 prompts were finished" in printed
        assert 0 < len(lines) < 400 and len({line["index"] for line in lines}) == len(lines)

    @pytest.mark.usefixtures("interruptible")
    def test_an_interrupt_while_a_line_is_written_comes_after_it(self, attnplug: Attnplug, uneven, monkeypatch):
        original = output.write_line

        def write_line(text: str) -> None:
            signal.raise_signal(signal.SIGINT)
            original(text)

        monkeypatch.setattr(output, "write_line", write_line)
        outcome = attnplug(*RUN, "--prompts", uneven, "--json")
        assert outcome.code == 130 and "interrupted: 1 of 3 prompts were finished" in outcome.err
        assert len(outcome.out.splitlines()) == 1

    def test_a_failed_prompt_says_why_in_its_line(self, attnplug: Attnplug, prompts, monkeypatch):
        original = Sampler.sample

        def sample(self, logits, requests, positions):
            bad = torch.tensor([[request.id == 1] for request in requests])
            return original(self, torch.where(bad, float("nan"), logits), requests, positions)

        monkeypatch.setattr(Sampler, "sample", sample)
        outcome = attnplug(*RUN, "--prompts", prompts({"prompt": "a"}, {"prompt": "b", "id": "bad"}), "--json")
        failed, good = (json.loads(line) for line in outcome.out.splitlines())
        assert outcome.code == 1 and (failed["id"], good["error"]) == ("bad", None)
        assert failed["finish_reason"] == "error" and "not finite" in failed["error"]
        assert failed["error"] in outcome.err and "--check-layers" in failed["error"]


def test_prompts_come_from_standard_input_and_keep_their_ids(attnplug: Attnplug, monkeypatch):
    ids = ["a", 7, 1.5, 10**30]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(json.dumps({"prompt": "x", "id": name}) for name in ids)))
    outcome = attnplug(*RUN, "--prompts", "-", "--json", "--max-tokens", "2")
    assert [json.loads(line)["id"] for line in outcome.out.splitlines()] == ids
    monkeypatch.setattr("sys.stdin", io.StringIO("{}"))
    outcome = attnplug(*RUN, "--prompts", "-")
    assert outcome.code == 2 and "standard input:1: give exactly one of" in outcome.err


def test_stop_texts_and_logprobs_of_the_command_and_of_a_line(attnplug: Attnplug, prompts):
    arguments = (*RUN, "--max-tokens", "12")
    text = attnplug(*arguments, "--prompt", "hello").out[:-1]
    path = prompts({"prompt": "hello"}, {"prompt": "hello", "stop": text[3], "logprobs": 0})
    outcome = attnplug(*arguments, "--prompts", path, "--json", "--stop", text[6], "--logprobs", "2")
    own, general = (json.loads(line) for line in outcome.out.splitlines())
    assert (general["text"], general["finish_reason"]) == (text[: text.index(text[6])], "stop")
    assert own["text"] == text[: min(text.index(text[6]), text.index(text[3]))]
    assert [(one["token_id"], len(one["top"])) for one in general["logprobs"]] == [
        (token, 2) for token in general["token_ids"]
    ]
    assert all(one["top"] == [] and one["logprob"] < 0 for one in own["logprobs"])
    assert attnplug(*arguments, "--prompt", "hello", "--stop", text[5:8]).out == text[: text.index(text[5:8])] + "\n"


def test_min_p_of_the_command_and_of_a_line(attnplug: Attnplug, prompts):
    """A high temperature with only the likeliest token left is greedy."""
    greedy = attnplug(*RUN, "--prompt", "hello").out
    hot = (*RUN, "--temperature", "50")
    assert attnplug(*hot, "--prompt", "hello", "--min-p", "1").out == greedy
    outcome = attnplug(*hot, "--prompts", prompts({"prompt": "hello"}, {"prompt": "hello", "min_p": 1}), "--json")
    drawn, likeliest = sorted((json.loads(line) for line in outcome.out.splitlines()), key=lambda line: line["index"])
    assert likeliest["text"] == greedy[:-1] != drawn["text"]
    assert "--min-p 2.0" in attnplug(*RUN, "--prompt", "x", "--min-p", "2").err


BAD_LINES = [
    ("{", "not JSON"),
    ("[1]", "not an object"),
    ({"promt": "x"}, "promt"),
    ({}, "exactly one of"),
    ({"prompt": "x", "prompt_token_ids": [1]}, "exactly one of"),
    ({"prompt": 3}, "must be a string"),
    ({"prompt_token_ids": "x"}, "must be a list"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "stop_token_ids": [[]]}, "stop_token_ids"),
    ({"prompt": "x", "stop": 3}, "stop is 3"),
    ({"prompt": "x", "stop": [""]}, "stop ('',)"),
    ({"prompt": "x", "stop": ""}, "stop ('',)"),
    ({"prompt": "x", "logprobs": -1}, "logprobs -1"),
    ({"prompt": "x", "id": [1]}, "id is [1]"),
    ('{"prompt": "x", "id": 1e400}', "id is inf"),
    ({"prompt": "x", "max_tokens": 10**400}, "max_tokens 1000"),
    ({"prompt": "x", "temperature": 10**400}, "temperature 1000"),
    ({"prompt": "x", "top_p": 10**400}, "top_p 1000"),
    ({"prompt": "x", "min_p": -0.5}, "min_p -0.5"),
    ({"prompt": "x", "seed": 10**400}, "seed 1000"),
    ({"prompt": "x", "stop_token_ids": [10**400]}, "stop_token_ids"),
    ('{"prompt": "x", "prompt": "y"}', "'prompt'"),
    ('{"messages": [{"role": "user", "content": "x", "content": "y"}]}', "'content'"),
    ('{"prompt_token_ids": [' + "9" * 5000 + "]}", "not JSON that can be read: a number has thousands of digits"),
    ("[" * 99999, "not JSON that can be read: thousands of brackets"),
]


@pytest.mark.parametrize(("line", "fragment"), BAD_LINES, ids=[str(fragment) for _, fragment in BAD_LINES])
def test_a_bad_line_is_an_error_with_its_number(attnplug: Attnplug, prompts, line, fragment):
    path = prompts({"prompt": "fine"}, line)
    outcome = attnplug("run", "--model", "tiny:llama", "--prompts", path, "--device", "cpu")
    assert outcome.code == 2
    assert f"{path}:2" in outcome.err and fragment in outcome.err and "Traceback" not in outcome.err


UNSERVABLE = [
    ({"prompt_token_ids": [1, 999]}, "999"),
    ({"prompt_token_ids": [10**400]}, "vocabulary"),
    ({"prompt_token_ids": []}, "empty"),
    ({"prompt": "é"}, "ASCII"),
    ('{"prompt": "\\ud800"}', "surrogate"),
    ({"prompt": "x" * 64}, "64 tokens"),
    ({"prompt": "x" * 20, "max_tokens": 30}, "--num-pages"),
]


def test_prompts_that_cannot_be_served_are_answered_with_an_error(attnplug: Attnplug, prompts):
    """The others are generated as without them."""
    limits = (*RUN, "--context-length", "64", "--num-pages", "10", "--page-size", "4", "--max-tokens", "4")
    good = [{"prompt": "hello", "id": "first"}, {"prompt": "again", "id": "last"}]
    path = prompts(good[0], *(line for line, _ in UNSERVABLE), good[1])
    outcome = attnplug(*limits, "--prompts", path, "--json")
    answers = sorted((json.loads(line) for line in outcome.out.splitlines()), key=lambda answer: answer["index"])
    assert outcome.code == 1 and [answer["index"] for answer in answers] == list(range(len(UNSERVABLE) + 2))
    for number, (answer, (_, named)) in enumerate(zip(answers[1:-1], UNSERVABLE, strict=True), start=2):
        assert (answer["finish_reason"], answer["token_ids"]) == ("error", [])
        assert not missing_values(answer["error"], named) and f"{path}:{number}: {answer['error']}" in outcome.err
    alone = attnplug(*limits, "--prompts", prompts(*good), "--json")
    assert alone.code == 0
    texts = {answer["id"]: answer["text"] for answer in map(json.loads, alone.out.splitlines())}
    assert {answer["id"]: answer["text"] for answer in (answers[0], answers[-1])} == texts
    path = prompts(good[0], {"prompt": "x" * 64}, good[1])
    shown = attnplug(*limits, "--prompts", path)
    assert shown.code == 1 and shown.out == f"[0] {texts['first']}\n[1] \n[2] {texts['last']}\n"
    assert attnplug(*limits, "--prompts", prompts({"prompt": "x" * 64}), "--json").json["finish_reason"] == "error"


def test_prompts_as_plain_text(attnplug: Attnplug, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('hello\r\n\n{"prompt": 3\n'))
    outcome = attnplug(*RUN, "--prompts", "-", "--prompts-format", "text", "--json", "--max-tokens", "2")
    answers = {answer["index"]: answer["usage"] for answer in map(json.loads, outcome.out.splitlines())}
    assert [answers[index]["prompt_tokens"] for index in (0, 1)] == [5, 12]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    outcome = attnplug(*RUN, "--prompts", "-", "--prompts-format", "text")
    assert outcome.code == 2 and "standard input" in outcome.err


def test_logprobs_as_text(attnplug: Attnplug, prompts):
    arguments = (*RUN, "--max-tokens", "2", "--logprobs", "1")
    answer = attnplug(*arguments, "--prompt", "hello", "--json").json
    wanted = []
    for one in answer["logprobs"]:
        shown = f"{one['token_id']} {chr(one['token_id'])!r} {one['logprob']:.4f}"
        wanted.append(f"  {shown}  (most likely: {shown})")
    streamed = attnplug(*arguments, "--prompt", "hello")
    assert streamed.out == "\n".join([answer["text"], *wanted, ""])
    listed = attnplug(*arguments, "--prompts", prompts({"prompt": "hello"}))
    assert listed.out == "\n".join([f"[0] {answer['text']}", *wanted, ""])


def test_control_characters_are_escaped_on_a_terminal_only(attnplug: Attnplug, prompts, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "decode", lambda _self, tokens: "\x1b[2Ja\t\x9bé\x7f\r\n" if tokens else "")
    arguments = (*RUN, "--max-tokens", "1")
    for ways in (("--prompt", "x"), ("--prompts", prompts({"prompt": "x"}))):
        assert "\x1b[2Ja\t\x9bé\x7f\r\n" in attnplug(*arguments, *ways).out
        with monkeypatch.context() as patched:
            patched.setattr(type(sys.stdout), "isatty", lambda _self: True)
            assert r"\x1b[2Ja" "\t" r"\x9bé\x7f\x0d" "\n" in attnplug(*arguments, *ways).out


def test_a_context_beyond_the_models_is_refused_with_both_numbers(attnplug: Attnplug):
    for command in ("run", "embed"):
        arguments = ("--model", "tiny:llama", "--device", "cpu", "--prompt", "x", "--context-length", "1000000000")
        outcome = attnplug(command, *arguments)
        assert outcome.code == 2 and not missing_values(outcome.err, "--context-length 1000000000", 4096)


@pytest.mark.parametrize(
    ("arguments", "code", "fragment"),
    [
        (["--model", "tiny:llama", "--prompt", ""], 2, "--prompt: the prompt is empty"),
        (["--model", "tiny:llama", "--prompt", "x" * 99, "--context-length", "64"], 2, "99 tokens"),
        (["--model", "tiny:llama", "--prompt", "x", "--prompts-format", "text"], 2, "--prompts-format text"),
        (["--model", "nowhere", "--prompt", "x"], 2, "nowhere"),
        (["--model", "tiny:llama", "--prompt", "x", "--attention-backend", "nope"], 2, "'nope'"),
        (["--model", "tiny:llama", "--prompt", "x", "--tensor-parallel", "0"], 2, "--tensor-parallel 0"),
        (["--model", "tiny:llama", "--prompt", "x", "--mla-extend", "sideways"], 2, "sideways"),
        (["--model", "tiny:llama", "--prompt", "x", "--mla-extend", "chunked"], 2, "--mla-extend"),
        (["--model", "tiny:llama", "--prompt", "x", "--max-tokens", "0"], 2, "--max-tokens 0"),
        (["--model", "tiny:llama", "--prompt", "x", "--page-size", "0"], 2, "--page-size 0"),
        (["--model", "tiny:llama", "--prompt", "x", "--mla-chunk-capacity", "0"], 2, "--mla-chunk-capacity"),
        (["--model", "tiny:llama", "--prompt", "x", "--enable-plan-stream"], 2, "--enable-plan-stream"),
        (["--model", "tiny:llama", "--prompt", "x", "--logprobs", "-1"], 2, "--logprobs -1"),
        (["--model", "tiny:llama", "--prompt", "x", "--stop", ""], 2, "--stop ('',)"),
        (["--model", "tiny:llama", "--prompt", "x", "--max-batch", "0"], 2, "--max-batch 0"),
        (["--model", "tiny:llama", "--prompts", "/no/such/file"], 2, "/no/such/file"),
        (["--model", "tiny:llama", "--prompts", "/dev/null"], 2, "/dev/null"),
        (["--model", "tiny:llama"], 2, "--prompt"),
        (["--model", "tiny:llama", "--prompt", "x" * 50, "--num-pages", "1", "--page-size", "4"], 1, "pages"),
    ],
)
def test_an_invalid_command_gives_one_message(attnplug: Attnplug, arguments, code, fragment):
    outcome = attnplug("run", *arguments, "--device", "cpu")
    assert outcome.code == code, outcome.err
    assert fragment in outcome.err and "Traceback" not in outcome.err


def test_a_command_line_is_read_without_torch(prompts):
    """An invalid one is refused at once, and a launcher of ranks does not pay for the import of torch (1 s, memory)."""
    code = """
import sys
from attnplug.cli.app import main
prompt = ["run", "--model", "tiny:llama", "--prompt", "x"]
wrong = ["--num-pages=0", "--page-size=0", "--max-tokens=0", "--max-batch=0", "--context-length=0", "--device=tpu",
         "--dtype=x", "--cuda-graph-batch-sizes=x", "--mla-chunk-capacity=0", "--hisparse-config=x", "--state-slots=0",
         "--speculative-algorithm=x", "--enable-plan-stream", "--backend-option=x"]
for arguments in (["--version"], ["--help"], ["run", "--help"], ["run", "--model", "tiny:llama"],
                  *([*prompt, option] for option in wrong), ["conform", "nobody"],
                  ["conform", "torch_native", "--jobs=0"], sys.argv[1:]):
    sys.argv = ["attnplug", *arguments]
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    print(arguments[-1].partition("=")[0], file=sys.stderr)
print([name for name in ("torch", "numpy", "rich") if name in sys.modules], code)
"""
    arguments = ["run", "--model", "tiny:llama", "--prompts", prompts("{"), "--tensor-parallel", "2"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 2"
    assert "not JSON" in done.stderr
    errors = done.stderr[done.stderr.index("error: --num-pages") :].splitlines()
    assert len(errors) == 2 * 17
    assert all(option in error for error, option in zip(errors[:-2:2], errors[1:-2:2], strict=True))


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_that_an_imported_library_swallows_ends_the_command():
    """torch's C code does this."""
    code = """
import signal, sys
from attnplug.cli.app import main

class Swallowing:
    def find_spec(self, name, path=None, target=None):
        if name == "attnplug_engine.cli.generate":
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                pass

sys.meta_path.insert(0, Swallowing())
main()
"""
    arguments = ["run", "--model", "tiny:llama", "--prompt", "x", "--device", "cpu"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_model_whose_layers_nothing_installed_serves_says_what_to_install(attnplug: Attnplug, monkeypatch):
    """D3: a linear kind without a kernel."""
    monkeypatch.setenv("ATTNPLUG_PLUGINS", "")
    outcome = attnplug("run", "--model", "tiny:mamba2", "--prompt", "x", "--device", "cpu")
    assert outcome.code == 1, outcome.err
    assert "'attnplug backends'" in outcome.err and "Traceback" not in outcome.err
    assert "blocked" in attnplug("backends").err
    assert "attnplug-hybrid-linear" in attnplug("backends", "--all").out


def test_a_broken_plugin_is_a_warning(attnplug: Attnplug, monkeypatch: pytest.MonkeyPatch) -> None:
    """D2: auto may have chosen another backend because of it."""
    broken = Broken("odd", Source("odd", "odd_plugin", "odd-dist", "1.2.3"), "RuntimeError: no driver")
    installed = replace(load_registry(), broken=(broken,))
    monkeypatch.setattr("attnplug_engine.prepare.load_registry", lambda: installed)
    outcome = attnplug("run", "--model", "tiny:llama", "--prompt", "hi", "--max-tokens", "1", "--device", "cpu")
    assert outcome.code == 0
    assert "warning: plugin odd (odd-dist 1.2.3): RuntimeError: no driver\n" in outcome.err
