"""The classes that vLLM loads, over stand-ins for its own: what no run of vLLM on a CPU shows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import DType, GraphLevel, RefusalCode, Role
from attnplug.host import KVPools, ModelAttention
from attnplug_testing.errors import naming
from attnplug_testing.measured import measured_twins
from attnplug_vllm import selection
from attnplug_vllm.selection import Refused
from vllm_recorders import MHARecorder, MLARecorder
from vllm_stage import caches, config, metadata
from vllm_stand_in import PLACES, Host, QueryLens, Support, vllm

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 16
RANK, ROPE = 32, 16
NATIVE = {"attnplug": {"backend": "torch_native"}}
CPU = torch.device("cpu")
CACHE = SimpleNamespace(block_size=BLOCK)


@pytest.fixture(scope="module")
def loaded() -> Iterator[SimpleNamespace]:
    with vllm() as found:
        yield found


@pytest.fixture
def ours(loaded: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    selection.forget()
    monkeypatch.setattr(Host, "config", config(NATIVE, compilation_config__static_forward_context={}))
    Host.config.attention_config.mla_prefill_backend = None
    return loaded


def add(name: str, impl: Any, cache: Tensor | None = None, **more: Any) -> Any:
    """A layer of vLLM's with our implementation, in the current configuration."""
    made = SimpleNamespace(
        impl=impl, head_size_v=DIM, kv_cache_dtype="auto", kv_cache=cache, layer_name=name, _k_scale_float=2.0, **more
    )
    Host.config.compilation_config.static_forward_context[name] = made
    return made


def mha(ours: SimpleNamespace, **given: Any) -> Any:
    return ours.mha.AttnplugImpl(**{"num_heads": HEADS, "head_size": DIM, "scale": 0.25, "num_kv_heads": 2, **given})


def mha_builder(ours: SimpleNamespace, *names: str) -> Any:
    return ours.mha.AttnplugBuilder(CACHE, list(names), Host.config, CPU)


def mha_recorder(ours: SimpleNamespace, backend: Any) -> Any:
    builder = mha_builder(ours, "model.layers.0.attn")
    return recorded(builder, builder._planner, backend)


def recorded(builder: Any, planner: Any, backend: Any) -> Any:
    """Return the builder, with a backend that records its calls."""
    attention = ModelAttention(backend, KVPools())
    planner.group = SimpleNamespace(ready=lambda: attention)
    return builder


# Places in vLLM's registry


def test_the_place_of_another_keeps_serving_who_does_not_ask_for_attnplug(ours, monkeypatch):
    """Registered more than once, as vLLM does it."""
    from attnplug_vllm import backends, register

    monkeypatch.setattr(backends, "replaced", {})
    monkeypatch.setattr("sys.argv", ["program"])
    for place in PLACES.values():
        monkeypatch.setattr(place, "path", None)
    register.register()
    register.register()
    assert PLACES["CPU_ATTN"].path == "attnplug_vllm.backends.CPUAttention"
    assert backends.replaced == {"Custom": None, "CPUAttention": "vllm.CPU"}
    Host.config.attention_config.backend = SimpleNamespace(name="CUSTOM")
    assert backends.CPUAttention == backends.Custom == "attnplug_vllm.mha.AttnplugBackend"
    Host.config.additional_config, Host.config.attention_config.backend = {"other": 1}, None
    assert (backends.CPUAttention, backends.Custom) == ("vllm.CPU", "attnplug_vllm.mha.AttnplugBackend")
    Host.config.model_config.use_mla = True
    assert backends.Custom == "attnplug_vllm.mla.AttnplugMLABackend"
    Host.config.model_config.hf_text_config.index_topk = 8
    assert backends.Custom == "attnplug_vllm.sparse_mla.AttnplugSparseMLABackend"


def test_vllms_log_does_not_deny_what_attnplug_serves(ours, monkeypatch):
    """vLLM's CPU platform logs this for every backend but its own."""
    from attnplug_vllm import backends, register

    monkeypatch.setattr(backends, "replaced", {})
    monkeypatch.setattr("sys.argv", ["program"])
    for place in PLACES.values():
        monkeypatch.setattr(place, "path", None)
    register.register()
    Host.config.attention_config.backend = SimpleNamespace(name="CUSTOM")
    assert not is_logged("Cannot use %s backend on CPU.", "AttentionBackendEnum.CUSTOM")
    assert is_logged("Cannot use %s backend on CPU.", "AttentionBackendEnum.FLASH_ATTN")
    assert is_logged("CUSTOM")
    Host.config.additional_config = {}
    monkeypatch.setitem(backends.replaced, "Custom", "other.Backend")
    assert is_logged("Cannot use %s backend on CPU.", "AttentionBackendEnum.CUSTOM")


def is_logged(message: str, *values: str) -> bool:
    """Return True if the logger of vLLM's CPU platform passes a message."""
    logger = logging.getLogger("vllm.platforms.cpu")
    return bool(logger.filter(logger.makeRecord(logger.name, logging.INFO, "cpu.py", 1, message, values, None)))


@pytest.mark.parametrize(("distribution", "is_checked"), [("attnplug-vllm", True), ("vllm", True), ("other", False)])
def test_custom_alone_is_checked_unless_another_plugin_is_installed(ours, monkeypatch, distribution, is_checked):
    from attnplug_vllm import register

    plugins = [SimpleNamespace(dist=SimpleNamespace(name=name)) for name in ("attnplug-vllm", distribution)]
    monkeypatch.setattr(register.metadata, "entry_points", lambda group: plugins)
    argv = ["vllm", "serve", "m", "--attention-backend", "CUSTOM", "--kv-cache-dtype", "fp8_e5m2"]
    with pytest.raises(SystemExit, check=naming("fp8_e5m2")) if is_checked else nullcontext():
        register.check(argv)


def test_a_program_whose_command_line_cannot_be_served_ends_with_one_message(ours):
    from attnplug_vllm.register import check

    asked = ["vllm", "serve", "m", "--attention-backend", "CUSTOM", "--additional-config.attnplug.backend"]
    check([*asked, "torch_native"])
    with pytest.raises(SystemExit, check=naming("nobody")):
        check([*asked, "nobody"])


# MHA


@pytest.mark.parametrize(("layout", "order"), [("HND", "BHNC"), ("NHD", "BNHC")])
def test_a_cache_lies_in_memory_as_vllms_layout_says(ours, monkeypatch, layout, order):
    """For vLLM up to 0.28. If one buffer holds all layers, a block's layers are adjacent."""
    monkeypatch.setattr(Host, "layout", layout)
    backend = ours.mha.AttnplugBackend
    assert "".join("BHNC"[dim] for dim in backend.get_kv_cache_stride_order()) == order
    whole = "".join("LBHNC"[dim] for dim in backend.get_kv_cache_stride_order(include_num_layers_dimension=True))
    assert whole == {"HND": "BHLNC", "NHD": "BLNHC"}[layout]


def test_vllm_may_capture_what_the_weakest_choice_can(ours, monkeypatch):
    levels = {"a": GraphLevel.ALWAYS, "b": GraphLevel.DECODE}
    monkeypatch.setattr(ours.mha, "graph_level", levels.__getitem__)
    for chosen, support in ((("a",), Support.UNIFORM_BATCH), (("a", "b"), Support.UNIFORM_SINGLE_TOKEN_DECODE)):
        monkeypatch.setattr(ours.mha, "remembered", lambda chosen=chosen: chosen)
        assert ours.mha.AttnplugBuilder.get_cudagraph_support(None, None) is support
    monkeypatch.setattr(ours.mha, "remembered", tuple)
    assert ours.mha.cudagraph_support() is Support.NEVER


def test_fp8_scales_are_those_of_keys_and_of_values(ours):
    add("model.layers.0.attn", mha(ours), _v_scale_float=3.0)
    group = mha_builder(ours, "model.layers.0.attn")._planner.group
    assert group.scales(group.layers[0]) == (2.0, 3.0)


def test_a_layer_that_shares_a_cache_reads_it_and_writes_nothing(ours):
    tensor = caches("NHD", layers=1, blocks=4, heads=KV_HEADS, block_size=BLOCK, content=2 * DIM)[0]
    first, sharing = "model.layers.0.attn", "model.layers.1.attn"
    owner, reader = add(first, mha(ours), tensor), add(sharing, mha(ours, kv_sharing_target_layer_name=first), tensor)
    for layer in (owner, reader):
        layer._v_scale_float = 1.0
    builder = mha_builder(ours, first, sharing)
    step = builder.build(0, metadata([(0, 3)]))
    q, k, v = (torch.randn(3, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out = owner.impl.forward(owner, q, k, v, tensor, step, torch.empty_like(q)).clone()
    written = tensor.clone()
    again = reader.impl.forward(reader, q, torch.zeros_like(k), torch.zeros_like(v), tensor, step, torch.empty_like(q))
    assert torch.equal(again, out) and torch.equal(tensor, written)


def test_a_layer_that_shares_a_cache_and_differs_is_refused(ours):
    first, sharing = "model.layers.0.attn", "model.layers.1.attn"
    add(first, mha(ours)), add(sharing, mha(ours, sliding_window=8, kv_sharing_target_layer_name=first))
    with pytest.raises(Refused) as raised:
        mha_builder(ours, first, sharing)
    assert [(reason.code, reason.value) for reason in raised.value.refusals] == [(RefusalCode.LAYERS, sharing)]


def test_sinks_are_read_in_float32_where_graphs_know_them(ours, monkeypatch):
    monkeypatch.setattr(ours.mha, "choose", lambda *given: None)
    sinks, calls = torch.ones(HEADS, dtype=torch.bfloat16), []
    impl = mha(ours, sinks=sinks)
    assert impl.layer(0, DIM).sinks
    impl.spec, q = impl.layer(0, DIM), torch.zeros(1, HEADS, DIM)
    sinks.fill_(5)  # weights are loaded, again
    impl.process_weights_after_loading(torch.bfloat16)
    for _ in range(2):
        impl.forward(None, q, q, q, None, SimpleNamespace(attend=calls.append), q)
    assert calls[0].sinks is calls[1].sinks and calls[0].sinks.dtype is torch.float32
    assert calls[0].sinks.tolist() == [5.0] * HEADS


def test_memory_for_graphs_is_reserved_for_the_largest_and_replays_are_planned(ours):
    Host.config.compilation_config.max_cudagraph_capture_size = 32
    add("model.layers.0.attn", mha(ours))
    backend, batch = MHARecorder(), metadata([(0, 1)] * 4)
    builder = mha_recorder(ours, backend)
    builder.build_for_cudagraph_capture(batch)
    builder.build(0, batch)
    assert [what for what, _ in backend.calls] == ["reserve", "capture", "replay"]
    assert backend.calls[0][1] == (8, 32)


def test_steps_that_the_contract_lacks_are_refused_by_name(ours):
    add("model.layers.0.attn", mha(ours))
    builder = mha_recorder(ours, MHARecorder())
    given = metadata([(0, 1)])
    with pytest.raises(Refused) as raised:
        builder.build(0, given.replace(causal=False))
    (reason,) = raised.value.refusals
    assert reason.code == RefusalCode.FEATURE and reason.value.startswith("non-causal")


def test_a_common_prefix_is_attended_to_without_cascade_attention(ours):
    (cache,) = caches("NHD", layers=1, blocks=24, heads=KV_HEADS, block_size=BLOCK, content=2 * DIM)
    layer = add("model.layers.0.attn", mha(ours), cache.normal_(), _v_scale_float=1.0)
    builder, q = mha_builder(ours, "model.layers.0.attn"), torch.randn(2, HEADS, DIM)
    rows, results = torch.randn(2, KV_HEADS, DIM), []
    for common_prefix_len in (0, BLOCK):
        step = builder.build(common_prefix_len, metadata([(20, 1), (40, 1)]))
        results.append(layer.impl.forward(layer, q, rows, rows, cache, step, torch.empty_like(q)))
    assert torch.equal(*results)


def test_a_version_that_the_bridge_does_not_know_is_refused_when_layers_are_made(ours, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.34.0")
    with pytest.raises(Refused) as raised:
        mha(ours)
    assert [reason.code for reason in raised.value.refusals] == [RefusalCode.REQUIREMENT]


def test_the_problem_has_the_compute_capability_of_the_gpu(ours, monkeypatch):
    from attnplug_vllm.specs import Machine

    assert Machine.current() == Machine("cpu")
    monkeypatch.setattr(Host, "device", "cuda")
    assert Machine.current() == Machine("cuda", 90)


def test_mha_batches_run_on_the_backend_that_was_measured_the_fastest_for_them(ours, monkeypatch, tmp_path):
    """D3: without a graph, the lengths of the batch decide. The prefill of a mixed batch is a separate batch."""
    Host.config.additional_config = {}
    twins = measured_twins(monkeypatch, tmp_path, mha(ours).layer(0, DIM), DType.FLOAT32)
    monkeypatch.setattr(selection, "registry", lambda: twins)
    selection.forget()
    (cache,) = caches("NHD", layers=1, blocks=24, heads=KV_HEADS, block_size=BLOCK, content=2 * DIM)
    layer = add("model.layers.0.attn", mha(ours), cache.normal_(), _v_scale_float=1.0)
    builder, makers = mha_builder(ours, "model.layers.0.attn"), []
    for lengths in ([(3, 1)], [(60, 1)], [(60, 1), (0, 5)]):
        step = builder.build(0, given := metadata(lengths))
        rows = torch.randn(given.num_actual_tokens, KV_HEADS, DIM)
        q = torch.randn(given.num_actual_tokens, HEADS, DIM)
        layer.impl.forward(layer, q, rows, rows, cache, step, torch.empty_like(q))
        makers.append([part.batch.plan.attention.planner_names()[0] for part, _, _ in step._parts])
    assert makers[:2] == [["alpha"], ["beta"]]
    assert makers[2][0] == "beta" and len(makers[2]) == 2


# MLA


def mla(ours: SimpleNamespace, **given: Any) -> Any:
    dims = {"kv_lora_rank": RANK, "qk_nope_head_dim": 8, "qk_rope_head_dim": ROPE, "v_head_dim": 8}
    fixed = {"num_heads": HEADS, "head_size": RANK + ROPE, "scale": 0.2, "num_kv_heads": 1, "alibi_slopes": None}
    rest = dict.fromkeys(("sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name"))
    return ours.mla.AttnplugMLAImpl(
        **{**fixed, **rest, "kv_cache_dtype": "auto", "attn_type": "decoder", **dims, **given}
    )


def mla_builder(ours: SimpleNamespace, backend: Any = None) -> Any:
    name = "model.layers.0.attn"
    add(name, mla(ours))
    builder = ours.mla.AttnplugMLABuilder(CACHE, [name], Host.config, CPU)
    if backend is not None:
        recorded(builder, builder._decode.planner, backend)
    return builder


@pytest.mark.parametrize(
    ("given", "feature"),
    [
        ({"sliding_window": 8}, "a sliding window over latent rows"),
        ({"logits_soft_cap": 5.0}, "a soft cap"),
        ({"alibi_slopes": [0.1]}, "ALiBi"),
        ({"indexer": object()}, "an indexer"),
        ({"kv_cache_dtype": "fp8"}, "fp8 on the CPU"),
    ],
)
def test_mla_layers_that_the_contract_lacks_are_refused_by_name(ours, given, feature):
    with pytest.raises(Refused) as raised:
        mla(ours, **given)
    (reason,) = raised.value.refusals
    assert reason.code == RefusalCode.FEATURE and feature in reason.value


def test_lengths_on_the_host_are_those_of_the_requests_that_decode(ours):
    """Decoding requests come first, then those that prefill."""
    builder = mla_builder(ours, MLARecorder())
    given = metadata([(5, 1), (40, 1), (0, 7)])
    builder._lengths = given.seq_lens_cpu_upper_bound
    step = builder._build_decode(
        given.block_table_tensor[:2], given.seq_lens[:2], 41, *[given.query_start_loc[:3]] * 2, 2, None
    )
    assert step.host[1].tolist() == [6, 41]


@pytest.mark.parametrize(("needed", "shared"), [(False, False), (False, True), (True, False)])
def test_lengths_are_read_only_where_a_backend_needs_or_is_chosen_by_them(ours, needed, shared):
    builder = mla_builder(ours, MLARecorder())
    builder._decode.needs_lengths, builder._decode.shared = needed, shared
    given = metadata([(5, 1), (40, 1)])
    assert (builder.build(0, given).decode.host is not None) is (needed or shared)
    if not needed:  # vLLM may have none
        assert builder.build(0, given.replace(seq_lens_cpu_upper_bound=None)).decode.host is None


def test_all_backends_that_decode_by_batch_are_listed_and_built(ours, monkeypatch, tmp_path):
    """D3: two backends of one KV group, by this machine's table."""
    events: list[str] = []
    monkeypatch.setattr(selection.logger, "info", lambda words, *given: events.append(words % given))
    Host.config.additional_config = {}
    (layer,) = ours.mla.model_of(Host.config, [mla(ours).spec]).layers
    events.clear()
    twins = measured_twins(monkeypatch, tmp_path, layer, DType.FLOAT32)
    monkeypatch.setattr(selection, "registry", lambda: twins)
    selection.forget()
    builder = mla_builder(ours)
    (line,) = events
    prefill, decode = line.split(", decode by ")
    assert "vLLM's own MLA prefill backend (--additional-config.attnplug.prefill" in prefill
    assert decode.startswith("beta or alpha, depending on the batch (auto: ")
    name = "model.layers.0.attn"
    held = Host.config.compilation_config.static_forward_context[name]
    held.kv_cache = torch.zeros(8, BLOCK, RANK + ROPE)
    q = torch.randn(1, HEADS, RANK), torch.randn(1, HEADS, ROPE)
    makers = []
    for before in (3, 60):
        made = builder.build(0, metadata([(before, 1)]))
        held.impl.forward_mqa(q, None, made, SimpleNamespace(layer_name=name))
        makers += made.decode.planned.batch.plan.attention.planner_names()
    assert makers == ["alpha", "beta"]


def test_mla_steps_after_a_capture_are_replays(ours):
    backend, given = MLARecorder(), metadata([(5, 1), (40, 1)])
    builder = mla_builder(ours, backend)
    assert builder.build_for_cudagraph_capture(given).decode.planned.captured
    assert builder.build(0, given).decode.planned is None
    assert backend.names() == ["reserve", "capture", "replay"]


def test_the_log_sum_exp_of_a_decode_has_tokens_first(ours):
    """C4"""
    builder = mla_builder(ours, MLARecorder())
    impl = Host.config.compilation_config.static_forward_context["model.layers.0.attn"].impl
    impl.need_to_return_lse_for_decode = True
    q = torch.randn(2, HEADS, RANK), torch.randn(2, HEADS, ROPE)
    made = builder.build(0, metadata([(5, 1), (40, 1)]))
    _, lse = impl.forward_mqa(q, None, made, SimpleNamespace(layer_name="model.layers.0.attn"))
    assert (lse.shape, lse.dtype) == ((2, HEADS), torch.float32)
    made.decode.seq_lens[1] = 0
    _, lse = impl.forward_mqa(q, None, made, SimpleNamespace(layer_name="model.layers.0.attn"))
    assert lse[1].eq(float("-inf")).all(), "with context parallelism, this rank may have no row of a request"


def test_mla_decodes_with_the_heads_of_all_ranks_that_share_rows(ours):
    Host.config.parallel_config.decode_context_parallel_size = 2
    assert mla(ours).spec.num_heads == 2 * HEADS


def test_mla_prefill_is_vllms_where_ranks_share_rows(ours):
    Host.config.parallel_config.decode_context_parallel_size = 2
    Host.config.additional_config["attnplug"] = {"backend": "torch_native", "prefill": "torch_native"}
    with pytest.raises(Refused, check=naming("--decode-context-parallel-size", "--additional-config.attnplug.prefill")):
        mla(ours)


def test_the_scale_of_an_fp8_latent_cache_is_its_layers(ours):
    group = mla_builder(ours)._decode.planner.group
    assert group.scales(group.layers[0]) == 2.0


@pytest.mark.parametrize(
    ("absorbed", "drafts", "support"),
    [(True, 0, QueryLens.VARLEN), (False, 4, QueryLens.UNIFORM), (False, 0, QueryLens.SINGLE_ONLY)],
)
def test_how_many_tokens_a_decode_may_have_follows_from_the_backend(ours, monkeypatch, absorbed, drafts, support):
    made = SimpleNamespace(extends=absorbed, max_verified=drafts, needs_lengths=False, shared=False)
    monkeypatch.setattr(ours.mla, "DecodeGroup", lambda *given: made)
    assert mla_builder(ours).query_len_support is support


def test_a_named_prefill_backend_takes_the_place_of_vllms(ours):
    assert mla_builder(ours)._prefill_backend == "vLLM's"
    Host.config.additional_config = {"attnplug": {"backend": "torch_native", "prefill": "torch_native"}}
    Host.config.compilation_config.static_forward_context.clear()
    builder = mla_builder(ours)
    impl = Host.config.compilation_config.static_forward_context["model.layers.0.attn"].impl
    assert set(impl.selection.choices) == {Role.PREFILL, Role.DECODE}
    assert isinstance(builder._prefill_backend, ours.mla.AttnplugMLAPrefill)
    assert not impl.fused_output_quant_supported(None), "our prefill gives plain results"


def test_a_chunk_of_context_is_found_by_its_number_in_either_form(ours):
    asked: list[int] = []
    made = ours.mla.AttnplugMLAPrefill()
    made.ragged = SimpleNamespace(context_chunk=lambda index, *rest: asked.append(index))
    made.run_prefill_context_chunk(q=None, k=None, v=None, chunk_idx=3)
    made.run_prefill_context_chunk(q=None, k=None, v=None, chunk=SimpleNamespace(index=5))
    assert asked == [3, 5]
