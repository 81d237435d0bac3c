"""The engine as a person uses it from Python: prompts, sampling, texts, aborts."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from attnplug import DType, Role, UsageError
from attnplug.host import load_model as load_spec
from attnplug_engine import Engine, SamplingParams
from attnplug_engine.checkpoints.random import RandomCheckpoint
from attnplug_engine.models.architectures import build_model
from attnplug_engine.options import EngineOptions
from attnplug_testing.errors import naming
from attnplug_testing.measured import measured_twins


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine("tiny:llama", attention_backend="torch_native", device="cpu", page_size=4, num_pages=64, max_batch=4)


def test_prompts_may_be_text_or_tokens(engine):
    by_text, by_tokens = engine.generate(["hi", list(b"hi")], max_tokens=5)
    assert by_text.token_ids == by_tokens.token_ids and len(by_text.token_ids) == 5
    assert (by_text.index, by_tokens.index, by_text.finish_reason) == (0, 1, "length")
    assert by_text.text == bytes(by_text.token_ids).decode()


def test_token_ids_may_be_any_whole_numbers_and_bytes_are_none(engine):
    (expected,) = engine.generate([[104, 105]], max_tokens=2)
    (found,) = engine.generate([list(np.array([104, 105]))], max_tokens=2)
    assert found.token_ids == expected.token_ids
    with pytest.raises(UsageError, check=naming("prompt 0", "bytes")):
        engine.generate([b"hi"])


def test_a_special_token_as_a_stop_text_ends_a_request(folder, tmp_path):
    """Texts leave out special tokens."""
    (free,) = Engine(folder, device="cpu").generate([[5, 6]], max_tokens=8)
    last = free.token_ids[3]
    copy = shutil.copytree(folder, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
    tokenizer.add_special_tokens([f"t{last}"])
    tokenizer.save(str(copy / "tokenizer.json"))
    (stopped,) = Engine(copy, device="cpu").generate([[5, 6]], max_tokens=8, stop=f"t{last}")
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(last) + 1]


def test_a_dtype_may_be_torchs():
    assert EngineOptions(dtype=torch.bfloat16).dtype is DType.BFLOAT16


def test_sampling_is_reproducible_whatever_else_is_in_the_batch(engine):
    params = SamplingParams(max_tokens=20, temperature=0.9, top_k=40, top_p=0.95, seed=7)
    (alone,) = engine.generate(["a prompt"], params)
    crowd = engine.generate(["one", "a prompt", "another one", "x"], params)
    assert crowd[1].token_ids == alone.token_ids
    other = engine.generate(["a prompt"], SamplingParams(max_tokens=20, temperature=0.9, seed=8))
    assert other[0].token_ids != alone.token_ids


def test_a_stop_token_ends_a_request(engine):
    (free,) = engine.generate(["hello"], max_tokens=12)
    stop = free.token_ids[4]
    (stopped,) = engine.generate(["hello"], max_tokens=12, stop_token_ids=frozenset({stop}))
    first = free.token_ids.index(stop)
    assert stopped.token_ids == free.token_ids[: first + 1] and stopped.finish_reason == "stop"


def test_a_request_ends_at_its_own_stop_tokens_and_at_the_checkpoints(engine, monkeypatch):
    (free,) = engine.generate(["hello"], max_tokens=12)
    tokens = free.token_ids
    for own, checkpoints in ((tokens[4], 127), (127, tokens[4])):
        monkeypatch.setattr(engine, "stop_token_ids", frozenset({checkpoints}))
        (stopped,) = engine.generate(["hello"], max_tokens=12, stop_token_ids=frozenset({own}))
        assert stopped.token_ids == tokens[: tokens.index(tokens[4]) + 1]


def test_an_aborted_request_keeps_what_it_has_and_gives_its_pages_back(engine):
    engine.cache.clear()
    request = engine.add("some prompt", SamplingParams(max_tokens=30))
    for _ in range(4):
        engine.step()
    engine.abort(request)
    assert request.finish_reason == "aborted" and len(request.output) >= 3
    engine.cache.clear()
    assert engine.runner.allocator.free_pages == 64


def test_a_stream_that_is_left_early_leaves_nothing_behind(engine):
    for update in engine.stream(["one", "two"], SamplingParams(max_tokens=30)):
        if update.token is not None:
            break
    assert not engine.scheduler.has_work
    engine.cache.clear()
    assert engine.runner.allocator.free_pages == 64


def test_prompts_in_one_piece_are_not_cut_beside_requests_that_decode():
    """A6: ``chunked_prefill_size=-1`` holds for every prompt."""
    whole = Engine("tiny:llama", device="cpu", page_size=4, max_batch=3, context_length=32, chunked_prefill_size=-1)
    decoding = [whole.add(text, SamplingParams(max_tokens=9)) for text in ("hi", "ho")]
    whole.step()
    longest = whole.add("x" * 31, SamplingParams(max_tokens=1))
    whole.step()
    assert [len(request.output) for request in (*decoding, longest)] == [2, 2, 1]


def test_statistics_count_tokens_by_what_they_were_for(engine):
    fresh = Engine("tiny:llama", device="cpu", prefix_cache=False)
    fresh.generate(["four", "sevenxx"], max_tokens=3)
    assert (fresh.statistics.prefill_tokens, fresh.statistics.decode_tokens) == (11, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny:llama as a checkpoint. Its tokenizer has more tokens than the model: 0 to 129, "t0" to "t129"."""
    folder = tmp_path_factory.mktemp("checkpoint")
    source = RandomCheckpoint.tiny("tiny:llama")
    build_model(source, load_spec("tiny:llama"), dtype=torch.float32, device="cpu")
    source.save(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{number}": number for number in range(130)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_model_may_be_a_path(folder, engine):
    by_path = Engine(folder, device="cpu")
    assert (
        by_path.generate([[1, 2, 3]], max_tokens=4)[0].token_ids
        == engine.generate([[1, 2, 3]], max_tokens=4)[0].token_ids
    )


def test_a_tokenizer_of_another_model_is_refused_before_anything_runs(folder):
    engine = Engine(folder, device="cpu")
    with pytest.raises(UsageError, check=naming("prompt 1", 129, 127)):
        engine.generate(["t1 t2", "t3 t129 t128"], max_tokens=2)
    assert not engine.scheduler.has_work and not engine.statistics.prefill_tokens


def test_reading_a_checkpoint_reports_its_progress(folder):
    events: list[tuple[int, int]] = []
    Engine(folder, device="cpu", progress=lambda done, total: events.append((done, total)))
    total = events[0][1]
    assert [done for done, _ in events] == list(range(1, total + 1)) and {of for _, of in events} == {total}


def test_usage_counts_the_tokens_of_each_prompt():
    fresh = Engine("tiny:llama", device="cpu", page_size=4)
    first, second = (fresh.generate([[1, 2, 3, 4, 5, 6]], max_tokens=3)[0].usage for _ in range(2))
    assert (first.prompt_tokens, first.completion_tokens, first.cached_tokens) == (6, 3, 0)
    assert (second.prompt_tokens, second.completion_tokens, second.cached_tokens) == (6, 3, 4)


class TestStopTexts:
    def test_the_text_ends_before_it_and_the_tokens_with_it(self, engine):
        (free,) = engine.generate(["hello"], max_tokens=12)
        (stopped,) = engine.generate(["hello"], max_tokens=12, stop=[free.text[5:8], "no such text"])
        end = free.text.index(free.text[5:8])
        assert (stopped.text, stopped.finish_reason) == (free.text[:end], "stop")
        assert stopped.token_ids == free.token_ids[: end + 3]
        assert not engine.scheduler.has_work and not engine.loop._observed

    def test_one_that_is_complete_with_the_last_token(self, engine):
        (free,) = engine.generate(["hello"], max_tokens=8)
        (stopped,) = engine.generate(["hello"], max_tokens=8, stop=free.text[-3:])
        assert (stopped.text, stopped.finish_reason) == (free.text[:-3], "stop")

    def test_one_that_is_complete_with_the_last_token_ends_its_request_once(self, engine):
        """A caller that follows several requests would take a second end for another request's."""
        (free,) = engine.generate(["hello"], max_tokens=4)
        params = [SamplingParams(4, stop=(free.text[-3:],)), SamplingParams(9)]
        assert [len(found.token_ids) for found in engine.generate(["hello", "another"], params)] == [4, 9]

    def test_one_that_is_not_complete_is_part_of_the_text(self, engine):
        (free,) = engine.generate(["hello"], max_tokens=8)
        (going,) = engine.generate(["hello"], max_tokens=8, stop=free.text[-3:] + "?")
        assert (going.text, going.finish_reason) == (free.text, "length")

    def test_others_in_the_batch_go_on(self, engine):
        free = engine.generate(["one", "two", "three"], max_tokens=12)
        stopping = SamplingParams(max_tokens=12, stop=(free[1].text[3],))
        some = engine.generate(["one", "two", "three"], [SamplingParams(12), stopping, SamplingParams(12)])
        assert [some[0].text, some[2].text] == [free[0].text, free[2].text]
        assert some[1].token_ids == free[1].token_ids[: free[1].text.index(free[1].text[3]) + 1]

    def test_a_request_that_is_aborted_while_a_step_runs_is_looked_at_no_more(self, engine, monkeypatch):
        """Same as by an iterator that is garbage-collected at that moment. Its token of that step does not count."""
        aborted, other = (engine.add("hello", SamplingParams(6, stop=("?!?",), logprobs=1)) for _ in range(2))
        engine.step()
        original = engine.runner.launch
        monkeypatch.setattr(engine.runner, "launch", lambda step: (engine.abort(aborted), original(step))[1])
        while engine.step():
            pass
        assert (len(aborted.output), len(aborted.logprobs)) == (1, 1)
        assert (len(other.output), len(other.logprobs)) == (6, 6)

    def test_they_need_a_tokenizer(self, folder, tmp_path):
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).symlink_to(folder / name)
        with pytest.raises(UsageError, check=naming("prompt 0", "tokenizer.json")):
            Engine(tmp_path, device="cpu").generate([[1, 2]], stop=["x"])


def test_logprobs_are_those_of_the_model(make_oracle):
    """Before temperature, natural logarithm; compared with transformers, in a batch with a request without log
    probabilities."""
    oracle = make_oracle("llama")
    engine = Engine(oracle.folder, device="cpu", page_size=4, chunked_prefill_size=5, ignore_eos=True)
    prompt = [5, 6, 7, 8, 9, 10, 11]
    params = SamplingParams(max_tokens=6, temperature=1.7, top_k=9, seed=3, logprobs=4)
    asking, silent = engine.generate([prompt, [1, 2, 3]], [params, SamplingParams(max_tokens=9)])
    assert silent.logprobs is None and len(asking.logprobs) == 6
    logits = oracle.logits(prompt + asking.token_ids)[len(prompt) - 1 : -1].double()
    expected = torch.log_softmax(logits, dim=-1)
    for place, (token, printed) in enumerate(zip(asking.token_ids, asking.logprobs, strict=True)):
        assert printed.token_id == token and printed.logprob == pytest.approx(float(expected[place, token]), abs=1e-4)
        best = expected[place].topk(4)
        assert [likely.token_id for likely in printed.top] == best.indices.tolist()
        assert [likely.logprob for likely in printed.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_a_text_ends_where_the_checkpoint_says(tmp_path, where):
    """generation_config.json has the last word, as in transformers."""
    source = RandomCheckpoint.tiny("tiny:llama")
    build_model(source, load_spec("tiny:llama"), dtype=torch.float32, device="cpu")
    source.save(tmp_path)
    free = Engine(str(tmp_path), device="cpu", ignore_eos=True).generate([[1, 2, 3]], max_tokens=12)[0].token_ids
    end = free[5]
    path = tmp_path / where
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, "eos_token_id": [end, 127]}))
    (ended,) = Engine(str(tmp_path), device="cpu").generate([[1, 2, 3]], max_tokens=12)
    assert ended.token_ids == free[: free.index(end) + 1] and ended.finish_reason == "stop"


def test_dtypes_and_fp8_cache_run():
    for dtype, kv_dtype in (("bf16", None), ("bf16", "fp8"), (DType.FLOAT16, None)):
        engine = Engine("tiny:deepseek_v3", device="cpu", dtype=dtype, kv_dtype=kv_dtype)
        assert len(engine.generate(["hello"], max_tokens=4)[0].token_ids) == 4


def test_auto_takes_what_was_measured_the_fastest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other backends share the role for the batches in which they are faster."""
    layer = load_spec("tiny:llama").layers[0]
    twins = measured_twins(monkeypatch, tmp_path, layer, DType.FLOAT32)
    monkeypatch.setattr("attnplug_engine.prepare.load_registry", lambda: twins)
    selection = Engine("tiny:llama", device="cpu", dtype="float32", num_pages=64, max_batch=4).selection
    assert selection.chosen(Role.DECODE).spec.name == "beta"
    assert [backend.spec.name for backend in selection.serving(Role.DECODE)] == ["beta", "alpha"]


@pytest.mark.parametrize("given", [None, "7"])
def test_freed_memory_is_kept_for_a_while_by_the_allocator_that_torch_has_on_arm(given):
    """The environment variable must be set before torch is loaded. A user's own value is kept."""
    name = "MIMALLOC_PURGE_DELAY"
    code = f"import sys, os, attnplug_engine; assert 'torch' not in sys.modules; print(os.environ.get({name!r}))"
    environment = {key: value for key, value in os.environ.items() if key != name}
    environment |= {} if given is None else {name: given}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    arm = platform.machine() in ("aarch64", "arm64")
    assert done.stdout.strip() == (given or ("1000" if arm else "None"))
