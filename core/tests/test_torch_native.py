"""torch_native against float64: random batches, scattered pages, and NaN in everything that must not be read."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug import (
    AttentionKind,
    BackendContext,
    BackendError,
    DType,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    KVPools,
    LayerSpec,
    Limits,
    MHAPool,
    MLADims,
    MLAPool,
    ModelSpec,
    PlanError,
    Role,
    WorkspaceOwner,
)
from attnplug.kv import torch_dtype
from attnplug.reference import attention_float64
from attnplug.torch_native.backend import TorchNativeBackend

NAN = float("nan")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]
# Measured against float64 as the largest difference over the largest magnitude (1 at least).
TOLERANCE = {DType.FLOAT32: 2e-6, DType.FLOAT16: 5e-3, DType.BFLOAT16: 2e-2}


@dataclass(frozen=True)
class Case:
    """One batch on one layer. Lengths are (rows in the cache before, new tokens) of each request."""

    lengths: tuple[tuple[int, int], ...]
    mode: ForwardMode = ForwardMode.EXTEND
    page_size: int = 16
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    v_head_dim: int = 16
    mla: MLADims | None = None
    window: int | None = None
    cap: float | None = None
    dtype: DType = DType.FLOAT32
    kv_dtype: DType | None = None
    layout: str = "token_major"
    pages: str = "permuted"
    padding: int = 0
    cpu_lengths: bool = True
    lse: bool = True
    seed: int = 0

    @property
    def layer(self) -> LayerSpec:
        if self.mla is not None:
            head_dim = self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
            return LayerSpec(3, AttentionKind.MLA, self.heads, self.heads, head_dim, self.v_head_dim, head_dim**-0.5,
                             self.window, self.cap, mla=self.mla)  # fmt: skip
        return LayerSpec(3, AttentionKind.MHA, self.heads, self.kv_heads, self.head_dim, self.v_head_dim,
                         self.head_dim**-0.5, self.window, self.cap)  # fmt: skip


class Stage:
    """A backend with a poisoned pool, the rows of its requests written where a page table of the case's kind says."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device, self.layer = case, torch.device(device), case.layer
        self.dtype = torch_dtype(case.dtype)
        kv_dtype = case.kv_dtype or case.dtype
        self.random = torch.Generator().manual_seed(case.seed)
        self.totals = [before + new for before, new in case.lengths]
        self.width = max(1, *(-(-total // case.page_size) for total in self.totals)) + 1
        pages = len(case.lengths) * self.width + 3
        self.page_table = self._page_table(pages)
        self.pools = self._pools(pages, kv_dtype)
        self.backend = TorchNativeBackend(
            BackendContext(
                name="torch_native",
                roles=frozenset({Role.PREFILL, Role.DECODE}),
                model=ModelSpec("test", "test", (self.layer,), 4096),
                device=self.device,
                dtype=self.dtype,
                kv_dtype=kv_dtype,
                page_size=case.page_size,
                limits=Limits(16, 4096, 4096),
                pools=self.pools,
                workspace=WorkspaceOwner(),
            )
        )
        key_dim = self.layer.head_dim if case.mla is None else case.mla.row_dim
        value_dim = case.v_head_dim if case.mla is None else case.mla.kv_lora_rank
        kv_heads = case.kv_heads if case.mla is None else 1
        shrink = 1.0 if case.mla is None else (self.layer.head_dim / key_dim) ** 0.5
        tokens = sum(new for _, new in case.lengths)
        self.q = (self._normal(tokens, case.heads, key_dim) * shrink).to(self.dtype)
        self.keys = [self._normal(total, kv_heads, key_dim) for total in self.totals]
        self.values = (
            [keys[..., :value_dim] for keys in self.keys]
            if case.mla is not None
            else [self._normal(total, kv_heads, value_dim) for total in self.totals]
        )
        self._write_prefixes()

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def _page_table(self, pages: int) -> torch.Tensor:
        """``[requests, width]``; what lies behind a request's last page leads outside the pool."""
        requests, width = len(self.totals), self.width
        order = {
            "permuted": torch.randperm(pages, generator=self.random)[: requests * width].view(requests, width),
            "interleaved": torch.arange(requests * width).view(width, requests).T.contiguous(),
            "descending": torch.arange(requests * width).flip(0).view(requests, width),
        }[self.case.pages]
        table = order.int()
        for request, total in enumerate(self.totals):
            table[request, -(-total // self.case.page_size) :] = 1 << 30
        return table

    def _pools(self, pages: int, kv_dtype: DType) -> KVPools:
        shape = {"num_pages": pages, "page_size": self.case.page_size, "dtype": kv_dtype, "device": self.device}
        if self.case.mla is not None:
            pool = MLAPool([self.layer], **shape)
            pool.rows(3).copy_(torch.tensor(NAN))
            return KVPools(mla=pool)
        mha = MHAPool([self.layer], layout=self.case.layout, **shape)
        mha.keys(3).copy_(torch.tensor(NAN))
        mha.values(3).copy_(torch.tensor(NAN))
        return KVPools(mha=mha)

    def _write_prefixes(self) -> None:
        """By hand, row by row, straight into the memory: nothing of the code under test decides where."""
        stores = (
            [(self.pools.mla.rows(3), self.keys)]
            if self.pools.mla is not None
            else [(self.pools.mha.keys(3), self.keys), (self.pools.mha.values(3), self.values)]
        )
        for memory, rows in stores:
            for request, (before, _) in enumerate(self.case.lengths):
                for position in range(before):
                    page = self.page_table[request, position // self.case.page_size]
                    memory[page, position % self.case.page_size] = rows[request][position].to(
                        memory.device, memory.dtype
                    )

    def batch(self) -> ForwardBatch:
        new = torch.tensor([new for _, new in self.case.lengths], dtype=torch.int32)
        lens = torch.tensor(self.totals, dtype=torch.int32)
        decode = self.case.mode is ForwardMode.DECODE
        mirror = self.case.cpu_lengths
        return ForwardBatch(
            forward_mode=self.case.mode,
            input_ids=torch.zeros(int(new.sum()), dtype=torch.int64, device=self.device),
            page_table=self.page_table.to(self.device),
            seq_lens=lens.to(self.device),
            seq_lens_cpu=lens if mirror else None,
            extend_seq_lens=None if decode else new.to(self.device),
            extend_seq_lens_cpu=new if mirror and not decode else None,
        )

    def new_rows(self, of: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([rows[before:] for rows, (before, _) in zip(of, self.case.lengths, strict=True)])

    def run(self, batch: ForwardBatch | None = None, **arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Plan and run; returns the output and, if the case asks, its log-sum-exp, padding rows included."""
        batch = batch or self.batch()
        batch.plan = batch.plan or self.backend.init_forward_metadata(batch)
        q, k = self.q, self.new_rows(self.keys)
        v = None if self.case.mla is not None else self.new_rows(self.values)
        if self.case.padding:
            q, k, v = (None if t is None else _padded(t, self.case.padding) for t in (q, k, v))
        lse = torch.full(q.shape[:2], NAN, device=self.device) if self.case.lse else None
        forward = self.backend.forward_decode if self.case.mode.is_decode else self.backend.forward_extend
        q, k, v = (None if t is None else t.to(self.device) for t in (q, k, v))
        out = forward(q, k, v, self.layer, batch, extras=ForwardExtras(lse=lse), **arguments)
        return out.cpu(), None if lse is None else lse.cpu()

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        stored = torch_dtype(self.case.kv_dtype or self.case.dtype)
        results = [
            attention_float64(
                queries,
                keys.to(stored),
                values.to(stored),
                scale=self.layer.scale,
                first_position=before,
                window=self.case.window,
                cap=self.case.cap,
            )
            for queries, keys, values, (before, _) in zip(
                self.q.split([new for _, new in self.case.lengths]),
                self.keys,
                self.values,
                self.case.lengths,
                strict=True,
            )
        ]
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([tensor, torch.full((rows, *tensor.shape[1:]), NAN, dtype=tensor.dtype)])


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """NaN if anything found is NaN, so that it fails every comparison."""
    return float((found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))


def check(case: Case, device: str = "cpu") -> None:
    stage = Stage(case, device)
    out, lse = stage.run()
    wanted, wanted_lse = stage.wanted()
    real = wanted.shape[0]
    if real:
        assert error(out[:real], wanted) <= TOLERANCE[case.dtype]
        assert lse is None or error(lse[:real], wanted_lse) <= TOLERANCE[case.dtype]
    assert (out[real:] == 0).all()
    assert out.dtype is stage.dtype


@st.composite
def cases(draw, mla: bool) -> Case:
    mode = draw(st.sampled_from([m for m in ForwardMode if m is not ForwardMode.IDLE]))
    before = st.one_of(st.just(0), st.integers(1, 70))
    new = st.just(1) if mode is ForwardMode.DECODE else st.one_of(st.just(1), st.integers(1, 25))
    lengths = tuple(draw(st.lists(st.tuples(before, new), min_size=1, max_size=5)))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Case(
        lengths=lengths,
        mode=mode,
        page_size=draw(st.sampled_from([1, 2, 5, 16, 64])),
        heads=kv_heads * draw(st.sampled_from([1, 2, 4])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 64])),
        v_head_dim=draw(st.sampled_from([8, 16, 24, 64])),
        mla=draw(st.sampled_from([MLADims(32, 16, 8), MLADims(64, 8, 0), MLADims(512, 128, 64)])) if mla else None,
        window=draw(st.sampled_from([None, None, 1, 7, 1000])),
        cap=draw(st.sampled_from([None, None, 5.0, 50.0])),
        dtype=draw(st.sampled_from([DType.FLOAT32, DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16])),
        layout=draw(st.sampled_from(["token_major", "head_major"])),
        pages=draw(st.sampled_from(["permuted", "interleaved", "descending"])),
        padding=draw(st.sampled_from([0, 0, 1, 5])),
        cpu_lengths=draw(st.booleans()),
        lse=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 16)),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_random_batches_of_mha_and_gqa_match_float64(device):
    """C4: log-sum-exp is natural, float32, [tokens, heads]. B5: padding rows give zeros."""

    @settings(max_examples=120)
    @given(cases(mla=False))
    def holds(case):
        check(case, device)

    holds()


@pytest.mark.parametrize("device", DEVICES)
def test_random_batches_of_mla_match_float64(device):
    """C4, absorbed MLA."""

    @settings(max_examples=60)
    @given(cases(mla=True))
    def holds(case):
        check(case, device)

    holds()


PAGE_EDGES = [
    ("page_size_1", ((2, 3), (4, 1)), 1),
    ("zero_prefix_exact_page", ((0, 16),), 16),
    ("zero_prefix_page_edges", ((0, 15), (0, 16), (0, 17)), 16),
    ("prefix_exact_page", ((16, 2),), 16),
    ("total_exact_page", ((8, 8),), 16),
    ("cross_page_boundary", ((15, 2),), 16),
    ("ragged_page_boundary", ((0, 15), (8, 8), (16, 1)), 16),
    ("page32_cross_boundary", ((31, 2),), 32),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("lengths", "page_size"), [case[1:] for case in PAGE_EDGES], ids=[case[0] for case in PAGE_EDGES]
)
@pytest.mark.parametrize("pages", ["permuted", "interleaved", "descending"])
@pytest.mark.parametrize("lse", [True, False])
def test_page_edges(lengths, page_size, pages, lse, device):
    check(Case(lengths, page_size=page_size, pages=pages, lse=lse), device)


@pytest.mark.parametrize("device", DEVICES)
def test_decode_at_page_boundaries(device):
    check(Case(((14, 1), (15, 1), (16, 1)), ForwardMode.DECODE), device)


@pytest.mark.parametrize("device", DEVICES)
def test_skewed_decode_batch_falls_into_groups(device):
    """One long and many short requests: padding all to the longest would read fifty times too much."""
    case = Case(((5000, 1), *(((3, 1),) * 30), (4000, 1)), ForwardMode.DECODE, heads=2, kv_heads=1, head_dim=8)
    stage = Stage(case, device)
    batch = stage.batch()
    batch.plan = stage.backend.init_forward_metadata(batch)
    assert len(batch.plan.metadata.groups) == 2
    check(case, device)


@pytest.mark.parametrize("device", DEVICES)
def test_long_prefill_is_cut_into_tiles(device, monkeypatch):
    """Scores never take more than a tile's memory; the result does not know."""
    from attnplug.torch_native import attention

    monkeypatch.setattr(attention, "_TILE_SCORES", 2000)
    for lse in (True, False):
        check(Case(((100, 90), (0, 61)), heads=4, kv_heads=2, lse=lse), device)
        check(Case(((100, 90),), heads=4, kv_heads=2, window=9, lse=lse), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mla", [None, MLADims(64, 16, 8)])
def test_fp8_cache_is_read_with_its_rounding(device, mla):
    check(Case(((30, 5), (0, 17)), dtype=DType.BFLOAT16, kv_dtype=DType.FLOAT8_E4M3, mla=mla), device)


def test_new_rows_are_written_where_the_page_table_says_and_nowhere_else():
    case = Case(((15, 4), (0, 3)), padding=2)
    stage = Stage(case, "cpu")
    stage.run()
    memory = stage.pools.mha.keys(3)
    written = torch.zeros(memory.shape[:2], dtype=torch.bool)
    for request, total in enumerate(stage.totals):
        for position in range(total):
            page, offset = stage.page_table[request, position // 16], position % 16
            assert torch.equal(memory[page, offset], stage.keys[request][position])
            written[page, offset] = True
    assert memory[~written].isnan().all(), "padding rows and other pages stay as they were (B5)"


def test_rows_already_in_the_cache_need_not_be_written_again():
    stage = Stage(Case(((15, 4), (0, 3))), "cpu")
    first, _ = stage.run()
    stage.keys = [torch.full_like(keys, NAN) for keys in stage.keys]
    second, _ = stage.run(save_kv_cache=False)
    assert torch.equal(first, second)


def test_several_layers_share_one_plan():
    stage = Stage(Case(((5, 3), (0, 2))), "cpu")
    batch = stage.batch()
    batch.plan = stage.backend.init_forward_metadata(batch)
    assert torch.equal(stage.run(batch)[0], stage.run(batch)[0])


def test_idle_batch_gives_zeros_for_its_padding():
    """B5: an idle rank only pads."""
    stage = Stage(Case(((0, 1),)), "cpu")
    batch = replace_batch(stage.batch(), ForwardMode.IDLE, requests=0)
    batch.plan = stage.backend.init_forward_metadata(batch)
    out = stage.backend.forward_extend(stage.q, None, None, stage.layer, batch)
    assert out.shape == (1, 4, 16) and (out == 0).all()


def replace_batch(batch: ForwardBatch, mode: ForwardMode, requests: int) -> ForwardBatch:
    return ForwardBatch(mode, batch.input_ids[:0], batch.page_table[:requests], batch.seq_lens[:requests])


def test_request_without_new_tokens_takes_no_part():
    stage = Stage(Case(((5, 3), (7, 0), (0, 2))), "cpu")
    out, _ = stage.run()
    wanted, _ = stage.wanted()
    assert error(out, wanted) <= 2e-6


class TestRefusals:
    def test_fewer_rows_than_planned(self):
        """B5: an error that gives both numbers."""
        stage = Stage(Case(((5, 3),)), "cpu")
        batch = stage.batch()
        batch.plan = stage.backend.init_forward_metadata(batch)
        stage.q = stage.q[:2]
        with pytest.raises(PlanError, match=r"2 query rows.*3"):
            stage.run(batch)

    def test_plan_of_another_instance(self):
        """B5"""
        stage, other = Stage(Case(((5, 3),)), "cpu"), Stage(Case(((5, 3),)), "cpu")
        batch = stage.batch()
        batch.plan = other.backend.init_forward_metadata(batch)
        with pytest.raises(PlanError, match="another instance"):
            stage.run(batch)

    def test_batch_whose_mode_changed(self):
        """B5"""
        stage = Stage(Case(((5, 1),), ForwardMode.EXTEND), "cpu")
        batch = stage.batch()
        batch.plan = stage.backend.init_forward_metadata(batch)
        batch.forward_mode = ForwardMode.DECODE
        with pytest.raises(PlanError, match=r"extend.*decode"):
            stage.backend.forward_decode(stage.q, None, None, stage.layer, batch, save_kv_cache=False)

    def test_more_new_tokens_than_rows(self):
        stage = Stage(Case(((0, 3),)), "cpu")
        batch = stage.batch()
        batch.seq_lens_cpu = batch.seq_lens = torch.tensor([2], dtype=torch.int32)
        with pytest.raises(PlanError, match=r"request 0 has 3 new tokens but only 2 rows"):
            stage.backend.init_forward_metadata(batch)

    def test_page_table_too_narrow(self):
        stage = Stage(Case(((40, 3),)), "cpu")
        batch = stage.batch()
        batch.page_table = batch.page_table[:, :2]
        with pytest.raises(PlanError, match=r"43 rows.*2 pages of 16, 32 rows"):
            stage.backend.init_forward_metadata(batch)

    def test_fewer_input_rows_than_new_tokens(self):
        stage = Stage(Case(((0, 3),)), "cpu")
        batch = stage.batch()
        batch.input_ids = batch.input_ids[:2]
        with pytest.raises(PlanError, match=r"2 input rows for 3 new tokens"):
            stage.backend.init_forward_metadata(batch)

    def test_extend_without_its_lengths(self):
        stage = Stage(Case(((0, 3),)), "cpu")
        batch = stage.batch()
        batch.extend_seq_lens = batch.extend_seq_lens_cpu = None
        with pytest.raises(PlanError, match="extend_seq_lens"):
            stage.backend.init_forward_metadata(batch)

    def test_nothing_to_write_must_be_said(self):
        stage = Stage(Case(((0, 3),)), "cpu")
        batch = stage.batch()
        batch.plan = stage.backend.init_forward_metadata(batch)
        with pytest.raises(BackendError, match="save_kv_cache=False"):
            stage.backend.forward_extend(stage.q, None, None, stage.layer, batch)

    def test_lse_of_the_wrong_shape(self):
        stage = Stage(Case(((0, 3),)), "cpu")
        batch = stage.batch()
        batch.plan = stage.backend.init_forward_metadata(batch)
        with pytest.raises(BackendError, match=r"\(3, 5\).*\(3, 4\)"):
            stage.backend.forward_extend(
                stage.q,
                None,
                None,
                stage.layer,
                batch,
                save_kv_cache=False,
                extras=ForwardExtras(lse=torch.zeros(3, 5)),
            )


def test_backend_keeps_nothing_of_a_batch():
    """B5: no backend keeps "the current metadata" on itself."""
    stage = Stage(Case(((5, 3),)), "cpu")
    before = dict(vars(stage.backend))
    stage.run()
    assert vars(stage.backend) == before


def test_two_batches_planned_before_either_runs_do_not_disturb_each_other():
    """B5: the plan belongs to the batch."""
    stage = Stage(Case(((5, 3), (0, 4))), "cpu")
    alone, _ = stage.run()
    first, second = stage.batch().split(1)
    first.plan = stage.backend.init_forward_metadata(first)
    second.plan = stage.backend.init_forward_metadata(second)
    late = stage.backend.forward_extend(stage.q[3:], None, None, stage.layer, second, save_kv_cache=False)
    early = stage.backend.forward_extend(stage.q[:3], None, None, stage.layer, first, save_kv_cache=False)
    torch.testing.assert_close(torch.cat([early, late]), alone, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_planning_copies_nothing_from_the_device_where_the_batch_has_its_lengths():
    stage = Stage(Case(((5, 3), (0, 4))), "cuda")
    batch = stage.batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        batch.plan = stage.backend.init_forward_metadata(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert error(stage.run(batch)[0], stage.wanted()[0]) <= 2e-6


class TestReference:
    """The oracle itself, against torch's own attention in float64 and by hand."""

    def test_matches_torch_in_float64(self):
        torch.manual_seed(0)
        q, k, v = (torch.randn(6, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
        out, _ = attention_float64(q, k, v, scale=0.3, first_position=0)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(out, wanted.transpose(0, 1))

    def test_log_sum_exp_by_hand(self):
        """C4: natural log."""
        q, k = torch.ones(1, 1, 1), torch.tensor([0.0, 1.0, 2.0]).view(3, 1, 1)
        _, lse = attention_float64(q, k, k, scale=1.0, first_position=2)
        assert float(lse) == pytest.approx(2.40760596)

    def test_window_counts_the_query_itself(self):
        v = torch.arange(5.0).view(5, 1, 1)
        out, _ = attention_float64(torch.zeros(1, 1, 1), v * 0, v, scale=1.0, first_position=4, window=2)
        assert float(out) == 3.5

    def test_cap_bounds_the_logits(self):
        q, k = torch.ones(1, 1, 1), torch.tensor([1000.0]).view(1, 1, 1)
        _, lse = attention_float64(q, k, k, scale=1.0, first_position=0, cap=5.0)
        assert float(lse) == pytest.approx(5.0)
