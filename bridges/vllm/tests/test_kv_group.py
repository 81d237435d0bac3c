"""Attention over caches that vLLM owns: layouts, late building, caches that move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnplug import AttentionBackend, BackendError, DType, Role
from attnplug.auto.fastest import FastestBackend
from attnplug.declare.kv_format import as_format
from attnplug.host import (
    BackendRequest,
    BuildError,
    HostContext,
    Selection,
    default_ranking,
    load_registry,
    select,
)
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug_testing.errors import naming
from attnplug_testing.measured import measured_twins
from attnplug_vllm import kv_group
from attnplug_vllm.geometry import GeometryBuilder
from attnplug_vllm.kv_group import GroupAttention, mha_pools, mla_pools
from attnplug_vllm.mha_step import EagerMHAStep, LayerCall
from attnplug_vllm.planner import GroupPlanner
from attnplug_vllm.selection import Refused
from attnplug_vllm.specs import Machine, mha_layer, mla_layer, model_of, problem_of
from vllm_stage import LAYOUTS, caches, config, layer, metadata

HEADS, KV_HEADS, DIM, LAYERS, BLOCKS, BLOCK_SIZE = 4, 2, 16, 2, 24, 16


def group(tensors: list[torch.Tensor], *, block_size: int = BLOCK_SIZE, **request: Any) -> GroupAttention:
    settings = config(model_config__max_model_len=256)
    specs = [mha_layer(i, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, scale=0.25) for i in range(LAYERS)]
    model = model_of(settings, specs)
    problem = problem_of(settings, model, Machine("cpu"), "auto")
    return GroupAttention(
        settings,
        torch.device("cpu"),
        model,
        {number: layer(tensor) for number, tensor in enumerate(tensors)},
        select(load_registry(), BackendRequest("torch_native", **request), problem),
        as_format(DType.FLOAT32),
        block_size,
        mha_pools,
        lambda one: (one._k_scale_float, one._v_scale_float),
    )


def memory_of(layout: str, block_size: int = BLOCK_SIZE) -> list[torch.Tensor]:
    return caches(layout, layers=LAYERS, blocks=BLOCKS, heads=KV_HEADS, block_size=block_size, content=2 * DIM)


def run(attention: GroupAttention, lengths: list[tuple[int, int]], seed: int, rows: int | None = None) -> torch.Tensor:
    batch = metadata(lengths, block_size=attention.page_size)
    geometries = GeometryBuilder(attention.page_size, 16, exact=True)
    step, random = EagerMHAStep(GroupPlanner(attention, 8, 8), geometries, batch), torch.Generator().manual_seed(seed)
    tokens, results = batch.num_actual_tokens if rows is None else rows, []
    for spec in attention.model.layers:
        q, k, v = (torch.randn(tokens, h, DIM, generator=random) for h in (HEADS, KV_HEADS, KV_HEADS))
        out = torch.full_like(q, 7.0)
        step.attend(LayerCall(spec, q, k, v, out, True))
        results.append(out)
    return torch.stack(results)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sample(3)
def test_every_layout_of_vllms_gives_the_same_result_without_a_copy(layout):
    tensors = memory_of(layout)
    ours, plain = group(tensors), group(memory_of("NHD"))
    for step, lengths in enumerate([[(0, 20), (0, 7)], [(20, 1), (7, 1)]]):
        assert torch.equal(run(ours, lengths, step), run(plain, lengths, step))
    assert tensors[1].any(), "the rows are in vLLM's memory"


def test_a_row_of_the_cache_is_a_key_and_then_its_value():
    tensor = memory_of("HND")[0]
    specs = [mha_layer(0, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, scale=0.25)]
    pool = mha_pools(specs, {0: tensor}, BLOCK_SIZE, as_format(DType.FLOAT32), {}).mha
    assert pool is not None
    k, v = torch.randn(1, KV_HEADS, DIM), torch.randn(1, KV_HEADS, DIM)
    pool.write(0, torch.tensor([BLOCK_SIZE + 3]), k, v)
    assert torch.equal(tensor[1, :, 3], torch.cat([k[0], v[0]], -1))


def test_blocks_of_64_hold_the_same_rows():
    large, small = group(memory_of("HND", 64), block_size=64), group(memory_of("HND"))
    for step, lengths in enumerate([[(0, 70), (0, 7)], [(70, 1), (7, 1)]]):
        assert torch.equal(run(large, lengths, step), run(small, lengths, step))


def test_rows_that_belong_to_no_request_are_left_alone():
    out = run(group(memory_of("NHD")), [(0, 3)], 0, rows=5)
    assert (out[:, 3:] == 7.0).all() and not (out[:, :3] == 7.0).any()


def test_who_was_left_out_when_it_was_built_is_logged_with_the_reason(monkeypatch):
    def build(selection, context):
        own = context.for_backend("torch_native", selection.chosen(Role.DECODE).spec.capabilities)
        return FastestBackend(
            {"one": TorchNativeBackend(own)}, {Role.DECODE: "one"}, left_out={"other": "it cannot be captured"}
        )

    monkeypatch.setattr(kv_group, "build_selection", build)
    events = []
    monkeypatch.setattr(kv_group.logger, "info", lambda message, *values: events.append(message % values))
    group(memory_of("NHD")).ready()
    assert events == ["attnplug: without other: it cannot be captured"]


def test_auto_continues_without_a_backend_that_shares_a_role_and_cannot_be_built(monkeypatch, tmp_path):
    """D2; a backend that was chosen for a role ends the start with its reason."""
    attention = group(memory_of("NHD"))
    twins = measured_twins(monkeypatch, tmp_path, attention.model.layers[0], DType.FLOAT32)
    problem = replace(attention.selection.problem, page_size=BLOCK_SIZE)
    ranking = default_ranking(twins, problem, per_batch=True)
    attention.selection = select(twins, BackendRequest(), problem, ranking=ranking)
    chosen, sharing = attention.selection.serving(Role.DECODE)
    built, warned, broken = [], [], {sharing}

    def build(selection: Selection, context: HostContext) -> AttentionBackend:
        built.append([backend.spec.name for backend in selection.serving(Role.DECODE)])
        for backend in broken & set(selection.serving(Role.DECODE)):
            raise BuildError(backend, BackendError("no kernel image"))
        return TorchNativeBackend(context.for_backend("torch_native", chosen.spec.capabilities))

    monkeypatch.setattr(kv_group, "build_selection", build)
    monkeypatch.setattr(kv_group.logger, "warning", lambda message, *values: warned.append(message % values))
    run(attention, [(0, 3)], 0)
    assert built == [[chosen.spec.name, sharing.spec.name], [chosen.spec.name]]
    assert warned == [
        f"attnplug: backend {sharing.spec.name} ({sharing.source}): no kernel image; auto continues without it"
    ]
    broken.add(chosen)
    attention._attention = None
    with pytest.raises(Refused, match="no kernel image"):
        attention.ready()


def test_it_is_built_when_the_caches_are_there_and_again_when_they_have_moved():
    tensors = memory_of("NHD")
    attention = group([torch.tensor([]), torch.tensor([])])
    for number, tensor in enumerate(tensors):
        attention.layers[number].kv_cache = tensor
    first = attention.ready()
    assert attention.ready() is first
    moved = memory_of("NHD")
    for number, tensor in enumerate(moved):
        attention.layers[number].kv_cache = tensor
    assert attention.ready() is not first
    run(attention, [(0, 3)], 0)
    assert moved[0].any() and not tensors[0].any()


def test_caches_that_do_not_fit_are_refused_in_one_message():
    wrong = caches("NHD", layers=LAYERS, blocks=BLOCKS, heads=KV_HEADS, block_size=8, content=2 * DIM)
    with pytest.raises(Refused, check=naming("layer 0", "[24, 2, 8, 32]", 16)):
        group(wrong).ready()


def test_fp8_caches_come_as_bytes_with_the_scales_of_their_layers():
    specs = [mha_layer(0, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, scale=0.25)]
    cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * DIM, dtype=torch.uint8)
    pool = mha_pools(specs, {0: cache}, BLOCK_SIZE, as_format(DType.FLOAT8_E4M3), {0: (2.0, 3.0)}).mha
    assert pool is not None and pool.scales(0) == (2.0, 3.0)


def test_scales_of_other_caches_do_not_matter():
    specs = [mha_layer(0, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, scale=0.25)]
    cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * DIM)
    assert mha_pools(specs, {0: cache}, BLOCK_SIZE, as_format(DType.FLOAT32), {0: (2.0, 3.0)}).mha is not None


def test_latent_rows_lie_in_vllms_memory():
    specs = [mla_layer(0, heads=HEADS, scale=0.25, kv_lora_rank=32, nope=16, rope=8, v_head_dim=16)]
    cache = torch.zeros(BLOCKS, BLOCK_SIZE, 40)
    pool = mla_pools(specs, {0: cache}, BLOCK_SIZE, as_format(DType.FLOAT32), {}).mla
    assert pool is not None and pool.rows(0).data_ptr() == cache.data_ptr()


def test_latent_rows_in_fp8_have_the_scale_of_their_layer():
    specs = [mla_layer(0, heads=HEADS, scale=0.25, kv_lora_rank=32, nope=16, rope=8, v_head_dim=16)]
    cache = torch.zeros(BLOCKS, BLOCK_SIZE, 40, dtype=torch.uint8)
    pool = mla_pools(specs, {0: cache}, BLOCK_SIZE, as_format(DType.FLOAT8_E4M3), {0: 2.0}).mla
    assert pool is not None and pool.scale(0) == 2.0


def test_scratch_that_grew_stays_where_graphs_know_it():
    before = kv_group._allocate(8, torch.device("cpu"), True)
    kv_group._allocate(16, torch.device("cpu"), False)
    assert any(kept is before for kept in kv_group._buffers)


def test_scratch_is_zero_where_a_backend_asks_for_that(monkeypatch):
    monkeypatch.setattr(kv_group.torch, "empty", torch.ones)
    assert not kv_group._allocate(8, torch.device("cpu"), True).any()


def test_a_layer_that_shares_a_cache_writes_nothing():
    tensors = memory_of("NHD")
    attention = group(tensors)
    step = EagerMHAStep(GroupPlanner(attention, 8, 8), GeometryBuilder(BLOCK_SIZE, 16, exact=True), metadata([(4, 1)]))
    q = torch.randn(1, HEADS, DIM)
    step.attend(LayerCall(attention.model.layers[0], q, None, None, torch.empty_like(q), False))
    assert not tensors[0].any()
