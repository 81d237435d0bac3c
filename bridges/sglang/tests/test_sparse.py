"""Sparse MLA: what SGLang's indexer reads of a batch, and attention to the rows it selects, against float64."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import BackendError, DType, ExtendPath, Feature, MLAPool, Problem, RefusalCode, Setting
from attnplug.host import TINY_CONFIGS, load_model, load_registry
from attnplug_sglang.host import FP8_DS_MLA, HOST, Refused, fit
from attnplug_sglang.kv_pools import PageTable
from attnplug_sglang.planning import CapturedGroups, PlannedGroup
from attnplug_sglang.server_args import check_server_args
from attnplug_sglang.sparse import IndexerMetadata, indexer_dims
from attnplug_testing.errors import naming
from sglang_fakes import Mode, batch, slots_table
from sglang_stand_in import HANDLERS, Method, Radix, sglang
from test_backend import runner
from test_planning import Recorder
from test_query_parts import stored_by
from test_selection import CHAIN, arguments

PAGE, PAGES, TOPK, HEADS, NAME = 64, 12, 8, 4, "attnplug:torch_sparse"
INDEX = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": TOPK}


@pytest.fixture(scope="module")
def ours() -> Iterator[SimpleNamespace]:
    with sglang() as found:
        yield found


def select(scores: Tensor, lengths: Tensor, topk: int, row_starts: Tensor | None = None) -> Tensor:
    """Reference of SGLang's ``topk_func``, one row after the other."""
    found = torch.full((len(scores), topk), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        start = 0 if row_starts is None else int(row_starts[row])
        best = scores[row, start : start + length].topk(min(topk, length)).indices
        found[row, : len(best)] = best.int()
    return found


def sparse_runner(table: Tensor, buffer: Tensor, dims: tuple[int, int] = (32, 16), **changes: Any) -> tuple[Any, Any]:
    """A runner of a sparse model with one layer, and the layer."""
    rank, rope = dims
    latent = Radix(tp_k_head_num=1, head_dim=rank + rope, qk_head_dim=rank + rope, v_head_dim=rank)
    packed = buffer.shape[-1] != rank + rope
    kv = SimpleNamespace(
        dtype=torch.float8_e4m3fn if packed else buffer.dtype,
        get_key_buffer=lambda layer: buffer,
        layer_transfer_counter=None,
        dsa_kv_cache_store_fp8=packed,
    )
    text = SimpleNamespace(model_type="deepseek_v32", **INDEX)
    config = {"kv_lora_rank": rank, "qk_nope_head_dim": 8, "qk_rope_head_dim": rope, "v_head_dim": 8}
    config |= {"hf_config": text, "hf_text_config": text, "context_len": 256}
    names = dict.fromkeys(("prefill_attention_backend_str", "decode_attention_backend_str"), NAME)
    made = runner([latent], table, kv, use_mla_backend=True, page_size=PAGE, config=config, **names, **changes)
    made.server_args.dsa_topk_backend = "torch"
    return made, latent


@pytest.fixture
def build(ours: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ours.build, "_index_select", lambda arguments: select)
    return lambda made: ours.build.build(NAME, made)


BATCHES = [
    (Mode.EXTEND, [0, 70, 130], [90, 3, 1]),
    (Mode.DECODE, [69, 130], [1, 1]),
    (Mode.TARGET_VERIFY, [69, 130], [3, 3]),
]


def random_positions(prefixes: list[int], new: list[int]) -> Tensor:
    """Distinct positions of each new token that are not behind it, as an indexer selects them."""
    seen = [before + number + 1 for before, more in zip(prefixes, new, strict=True) for number in range(more)]
    return select(torch.randn(len(seen), max(seen)), torch.tensor(seen), TOPK)


def expected(q: Tensor, rows: Tensor, slots: list[Tensor], positions: Tensor, rank: int) -> Tensor:
    """Absorbed attention to the selected rows in float64. ``slots``: those of each query's request."""
    out = []
    for query, own, chosen in zip(q.double(), slots, positions, strict=True):
        keys = rows[own[chosen[chosen >= 0].long()].long()].double()
        out.append(torch.softmax(query @ keys.T * 0.25, -1) @ keys[:, :rank])
    return torch.stack(out).flatten(1)


def query_slots(table: Tensor, new: list[int]) -> list[Tensor]:
    return [table[1 + request] for request, more in enumerate(new) for _ in range(more)]


@pytest.mark.parametrize("rope", [16, 0])
@pytest.mark.parametrize(("mode", "prefixes", "new"), BATCHES)
@pytest.mark.sample(3)
def test_rows_that_sglang_selected_are_attended_to(
    build: Any, mode: Mode, prefixes: list[int], new: list[int], rope: int
) -> None:
    """A10: new rows are written; NaN is in every row that no request has."""
    torch.manual_seed(0)
    lengths = [before + more for before, more in zip(prefixes, new, strict=True)]
    table = slots_table(lengths, PAGE, context=256)
    buffer = torch.full((PAGES * PAGE, 1, 32 + rope), float("nan"))
    for row, length in enumerate(lengths, start=1):
        buffer[table[row, :length].long()] = torch.randn(length, 1, 32 + rope)
    made, latent = sparse_runner(table, buffer, (32, rope))
    backend, given = build(made), batch(table, prefixes, new, mode)
    backend.init_forward_metadata(given)
    rows = sum(new)
    q, k, positions = (
        torch.randn(rows, HEADS, 32 + rope),
        torch.randn(rows, 1, 32 + rope),
        random_positions(prefixes, new),
    )
    run = backend.forward_decode if mode is Mode.DECODE else backend.forward_extend
    out = run(q, k, k[..., :32], latent, given, topk_indices=positions)
    assert torch.equal(buffer[given.out_cache_loc], k)
    want = expected(q, buffer.squeeze(1), query_slots(table, new), positions, 32)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)


def test_packed_rows_are_written_and_read_as_sglang_stores_them(build: Any) -> None:
    """E2: an fp8 cache with scales in each row, in SGLang's memory."""
    torch.manual_seed(0)
    prefixes, new = [69, 10], [1, 1]
    table = slots_table([70, 11], PAGE, context=256)
    buffer = torch.zeros(PAGES * PAGE, 1, 656, dtype=torch.uint8).view(torch.float8_e4m3fn)
    made, latent = sparse_runner(table, buffer, (512, 64), dtype=torch.bfloat16)
    backend, given = build(made), batch(table, prefixes, new, Mode.DECODE)
    (attention,) = backend.attention
    pool = attention.backend.layers._mla
    assert isinstance(pool, MLAPool)
    every = torch.arange(PAGES * PAGE)
    pool.write(0, every, torch.randn(len(every), 1, 576, dtype=torch.bfloat16))
    backend.init_forward_metadata(given)
    q, k = torch.randn(2, HEADS, 576, dtype=torch.bfloat16), torch.randn(2, 1, 576, dtype=torch.bfloat16)
    positions = random_positions(prefixes, new)
    out = backend.forward_decode(q, k, k[..., :512], latent, given, topk_indices=positions)
    rows = pool.read_rows(0, every)
    torch.testing.assert_close(rows[given.out_cache_loc].float(), k.squeeze(1).float(), atol=0.2, rtol=0.07)
    want = expected(q, rows.view(-1, 576), query_slots(table, new), positions, 512)
    torch.testing.assert_close(out.double(), want, atol=0.03, rtol=0.02)


@pytest.mark.parametrize("packed", [False, True])
def test_selected_rows_are_attended_to_by_queries_in_two_parts(build: Any, packed: bool) -> None:
    """SGLang's pool writes bfloat16 rows in two parts; the backend writes those with scales."""
    prefixes, new, found = [69, 10], [1, 1], []
    table = slots_table([70, 11], PAGE, context=256)
    for parts in (False, True):
        torch.manual_seed(0)
        buffer = torch.randn(PAGES * PAGE, 1, 576, dtype=torch.bfloat16)
        if packed:
            buffer = torch.zeros(PAGES * PAGE, 1, 656, dtype=torch.uint8).view(torch.float8_e4m3fn)
        made, latent = sparse_runner(table, buffer, (512, 64), dtype=torch.bfloat16)
        stored = stored_by(made.token_to_kv_pool, 512)
        backend, given = build(made), batch(table, prefixes, new, Mode.DECODE)
        backend.init_forward_metadata(given)
        q, k = torch.randn(2, HEADS, 576, dtype=torch.bfloat16), torch.randn(2, 1, 576, dtype=torch.bfloat16)
        positions = random_positions(prefixes, new)
        if parts:
            q, k, rope = q[..., :512], k[..., :512], {"q_rope": q[..., 512:], "k_rope": k[..., 512:]}
            out = backend.forward_decode(q, k, k, latent, given, topk_indices=positions, **rope)
        else:
            out = backend.forward_decode(q, k, k[..., :512], latent, given, topk_indices=positions)
        assert len(stored) == (parts and not packed)
        found.append((out, buffer.view(torch.uint8)))
    for one, parted in zip(*found, strict=True):
        assert torch.equal(one, parted)


def test_a_sparse_layer_without_selected_rows_is_refused(build: Any) -> None:
    table = slots_table([5], PAGE, context=256)
    made, latent = sparse_runner(table, torch.randn(PAGES * PAGE, 1, 48))
    backend, given = build(made), batch(table, [4], [1], Mode.DECODE)
    backend.init_forward_metadata(given)
    with pytest.raises(BackendError, check=naming("layer 0", "selected")):
        backend.forward_decode(torch.randn(1, HEADS, 48), None, None, latent, given)


def test_sparse_prefills_run_absorbed(build: Any) -> None:
    """C1: the other paths attend to every row."""
    made, _ = sparse_runner(slots_table([5], PAGE, context=256), torch.randn(PAGES * PAGE, 1, 48))
    build(made)
    layer = SimpleNamespace(chunked_prefix_cache_threshold=10, disable_chunked_prefix_cache=False)
    given = batch(torch.zeros(2, 512), [0], [4], get_max_chunk_capacity=lambda: 100)
    assert HANDLERS[NAME](layer, given) is Method.MLA


# What the indexer reads


@pytest.mark.parametrize(("mode", "prefixes", "new"), BATCHES)
def test_the_indexer_sees_each_querys_rows(build: Any, mode: Mode, prefixes: list[int], new: list[int]) -> None:
    """SGLang computes scores for the rows of a page table, or for the concatenated rows of all requests."""
    torch.manual_seed(0)
    lengths = [before + more for before, more in zip(prefixes, new, strict=True)]
    table = slots_table(lengths, PAGE, context=256)
    made, _ = sparse_runner(table, torch.randn(PAGES * PAGE, 1, 48))
    backend, given = build(made), batch(table, prefixes, new, mode)
    backend.init_forward_metadata(given)
    metadata = backend.get_indexer_metadata(0, given)
    assert metadata is backend.get_indexer_metadata(1, given), "layers share it"
    seen = [before + number + 1 for before, more in zip(prefixes, new, strict=True) for number in range(more)]
    assert metadata.get_seqlens_expanded().tolist() == seen
    assert metadata.get_seqlens_int32().tolist() == lengths
    assert sum(metadata.get_dsa_extend_len_cpu()) == sum(new)
    for given_lengths in (metadata.get_seqlens_int32(), metadata.get_seqlens_expanded(), metadata.get_page_table_64()):
        assert given_lengths.dtype is torch.int32 and given_lengths.is_contiguous()
    pages = metadata.get_page_table_64()
    if mode is Mode.EXTEND:
        start, end = metadata.get_indexer_kvcache_range()
        owners = [request for request, more in enumerate(new) for _ in range(more)]
        assert metadata.get_token_to_batch_idx().tolist() == owners
        before = [sum(lengths[:request]) for request in owners]
        assert (start.tolist(), (end - start).tolist()) == (before, seen)
        assert metadata.get_indexer_seq_len_cpu().tolist() == metadata.get_indexer_seq_len().tolist() == lengths
        assert metadata.get_logical_page_table().tolist() == pages.tolist()
        scores = torch.randn(sum(new), sum(lengths))
        found = metadata.topk_transform(scores, TOPK, ks=start)
        own = [scores[row, first:][:length] for row, (first, length) in enumerate(zip(before, seen, strict=True))]
        part = metadata.topk_transform(scores[2:5], TOPK, ks=start[2:5], ke_offset=metadata.get_seqlens_expanded()[2:5])
        assert torch.equal(part, found[2:5]) and metadata.attn_metadata.topk_indices_offset is None
    else:
        first = [table[1 + request, 0] // PAGE for request, more in enumerate(new) for _ in range(more)]
        assert pages[:, 0].tolist() == first
        scores = torch.randn(sum(new), pages.shape[1] * PAGE)
        found = metadata.topk_transform(scores, TOPK)
        own = [scores[row, :length] for row, length in enumerate(seen)]
    for positions, visible in zip(found, own, strict=True):
        best = set(visible.topk(min(TOPK, len(visible))).indices.tolist())
        assert set(positions[positions >= 0].tolist()) == best


def test_dense_models_have_no_index(ours: SimpleNamespace) -> None:
    """SGLang's indexer then returns nothing."""
    made, _ = sparse_runner(slots_table([5], PAGE, context=256), torch.randn(PAGES * PAGE, 1, 48))
    del made.model_config.hf_text_config.index_topk
    for role in ("prefill", "decode"):
        setattr(made, f"{role}_attention_backend_str", "attnplug:torch_native")
    assert ours.build.build("attnplug:torch_native", made).get_indexer_metadata(0, None) is None


def test_lengths_are_read_again_inside_a_graph() -> None:
    """B2: a warm-up before the capture leaves nothing behind that the graph would read."""
    table = slots_table([9, 6], 4)
    steps = CapturedGroups([PlannedGroup(Recorder(), PageTable(table, 4))], 4, 12, 64)  # type: ignore[arg-type]
    static = batch(table, [6, 3], [3, 3], Mode.TARGET_VERIFY)
    step = steps.capture(static)
    step.index = IndexerMetadata(step.batches[0].geometry, select)
    steps.refill(step, static)
    assert step.index is None
    found = IndexerMetadata(step.batches[0].geometry, select)
    assert found.get_seqlens_expanded().tolist() == [7, 8, 9, 4, 5, 6]


def test_pages_of_one_row_are_rocms() -> None:
    table = slots_table([9], 4)
    steps = CapturedGroups([PlannedGroup(Recorder(), PageTable(table, 4))], 4, 12, 64)  # type: ignore[arg-type]
    step = steps.capture(batch(table, [8], [1], Mode.DECODE))
    with pytest.raises(BackendError, check=naming("ROCm")):
        IndexerMetadata(step.batches[0].geometry, select).get_page_table_1()


# Refusals


@pytest.fixture
def folder(tmp_path: Path) -> str:
    config = {**TINY_CONFIGS["deepseek_v32"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_an_index_over_groups_of_rows_is_refused() -> None:
    with pytest.raises(BackendError, check=naming("index_kpool", "--attention-backend dsa")):
        indexer_dims(SimpleNamespace(**INDEX, index_kpool=4))
    assert indexer_dims(SimpleNamespace()) is None


def test_where_sglangs_indexer_does_not_run_is_refused(folder: str) -> None:
    with pytest.raises(Refused, check=naming("--device", "indexer")):
        check_server_args(arguments(folder, attention_backend=NAME))


def test_trees_are_refused_in_the_front_end_and_when_backends_are_built(folder: str, build: Any) -> None:
    given = {**CHAIN, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4}
    named = naming("--speculative-eagle-topk", "chains")
    with pytest.raises(Refused, check=named):
        check_server_args(arguments(folder, attention_backend=NAME, device="cuda", dtype="bfloat16", **given))
    made, _ = sparse_runner(slots_table([5], PAGE, context=256), torch.randn(PAGES * PAGE, 1, 48), arguments=given)
    with pytest.raises(Refused, check=named):
        build(made)


def test_a_sparse_model_is_as_sglang_serves_it(folder: str) -> None:
    fitted = fit(Problem(load_model(folder, load_registry()), device="cuda", sm=90))
    assert fitted.page_size == PAGE and fitted.model is not None and not fitted.model.index_layers
    assert not HOST.refusals(Problem(fitted.model, device="cuda", kv_dtype=FP8_DS_MLA))
    assert fitted.extend_path in (None, ExtendPath.ABSORBED)
    (reason,) = HOST.refusals(Problem(load_model(folder, load_registry()), device="cpu"))
    assert (reason.code, reason.value, reason.setting) == (RefusalCode.FEATURE, Feature.SPARSE, Setting.DEVICE)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "bfloat16", "auto"])
def test_both_kinds_of_cache_are_accepted(folder: str, dtype: str) -> None:
    given = {"device": "cuda", "dtype": "bfloat16", "page_size": 64, "disable_cuda_graph": True}
    assert check_server_args(arguments(folder, attention_backend=NAME, kv_cache_dtype=dtype, **given)) is None


def test_dense_models_have_no_rows_with_scales() -> None:
    (reason,) = HOST.refusals(Problem(load_model("tiny:deepseek_v3"), device="cuda", kv_dtype=FP8_DS_MLA))
    assert (reason.code, reason.setting) == (RefusalCode.KV_DTYPE, Setting.KV_DTYPE)
    assert DType.FLOAT8_E4M3 in reason.allowed
