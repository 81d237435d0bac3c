"""Standalone, EAGLE and EAGLE-3 draft models: results against float64, and refusals."""

from __future__ import annotations

import json

import draft_math as math
import pytest
import torch
from thread_ranks import Threads, in_ranks
from torch.testing import assert_close

from attnplug.host import TINY_CONFIGS, ModelConfigError
from attnplug_engine.checkpoints.random import RandomCheckpoint
from attnplug_engine.checkpoints.safetensors import Checkpoint, MissingTensor, UnusedTensors, WrongDtype, WrongShape
from attnplug_engine.engine import Engine
from attnplug_engine.models.architectures import load_model
from attnplug_engine.models.layers import Linear
from attnplug_engine.parallel.collectives import SINGLE, ParallelError
from attnplug_engine.settings.speculation import Algorithm, Speculation
from attnplug_engine.speculation.drafts.loading import draft_spec, load_draft, open_draft
from attnplug_engine.speculation.drafts.model import LAST, NOTHING, DraftError, HiddenInputs
from attnplug_testing.draft_checkpoints import (
    HIDDEN,
    VOCAB,
    Fed,
    random_tensors,
    save,
    shapes_of_block_norms,
    shapes_of_grouped_attention,
    shapes_of_llama_mlp,
)
from attnplug_testing.errors import having, raises_naming

DECODED = 8
DRAFTED = 40
TARGET = "tiny:qwen3"
EAGLE = {**TINY_CONFIGS["llama"], "num_hidden_layers": 1}
EAGLE3 = {**EAGLE, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED}
TABLE = torch.randn(VOCAB, 3 * HIDDEN, generator=torch.Generator().manual_seed(2))


def loaded(algorithm, reference, *, target=TARGET, parallel=SINGLE, **keys):
    with_head = load_model(target, dtype=torch.float32, device="cpu", parallel=parallel)
    speculation = Speculation(Algorithm(algorithm), None if reference is None else str(reference), steps=3)
    source = open_draft(speculation, target, device="cpu", **keys)
    same = {"dtype": torch.float32, "device": "cpu", "parallel": parallel}
    return with_head, load_draft(speculation, source, with_head, target, **same)


def run(make_stage, draft, table, sequences):
    """Hidden states and logits side by side, of each whole sequence."""
    return make_stage(Fed(draft, table).loaded(), len(sequences)).run(sequences, DECODED)


# ---- standalone ----


def test_a_standalone_draft_is_an_ordinary_model(make_stage, sequences):
    _, draft = loaded("standalone", "tiny:llama", seed=3)
    assert draft.hidden_inputs == NOTHING and draft.hidden_inputs.width(HIDDEN) == 0 and draft.target_ids is None
    same = load_model("tiny:llama", dtype=torch.float32, device="cpu", seed=3)
    assert draft.spec == same.spec
    wanted = make_stage(same, len(sequences)).run(sequences, DECODED)
    for rows, logits in zip(run(make_stage, draft, None, sequences), wanted, strict=True):
        assert torch.equal(rows[:, HIDDEN:], logits)


# ---- EAGLE ----


def shapes_of_eagle(layers=1, *, own=False):
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    for index in range(layers):
        name = f"layers.{index}"
        shapes |= shapes_of_grouped_attention(f"{name}.self_attn", 16) | shapes_of_llama_mlp(f"{name}.mlp", 96)
        norms = shapes_of_block_norms(name)
        if index == 0:
            del norms["layers.0.input_layernorm.weight"]
        shapes |= norms
    if own:
        both = ("embed_tokens.weight", "lm_head.weight")
        shapes |= {"fc.bias": (HIDDEN,)} | dict.fromkeys(both, (VOCAB, HIDDEN))
    return shapes


def eagle(t, target, tokens, hidden, layers=1):
    embedded = t.get("embed_tokens.weight", target.module.embedding)[tokens].double()
    x = math.linear(t, "fc", torch.cat((embedded, hidden.double()), dim=-1))
    for index in range(layers):
        name = f"layers.{index}"
        normed = math.norm(x, t[f"{name}.input_layernorm.weight"]) if index else x
        x = x + math.llama_attention(t, f"{name}.self_attn", normed, 16)
        x = x + math.mlp(t, f"{name}.mlp", math.norm(x, t[f"{name}.post_attention_layernorm.weight"]))
    return torch.cat((x, x @ t.get("lm_head.weight", target.module.head.weight).double().T), dim=-1)


@pytest.mark.parametrize(("layers", "own"), [(1, False), (1, True), (2, False)])
def test_hidden_states_and_logits_of_eagle_are_those_of_float64(layers, own, tmp_path, make_stage, sequences):
    tensors = random_tensors(shapes_of_eagle(layers, own=own))
    save(tmp_path, {**EAGLE, "num_hidden_layers": layers}, tensors)
    target, draft = loaded("eagle", tmp_path)
    assert draft.hidden_inputs == LAST and draft.hidden_inputs.width(HIDDEN) == HIDDEN and draft.target_ids is None
    table = TABLE[:, :HIDDEN]
    for tokens, rows in zip(sequences, run(make_stage, draft, table, sequences), strict=True):
        wanted = eagle(tensors, target, tokens, table[tokens], layers)
        assert wanted.abs().max() > 3
        assert_close(rows.double(), wanted, atol=2e-3, rtol=1e-5)


def test_an_eagle_draft_without_its_own_shares_the_targets_embedding_and_head(tmp_path):
    save(tmp_path, EAGLE, random_tensors(shapes_of_eagle()))
    target, draft = loaded("eagle", tmp_path)
    assert draft.embedding is target.module.embedding and draft.head is target.module.head


# ---- EAGLE-3 ----


def shapes_of_eagle3(name="midlayer", *, embedding=False):
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        **shapes_of_grouped_attention(f"{name}.self_attn", 16, width=2 * HIDDEN),
        **shapes_of_llama_mlp(f"{name}.mlp", 96),
        **shapes_of_block_norms(name),
        f"{name}.hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFTED, HIDDEN),
    }
    return shapes | ({"embed_tokens.weight": (VOCAB, HIDDEN)} if embedding else {})


def eagle3_tensors(name="midlayer", *, embedding=False):
    """Tensors with maps between the vocabularies: the draft has every third token."""
    offsets = 2 * torch.arange(DRAFTED)
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[3 * torch.arange(DRAFTED)] = True
    return {**random_tensors(shapes_of_eagle3(name, embedding=embedding)), "d2t": offsets, "t2d": known}


def eagle3(t, target, tokens, hidden, name="midlayer", *, before=False):
    """``hidden`` is the target's inner states side by side, or the draft's own."""
    embedded = math.norm(
        t.get("embed_tokens.weight", target.module.embedding)[tokens].double(), t[f"{name}.input_layernorm.weight"]
    )
    x = hidden.double()
    if x.shape[1] != HIDDEN:
        x = math.linear(t, "fc", math.norm(x, t["input_norm.weight"]) if "input_norm.weight" in t else x)
    normed = math.norm(x, t[f"{name}.hidden_norm.weight"])
    attended = math.llama_attention(t, f"{name}.self_attn", torch.cat((embedded, normed), dim=-1), 16)
    x = (normed if before else x) + attended
    x = x + math.mlp(t, f"{name}.mlp", math.norm(x, t[f"{name}.post_attention_layernorm.weight"]))
    return torch.cat((x, math.linear(t, "lm_head", math.norm(x, t["norm.weight"]))), dim=-1)


@pytest.mark.parametrize(("name", "embedding"), [("midlayer", False), ("layers.0", True)])
@pytest.mark.parametrize("width", [3 * HIDDEN, HIDDEN], ids=["the target's states", "its own states"])
def test_hidden_states_and_logits_of_eagle3_are_those_of_float64(
    name, embedding, width, tmp_path, make_stage, sequences
):
    tensors = eagle3_tensors(name, embedding=embedding)
    save(tmp_path, EAGLE3, tensors)
    target, draft = loaded("eagle3", tmp_path)
    assert draft.hidden_inputs.width(HIDDEN) == 3 * HIDDEN and draft.hidden_size == HIDDEN
    table = TABLE[:, :width].contiguous()
    for tokens, rows in zip(sequences, run(make_stage, draft, table, sequences), strict=True):
        wanted = eagle3(tensors, target, tokens, table[tokens], name)
        assert wanted.shape[1] == HIDDEN + DRAFTED and wanted.abs().max() > 3
        assert_close(rows.double(), wanted, atol=2e-3, rtol=1e-5)


def test_an_eagle3_draft_may_norm_before_its_projection_and_before_its_sum(tmp_path, make_stage, sequences):
    tensors = {**eagle3_tensors(), **random_tensors({"input_norm.weight": (3 * HIDDEN,)})}
    save(tmp_path, {**EAGLE3, "norm_before_residual": True, "eagle_config": {"norm_before_fc": True}}, tensors)
    target, draft = loaded("eagle3", tmp_path)
    (rows,) = run(make_stage, draft, TABLE, sequences[:1])
    wanted = eagle3(tensors, target, sequences[0], TABLE[sequences[0]], before=True)
    assert_close(rows.double(), wanted, atol=2e-3, rtol=1e-5)


@pytest.mark.parametrize("algorithm", ["eagle", "eagle3"])
def test_ranks_give_the_hidden_states_and_logits_of_one_process(algorithm, tmp_path, make_stage, sequences):
    tensors = eagle3_tensors() if algorithm == "eagle3" else random_tensors(shapes_of_eagle(own=True))
    save(tmp_path, EAGLE3 if algorithm == "eagle3" else EAGLE, tensors)
    table = TABLE if algorithm == "eagle3" else TABLE[:, :HIDDEN].contiguous()

    def in_rank(parallel):
        return run(make_stage, loaded(algorithm, tmp_path, parallel=parallel)[1], table, sequences[:1])[0]

    wanted = in_rank(SINGLE)
    for found in in_ranks(2, in_rank):
        assert_close(found, wanted, atol=2e-3, rtol=1e-5)


def test_tokens_of_eagle3_stand_for_tokens_of_the_target(tmp_path):
    save(tmp_path, EAGLE3, eagle3_tensors())
    assert torch.equal(loaded("eagle3", tmp_path)[1].target_ids, 3 * torch.arange(DRAFTED))


def test_an_eagle3_draft_with_all_tokens_needs_no_map(tmp_path):
    tensors = random_tensors({**shapes_of_eagle3(), "lm_head.weight": (VOCAB, HIDDEN)})
    save(tmp_path, {**EAGLE3, "draft_vocab_size": None}, tensors)
    assert loaded("eagle3", tmp_path)[1].target_ids is None


LISTED = {
    "none": ({}, (2, 2, 1)),
    "by outputs": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, (2, 3, 4)),
    "by inputs": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}}, (2, 3, 4)),
    "outside the section": ({"eagle_aux_hidden_state_layer_ids": [0, 3, 2]}, (0, 3, 2)),
}


@pytest.mark.parametrize("case", LISTED)
def test_the_layers_that_eagle3_takes_are_those_of_its_config(case, tmp_path):
    keys, taps = LISTED[case]
    save(tmp_path, {**EAGLE3, **keys}, eagle3_tensors())
    assert loaded("eagle3", tmp_path, target="tiny:qwen3_next")[1].hidden_inputs == HiddenInputs(layers=taps)


@pytest.mark.parametrize("algorithm", ["eagle", "eagle3"])
def test_a_tiny_llama_is_a_draft_with_random_weights(algorithm, make_stage, sequences):
    _, draft = loaded(algorithm, "tiny:llama")
    (rows,) = run(make_stage, draft, TABLE[:, : draft.hidden_inputs.width(HIDDEN)].contiguous(), sequences[:1])
    assert rows.isfinite().all() and rows.shape[1] == HIDDEN + VOCAB


def test_a_config_alone_is_a_draft_with_random_weights(tmp_path):
    save(tmp_path, EAGLE3, {})
    (tmp_path / "model.safetensors").unlink()
    _, draft = loaded("eagle3", tmp_path, random_weights=True)
    assert torch.equal(draft.target_ids, torch.arange(DRAFTED))


# ---- taps ----


@pytest.fixture
def sums_in_place(monkeypatch):
    """Projections add to the residual in place, as on a GPU."""
    product = Linear.forward

    def forward(self, x, *, norm=None, activate=None, onto=None):
        out = product(self, x, norm=norm, activate=activate, onto=onto)
        return out if onto is None else onto.copy_(out)

    monkeypatch.setattr(Linear, "forward", forward)


@pytest.mark.usefixtures("sums_in_place")
def test_sums_in_place_leave_what_an_eagle3_draft_was_given(tmp_path, make_stage, sequences):
    save(tmp_path, EAGLE3, eagle3_tensors())
    _, draft = loaded("eagle3", tmp_path)
    (rows,) = run(make_stage, draft, TABLE[:, :HIDDEN].contiguous(), sequences[:1])  # checks its input at every step
    assert rows.isfinite().all()


@pytest.mark.usefixtures("sums_in_place")
def test_sums_in_place_leave_what_was_tapped(make_stage, sequences):
    check_taps("llama", make_stage, sequences)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "nemotron_h"])
def test_taps_are_what_goes_into_a_layer(name, make_stage, sequences):
    check_taps(name, make_stage, sequences)


def check_taps(name, make_stage, sequences):
    model = load_model(f"tiny:{name}", dtype=torch.float32, device="cpu")
    layers, seen = model.module.layers, {}
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda _, args, index=index: seen.update({index: args[0].clone()}))
    layers[-1].register_forward_hook(lambda _, args, out: seen.update({len(layers): out.clone()}))
    plain, forward, tapped = [], model.module.forward, []

    def with_taps(input_ids, positions, batch):
        plain.append(forward(input_ids, positions, batch))
        hidden, inner = forward(input_ids, positions, batch, taps=(len(layers), 1, 0))
        tapped.append(inner)
        return hidden

    model.module.forward = with_taps
    make_stage(model, 1).step(sequences[:1])
    wanted = torch.cat([seen[index].float() for index in (len(layers), 1, 0)], dim=-1)
    assert_close(tapped[0], wanted, atol=0, rtol=0)
    assert plain[0].shape == (len(sequences[0]), HIDDEN)


def test_ranks_tap_the_same_states_and_exchange_nothing_for_it(make_stage, sequences):
    def in_rank(parallel):
        model = load_model("tiny:llama", dtype=torch.float32, device="cpu", parallel=parallel)
        inner, forward = [], model.module.forward

        def with_taps(input_ids, positions, batch):
            hidden, tapped = forward(input_ids, positions, batch, taps=(1, 2))
            inner.append(tapped)
            return hidden

        model.module.forward = with_taps
        make_stage(model, 1).step(sequences[:1])
        return inner[0], parallel.calls

    (first, calls), (second, _) = in_ranks(2, in_rank)
    assert torch.equal(first, second) and first.shape[1] == 2 * HIDDEN
    assert calls == ["all_reduce"] * 4 + ["all_gather"]


# ---- refusals ----

ALGORITHM_OR_MODEL = ("speculative_algorithm", "speculative_draft_model")
HIDDEN_NORM = "midlayer.hidden_norm.weight"


def test_ngram_has_no_draft_model():
    with pytest.raises(DraftError, check=having("ngram", "eagle3", settings=("speculative_algorithm",))):
        loaded("ngram", None)


def test_a_draft_model_that_does_not_exist(tmp_path):
    with pytest.raises(ModelConfigError, check=having(source=str(tmp_path / "nowhere"))):
        loaded("standalone", tmp_path / "nowhere")


@pytest.mark.parametrize("algorithm", ["standalone", "eagle", "eagle3"])
def test_vocabularies_that_differ(algorithm, tmp_path):
    save(tmp_path, {**EAGLE, "vocab_size": 131}, {})
    with raises_naming(DraftError, 131, "tiny:qwen3", 128):
        loaded(algorithm, tmp_path, random_weights=True)


@pytest.mark.parametrize("algorithm", ["eagle", "eagle3"])
def test_hidden_sizes_that_differ(algorithm, tmp_path):
    save(tmp_path, {**EAGLE, "hidden_size": 32}, {})
    with pytest.raises(DraftError, check=having(32, 64, settings=("speculative_draft_model",))):
        loaded(algorithm, tmp_path, random_weights=True)


def test_a_draft_for_a_target_of_another_hidden_size(tmp_path):
    save(tmp_path, {**EAGLE3, "target_hidden_size": 96}, eagle3_tensors())
    with pytest.raises(ModelConfigError, check=having(96, 64, key="target_hidden_size")):
        loaded("eagle3", tmp_path)


@pytest.mark.parametrize("algorithm", ["eagle", "eagle3"])
def test_a_draft_of_another_model_type(algorithm):
    with pytest.raises(DraftError, check=having("qwen3", algorithm, "llama", settings=ALGORITHM_OR_MODEL)):
        draft_spec(Speculation(Algorithm(algorithm), "tiny:qwen3", steps=1), TARGET)


@pytest.mark.parametrize("algorithm", ["eagle", "eagle3"])
def test_an_ordinary_model_is_no_eagle_draft(algorithm, tmp_path):
    save(tmp_path, EAGLE, {"model.norm.weight": torch.ones(HIDDEN)})
    with pytest.raises(DraftError, check=having(algorithm, "fc.weight", "standalone", settings=ALGORITHM_OR_MODEL)):
        loaded(algorithm, tmp_path)


def test_a_draft_of_eagle_is_none_of_eagle3(tmp_path):
    save(tmp_path, EAGLE, random_tensors(shapes_of_eagle()))
    with pytest.raises(DraftError, check=having(HIDDEN_NORM, "eagle3", "eagle", settings=ALGORITHM_OR_MODEL)):
        loaded("eagle3", tmp_path)


def test_a_draft_of_eagle3_is_none_of_eagle(tmp_path):
    save(tmp_path, EAGLE3, eagle3_tensors())
    with pytest.raises(DraftError, check=having(HIDDEN_NORM, "eagle", "eagle3", settings=ALGORITHM_OR_MODEL)):
        loaded("eagle", tmp_path)


@pytest.mark.parametrize("missing", ["d2t", "norm.weight", "lm_head.weight"])
def test_an_eagle3_draft_that_is_not_complete(missing, tmp_path):
    tensors = eagle3_tensors()
    del tensors[missing]
    save(tmp_path, EAGLE3, tensors)
    with pytest.raises(MissingTensor, check=having(tensor=missing)):
        loaded("eagle3", tmp_path)


def test_an_eagle_draft_with_more_than_is_known(tmp_path):
    save(tmp_path, EAGLE, {**random_tensors(shapes_of_eagle()), "layers.0.input_layernorm.weight": torch.ones(HIDDEN)})
    with pytest.raises(UnusedTensors, check=having(tensors=("layers.0.input_layernorm.weight",))):
        loaded("eagle", tmp_path)


def test_a_map_to_tokens_that_the_target_does_not_have(tmp_path):
    save(tmp_path, EAGLE3, {**eagle3_tensors(), "d2t": 3 * torch.arange(DRAFTED)})
    with pytest.raises(DraftError, check=having(156, "d2t", 127, settings=("speculative_draft_model",))):
        loaded("eagle3", tmp_path)


def test_a_map_that_is_no_whole_numbers(tmp_path):
    save(tmp_path, EAGLE3, {**eagle3_tensors(), "d2t": torch.zeros(DRAFTED)})
    with pytest.raises(WrongDtype, check=having("I32", "I64", tensor="d2t", found="F32")):
        loaded("eagle3", tmp_path)


@pytest.mark.parametrize("algorithm", ["standalone", "eagle", "eagle3"])
def test_quantised_drafts(algorithm, tmp_path):
    save(tmp_path, {**EAGLE, "quantization_config": {"quant_method": "awq"}}, {})
    with pytest.raises(ModelConfigError, check=having(key="quantization_config.quant_method")):
        loaded(algorithm, tmp_path, random_weights=True)


@pytest.mark.parametrize("layers", [[2, 3, 9], [-1, 2], ["low", 2], [True, 2], [2]])
def test_layers_that_the_target_does_not_have(layers, tmp_path):
    save(tmp_path, {**EAGLE3, "eagle_aux_hidden_state_layer_ids": layers}, eagle3_tensors())
    with pytest.raises(ModelConfigError, check=having(layers, 2, key="eagle_aux_hidden_state_layer_ids")):
        loaded("eagle3", tmp_path)


def test_a_vocabulary_of_drafted_tokens_that_is_too_large(tmp_path):
    save(tmp_path, {**EAGLE3, "draft_vocab_size": VOCAB + 1}, eagle3_tensors())
    with pytest.raises(ModelConfigError, check=having(129, 128, key="draft_vocab_size")):
        loaded("eagle3", tmp_path)


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"fc_norm": True}, "fc_norm"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state"),
    ],
)
def test_kinds_of_eagle3_that_cannot_be_run(keys, key, tmp_path):
    save(tmp_path, {**EAGLE3, **keys}, eagle3_tensors())
    with pytest.raises(ModelConfigError, check=having(key=key)):
        loaded("eagle3", tmp_path)


# ---- ranks that cannot divide a draft ----


def unread(monkeypatch):
    monkeypatch.setattr(Checkpoint, "tensor", lambda self, name, *_, **__: pytest.fail(f"{name} was read"))
    monkeypatch.setattr(RandomCheckpoint, "tensor", lambda self, name, *_, **__: pytest.fail(f"{name} was drawn"))


# The target has 8 heads, 4 KV heads and MLPs that 8 ranks can divide.
WIDE = {**TINY_CONFIGS["llama"], "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}


@pytest.mark.parametrize("algorithm", ["standalone", "eagle", "eagle3"])
@pytest.mark.parametrize(
    ("changes", "what", "fitting"),
    [
        ({"intermediate_size": 98}, "MLP columns", (1, 2)),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, "attention heads", (1, 2)),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, "KV heads", (1,)),
    ],
)
def test_ranks_that_cannot_divide_a_draft_are_refused_before_the_target_is_read(
    algorithm, changes, what, fitting, tmp_path, monkeypatch
):
    """E5: the rank counts are those that divide both."""
    base = EAGLE3 if algorithm == "eagle3" else EAGLE
    for name, config in (("target", WIDE), ("draft", {**base, "head_dim": 16, **changes})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    unread(monkeypatch)
    options = {"speculative_algorithm": algorithm, "speculative_draft_model": str(tmp_path / "draft")}
    size = 2 if what == "KV heads" else 4
    with pytest.raises(ParallelError, check=having("the draft", what=what, size=size, fitting=fitting)):
        Engine(str(tmp_path / "target"), parallel=Threads(size).rank(0), random_weights=True, device="cpu", **options)


def test_the_rank_counts_of_refused_heads_are_those_that_divide_the_draft_too(tmp_path):
    """E5: backends refuse 3 ranks for 4 heads before the draft is divided."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY_CONFIGS["llama"], "intermediate_size": 98}))
    options = {"speculative_algorithm": "standalone", "speculative_draft_model": str(tmp_path)}
    with pytest.raises(ParallelError, check=having(what="attention heads", size=3, fitting=(1, 2))):
        Engine("tiny:llama", parallel=Threads(3).rank(0), random_weights=True, device="cpu", **options)


@pytest.mark.parametrize("algorithm", ["standalone", "eagle"])
def test_a_draft_with_another_vocabulary_is_refused_before_the_target_is_read(algorithm, tmp_path, monkeypatch):
    """E5"""
    (tmp_path / "config.json").write_text(json.dumps({**EAGLE, "vocab_size": VOCAB + 1}))
    unread(monkeypatch)
    with pytest.raises(DraftError, check=having(VOCAB + 1, VOCAB)):
        Engine(
            TARGET,
            random_weights=True,
            device="cpu",
            speculative_algorithm=algorithm,
            speculative_draft_model=str(tmp_path),
        )


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda tensors: tensors.pop("layers.0.mlp.up_proj.weight"), MissingTensor),
        (lambda tensors: tensors.update({"layers.1.mlp.up_proj.weight": torch.zeros(96, HIDDEN)}), UnusedTensors),
        (lambda tensors: tensors.update({"fc.weight": torch.zeros(HIDDEN, HIDDEN)}), WrongShape),
    ],
)
def test_wrong_tensors_of_a_draft_are_found_before_the_target_is_read(change, error, tmp_path, monkeypatch):
    """E5"""
    tensors = random_tensors(shapes_of_eagle())
    change(tensors)
    save(tmp_path, EAGLE, tensors)
    unread(monkeypatch)
    with pytest.raises(error, check=having(settings=("speculative_draft_model",))):
        Engine(TARGET, device="cpu", speculative_algorithm="eagle", speculative_draft_model=str(tmp_path))
