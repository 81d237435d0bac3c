"""Sparse MLA: the classes that vLLM loads, over stand-ins for its own, with the reference backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import ForwardMode, MLAPool, RefusalCode, Role
from attnplug.auto.ranking import Ranking
from attnplug.auto.table_store import FoundTable, MeasuredShape, MeasuredTable, Origin
from attnplug.host import KVPools, ModelAttention, load_registry
from attnplug_vllm import selection
from attnplug_vllm.selection import Refused
from vllm_recorders import MLARecorder
from vllm_stage import Metadata, config, metadata, run_sparse_layers_on_cpu
from vllm_stand_in import Host, Support, vllm

HEADS, BLOCK, TOPK, SCALE = 4, 16, 8, 0.2
NAME = "model.layers.0.self_attn.attn"
CPU = torch.device("cpu")
SECTION = {"attnplug": {"backend": "torch_sparse"}}


@pytest.fixture(scope="module")
def loaded() -> Iterator[SimpleNamespace]:
    with vllm() as found:
        yield found


@pytest.fixture
def ours(loaded: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    selection.forget()
    run_sparse_layers_on_cpu(monkeypatch)
    monkeypatch.setattr(Host, "config", config(SECTION, compilation_config__static_forward_context={}))
    text = {"model_type": "deepseek_v32", "index_n_heads": 2, "index_head_dim": 16, "index_topk": TOPK}
    Host.config.model_config.hf_text_config = SimpleNamespace(**text)
    return loaded.sparse_mla


def layer(ours: Any, *, rank: int = 32, rope: int = 16, dtype: str = "auto", **given: Any) -> Any:
    dims = {"kv_lora_rank": rank, "qk_nope_head_dim": 8, "qk_rope_head_dim": rope, "v_head_dim": 8}
    fixed = {"num_heads": HEADS, "head_size": rank + rope, "scale": SCALE, "num_kv_heads": 1, "attn_type": "decoder"}
    none = ("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name")
    buffer = torch.full((64, TOPK), -1, dtype=torch.int32)
    impl = ours.AttnplugSparseMLAImpl(
        **{**fixed, **dict.fromkeys(none), "kv_cache_dtype": dtype, "topk_indices_buffer": buffer, **dims, **given}
    )
    made = SimpleNamespace(impl=impl, kv_cache_dtype=dtype, kv_cache=None, layer_name=NAME, _k_scale_float=1.0)
    Host.config.compilation_config.static_forward_context[NAME] = made
    return made


def builder_of(ours: Any) -> Any:
    return ours.AttnplugSparseMLABuilder(SimpleNamespace(block_size=BLOCK), [NAME], Host.config, CPU)


def slots_of(given: Metadata) -> list[list[int]]:
    """Slots that each new token sees, in order."""
    found, starts = [], given.query_start_loc_cpu.tolist()
    for request, total in enumerate(given.seq_lens.tolist()):
        table, new = given.block_table_tensor[request].tolist(), starts[request + 1] - starts[request]
        every = [table[position // BLOCK] * BLOCK + position % BLOCK for position in range(total)]
        found += [every[: total - new + number + 1] for number in range(new)]
    return found


def random_positions(given: Metadata, buffer: Tensor) -> list[list[int]]:
    """Write random positions to vLLM's buffer as its indexer does. Returns the slots that are selected."""
    buffer.fill_(-1)
    chosen = []
    for row, slots in enumerate(slots_of(given)):
        positions = torch.randperm(len(slots))[:TOPK]
        buffer[row, : len(positions)] = positions.int()
        chosen.append([slots[position] for position in positions.tolist()])
    return chosen


def expected(q: Tensor, rows: Tensor, chosen: list[list[int]], rank: int) -> Tensor:
    """Absorbed attention in float64."""
    out = []
    for query, slots in zip(q.double(), chosen, strict=True):
        keys = rows[slots].double()
        out.append(torch.softmax(query @ keys.T * SCALE, -1) @ keys[:, :rank])
    return torch.stack(out)


MIXED = [(40, 1), (3, 1), (0, 20), (30, 3)]


@pytest.mark.parametrize(("rope", "joined"), [(16, False), (16, True), (0, False)])
@pytest.mark.parametrize("lengths", [MIXED, [(40, 1), (7, 1)], [(20, 3), (40, 3)], [(0, 30)]])
@pytest.mark.sample(5)
def test_rows_that_the_host_selected_are_attended_to(ours, lengths, rope, joined):
    """A10: with and without rope, prefill and decode in one batch; NaN in every row that is not selected."""
    made, builder, given = layer(ours, rope=rope), builder_of(ours), metadata(lengths)
    rows = torch.randn(24 * BLOCK, 32 + rope)
    chosen = random_positions(given, made.impl.topk_indices_buffer)
    unused = torch.ones(len(rows), dtype=torch.bool)
    unused[[slot for slots in chosen for slot in slots]] = False
    cache = rows.masked_fill(unused.unsqueeze(1), float("nan")).view(24, BLOCK, -1)
    made.kv_cache = cache
    q = torch.randn(given.num_actual_tokens, HEADS, 32 + rope)
    parts = q if joined else (q[..., :32], q[..., 32:])
    out, lse = made.impl.forward_mqa(parts, cache, builder.build(0, given), made)
    assert lse is None
    torch.testing.assert_close(out.double(), expected(q, rows, chosen, 32), atol=1e-5, rtol=1e-5)


def test_packed_rows_are_read_as_vllm_stores_them(ours):
    """E2: ``fp8_ds_mla``, in bytes that vLLM allocates."""
    Host.config.model_config.dtype = torch.bfloat16
    made, given = layer(ours, rank=512, rope=64, dtype="fp8_ds_mla"), metadata([(20, 1), (0, 5)])
    shape = ours.AttnplugSparseMLABackend.get_kv_cache_shape(8, BLOCK, 1, 576, "fp8_ds_mla")
    made.kv_cache = torch.zeros(shape, dtype=torch.uint8)
    spec, format = made.impl.spec, load_registry().kv_format("fp8_ds_mla")
    pool = MLAPool.over([spec], {0: made.kv_cache}, "pages tokens dim", page_size=BLOCK, dtype=format)
    slots = torch.arange(8 * BLOCK)
    pool.write(0, slots, torch.randn(len(slots), 1, 576, dtype=torch.bfloat16))
    chosen = random_positions(given, made.impl.topk_indices_buffer)
    q = torch.randn(6, HEADS, 576, dtype=torch.bfloat16)
    out, _ = made.impl.forward_mqa((q[..., :512], q[..., 512:]), made.kv_cache, builder_of(ours).build(0, given), made)
    want = expected(q, pool.read_rows(0, slots), chosen, 512)
    torch.testing.assert_close(out.double(), want, atol=0.03, rtol=0.02)


def recorded(builder: Any, backend: MLARecorder) -> Any:
    attention = ModelAttention(backend, KVPools())
    builder._group.planner.group = SimpleNamespace(ready=lambda: attention)
    return builder


def test_only_decodes_are_planned_if_vllm_runs_the_prefill_as_dense_mha(ours):
    made, backend = layer(ours), MLARecorder()
    builder = recorded(builder_of(ours), backend)
    step = builder.build(0, metadata([(40, 1), (3, 1), (0, 5)]))
    assert (step.num_decodes, step.num_prefills, step.num_decode_tokens) == (2, 1, 2)
    made.impl.forward_mqa(torch.randn(2, HEADS, 48), None, step, made)
    (_, geometry), (_, (_, _, extras)) = backend.calls
    assert (geometry.mode, geometry.rows, geometry.requests) == (ForwardMode.DECODE, 2, 2)
    assert extras.selected.positions.shape == (2, TOPK)


def test_captured_steps_read_the_indexers_buffer_and_are_replayed(ours, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    made, backend, given = layer(ours), MLARecorder(), metadata([(40, 1), (3, 1)])
    builder = recorded(builder_of(ours), backend)
    step = builder.build_for_cudagraph_capture(given)
    made.impl.forward_mqa(torch.randn(2, HEADS, 48), None, step, made)
    extras = backend.calls[-1][1][2]
    assert extras.selected.positions.data_ptr() == made.impl.topk_indices_buffer.data_ptr()
    builder.build(0, given)
    builder.build(0, metadata([(40, 1), (0, 3)]))
    assert [name for name in backend.names() if name != "run"] == ["reserve", "capture", "refill", "replay"]
    assert builder.get_cudagraph_support(Host.config, None) is Support.NEVER, "the reference is not captured"


def test_both_roles_are_attnplugs(ours):
    assert set(layer(ours).impl.selection.choices) == {Role.PREFILL, Role.DECODE}


@pytest.mark.parametrize(
    ("given", "feature"),
    [
        ({"sliding_window": 8}, "a sliding window over latent rows"),
        ({"logits_soft_cap": 5.0}, "a soft cap"),
        ({"alibi_slopes": [0.1]}, "ALiBi"),
    ],
)
def test_layers_that_the_contract_lacks_are_refused_by_name(ours, given, feature):
    with pytest.raises(Refused) as raised:
        layer(ours, **given)
    (reason,) = raised.value.refusals
    assert reason.code == RefusalCode.FEATURE and feature in reason.value


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("parallel_config", "decode_context_parallel_size", 2), ("attention_config", "hisparse_config", object())],
)
def test_features_of_vllm_that_the_bridge_lacks_are_refused_with_its_option(ours, section, name, value):
    setattr(getattr(Host.config, section), name, value)
    with pytest.raises(Refused) as raised:
        layer(ours)
    assert "--" in raised.value.refusals[0].value


def test_a_backend_without_sparse_attention_is_refused(ours):
    Host.config.additional_config = {"attnplug": {"backend": "torch_native"}}
    with pytest.raises(Refused):
        layer(ours)


def sparse_table(name: str, times: dict[int, float]) -> FoundTable:
    """Table of a decode layer as vLLM calls it, in microseconds by the number of requests."""
    dims = {"head_dim": 48, "value_dim": 32, "dtype": "float32", "kv_dtype": "float32", "page_size": BLOCK}
    shape = MeasuredShape("mla", HEADS, 1, **dims, topk=TOPK, hosted=True)
    rows = [(requests, 512, 1, False, us, us, us) for requests, us in times.items()]
    table = MeasuredTable("a GPU", 90, name, Role.DECODE, shape, rows, {"torch": "2"}, "2026-11-19")
    return FoundTable(table, Origin("shipped", ""))


def test_auto_takes_the_fastest_backend_for_each_number_of_requests(ours, monkeypatch):
    """By tables of layers whose rows the host has selected."""
    found = load_registry()
    native = found.get("torch_sparse")
    two = {name: replace(native, spec=replace(native.spec, name=name)) for name in ("few", "many")}
    monkeypatch.setattr(selection, "registry", lambda: replace(found, backends=two))
    tables = [sparse_table("few", {1: 5.0, 64: 99.0}), sparse_table("many", {1: 9.0, 64: 50.0})]
    monkeypatch.setattr(selection, "default_ranking", lambda *_, per_batch: Ranking(tables, per_batch=per_batch))
    Host.config.additional_config = {"attnplug": {"backend": "auto"}}
    made, builder = layer(ours), builder_of(ours)
    made.impl.topk_indices_buffer = torch.full((128, TOPK), -1, dtype=torch.int32)
    made.kv_cache = torch.randn(64, BLOCK, 48)
    for requests, name in [(1, "few"), (2, "few"), (40, "many")]:
        given = metadata([(9, 1)] * requests)
        rows, chosen = made.kv_cache.view(-1, 48), random_positions(given, made.impl.topk_indices_buffer)
        q, step = torch.randn(requests, HEADS, 48), builder.build(0, given)
        out, _ = made.impl.forward_mqa((q[..., :32], q[..., 32:]), made.kv_cache, step, made)
        torch.testing.assert_close(out.double(), expected(q, rows, chosen, 32), atol=1e-5, rtol=1e-5)
        assert step.whole.planned.batch.plan.attention.planner_names() == [name]
    assert "nearest shape" not in str(made.impl.selection.choices[Role.DECODE].why(str))


def test_lengths_are_on_the_host_for_a_backend_that_only_prefills(ours, monkeypatch):
    found = load_registry()
    native = found.get("torch_sparse")
    two = {
        name: replace(
            native,
            spec=replace(
                native.spec,
                name=name,
                capabilities=replace(native.spec.capabilities, needs_cpu_seq_lens=needs, roles=frozenset({role})),
            ),
        )
        for name, needs, role in [("prefills", True, Role.PREFILL), ("decodes", False, Role.DECODE)]
    }
    monkeypatch.setattr(selection, "registry", lambda: replace(found, backends=two))
    Host.config.additional_config = {"attnplug": {"prefill": "prefills", "decode": "decodes"}}
    made, builder, given = layer(ours), builder_of(ours), metadata([(40, 1), (3, 20)])
    made.kv_cache = torch.randn(24, BLOCK, 48)
    random_positions(given, made.impl.topk_indices_buffer)
    step = builder.build(0, given)
    made.impl.forward_mqa(torch.randn(21, HEADS, 48), made.kv_cache, step, made)
    assert step.whole.planned.batch.geometry.host is not None
