"""vLLM's configuration and layers as attnplug's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attnplug import BackendSpec, CacheLayout, DType, GraphLevel, PageSizes, Problem, RefusalCode, Role
from attnplug.host import KVPools, Registry, WorkspaceOwner
from attnplug_testing.claiming import registry_claiming
from attnplug_testing.errors import missing_values, naming
from attnplug_testing.measured import measured_twins
from attnplug_vllm import selection
from attnplug_vllm.host import fit
from attnplug_vllm.selection import Refused, choose, graph_level, log_group, page_sizes, serving_specs
from attnplug_vllm.settings import OPTION
from attnplug_vllm.specs import (
    Machine,
    context_of,
    has_exact_lengths,
    layer_ids,
    limits_of,
    mha_layer,
    mla_layer,
    model_of,
    problem_of,
    verify_tokens,
)
from vllm_stage import codes, config

CPU, H200 = Machine("cpu"), Machine("cuda", 90)
LAYER = mha_layer(0, heads=8, kv_heads=2, head_dim=64, scale=0.125)
SPECULATION = SimpleNamespace(num_speculative_tokens=2)


@pytest.fixture(autouse=True)
def _new_process(monkeypatch):
    monkeypatch.setattr(selection, "version_refusals", list)
    selection.forget()
    yield
    selection.forget()


def test_no_cap_is_zero_in_vllm():
    assert mha_layer(0, heads=2, kv_heads=2, head_dim=16, scale=1, cap=0.0).logit_cap is None
    assert mha_layer(0, heads=2, kv_heads=2, head_dim=16, scale=1, cap=5).logit_cap == 5.0


def test_layers_have_the_numbers_in_their_names_where_these_are_distinct():
    assert list(layer_ids(["model.layers.4.self_attn.attn", "model.layers.7.self_attn.attn"]).values()) == [4, 7]
    assert list(layer_ids(["a.0.self", "a.0.cross"]).values()) == [0, 1]
    assert list(layer_ids(["attn", "a.3.x"]).values()) == [0, 1]


def test_a_model_is_one_ranks_part():
    model = model_of(config(parallel_config__tensor_parallel_size=2), [LAYER])
    assert (model.ranks, model.context_length, model.layers) == (2, 256, (LAYER,))
    assert problem_of(config(parallel_config__tensor_parallel_size=2), model, CPU, "auto").tensor_parallel == 1


def test_a_backend_knows_its_rank():
    """Ranks count through the pipeline's stages, too."""
    asked = config(parallel_config__tensor_parallel_size=2, parallel_config__rank=3)
    context = context_of(
        asked,
        model_of(asked, [LAYER]),
        device=torch.device("cpu"),
        kv_dtype=DType.FLOAT32,
        page_size=16,
        pools=KVPools(),
        workspace=WorkspaceOwner(),
    )
    assert (context.parallel.rank, context.parallel.size) == (1, 2)


def test_layers_are_in_the_order_of_their_numbers():
    assert [layer.layer_id for layer in model_of(config(), [replace(LAYER, layer_id=7), LAYER]).layers] == [0, 7]


def test_the_bridge_poses_the_problem_that_explain_poses():
    model = model_of(config(), [LAYER])
    asked = Problem(model, device="cuda", sm=90, dtype=DType.FLOAT32, kv_dtype=DType.FLOAT32)
    given = problem_of(config(), model, H200, "auto")
    assert not given.wants_graphs and replace(given, wants_graphs=True) == fit(asked)
    assert given.layout is CacheLayout.STRIDED


def test_graphs_are_wanted_on_a_gpu_if_vllm_captures_attention():
    full = SimpleNamespace(has_full_cudagraphs=lambda: True)
    asked = config(compilation_config__cudagraph_mode=full)
    model = model_of(asked, [LAYER])
    assert [problem_of(asked, model, machine, "auto").wants_graphs for machine in (CPU, H200)] == [False, True]


def test_a_layers_window_dims_and_sinks_are_vllms():
    """A window counts the query's own key in vLLM too."""
    layer = mha_layer(0, heads=2, kv_heads=2, head_dim=16, v_head_dim=8, scale=1, window=5, sinks=True)
    assert (layer.sliding_window, layer.head_dim, layer.v_head_dim, layer.sinks) == (5, 16, 8, True)


def test_the_block_size_counts_if_a_user_set_it():
    model = model_of(config(), [LAYER])
    assert problem_of(config(), model, CPU, "auto").page_size is None
    asked = config(cache_config__user_specified_block_size=True, cache_config__block_size=64)
    assert problem_of(asked, model, CPU, "auto").page_size == 64


def test_lengths_are_exact_unless_steps_are_scheduled_before_drafts_are_checked():
    assert has_exact_lengths(config())
    assert not has_exact_lengths(config(speculative_config=SPECULATION))
    waiting = config(speculative_config=SPECULATION, scheduler_config__async_scheduling=False)
    assert has_exact_lengths(waiting)
    model = model_of(waiting, [LAYER])
    assert problem_of(waiting, model, CPU, "auto").exact_lengths
    assert not problem_of(config(speculative_config=SPECULATION), model, CPU, "auto").exact_lengths


def test_a_verified_request_has_one_token_more_than_were_drafted():
    assert (verify_tokens(config()), verify_tokens(config(speculative_config=SPECULATION))) == (0, 3)


def test_limits_are_the_schedulers():
    limits = limits_of(config(scheduler_config__max_num_seqs=40, speculative_config=SPECULATION))
    assert (limits.max_requests, limits.max_tokens, limits.max_context) == (40, 120, 256)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"parallel_config__decode_context_parallel_size": 2, "speculative_config": SPECULATION},
            "--speculative-config",
        ),
        (
            {"parallel_config__decode_context_parallel_size": 2, "parallel_config__cp_kv_cache_interleave_size": 16},
            "--cp-kv-cache-interleave-size 16",
        ),
        ({"parallel_config__prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
        ({"parallel_config__use_ubatching": True}, "--enable-dbo"),
        ({"attention_config__use_non_causal": True}, "non-causal attention"),
        ({"model_config__is_mm_prefix_lm": True}, "bidirectional attention over image tokens"),
        ({"cache_config__kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
        ({"cache_config__calculate_kv_scales": True}, "--calculate-kv-scales"),
        ({"model_config__hf_text_config": SimpleNamespace(attention_chunk_size=8)}, "attention_chunk_size"),
        ({"model_config__rswa_window": 8}, "reference sliding windows"),
    ],
)
def test_what_the_contract_lacks_is_refused_by_vllms_names(changes, words):
    with pytest.raises(Refused) as raised:
        choose(config(**changes), model_of(config(), [LAYER]), "auto", CPU)
    (reason,) = raised.value.refusals
    assert reason.code == RefusalCode.FEATURE and words in reason.value


def test_a_backend_that_does_not_claim_batch_invariance_is_refused(monkeypatch):
    """E3"""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    asked = config({"attnplug": {"backend": "torch_native"}})
    monkeypatch.setattr(selection, "registry", lambda: registry_claiming("torch_native", ["run", "graph"]))
    with pytest.raises(Refused, check=naming("batch", "VLLM_BATCH_INVARIANT")) as raised:
        choose(asked, model_of(asked, [LAYER]), "auto", CPU)
    assert RefusalCode.INVARIANCE in codes(raised.value, "torch_native")
    monkeypatch.setattr(selection, "registry", lambda: registry_claiming("torch_native", ["run", "batch", "graph"]))
    assert choose(asked, model_of(asked, [LAYER]), "auto", CPU).problem.invariant == {"run", "batch", "graph"}


def test_a_choice_is_refused_with_every_reason_in_vllms_words():
    asked = config({"attnplug": {"backend": "flashattention"}}, model_config__max_model_len=64)
    odd = mha_layer(0, heads=8, kv_heads=2, head_dim=40, scale=0.125)
    with pytest.raises(Refused) as raised:
        choose(asked, model_of(asked, [odd]), "fp8", H200)
    assert codes(raised.value, "flashattention") >= {RefusalCode.DTYPE, RefusalCode.KV_DTYPE, RefusalCode.HEAD_DIM}
    message = str(raised.value)
    assert not missing_values(message, "--dtype", "--kv-cache-dtype", f"{OPTION}.backend")


def test_drafts_are_vllms_but_checking_them_is_ours():
    asked = config(
        {"attnplug": {"backend": "torch_native"}},
        speculative_config=SimpleNamespace(num_speculative_tokens=64),
        scheduler_config__async_scheduling=False,
    )
    with pytest.raises(Refused) as raised:
        choose(asked, model_of(asked, [LAYER]), "auto", CPU)
    assert RefusalCode.SPECULATION in codes(raised.value, "torch_native")


def test_a_backend_that_needs_lengths_is_refused_where_vllm_has_bounds():
    asked = config({"attnplug": {"backend": "torch_native"}}, speculative_config=SPECULATION)
    with pytest.raises(Refused, check=naming("--no-async-scheduling")) as raised:
        choose(asked, model_of(asked, [LAYER]), "auto", CPU)
    assert codes(raised.value, "torch_native") == {RefusalCode.LENGTHS}


def test_one_line_has_the_backend_of_each_role_and_kv_group_and_the_reason(monkeypatch):
    logged = []
    monkeypatch.setattr(selection.logger, "info", lambda message, *values: logged.append(message % values))
    groups = {"a": replace(LAYER, sliding_window=48), "b": LAYER}
    layers = {name: SimpleNamespace(impl=SimpleNamespace(selection=None)) for name in groups}
    for rank in (1, 0):
        section = {"attnplug": {"backend": "torch_native"}}
        asked = config(section, parallel_config__rank=rank, compilation_config__static_forward_context=layers)
        for name, layer in groups.items():
            assert not logged, "all groups are in one line, of rank 0"
            model = model_of(asked, [layer])
            log_group(asked, [name], model, choose(asked, model, "auto", CPU))
    (line,) = logged
    assert (
        line.startswith("attnplug: 1 layer, window 48: prefill by torch_native (") and "; 1 layer: prefill by" in line
    )
    assert line.count("requested by --additional-config.attnplug.backend") == 4
    for name, layer in groups.items():
        log_group(asked, [name], model_of(asked, [layer]), choose(asked, model_of(asked, [layer]), "auto", CPU))
    assert len(logged) == 1, "once per engine"


def test_groups_of_which_vllm_makes_no_builder_do_not_silence_the_log(monkeypatch):
    logged = []
    monkeypatch.setattr(selection.logger, "info", lambda message, *values: logged.append(message % values))
    every = {name: SimpleNamespace(impl=SimpleNamespace(selection=None)) for name in "ab"}
    asked = config({}, compilation_config__static_forward_context=every)
    model = model_of(asked, [LAYER])
    log_group(asked, ["a"], model, choose(asked, model, "auto", CPU))
    selection.log_groups()
    selection.log_groups()
    assert len(logged) == 1 and "(auto: " in logged[0]


def test_what_another_engine_had_chosen_is_forgotten():
    """Two engines run in one process, one after the other. The second one has its own block sizes and graphs."""
    first, second = (config({"attnplug": {"backend": "torch_native"}}) for _ in range(2))
    choose(first, model_of(first, [LAYER]), "auto", CPU)
    draft = config({"attnplug": {"backend": "torch_native"}}, compilation_config=first.compilation_config)
    choose(draft, model_of(draft, [replace(LAYER, num_kv_heads=1)]), "auto", CPU)
    assert len(selection.remembered()) == 2
    chosen = choose(second, model_of(second, [LAYER]), "auto", CPU)
    assert selection.remembered() == (chosen,)


def test_what_was_chosen_is_remembered_for_questions_without_a_configuration():
    assert page_sizes().kernel is None and not selection.remembered()
    chosen = choose(config(), model_of(config(), [LAYER]), "auto", CPU)
    assert selection.remembered() == (chosen,)


def test_auto_takes_the_backends_that_were_measured_the_fastest(monkeypatch, tmp_path):
    twins = measured_twins(monkeypatch, tmp_path, LAYER, DType.FLOAT32)
    monkeypatch.setattr(selection, "registry", lambda: twins)
    chosen = choose(config(), model_of(config(), [LAYER]), "auto", CPU)
    assert {backend.spec.name for backend in chosen.serving(Role.DECODE)} == {"alpha", "beta"}


MLA_LAYER = mla_layer(0, heads=16, scale=0.1, kv_lora_rank=512, nope=128, rope=64, v_head_dim=128)


def twins_by_batch(monkeypatch, tmp_path, **alpha):
    """Selection for MLA layers by measurements of two equal backends. ``alpha`` changes the capabilities of one."""
    twins = dict(measured_twins(monkeypatch, tmp_path, MLA_LAYER, DType.FLOAT32).backends)
    spec = twins["alpha"].spec
    twins["alpha"] = replace(twins["alpha"], spec=replace(spec, capabilities=replace(spec.capabilities, **alpha)))
    monkeypatch.setattr(selection, "registry", lambda: Registry(twins))
    return choose(config(), model_of(config(), [MLA_LAYER]), "auto", CPU)


def test_mla_is_decoded_by_the_backend_that_was_measured_the_fastest_for_a_batch(monkeypatch, tmp_path):
    chosen = twins_by_batch(monkeypatch, tmp_path)
    assert [backend.spec.name for backend in chosen.serving(Role.DECODE)] == ["beta", "alpha"]
    assert [spec.name for spec in serving_specs(chosen)] == ["beta", "alpha"]
    schedule = chosen.choices[Role.DECODE].schedule
    assert [schedule.fastest(1, length, 1) for length in (8, 64)] == ["alpha", "beta"]


def test_pages_are_those_that_all_read_that_decode_by_batch(monkeypatch, tmp_path):
    twins_by_batch(monkeypatch, tmp_path, page_sizes=PageSizes.of(32))
    assert page_sizes() == PageSizes.of(32)


@pytest.mark.parametrize("level", [GraphLevel.NEVER, GraphLevel.DECODE])
def test_graphs_are_those_that_all_can_that_decode_by_batch(monkeypatch, tmp_path, level):
    chosen = twins_by_batch(monkeypatch, tmp_path, cuda_graph=GraphLevel.DECODE)
    refuse = {"alpha": level}

    def refusals(backend, problem, role, options):
        return ["not here"] if problem.cuda_graph > refuse.get(backend.name, GraphLevel.UNIFORM) else []

    monkeypatch.setattr(BackendSpec, "refusals", refusals)
    assert graph_level(chosen) is level


def test_settings_that_cannot_be_read_are_refused_when_layers_are_made():
    with pytest.raises(Refused, check=naming("'x'")):
        choose(config({"attnplug": {"x": 1}}), model_of(config(), [LAYER]), "auto", CPU)


def test_graphs_follow_the_claim_of_the_backend_that_decodes():
    typed = {"model_config__dtype": torch.bfloat16}
    asked = config({"attnplug": {"backend": "triton_mha"}}, **typed)
    assert graph_level(choose(asked, model_of(asked, [LAYER]), "auto", H200)) is GraphLevel.ALWAYS
    split = config({"attnplug": {"backend": "torch_native", "decode": "triton_mha"}}, **typed)
    selection = choose(split, model_of(split, [LAYER]), "auto", H200)
    assert graph_level(selection) is GraphLevel.ALWAYS  # verified by the decode backend, too
    eager = config({"attnplug": {"backend": "torch_native"}}, **typed)
    assert graph_level(choose(eager, model_of(eager, [LAYER]), "auto", H200)) is GraphLevel.NEVER


def test_a_level_that_a_backend_declares_and_refuses_here_is_not_claimed():
    class Weaker:
        name = "weaker"
        capabilities = SimpleNamespace(cuda_graph=GraphLevel.ALWAYS)

        def refusals(self, problem, role, options):
            return ["not on this machine"] if problem.cuda_graph > GraphLevel.DECODE else []

    selection = choose(config(), model_of(config(), [LAYER]), "auto", CPU)
    chosen = SimpleNamespace(spec=Weaker())
    weaker = SimpleNamespace(serving=lambda role: [chosen], problem=selection.problem, options={})
    assert graph_level(weaker) is GraphLevel.DECODE


def test_blocks_that_the_bridge_cannot_carry_are_refused_when_layers_are_made():
    asked = config(cache_config__user_specified_block_size=True, cache_config__block_size=24)
    with pytest.raises(Refused) as raised:
        choose(asked, model_of(asked, [LAYER]), "auto", CPU)
    assert [(reason.code, reason.value) for reason in raised.value.refusals] == [(RefusalCode.PAGE_SIZE, 24)]


def test_an_mla_layer_has_its_latent_whole():
    layer = mla_layer(3, heads=4, scale=0.1, kv_lora_rank=512, nope=128, rope=64, v_head_dim=128)
    assert layer.mla is not None and (layer.mla.row_dim, layer.head_dim, layer.v_head_dim) == (576, 192, 128)
