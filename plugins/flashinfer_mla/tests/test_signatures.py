"""Every call of kernels.py to FlashInfer matches FlashInfer's signature, in each version that the plugin claims.

Signatures are taken from FlashInfer itself. Nothing is computed, so nothing here proves that a kernel is right.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attnplug_tune.raw_calls import RawScene
from torch import Tensor

from attnplug import AttentionKind, DType, LayerSpec, MLAPool, RaggedCall
from attnplug.host import KVPools
from attnplug_flashinfer_mla.kernels import FlashInferMLALibrary, MLAGraphBuffers
from attnplug_flashinfer_mla.lengths import CallLengths
from attnplug_flashinfer_mla.raw import calls
from recorded_library import SHAPE, cache, int32, make, paged_call, planned_decode, queries

FLAT = {"qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "cum_seq_lens_q", "block_tables", "seq_lens", "max_q_len"}
SEPARATE = {"q_nope", "q_pe", "ckv_cache", "kpe_cache", "kv_len", "page_table"}


# ---- the paged wrapper ----


@pytest.mark.parametrize("causal", [False, True])
def test_a_paged_plan_is_taken_with_everything_the_call_has(library: FlashInferMLALibrary, causal: bool) -> None:
    """Host lengths are passed directly, so planning copies nothing from the device."""
    call = paged_call(causal=causal)
    make("fa2").paged(decode=not causal).plan(call)
    assert library.paged.last("__init__")["backend"] == "fa2"
    given = library.paged.last("plan")
    arrays = given if library.metadata is None else vars(given["metadata"])
    assert arrays["qo_indptr"] is call.lengths.qo_indptr
    assert arrays["kv_indptr"] is call.lengths.kv_indptr
    assert arrays["kv_indices"] is call.kv_indices
    assert arrays["kv_len_arr"] is call.lengths.kv_lens
    wanted = {
        "num_heads": SHAPE.heads,
        "head_dim_ckv": 512,
        "head_dim_kpe": 64,
        "page_size": SHAPE.page_size,
        "causal": causal,
        "sm_scale": SHAPE.scale,
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.bfloat16,
    }
    assert {name: given[name] for name in wanted} == wanted


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_a_paged_run_is_taken(library: FlashInferMLALibrary, kv_dtype: torch.dtype, with_lse: bool) -> None:
    """C4: log-sum-exp is requested in natural logarithms. Only an fp8 cache is passed with its scales."""
    if kv_dtype is torch.float8_e4m3fn and not library.reads_fp8:
        pytest.skip(f"flashinfer {library.version} reads no fp8 cache, and the plugin refuses one")
    kernel = planned_decode(make(kv_dtype=kv_dtype))
    rows = cache(kv_dtype)
    q, out, lse = queries(2)
    kernel.run(q, None, rows, out, lse if with_lse else None)
    assert library.paged.last("plan")["kv_data_type"] is kv_dtype
    given = library.paged.last("run")
    assert given["out"] is out
    assert given["return_lse_base_on_e"] is True
    if with_lse:
        assert given["lse"] is lse and given["return_lse"] is True
    scales = {name: value for name, value in given.items() if name.endswith("_scale")}
    assert scales == ({"ckv_scale": 0.5, "kpe_scale": 0.5} if kv_dtype is torch.float8_e4m3fn else {})


@pytest.mark.parametrize("with_lse", [False, True])
def test_a_run_asks_for_the_log_sum_exp_that_its_plan_announced(library: FlashInferMLALibrary, with_lse: bool) -> None:
    """After a plan that announces the log-sum-exp, every run requests it. Other runs request it only if needed."""
    kernel = planned_decode(make())
    q, out, lse = queries(2)
    kernel.run(q, None, cache(), out, lse if with_lse else None)
    given = library.paged.last("run")
    if library.metadata is None:
        assert given["return_lse"] is with_lse
    else:
        assert library.paged.last("plan")["lse_mode"] == "basee"
        assert given["return_lse"] is True
        assert (given["lse"].shape, given["lse"].dtype) == (lse.shape, torch.float32)


def query_of(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Both parts of q, however the version takes them."""
    return given["query"] if "query" in given else (given["q_nope"], given["q_pe"])


def test_a_query_in_parts_is_handed_on_as_it_is(library: FlashInferMLALibrary) -> None:
    """Parts are neither joined nor copied, even with heads before rows or as a slice of a wider tensor."""
    kernel = planned_decode(make())
    _, out, lse = queries(2)
    latent = torch.zeros(SHAPE.heads, 2, 512, dtype=SHAPE.dtype).transpose(0, 1)
    rope = torch.zeros(2, SHAPE.heads, 192, dtype=SHAPE.dtype)[..., 128:]
    kernel.run(latent, rope, cache(), out, lse)
    found = query_of(library.paged.last("run"))
    assert found[0] is latent and found[1] is rope
    if library.metadata is not None:
        assert library.paged.last("plan")["query_layout"] == "split"


def test_a_query_that_is_joined_is_parted_where_it_lies(library: FlashInferMLALibrary) -> None:
    kernel = planned_decode(make())
    q, out, lse = queries(2)
    kernel.run(q, None, cache(), out, lse)
    latent, rope = query_of(library.paged.last("run"))
    assert (latent.shape[2], rope.shape[2]) == (512, 64)
    assert latent.data_ptr() == q.data_ptr() and rope.data_ptr() == q[..., 512:].data_ptr()


@pytest.mark.parametrize("wrong", ["column", "stride", "address"])
def test_a_part_that_the_kernels_cannot_read_is_copied(library: FlashInferMLALibrary, wrong: str) -> None:
    """Kernels copy 16 bytes at a time and ignore the stride of columns."""
    kernel = planned_decode(make())
    _, out, lse = queries(2)
    numbers = torch.arange(2 * SHAPE.heads * 128, dtype=SHAPE.dtype).view(2, SHAPE.heads, 128)
    odd = numbers.flatten()[: 2 * SHAPE.heads * 68].view(2, SHAPE.heads, 68)[..., :64]
    rope = {"column": numbers[..., ::2], "stride": odd, "address": numbers[..., 1:65]}[wrong]
    kernel.run(torch.zeros(2, SHAPE.heads, 512, dtype=SHAPE.dtype), rope, cache(), out, lse)
    found = query_of(library.paged.last("run"))[1]
    assert found is not rope and found.is_contiguous() and torch.equal(found, rope)


def test_a_captured_call_reserves_its_buffers(library: FlashInferMLALibrary) -> None:
    lengths = CallLengths(int32(0, 1, 2), int32(0, 2, 3), int32(70, 5))
    buffers = MLAGraphBuffers(lengths, torch.zeros(8, dtype=torch.int32))
    make().paged(decode=True, graph=buffers).plan(paged_call(causal=False))
    given = library.paged.last("__init__")
    assert given["use_cuda_graph"] is True
    assert given["qo_indptr"] is lengths.qo_indptr
    assert given["kv_indptr"] is lengths.kv_indptr
    assert given["kv_indices"] is buffers.kv_indices
    assert given["kv_len_arr"] is lengths.kv_lens


# ---- the ragged wrapper ----


@pytest.mark.parametrize("causal", [False, True])
def test_a_ragged_plan_is_taken(library: FlashInferMLALibrary, causal: bool) -> None:
    call = RaggedCall.of(0, [3, 2], [7, 2], causal=causal, device=torch.device("cpu"))
    make().ragged().plan(call)
    given = library.ragged.last("plan")
    assert given.pop("qo_indptr").tolist() == [0, 3, 5]
    assert given.pop("kv_indptr").tolist() == [0, 7, 9]
    assert given == {
        "num_qo_heads": SHAPE.heads,
        "num_kv_heads": SHAPE.heads,
        "head_dim_qk": 192,
        "head_dim_vo": 128,
        "causal": causal,
        "sm_scale": SHAPE.scale,
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.bfloat16,
    }


@pytest.mark.parametrize("with_lse", [False, True])
def test_a_ragged_run_is_taken(library: FlashInferMLALibrary, with_lse: bool) -> None:
    """C4: a library without natural logarithms returns base 2, which is converted."""
    kernel = make().ragged()
    kernel.plan(RaggedCall.of(0, [3], [7], causal=True, device=torch.device("cpu")))
    q, k = torch.zeros(3, SHAPE.heads, 192), torch.zeros(7, SHAPE.heads, 192)
    v, out = torch.zeros(7, SHAPE.heads, 128), torch.zeros(3, SHAPE.heads, 128)
    lse = torch.ones(3, SHAPE.heads)
    kernel.run(q, k, v, out, lse if with_lse else None)
    given = library.ragged.last("run")
    assert given["q"] is q and given["k"] is k and given["v"] is v and given["out"] is out
    assert "args" not in given  # further arguments by position go to a kernel of the user's own
    if not with_lse:
        assert "lse" not in given and "return_lse" not in given
        return
    assert given["lse"] is lse and given["return_lse"] is True
    if library.ragged_natural_log:
        assert given["lse_base"] == "ln"
        assert lse.unique().tolist() == [1.0]
    else:
        torch.testing.assert_close(lse, torch.full_like(lse, 2.0).log())


# ---- both ----


def test_nothing_deprecated_is_used(library: FlashInferMLALibrary) -> None:
    """Newer versions warn of arrays given flat, of q and cache in pieces, and of arguments by position."""
    if library.metadata is None:
        pytest.skip(f"flashinfer {library.version} has no other way")
    for kernel in ("fa3", "cutlass"):
        paged = planned_decode(make(kernel))
        q, out, _ = queries(2)
        paged.run(q, None, cache(), out, None)
    calls = [call for call in library.paged.calls if call.method != "__init__"]
    assert [call.method for call in calls] == ["plan", "run", "plan", "run"]
    for call in calls:
        assert call.positional == 0
        assert not (FLAT | SEPARATE) & set(call.given)
        assert {"metadata"} <= set(call.given) if call.method == "plan" else {"query", "kv_cache"} <= set(call.given)
        if call.method == "plan":
            assert isinstance(call.given["metadata"], library.metadata)


def test_a_raw_call_is_one_that_the_library_takes(library: FlashInferMLALibrary) -> None:
    """``attnplug bench --against raw`` measures such calls."""
    layer = LayerSpec(0, AttentionKind.MLA, 128, 128, 192, 128, SHAPE.scale, mla=SHAPE.dims)
    pool = MLAPool([layer], num_pages=4, page_size=64, dtype=DType.BFLOAT16, device="cpu")
    table = torch.tensor([[3, 1], [2, -1]], dtype=torch.int32)
    raw = calls(RawScene((layer,), KVPools(mla=pool), 64, table, (70, 5), 1, False, queries(2)[0], True))
    assert raw is not None
    given = library.paged.last("plan")
    assert given["kv_indices"].tolist() == [3, 1, 2] and given["kv_indptr"].tolist() == [0, 2, 3]
