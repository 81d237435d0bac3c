"""Models with sparse attention: a whole layer in float64, keys as transformers has them, and tokens however they are
made."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attnplug import DType, Feature, ForwardMode, Role
from attnplug.host import TINY_CONFIGS, ModelConfigError, load_registry
from attnplug.host import load_model as load_spec
from attnplug_engine import Engine, SamplingParams
from attnplug_engine.checkpoints.random import RandomCheckpoint
from attnplug_engine.checkpoints.safetensors import UnusedTensors
from attnplug_engine.memory.capacity import Capacity, bytes_per_page
from attnplug_engine.memory.pools import build_pools
from attnplug_engine.models.architectures import build_model, load_model
from attnplug_engine.models.decoder import Block
from attnplug_sparse.pools import INDEX_KEYS
from attnplug_testing.command import Attnplug
from attnplug_testing.errors import having, missing_values

SPARSE = ["deepseek_v32", "glm_moe_dsa"]


# ---- one layer in float64 ----


class ExactLayer:
    """The attention of one layer by the model's equations, in float64, from the stored weights; a token at a time."""

    def __init__(self, source: RandomCheckpoint, layer: int, index_layer: int) -> None:
        self._config, self._source = source.config, source
        self._prefix = f"model.layers.{layer}."
        self._index = f"model.layers.{index_layer}."
        self._interleaved_index = self._config["model_type"] == "glm_moe_dsa"

    def weight(self, name: str, prefix: str | None = None) -> Tensor:
        name = (self._prefix if prefix is None else prefix) + name
        return self._source._whole(name, self._source._shapes[name]).double()

    def __call__(self, hidden: Tensor, index_hidden: Tensor) -> tuple[Tensor, list[list[int]]]:
        """Output ``[tokens, hidden]``, and what each token attends to. ``index_hidden`` goes into the layer that has
        the index."""
        c, eps = self._config, self._config.get("rms_norm_eps", 1e-6 if not self._interleaved_index else 1e-5)
        heads, nope, rope, rank = (
            c[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
        )
        chosen = self._choose(self._normed(index_hidden, self._index, eps))
        x = self._normed(hidden, self._prefix, eps)
        q = self._latents(x, self._prefix) @ self.weight("self_attn.q_b_proj.weight").T
        q = q.unflatten(1, (heads, nope + rope))
        down = x @ self.weight("self_attn.kv_a_proj_with_mqa.weight").T
        latent = rms(down[:, :rank], self.weight("self_attn.kv_a_layernorm.weight"), 1e-6)
        up = (latent @ self.weight("self_attn.kv_b_proj.weight").T).unflatten(1, (heads, -1))
        outs = []
        for token in range(len(x)):
            seen = chosen[token]
            query = torch.cat((q[token, :, :nope], pairs(q[token, :, nope:], token)), -1)
            keys = torch.stack([
                torch.cat((up[key, :, :nope], pairs(down[key, rank:], key).expand(heads, -1)), -1) for key in seen
            ])  # fmt: skip
            logits = torch.einsum("hd,khd->hk", query, keys) * (nope + rope) ** -0.5
            outs.append(torch.einsum("hk,khd->hd", logits.softmax(-1), up[seen][..., nope:]).flatten())
        return torch.stack(outs) @ self.weight("self_attn.o_proj.weight").T, chosen

    def _normed(self, hidden: Tensor, prefix: str, eps: float) -> Tensor:
        return rms(hidden.double(), self.weight("input_layernorm.weight", prefix), eps)

    def _latents(self, x: Tensor, prefix: str) -> Tensor:
        low = x @ self.weight("self_attn.q_a_proj.weight", prefix).T
        return rms(low, self.weight("self_attn.q_a_layernorm.weight", prefix), 1e-6)

    def _choose(self, x: Tensor) -> list[list[int]]:
        c, prefix = self._config, self._index + "self_attn."
        heads, width, topk, rope = (
            c[key] for key in ("index_n_heads", "index_head_dim", "index_topk", "qk_rope_head_dim")
        )
        turn = pairs if self._interleaved_index else halves
        q = self._latents(x, self._index) @ self.weight("indexer.wq_b.weight", prefix).T
        q = q.unflatten(1, (heads, width))
        k = x @ self.weight("indexer.wk.weight", prefix).T
        k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()
        k = k * self.weight("indexer.k_norm.weight", prefix) + self.weight("indexer.k_norm.bias", prefix)
        q, k = (
            torch.stack([torch.cat((turn(t[..., :rope], at), t[..., rope:]), -1) for at, t in enumerate(part)])
            for part in (q, k)
        )
        w = x @ self.weight("indexer.weights_proj.weight", prefix).T * heads**-0.5
        chosen = []
        for token in range(len(x)):
            scores = w[token] @ torch.relu(q[token] @ k[: token + 1].T * width**-0.5)
            order = scores.argsort(descending=True)
            if token >= topk:
                assert scores[order[topk - 1]] - scores[order[topk]] > 1e-6, "a tie; take another seed"
            chosen.append(sorted(order[:topk].tolist()))
        return chosen


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _angles(width: int, position: int) -> tuple[Tensor, Tensor]:
    angles = position * 10000.0 ** -(torch.arange(0, width, 2).double() / width)
    return angles.cos(), angles.sin()


def pairs(x: Tensor, position: int) -> Tensor:
    """Rotated in pairs ``(2 i, 2 i + 1)``."""
    (cos, sin), even, odd = _angles(x.shape[-1], position), x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def halves(x: Tensor, position: int) -> Tensor:
    """Rotated in pairs ``(i, i + width / 2)``."""
    (cos, sin), (first, second) = _angles(x.shape[-1], position), x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


def hidden_states(module: torch.nn.Module) -> list[Tensor]:
    """Inputs and outputs of each block's attention, recorded from the next forward on."""
    seen: list[Tensor] = []

    def note(block: Block, given: tuple[Tensor, ...]) -> None:
        seen.append(given[0].clone())

    def result(_attention: object, _given: object, output: Tensor) -> None:
        seen.append(output.clone())

    for block in module.layers:
        block.register_forward_pre_hook(note)
        block.attention.register_forward_hook(result)
    return seen


@pytest.mark.parametrize("name", SPARSE)
def test_each_layer_is_that_of_the_models_equations_in_float64(name, make_stage):
    """A10"""
    loaded = load_model(f"tiny:{name}", dtype=torch.float32, device="cpu", seed=2)
    source = RandomCheckpoint.tiny(f"tiny:{name}", seed=2)
    build_model(source, load_spec(f"tiny:{name}"), dtype=torch.float32, device="cpu")  # gives ``source`` the shapes
    seen = hidden_states(loaded.module)
    tokens = torch.randint(0, 128, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    make_stage(loaded, 1).step([tokens])
    inputs, outputs = seen[0::2], seen[1::2]
    for layer, spec in enumerate(loaded.spec.layers):
        index_layer = layer if spec.indexer.shares is None else spec.indexer.shares
        wanted, chosen = ExactLayer(source, layer, index_layer)(inputs[layer], inputs[index_layer])
        assert_close(outputs[layer] - inputs[layer], wanted.float(), atol=2e-5, rtol=1e-4)
        assert [len(mine) for mine in chosen] == [min(token + 1, 12) for token in range(40)]


# ---- as transformers ----


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.sample(1)
def test_cached_index_keys_are_those_of_transformers(name, make_oracle, make_stage, sequences):
    oracle = make_oracle(name)
    stage = make_stage(load_model(str(oracle.folder), dtype=torch.float32, device="cpu"), len(sequences))
    stage.run(sequences, 8)
    pool = stage.pools.cache(INDEX_KEYS)
    for request, tokens in enumerate(sequences):
        row = stage.rows[request]
        for layer_id, layer in enumerate(oracle.cache(tokens).layers):
            if layer_id in pool.layer_ids:
                keys = pool.keys(layer_id)[list(stage.table.pages(row))].flatten(0, 1)[: len(tokens)]
                assert_close(keys, layer.indexer_keys[0], atol=2e-5, rtol=1e-4)


def test_verified_rows_have_the_logits_of_transformers(make_oracle, make_stage, sequences):
    """Each row of a verify sees its own length."""
    oracle = make_oracle("glm_moe_dsa")
    stage = make_stage(load_model(str(oracle.folder), dtype=torch.float32, device="cpu"), len(sequences))
    stage.step([tokens[:-5] for tokens in sequences])
    found = stage.step([tokens[-5:] for tokens in sequences], ForwardMode.TARGET_VERIFY)
    for tokens, logits in zip(sequences, found, strict=True):
        assert_close(logits, oracle.logits(tokens)[-5:], atol=1e-4, rtol=0)


def test_the_way_to_rotate_an_index_is_the_configs(make_oracle, make_stage, sequences):
    """GLM's type with V3.2's rotation is V3.2."""
    oracle = make_oracle("deepseek_v32")
    path = oracle.folder / "config.json"
    changes = {"model_type": "glm_moe_dsa", "indexer_rope_interleave": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    stage = make_stage(load_model(str(oracle.folder), dtype=torch.float32, device="cpu"), 1)
    assert_close(stage.step(sequences[2:])[0], oracle.logits(sequences[2]), atol=1e-4, rtol=0)


def eight() -> list[list[int]]:
    """Prompts below the twelve rows that the tiny indexes choose, and up to ten times as long."""
    random = torch.Generator().manual_seed(8)
    lengths = (120, 5, 33, 90, 12, 13, 64, 1)
    drawn = [torch.randint(0, 128, (length,), generator=random).tolist() for length in lengths]
    drawn[3][:60] = drawn[0][:60]
    return drawn


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.sample(1)
def test_a_batch_of_eight_long_and_short_prompts_gives_the_tokens_of_transformers(name, make_oracle):
    oracle = make_oracle(name)
    options = {"page_size": 8, "chunked_prefill_size": 50, "max_batch": 8, "ignore_eos": True}
    engine = Engine(str(oracle.folder), device="cpu", **options)
    completions = engine.generate(eight(), SamplingParams(max_tokens=12))
    for prompt, completion in zip(eight(), completions, strict=True):
        greedy = oracle.logits(prompt + completion.token_ids[:-1])[len(prompt) - 1 :].argmax(-1)
        assert completion.token_ids == greedy.tolist()


@pytest.mark.parametrize(
    "speculation",
    [
        {"speculative_algorithm": "ngram", "speculative_num_steps": 4},
        {"speculative_algorithm": "standalone", "speculative_draft_model": "tiny:glm_moe_dsa",
         "speculative_num_steps": 3, "speculative_topk": 3, "speculative_num_draft_tokens": 8},
    ],
    ids=["chains", "trees of a sparse draft"],
)  # fmt: skip
@pytest.mark.long
def test_speculation_gives_the_same_tokens(speculation):
    """Accepted rows of a tree are moved with their index keys: the draft is the model itself, so most are accepted."""
    prompts = [*eight()[1:4], eight()[0][:6] * 4]
    options = {"device": "cpu", "page_size": 4, "context_length": 256, "ignore_eos": True}
    plain, speculating = (Engine("tiny:glm_moe_dsa", **options, **more) for more in ({}, speculation))
    wanted, found = (
        [one.token_ids for one in engine.generate(prompts, SamplingParams(max_tokens=20))]
        for engine in (plain, speculating)
    )
    assert found == wanted


# ---- memory ----


@pytest.mark.parametrize("name", SPARSE)
def test_bytes_of_a_page_are_those_of_its_rows_and_index_keys(name):
    """Index keys keep the model's type, even if the cache has another one."""
    spec = load_spec(f"tiny:{name}")
    pools = build_pools(spec, Capacity(6, 4, 2, 8, 64), torch.float16, DType.FLOAT8_E4M3, torch.device("cpu"))
    assert pools.nbytes == 6 * bytes_per_page(spec, 4, DType.FLOAT8_E4M3, torch.float16)
    assert pools.cache(INDEX_KEYS).dtype == DType.FLOAT16
    assert pools.cache(INDEX_KEYS).layer_ids == tuple(layer.layer_id for layer in spec.index_layers)


def test_fp8_index_keys_and_latent_rows_with_scales_are_counted_as_they_lie():
    spec = load_spec("tiny:glm_moe_dsa")
    mla = replace(spec.layers[0].mla, kv_lora_rank=128)
    spec = replace(spec, layers=tuple(replace(layer, mla=mla) for layer in spec.layers))
    types = ("fp8_ds_mla", torch.bfloat16, DType.FLOAT8_E4M3)
    fp8 = build_pools(spec, Capacity(6, 4, 2, 8, 64), types[1], types[0], torch.device("cpu"), types[2])
    assert fp8.nbytes == 6 * bytes_per_page(spec, 4, *types)
    own, keys = len(spec.index_layers), spec.index_layers[0].indexer.head_dim + 4
    row = 144 + 2 * mla.qk_rope_head_dim  # 128 bytes and a scale; rotary columns start at a multiple of 16
    assert bytes_per_page(spec, 4, *types) == 4 * (len(spec.layers) * row + own * keys)


def test_fp8_caches_serve_sparse_layers_and_a_hit_in_the_prefix_cache_gives_the_same():
    """A10: a hit restores index keys and rows, together with their scales."""
    fp8 = DType.FLOAT8_E4M3
    engine = Engine("tiny:glm_moe_dsa", device="cpu", kv_dtype=fp8, index_dtype=fp8, page_size=4, ignore_eos=True)
    first, again = (engine.generate([eight()[2]], SamplingParams(max_tokens=4))[0] for _ in range(2))
    assert engine.runner.pools.cache(INDEX_KEYS).dtype == fp8
    assert again.token_ids == first.token_ids and again.usage.cached_tokens > 0


# ---- what is refused ----


@pytest.mark.parametrize(
    "changes",
    [
        {"index_init_tokens": 4},
        {"index_local_tokens": 1},
        {"index_k_norm_type": "rms"},
        {"q_lora_rank": None},
        {"rope_interleave": False},
    ],
)
def test_an_indexer_of_another_kind_is_refused(changes, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**TINY_CONFIGS["deepseek_v32"], **changes}))
    with pytest.raises(ModelConfigError, check=having(key=next(iter(changes)))):
        load_model(str(tmp_path), dtype=torch.float32, device="cpu", random_weights=True)


def test_an_index_that_the_config_says_is_shared_is_not_left_out_silently(make_oracle):
    oracle = make_oracle("glm_moe_dsa", indexer_types=["full"] * 4)
    path = oracle.folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "indexer_types": ["full", "full", "full", "shared"]}))
    with pytest.raises(UnusedTensors, check=having(tensor="model.layers.3.self_attn.indexer.k_norm.bias")):
        load_model(str(oracle.folder), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.sample(1)
def test_run_serves_sparse_models_and_explain_shows_them(name, attnplug: Attnplug):
    model = ("--model", f"tiny:{name}", "--device", "cpu")
    answer = ("--prompt", "a prompt of many tokens", "--max-tokens", "4", "--index-dtype", "fp8")
    outcome = attnplug("run", *model, *answer)
    assert outcome.code == 0 and "decode: torch_sparse" in outcome.err, outcome.err
    shown = attnplug("explain", *model, "--index-dtype", "fp8")
    assert shown.code == 0 and "+sparse (top 12, index 16×16)" in shown.out and "index keys float8_e4m3fn" in shown.out
    assert ("shared index" in shown.out) is (name == "glm_moe_dsa")


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_an_extend_path_that_sparse_layers_cannot_run_is_refused_before_weights_are_read(name, monkeypatch, attnplug):
    """C1"""
    monkeypatch.setattr("attnplug_engine.prepare.load_model", None)
    outcome = attnplug("run", "--model", f"tiny:{name}", "--device", "cpu", "--prompt", "x", "--mla-extend", "chunked")
    assert outcome.code == 2 and outcome.err.count("error: ") == 1 and "Traceback" not in outcome.err
    assert not missing_values(outcome.err, "--mla-extend", "chunked", f"tiny:{name}", "absorbed")


def test_a_draft_without_index_keys_of_tokens_is_beside_a_target_that_has_them():
    drafts = {"speculative_algorithm": "standalone", "speculative_draft_model": "tiny:deepseek_v4"}
    engine = Engine("tiny:glm_moe_dsa", device="cpu", index_dtype=DType.FLOAT8_E4M3, context_length=64, **drafts)
    assert engine.runner.pools.cache(INDEX_KEYS) is not None


def test_every_backend_without_sparse_attention_is_refused_by_name_with_the_reason(attnplug: Attnplug):
    """A10, D3"""
    dense = [
        name
        for name, registered in load_registry().backends.items()
        if Feature.SPARSE not in registered.spec.capabilities.features
        and Role.DECODE in registered.spec.capabilities.roles
    ]
    assert "flashinfer_mla" in dense and "torch_sparse" not in dense
    printed = attnplug("explain", "--model", "tiny:glm_moe_dsa", "--device", "cuda", "--sm", "90", "--json")
    candidates = {each["name"]: each["refusals"] for each in json.loads(printed.out)["decode"]["candidates"]}
    for name in dense:
        (reason,) = [refusal for refusal in candidates[name] if refusal["value"] == "sparse"]
        assert reason["code"] == "feature" and "12 rows that an index" in reason["message"]
