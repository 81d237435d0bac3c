"""Assistants that read the target's cache: tokens, logits against float64, an untouched target cache, refusals."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import draft_math as math
import pytest
import torch
from coached_drafts import Coach, caches, params, tokens
from device_native import on_device_lengths
from refilled_native import AnyBatch, build, captured
from thread_ranks import in_ranks
from torch.testing import assert_close

from attnplug import ForwardMode
from attnplug.host import ModelConfigError
from attnplug.kernels import PageCopy
from attnplug_engine import Engine
from attnplug_engine.checkpoints.safetensors import UnusedTensors
from attnplug_engine.speculation.batches import EagerBatches
from attnplug_engine.speculation.draft_runner import DraftRunner
from attnplug_engine.speculation.drafts.model import DraftError
from attnplug_engine.speculation.frozen_kv import FrozenKVProposer
from attnplug_testing.draft_checkpoints import VOCAB, random_tensors, save, shapes_of_assistant
from attnplug_testing.errors import having

pytestmark = pytest.mark.long

LLAMA, QWEN, HYBRID = "tiny:llama", "tiny:qwen3", "tiny:qwen3_next"
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]]
STEPS, HIDDEN, BACKBONE, HEADS = 3, 32, 64, 4
NEW = 14
READ = [1, 0, 1]
CONFIG = {
    "model_type": "llama_assistant",
    "architectures": ["LlamaAssistantForCausalLM"],
    "backbone_hidden_size": BACKBONE,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "target_layers": READ,
}


@pytest.fixture
def assistants(tmp_path):
    """Saves an assistant for a target; returns its folder and its tensors."""

    def make(target: str = LLAMA, *, more=(), **keys: Any):
        tensors = random_tensors(shapes_of_assistant(CONFIG, 16 if target == LLAMA else 32, norms=target == QWEN))
        tensors |= dict(more)
        changed = {"target_layers": [3, 3, 3]} if target == HYBRID else {}
        return save(tmp_path, {**CONFIG, **changed, **keys}, tensors), tensors

    return make


def engine(model: str = LLAMA, **settings: Any) -> Engine:
    return Engine(model, device="cpu", **{"page_size": 4, "max_batch": 4, "prefix_cache": False, **settings})


def drafting(model: str, folder, **settings: Any) -> Engine:
    shape = {"speculative_num_steps": STEPS, **settings}
    one = engine(model, speculative_algorithm="mtp", speculative_draft_model=str(folder), **shape)
    assert isinstance(one.rounds.proposer, FrozenKVProposer)
    for memory in caches(one.runner.pools):
        memory.fill_(float("nan"))
    return one


@cache
def longer(model: str) -> list[list[int]]:
    """The target's greedy tokens without a draft, more than the tests request."""
    return tokens(engine(model), PROMPTS, params(PROMPTS, NEW + STEPS + 1))


def plain(model: str) -> list[list[int]]:
    return [output[: NEW - 2 * number] for number, output in enumerate(longer(model))]


# ---- tokens ----


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (LLAMA, {}),
        (LLAMA, {"speculative_num_steps": 1}),
        (LLAMA, {"overlap": True, "chunked_prefill_size": 4}),
        (LLAMA, {"overlap": True, "num_pages": 22}),
        (LLAMA, {"prefix_cache": True, "max_batch": 2}),
        (QWEN, {"overlap": True}),
        (HYBRID, {"overlap": True}),
    ],
    ids=str,
)
def test_tokens_are_those_of_an_engine_without_a_draft(model, settings, assistants, monkeypatch):
    """With a random assistant, and with one that knows the accepted tokens."""
    folder, _ = assistants(model)
    assert tokens(drafting(model, folder, **settings), PROMPTS, params(PROMPTS, NEW)) == plain(model)
    Coach(monkeypatch, PROMPTS, longer(model))
    one = drafting(model, folder, **settings)
    assert tokens(one, PROMPTS, params(PROMPTS, NEW)) == plain(model)
    assert one.statistics.rounds.acceptance > 0.5


def test_drawn_tokens_are_those_of_an_engine_without_a_draft(assistants):
    drawn = params(PROMPTS, NEW, temperature=0.8, top_p=0.9)
    assert tokens(drafting(LLAMA, assistants()[0]), PROMPTS, drawn) == tokens(engine(), PROMPTS, drawn)


@pytest.mark.parametrize("fill", [0, 6])
def test_captured_rounds_give_the_same_tokens(fill, assistants, monkeypatch):
    for module in ("execution.runner", "speculation.draft_runner"):
        refilled = partial(build, kind=partial(AnyBatch, fill=fill))
        monkeypatch.setattr(f"attnplug_engine.{module}.build_selection", refilled)
    folder, _ = assistants()
    Coach(monkeypatch, PROMPTS, longer(LLAMA))
    one = captured(drafting(LLAMA, folder, overlap=True), (1, 2, 4), (4, 24))
    assert tokens(one, PROMPTS, params(PROMPTS, NEW)) == plain(LLAMA)
    assert one.statistics.replayed_prefills and not one.statistics.eager_prefills
    assert one.statistics.replayed_steps > 3 and one.statistics.rounds.acceptance > 0.5


def test_with_a_plan_stream_its_one_plan_is_made_ahead_of_each_round(assistants, monkeypatch):
    """B2: by the assistant's backend once, however many its steps are, and by the target's once."""
    expected = plain(LLAMA)
    on_device_lengths(monkeypatch)
    one, ahead, plan_ahead = (
        drafting(LLAMA, assistants()[0], plan_stream=True, page_size=64),
        [],
        EagerBatches.plan_ahead,
    )

    def planned(*given: Any) -> Any:
        found = plan_ahead(*given)
        ahead.extend(str(one.batch.forward_mode) for one in found)
        return found

    monkeypatch.setattr(EagerBatches, "plan_ahead", planned)
    assert tokens(one, PROMPTS, params(PROMPTS, NEW)) == expected
    rounds, target, draft = one.statistics.rounds.timed, one.runner.backend.seen, one.rounds.draft.backend.seen
    assert ahead.count("decode") == rounds and 0 < ahead.count("target_verify") < rounds
    assert draft == ["decode"] * (rounds + 1), "one after the prefill"
    assert target.count("target_verify") == rounds


def test_ranks_give_the_same_tokens(assistants):
    folder, _ = assistants()

    def run(parallel):
        return tokens(drafting(LLAMA, folder, parallel=parallel), PROMPTS[:2], params(PROMPTS[:2], 12))

    found = in_ranks(2, run)
    assert found[0] == found[1] == tokens(engine(), PROMPTS[:2], params(PROMPTS[:2], 12))


# ---- the target's rows ----


class Rows:
    """Record of the target's rows that a draft may read at each forward. All other rows are set to NaN."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, one: Engine) -> None:
        self.read: list[list[dict[int, tuple[torch.Tensor, torch.Tensor]]]] = []
        """By forward and request: keys and values of each layer, as many as the request has committed."""
        forward, pool = DraftRunner.forward, one.runner.pools.mha

        def looking(runner, batch, hidden, step=0):
            geometry = batch.geometry
            lens = geometry.seq_lens.tolist()
            requests = [geometry.span_slots([number], [0], [length]) for number, length in enumerate(lens)]
            others = torch.ones(pool.num_pages * pool.page_size, dtype=torch.bool)
            others[torch.cat(requests)] = False
            for memory in caches(one.runner.pools):
                memory.flatten(0, 1)[others] = float("nan")
            self.read.append(
                [
                    {layer: (pool.read_keys(layer, slots), pool.read_values(layer, slots)) for layer in pool.layer_ids}
                    for slots in requests
                ]
            )
            before = [memory.clone().view(torch.uint8) for memory in caches(one.runner.pools)]
            out = forward(runner, batch, hidden, step)
            after = [memory.view(torch.uint8) for memory in caches(one.runner.pools)]
            assert all(map(torch.equal, before, after)), "a draft without a cache wrote to the target's"
            return out

        monkeypatch.setattr(DraftRunner, "forward", looking)


def assistant(t, embedding, token, hidden, rows, dim, step):
    """The hidden state ``[1, width]`` and logits of one step of one request, which reads ``rows`` of each layer."""
    if step:
        hidden = math.linear(t, "post_projection", hidden)
    x = math.linear(t, "pre_projection", torch.cat((embedding[token].double()[None], hidden), dim=-1))
    for index, read in enumerate(READ):
        name = f"model.layers.{index}"
        keys, values = (part.double() for part in rows[read])
        q = math.linear(t, f"{name}.self_attn.q_proj", math.norm(x, t[f"{name}.input_layernorm.weight"]))
        q = q.unflatten(-1, (HEADS, dim))
        if f"{name}.self_attn.q_norm.weight" in t:
            q = math.norm(q, t[f"{name}.self_attn.q_norm.weight"])
        q = math.rotate(q.expand(len(keys), -1, -1))  # the last one is at the newest position that is committed
        x = x + math.linear(t, f"{name}.self_attn.o_proj", math.attend(q, keys, values)[-1:].flatten(1))
        x = x + math.mlp(t, f"{name}.mlp", math.norm(x, t[f"{name}.post_attention_layernorm.weight"]))
    x = math.norm(x, t["model.norm.weight"])
    return x, (x @ t["model.embed_tokens.weight"].double().T)[0]


@pytest.mark.parametrize(("model", "dim"), [(LLAMA, 16), (QWEN, 32)])
def test_each_steps_logits_are_those_of_float64_over_the_committed_rows(model, dim, assistants, monkeypatch):
    """The pool's other rows are NaN, and no byte of it changes while the draft runs."""
    folder, tensors = assistants(model)
    one = drafting(model, folder)
    rows, coach = Rows(monkeypatch, one), Coach(monkeypatch, PROMPTS, longer(model))
    assert tokens(one, PROMPTS, params(PROMPTS, NEW)) == plain(model)
    embedding, checked, hidden, token = one.runner.model.embedding, 0, {}, {}
    for run, read in zip(coach.forwards, rows.read, strict=True):
        assert len(run.chosen) == len(read)
        for place, (number, choice) in enumerate(run.chosen.items()):
            committed = choice.position - run.step
            assert len(read[place][0][0]) == committed and int(run.positions[place]) == committed - 1
            if run.step == 0:
                hidden[number], token[number] = run.hidden[place].double()[None], coach.sequence(number)[committed]
            state, logits = assistant(tensors, embedding, token[number], hidden[number], read[place], dim, run.step)
            assert_close(choice.logits.double(), logits, atol=2e-3, rtol=0)
            hidden[number], token[number] = state, choice.token
            checked += 1
    assert checked > 40


def test_its_backend_is_a_second_one_over_the_targets_rows(assistants, monkeypatch):
    """All memory for cache rows belongs to the target."""
    monkeypatch.setattr("attnplug_engine.serving.sizing._CPU_CACHE_BYTES", 1 << 20)
    one = drafting(LLAMA, assistants()[0])
    draft = one.rounds.draft
    assert draft.pools.mha is one.runner.pools.mha and draft.backend is not one.runner.backend
    assert [layer.layer_id for layer in draft.model.spec.layers] == [0, 1]
    assert one.runner.capacity.num_pages == engine().runner.capacity.num_pages


def test_pages_are_copied_once_by_the_target_alone(assistants):
    one = drafting(LLAMA, assistants()[0], num_pages=16)
    for memory in caches(one.runner.pools):
        memory[0], memory[1] = 1.0, 2.0
    one.rounds.draft.copy_pages([PageCopy(0, 1)])
    assert all((memory[1] == 2.0).all() for memory in caches(one.runner.pools))


def test_a_hit_in_the_prefix_cache_is_taken_whole(assistants):
    one = drafting(LLAMA, assistants()[0], page_size=1, prefix_cache=True)
    one.generate([PROMPTS[3]], max_tokens=4)
    (again,) = one.generate([[*PROMPTS[3], 99, 98]], max_tokens=1)
    assert again.usage.cached_tokens == len(PROMPTS[3])


def test_without_target_layers_all_read_the_targets_last(assistants):
    one = drafting(LLAMA, assistants(target_layers=None)[0])
    assert [layer.attention.layer.layer_id for layer in one.rounds.draft.model.layers] == [1, 1, 1]


def test_one_plan_serves_all_steps(assistants, monkeypatch):
    one = drafting(LLAMA, assistants()[0])
    planned, backend = [], one.rounds.draft.backend
    init = type(backend).init_forward_metadata

    def counted(self, batch):
        if self is backend:
            planned.append(batch.forward_mode)
        return init(self, batch)

    monkeypatch.setattr(type(backend), "init_forward_metadata", counted)
    tokens(one, PROMPTS[:2], params(PROMPTS[:2], 12))
    rounds = one.statistics.rounds.timed
    assert planned == [ForwardMode.DECODE] * (1 + rounds) and rounds > 3


def test_a_stored_head_is_used_in_place_of_the_embedding(assistants):
    head = torch.randn(VOCAB, HIDDEN)
    folder, _ = assistants(more={"lm_head.weight": head})
    assert torch.equal(drafting(LLAMA, folder).rounds.draft.model.head.weight, head)


def test_a_config_alone_is_enough_for_random_weights(assistants):
    folder, _ = assistants()
    (folder / "model.safetensors").unlink()
    one = drafting(LLAMA, folder, random_weights=True)
    assert tokens(one, PROMPTS, params(PROMPTS, NEW)) == plain(LLAMA)


# ---- what is refused ----


DRAFT = {"settings": ("speculative_draft_model",)}


@pytest.mark.parametrize(
    ("target", "keys", "error", "named", "attributes"),
    [
        (LLAMA, {"backbone_hidden_size": 32}, DraftError, ["backbone_hidden_size", 32, 64], DRAFT),
        (LLAMA, {"vocab_size": 99}, DraftError, [99, 128, LLAMA], DRAFT),
        (LLAMA, {"target_layers": [0, 1, 2]}, ModelConfigError, [2, 0, 1], {"key": "target_layers"}),
        (LLAMA, {"target_layers": [0, 1]}, ModelConfigError, [2, 3], {"key": "target_layers"}),
        (LLAMA, {"target_layers": ["0", 1, 1]}, ModelConfigError, ["'0'"], {"key": "target_layers"}),
        (LLAMA, {"head_dim": 32}, ModelConfigError, [32, 16], {"key": "head_dim"}),
        (LLAMA, {"num_attention_heads": 3}, ModelConfigError, [3, 2], {"key": "num_attention_heads"}),
        (LLAMA, {"hidden_act": "gelu"}, ModelConfigError, ["gelu", "silu"], {"key": "hidden_act"}),
        (LLAMA, {"quantization_config": {}}, ModelConfigError, [], {"key": "quantization_config.quant_method"}),
        (LLAMA, {"model_type": "gemma4_assistant"}, DraftError, ["llama_assistant"], {}),
        (HYBRID, {"target_layers": [0, 3, 3]}, DraftError, ["layer 0", "gdn"], DRAFT),
        ("tiny:deepseek_v3", {}, DraftError, ["layer 0", "mla", "mha"], DRAFT),
        ("tiny:gpt_oss", {}, DraftError, ["layer 0", "sinks"], DRAFT),
        ("tiny:smollm3", {}, DraftError, ["tiny:smollm3", "ropes"], DRAFT),
    ],
)
def test_an_assistant_that_does_not_fit(target, keys, error, named, attributes, assistants):
    folder, _ = assistants(LLAMA, **keys)
    with pytest.raises(error, check=having(*named, **attributes)):
        drafting(target, folder)


def test_a_tree(assistants):
    with pytest.raises(DraftError, check=having(2, settings=("speculative_topk",))):
        drafting(LLAMA, assistants()[0], speculative_topk=2)


def test_keys_and_values_of_its_own(assistants):
    extra = {"model.layers.0.self_attn.k_proj.weight": torch.zeros(32, HIDDEN)}
    with pytest.raises(UnusedTensors, check=having(tensors=("model.layers.0.self_attn.k_proj.weight",))):
        drafting(LLAMA, assistants(more=extra)[0])
