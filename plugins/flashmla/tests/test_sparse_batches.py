"""Sparse batches against float64: planning through the reference kernels on a CPU, FlashMLA itself on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnplug import DType, SelectedPositions, SelectedSlots
from attnplug_flashmla import sparse_backend
from reference_sparse import CASES, PACKED, ROWS, ReferenceSparse, build, case
from support.devices import DEVICES, nothing_waits
from support.sparse_scene import LAYER, SparseCase, SparseScene
from support.stage import error

INF = float("inf")
on_every_device = pytest.mark.parametrize("device", DEVICES)
of_every_type = pytest.mark.parametrize("kv_dtype", [ROWS, PACKED])


def scene(of: SparseCase, device: str) -> SparseScene:
    return SparseScene(of, device, build)


def check(of: SparseCase, device: str = "cpu") -> SparseScene:
    """The rows with the best scores are chosen, and attended to as float64 does. Padding gives nothing."""
    stage = scene(of, device)
    batch = stage.planned()
    selected = stage.backend.select(stage.index(), stage.layer, batch)
    assert stage.positions(selected) == stage.chosen()
    attended(stage, batch, selected)
    return stage


def attended(stage: SparseScene, batch: Any, selected: Any) -> None:
    out, lse = stage.attend(batch, selected)
    wanted, wanted_lse = stage.wanted(stage.positions(selected))
    tokens = len(wanted)
    assert error(out[:tokens], wanted.to(out.device)) < 1e-2 and error(lse[:tokens], wanted_lse.to(out.device)) < 1e-2
    assert (out[tokens:] == 0).all() and (lse[tokens:] == -INF).all()


def by_position(stage: SparseScene) -> SelectedPositions:
    """The right choice, as another backend makes it."""
    rows = [chosen + [-1] * (8 - len(chosen)) for chosen in stage.chosen()]
    return SelectedPositions(torch.tensor(rows, dtype=torch.int32, device=stage.device))


class TestBatches:
    @on_every_device
    @of_every_type
    @pytest.mark.parametrize("name", CASES)
    def test_every_kind_of_batch(self, name, kv_dtype, device):
        """A10, C4; NaN in every row that must not be read."""
        check(case(name, kv_dtype), device)

    @on_every_device
    @pytest.mark.parametrize("heads", [1, 64, 96, 128])
    def test_heads_are_padded_to_what_the_kernels_take(self, heads, device):
        for kv_dtype in (ROWS, PACKED):
            stage = scene(case("verify", kv_dtype, heads=heads), device)
            attended(stage, stage.planned(), by_position(stage))

    @on_every_device
    def test_keys_in_fp8_choose_rows_whose_scores_are_among_the_best(self, device):
        stage = scene(case("decode", PACKED, index_dtype=DType.FLOAT8_E4M3), device)
        batch = stage.planned()
        selected = stage.backend.select(stage.index(), stage.layer, batch)
        stage.judged(selected, 0.1)
        attended(stage, batch, selected)

    @on_every_device
    @pytest.mark.parametrize("page_size", [128, 192])
    def test_a_manager_with_larger_pages(self, page_size, device):
        check(case("decode", page_size=page_size), device)
        check(case("decode", PACKED, page_size=page_size), device)

    @on_every_device
    @of_every_type
    def test_a_choice_by_positions_is_the_same_as_by_slots(self, kv_dtype, device):
        """As another backend makes it."""
        stage = scene(case("extend after prefixes", kv_dtype), device)
        batch = stage.planned()
        positions = by_position(stage)
        assert torch.equal(stage.attend(batch, positions)[0], stage.attend(batch, stage.as_slots(positions))[0])
        attended(stage, batch, positions)

    @on_every_device
    @of_every_type
    def test_a_token_without_chosen_rows_gives_zero(self, kv_dtype, device):
        """C4: -inf where FlashMLA says +inf."""
        stage = scene(case("decode", kv_dtype), device)
        nothing = SelectedSlots(torch.full((5, 8), -1, dtype=torch.int32, device=device))
        out, lse = stage.attend(stage.planned(), nothing)
        assert (out == 0).all() and (lse == -INF).all()

    @on_every_device
    def test_more_rows_than_one_call_holds_are_several_calls(self, device, monkeypatch):
        """The decode kernel has memory for partial results of every row."""
        monkeypatch.setattr(sparse_backend, "_MOST_ROWS", 6)
        stage = check(case("extend after prefixes", PACKED), device)
        if isinstance(kernels := stage.backend._kernels, ReferenceSparse):
            assert kernels.calls == [6, 6, 4]


class TestPlans:
    @on_every_device
    @pytest.mark.parametrize("name", ["decode", "no lengths on the host"])
    def test_planning_choosing_and_running_wait_for_nothing(self, name, device):
        """``needs_cpu_seq_lens`` is false."""
        stage = scene(case(name, PACKED, exact_lengths=False), device)
        assert not stage.backend.claims.needs_cpu_seq_lens
        index = stage.index()
        stage.attend(batch := stage.planned(), stage.backend.select(index, stage.layer, batch))  # compiles
        kind, batch = type(batch.plan), stage.batch()
        with nothing_waits(device):
            batch.plan = kind(stage.backend.init_forward_metadata(batch))
            selected = stage.backend.select(index, stage.layer, batch)
        attended(stage, batch, selected)

    @on_every_device
    def test_two_plans_live_at_the_same_time(self, device):
        """B5: a plan is a value; what is planned later does not change it, nor do the batch's own numbers."""
        stage = scene(case("decode", exact_lengths=False), device)
        first = stage.planned()
        stage.page_table = stage.page_table.clone()  # on a CPU the batch has this very memory
        first.geometry.seq_lens.fill_(1)
        first.geometry.page_table.fill_(0)
        stage.planned()
        selected = stage.backend.select(stage.index(), stage.layer, first)
        assert stage.positions(selected) == stage.chosen()
        attended(stage, first, selected)

    @on_every_device
    @of_every_type
    def test_a_padded_request_gives_zero_and_writes_nothing(self, kv_dtype, device):
        """Lengths are the device's: the host would have refused this one."""
        stage = scene(case("decode", kv_dtype, exact_lengths=False), device)
        batch = stage.batch()
        batch.geometry.seq_lens[1] = 0
        batch.geometry.page_table[1] = 1 << 30
        before = stage.mla.rows(LAYER).clone()
        batch.plan = type(stage.planned().plan)(stage.backend.init_forward_metadata(batch))
        selected = stage.backend.select(stage.index(), stage.layer, batch)
        out, lse = stage.attend(batch, selected)
        assert (selected.slots[1] == -1).all() and (out[1] == 0).all() and (lse[1] == -INF).all()
        wanted = stage.wanted()[0].to(out.device)
        live = [0, 2, 3, 4]
        assert error(out[live], wanted[live]) < 1e-2
        changed = stage.mla.rows(LAYER).view(torch.uint8) != before.view(torch.uint8)
        assert int(changed.flatten(0, 2).any(-1).sum()) == len(live)
