"""Engines that replay real CUDA graphs give transformers' tokens while requests start and end between steps."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from attnplug import GraphLevel, Role
from attnplug.declare.options import parse_options
from attnplug.host import TINY_CONFIGS, build_selection
from attnplug_engine import Engine, SamplingParams
from attnplug_testing.devices import GPU_MARKS, nothing_waits
from attnplug_testing.rounded_oracle import DEEPSEEK_V3, KIMI_LINEAR, RoundedOracle, need_libraries, watched_logits
from attnplug_testing.sharing import share

pytestmark = GPU_MARKS

SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "max_position_embeddings": 4096,
    "initializer_range": 0.06,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        **SMALL,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "deepseek_v3": {**DEEPSEEK_V3, "num_experts_per_tok": 4},  # all: choosing would turn rounding into other experts
    "qwen3_next": {
        **SMALL,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "kimi_linear": KIMI_LINEAR,
}
TORCH_KERNEL = {"backend_options": {"flashattention": {"kernel": "torch"}}}
BACKENDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_backend": "triton_mha"}),
    ("llama", {"role_backends": {Role.PREFILL: "flashattention", Role.DECODE: "triton_mha"}, **TORCH_KERNEL}),
    ("llama", {"attention_backend": "flashattention"}),
    ("llama", {"attention_backend": "flashinfer"}),
    ("deepseek_v3", {"attention_backend": "triton_mla"}),
    ("deepseek_v3", {"attention_backend": "flashinfer_mla"}),
    ("deepseek_v3", {"role_backends": {Role.PREFILL: "triton_mla", Role.DECODE: "flashmla"}}),
    ("qwen3_next", {"attention_backend": "triton_mha"}),
    ("kimi_linear", {"attention_backend": "triton_mla"}),
]


def named(value: object) -> str:
    if isinstance(value, str):
        return value
    assert isinstance(value, dict)
    return value.get("attention_backend") or "+".join(value["role_backends"].values())


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    made: dict[str, RoundedOracle] = {}

    def oracle(name: str) -> RoundedOracle:
        if name not in made:
            made[name] = RoundedOracle(str(tmp_path_factory.mktemp(name)), name, MODELS[name])
        return made[name]

    return oracle


def prompts(count: int, vocab: int = 512) -> list[list[int]]:
    random = Random(11)
    return [[random.randrange(vocab) for _ in range(random.choice((1, 7, 33, 64, 90)))] for _ in range(count)]


def test_a_replay_neither_waits_nor_allocates_and_its_plan_does_neither(oracles):
    engine = Engine(
        oracles("llama").folder, device="cuda", attention_backend="triton_mha", max_batch=4, ignore_eos=True
    )
    requests = [engine.add(prompt, SamplingParams(max_tokens=64)) for prompt in prompts(3)]
    while not all(request.output for request in requests):
        engine.step()
    for _ in range(4):
        engine.step()
    graphs, step = engine.runner.graphs.decode, engine.loop.in_flight[-1][0]
    captured = graphs.fitting(len(step.entries))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with nothing_waits("cuda"):
        for _ in range(3):
            engine.runner.attention.capture(captured.batch)
            captured.replay()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize(
    ("model", "backend"), [("llama", "triton_mha"), ("deepseek_v3", "triton_mla")], ids=["MHA", "MLA"]
)
def test_a_replayed_prefill_neither_waits_nor_allocates(oracles, model, backend):
    """Its result is read at once: only its own inputs are sent, by a copy that nothing waits for."""
    settings = {"max_batch": 4, "ignore_eos": True, "prefix_cache": False, "cuda_graph_prefill_sizes": (32, 96)}
    engine = Engine(oracles(model).folder, device="cuda", attention_backend=backend, **settings)
    texts = [[*range(1, 20)], [*range(20, 27)], [*range(30, 95)]]
    for prompt in texts:
        engine.generate([prompt], SamplingParams(max_tokens=1))
    assert engine.statistics.replayed_prefills == 3 and not engine.statistics.eager_prefills
    graphs = engine.runner.graphs.prefill
    requests = [engine.add(prompt, SamplingParams(max_tokens=2)) for prompt in texts]
    step = engine.scheduler.next_step()
    captured = graphs.fitting(step)
    with torch.inference_mode():
        graphs.run(captured, step, engine.runner.sampler)  # sends new pages to the device
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with nothing_waits("cuda"):
            for _ in range(3):
                graphs.run(captured, step, engine.runner.sampler)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert len(requests) == 3 and captured.size == 96


def test_prefills_of_mla_without_prefixes_are_replayed_as_mha(oracles):
    """C1: tokens as eager ones, and prefix hits are replayed absorbed."""
    settings = {"max_batch": 4, "ignore_eos": True, "device": "cuda", "attention_backend": "triton_mla"}
    folder, sizes = oracles("deepseek_v3").folder, {"cuda_graph_prefill_sizes": (32, 96, 700)}
    graphs, eager = Engine(folder, **settings, **sizes), Engine(folder, **settings, disable_cuda_graph=True)
    captured = graphs.runner.graphs.prefill
    assert set(captured._mha_steps) == {32, 96, 700} == set(captured._steps)
    random = Random(7)
    replayed = []
    fitting = captured.fitting

    def noted(step):
        replayed.append(fitting(step))
        return replayed[-1]

    captured.fitting = noted
    for lengths in ([1], [7, 20, 3], [90], [650], [200, 200, 200]):
        texts = [[random.randrange(512) for _ in range(length)] for length in lengths]
        found = [one.generate(texts, SamplingParams(max_tokens=3)) for one in (graphs, eager)]
        assert [each.token_ids for each in found[0]] == [each.token_ids for each in found[1]]
    assert all(step.batch.plan.extend is not None for step in replayed) and len(replayed) == 5
    graphs.generate([[*texts[0], 1, 2]], SamplingParams(max_tokens=1))
    assert replayed[-1].batch.plan.extend is None and graphs.cache_statistics.hit_tokens


@pytest.mark.parametrize("prefill", ["flashattention"])
@pytest.mark.parametrize("model", ["llama", "deepseek_v3"])
def test_short_prefills_are_replayed_where_who_prefills_cannot_be_captured(oracles, model, prefill, monkeypatch):
    """``auto`` chose the prefill backend. The decode backend captures extends for short prefills; long ones stay on the
    prefill backend."""
    name = {"llama": "triton_mha", "deepseek_v3": "triton_mla"}[model]

    def build(selection, context):
        by_name = {one.backend.spec.name: one.backend for one in selection.choices[Role.PREFILL].candidates}
        choices = {
            role: replace(selection.choices[role], chosen=by_name[who], schedule=None)
            for role, who in ((Role.PREFILL, prefill), (Role.DECODE, name))
        }
        given = {"flashattention": {"kernel": "torch"}}
        options = {who: parse_options(who, by_name[who].spec.options, given.get(who, {})) for who in (prefill, name)}
        return build_selection(replace(selection, choices=choices, options=options), context)

    monkeypatch.setattr("attnplug_engine.execution.runner.build_selection", build)
    oracle = oracles(model)
    sizes = (16, 64, 256)  # given, because on a busy GPU other sizes save time
    engine = Engine(
        oracle.folder, device="cuda", max_batch=4, ignore_eos=True, chunked_prefill_size=700,
        cuda_graph_prefill_sizes=sizes,
    )  # fmt: skip
    assert engine.graphs.prefill_by == name and engine.graphs.prefill_sizes == sizes
    random = Random(2)
    texts = [[random.randrange(500) for _ in range(count)] for count in (5, 40, 690, 130, 18)]
    monkeypatch.setattr(engine.runner.graphs.prefill, "_pays", lambda step, size: True)
    with watched_logits() as seen:
        outputs = [done.token_ids for done in engine.generate(texts, SamplingParams(max_tokens=12))]
    rows = [torch.stack(seen[number][: len(outputs[number])]) for number in sorted(seen)]
    oracle.check_tokens(texts, outputs, rows, slack=2.0)
    counts = engine.statistics
    assert counts.backend_usage.by_backend()["prefill"] == {
        name: counts.replayed_prefills,
        prefill: counts.eager_prefills,
    }


def test_a_prefill_is_captured_only_where_the_host_takes_longer_than_the_gpu(tmp_path):
    """Long prefills of a wide model keep the GPU busy for longer than the host needs to launch them."""
    wide = {**MODELS["llama"], "hidden_size": 8192, "intermediate_size": 24576, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**wide, "model_type": "llama", "dtype": "bfloat16"}))
    common = {"device": "cuda", "attention_backend": "triton_mha", "max_batch": 4, "random_weights": True}
    kept = Engine(str(tmp_path), **common).graphs.prefill_sizes
    assert 16 in kept and 2048 not in kept
    asked = Engine(str(tmp_path), **common, cuda_graph_prefill_sizes=(16, 2048)).graphs.prefill_sizes
    assert asked == (16, 2048), "what is demanded is captured"


def test_prefills_over_rows_in_host_memory_are_replayed(tmp_path):
    """HiSparse: prefixes are staged and new rows written to the host by the graph; as many rows move as without it."""
    sizes = {key: DEEPSEEK_V3[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "index_head_dim": 128, "index_topk": 64}
    config = {**TINY_CONFIGS["deepseek_v32"], **sizes, **heads, "dtype": "bfloat16", "num_experts_per_tok": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    common = {
        "device": "cuda",
        "attention_backend": "triton_mla",
        "enable_hisparse": True,
        "num_pages": 64,
        "max_batch": 4,
        "chunked_prefill_size": 96,
    }
    common |= {"random_weights": True, "ignore_eos": True, "prefix_cache": False, "overlap": False}
    texts, found, staged = prompts(8, 128), [], []
    for settings in ({"cuda_graph_prefill_sizes": (16, 96)}, {"disable_prefill_cuda_graph": True}):
        engine = Engine(str(tmp_path), **common, **settings)
        found.append([one.token_ids for one in engine.generate(texts, SamplingParams(max_tokens=12))])
        staged.append(engine.runner.coordinator.statistics().staged)
        counts = engine.statistics
        assert (counts.replayed_prefills > 3 and not counts.eager_prefills) is ("cuda_graph_prefill_sizes" in settings)
    assert staged[0] == staged[1] > 0
    same = [mine == theirs for pair in zip(*found, strict=True) for mine, theirs in zip(*pair, strict=True)]
    assert sum(same) > 0.5 * len(same)  # rounding decides some, and all that follow: 70 of 96 were equal on an H200


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("model", "settings"), BACKENDS, ids=named)
def test_tokens_are_right_while_requests_come_end_and_lose_their_pages(oracles, model, settings, page_size):
    """Batches of 1, 3, 17 and 32 over captured sizes that pad them, aborts, and with small pages too few of them."""
    need_libraries(settings)
    if page_size == 16 and "flashmla" in named(settings):
        pytest.skip("FlashMLA reads pages of 64")
    oracle, texts = oracles(model), prompts(44, MODELS[model]["vocab_size"])
    engine = Engine(
        oracle.folder,
        device="cuda",
        page_size=page_size,
        num_pages={16: 180, 64: 96}[page_size],
        max_batch=32,
        cuda_graph_batch_sizes=(2, 4, 20, 30),
        chunked_prefill_size=300,
        prefix_cache=page_size == 16,  # where a preempted request finds its own pages again, and decodes at once
        ignore_eos=True,
        **settings,
    )
    assert engine.graphs.sizes == (2, 4, 20, 30)
    assert bool(engine.graphs.prefill_sizes) is (engine.graphs.level is GraphLevel.ALWAYS)
    waves, random = {0: 1, 20: 2, 40: 14, 60: 15, 64: 12}, Random(3)
    requests, aborted, steps = [], set(), 0
    with watched_logits() as seen:
        while engine.scheduler.has_work or steps <= max(waves):
            for _ in range(waves.get(steps, 0)):
                length = random.choice((40, 100, 160))
                requests.append(engine.add(texts[len(requests)], SamplingParams(max_tokens=length)))
            if steps in (50, 70, 71):
                victim = random.choice([one for one in requests if one.finish_reason is None])
                engine.abort(victim)
                aborted.add(victim.id)
            engine.step()
            steps += 1
    counts = engine.statistics
    assert counts.replayed_steps > counts.eager_steps > 0
    assert bool(counts.replayed_prefills) is bool(engine.graphs.prefill_sizes)
    assert page_size == 64 or engine.scheduler.preemptions > 0
    kept = [request for request in requests if request.id not in aborted]
    assert all(request.finish_reason == "length" for request in kept)
    rows = [torch.stack(seen[request.id][: len(request.output)]) for request in kept]
    kept_prompts = [list(request.prompt) for request in kept]
    oracle.check_tokens(kept_prompts, [request.output for request in kept], rows, slack=2.0)
    if engine.cache is not None:
        engine.cache.clear()
    assert engine.runner.allocator.free_pages == engine.runner.allocator.num_pages


@pytest.mark.parametrize(
    ("model", "names"),
    [("llama", ("triton_mha", "flashattention")), ("deepseek_v3", ("triton_mla", "flashinfer_mla"))],
    ids=["MHA", "MLA"],
)
def test_alternating_backends_replay_graphs_of_their_own(oracles, model, names, monkeypatch):
    """Another one at nearly every step, over one cache; each size is captured for both."""
    need_libraries({"role_backends": dict(enumerate(names))})
    share(monkeypatch, *names, longest=512)
    oracle, sizes = oracles(model), (1, 2, 4)
    engine = Engine(oracle.folder, device="cuda", max_batch=4, cuda_graph_batch_sizes=sizes, ignore_eos=True)
    assert engine.graphs.backends == {(name,): sizes for name in names}
    texts, each = oracle.prompts(), [SamplingParams(max_tokens=length) for length in (60, 50, 40, 20)]
    with watched_logits() as seen:
        outputs = [done.token_ids for done in engine.generate(texts, each)]
    rows = [torch.stack(seen[number][: len(outputs[number])]) for number in sorted(seen)]
    oracle.check_tokens(texts, outputs, rows, slack=2.0)
    assert engine.statistics.replayed_steps > 50 and not engine.statistics.eager_steps
    assert min(engine.statistics.backend_usage.by_backend()["decode"].values()) > 15


@pytest.mark.parametrize(("model", "settings"), BACKENDS[::3], ids=named)
def test_drawn_tokens_depend_on_seeds_and_not_on_the_run(oracles, model, settings):
    """Two runs with graphs and overlap give equal tokens, as do seeded requests beside any other requests."""
    need_libraries(settings)
    drawn = [SamplingParams(max_tokens=20, temperature=0.8, top_k=40, top_p=0.9, seed=number) for number in range(6)]
    common = {"device": "cuda", "max_batch": 8, "ignore_eos": True, **settings}
    runs = [Engine(oracles(model).folder, **common).generate(prompts(6), drawn) for _ in range(2)]
    assert [one.token_ids for one in runs[0]] == [one.token_ids for one in runs[1]]


def test_a_demand_that_no_backend_meets_is_refused_with_its_reason(oracles):
    from attnplug.host import SelectionError

    with pytest.raises(SelectionError, match="CUDA graphs"):
        Engine(
            oracles("llama").folder,
            device="cuda",
            attention_backend="torch_native",
            cuda_graph_batch_sizes=(1,),
        )
