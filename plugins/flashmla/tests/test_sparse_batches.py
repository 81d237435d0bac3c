"""Sparse batches against float64: planning through the reference kernels on a CPU, FlashMLA itself on a GPU.

The conformance kit proves the usual batches on a CPU: here are others.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from attnplug import DType, ForwardExtras, ForwardMode
from attnplug.sparse import SelectedPositions, SelectedSlots
from attnplug_conformance.arithmetic import relative_error
from attnplug_flashmla import sparse_backend
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.sparse_scene import SparseStage
from reference_sparse import DECODE, EXTEND, PACKED, ROWS, VERIFY, ReferenceSparse, build, case

INF = float("inf")
on_every_device = pytest.mark.parametrize("device", DEVICES)
of_every_type = pytest.mark.parametrize("kv_dtype", [ROWS, PACKED])
BATCHES: dict[str, dict[str, Any]] = {
    "decode": {"lengths": ((140, 1), (7, 1), (290, 1), (8, 1), (0, 1)), "mode": DECODE},
    "verify": {"lengths": ((130, 4), (6, 4), (47, 4)), "mode": VERIFY},
    "extend": {"lengths": ((150, 5), (3, 4), (16, 7)), "mode": EXTEND},
    "extend without prefixes": {"lengths": ((0, 12), (0, 5), (0, 2)), "mode": EXTEND},
    "mixed": {"lengths": ((133, 1), (0, 11), (64, 1), (2, 1)), "mode": ForwardMode.MIXED},
    "padding": {"lengths": ((140, 1), (7, 1)), "mode": DECODE, "padding": 3},
    "no lengths on the host": {"lengths": ((150, 3), (3, 4)), "mode": EXTEND, "exact": False},
    "a choice of 130": {"lengths": ((260, 3), (20, 3)), "mode": VERIFY, "topk": 130},
}
OTHERS = ["mixed", "no lengths on the host", "a choice of 130"]


def scene(name: str, device: str, kv_dtype: DType = ROWS, **changes: Any) -> SparseStage:
    return SparseStage(case(kv_dtype=kv_dtype, **{**BATCHES[name], **changes}), device, build)


def by_position(stage: SparseStage) -> SelectedPositions:
    """A choice that another backend may have made."""
    chance = random.Random(0)
    return stage.by_position([chance.sample(seen, min(8, len(seen))) for _, seen in stage.visible()])


class TestBatches:
    @of_every_type
    @pytest.mark.parametrize(
        ("name", "device"),
        [
            *((name, "cpu") for name in OTHERS),
            *(pytest.param(name, "cuda", marks=DEVICES[1].marks) for name in BATCHES),
        ],
    )
    @pytest.mark.sample(7)
    def test_every_kind_of_batch(self, name, device, kv_dtype):
        """A10, C4; NaN in every row that must not be read."""
        scene(name, device, kv_dtype).check()

    @on_every_device
    @pytest.mark.parametrize("heads", [1, 64, 96, 128])
    @pytest.mark.sample(2)
    def test_heads_are_padded_to_what_the_kernels_take(self, heads, device):
        for kv_dtype in (ROWS, PACKED):
            stage = scene("verify", device, kv_dtype, heads=heads)
            stage.check_attends(stage.planned(), by_position(stage))

    @on_every_device
    @of_every_type
    @pytest.mark.parametrize("heads", [16, 128])
    def test_queries_in_parts(self, heads, kv_dtype, device):
        """The same numbers as joined, with the log-sum-exp."""
        stage = scene("verify", device, kv_dtype, heads=heads)
        batch, selected, rank = stage.planned(), by_position(stage), stage.layer.mla.kv_lora_rank
        q, k, _ = stage.inputs(batch.num_tokens)
        wanted, found = (torch.zeros(q.shape[:2], device=device) for _ in range(2))
        extras = ForwardExtras(lse=wanted, selected=selected)
        plain = stage.forward(batch, (q, k, None), extras=extras)
        extras = ForwardExtras(lse=found, selected=selected, q_rope=q[..., rank:])
        out = stage.forward(batch, (q[..., :rank], k, None), extras=extras)
        assert torch.equal(out, plain) and torch.equal(found, wanted)

    @pytest.mark.parametrize("device", DEVICES[1:])
    def test_keys_in_fp8_choose_rows_whose_scores_are_among_the_best(self, device):
        scene("decode", device, PACKED, index_dtype=DType.FLOAT8_E4M3).check()

    @on_every_device
    @pytest.mark.parametrize("page_size", [128, 192])
    @pytest.mark.sample(1)
    def test_a_manager_with_larger_pages(self, page_size, device):
        scene("decode", device, page_size=page_size).check()
        scene("decode", device, PACKED, page_size=page_size).check()

    @on_every_device
    @of_every_type
    def test_a_choice_by_positions_is_the_same_as_by_slots(self, kv_dtype, device):
        """A plan of another backend."""
        stage = scene("extend", device, kv_dtype)
        batch, positions = stage.planned(), by_position(stage)
        assert torch.equal(stage.attend(batch, positions)[0], stage.attend(batch, stage.as_slots(positions))[0])
        stage.check_attends(batch, positions)

    @on_every_device
    @of_every_type
    def test_a_token_without_chosen_rows_gives_zero(self, kv_dtype, device):
        """C4: FlashMLA's log-sum-exp of +inf becomes -inf."""
        stage = scene("decode", device, kv_dtype)
        nothing = SelectedSlots(torch.full((5, 8), -1, dtype=torch.int32, device=device))
        out, lse = stage.attend(stage.planned(), nothing)
        assert (out == 0).all() and (lse == -INF).all()

    @on_every_device
    def test_more_rows_than_one_call_holds_are_several_calls(self, device, monkeypatch):
        """The decode kernel has memory for partial results of every row."""
        monkeypatch.setattr(sparse_backend, "_MAX_ROWS", 6)
        stage = scene("extend", device, PACKED)
        stage.check()
        if isinstance(kernels := stage.backend._kernels, ReferenceSparse):
            assert kernels.calls == [6, 6, 4]


class TestPlans:
    @on_every_device
    @pytest.mark.parametrize("name", ["decode", "no lengths on the host"])
    @pytest.mark.sample(1)
    def test_planning_and_choosing_wait_for_nothing(self, name, device):
        """``needs_cpu_seq_lens`` is false."""
        stage = scene(name, device, PACKED, exact=False)
        assert not stage.backend.claims.needs_cpu_seq_lens
        stage.check()  # compiles
        index, batch = stage.given(), stage.batch()
        with nothing_waits(device):
            selected = stage.backend.select(index, stage.layer, stage.plan(batch))
        stage.check_attends(batch, stage.check_selection(selected))

    @on_every_device
    def test_two_plans_live_at_the_same_time(self, device):
        """B5: a plan is a value. Neither a later plan nor a change of the batch's tensors alters it."""
        stage = scene("decode", device, exact=False)
        first = stage.planned()
        stage.page_table = stage.page_table.clone()  # on a CPU the batch has this very memory
        first.geometry.seq_lens.fill_(1)
        first.geometry.page_table.fill_(0)
        stage.planned()
        stage.check(first)

    @on_every_device
    @of_every_type
    @pytest.mark.sample(1)
    def test_a_padded_request_gives_zero_and_writes_nothing(self, kv_dtype, device):
        """Lengths are the device's: the host would have refused this one."""
        stage = scene("decode", device, kv_dtype, exact=False)
        batch = stage.batch()
        before = stage.written()
        stage.select(stage.planned())  # as float64 chooses, and so should the others
        wanted = stage.wanted_sparse()[0]
        batch.geometry.seq_lens[1] = 0
        batch.geometry.page_table[1] = 1 << 30
        selected = stage.backend.select(stage.given(), stage.layer, stage.plan(batch))
        out, lse = stage.attend(batch, selected)
        assert (selected.slots[1] == -1).all() and (out[1] == 0).all() and (lse[1] == -INF).all()
        live = [0, 2, 3, 4]
        assert relative_error(out[live], wanted[live]) <= stage.tolerance
        assert stage.written() == before + len(live)
