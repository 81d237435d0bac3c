"""Ragged calls of an MLA prefill: from the chunks that vLLM plans, at either end of the range, to rows of attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import BackendError, Claims, ExtendPath, ForwardBatch, Plan, RaggedCall
from attnplug.contract.batch import BackendId
from attnplug.host import KVPools, ModelAttention
from attnplug_vllm.mla_prefill import RaggedPrefill, chunk_calls
from attnplug_vllm.specs import mla_layer
from vllm_stage import metadata

HEADS, WIDTH, VALUE, SCALE = 2, 12, 8, 0.3
LAYER = mla_layer(0, heads=HEADS, scale=SCALE, kv_lora_rank=32, nope=8, rope=4, v_head_dim=VALUE)


def starts_of(lens: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)


def by_index(new: list[int], chunks: list[list[int]]) -> SimpleNamespace:
    """vLLM 0.26: every chunk has all requests, some with no rows."""
    context = None
    if chunks:
        ends = torch.stack([starts_of(lens) for lens in chunks])
        context = SimpleNamespace(seq_lens=torch.tensor(chunks, dtype=torch.int32), cu_seq_lens=ends)
    table = torch.zeros(len(new), 16, dtype=torch.int32)
    return SimpleNamespace(query_start_loc=starts_of(new), chunked_context=context, block_table=table)


def by_chunk(new: list[int], chunks: list[tuple[int, list[int]]]) -> SimpleNamespace:
    """vLLM 0.32: a chunk covers consecutive requests from the first one on; all of them have rows."""
    made = []
    for index, (first, lens) in enumerate(chunks):
        requests = slice(first, first + len(lens))
        made.append(
            SimpleNamespace(
                index=index,
                request_slice=requests,
                seq_lens=torch.tensor(lens, dtype=torch.int32),
                query_start_loc=starts_of(new[requests]),
                cu_seq_lens=starts_of(lens),
            )
        )
    table = torch.zeros(len(new), 16, dtype=torch.int32)
    context = SimpleNamespace(chunks=made) if chunks else None
    return SimpleNamespace(query_start_loc=starts_of(new), chunked_context=context, block_table=table)


class TestCalls:
    """C3: no empty spans."""

    def test_a_prefill_without_context_has_none(self):
        assert chunk_calls(by_index([3, 2], []), [3, 2]) == [] == chunk_calls(by_chunk([3, 2], []), [3, 2])

    def test_all_requests_have_rows(self):
        given = by_index([3, 2], [[16, 9]])
        (one,) = chunk_calls(given, [3, 2])
        assert one.rows is None and (one.call.query_lens, one.call.kv_lens, one.call.causal) == ((3, 2), (16, 9), False)
        assert one.call.query_indptr.tolist() == [0, 3, 5] and one.call.kv_indptr.tolist() == [0, 16, 25]

    @pytest.mark.parametrize(
        ("lens", "rows", "queries"),
        [([16, 9, 0], [0, 1, 2, 3, 4], (3, 2)), ([0, 9, 4], [3, 4, 5], (2, 1)), ([16, 0, 4], [0, 1, 2, 5], (3, 1))],
    )
    def test_requests_without_rows_are_left_out(self, lens, rows, queries):
        (one,) = chunk_calls(by_index([3, 2, 1], [lens]), [3, 2, 1])
        assert torch.arange(6)[one.rows].tolist() == rows
        assert (one.call.query_lens, one.call.kv_lens) == (queries, tuple(n for n in lens if n))
        assert one.call.query_indptr.tolist() == starts_of(list(queries)).tolist()

    def test_chunks_of_some_requests(self):
        first, second = chunk_calls(by_chunk([3, 2, 1], [(0, [16, 4]), (1, [5, 7])]), [3, 2, 1])
        assert first.rows is None and second.rows is None, "vLLM gives the chunk's own queries"
        assert (second.call.query_lens, second.call.kv_lens) == ((2, 1), (5, 7))
        assert [one.call.index for one in (first, second)] == [1, 2], "0 is the call over new tokens"


class Dense:
    """Backend with ``forward_ragged`` in float64 that records its plans."""

    claims = Claims(mla_extend=frozenset({ExtendPath.CHUNKED}))

    def __init__(self) -> None:
        self.backend_id, self.planned, self.plans = BackendId("dense"), [], []

    def init_mha_chunk_metadata(self, forward_batch: ForwardBatch) -> Plan:
        self.planned.append(forward_batch.geometry)
        return Plan.of(self.backend_id, forward_batch.geometry)

    def forward_ragged(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, call: RaggedCall, plan: Any = None, lse: Any = None
    ) -> Tensor:
        call.check(q, k, v)
        self.plans.append(plan)
        out, lses = dense(q, k, v, call.query_lens, call.kv_lens, causal=call.causal, scale=layer.scale)
        if lse is not None:
            lse.copy_(lses)
        return out


def dense(
    q: Tensor, k: Tensor, v: Tensor, queries: Any, rows: Any, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for mine, keys, values in zip(q.split(queries), k.split(rows), v.split(rows), strict=True):
        logits = scale * torch.einsum("qhd,khd->hqk", mine.double(), keys.double())
        if causal:
            hidden = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1 + keys.shape[0] - mine.shape[0])
            logits = logits.masked_fill(hidden, float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1), values.double()).float())
        lses.append(logits.logsumexp(-1).T.float())
    return torch.cat(outs), torch.cat(lses)


def prefill_of(backend: Any) -> RaggedPrefill:
    attention = ModelAttention(backend, KVPools())
    group = SimpleNamespace(model=SimpleNamespace(layers=(LAYER,)), page_size=16, ready=lambda: attention)
    return RaggedPrefill(group)


def rows(count: int, width: int) -> Tensor:
    return torch.randn(count, HEADS, width)


class TestRuns:
    def test_new_tokens_are_causal_and_the_log_sum_exp_has_heads_first(self):
        """C4: vLLM's is ``[heads, tokens]``, natural log too, and its merge takes it for a plain block of memory."""
        prefill = prefill_of(Dense())
        prefill.prepare(by_index([4, 2], []), metadata([(0, 1), (16, 4), (9, 2)]))
        q, k, v = rows(6, WIDTH), rows(6, WIDTH), rows(6, VALUE)
        out, lse = prefill.new_tokens(q, k, v, True)
        expected, expected_lse = dense(q, k, v, (4, 2), (4, 2), causal=True, scale=SCALE)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse.T) and lse.is_contiguous()
        assert prefill.new_tokens(q, k, v, False)[1] is None

    def test_a_backend_that_returns_no_tensor_is_named(self):
        backend = Dense()
        backend.forward_ragged = lambda q, k, v, layer, call, plan=None, lse=None: (q, lse)
        prefill = prefill_of(backend)
        prefill.prepare(by_index([4, 2], []), metadata([(0, 4), (0, 2)]))
        with pytest.raises(BackendError, match=r"forward_ragged of backend .* a tuple of 2"):
            prefill.new_tokens(rows(6, WIDTH), rows(6, WIDTH), rows(6, VALUE), True)

    def test_a_chunk_in_which_some_requests_have_no_rows(self):
        prefill = prefill_of(Dense())
        prefill.prepare(by_index([4, 2, 1], [[16, 0, 3]]), metadata([(16, 4), (0, 2), (3, 1)]))
        q, k, v = rows(7, WIDTH), rows(19, WIDTH), rows(19, VALUE)
        out, lse = prefill.context_chunk(0, q, k, v)
        live = [0, 1, 2, 3, 6]
        expected, expected_lse = dense(q[live], k, v, (4, 1), (16, 3), causal=False, scale=SCALE)
        assert torch.equal(out[live], expected) and torch.equal(lse[:, live], expected_lse.T)
        assert (out[4:6] == 0).all() and (lse[:, 4:6] == float("-inf")).all()

    def test_a_chunk_with_its_own_queries(self):
        prefill = prefill_of(Dense())
        prefill.prepare(by_chunk([4, 2, 1], [(0, [16]), (1, [5, 3])]), metadata([(16, 4), (5, 2), (3, 1)]))
        q, k, v = rows(3, WIDTH), rows(8, WIDTH), rows(8, VALUE)
        out, lse = prefill.context_chunk(1, q, k, v)
        expected, expected_lse = dense(q, k, v, (2, 1), (5, 3), causal=False, scale=SCALE)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse.T)

    def test_a_backend_that_plans_gets_all_calls_of_the_step_once(self):
        """C2, A8: the hook is called once for all calls. It need not accept arguments that it does not use."""
        backend = Dense()
        prefill = prefill_of(backend)
        prefill.prepare(by_chunk([4, 2], [(0, [16]), (1, [5])]), metadata([(7, 1), (16, 4), (5, 2)]))
        (geometry,) = backend.planned
        assert [call.index for call in geometry.calls] == [0, 1, 2] and geometry.rows == 6
        assert geometry.seq_lens.tolist() == [20, 7], "the decoding request is not part of it"
        prefill.new_tokens(rows(6, WIDTH), rows(6, WIDTH), rows(6, VALUE), True)
        prefill.context_chunk(1, rows(2, WIDTH), rows(5, WIDTH), rows(5, VALUE))
        assert backend.plans[0] is backend.plans[1] is not None

    def test_requests_that_pad_a_batch_are_left_out(self):
        prefill = prefill_of(Dense())
        prefill.prepare(by_index([4, 2, 0], []), metadata([(0, 4), (0, 2)], padding=(1, 0)))
        out, _ = prefill.new_tokens(rows(6, WIDTH), rows(6, WIDTH), rows(6, VALUE), False)
        assert out.shape == (6, HEADS, VALUE)
