"""Warm-up: it leaves no trace, covers every kind of step, and fits the pool."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attnplug import PoolError, UsageError
from attnplug.declare.device import Processor
from attnplug.host import TINY_CONFIGS
from attnplug_engine import Embedder, Engine, EngineOptions
from attnplug_engine.cli import generate
from attnplug_engine.execution import compilations
from attnplug_engine.execution.compilations import Compilation, CompilationMark, describe
from attnplug_engine.memory.capacity import Capacity
from attnplug_engine.scheduling.warm_up import embedding_batches, warm_up_batches
from attnplug_engine.serving.start_up import warm_up
from attnplug_testing.errors import naming

PROMPTS = [[5, 6, 7], list(range(20)), [9] * 11]


def run_warm_up(engine, progress=None):
    """Run the warm-up of a GPU engine on a CPU."""
    return warm_up(engine.runner, engine.rounds, engine.options, engine.vocab_size, 1, progress)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("tiny:llama", {"max_batch": 4, "chunked_prefill_size": 16}),
        ("tiny:deepseek_v3", {"speculative_algorithm": "mtp", "max_batch": 2}),
        ("tiny:kimi_linear", {"prefix_cache": False, "num_pages": 3, "page_size": 16, "max_batch": 2}),
        ("tiny:deepseek_v32", {"enable_hisparse": True, "page_size": 16, "max_batch": 2}),
    ],
)
@pytest.mark.sample(1)
def test_a_warm_engine_answers_like_a_cold_one(model, settings):
    """E1: rows, pages, states, statistics and prefix cache are those of an engine that ran nothing."""
    cold, warm = (Engine(model, device="cpu", context_length=48, **settings) for _ in range(2))
    free = warm.runner.allocator.free_pages
    run_warm_up(warm)
    assert warm.runner.allocator.free_pages == free
    assert (warm.statistics.prefill_tokens, warm.statistics.decode_tokens) == (0, 0)
    assert warm.statistics.backend_usage.by_backend() == {} and not warm.loop._observed
    if warm.runner.states is not None:
        assert warm.runner.states.free_slots == cold.runner.states.free_slots
    for engine in (cold, warm):
        engine.generate([PROMPTS[1]], max_tokens=1)  # the second time it is a prefix hit
    answers = [[each.token_ids for each in engine.generate(PROMPTS, max_tokens=6)] for engine in (cold, warm)]
    assert answers[0] == answers[1]


def test_warm_up_covers_every_kind_of_step():
    """E1: sizes by powers of two, page boundaries, prefixes, many requests, greedy and sampled, with a prefill."""
    batches = list(warm_up_batches(Capacity(1000, 16, max_batch=6, max_step_tokens=64, context_length=9000)))
    lengths = [[len(request.prompt) for request in batch] for batch in batches]
    alone = [1, 2, 4, 8, 15, 16, 17, 32]
    assert lengths[: len(alone) + 3] == [[64], *([tokens] for tokens in alone), [81], [64 + 8192 + 17]]
    decoding = [[17] * count for count in (1, 2, 4, 6)]
    full_steps = [[32] * 2, [21] * 3, [12] * 5]
    equal = [[tokens] * count for count in (2, 4, 6) for tokens in (2, 4, 8, 16, 32) if count * tokens <= 64]
    longest = ((2, 63), (4, 61), (6, 59))
    different = [[tokens, *[1] * (count - 1)] for count, most in longest for tokens in (2, 4, 8, 16, 32, most)]
    beside = [[17] * count + [145] for count in (1, 4, 5)]
    several = lengths[len(alone) + 3 + len(decoding + full_steps) : -len(beside)]
    assert lengths[len(alone) + 3 :] == decoding + full_steps + several + beside
    assert sorted(several) == sorted(equal + different)
    assert {request.params.temperature for request in batches[-1]} == {0.0, 0.8}
    requests = [request for batch in batches for request in batch]
    assert len({request.id for request in requests}) == len(requests)


@pytest.mark.parametrize("step_tokens", [1, 3, 24, 64])
@pytest.mark.parametrize("max_batch", [1, 5, 40])
def test_warm_up_prompts_have_tokens_and_fit(step_tokens, max_batch):
    """E1: also if a step has fewer tokens than requests may run."""
    for context in (step_tokens + 5, 200):
        capacity = Capacity(60, 4, max_batch=max_batch, max_step_tokens=step_tokens, context_length=context)
        for batch in warm_up_batches(capacity):
            assert all(0 < len(request.prompt) < context for request in batch) and len(batch) <= max_batch
        for prompts in embedding_batches(capacity, step_tokens):
            assert all(0 < len(prompt) <= context for prompt in prompts) and len(prompts) <= max_batch


def test_a_warm_up_step_decodes_beside_a_chunk_of_a_prompt(monkeypatch):
    """E1: kernels of mixed steps are compiled, too."""
    engine = Engine("tiny:llama", device="cpu", max_batch=4, chunked_prefill_size=32, context_length=96)
    mixed, launch = [], engine.runner.launch

    def record(step):
        counts = {len(entry.token_ids) for entry in step.entries if entry.position}
        mixed.append(1 in counts and max(counts) > 1)
        return launch(step)

    monkeypatch.setattr(engine.runner, "launch", record)
    seen = []
    run_warm_up(engine, lambda *counts: seen.append(counts))
    assert any(mixed)
    assert seen == [(done, len(seen)) for done in range(len(seen))]


def test_compilations_are_counted_and_other_listeners_are_called(monkeypatch):
    """E1: Triton's variants, FlashInfer's modules and kernels that backends list, from disk caches or not."""
    knobs = pytest.importorskip("triton").knobs
    heard = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **event: heard.append(event["cache_hit"]))
    monkeypatch.setattr(compilations, "_watching", False)
    registry = SimpleNamespace(get_all_specs=lambda: dict.fromkeys(modules))
    monkeypatch.setitem(sys.modules, "flashinfer.jit.core", SimpleNamespace(jit_spec_registry=registry))
    modules = ["old"]
    mark = CompilationMark()
    assert mark.since() == []
    for hit in (False, True):
        times = SimpleNamespace(total=1_500_000)
        knobs.compilation.listener(src=None, metadata={"name": "attend"}, metadata_group={}, times=times, cache_hit=hit)
    modules.append("batch_mla")
    monkeypatch.setattr(compilations, "compiled_kernels", [*compilations.compiled_kernels, ("acme: flash", 7.0)])
    found = mark.since()
    assert [(each.name, each.cached) for each in found] == [
        ("acme: flash", False),
        ("batch_mla", True),
        ("attend", False),
        ("attend", True),
    ]
    assert heard == [False, True] and CompilationMark().since() == []
    assert describe(found) == "compiled 2 kernels in 8.5 s; cached for the next start"
    assert describe(found[1:2]) is None


def test_an_engine_on_a_cpu_compiles_nothing():
    engine = Engine("tiny:llama", device="cpu")
    assert engine.start_up.compiled == () and engine.start_up.seconds > 0
    assert engine.compilations_since_start == []


def test_warm_compiles_nothing_for_a_cpu(attnplug):
    outcome = attnplug("warm", "--model", "tiny:llama", "--device", "cpu", "--max-batch", "4")
    assert outcome.code == 0 and "device cpu" in outcome.out and outcome.out.count("\n") == 1
    assert attnplug("warm", "--model", "tiny:llama", "--device", "cpu", "--json").json["compiled"] == []
    assert attnplug("warm", "--model", "/nowhere", "--device", "cpu").code == 2


def test_warm_starts_an_engine_from_a_config_alone(attnplug, monkeypatch, tmp_path):
    """E1: with random weights; it prints every kernel that was compiled, and where they are cached."""
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS["llama"]))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    compiled = (Compilation("attend", 2.5, False), Compilation("merge", 0.0, True))
    real, started = generate.Engine, []

    def start(model, options, **callbacks):
        engine = real(model, options, **callbacks)
        engine.start_up = replace(engine.start_up, compiled=compiled)
        started.append(options)
        return engine

    monkeypatch.setattr(generate, "Engine", start)
    monkeypatch.setattr(generate, "open_device", lambda *_: (torch.device("cuda"), Processor("GPU", 90)))
    outcome = attnplug("warm", "--model", str(tmp_path), "--device", "cpu", "--max-batch", "4")
    assert outcome.code == 0 and started[0].random_weights and started[0].max_batch == 4
    for text in ("2.5 s  attend", "compiled 1 kernel", "loaded 1 from the caches", str(tmp_path / "kernels")):
        assert text in outcome.out


def test_the_warm_up_of_an_embedder_covers_every_kind_of_step():
    """E1: lengths by powers of two and at page boundaries, the context's length, short prompts and full steps."""
    capacity = Capacity(100, 16, max_batch=6, max_step_tokens=64, context_length=100)
    lengths = [[len(prompt) for prompt in batch] for batch in embedding_batches(capacity, 64)]
    alone = [1, 2, 4, 8, 15, 16, 17, 32, 64, 100]
    several = [[17] * 2, [17] * 4, [17] * 6, [32] * 2, [21] * 3, [12] * 5]
    different = [[4, *[1] * (count - 1)] for count in (2, 4, 6)]
    assert lengths[: len(alone) + len(several)] == [[tokens] for tokens in alone] + several
    assert all(kind in lengths for kind in different)
    assert list(embedding_batches(Capacity(1, 4, 8, 64, 500), 64)) == [[(0,) * tokens] for tokens in (1, 2, 3, 4)]


@pytest.mark.parametrize("settings", [{}, {"chunked_prefill_size": 7}], ids=["whole", "chunked"])
@pytest.mark.parametrize("model", ["tiny:llama", "tiny:deepseek_v3", "tiny:kimi_linear"])
@pytest.mark.sample(2)
def test_a_warm_embedder_embeds_like_a_cold_one(model, settings):
    """E1: no rows, slots or counts are left; progress is reported."""
    cold, warm = (Embedder(model, device="cpu", context_length=40, max_batch=3, **settings) for _ in range(2))
    seen: list[tuple[int, int]] = []
    free = warm.runner.allocator.free_pages
    warm.warm_up(lambda *counts: seen.append(counts))
    assert seen == [(done, len(seen)) for done in range(len(seen))] and len(seen) > 8
    assert warm.runner.allocator.free_pages == free and warm.runner.backend_usage.by_backend() == {}
    for mine, theirs in zip(warm.embed(PROMPTS), cold.embed(PROMPTS), strict=True):
        assert torch.equal(mine.vector, theirs.vector)
    assert warm.start_up.seconds > 0 and warm.start_up.compiled == () and warm.compilations_since_start == []


def test_prompts_that_do_not_fit_need_no_warm_up(monkeypatch):
    """E1: a step of usual length that does not fit is refused at start; a longer one fails when it is requested."""
    embedder = Embedder("tiny:llama", device="cpu", context_length=40)
    stream, most = embedder._loop.stream, 16

    def limited(prompts):
        if max(map(len, prompts)) > most:
            raise torch.OutOfMemoryError("no memory")
        return stream(prompts)

    monkeypatch.setattr(embedder._loop, "stream", limited)
    monkeypatch.setattr("attnplug_engine.serving.embedding.STEP_TOKENS", 16)
    embedder.warm_up()
    most = 15
    with pytest.raises(torch.OutOfMemoryError):
        embedder.warm_up()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_no_prompt_of_an_embedder_waits_for_a_compiler():
    """E1"""
    embedder = Embedder("tiny:llama", device="cuda", dtype="bfloat16")
    kinds = [[1], [500], [33] * 7, [100] * 32, [64] * 2, [65] * 5, [3, 9], [7, 40, 900], [1, 2, 3, 4, 5, 250]]
    for lengths in kinds:
        embedder.embed([[1 + place % 100 for place in range(tokens)] for tokens in lengths])
        assert [each.name for each in embedder.compilations_since_start] == [], lengths


MODELS = {
    "mla": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    "llama": {"head_dim": 128},
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize(("model", "dims"), [("tiny:deepseek_v3", MODELS["mla"]), ("tiny:llama", MODELS["llama"])])
def test_no_request_waits_for_a_compiler(model, dims, tmp_path):
    """E1: after start-up, the first request of every kind compiles and loads nothing."""
    config = {**TINY_CONFIGS[model.removeprefix("tiny:")], **dims, "max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"random_weights": True, "dtype": "bfloat16", "max_batch": 128, "num_pages": 1024, "page_size": 64}
    engine = Engine(tmp_path, device="cuda", chunked_prefill_size=2048, **settings)
    vocab = engine.vocab_size
    alike = [[8184], [2048], [512] * 32, [256] * 128, [5000] * 3, [1], [33] * 7, [64] * 2, [65] * 5]
    for lengths in (*alike, [3, 9], [1001, 17], [40, 700, 2001], [1, 2, 3, 4, 5, 1999], [*range(1, 40)]):
        for sampling in ({}, {"temperature": 0.8, "top_p": 0.9}, {"logprobs": 3}):
            prompts = [[(number + place) % vocab for place in range(each)] for number, each in enumerate(lengths)]
            engine.generate(prompts, max_tokens=5, **sampling)
            prefixed = [[*prompt, 1, 2, 3] for prompt in prompts]
            engine.generate(prefixed, max_tokens=5, **sampling)
            assert [each.name for each in engine.compilations_since_start] == [], (lengths, sampling)


@pytest.mark.parametrize(("pages", "context"), [(1, 5), (1, 500), (2, 20)])
def test_warm_up_fits_a_small_pool(pages, context):
    for batch in warm_up_batches(Capacity(pages, 16, max_batch=8, max_step_tokens=64, context_length=context)):
        for request in batch:
            assert request.max_length <= min(context, 16 * pages)


def test_warm_up_counts_only_the_pages_that_all_ranks_have():
    """Under tensor parallelism, a rank with more memory has surplus pages, which are allocated before the warm-up."""
    engine = Engine("tiny:llama", device="cpu", num_pages=40, page_size=4, max_batch=2)
    engine.runner.allocator.allocate(30)
    limit = run_warm_up(engine)
    assert limit is not None and engine.runner.allocator.free_pages == 10


def test_ranks_agree_on_the_limit_of_the_slowest():
    class Ranks:
        size = 2

        def all_gather(self, seconds, dim):
            return torch.cat((seconds, torch.tensor([[0.05 / 1000, 0.0]], dtype=torch.float64)), dim)

    engine = Engine("tiny:llama", device="cpu", inter_token_latency=0.05, chunked_prefill_size=64, context_length=1024)
    engine.runner.parallel = Ranks()
    limit = run_warm_up(engine)
    assert limit is not None and limit.tokens <= 896


def test_prompts_that_are_not_chunked_are_not_timed():
    assert run_warm_up(Engine("tiny:llama", device="cpu", chunked_prefill_size=-1, context_length=256)) is None


@pytest.mark.parametrize("latency", [0, -1.0, float("nan"), True, "fast", 50])
def test_a_latency_is_seconds_above_0(latency):
    """Milliseconds are refused, too."""
    with pytest.raises(UsageError, check=naming("inter_token_latency")):
        Engine("tiny:llama", device="cpu", inter_token_latency=latency)
    EngineOptions(inter_token_latency=float("inf"))


def test_a_step_that_does_not_fit_is_refused_at_start_up(monkeypatch):
    """E1: with the setting to lower, before a request is accepted."""
    engine = Engine("tiny:llama", device="cpu", chunked_prefill_size=16)

    def exhausted(step):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(engine.runner, "launch", exhausted)
    with pytest.raises(PoolError, check=naming(16, "chunked_prefill_size")):
        run_warm_up(engine)
