"""Embeddings against transformers on the same checkpoint: the same hidden states, pooled by independent code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attnplug import DType, PoolError, Role, Serving, UsageError
from attnplug.host import TINY_CONFIGS, load_model
from attnplug_engine import Embedder, Engine
from attnplug_engine.checkpoints.safetensors import MissingTensor
from attnplug_engine.memory.capacity import bytes_per_page
from attnplug_engine.settings.pooling import Pooling
from attnplug_testing.errors import having, naming
from attnplug_testing.rounded_oracle import without_fla

SETTINGS: list[dict[str, Any]] = [
    {"pooling": Pooling.LAST},
    {"pooling": "mean", "normalize": False, "max_batch": 2},
    {"pooling": Pooling.FIRST, "page_size": 8},
    {"pooling": Pooling.LAST, "normalize": False, "chunked_prefill_size": 7},
    {"pooling": Pooling.MEAN, "chunked_prefill_size": 5, "max_batch": 2},
    {"pooling": Pooling.FIRST, "chunked_prefill_size": 3},
]


def hidden_states(folder: Path, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return hidden states ``[tokens, hidden]`` by transformers' base model, one prompt at a time, in float32."""
    from transformers import AutoModel

    with torch.inference_mode(), without_fla():
        model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        return [model(torch.tensor([list(tokens)])).last_hidden_state[0].double() for tokens in prompts]


def pooled(states: Tensor, pooling: str, normalize: bool = True) -> Tensor:
    match pooling:
        case "last":
            vector = states[len(states) - 1]
        case "first":
            vector = states[0]
        case _:
            vector = sum(states) / len(states)
    if normalize:
        vector = vector / (vector * vector).sum().sqrt()
    return vector.float()


@pytest.fixture
def prompts(sequences: list[list[int]]) -> list[list[int]]:
    """Without token 0, by which models pad: its hidden state can be zero, which has no direction."""
    return [[max(token, 1) for token in tokens] for tokens in (*sequences, [5], sequences[0][:16])]


@pytest.mark.parametrize(
    ("model_type", "each"),
    [("llama", SETTINGS), *((name, SETTINGS[3:5]) for name in ("qwen3", "deepseek_v3", "kimi_linear"))],
    ids=["llama", "qwen3", "deepseek_v3", "kimi_linear"],
)
@pytest.mark.sample(1)
def test_embeddings_equal_pooled_hidden_states_of_transformers(model_type, each, make_oracle, prompts):
    """Whole prompts in one batch, and chunked prompts, which read the cache."""
    folder = make_oracle(model_type).folder
    states = hidden_states(folder, prompts)
    for settings in each:
        found = Embedder(str(folder), device="cpu", **settings).embed(prompts)
        assert [embedding.index for embedding in found] == list(range(len(prompts)))
        assert [embedding.prompt_tokens for embedding in found] == [len(tokens) for tokens in prompts]
        for embedding, state in zip(found, states, strict=True):
            vector = pooled(state, settings["pooling"], settings.get("normalize", True))
            assert_close(embedding.vector, vector, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", TINY_CONFIGS)
@pytest.mark.sample(2)
def test_prompts_in_pieces_give_the_vectors_of_whole_ones(name, prompts):
    """For every architecture: each chunk continues with the cache rows and linear states of the previous one."""
    whole = Embedder(f"tiny:{name}", device="cpu", pooling="mean").embed(prompts)
    pieces = Embedder(f"tiny:{name}", device="cpu", pooling="mean", chunked_prefill_size=9, page_size=8).embed(prompts)
    for one, other in zip(whole, pieces, strict=True):
        assert_close(one.vector, other.vector, atol=1e-5, rtol=0)


@pytest.fixture
def bare(make_oracle, tmp_path):
    """Checkpoint that ``AutoModel`` saves: without a head, and names without ``model.``"""

    def save(model_type: str, **changes: Any) -> Path:
        from safetensors import safe_open
        from transformers import AutoModel

        folder = tmp_path / "bare"
        AutoModel.from_pretrained(make_oracle(model_type, **changes).folder, dtype=torch.float32).save_pretrained(
            folder
        )
        names = list(safe_open(folder / "model.safetensors", "pt").keys())
        assert "embed_tokens.weight" in names and "lm_head.weight" not in names
        return folder

    return save


@pytest.mark.parametrize("model_type", ["qwen3", "mistral"])
def test_a_checkpoint_of_a_base_model_is_embedded_and_cannot_generate(model_type, bare, prompts):
    """Saved from ``Qwen3Model``, like Qwen3-Embedding."""
    folder = bare(model_type)
    found = Embedder(folder, device="cpu").embed(prompts)
    for embedding, states in zip(found, hidden_states(folder, prompts), strict=True):
        assert_close(embedding.vector, pooled(states, "last"), atol=2e-5, rtol=1e-4)
    with pytest.raises(MissingTensor, check=having("attnplug embed", tensor="lm_head.weight")):
        Engine(str(folder), device="cpu")


def test_a_base_model_with_a_tied_head_generates(bare):
    from transformers import AutoModelForCausalLM

    folder = bare("qwen3", tie_word_embeddings=True)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    (completion,) = Engine(str(folder), device="cpu").generate([[1, 2, 3]], max_tokens=4)
    tokens = oracle.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, pad_token_id=0)[0, 3:]
    assert completion.token_ids == tokens.tolist()


def test_the_context_says_that_nothing_is_decoded_and_how_prompts_run(monkeypatch):
    """A6: what ``fa_skip_kv_cache`` depends on; only the role prefill is filled."""
    contexts = []
    import attnplug.torch_native.backend as native

    original = native.TorchNativeBackend.__init__
    monkeypatch.setattr(
        native.TorchNativeBackend,
        "__init__",
        lambda self, context: (contexts.append(context), original(self, context))[1],
    )
    whole = Embedder("tiny:llama", device="cpu")
    Embedder("tiny:llama", device="cpu", chunked_prefill_size=64)
    assert contexts[0].serving == Serving(is_embedding=True, chunked_prefill_size=-1, disable_radix_cache=True)
    assert contexts[1].serving == Serving(is_embedding=True, chunked_prefill_size=64, disable_radix_cache=True)
    assert [context.roles for context in contexts] == [{Role.PREFILL}] * 2
    assert set(whole.selection.choices) == {Role.PREFILL}


@pytest.mark.parametrize(
    ("pages", "context", "lengths", "together"),
    [(20, 80, [3] * 9 + [80], [4, 4, 1, 1]), (20, 40, [22, 22, 22], [2, 1]), (10, 40, [16, 16, 16], [2, 1])],
    ids=["number", "tokens", "pages"],
)
def test_many_prompts_run_within_the_limits_of_the_context(pages, context, lengths, together, monkeypatch):
    """Each limit alone bounds the number of requests at a time; nothing is held afterwards."""
    page = bytes_per_page(load_model("tiny:qwen3_next"), 4, DType.FLOAT32, torch.float32)
    monkeypatch.setattr("attnplug_engine.serving.embedding.STEP_TOKENS", 64)
    monkeypatch.setattr("attnplug_engine.serving.sizing._CPU_CACHE_BYTES", pages * page)
    embedder = Embedder("tiny:qwen3_next", device="cpu", max_batch=4, page_size=4, context_length=context)
    assert embedder.capacity.num_pages == pages
    steps = []
    original = embedder.runner.hidden_states
    monkeypatch.setattr(embedder.runner, "hidden_states", lambda step: (steps.append(step), original(step))[1])
    found = embedder.embed([[1 + index] * length for index, length in enumerate(lengths)])
    assert [embedding.prompt_tokens for embedding in found] == lengths
    assert [len(step.entries) for step in steps] == together
    assert max(step.num_tokens for step in steps) <= embedder.capacity.max_step_tokens
    assert embedder.runner.allocator.free_pages == embedder.capacity.num_pages
    assert embedder.runner.states.free_slots == embedder.capacity.state_slots


def test_a_mean_is_taken_in_float32(monkeypatch):
    """The model's type does not matter: a sum in bfloat16 would have three digits."""
    embedder = Embedder("tiny:llama", device="cpu", dtype="bf16", pooling="mean", normalize=False)
    rows = torch.linspace(1, 2, 1000).unsqueeze(1).bfloat16()
    monkeypatch.setattr(embedder.runner, "hidden_states", lambda step: rows)
    (found,) = embedder.embed([[1] * 1000])
    assert found.vector.item() == pytest.approx(rows.double().mean().item(), rel=1e-6)


def test_an_iterator_that_is_left_early_holds_nothing():
    embedder = Embedder("tiny:kimi_linear", device="cpu", chunked_prefill_size=4)
    stream = embedder.stream([embedder.tokens("hello"), embedder.tokens("hello again")])
    next(stream)
    stream.close()
    assert embedder.runner.allocator.free_pages == embedder.capacity.num_pages
    assert embedder.runner.states.free_slots == embedder.capacity.state_slots


def test_the_seed_is_that_of_a_tiny_models_weights():
    vectors = [Embedder("tiny:llama", device="cpu", seed=seed).embed(["hello"])[0].vector for seed in (0, 1, 1)]
    assert torch.equal(vectors[1], vectors[2]) and not torch.allclose(vectors[0], vectors[1])


def test_a_prompt_does_not_see_the_others():
    one = Embedder("tiny:deepseek_v3", device="cpu", pooling=Pooling.MEAN)
    alone = one.embed(["hello"])[0].vector
    assert_close(one.embed(["something else", "hello", "x"])[1].vector, alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("", []),
        ([], []),
        ([1, 128], [128]),
        ([True], [True]),
        ("é", ["ASCII"]),
        ("\ud800", ["surrogate"]),
        ("byte \udcff", ["character 5", "not UTF-8"]),
        ("x" * 65, [65, 64]),
    ],
)
def test_a_prompt_that_cannot_be_embedded_is_named(prompt, named):
    with pytest.raises(UsageError, check=naming("prompt 1", *named)):
        Embedder("tiny:llama", device="cpu", context_length=64).embed(["fine", prompt])


def test_a_prompt_that_memory_cannot_hold_is_refused(monkeypatch):
    monkeypatch.setattr("attnplug_engine.serving.sizing._CPU_CACHE_BYTES", 100_000)
    with pytest.raises(PoolError, check=naming("prompt 0", 4000, 192)):
        Embedder("tiny:llama", device="cpu").embed([[1] * 4000])


def test_a_model_whose_tokens_see_later_ones_is_refused(make_oracle):
    """Causal attention would give wrong vectors for such a model (gte-Qwen2, by its config)."""
    folder = make_oracle("llama").folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_causal": False}))
    with pytest.raises(UsageError, check=having(key="is_causal")):
        Embedder(str(folder), device="cpu")


def test_a_decode_backend_is_not_for_an_embedding():
    with pytest.raises(UsageError, check=having(settings=("decode_attention_backend",))):
        Embedder("tiny:llama", device="cpu", role_backends={Role.DECODE: "torch_native"})
