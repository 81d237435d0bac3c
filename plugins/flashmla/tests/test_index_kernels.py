"""The kernels that score index keys and place what was chosen: interpreted, and on a GPU, against torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import AttentionKind, DType, IndexerDims, IndexKeyPool, LayerSpec
from attnplug.host import MLADims
from attnplug_flashmla.scoring import place_rows, score_keys
from attnplug_flashmla.sparse_planner import Tokens
from support.devices import DEVICES, INTERPRETED
from support.triton_mode import compiled_by

PAGE, WIDTH = 64, 20
in_every_way = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=INTERPRETED, id="interpreted"),
        pytest.param("cuda", marks=DEVICES[1].marks, id="cuda"),
    ],
)
VISIBLE = [0, 1, 63, 64, 65, 511, 513, 1280]


def tokens(device: str, longest: int = 1280) -> Tokens:
    """Tokens of two requests; entries after the last page lead nowhere."""
    table = torch.randperm(2 * WIDTH, generator=torch.Generator().manual_seed(0)).view(2, WIDTH).int()
    table[0, 2:] = 1 << 30
    visible = torch.tensor(VISIBLE, dtype=torch.int32).clamp(max=longest)
    owner = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.int32)
    made = Tokens(table, owner, visible, torch.zeros(8, dtype=torch.int64), PAGE, longest)
    return made if device == "cpu" else Tokens(*(part.to(device) for part in parts(made)), PAGE, longest)


def parts(made: Tokens) -> tuple[Tensor, ...]:
    return made.table, made.owner, made.visible, made.slots


def pool(dtype: DType, dim: int) -> IndexKeyPool:
    mla, own = MLADims(512, 128, 64), IndexerDims(4, dim, 8)
    layer = LayerSpec(0, AttentionKind.MLA, 4, 4, 192, 128, 1.0, mla=mla, indexer=own)
    made = IndexKeyPool([layer], num_pages=2 * WIDTH, page_size=PAGE, dtype=dtype, device="cpu")
    keys = torch.randn(2 * WIDTH * PAGE, dim, generator=torch.Generator().manual_seed(1))
    made.write(0, torch.arange(len(keys)), keys)
    return made


@in_every_way
@pytest.mark.parametrize("longest", [1280, 700])
@pytest.mark.parametrize(
    ("dtype", "heads", "dim"),
    [(DType.FLOAT32, 20, 48), (DType.FLOAT8_E4M3, 32, 128)],
)
def test_scores_are_those_of_torch(dtype, heads, dim, longest, device):
    random = torch.Generator().manual_seed(2)
    q, weights = torch.randn(8, heads, dim, generator=random), torch.randn(8, heads, generator=random)
    keys, at = pool(dtype, dim), tokens("cpu", longest)
    wanted = score_keys(q, weights, keys, 0, 0.3, at)
    found = launched(q, weights, keys, dtype is DType.FLOAT8_E4M3, 0.3, longest, device)
    assert torch.equal(found.isneginf(), wanted.isneginf())
    assert torch.equal(wanted.isneginf(), torch.arange(longest) >= at.visible.unsqueeze(1))
    seen = ~wanted.isneginf()
    tolerance = 1e-4 if device == "cpu" else 2e-2
    assert float((found[seen] - wanted[seen]).abs().max() / wanted[seen].abs().max()) < tolerance


def launched(q: Tensor, weights: Tensor, keys: IndexKeyPool, fp8: bool, scale: float, longest: int, device: str) -> Any:
    from attnplug_flashmla.triton_index import launch_score_keys

    memory = keys.keys(0).to(device)
    return launch_score_keys(q.to(device), weights.to(device), memory, fp8, scale, tokens(device, longest)).cpu()


@in_every_way
@pytest.mark.parametrize("by_slots", [True, False])
@pytest.mark.parametrize(("topk", "width", "given"), [(64, 128, True), (200, 256, True), (1280, 1280, False)])
def test_what_was_chosen_is_placed_as_torch_places_it(topk, width, given, by_slots, device):
    """A token that sees no more than is chosen is given all of it; the rest is -1."""
    from attnplug_flashmla.triton_index import launch_place_rows

    at = tokens("cpu")
    scores = torch.rand(8, 1280, generator=torch.Generator().manual_seed(3))
    scores.masked_fill_(torch.arange(1280) >= at.visible.unsqueeze(1), float("-inf"))
    chosen = scores.topk(topk, dim=1, sorted=False).indices if given else None
    wanted = torch.full((8, width), 7, dtype=torch.int32)
    place_rows(chosen, at, topk, wanted, by_slots=by_slots)
    found = torch.full((8, width), 7, dtype=torch.int32, device=device)
    launch_place_rows(None if chosen is None else chosen.to(device), tokens(device), topk, found, by_slots)
    assert torch.equal(found.cpu(), wanted)
    for row, seen in enumerate(VISIBLE):
        live = wanted[row][wanted[row] >= 0].tolist()
        assert len(live) == len(set(live)) == min(seen, topk) and (wanted[row, len(live) :] == -1).all()


def test_they_compile_for_the_gpu_that_is_claimed():
    """SM 90, without one: no register is spilled."""
    pytest.importorskip("triton")
    found = compiled_by(Path(__file__).with_name("cross_compile.py"))
    assert {name for name, _, _ in found} == {"score bf16", "score fp8e4nv", "place", "place all"}
    assert all(spilled == 0 for _, _, spilled in found), found
