"""Compressed layers: entries of windows of tokens, for any division into steps, and attention to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug import (
    AttentionKind,
    BackendError,
    DType,
    ForwardExtras,
    ForwardMode,
    LayerSpec,
    MLAPool,
    ModelSpec,
    PoolError,
    Problem,
    UsageError,
)
from attnplug.host import HostContext, KVPools, Limits, WorkspaceOwner
from attnplug.sparse import SelectedPositions, SelectedSlots
from attnplug_sparse.pools import COMPRESSED, CompressedPool, compressed_page_bytes
from attnplug_testing.errors import raises_naming
from compressed_scene import DIM, HEADS, LAYER, NAN, CompressedScene, compressed_layer

HEAVY = compressed_layer(8)
SPARSE = compressed_layer(4, overlap=True, topk=3)
BOTH = pytest.mark.parametrize("layer", [HEAVY, SPARSE], ids=["all entries", "chosen entries"])
DECODE, MIXED, VERIFY = ForwardMode.DECODE, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY


# ---- as float64, however tokens come ----


@BOTH
def test_a_prompt_in_one_piece_and_then_token_by_token(layer):
    """A10"""
    scene = CompressedScene(layer)
    scene.step([37])
    for _ in range(13):
        scene.step([1], DECODE)


@BOTH
@pytest.mark.parametrize("first", range(1, 10))
@pytest.mark.sample(6)
def test_chunks_that_end_anywhere_in_a_window(layer, first):
    """A10"""
    scene = CompressedScene(layer, seed=first)
    for count in (first, 1, 7, 9, 1, 20):
        scene.step([count])


@pytest.mark.parametrize("first", [127, 128, 129])
@pytest.mark.sample(1)
def test_windows_of_real_lengths(first):
    """A10"""
    for layer in (compressed_layer(128, window=128), compressed_layer(4, overlap=True, topk=16, window=128)):
        scene = CompressedScene(layer, page_size=128, seed=first)
        scene.step([first])
        scene.step([1], DECODE)
        scene.step([130])
        scene.step([1], DECODE)


@BOTH
def test_requests_of_any_length_in_one_batch(layer):
    scene = CompressedScene(layer, 4)
    scene.step([3, 40, 8, 17])
    scene.step([1, 1, 23, 1], MIXED)
    for _ in range(5):
        scene.step([1, 1, 1, 1], DECODE)


@BOTH
def test_padding_brings_nothing(layer):
    """B5"""
    scene = CompressedScene(layer, 2)
    scene.step([11, 5], padding=3)
    scene.step([1, 1], DECODE, padding=2)
    scene.step([9, 7])


@given(st.lists(st.tuples(st.integers(1, 19), st.integers(1, 19)), min_size=1, max_size=4), st.booleans())
@settings(max_examples=12)
def test_any_chunks_of_two_requests(steps, sparse):
    scene = CompressedScene(SPARSE if sparse else HEAVY, 2, page_size=8, seed=len(steps))
    for counts in steps:
        scene.step(counts)


@BOTH
@pytest.mark.parametrize("rejected", [1, 4, 5])
@pytest.mark.sample(2)
def test_drafts_that_are_taken_back_leave_no_trace(layer, rejected):
    """Windows that a rejected draft completed, and the tokens that it overwrote, are restored."""
    scene = CompressedScene(layer, page_size=32, drafts=5)
    scene.step([6])
    for _ in range(7):
        scene.step([6], VERIFY)
        scene.take_back(0, rejected)
    scene.step([1], DECODE)


@BOTH
def test_a_request_goes_on_after_whole_pages_of_another(layer):
    scene = CompressedScene(layer, 2)
    scene.step([35, 1])
    shared = scene.table.pages(scene.rows[0])[:2]
    scene.table.release(scene.rows[1])
    scene.rows[1] = scene.table.admit(shared, 32)
    scene.seen[1] = scene.seen[0].first(32)
    scene.step([1, 7])
    scene.step([1, 1], DECODE)


@BOTH
def test_copied_pages_hold_entries_and_unfinished_windows(layer):
    scene = CompressedScene(layer)
    scene.step([21])
    row = scene.rows[0]
    scene.rows[0] = scene.table.admit(scene.table.pages(row), 21)  # its last page is copied when it is written to
    scene.step([9])


def test_entries_of_other_requests_and_unfinished_ones_are_never_read():
    """Unwritten memory is NaN in every scene. Here, memory that other requests wrote is NaN, too."""
    scene = CompressedScene(SPARSE, 2)
    scene.step([18, 30])
    for cache in (scene.pool.entries(LAYER), scene.pool.index(LAYER)):
        others = list(scene.table.pages(scene.rows[1]))
        cache.entries[others] = NAN
        cache.tokens[others] = NAN
    scene.rows, scene.seen = scene.rows[:1], scene.seen[:1]
    scene.step([12])


@BOTH
def test_rows_before_all_windows_are_never_read(layer):
    scene = CompressedScene(layer)
    scene.step([60])
    pages = list(scene.table.pages(scene.rows[0]))
    scene.pools.mla.rows(LAYER)[pages[:3]] = NAN
    scene.step([1], DECODE)
    scene.step([3])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@BOTH
def test_a_gpu_makes_entries_and_attends_as_float64_does(layer):
    scene = CompressedScene(layer, 3, device="cuda")
    scene.step([3, 40, 17], padding=2)
    scene.step([1, 23, 1], MIXED)
    for _ in range(5):
        scene.step([1, 1, 1], DECODE)


# ---- what is chosen is heeded ----


def attended(scene: CompressedScene, selected) -> torch.Tensor:
    batch = scene.batch([1], DECODE)
    q = torch.ones(1, HEADS, DIM)
    extras = ForwardExtras(sinks=scene.sinks, selected=selected)
    return scene.backend.forward_decode(q, None, None, scene.layer, batch, save_kv_cache=False, extras=extras)


def test_chosen_entries_may_come_by_their_places():
    scene = CompressedScene(SPARSE)
    scene.step([30])
    pages = scene.table.pages(scene.rows[0])
    numbers = [5, 0, 6]
    places = [pages[number // 4] * 4 + number % 4 for number in numbers]
    by_number = attended(scene, SelectedPositions(torch.tensor([[*numbers, -1]], dtype=torch.int32)))
    by_place = attended(scene, SelectedSlots(torch.tensor([[*places, -1]], dtype=torch.int32)))
    assert torch.equal(by_number, by_place)


def test_without_a_choice_the_window_alone_is_seen():
    scene = CompressedScene(SPARSE)
    scene.step([30])
    nothing = SelectedPositions(torch.full((1, 3), -1, dtype=torch.int32))
    rows = scene.seen[0].rows[-6:]
    logits = torch.ones(HEADS, DIM).double() @ rows.T * DIM**-0.5
    wanted = torch.cat((logits, scene.sinks.double().unsqueeze(1)), 1).softmax(1)[:, :-1] @ rows
    assert torch.allclose(attended(scene, nothing)[0].double(), wanted, atol=1e-6)


# ---- memory ----


def test_bytes_of_a_page_are_those_of_the_pool():
    layers = [replace(HEAVY, layer_id=0), replace(SPARSE, layer_id=1), replace(HEAVY, layer_id=2, compressed=None)]
    pool = CompressedPool(layers, num_pages=6, page_size=16, dtype=DType.BFLOAT16, device="cpu", drafts=3)
    assert pool.nbytes == 6 * compressed_page_bytes(layers, 16, torch.bfloat16, 3)
    assert pool.layer_ids == (0, 1) and pool.index(0) is None
    assert pool.entries(1).entries.shape == (6, 4, DIM) and pool.index(1).entries.shape == (6, 4, 8)
    assert pool.entries(1).tokens.shape == (6, 11, 4 * DIM)  # two windows and the drafts


# ---- what is refused ----


def test_pages_that_end_inside_a_window_are_refused():
    """D3"""
    with raises_naming(PoolError, 12, 8, "layer 2"):
        CompressedPool([HEAVY], num_pages=4, page_size=12, dtype=DType.FLOAT32, device="cpu")
    model = ModelSpec("m", "test", (HEAVY, replace(SPARSE, layer_id=3)), 4096)
    with raises_naming(UsageError, "page_size 12", 8):
        Problem(model, page_size=12)
    assert Problem(model, page_size=24).page_size == 24


def test_rows_cannot_be_moved():
    scene = CompressedScene(HEAVY)
    with raises_naming(PoolError, 1, "trees"):
        scene.pools.move_rows(torch.tensor([1]), torch.tensor([0]))


def test_fp8_entries_are_refused():
    with raises_naming(PoolError, "float8_e4m3fn"):
        CompressedPool([HEAVY], num_pages=4, page_size=16, dtype=DType.FLOAT8_E4M3, device="cpu")


def test_new_rows_without_what_they_bring_to_entries_are_refused():
    """Nothing is silently left out."""
    scene = CompressedScene(HEAVY)
    scene.table.extend(scene.rows[0], 3)
    q, rows = torch.ones(3, HEADS, DIM), torch.ones(3, 1, DIM)
    with raises_naming(BackendError, "layer 2", "8 tokens", "extras.entries"):
        scene.forward(scene.batch([3]), q, rows, ForwardExtras(sinks=scene.sinks))


def test_what_a_compressor_brings_is_checked():
    scene = CompressedScene(SPARSE)
    scene.table.extend(scene.rows[0], 3)
    q, rows = torch.ones(3, HEADS, DIM), torch.ones(3, 1, DIM)
    entries = scene._inputs((torch.ones(3, DIM), torch.ones(3, 2 * DIM)), scene.weights)
    nothing = SelectedPositions(torch.full((3, 3), -1, dtype=torch.int32))
    batch, extras = scene.batch([3]), ForwardExtras(sinks=scene.sinks, selected=nothing, entries=entries)
    with raises_naming(BackendError, (3, 16), (3, 32), "3 tokens"):
        scene.forward(batch, q, rows, extras)
    entries = scene._inputs((torch.ones(3, 2 * DIM), torch.ones(3, 2 * DIM)), scene.weights)
    plain, extras = replace(SPARSE, compressed=None), replace(extras, entries=entries)
    with raises_naming(BackendError, "layer 2", "extras.entries"):
        scene.backend.forward_extend(q, rows, None, plain, batch, extras=extras)


def test_a_pool_of_other_pages_than_the_rows_have_is_refused():
    size = {"page_size": 16, "dtype": DType.FLOAT32, "device": "cpu"}
    pools = KVPools(
        mla=MLAPool([HEAVY], num_pages=4, **size), caches={COMPRESSED: CompressedPool([HEAVY], num_pages=5, **size)}
    )
    with raises_naming(PoolError, "5 pages of 16", "4 of 16"):
        HostContext(
            model=ModelSpec("m", "test", (HEAVY,), 4096),
            device=torch.device("cpu"),
            dtype=torch.float32,
            kv_dtype=DType.FLOAT32,
            page_size=16,
            limits=Limits(1, 16, 64),
            pools=pools,
            workspace=WorkspaceOwner(),
        )


def test_a_compressed_layer_has_latent_rows_and_a_window():
    with raises_naming(ValueError, "layer 2", "sliding_window"):
        replace(HEAVY, sliding_window=None)
    with raises_naming(ValueError, "layer 2", "mla"):
        LayerSpec(2, AttentionKind.MHA, 2, 1, 16, 16, 0.25, sliding_window=4, compressed=HEAVY.compressed)
