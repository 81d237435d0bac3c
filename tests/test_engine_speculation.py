"""Engines that speculate on a GPU, in real CUDA graphs and out of them: tokens as transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attnplug import Role
from attnplug_engine import Engine, SamplingParams
from attnplug_testing.devices import GPU_MARKS, nothing_waits
from attnplug_testing.draft_checkpoints import random_tensors, save, shapes_of_assistant
from attnplug_testing.rounded_oracle import DEEPSEEK_V3, KIMI_LINEAR, RoundedOracle, need_libraries

pytestmark = GPU_MARKS

SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.06,
    "bos_token_id": None,
    "eos_token_id": None,
}
LINEAR = {
    "num_attention_heads": 4,
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
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "num_attention_heads": 8, "head_dim": 64},
    "deepseek_v3": {**DEEPSEEK_V3, "num_experts_per_tok": 4},  # all: choosing would turn rounding into other experts
    "qwen3_next": SMALL | LINEAR,
    "kimi_linear": KIMI_LINEAR,
}
NEW = 40
MTP = {"speculative_algorithm": "mtp", "speculative_num_steps": 3}
NGRAM = {"speculative_algorithm": "ngram", "speculative_num_steps": 3}
OWN = {"speculative_algorithm": "standalone", "speculative_draft_model": "own", "speculative_num_steps": 3}
ASSISTANT = {**OWN, "speculative_algorithm": "mtp", "speculative_draft_model": "assistant"}
EAGLE = {**OWN, "speculative_algorithm": "eagle", "speculative_draft_model": "eagle"}
EAGLE3 = {**OWN, "speculative_algorithm": "eagle3", "speculative_draft_model": "eagle3"}
TREE = {"speculative_topk": 2, "speculative_num_draft_tokens": 6}
LAYERS = "deepseek_v3-layers"
"""The same model with a layer for each step."""
BACKENDS = {"llama": "triton_mha", "deepseek_v3": "triton_mla", LAYERS: "triton_mla", "qwen3_next": "triton_mha"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", OWN),
    ("llama", OWN | TREE),
    ("llama", NGRAM),
    ("deepseek_v3", MTP),
    ("deepseek_v3", MTP | TREE),
    ("deepseek_v3", NGRAM | TREE),
    ("qwen3_next", NGRAM),
    (LAYERS, MTP),
    ("llama", ASSISTANT),
    ("llama", EAGLE),
    ("llama", EAGLE3 | TREE),
    ("qwen3_next", ASSISTANT),
]
OTHERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("deepseek_v3", MTP, {"attention_backend": "flashinfer_mla"}),
    ("deepseek_v3", MTP, {"role_backends": {Role.PREFILL: "triton_mla", Role.DECODE: "flashmla"}, "page_size": 64}),
    ("llama", OWN, {"attention_backend": "flashattention"}),
    ("llama", OWN | TREE, {"attention_backend": "flashattention"}),
    ("llama", OWN, {"attention_backend": "flashinfer"}),
    ("kimi_linear", NGRAM, {"attention_backend": "triton_mla"}),
]
DEEP: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((model, settings, {}) for model, settings in CASES if model != LAYERS),  # whose layers are as many as its steps
    *OTHERS,
]


def prompts(count: int, vocab: int = 512) -> list[list[int]]:
    random = Random(11)
    return [[random.randrange(vocab) for _ in range(random.choice((1, 7, 33, 64, 90)))] for _ in range(count)]


def named(value: object) -> str:
    if not isinstance(value, dict):
        return str(value)
    if not value:
        return "own"
    if "speculative_algorithm" not in value:
        return value.get("attention_backend") or "+".join(value["role_backends"].values())
    assists = value.get("speculative_draft_model") == "assistant"
    return str(value["speculative_algorithm"]) + "-assistant" * assists + "-tree" * ("speculative_topk" in value)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    """Oracle and checkpoint folder by model. DeepSeek's checkpoint has multi-token-prediction layers."""
    made: dict[str, tuple[RoundedOracle, str]] = {}

    def oracle(name: str) -> tuple[RoundedOracle, str]:
        if name not in made:
            kind = name.removesuffix("-layers")
            one = RoundedOracle(str(tmp_path_factory.mktemp(name)), kind, MODELS[kind])
            layers = {"deepseek_v3": 1, LAYERS: 3}.get(name, 0)
            folder = _with_prediction(Path(one.folder), layers) if layers else one.folder
            made[name] = one, folder
        return made[name]

    return oracle


def _with_prediction(folder: Path, layers: int) -> str:
    """The checkpoint with copies of its last block as layers for multi-token prediction."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    last, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    first, dtype = f"model.layers.{last}.", tensors["model.norm.weight"].dtype
    copies: dict[str, torch.Tensor] = {}
    for own in (f"model.layers.{last + 1 + layer}" for layer in range(layers)):
        copies |= {name.replace(first, f"{own}."): one.clone() for name, one in tensors.items() if first in name}
        for name in ("enorm", "hnorm", "shared_head.norm"):
            copies[f"{own}.{name}.weight"] = torch.ones(hidden, dtype=dtype)
        copies[f"{own}.eh_proj.weight"] = (torch.randn(hidden, 2 * hidden) * 0.06).to(dtype)
    target = folder / "with_prediction"
    target.mkdir()
    save_file(tensors | copies, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": layers}))
    return str(target)


def _assistant(folder: Path) -> str:
    """An assistant of two layers, which read the rows of the target's last one."""
    config = json.loads((folder / "config.json").read_text())
    same = {key: config[key] for key in ("vocab_size", "num_attention_heads", "intermediate_size")}
    sizes = {"num_hidden_layers": 2, "hidden_size": 128, "backbone_hidden_size": config["hidden_size"]}
    own = {"model_type": "llama_assistant", **same, **sizes}
    return str(save(folder / "assistant", own, random_tensors(shapes_of_assistant(own, config["head_dim"]))))


def _eagle(folder: Path) -> str:
    """A draft that sees the target's last hidden states."""
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1}
    return str(save(folder / "eagle", config, random_tensors(_llama_layer(config, "layers.0", 1))))


def _eagle3(folder: Path) -> str:
    """A draft that reads hidden states of three target layers, with its own vocabulary."""
    drafted = 300
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1, "draft_vocab_size": drafted}
    hidden = config["hidden_size"]
    shapes = _llama_layer(config, "midlayer", 2) | {
        **{f"midlayer.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")},
        "norm.weight": (hidden,),
        "lm_head.weight": (drafted, hidden),
        "fc.weight": (hidden, 3 * hidden),
    }
    known = torch.arange(config["vocab_size"]) < drafted
    maps = {"d2t": torch.zeros(drafted, dtype=torch.int64), "t2d": known}
    return str(save(folder / "eagle3", config, random_tensors(shapes) | maps))


def _llama_layer(config: dict[str, Any], name: str, inputs: int) -> dict[str, tuple[int, ...]]:
    """Attention over ``n`` states side by side; ``fc`` joins two."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = (config["head_dim"] * config[f"num_{of}_heads"] for of in ("attention", "key_value"))
    return {
        "fc.weight": (hidden, 2 * hidden),
        f"{name}.self_attn.q_proj.weight": (heads, inputs * hidden),
        f"{name}.self_attn.k_proj.weight": (kv_heads, inputs * hidden),
        f"{name}.self_attn.v_proj.weight": (kv_heads, inputs * hidden),
        f"{name}.self_attn.o_proj.weight": (hidden, heads),
        f"{name}.post_attention_layernorm.weight": (hidden,),
        f"{name}.mlp.gate_proj.weight": (width, hidden),
        f"{name}.mlp.up_proj.weight": (width, hidden),
        f"{name}.mlp.down_proj.weight": (hidden, width),
    }


def speculating(folder: str, model: str, settings: dict[str, Any], **more: Any) -> Engine:
    own = {}
    if (draft := settings.get("speculative_draft_model")) is not None:
        makers: dict[str, Callable[[Path], str]] = {
            "own": str,
            "assistant": _assistant,
            "eagle": _eagle,
            "eagle3": _eagle3,
        }
        own = {"speculative_draft_model": makers[draft](Path(folder))}
    common = {"device": "cuda", "attention_backend": BACKENDS.get(model), "max_batch": 8, "ignore_eos": True}
    return Engine(folder, **{**common, **settings, **own, **more})


def judge(oracle: RoundedOracle, texts: list[list[int]], outputs: list[list[int]]) -> None:
    """Tokens are those of float32 wherever the margin is larger than what bfloat16 rounds off."""
    equal = clear_ones = 0
    for prompt, chosen in zip(texts, outputs, strict=True):
        assert len(chosen) == NEW
        sequence, first = prompt + chosen, len(prompt) - 1
        wanted = oracle._logits(oracle._exact, sequence[:-1])[first:]
        rounding = oracle._logits(oracle._rounded, sequence[:-1])[first:] - wanted
        top = wanted.topk(2, -1)
        clear = (top.values[:, 0] - top.values[:, 1] > 2 * rounding.abs().amax(-1)).cpu()
        same = top.indices[:, 0].cpu() == torch.tensor(chosen)
        assert bool(same[clear].all()), f"prompt of {len(prompt)}: tokens differ where the margin is clear"
        equal, clear_ones = equal + int(same.sum()), clear_ones + int(clear.sum())
    total = NEW * len(outputs)
    assert clear_ones >= total / 4 and equal >= 0.9 * total, f"{clear_ones} clear and {equal} equal of {total}"


@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlapped"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(("model", "settings"), CASES, ids=named)
def test_tokens_are_right(oracles, model, settings, graphs, overlap):
    """Batches of 8 down to 1, with chunks, and prompts that begin alike."""
    oracle, folder = oracles(model)
    texts = prompts(9)
    texts.append([*texts[-1][:40], 7, 8, 9])
    more: dict[str, Any] = {"cuda_graph_batch_sizes": (1, 4, 8), "cuda_graph_prefill_sizes": (32, 128)}
    more = more if graphs else {"disable_cuda_graph": True}
    engine = speculating(folder, model, settings, overlap=overlap, chunked_prefill_size=128, **more)
    assert bool(engine.graphs.sizes) is bool(engine.graphs.prefill_sizes) is graphs
    outputs = [one.token_ids for one in engine.generate(texts, SamplingParams(NEW))]
    judge(oracle, texts, outputs)
    counts = engine.statistics
    assert bool(counts.replayed_steps) is bool(counts.replayed_prefills) is graphs
    assert bool(counts.eager_prefills) is not graphs
    if settings["speculative_algorithm"] == "standalone":
        assert counts.rounds.acceptance > 0.85
    assert counts.rounds.verify_seconds > 0


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(("model", "settings", "served"), OTHERS, ids=named)
def test_tokens_are_right_on_every_backend(oracles, model, settings, served, graphs):
    """Rounds are captured if the backend captures verifies, and run eagerly otherwise."""
    need_libraries(served)
    oracle, folder = oracles(model)
    texts = prompts(7, MODELS[model]["vocab_size"])
    more = {"cuda_graph_batch_sizes": (1, 7)} if graphs else {"disable_cuda_graph": True}
    engine = speculating(folder, model, settings, **{"attention_backend": "auto", **served, **more})
    outputs = [one.token_ids for one in engine.generate(texts, SamplingParams(NEW))]
    judge(oracle, texts, outputs)
    assert engine.statistics.rounds.verify_seconds > 0


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize(("model", "settings", "served"), DEEP, ids=named)
def test_tokens_are_right_at_every_depth_in_a_batch_of_32(oracles, model, settings, served, steps):
    """The other tests propose three tokens, in batches of up to 8."""
    need_libraries(served)
    oracle, folder = oracles(model)
    texts = prompts(32, MODELS[model]["vocab_size"])
    deep = settings | {"speculative_num_steps": steps}
    if "speculative_topk" in settings:
        deep["speculative_num_draft_tokens"] = 1 + 2 * steps
    sizes = {"max_batch": 32, "cuda_graph_batch_sizes": (1, 7, 32)}
    engine = speculating(folder, model, deep, **sizes, **({"attention_backend": "auto"} | served if served else {}))
    outputs = [one.token_ids for one in engine.generate(texts, SamplingParams(NEW))]
    judge(oracle, texts, outputs)
    assert engine.statistics.rounds.verify_seconds > 0


def test_drawn_tokens_do_not_depend_on_the_run(oracles):
    """Twice the same, with graphs and overlap."""
    _, folder = oracles("llama")
    drawn = [SamplingParams(20, temperature=0.8, top_k=40, top_p=0.9, seed=number) for number in range(6)]
    runs = [speculating(folder, "llama", OWN).generate(prompts(6), drawn) for _ in range(2)]
    assert [one.token_ids for one in runs[0]] == [one.token_ids for one in runs[1]]


@pytest.mark.parametrize(("model", "settings"), [CASES[0], CASES[3], CASES[4], CASES[2], CASES[7], CASES[8]], ids=named)
def test_a_replayed_round_neither_waits_nor_allocates(oracles, model, settings):
    _, folder = oracles(model)
    engine = speculating(folder, model, settings, max_batch=4)
    requests = [engine.add(prompt, SamplingParams(64)) for prompt in prompts(3)]
    while not all(request.output for request in requests):
        engine.step()
    engine.step()
    graphs, step = engine.rounds.graphs, engine.loop.in_flight[-1][0]
    captured = graphs.fitting(step.rounds)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with nothing_waits("cuda"):
        for _ in range(3):
            captured.target.plan()
            if engine.rounds.draft is not None:
                captured.draft.plan()
            for replay in captured.parts:
                replay()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("late", [None, "side", "main"])
@pytest.mark.parametrize(("model", "settings"), [CASES[0], CASES[1], CASES[2], CASES[4], CASES[7], CASES[8]], ids=named)
def test_a_plan_stream_changes_no_token(oracles, model, settings, late, monkeypatch):
    """The streams wait for each other if necessary, and no memory is reused before both are done."""
    _, folder = oracles(model)
    texts, each = prompts(5), [SamplingParams(24, temperature=0.8 * (number % 2), seed=3) for number in range(5)]
    eager = {"disable_cuda_graph": True, "overlap": True, "page_size": 64, "prefix_cache": False}
    expected = [one.token_ids for one in speculating(folder, model, settings, **eager).generate(texts, each)]
    engine = speculating(folder, model, settings, plan_stream=True, **eager)
    stream = engine.rounds.plan_stream
    assert stream is not None
    section, launch, noise = stream.section, engine.rounds.launch, []

    @contextmanager
    def lagging(*read: object) -> Iterator[Any]:
        with section(*read) as begun:
            torch.cuda._sleep(1_000_000)
            yield begun

    def launched(step: Any) -> Any:
        if late == "main":
            torch.cuda._sleep(3_000_000)
        done = launch(step)
        noise[:] = [torch.full((size,), -1, dtype=torch.int32, device="cuda") for size in (5, 64, 128, 640) * 4]
        return done

    monkeypatch.setattr(engine.rounds, "launch", launched)
    if late == "side":
        monkeypatch.setattr(stream, "section", lagging)
    for _ in range(2):
        assert [one.token_ids for one in engine.generate(texts, each)] == expected
