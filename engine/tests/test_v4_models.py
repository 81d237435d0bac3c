"""DeepSeek-V4: sliding, sparse and heavily compressed layers, as transformers has them, however tokens come."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from thread_ranks import Threads, in_ranks
from torch.testing import assert_close

from attnplug import DType, Feature, ForwardBatch, ForwardMode, Geometry, Role, UsageError
from attnplug.host import TINY_CONFIGS, ModelConfigError, SelectionError, load_registry
from attnplug.host import load_model as load_spec
from attnplug_engine import Engine, SamplingParams
from attnplug_engine.checkpoints.random import RandomCheckpoint
from attnplug_engine.checkpoints.safetensors import CheckpointError
from attnplug_engine.memory.capacity import Capacity, bytes_per_page
from attnplug_engine.memory.pools import build_pools
from attnplug_engine.models.architectures import build_model, load_model
from attnplug_engine.parallel.collectives import ParallelError
from attnplug_sparse.pools import COMPRESSED
from attnplug_testing.command import Attnplug
from attnplug_testing.errors import having, missing_values, refusing

NAME, MODEL = "deepseek_v4", "tiny:deepseek_v4"
REAL = {
    "sliding_window": 128,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "index_topk": 16,
}
"""Windows and entries as long as those of published models."""


def drawn(*lengths: int, seed: int = 8) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 128, (length,), generator=random).tolist() for length in lengths]


def check(oracle, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    """Each output is the greedy one of transformers."""
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output == oracle.logits(prompt + output[:-1])[len(prompt) - 1 :].argmax(-1).tolist()


def generated(engine: Engine, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    return [one.token_ids for one in engine.generate(prompts, SamplingParams(max_tokens=tokens))]


@pytest.fixture(scope="module")
def oracle(oracle_type, tmp_path_factory):
    return oracle_type(tmp_path_factory.mktemp(NAME), NAME, {})


def staged(oracle, make_stage, requests: int):
    return make_stage(load_model(str(oracle.folder), dtype=torch.float32, device="cpu"), requests)


# ---- logits ----


def test_logits_equal_those_of_transformers(oracle, make_stage, sequences):
    """A10: prefill, prefill after a prefix, and decode, over caches that are NaN wherever nothing was written."""
    for tokens, logits in zip(sequences, staged(oracle, make_stage, 3).run(sequences, 8), strict=True):
        wanted = oracle.logits(tokens)
        assert wanted.abs().max() > 3  # nearly flat logits would hide a wrong attention
        assert_close(logits, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("first", range(1, 10))
@pytest.mark.sample(3)
def test_chunks_that_end_anywhere_in_a_window_of_four(first, oracle, make_stage):
    """A10"""
    (tokens,) = drawn(first + 16)
    stage = staged(oracle, make_stage, 1)
    borders = [0, first, first + 1, first + 8, first + 16]
    found = [stage.step([tokens[a:b]])[0] for a, b in pairwise(borders)]
    assert_close(torch.cat(found), oracle.logits(tokens), atol=1e-4, rtol=0)


def test_windows_and_entries_of_real_lengths(make_oracle, make_stage):
    """A10: chunks that end at 127, 128 and 129 tokens, and a decode on each side of a window's end."""
    oracle = make_oracle(NAME, **REAL)
    sequences = drawn(262, 262, 262)
    stage = staged(oracle, make_stage, 3)
    assert stage.page_size == 128
    parts = [stage.step([tokens[:end] for tokens, end in zip(sequences, (127, 128, 129), strict=True)])]
    for mode in (ForwardMode.DECODE, ForwardMode.DECODE):
        lengths = [stage.table.length(row) for row in stage.rows]
        parts.append(stage.step([[tokens[at]] for tokens, at in zip(sequences, lengths, strict=True)], mode))
    lengths = [stage.table.length(row) for row in stage.rows]
    parts.append(stage.step([tokens[at:] for tokens, at in zip(sequences, lengths, strict=True)]))
    for request, tokens in enumerate(sequences):
        assert_close(torch.cat([part[request] for part in parts]), oracle.logits(tokens), atol=1e-4, rtol=0)


CONFIGS = {
    "four streams, several groups": {"hc_mult": 4, "hc_sinkhorn_iters": 20, "o_groups": 4},
    "no layer that chooses": {"layer_types": ["heavily_compressed_attention"] * 4, "mlp_layer_types": ["moe"] * 4},
    "plain ropes": {"rope_parameters": None, "compress_rope_theta": 5000.0},
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.sample(1)
def test_other_configs(changes, make_oracle, make_stage, sequences):
    oracle = make_oracle(NAME, **changes)
    for tokens, logits in zip(sequences, staged(oracle, make_stage, 3).run(sequences, 8), strict=True):
        assert_close(logits, oracle.logits(tokens), atol=1e-4, rtol=0)


def test_keys_of_older_configs_mean_the_same(make_oracle, make_stage, sequences):
    ratios = [0, 4, 128, 4]
    oracle = make_oracle(NAME, **REAL)
    path = oracle.folder / "config.json"
    config = json.loads(path.read_text())
    for key in ("layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor"):
        del config[key]
    rope = config.pop("rope_parameters")["compress"]
    scaling = {key: rope[key] for key in ("factor", "original_max_position_embeddings")} | {"type": "yarn"}
    older = {"compress_ratios": [*ratios, 0], "num_hash_layers": 1, "rope_scaling": scaling, "qk_rope_head_dim": 8}
    path.write_text(json.dumps({**config, **older}))
    stage = staged(oracle, make_stage, 1)
    assert_close(stage.step(sequences[:1])[0], oracle.logits(sequences[0]), atol=1e-4, rtol=0)


def test_a_tiny_model_is_the_one_that_transformers_loads_from_what_it_saves(tmp_path, make_stage, sequences):
    from transformers import AutoModelForCausalLM

    source, spec = RandomCheckpoint.tiny(MODEL, seed=3), load_spec(MODEL)
    loaded = build_model(source, spec, dtype=torch.float32, device="cpu")
    source.save(tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    (found,) = make_stage(loaded, 1).run(sequences[:1], 8)
    with torch.inference_mode():
        assert_close(found, oracle(torch.tensor(sequences[:1])).logits[0], atol=1e-4, rtol=0)


def test_verified_rows_and_those_that_follow_rejected_ones_have_the_logits_of_transformers(oracle, make_stage):
    (tokens,) = drawn(40)
    stage = staged(oracle, make_stage, 1)
    stage.step([tokens[:21]])
    wanted = oracle.logits(tokens)
    for start, accepted in ((21, 2), (23, 1), (24, 5), (29, 3), (32, 1), (33, 2)):
        wrong = [(token + 1) % 128 for token in tokens[start + accepted : start + 5]]
        found = stage.step([tokens[start : start + accepted] + wrong], ForwardMode.TARGET_VERIFY)[0]
        assert_close(found[:accepted], wanted[start : start + accepted], atol=1e-4, rtol=0)
        stage.table.truncate(stage.rows[0], start + accepted)


def test_a_batch_without_requests_runs(make_stage):
    stage = make_stage(load_model(MODEL, dtype=torch.float32, device="cpu"), 1)
    none = torch.zeros(0, dtype=torch.int64)
    table = torch.zeros(0, 1, dtype=torch.int32)
    geometry = Geometry.of_lengths(ForwardMode.IDLE, table, [], [], stage.page_size)
    assert stage.forward(ForwardBatch(geometry, none, none)).shape == (0, 128)


# ---- tokens ----


def test_a_batch_of_eight_in_chunks_gives_the_tokens_of_transformers(oracle):
    prompts = drawn(120, 5, 33, 90, 12, 13, 64, 1)
    engine = Engine(str(oracle.folder), device="cpu", max_batch=8, page_size=16, chunked_prefill_size=50)
    check(oracle, prompts, generated(engine, prompts, 12))


def test_invariant_steps_give_the_tokens_of_transformers(oracle):
    """E3: chunks, prefix hits, and drafts."""
    prompts = [*drawn(52, 5), drawn(7)[0] * 5]
    engine = Engine(
        str(oracle.folder), device="cpu", page_size=16, chunked_prefill_size=30, batch_invariant=True,
        speculative_algorithm="ngram", speculative_num_steps=3,
    )  # fmt: skip
    for _ in range(2):
        check(oracle, prompts, generated(engine, prompts, 8))
    assert engine.cache_statistics.hit_tokens >= 48 + 32


def test_prefix_hits_give_the_same_tokens(oracle):
    """Hits are whole pages, with their entries and the tokens that the next entry needs."""
    shared, *tails = drawn(70, 9, 20, 1)
    prompts = [shared + tail for tail in tails]
    engine = Engine(str(oracle.folder), device="cpu", page_size=16, max_batch=2)
    for _ in range(2):
        check(oracle, prompts, generated(engine, prompts, 10))
    assert engine.cache_statistics.hit_tokens >= 64 * 4


@pytest.mark.long
def test_preempted_requests_give_the_same_tokens(oracle):
    prompts = drawn(40, 33, 20)
    engine = Engine(str(oracle.folder), device="cpu", page_size=16, num_pages=7, max_batch=3)
    check(oracle, prompts, generated(engine, prompts, 20))
    assert engine.scheduler.preemptions > 0


@pytest.mark.long
def test_halves_of_a_step_give_the_same_tokens(oracle):
    """B4: a request is divided anywhere in a window."""
    prompts = drawn(51, 7, 30)
    engine = Engine(str(oracle.folder), device="cpu", page_size=16, two_batch_overlap=True, chunked_prefill_size=37)
    check(oracle, prompts, generated(engine, prompts, 8))


@pytest.mark.long
def test_chains_of_drafts_give_the_same_tokens(oracle):
    prompts = [drawn(6)[0] * 6, drawn(23)[0]]
    engine = Engine(
        str(oracle.folder), device="cpu", page_size=16, speculative_algorithm="ngram", speculative_num_steps=4
    )
    check(oracle, prompts, generated(engine, prompts, 24))
    assert engine.statistics.rounds.rounds < 48


def test_every_rank_gets_the_logits_of_one_process(oracle, make_stage, sequences):
    def run(parallel):
        loaded = load_model(str(oracle.folder), dtype=torch.float32, device="cpu", parallel=parallel)
        return make_stage(loaded, 1).run(sequences[:1], 4)[0]

    for logits in in_ranks(2, run):
        assert_close(logits, oracle.logits(sequences[0]), atol=1e-4, rtol=0)


def test_an_fp8_cache_of_rows_serves_it():
    engine = Engine(MODEL, device="cpu", kv_dtype=DType.FLOAT8_E4M3, ignore_eos=True)
    assert len(generated(engine, drawn(30), 4)[0]) == 4


def test_bytes_of_a_page_are_those_of_its_rows_and_entries():
    spec = load_spec(MODEL)
    pools = build_pools(spec, Capacity(6, 16, 2, 8, 64, nodes=3), torch.float16, DType.FLOAT8_E4M3, torch.device("cpu"))
    assert pools.nbytes == 6 * bytes_per_page(spec, 16, DType.FLOAT8_E4M3, torch.float16, drafts=2)
    assert pools.cache(COMPRESSED).dtype is DType.FLOAT16


# ---- what is refused ----


def test_four_ranks_cannot_share_two_groups_of_heads(oracle):
    with pytest.raises(ParallelError, check=having(what="groups of attention heads", count=2, size=4)):
        load_model(str(oracle.folder), dtype=torch.float32, device="cpu", parallel=Threads(4).rank(0))


def test_pages_that_end_inside_a_window_are_refused(attnplug: Attnplug):
    """D3"""
    with pytest.raises(UsageError, check=having(12, 8, settings=("page_size",))):
        Engine(MODEL, device="cpu", page_size=12)
    outcome = attnplug("explain", "--model", MODEL, "--device", "cpu", "--page-size", "12")
    assert outcome.code == 2 and not missing_values(outcome.err, "--page-size", 12, 8)


def test_trees_of_drafts_are_refused():
    more = {"speculative_num_steps": 3, "speculative_topk": 2, "speculative_num_draft_tokens": 6}
    with pytest.raises(SelectionError, check=refusing("torch_sparse", "feature")):
        Engine(MODEL, device="cpu", speculative_algorithm="standalone", speculative_draft_model="tiny:llama", **more)


@pytest.mark.parametrize(
    ("changes", "key", "named"),
    [
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types", []),
        ({"layer_types": ["sliding_attention"]}, "layer_types", [1, 4]),
        ({"layer_types": ["full_attention"] * 4}, "layer_types", ["full_attention", 0]),
        ({"num_key_value_heads": 2}, "num_key_value_heads", [2, 1]),
        ({"scoring_func": "softmax"}, "scoring_func", ["softmax", "sqrtsoftplus"]),
        ({"n_shared_experts": 2}, "n_shared_experts", [2, 1]),
        ({"norm_topk_prob": False}, "norm_topk_prob", [False]),
        ({"attention_bias": True}, "attention_bias", [True]),
        ({"o_groups": 3}, "o_groups", [3, 4]),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor", [1.5, 1]),
        ({"partial_rotary_factor": 0.5}, "rope_parameters.main.partial_rotary_factor", [0.25, 0.5]),
        ({"index_head_dim": 4}, "index_head_dim", [4, 8]),
        ({"mlp_layer_types": ["moe"]}, "mlp_layer_types", [1, 4]),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5}},
            "attention_factor",
            [0.5],
        ),
    ],
)
def test_a_model_of_another_kind_is_refused(changes, key, named, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**TINY_CONFIGS[NAME], **changes}))
    with pytest.raises(ModelConfigError, check=having(*named, key=key)):
        load_model(str(tmp_path), dtype=torch.float32, device="cpu", random_weights=True)


def test_a_table_of_experts_that_are_not_there_is_refused(make_oracle):
    oracle = make_oracle(NAME)
    oracle.model.model.layers[0].mlp.gate.tid2eid[5] = 9
    oracle.model.save_pretrained(oracle.folder)
    with pytest.raises(CheckpointError, check=having(9, 3, tensor="model.layers.0.ffn.gate.tid2eid")):
        load_model(str(oracle.folder), dtype=torch.float32, device="cpu")


def test_run_serves_it_and_explain_shows_it(attnplug: Attnplug):
    model = ("--model", MODEL, "--device", "cpu")
    outcome = attnplug("run", *model, "--prompt", "a prompt of many tokens", "--max-tokens", "4")
    assert outcome.code == 0 and "decode: torch_sparse" in outcome.err, outcome.err
    printed = attnplug("explain", *model)
    assert printed.code == 0 and "(an entry for 8 tokens, window 8)" in printed.out
    assert "page size  64 (chosen)" in printed.out


def test_every_backend_without_compressed_layers_is_refused_by_name_with_the_reason(attnplug: Attnplug):
    """A10, D3"""
    others = [
        name
        for name, registered in load_registry().backends.items()
        if Feature.COMPRESSED not in registered.spec.capabilities.features
        and Role.DECODE in registered.spec.capabilities.roles
    ]
    assert "triton_mla" in others and "torch_sparse" not in others
    printed = attnplug("explain", "--model", MODEL, "--device", "cuda", "--sm", "90", "--json")
    candidates = {each["name"]: each["refusals"] for each in json.loads(printed.out)["decode"]["candidates"]}
    for name in others:
        reasons = [refusal["message"] for refusal in candidates[name] if refusal["value"] == "compressed"]
        assert len(reasons) == 2 and "entries of 4 tokens each" in reasons[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_same_tokens_on_a_gpu(oracle):
    prompts = drawn(120, 5, 33, 1)
    engine = Engine(str(oracle.folder), device="cuda", page_size=16, chunked_prefill_size=50)
    check(oracle, prompts, generated(engine, prompts, 12))
