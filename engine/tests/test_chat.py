"""Tokenizers and chat templates against transformers on the same folder, and the errors for bad ones."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from attnplug import UsageError
from attnplug.host import AttnplugError
from attnplug.host import load_model as load_spec
from attnplug_engine import Chat, Engine
from attnplug_engine.checkpoints.random import RandomCheckpoint
from attnplug_engine.checkpoints.safetensors import Checkpoint
from attnplug_engine.cli.prompts import read_prompts
from attnplug_engine.models.architectures import build_model
from attnplug_engine.request import SamplingParams
from attnplug_engine.text import template_process
from attnplug_engine.text.chat_template import ChatTemplate
from attnplug_engine.text.tokenizer import FileTokenizer, end_tokens, find_tokenizer
from attnplug_testing.errors import naming

SPECIAL = ("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>")
MESSAGES = [{"role": "system", "content": "  Be <brief>. "}, {"role": "user", "content": "hello"}]
TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {% if loop.index0 > 5 %}{% break %}{% endif %}
<|im_start|>{{ message.role }}
{{ message['content'] | trim }}{{ eos_token }}
{% endfor %}
{% set seen = namespace(count=0) %}{% set seen.count = messages | length %}
{{ seen.count }}{{ dict(a="<b>") | tojson }}{{ [1] | tojson(indent=2) }}{{ tools is none }}{{ end_token }}
{% generation %}trained{% endgeneration %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False, "rstrip": False,
                  "single_word": False},
    "unk_token": "<unk>",
    "end_token": "<|im_end|>",
    "chat_template": TEMPLATE,
}  # fmt: skip


def write_tokenizer(folder, config=CONFIG):
    """Write a character tokenizer that starts texts with ``<s>``. Its file asks to truncate to 2 tokens and pad to
    16."""
    folder.mkdir(exist_ok=True)
    vocabulary = {token: number for number, token in enumerate((*map(chr, range(32, 127)), "\n", *SPECIAL))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(list(SPECIAL))
    begin = [("<s>", vocabulary["<s>"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=begin)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=16, pad_token="<unk>", pad_id=vocabulary["<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model of 128 tokens, with the tokenizer."""
    folder = write_tokenizer(tmp_path_factory.mktemp("checkpoint"))
    source = RandomCheckpoint.tiny("tiny:llama")
    build_model(source, load_spec("tiny:llama"), dtype=torch.float32, device="cpu")
    source.save(folder)
    return folder


def oracle(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def refusal(folder, chat=None):
    with pytest.raises(UsageError) as caught:
        ChatTemplate.find(str(folder)).render(chat or Chat(MESSAGES))
    assert len(str(caught.value)) < 1000
    return str(caught.value)


# ---- tokenizers ----


def test_truncation_and_padding_of_the_file_are_for_training(folder):
    found = find_tokenizer(str(folder), 128).encode("hello")
    assert found == oracle(folder)("hello").input_ids
    assert len(found) == 6


@pytest.mark.parametrize(
    "keys",
    [
        {"pad_token": "ell"},
        {"sep_token": {"__type": "AddedToken", "content": "lo", "lstrip": True}},
        {"additional_special_tokens": ["ell", {"__type": "AddedToken", "content": "he"}]},
        {"extra_special_tokens": {"image": "ell"}, "additional_special_tokens": ["he"]},
        {"added_tokens_decoder": {"200": {"content": "ell"}, "101": {"content": "lo", "rstrip": True}}},
        {"split_special_tokens": True},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_tokens_that_only_the_config_names_are_tokens(folder, keys):
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **keys}))
    text = "hello lo <|im_end|>ell"
    found = find_tokenizer(str(folder), 128).encode(text)
    assert found == oracle(folder)(text).input_ids
    assert found != FileTokenizer(write_tokenizer(folder / "plain") / "tokenizer.json", 128).encode(text)


@pytest.mark.parametrize(
    "keys",
    [
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"x": {"content": "x"}}},
        {"extra_special_tokens": 3},
        {"added_tokens_decoder": {"1": {"content": 3}}},
        {"added_tokens_decoder": {"1": {"content": "x", "lstrip": "yes"}}},
        {"additional_special_tokens": [3]},
    ],
    ids=str,
)
def test_malformed_added_tokens(folder, keys):
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))
    with pytest.raises(UsageError, match=r"tokenizer_config\.json: '.*' has .*; it must be"):
        find_tokenizer(str(folder), 128)


def test_a_token_beyond_the_models_vocabulary_is_refused_with_both_numbers(folder):
    with pytest.raises(UsageError, check=naming(96, 79)):
        find_tokenizer(str(folder), 80).encode("hello")


@pytest.mark.parametrize("content", ["", "[" * 100_000, "{}", '{"model": 3}'])
def test_a_file_that_is_no_tokenizer(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UsageError, check=naming("tokenizer.json")):
        find_tokenizer(str(tmp_path), 128)


def test_a_file_that_is_too_large_for_a_tokenizer(tmp_path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, check=naming("tokenizer.json", 536870912)):
        find_tokenizer(str(tmp_path), 128)


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "tokenizer_config.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    read = {"tokenizer.json": lambda: find_tokenizer(str(folder), 128),
            "generation_config.json": lambda: end_tokens(str(folder), {}),
            "tokenizer_config.json": lambda: ChatTemplate.find(str(folder))}[name]  # fmt: skip
    with pytest.raises(UsageError, check=naming(name)):
        read()


def test_a_text_that_the_tokenizer_cannot_encode(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="missing"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UsageError, check=naming("tokenizer.json", "[UNK]")):
        FileTokenizer(tmp_path / "tokenizer.json", 128).encode("b")


# ---- where a text ends ----


@pytest.mark.parametrize("spelling", ["", "config.json"])
@pytest.mark.parametrize(
    ("given", "ends"), [({"eos_token_id": 7}, {7}), ({"eos_token_id": [7, 8]}, {7, 8}), ({}, set()), (None, {5})]
)
def test_generation_config_alone_says_where_a_text_ends(tmp_path, spelling, given, ends):
    """Same as in transformers, for both spellings of a folder."""
    (tmp_path / "config.json").write_text("{}")
    if given is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert end_tokens(str(tmp_path / spelling), {"eos_token_id": 5}) == ends


@pytest.mark.parametrize("content", ["[" * 100_000, '{"eos_token_id": ' + "9" * 5000 + "}", '{"eos_token_id": "7"}',
                                     '{"eos_token_id": [7, true]}', '{"eos_token_id": 99999999999999999999}',
                                     '{"eos_token_id": 7.0}', "[]", "{"])  # fmt: skip
def test_a_malformed_generation_config(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(UsageError, check=naming("generation_config.json")) as caught:
        end_tokens(str(tmp_path), {})
    assert len(str(caught.value)) < 1000


# ---- chat templates ----


def test_a_conversation_is_written_as_transformers_writes_it(folder):
    wanted = oracle(folder)
    text = ChatTemplate.find(str(folder)).render(Chat(MESSAGES))
    assert text == wanted.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    tokens = find_tokenizer(str(folder), 128).encode(text, special_tokens=False)
    assert tokens == wanted.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert ChatTemplate.find(str(folder / "config.json")).render(Chat(MESSAGES)) == text


@pytest.mark.parametrize("where", ["list", "jinja", "special tokens", "both", "both, and added tokens"])
def test_templates_and_tokens_are_found_where_transformers_finds_them(folder, where):
    path = folder / "tokenizer_config.json"
    if where == "list":
        named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": TEMPLATE}]
        path.write_text(json.dumps({**CONFIG, "chat_template": named}))
    elif where == "jinja":
        (folder / "chat_template.jinja").write_text("wins{{ messages[0].role }}")
    else:
        config = CONFIG if where.startswith("both") else {"tokenizer_class": "PreTrainedTokenizerFast"}
        added = {"added_tokens_decoder": {}} if where.endswith("added tokens") else {}
        path.write_text(json.dumps({**config, **added, "chat_template": TEMPLATE}))
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": "<s>"}))
    wanted = oracle(folder).apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate.find(str(folder)).render(Chat(MESSAGES)) == wanted


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_a_template_gets_named_extra_tokens_thoughts_and_calls_of_tools(folder, name):
    each = "{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.content is none }}"
    template = f"{{{{ image }}}}{{% for m in messages %}}{each}{{% endfor %}}"
    config = {**CONFIG, "chat_template": template, "extra_special_tokens": {"image": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [*MESSAGES, {"role": "assistant", "content": "x", name: "hm"}, called]
    wanted = oracle(folder).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate.find(str(folder)).render(Chat(messages)) == wanted
    assert "hm|hm|False" in wanted and wanted.endswith("True") and wanted.startswith("<|im_end|>")


def test_a_template_of_an_older_processor(folder):
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].role }}"}))
    assert ChatTemplate.find(str(folder)).render(Chat(MESSAGES)) == "system"


@pytest.mark.parametrize(
    ("template", "fragment"),
    [
        ("ok\n{% for %}", "wrong in line 2"),
        ("{{ " + "(" * 3000, "cannot be compiled"),
        ("{{ raise_exception('no system role, please') }}", "refuses: no system role, please"),
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{{ messages[0].absent.key }}", "no attribute 'absent'"),
        ("{{ ().__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set space = namespace(__class__=1) %}", "not allowed"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ 9 ** 100000 }}", "4300 digits"),
        ("{{ raise_exception('\x1b[2J\u009b2J') }}", "refuses: ?[2J?2J"),
        ("{% for i in range(9999) %}{% for j in range(9999) %}" + "x" * 999 + "{% endfor %}{% endfor %}", "characters"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
        ("{% include 'other' %}", "no loader"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
    ids=lambda value: value[:30],
)
def test_a_template_that_fails_gives_one_message(folder, template, fragment):
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "chat_template": template}))
    message = refusal(folder)
    assert fragment in message
    assert "tokenizer_config.json" in message


TOO_SLOW = (
    "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "{{ lipsum(n=1000000) }}",
    "{{ [1] | slice(100000000) | list }}",
    "{% set n = namespace(x=9) %}{% for i in range(9) %}{% set n.x = n.x ** 9 %}{% endfor %}",
)
TOO_LARGE = (
    "{{ 'x'.ljust(1500000000) }}",
    "{{ 'x' | center(1500000000) }}",
    "{{ 'x' * 10**10 }}",
    "{% set n = namespace(x='xxxx') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
)


@pytest.mark.parametrize(
    ("template", "limit"), [*((each, "0.1 s") for each in TOO_SLOW), *((each, "64 MiB") for each in TOO_LARGE)]
)
@pytest.mark.sample(2)
def test_a_template_that_exceeds_a_limit_is_reported_and_the_next_one_is_rendered(monkeypatch, template, limit):
    monkeypatch.setattr(template_process, "SECONDS", 0.1 if limit == "0.1 s" else 5.0)
    monkeypatch.setattr(template_process, "MEMORY", 64 << 20)
    template_process.PROCESS.close()
    with pytest.raises(UsageError, check=naming("the file", limit)):
        ChatTemplate(template, "the file", {}).render(Chat(MESSAGES))
    assert ChatTemplate("{{ messages[1].content }}", "", {}).render(Chat(MESSAGES)) == "hello"
    template_process.PROCESS.close()


def test_the_time_limit_holds_in_a_process_that_ignores_and_blocks_its_signal(monkeypatch):
    monkeypatch.setattr(template_process, "SECONDS", 0.1)
    handler = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    try:
        template_process.PROCESS.close()
        with pytest.raises(UsageError, check=naming("0.1 s")):
            template_process.PROCESS.render(TOO_SLOW[0], {})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGALRM, handler)


def test_the_memory_limit_holds_where_the_system_enforces_none():
    """Same as on macOS: the worker checks its own resident memory."""
    run = "import resource, runpy, sys; resource.setrlimit = lambda *_: None; sys.argv[0] = sys.argv.pop(1)"
    command = ["-c", f"{run}; runpy.run_path(sys.argv[0], run_name='__main__')", str(template_process._WORKER)]
    process = subprocess.run(
        [sys.executable, *command, str(64 << 20), "77", json.dumps(sys.path)],
        input=json.dumps({"template": TOO_LARGE[3], "variables": {}, "seconds": 5}),
        capture_output=True,
        text=True,
    )
    assert (process.returncode, process.stdout, process.stderr) == (77, "", "")


def test_one_worker_renders_all_prompts_and_an_interrupt_does_not_mix_answers():
    def pid():
        return template_process.PROCESS._process.pid

    def render(template, **variables):
        return template_process.PROCESS.render(template, variables)

    assert render("{{ a }}", a="\ud800é") == {"text": "\ud800é"}
    before = pid()
    assert render("{{ a }}", a=2) == {"text": "2"} and pid() == before
    with pytest.raises(UsageError, check=naming("JSON", "set")):
        render("{{ a }}", a={1})
    assert pid() == before
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            render(TOO_SLOW[0])
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert render("{{ a }}", a=3) == {"text": "3"} and pid() != before


def test_a_worker_that_is_gone_is_replaced_and_a_dying_one_is_reported(monkeypatch):
    template_process.PROCESS.start()
    process = template_process.PROCESS._process
    process.kill()
    process.wait()
    assert template_process.PROCESS.render("x", {}) == {"text": "x"}
    monkeypatch.setattr(sys, "executable", "/bin/false")
    template_process.PROCESS.close()
    with pytest.raises(AttnplugError, check=naming("exit code 1")):
        template_process.PROCESS.render("x", {})
    monkeypatch.setattr(sys, "executable", "/nowhere")
    with pytest.raises(AttnplugError, check=naming("/nowhere")):
        template_process.PROCESS.render("x", {})


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ({}, "has no chat template"),
        ({"chat_template": 3}, "it must be a text"),
        ({"chat_template": [{"name": "rag", "template": "x"}, 3]}, "has no template named 'default'"),
        ({"chat_template": [{"name": "default", "template": None}]}, "it must be a text"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON that can be read"),
    ],
)
def test_a_config_without_a_usable_template(folder, content, fragment):
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "tokenizer_config.json").write_text(text)
    assert fragment in refusal(folder)


def test_a_built_in_model_has_no_template():
    with pytest.raises(UsageError, check=naming("tiny:llama")):
        ChatTemplate.find("tiny:llama")


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], ["messages", "[]"]),
        ("hello", ["messages", "hello"]),
        (["hello"], ["hello", "0"]),
        ([{"role": "user"}], ["content", "message 0"]),
        ([MESSAGES[0], {"role": 3, "content": "x"}], ["role", "message 1", 3]),
        ([{"role": "user", "content": [{"type": "text"}]}], ["content", "message 0"]),
        ([{"role": "assistant", "content": None, "tool_calls": []}], ["content", "message 0", None]),
    ],
)
def test_malformed_messages(messages, named):
    with pytest.raises(UsageError, check=naming("messages", *named)):
        Chat(messages)


# ---- in the engine, and on the command line ----


def test_the_engine_takes_a_conversation_as_a_prompt(checkpoint):
    engine = Engine(str(checkpoint), device="cpu", num_pages=64)
    tokens = oracle(checkpoint).apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    request = engine.add(Chat(MESSAGES), SamplingParams(max_tokens=4))
    assert list(request.prompt) == tokens
    engine.abort(request)
    chat, plain = engine.generate([Chat(MESSAGES), tokens], max_tokens=4)
    assert chat.token_ids == plain.token_ids
    with pytest.raises(UsageError, check=naming("prompt 0", "surrogate")):
        engine.generate([Chat.of_user("\ud800")], max_tokens=4)


def test_prompts_become_messages_with_chat_and_messages_always_are(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "hello"}, {"messages": MESSAGES}, {"prompt_token_ids": [1, 2]}]
    path.write_text("\n".join(map(json.dumps, lines)))
    defaults = SamplingParams(max_tokens=4)
    prompts = [line.prompt for line in read_prompts(str(path), defaults, chat=True)]
    assert prompts == [Chat.of_user("hello"), Chat(MESSAGES), [1, 2]]
    assert [line.prompt for line in read_prompts(str(path), defaults)] == ["hello", Chat(MESSAGES), [1, 2]]
    path.write_text('{"messages": [{"role": "user"}]}')
    with pytest.raises(UsageError, check=naming("prompts.jsonl:1", "content", "message 0")):
        read_prompts(str(path), defaults)


def test_run_chat_answers_a_users_message(attnplug, checkpoint):
    options = ("run", "--model", str(checkpoint), "--device", "cpu", "--max-tokens", "4", "--json")
    answer = attnplug(*options, "--chat", "--prompt", "hello")
    assert answer.code == 0, answer.err
    engine = Engine(str(checkpoint), device="cpu", num_pages=64)
    (wanted,) = engine.generate([Chat.of_user("hello")], max_tokens=4)
    assert answer.json["token_ids"] == wanted.token_ids
    refused = attnplug("run", "--model", "tiny:llama", "--device", "cpu", "--chat", "--prompt", "hello")
    assert refused.code == 2
    assert "has no chat template" in refused.err


TEXT, TOKENS = ("--prompt", "hello"), ("--prompts", "-")


@pytest.mark.parametrize(
    ("arguments", "files", "named"),
    [
        (("run", *TEXT), {}, ("--prompt:", "no tokenizer.json")),
        (("embed", *TEXT), {}, ("--prompt:", "no tokenizer.json")),
        (("run", *TOKENS, "--stop", "x"), {}, ("standard input:1", "stop texts")),
        (("run", "--chat", *TEXT), {"tokenizer.json": "{}"}, ("--prompt:", "no chat template")),
        (("run", *TEXT), {"tokenizer.json": "{"}, ("tokenizer.json cannot be read",)),
        (("embed", *TOKENS), {"tokenizer.json": "{"}, ("tokenizer.json cannot be read",)),
        (("run", *TOKENS), {"generation_config.json": '{"eos_token_id": "x"}'}, ("generation_config.json",)),
    ],
    ids=["run", "embed", "stop", "chat", "tokenizer", "tokenizer of embed", "end tokens"],
)
def test_files_that_prompts_need_are_checked_before_weights_are_read(
    arguments, files, named, attnplug, tmp_path, monkeypatch
):
    """E5"""
    source = RandomCheckpoint.tiny("tiny:llama")
    build_model(source, load_spec("tiny:llama"), dtype=torch.float32, device="cpu")
    source.save(tmp_path)
    monkeypatch.setattr(Checkpoint, "tensor", lambda self, name, *_, **__: pytest.fail(f"{name} was read"))
    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt_token_ids": [1, 2]}'))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    command, *rest = arguments
    outcome = attnplug(command, "--model", str(tmp_path), "--device", "cpu", *rest)
    assert outcome.code == 2
    assert all(part in outcome.err for part in named), outcome.err
