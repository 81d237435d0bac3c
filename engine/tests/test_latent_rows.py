"""New cache rows of MLA layers: one kernel makes them and their queries, absorbed or not, and stores them as planned.

As in ``test_kernels``: in Triton's interpreter, or on a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_kernels import (
    BOUNDS,
    BY_KERNEL,
    FREQUENCIES,
    TYPES,
    error,
    normed,
    poisoned_rows,
    random,
    rotated,
    tiny,
    turn_and_twin,
)
from torch import Tensor

from attnplug import DType, ExtendPath, ForwardMode, MLAPool
from attnplug.host import ExtendPolicy, MLAWeights, ModelAttention
from attnplug.kernels import PageLayout
from attnplug_conformance.padding import pad_batch
from attnplug_engine import kernels
from attnplug_engine.kernels.row_places import RowPlaces
from attnplug_engine.models import latent_attention
from attnplug_testing.devices import DEVICES, INTERPRETED


@pytest.mark.parametrize("device", BY_KERNEL)
@pytest.mark.parametrize("pairs", [False, True])
def test_latent_rows_are_normed_and_rotated_with_their_queries(pairs: bool, device: str) -> None:
    turn, twin = turn_and_twin(pairs, device)
    q, down = random(3, 5, 24 + 16, device=device), poisoned_rows(3, 20 + 16, device, seed=1)
    before = q.clone()
    gain = random(20, device=device, seed=2)
    rows = turn.latent_rows(q, down, 24, SimpleNamespace(weight=gain, eps=1e-3)).cpu()
    assert torch.equal(q[..., :24], before[..., :24])
    assert error(q[..., 24:].cpu(), rotated(twin, before[..., 24:])) <= BOUNDS[q.dtype]
    assert error(rows[:, :20], normed(down[:, :20].cpu(), gain.cpu(), 1e-3)) <= BOUNDS[q.dtype]
    assert error(rows[:, 20:], rotated(twin, down[:, None, 20:]).squeeze(1)) <= BOUNDS[q.dtype]


@pytest.mark.parametrize("device", BY_KERNEL)
@pytest.mark.parametrize("width", [36, 48])
@pytest.mark.parametrize(
    ("slots", "written"),
    [([5, 0, 2], {0: 5, 1: 0, 2: 2}), ([-1, 5, -2], {1: 5}), ([6, 1 << 40, 4], {2: 4}), ([3], {0: 3}), ([], {})],
)
@pytest.mark.sample(6)
def test_latent_rows_are_stored_at_their_slots_and_nowhere_else(
    slots: list[int], written: dict[int, int], width: int, device: str
) -> None:
    """B5: nothing for padding, which has a negative slot or none, and nothing past the cache's last row.

    The bytes are those of rows that are made first and stored afterwards.
    """
    turn, _ = turn_and_twin(True, device)
    norm: Any = SimpleNamespace(weight=random(20, device=device, seed=2), eps=1e-3)
    weights = up_projection(5, 24, 20, device)
    down, q = poisoned_rows(3, 36, device, seed=1), random(3, 5, 24 + 16, device=device)
    rows = turn.latent_rows(q.clone(), down, 24, norm)
    # 6 rows, with gaps where the memory is wider, and an unused row before and after them.
    memory = torch.full((8, width), torch.nan, dtype=TYPES[device], device=device)
    wanted = memory.clone()
    for token, slot in written.items():
        wanted[1 + slot, :36] = rows[token]
    adjacent = torch.tensor(slots, dtype=torch.int64)
    for numbers in (adjacent, torch.stack((adjacent, torch.ones_like(adjacent)), 1)[:, 0]):
        turn.absorb(q, down, weights, norm, RowPlaces(memory[1:7, :36], numbers.to(device)))
        assert torch.equal(memory.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("device", BY_KERNEL)
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.sample(4)
def test_queries_are_absorbed_and_rotated_while_rows_are_stored(tokens: int, pairs: bool, device: str) -> None:
    """Sizes that no tile divides, and more tokens than a tile has. Rows and rotations have the bits that they have
    without absorbing; nothing around the inputs is read."""
    from attnplug_engine.kernels.rotation import FusedRotation

    turn = FusedRotation(7 * torch.arange(tokens, device=device), FREQUENCIES.to(device), 1.5, pairs=pairs)
    norm: Any = SimpleNamespace(weight=random(20, device=device, seed=2), eps=1e-3)
    weights = up_projection(5, 24, 20, device)
    q = poisoned_rows(tokens, 5 * 40, device).unflatten(1, (5, 40))
    down, turned = poisoned_rows(tokens, 36, device, seed=1), q.clone()
    rows = turn.latent_rows(turned, down, 24, norm)
    slots = torch.randperm(tokens + 2, generator=torch.Generator().manual_seed(4))[:tokens].to(device)
    cache = torch.full((tokens + 2, 36), torch.nan, dtype=q.dtype, device=device)
    absorbed = turn.absorb(q, down, weights, norm, RowPlaces(cache, slots))
    wanted = torch.einsum("thn,hnl->thl", q[..., :24].double(), weights.w_kc.double())
    assert error(absorbed[..., :20], wanted) <= BOUNDS[q.dtype]
    assert torch.equal(absorbed[..., 20:], turned[..., 24:])
    assert torch.equal(cache[slots], rows) and int(cache.isnan().all(1).sum()) == 2


def up_projection(heads: int, nope: int, latent: int, device: str) -> MLAWeights:
    keys = random(heads, nope, latent, device=device, seed=3)
    return MLAWeights(keys, keys.transpose(1, 2))


@pytest.mark.parametrize("device", DEVICES[1:])
def test_rows_and_queries_are_made_of_what_a_late_kernel_made(device: str) -> None:
    """All are launched early, after one that is late with queries and rows. Each waits for the one before it."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels wait for each other on the device from SM 90 on")
    from attnplug.kv.triton_rows import RowWriter
    from attnplug_testing.late_kernel import fill_late

    turn, _ = turn_and_twin(True, device)
    norm: Any = SimpleNamespace(weight=random(512, device=device, seed=2), eps=1e-3)
    weights, given = up_projection(16, 128, 512, device), random(3 * (16 * 144 + 528), device=device)
    late = torch.empty_like(given)
    queries, down = late[: 3 * 16 * 144].view(3, 16, 144), late[3 * 16 * 144 :].view(3, 528)
    cache = torch.empty(8, 528, dtype=given.dtype, device=device)
    places, everything = RowPlaces(cache, torch.tensor([6, -1, 2], device=device)), torch.arange(8, device=device)
    layout = PageLayout.named("token_major", 8, 1, 1, 528)
    read = layout.view(torch.empty(layout.elements, dtype=given.dtype, device=device))
    reader = RowWriter(read, layout, 1.0)  # it writes what it has read

    def run() -> list[Tensor]:
        """Nothing but these is launched: a plain launch in between would wait for all."""
        absorbed = turn.absorb(queries, down, weights, norm, places)
        reader.write(everything, cache.unsqueeze(1))
        return [absorbed.view(torch.int16), read.clone().view(torch.int16)]

    late.copy_(given)
    cache.fill_(torch.nan)
    wanted = run()
    assert int((~read.isnan()).sum()) == 2 * 528
    for _ in range(3):
        for memory in (late, cache, read):  # a kernel that reads too soon finds NaN
            memory.fill_(torch.nan)
        torch.cuda.synchronize()
        fill_late(late, given, milliseconds=20)
        assert all(map(torch.equal, run(), wanted))


@pytest.mark.long
@INTERPRETED
@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_a_step_leaves_the_same_rows_in_the_cache_whoever_stores_them(
    model_type: str, make_stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B5: an absorbed extend, decodes and a verify, each with rows of padding. Around the rows there is NaN.

    The first layer's rows have the same bits. After it, queries were absorbed by another product.
    """
    monkeypatch.setattr(kernels, "usable", lambda _: True)
    loaded = tiny(model_type, torch.float16, "cpu")
    results, caches, written = [], [], []
    write = MLAPool.write
    monkeypatch.setattr(MLAPool, "write", lambda *given: written.append(1) or write(*given))
    for by_kernel in (True, False):
        if not by_kernel:
            monkeypatch.setattr(latent_attention, "row_places", lambda *_: None)
        stage = make_stage(loaded, 2, dtype=DType.FLOAT16)
        stage.attention = ModelAttention(stage.backend, stage.pools, ExtendPolicy(forced=ExtendPath.ABSORBED))
        forward = stage.forward

        def padded(batch: Any, forward: Any = forward) -> Tensor:
            pad_batch(batch, batch.batch_size, batch.num_tokens + 2)
            return forward(batch)[:-2]

        monkeypatch.setattr(stage, "forward", padded)
        steps = [([[3, 1, 4], [1]], ForwardMode.EXTEND), ([[5], [9]], ForwardMode.DECODE)]
        steps.append(([[2, 6], [5, 3]], ForwardMode.TARGET_VERIFY))
        results.append([logits for tokens, mode in steps for logits in stage.step(tokens, mode)])
        caches.append([stage.pools.mla.rows(layer).clone() for layer in stage.pools.mla.layer_ids])
        assert len(written) == (0 if by_kernel else 3 * 2)
    assert torch.equal(*(first.view(torch.int16) for first, _ in caches))
    stored, given = ((*logits, last.nan_to_num()) for logits, (_, last) in zip(results, caches, strict=True))
    assert all(error(found, wanted) <= 8 * BOUNDS[torch.float16] for found, wanted in zip(stored, given, strict=True))
    assert all(int((~rows.isnan().all(-1)).sum()) == 4 + 2 + 4 for rows in caches[0])
