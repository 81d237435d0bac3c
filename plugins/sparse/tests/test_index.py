"""The index that core has for every sparse backend: interpreted, and on a GPU, against float64 (A10)."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import AttentionKind, BackendError, DType, ForwardMode, LayerSpec, ModelSpec, Problem, Role
from attnplug.host import MLADims
from attnplug.sparse import IndexerDims, SelectedPositions, SelectedSlots
from attnplug_sparse.index import ScoreInputs, SparseIndex, sparse_index
from attnplug_sparse.index.tiling import INVARIANT_QUERIES, DeviceLimits, choose_tiles
from attnplug_sparse.refusals import index_refusals
from attnplug_sparse.torch_sparse.selection import stable_topk
from attnplug_testing.devices import DEVICES, INTERPRETED, nothing_waits
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelCase
from attnplug_testing.sparse_scene import SparseStage, check_replays, sparse
from attnplug_testing.trees import random_trees
from attnplug_testing.triton_mode import compiled_by
from indexed import MULTIPROCESSORS, IndexedBackend

DECODE, VERIFY, EXTEND, MIXED = (
    ForwardMode.DECODE,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.EXTEND,
    ForwardMode.MIXED,
)
FLOAT8 = DType.FLOAT8_E4M3
TYPES = {"float32": (DType.FLOAT32, None), "bfloat16": (DType.BFLOAT16, None), "fp8": (DType.BFLOAT16, FLOAT8)}
"""Of queries, and of keys if these are others."""
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""Maximum shared memory of a program, by SM."""
by_kernel = pytest.mark.parametrize("device", [pytest.param("cpu", marks=INTERPRETED), DEVICES[1]])
CASES = {
    "decode": sparse(((40, 1), (7, 1), (90, 1), (8, 1)), DECODE),
    "extend": sparse(((0, 12), (30, 3), (5, 4)), EXTEND),
    "mixed": sparse(((33, 1), (0, 11), (64, 1), (2, 1)), MIXED),
    "verify": sparse(((30, 4), (6, 4)), VERIFY),
    "verify of trees": sparse(((30, 6), (3, 6)), VERIFY, trees=random_trees(2, 6)),
    "pages of one token": sparse(((20, 2), (11, 3)), page_size=1),
    "one row of choice": sparse(((20, 2), (0, 3)), topk=1),
    "lengths on the device only": sparse(((40, 1), (7, 3)), padding=2, exact=False),
}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the group size, so that short rows have more groups of scores than selected rows."""
    if find_spec("triton") is not None:
        monkeypatch.setattr("attnplug_sparse.index.triton_topk.group_of", lambda longest: 2)


def scene(case: KernelCase, device: str = "cpu", types: str = "float32", score: Any = None) -> SparseStage:
    """On a GPU with the widths and types that kernels are made for."""
    dtype, index_dtype = TYPES[types]
    case = replace(case, dtype=dtype, index_dtype=index_dtype)
    if device == "cuda":
        case = replace(case, index=replace(case.index, heads=64, head_dim=128), dtype=DType.BFLOAT16)
    return SparseStage(case, device, lambda context: IndexedBackend(context, score))


@by_kernel
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(5)
def test_rows_are_chosen_as_float64_chooses_them(name, device):
    """A10; NaN in every page and row that must not be read."""
    scene(CASES[name], device).check()


@by_kernel
@pytest.mark.parametrize("types", ["bfloat16", "fp8"])
@pytest.mark.parametrize("name", ["decode", "extend", "verify of trees"])
@pytest.mark.sample(4)
def test_keys_in_short_types(name, types, device):
    scene(CASES[name], device, types).check()


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("types", ["bfloat16", "fp8"])
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3), (EXTEND, 9)])
def test_contexts_far_longer_than_what_is_chosen(mode, new, types, device, monkeypatch):
    monkeypatch.undo()  # groups as they are
    lengths = ((5000, new), (700, new), (511, new), (0, new), (20000, new))
    scene(sparse(lengths, mode, 64, topk=512), device, types).check()


@by_kernel
def test_a_batch_whose_scores_do_not_fit_in_memory_is_chosen_for_in_blocks(device, monkeypatch):
    """Blocks have whole requests in a verify, and any rows in an extend."""
    monkeypatch.setattr(sparse_index, "SCORE_BYTES", 1)
    for name, least in (("extend", 3), ("verify", 2)):
        stage = scene(replace(CASES[name], page_size=4), device)
        stage.backend.index._nbytes = 4 * sparse_index.IndexMemory.row_bytes(40, 2)
        assert len(stage.planned().plan.attention.metadata.blocks) >= least
        stage.check()


@by_kernel
def test_equal_scores_give_the_first_rows(device):
    stage = scene(replace(CASES["decode"], lengths=((90, 1), (7, 1))), device)
    index = stage.given()
    index = replace(index, q=torch.zeros_like(index.q))
    selected = stage.backend.select(index, stage.layer, stage.planned())
    first = stage.as_slots(stage.by_position([[*range(8)]] * 2))
    assert torch.equal(selected.slots.sort().values, first.slots.sort().values)


@by_kernel
def test_a_choice_has_as_many_columns_as_are_asked_for(device):
    stage = scene(CASES["decode"], device)
    batch = stage.planned()
    narrow = stage.select(batch).slots
    wide = stage.backend.index.choose(batch.plan.attention.metadata, stage.given(), stage.layer, 20).slots
    assert torch.equal(wide[:, :8], narrow) and wide.shape == (4, 20) and (wide[:, 8:] == -1).all()


@INTERPRETED
def test_a_coordinator_receives_positions():
    """A10: a coordinator keeps rows elsewhere, so slots from the page table would be wrong."""
    stage = scene(CASES["extend"])
    batch = stage.planned()
    stage.select(batch)  # which writes the new keys
    elsewhere = replace(stage.context, coordinator=object())
    index = SparseIndex(elsewhere, multiprocessors=MULTIPROCESSORS)
    assert isinstance(
        stage.check_selection(index.choose(index.plan(batch.geometry), stage.given(), stage.layer)), SelectedPositions
    )


@INTERPRETED
def test_where_all_rows_are_chosen_none_is_scored():
    stage = scene(sparse(CASES["extend"].lengths, topk=40))
    stage.backend.index._score = replace_launch(stage.backend.index._score)
    stage.check()


def replace_launch(kernels: Any) -> Any:
    """The module without its launch of scores."""
    return type("Unscored", (), {"launch_spread": staticmethod(kernels.launch_spread)})


def by_torch(inputs: ScoreInputs) -> Tensor:
    """Scores as an author's kernel may give them: arbitrary values behind the rows that a token sees."""
    size = inputs.keys.shape[1]
    position = torch.arange(inputs.width, device=inputs.q.device)
    found = torch.full((len(inputs.q), inputs.width), 1e30, device=inputs.q.device)
    for row, (owner, seen) in enumerate(zip(inputs.owners.tolist(), inputs.seen.tolist(), strict=True)):
        mine = position[:seen]
        keys = inputs.keys[inputs.page_table[owner, mine // size].long(), mine % size].float()
        found[row, :seen] = inputs.weights[row] @ torch.relu(inputs.q[row].float() @ keys.T * inputs.scale)
    return found


@by_kernel
@pytest.mark.parametrize("name", ["decode", "extend", "lengths on the device only"])
@pytest.mark.sample(2)
def test_scores_of_an_authors_own_kernel(name, device):
    scene(CASES[name], device, score=by_torch).check()


@by_kernel
def test_positions_are_found_where_they_lie_and_slots_are_taken_as_they_are(device):
    stage = scene(CASES["verify"], device)
    index, plan = stage.backend.index, stage.planned().plan.attention.metadata
    chosen = stage.by_position([[5, 0]] * 8, columns=3)
    wanted = torch.nn.functional.pad(stage.as_slots(chosen).slots, (0, 5), value=-1)
    for selected in (chosen, stage.as_slots(chosen)):
        assert torch.equal(index.slots(plan, selected, 8), wanted)
    with raises_naming(BackendError, 9, 8):
        index.slots(plan, SelectedSlots(torch.zeros(8, 9, dtype=torch.int32, device=device)), 8)


@by_kernel
@pytest.mark.parametrize(("name", "types"), [("decode", "bfloat16"), ("verify", "float32"), ("verify of trees", "fp8")])
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy, of a padded request's queries
@pytest.mark.sample(2)
def test_one_capture_serves_other_lengths_pages_and_fewer_requests_as_eager_does(name, types, device):
    """B2's ground; equal bits."""
    case = CASES[name]
    new = case.lengths[0][1]
    longer = ((200, new), (100, new), (90, new), (60, new))[: len(case.lengths)]
    shorter = replace(case, lengths=((70, new),), trees=None if case.trees is None else case.trees[:1], seed=5)
    stage = scene(replace(case, lengths=longer), device, types)
    check_replays(stage, [scene(other, device, types) for other in (case, shorter)])


@INTERPRETED
def test_a_plan_reads_the_page_table_that_it_was_last_filled_from():
    """A captured plan serves several graphs with different page tables."""
    stage = scene(CASES["decode"])
    batch = stage.planned()
    selected = stage.select(batch)
    index, geometry = stage.backend.index, batch.geometry
    plan = index.plan(replace(geometry, page_table=torch.zeros_like(geometry.page_table)))
    index.fill(plan, geometry)
    assert torch.equal(index.choose(plan, stage.given(), stage.layer).slots, selected.slots)


@by_kernel
def test_planning_and_choosing_wait_for_nothing(device):
    stage = scene(CASES["lengths on the device only"], device)
    index = stage.given()
    compiled = stage.backend.select(index, stage.layer, planned := stage.planned())
    kind, batch = type(planned.plan), stage.batch()
    with nothing_waits(device):
        batch.plan = kind(stage.backend.init_forward_metadata(batch))
        selected = stage.backend.select(index, stage.layer, batch)
    assert torch.equal(selected.slots, compiled.slots)


def test_without_triton_it_is_refused_by_the_backends_name(monkeypatch):
    for name in ("triton_schedule", "triton_score", "triton_topk"):
        monkeypatch.delitem(sys.modules, f"attnplug_sparse.index.{name}", raising=False)
        monkeypatch.delattr(f"attnplug_sparse.index.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with raises_naming(BackendError, "under_test", "Triton"):
        SparseStage(CASES["decode"], make=IndexedBackend)


# ---- what is served ----


@pytest.mark.parametrize(("key", "most"), [("heads", 128), ("head_dim", 256), ("topk", 8192)])
def test_an_index_that_kernels_cannot_have_is_refused(key, most):
    """D3"""
    mla, most_of_all = MLADims(512, 128, 64), IndexerDims(128, 256, 8192)
    for value, refused in ((most, False), (2 * most, True)):
        layer = LayerSpec(
            0, AttentionKind.MLA, 4, 4, 192, 128, 1.0, mla=mla, indexer=replace(most_of_all, **{key: value})
        )
        found = [*index_refusals(Problem(ModelSpec("test", "test", (layer,), 1 << 17)), Role.DECODE)]
        assert [(reason.code, reason.value) for reason in found] == [("feature", value)] * refused


@INTERPRETED
@pytest.mark.parametrize("name", ["decode", "extend"])
def test_fp8_keys_are_read_where_no_instruction_converts_them(name, monkeypatch):
    """SM 80"""
    chosen = replace(choose_tiles(1, 2, 16, None), converts_fp8=False)
    monkeypatch.setattr(sparse_index, "choose_tiles", lambda *_: chosen)
    scene(CASES[name], types="fp8").check()


@pytest.mark.parametrize("sm", SHARED)
def test_a_cut_fits_the_gpu(sm):
    for queries in (0, 1, 2, 3, 64):
        for heads, dim in ((8, 64), (32, 128), (64, 128)):
            config = choose_tiles(queries, heads, dim, DeviceLimits(sm, SHARED[sm]))
            assert (config.overlap, config.converts_fp8) == (sm >= 90, sm >= 89)
            assert config.query_tile <= (queries or 4)
            assert 2 * dim * (config.query_tile * heads + config.stages * config.key_tile) + 2048 <= SHARED[sm]


@pytest.mark.cross_compile
def test_kernels_compile_for_gpus_that_need_not_be_there():
    """SM 80, 89, 90 and 120, and fit them."""
    pytest.importorskip("triton")
    found = compiled_by(Path(__file__).parent / "cross_compile_index.py")
    every = {(sm, kernel) for sm in (80, 89, 90, 120) for kernel in ("index", "best", "spread", "translate")}
    assert {(sm, kernel) for sm, kernel, _ in found} == {(80, "index of a tree"), *every}
    assert all(taken <= SHARED[sm] for sm, _, taken in found)


@pytest.mark.parametrize("width", [5, 40])
def test_equal_scores_are_selected_by_position(width):
    """E3: the highest scores are selected independently of the width, by position if they are equal. Tokens that see
    fewer rows get -1."""
    scores = torch.tensor([0.0, 2.0, 0.0, 0.0, 1.0]).repeat(3, 1)
    scores = torch.cat([scores, torch.zeros(3, width - 5)], 1)
    scores[2, 3:] = float("-inf")
    assert stable_topk(scores, 4).tolist() == [[0, 1, 2, 4], [0, 1, 2, 4], [0, 1, 2, -1]]


@INTERPRETED
@pytest.mark.parametrize("name", ["decode", "verify", "extend"])
def test_one_configuration_scores_all_batches(name):
    """E3: if levels of invariance are requested."""
    stage = scene(replace(CASES[name], levels=frozenset({"run", "batch"})))
    (block,) = stage.planned().plan.attention.metadata.blocks
    assert block.tiles == choose_tiles(INVARIANT_QUERIES, 2, 16, None)
    stage.check()
