"""Drafts by a model's own multi-token prediction layers: results against float64, and refusals."""

from __future__ import annotations

import draft_math as math
import pytest
import torch
from thread_ranks import in_ranks
from torch.testing import assert_close

from attnplug.host import TINY_CONFIGS, ModelConfigError
from attnplug_engine.checkpoints.safetensors import MissingTensor, UnusedTensors
from attnplug_engine.models.architectures import load_model
from attnplug_engine.parallel.collectives import SINGLE
from attnplug_engine.settings.speculation import Algorithm, Speculation
from attnplug_engine.speculation.drafts.loading import draft_spec, load_draft, open_draft
from attnplug_engine.speculation.drafts.model import LAST, DraftError
from attnplug_testing.draft_checkpoints import (
    HIDDEN,
    VOCAB,
    Fed,
    random_tensors,
    save,
    saved_deepseek,
    saved_target,
    shapes_of_block_norms,
    shapes_of_grouped_attention,
    shapes_of_llama_mlp,
)
from attnplug_testing.errors import having

DECODED = 8
CONFIG = TINY_CONFIGS["deepseek_v3"]
TABLE = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))


def loaded(folder, *, steps=1, parallel=SINGLE, **keys):
    target = load_model(str(folder), dtype=torch.float32, device="cpu", parallel=parallel, **keys)
    speculation = Speculation(Algorithm.MTP, None, steps=steps)
    source = open_draft(speculation, str(folder), device="cpu", **keys)
    draft = load_draft(speculation, source, target, str(folder), dtype=torch.float32, device="cpu", parallel=parallel)
    return target, draft


@pytest.mark.parametrize("own", [False, True])
def test_hidden_states_and_logits_of_a_deepseek_layer_are_those_of_float64(own, tmp_path, make_stage, sequences):
    folder, tensors = saved_deepseek(tmp_path, own=own)
    _, draft = loaded(folder, steps=3)
    assert draft.hidden_inputs == LAST and draft.models == 1 and draft.target_ids is None
    found = make_stage(Fed(draft, TABLE).loaded(), len(sequences)).run(sequences, DECODED)
    for tokens, rows in zip(sequences, found, strict=True):
        wanted = math.deepseek_layer(CONFIG, tensors, "model.layers.3", tokens, TABLE[tokens])
        assert wanted.abs().max() > 3
        assert_close(rows.double(), wanted, atol=2e-4, rtol=0)


def test_one_layer_serves_every_step(tmp_path, make_stage, sequences):
    _, draft = loaded(saved_deepseek(tmp_path)[0], steps=3)
    first, third = (make_stage(Fed(draft, TABLE, step).loaded(), 1).run(sequences[:1], DECODED) for step in (0, 2))
    assert torch.equal(first[0], third[0])


def test_of_several_layers_each_step_has_its_own(tmp_path, make_stage, sequences):
    folder, tensors = saved_deepseek(tmp_path, 2, own=True)
    _, draft = loaded(folder, steps=2)
    assert draft.models == 2 and [layer.layer_id for layer in draft.spec.layers] == [0, 1]
    for step in range(2):
        (rows,) = make_stage(Fed(draft, TABLE, step).loaded(), 1).run(sequences[:1], DECODED)
        wanted = math.deepseek_layer(CONFIG, tensors, f"model.layers.{3 + step}", sequences[0], TABLE[sequences[0]])
        assert_close(rows.double(), wanted, atol=2e-4, rtol=0)


def test_only_as_many_layers_are_read_as_there_are_steps(tmp_path):
    folder, tensors = saved_deepseek(tmp_path, 3)
    without = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.5.")}
    save(folder, {**CONFIG, "num_nextn_predict_layers": 3}, without)
    assert loaded(folder, steps=2)[1].models == 2


def test_the_embedding_and_the_head_are_the_targets_memory(tmp_path):
    """They may be absent from the checkpoint, or stored again with the same numbers."""
    folder, tensors = saved_deepseek(tmp_path)
    for extra in ({}, {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}):
        more = {f"model.layers.3.{name}.weight": tensors[stored].clone() for name, stored in extra.items()}
        save(folder, {**CONFIG}, {**tensors, **more})
        target, draft = loaded(folder)
        layer = draft.layers[0]
        assert layer.embedding is target.module.embedding
        assert layer.head is target.module.head


def test_ranks_of_a_deepseek_layer_give_the_hidden_states_of_one_process(tmp_path, make_stage, sequences):
    folder, tensors = saved_deepseek(tmp_path, own=True)

    def run(parallel):
        _, draft = loaded(folder, parallel=parallel)
        return make_stage(Fed(draft, TABLE).loaded(), 1).run(sequences[:1], DECODED)[0]

    wanted = math.deepseek_layer(CONFIG, tensors, "model.layers.3", sequences[0], TABLE[sequences[0]])
    for found in in_ranks(2, run):
        assert_close(found.double(), wanted, atol=2e-4, rtol=0)


def shapes_of_qwen_layer(*, experts):
    name = "mtp.layers.0"
    shapes = {
        "mtp.pre_fc_norm_embedding.weight": (HIDDEN,),
        "mtp.pre_fc_norm_hidden.weight": (HIDDEN,),
        "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
        "mtp.norm.weight": (HIDDEN,),
        **shapes_of_block_norms(name),
        **shapes_of_grouped_attention(f"{name}.self_attn", 32, gated=True),
    }
    if not experts:
        return shapes | shapes_of_llama_mlp(f"{name}.mlp", 96)
    for part in ("shared_expert", *(f"experts.{expert}" for expert in range(4))):
        shapes |= shapes_of_llama_mlp(f"{name}.mlp.{part}", 32)
    return shapes | {f"{name}.mlp.gate.weight": (4, HIDDEN), f"{name}.mlp.shared_expert_gate.weight": (1, HIDDEN)}


def qwen_layer(t, tokens, hidden, *, experts):
    def norm(x, name):
        return math.norm(x, t[f"{name}.weight"], centred=True)

    name = "mtp.layers.0"
    embedded = norm(t["model.embed_tokens.weight"][tokens].double(), "mtp.pre_fc_norm_embedding")
    x = math.linear(t, "mtp.fc", torch.cat((embedded, norm(hidden.double(), "mtp.pre_fc_norm_hidden")), dim=-1))
    normed = norm(x, f"{name}.input_layernorm")
    x = x + math.gated_attention(t, f"{name}.self_attn", normed, dim=32, rotary=8)
    normed = norm(x, f"{name}.post_attention_layernorm")
    x = x + (math.softmax_experts(t, f"{name}.mlp", normed, 2) if experts else math.mlp(t, f"{name}.mlp", normed))
    out = norm(x, "mtp.norm")
    return torch.cat((out, math.linear(t, "lm_head", out)), dim=-1)


@pytest.mark.parametrize(("name", "experts"), [("qwen3_next", True), ("qwen3_5_text", False)])
def test_hidden_states_and_logits_of_a_qwen_layer_are_those_of_float64(name, experts, tmp_path, make_stage, sequences):
    extra = random_tensors(shapes_of_qwen_layer(experts=experts), centred=True)
    folder, tensors = saved_target(tmp_path, name, extra)
    _, draft = loaded(folder, steps=3)
    found = make_stage(Fed(draft, TABLE).loaded(), len(sequences)).run(sequences, DECODED)
    for tokens, rows in zip(sequences, found, strict=True):
        wanted = qwen_layer(tensors, tokens, TABLE[tokens], experts=experts)
        assert_close(rows.double(), wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next", "qwen3_5_text"])
def test_a_tiny_model_has_a_layer_with_random_weights(name):
    _, draft = loaded(f"tiny:{name}", steps=3)
    assert draft.models == 1 and draft.spec == draft_spec(Speculation(Algorithm.MTP, None, steps=3), f"tiny:{name}")


def test_a_folder_with_a_config_alone_has_layers_with_random_weights(tmp_path):
    save(tmp_path, {**CONFIG, "num_nextn_predict_layers": 3}, {})
    (tmp_path / "model.safetensors").unlink()
    assert loaded(tmp_path, steps=3, random_weights=True, seed=4)[1].models == 3


# ---- refusals ----

ALGORITHM_OR_MODEL = ("speculative_algorithm", "speculative_draft_model")


def test_a_model_type_without_such_layers():
    with pytest.raises(DraftError, check=having("llama", "deepseek_v3", settings=ALGORITHM_OR_MODEL)):
        loaded("tiny:llama")


def test_a_config_without_such_layers(tmp_path):
    folder, _ = saved_deepseek(tmp_path, 0)
    with pytest.raises(
        DraftError,
        check=having("num_nextn_predict_layers", 0, settings=ALGORITHM_OR_MODEL),
    ):
        loaded(folder)


def test_a_count_that_is_no_number(tmp_path):
    save(tmp_path, {**CONFIG, "num_nextn_predict_layers": "two"}, {})
    with pytest.raises(ModelConfigError, check=having("two", key="num_nextn_predict_layers")):
        draft_spec(Speculation(Algorithm.MTP, None, steps=1), str(tmp_path))


@pytest.mark.parametrize(
    ("name", "tensor"), [("deepseek_v3", "model.layers.3.eh_proj.weight"), ("qwen3_next", "mtp.fc.weight")]
)
def test_a_checkpoint_without_such_layers(name, tensor, tmp_path):
    folder, _ = saved_target(tmp_path, name, {})
    with pytest.raises(DraftError, check=having(tensor, settings=("speculative_algorithm",))):
        loaded(folder)


def test_a_layer_that_is_not_complete(tmp_path):
    folder, tensors = saved_deepseek(tmp_path)
    del tensors["model.layers.3.hnorm.weight"]
    save(folder, {**CONFIG}, tensors)
    with pytest.raises(MissingTensor, check=having(tensor="model.layers.3.hnorm.weight")):
        loaded(folder)


def test_a_layer_with_more_than_is_known(tmp_path):
    folder, tensors = saved_deepseek(tmp_path)
    save(folder, {**CONFIG}, {**tensors, "model.layers.3.self_attn.indexer.wk.weight": torch.zeros(2)})
    with pytest.raises(UnusedTensors, check=having(tensors=("model.layers.3.self_attn.indexer.wk.weight",))):
        loaded(folder)


def test_more_steps_than_layers_of_which_each_is_for_one(tmp_path):
    folder, _ = saved_deepseek(tmp_path, 2)
    with pytest.raises(DraftError, check=having(2, 3, settings=("speculative_num_steps",))):
        loaded(folder, steps=3)


def test_a_draft_model_beside_the_targets_own_layers():
    with pytest.raises(DraftError, check=having("mtp", "tiny:llama", settings=ALGORITHM_OR_MODEL)):
        draft_spec(Speculation(Algorithm.MTP, "tiny:llama", steps=1), "tiny:deepseek_v3")
