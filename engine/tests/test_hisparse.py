"""HiSparse in the engine: always the same tokens as without it, and no memory left in use (A10)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refilled_native import build, captured
from safetensors.torch import load_file, save_file

from attnplug import DType, PoolError, UsageError
from attnplug.host import TINY_CONFIGS
from attnplug_engine import Engine, EngineOptions, SamplingParams
from attnplug_engine.checkpoints.random import RandomCheckpoint
from attnplug_engine.memory.capacity import HotBytes, bytes_per_page
from attnplug_engine.models.architectures import load_model
from attnplug_engine.request import Request
from attnplug_sparse.hisparse import HiSparse
from attnplug_sparse.pools import COMPRESSED
from attnplug_testing.command import Attnplug
from attnplug_testing.devices import INTERPRETED
from attnplug_testing.errors import having, missing_values, naming

SPARSE = ["tiny:deepseek_v32", "tiny:glm_moe_dsa"]
V4, V4_TOPK = "tiny:deepseek_v4", TINY_CONFIGS["deepseek_v4"]["index_topk"]
TOPK, LAYERS = 12, 4
NAN = float("nan")


def prompts() -> list[list[int]]:
    """Prompts shorter and far longer than the number of rows that a token attends to. Two share a prefix."""
    random = torch.Generator().manual_seed(8)
    drawn = [torch.randint(0, 128, (length,), generator=random).tolist() for length in (50, 5, 33, 40, 1)]
    drawn[3][:30] = drawn[0][:30]
    return drawn


def make(model: str = SPARSE[1], *, hot: int | None = TOPK + 1, **settings: Any) -> Engine:
    """An engine with hot buffers of ``hot`` rows; ``None``: without HiSparse. All its memory is NaN."""
    options = {
        "page_size": 16 if model == V4 else 4,
        "chunked_prefill_size": 40,
        "max_batch": 3,
        "context_length": 64,
        "ignore_eos": True,
    }
    if hot is not None:
        options |= {"enable_hisparse": True, "hisparse_config": {"device_buffer_size": hot}}
    engine = Engine(str(settings.pop("folder", model)), **{"device": "cpu", **options, **settings})
    poison(engine)
    return engine


def poison(engine: Engine) -> None:
    """NaN in all rows and entries, on the device and on the host."""
    mla, coordinator = engine.runner.pools.mla, engine.runner.coordinator
    assert mla is not None
    for layer in mla.layer_ids:
        mla.rows(layer).fill_(NAN)
    for hot in filter(None, (coordinator, coordinator and coordinator.entries)):
        for layer in hot.pool.layer_ids:
            hot.pool.rows(layer).fill_(NAN)
            hot.host_pages(layer).fill_(NAN)
    if COMPRESSED in engine.runner.pools.caches:
        pool = engine.runner.pools.cache(COMPRESSED)
        for cache in (made for layer in pool.layer_ids for made in (pool.entries(layer), pool.index(layer)) if made):
            for buffer in cache.buffers:
                buffer.pages.fill_(NAN)


def tokens(engine: Engine, new: int = 10) -> list[list[int]]:
    return [one.token_ids for one in engine.generate(prompts(), SamplingParams(max_tokens=new))]


def check_nothing_left(engine: Engine) -> HiSparse:
    """No row on the device, and no page but those of the prefix cache."""
    hisparse = engine.runner.coordinator
    assert hisparse is not None
    assert [hisparse.hot_rows(row) for row in range(engine.runner.capacity.max_batch)] == [0] * 3
    cached = 0 if engine.cache is None else len(engine.cache)
    assert engine.runner.allocator.free_pages + cached == engine.runner.capacity.num_pages
    return hisparse


@pytest.fixture(scope="module")
def expected() -> Callable[[str], list[list[int]]]:
    """The tokens of a model without HiSparse."""
    known: dict[str, list[list[int]]] = {}

    def find(model: str = SPARSE[1]) -> list[list[int]]:
        if model not in known:
            known[model] = tokens(make(model, hot=None))
        return known[model]

    return find


@pytest.mark.parametrize(("model", "hot"), [(SPARSE[0], 2 * TOPK), (SPARSE[1], TOPK), (V4, V4_TOPK)])
@pytest.mark.sample(1)
def test_tokens_are_those_without_it(model, hot, expected):
    """Includes prefix hits, and chunked prefills beside decoding requests."""
    engine = make(model, hot=hot)
    assert tokens(engine) == expected(model)
    assert engine.cache_statistics.hits
    counted = check_nothing_left(engine).statistics()
    assert 0 < counted.loaded < counted.read and counted.staged and counted.written


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (SPARSE[1], {"num_pages": 24, "overlap": True}),
        (SPARSE[1], {"chunked_prefill_size": -1, "page_size": 16, "prefix_cache": False}),
        (V4, {"num_pages": 9, "page_size": 8, "overlap": True}),
        (V4, {"chunked_prefill_size": 7, "page_size": 32, "prefix_cache": False}),
    ],
    ids=["preempted and overlapped", "whole prompts", "v4, preempted and overlapped", "v4, small chunks"],
)
@pytest.mark.sample(1)
def test_however_steps_are_made(model, settings, expected):
    """An exhausted host pool preempts a request, as a lack of pages does."""
    engine = make(model, **settings)
    assert tokens(engine) == expected(model)
    assert bool(engine.scheduler.preemptions) is ("num_pages" in settings)
    check_nothing_left(engine)


def test_replayed_steps_make_the_same_tokens(expected, monkeypatch: pytest.MonkeyPatch):
    """Padded requests have no hot buffer. Captures are checked against eager runs, over rows in host memory."""
    monkeypatch.setattr("attnplug_engine.execution.runner.build_selection", build)
    engine = captured(make(overlap=True), (2,))
    assert tokens(engine) == expected()
    assert engine.statistics.replayed_steps
    check_nothing_left(engine)


@pytest.mark.parametrize(
    "speculation",
    [
        {"speculative_algorithm": "ngram", "speculative_num_steps": 2},
        {"speculative_algorithm": "standalone", "speculative_draft_model": "tiny:glm_moe_dsa",
         "speculative_num_steps": 2, "speculative_topk": 2, "speculative_num_draft_tokens": 4},
    ],
    ids=["chains", "trees of a sparse draft"],
)  # fmt: skip
@pytest.mark.long
def test_rows_that_are_verified_are_brought_in_together(speculation, expected, monkeypatch):
    """Rejected rows are written again, accepted ones of a tree are moved on the host. A draft has no coordinator.

    Rounds with trees are replayed.
    """
    nodes = speculation.get("speculative_num_draft_tokens", 3)
    has_draft = "speculative_draft_model" in speculation
    if has_draft:
        for module in ("execution.runner", "speculation.draft_runner"):
            monkeypatch.setattr(f"attnplug_engine.{module}.build_selection", build)
    engine = make(hot=TOPK * nodes, **speculation)
    if has_draft:
        assert engine.rounds.draft.backend.context.coordinator is None
        captured(engine, (2,))
    assert tokens(engine) == expected()
    assert bool(engine.statistics.replayed_steps) is has_draft
    check_nothing_left(engine)


S4, H4, W4 = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"


@pytest.mark.parametrize("kinds", [[S4] * 3, [H4] * 3, [W4, H4, S4]], ids=["sparse", "heavy", "mixed"])
@pytest.mark.sample(1)
def test_every_mix_of_v4_layers_generates_the_tokens_of_transformers(kinds, oracle_type, tmp_path):
    """Batched, in chunks, then alone, with prefix hits. Only entries that an index selects are on the host."""
    changes = {"num_hidden_layers": 3, "layer_types": kinds, "mlp_layer_types": ["moe"] * 3}
    oracle = oracle_type(tmp_path, "deepseek_v4", changes)
    engine = make(V4, folder=tmp_path, hot=V4_TOPK, chunked_prefill_size=20)
    given = prompts()[:4:3]
    found = engine.generate(given, SamplingParams(max_tokens=6))
    found += [engine.generate([prompt], SamplingParams(max_tokens=6))[0] for prompt in given]
    for prompt, one in zip(given * 2, found, strict=True):
        logits = oracle.logits(prompt + one.token_ids[:-1])[len(prompt) - 1 :]
        assert one.token_ids == logits.argmax(-1).tolist()
    assert engine.cache_statistics.hits
    hisparse = check_nothing_left(engine)
    assert hisparse.statistics().loaded and (hisparse.entries is None) is (S4 not in kinds)


@pytest.mark.long
def test_drafts_of_v4_that_are_rejected_leave_no_entry_on_the_device():
    """A hot buffer with an entry of a rejected draft would be read after the entry was made again."""
    engine = make(V4, hot=5 * V4_TOPK, speculative_algorithm="ngram", speculative_num_steps=4)
    given = [[1, 2, 3, 4] * 8, prompts()[0]]
    wanted, found = (
        [one.token_ids for one in each.generate(given, SamplingParams(max_tokens=16))]
        for each in (make(V4, hot=None), engine)
    )
    assert found == wanted
    rounds = engine.statistics.rounds
    assert rounds.tokens < rounds.rounds * (1 + rounds.steps)  # some were rejected
    check_nothing_left(engine)


@INTERPRETED
@pytest.mark.parametrize("model", [SPARSE[1], V4])
@pytest.mark.sample(1)
def test_kernels_serve_the_engines_batches(model, expected, monkeypatch):
    """Inputs as planned: slots of decoding requests are a column of a table."""
    from attnplug_sparse.hisparse import triton_swap

    monkeypatch.setattr(triton_swap, "_MAX_COPIERS", 1)
    engine = make(model, chunked_prefill_size=20)
    hisparse = engine.runner.coordinator
    for hot in filter(None, (hisparse, hisparse.entries)):
        hot._swap = triton_swap.TritonSwap(hot.pool, hot.host, hot.tables)
    found = [one.token_ids for one in engine.generate(prompts()[1:3], SamplingParams(max_tokens=4))]
    assert found == [tokens[:4] for tokens in expected(model)[1:3]]
    check_nothing_left(engine)


def differences(found: list[list[int]], wanted: list[list[int]]) -> str:
    """Prompts with different tokens, and the first difference of each."""
    events = []
    for number, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        if mine != theirs:
            alike = [a == b for a, b in zip(mine, theirs, strict=False)]
            events.append(f"prompt {number} from token {[*alike, False].index(False)} on")
    return ", ".join(events) or "none"


def test_differences_tell_where_tokens_part():
    assert differences([[1, 2], [3], [4, 5]], [[1, 2], [3, 6], [4, 7]]) == (
        "prompt 1 from token 1 on, prompt 2 from token 1 on"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize("more", [{}, {"speculative_algorithm": "ngram", "speculative_num_steps": 2}])
def test_a_gpu_reads_and_writes_the_rows_on_the_host(more, expected):
    """A failure names the settings with which it does, and how often rows were read and copied."""
    options = {"device": "cuda", "dtype": "float32", "attention_backend": "torch_sparse", **more}
    wanted = tokens(make(hot=None, **options))
    printed = {}
    for changed in ({}, {"overlap": False}, {"num_pages": 48}, {"prefix_cache": False}, {"chunked_prefill_size": -1}):
        hot = make(hot=3 * TOPK, **{"num_pages": 24, **options, **changed})
        printed[str(changed)] = differences(tokens(hot), wanted), str(hot.runner.coordinator.statistics())
        if printed["{}"][0] == "none":
            break
    assert printed["{}"][0] == "none", f"{printed}; without HiSparse a CPU differs in {differences(expected(), wanted)}"
    check_nothing_left(hot)


def test_a_context_is_longer_than_what_the_device_holds(expected):
    """The device has a hot buffer for each layer, and one place for the layer that runs."""
    prompt = torch.randint(0, 128, (500,), generator=torch.Generator().manual_seed(1)).tolist()
    options = {"context_length": 512, "max_batch": 1, "page_size": 16, "chunked_prefill_size": 100}
    wanted, found = (
        make(hot=hot, **options).generate([prompt], SamplingParams(max_tokens=4))[0].token_ids for hot in (None, TOPK)
    )
    assert found == wanted
    engine = make(hot=TOPK, **options)
    pool = engine.runner.pools.mla
    assert pool.nbytes < 0.4 * engine.runner.coordinator.host_nbytes and pool.sizes.buffer_size < 500


def test_the_device_holds_no_rows_and_entries_of_v4_but_hot_ones():
    """Sizes are those that were promised when the capacity was chosen; without HiSparse a page takes them all."""
    engine = make(V4, hot=V4_TOPK, num_pages=64)
    runner = engine.runner
    hisparse, capacity, pools = runner.coordinator, runner.capacity, runner.pools
    sizes = HotBytes.of(runner.spec, capacity, DType.FLOAT32, torch.float32, None)
    assert hisparse.host_nbytes == 64 * sizes.host_page == 64 * 16 * 4 * 32 * (4 + 2 / 4)
    on_device = pools.nbytes - hisparse.host_nbytes
    assert abs(sizes.fixed + 64 * sizes.device_page - on_device - hisparse.device_nbytes) < 2**12  # whole pages, lists
    staged = 16 * 4 * 32 * (1 + 1 / 4)
    assert sizes.device_page == bytes_per_page(runner.spec, 16, DType.FLOAT32, torch.float32) - sizes.host_page + staged
    assert pools.cache(COMPRESSED).nbytes < make(V4, hot=None, num_pages=64).runner.pools.cache(COMPRESSED).nbytes


def test_an_fp8_cache_is_moved_as_it_is_stored():
    for model in (SPARSE[1], V4):
        wanted, found = (tokens(make(model, hot=hot, kv_dtype=DType.FLOAT8_E4M3), 5) for hot in (None, TOPK))
        assert found == wanted


def test_an_fp8_cache_uses_the_scale_of_each_layer(tmp_path):
    """E5: all layers share the memory of new and staged rows, and have different scales."""
    source = RandomCheckpoint.tiny(SPARSE[1])
    layers = len(load_model(SPARSE[1], dtype=torch.float32, device="cpu", source=source).module.layers)
    source.save(tmp_path)
    plain = tokens(make(folder=tmp_path, kv_dtype="fp8"), 5)
    stored = load_file(tmp_path / "model.safetensors")
    for layer in range(layers):  # too small, so that rows saturate
        scale = torch.tensor([0.3 / 4**layer / 448])
        stored |= {f"model.layers.{layer}.self_attn.{kind}_scale": scale.clone() for kind in "kv"}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    wanted, found = (tokens(make(folder=tmp_path, hot=hot, kv_dtype="fp8"), 5) for hot in (None, TOPK))
    assert found == wanted != plain


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.sample(1)
def test_a_random_walk_of_arrivals_aborts_and_failures_leaves_nothing(seed, expected, monkeypatch):
    """Aborts in every state of a request, steps that fail in flight, and too few pages on the host."""
    engine, known = make(num_pages=24, overlap=True), expected()
    chance = random.Random(seed)
    added: list[tuple[int, Request]] = []
    launch = engine.runner.launch

    def launching(step: Any) -> Any:
        launched = launch(step)
        if chance.random() < 0.05:
            raise RuntimeError("lost")
        if chance.random() < 0.1:
            engine.abort(chance.choice(added)[1])
        return launched

    monkeypatch.setattr(engine.runner, "launch", launching)
    while len(added) < 8 or engine.scheduler.has_work:
        what = chance.random()
        if what < 0.3 and len(added) < 8:
            number = chance.randrange(len(prompts()))
            added.append((number, engine.add(prompts()[number], SamplingParams(max_tokens=10))))
        elif what < 0.35 and added:
            engine.abort(chance.choice(added)[1])
        else:
            try:
                engine.step()
            except RuntimeError:
                assert not engine.scheduler.in_flight
                assert [engine.runner.coordinator.hot_rows(row) for row in range(3)] == [0] * 3
    for number, request in added:
        assert request.output == known[number][: len(request.output)]
        assert request.finish_reason == "aborted" or request.output == known[number]
    check_nothing_left(engine)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"hisparse_config": {"device_buffer_size": 11}},
            ["device_buffer_size", 11, 12],
        ),
        (
            {"hisparse_config": {"device_buffer_size": 40}, "speculative_algorithm": "ngram"},
            [12, 4, 48],
        ),
        ({"hisparse_config": {"device_buffer_size": 1 << 15}}, ["device_buffer_size", 32768, 12, 32767]),
        (
            {"hisparse_config": '{"top_k": 4}'},
            ["top_k", "device_buffer_size", "host_memory_gib"],
        ),
        ({"hisparse_config": "{"}, ["{"]),
        ({"hisparse_config": "[1]"}, ["[1]", "device_buffer_size", "host_memory_gib"]),
        ({"hisparse_config": {"device_buffer_size": "many"}}, ["device_buffer_size", "many"]),
        ({"hisparse_config": {"host_memory_gib": 0}}, ["host_memory_gib", 0]),
        ({"hisparse_config": '{"host_memory_gib": NaN}'}, ["host_memory_gib", "nan"]),
        ({"hisparse_config": '{"host_memory_gib": 1e999}'}, ["host_memory_gib", "inf"]),
        ({"enable_hisparse": 1}, ["enable_hisparse", 1]),
        ({"enable_hisparse": False, "hisparse_config": {}}, ["hisparse_config", "enable_hisparse"]),
        ({"two_batch_overlap": True}, ["enable_hisparse", "two_batch_overlap"]),
        ({"model": V4, "hisparse_config": {"device_buffer_size": 3}}, ["device_buffer_size", 3, 4]),
        ({"model": "tiny:llama"}, ["layer 0", "tiny:llama", "mha"]),
        ({"model": "tiny:deepseek_v3"}, ["layer 0", "tiny:deepseek_v3", "mla"]),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, named):
    options = {"model": SPARSE[1], "enable_hisparse": True, **settings}
    with pytest.raises(UsageError, check=naming(*named)):
        Engine(options.pop("model"), device="cpu", **options)


def test_too_little_host_memory_is_an_error_with_the_sizes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("attnplug_engine.serving.sizing.available_memory", lambda: 2**20)
    with pytest.raises(PoolError, check=having(4096, 4, settings=("num_pages", "hisparse_config"))):
        make(num_pages=4096)


def test_pages_are_as_many_as_host_and_device_have_room_for(monkeypatch: pytest.MonkeyPatch):
    def pages(**settings: Any) -> int:
        """Pages of an engine that has 64,000 bytes once its weights are read."""
        available = "attnplug_engine.serving.sizing.available_memory"
        monkeypatch.setattr(available, lambda: 1 << 30)
        engine = make(on_memory=lambda _: monkeypatch.setattr(available, lambda: 64_000), **settings)
        return engine.runner.capacity.num_pages

    row = 4 * 40  # bytes, in each of four layers
    assert pages() == int(64_000 * 0.8) // (4 * LAYERS * row)  # most of the memory
    given = {"host_memory_gib": 32_000 / 2**30, "device_buffer_size": 13}
    assert pages(hisparse_config=given) == 32_000 // (4 * LAYERS * row)
    monkeypatch.setattr("attnplug_engine.serving.sizing._CPU_CACHE_BYTES", 1000)
    with pytest.raises(PoolError, check=having(13, 3, settings=("enable_hisparse", "max_batch", "hisparse_config"))):
        pages()


def test_a_backend_that_reads_rows_by_the_page_table_is_refused(attnplug: Attnplug):
    """Core tests the claims of a fake backend; here all installed backends for sparse layers are checked."""
    served = attnplug("explain", "--model", SPARSE[1], "--device", "cpu", "--enable-hisparse")
    assert served.code == 0 and "decode: torch_sparse" in served.out
    refused = attnplug("explain", "--model", "tiny:llama", "--device", "cpu", "--enable-hisparse")
    assert refused.code == 2 and not missing_values(refused.err, "--enable-hisparse", "layer 0", "tiny:llama")


def test_run_prints_the_hit_rate_and_the_bytes_copied(attnplug: Attnplug):
    options = ("--model", SPARSE[0], "--device", "cpu", "--enable-hisparse", "--max-tokens", "6")
    outcome = attnplug("run", *options, "--prompt", "a prompt of many tokens", "--ignore-eos")
    assert outcome.code == 0 and "HiSparse: " in outcome.err, outcome.err
    line = " ".join(outcome.err.split())
    assert " rows hit, 0.0 MiB to the device, " in line and " MiB to the host" in line


def test_options_are_read_when_they_are_given():
    config = EngineOptions(enable_hisparse=True, hisparse_config='{"host_memory_gib": 1.5}').hisparse
    assert config.host_budget(1 << 40, 2) == 3 << 29
