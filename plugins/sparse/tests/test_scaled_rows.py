"""Rows in fp8 with scales of their own: latent rows of 656 bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import AttentionKind, LayerSpec, MLAPool, PoolError
from attnplug.host import KVPools, MLADims
from attnplug.kernels import PageCopy
from attnplug_sparse.plugin import FP8_DS_MLA
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.errors import raises_naming
from attnplug_testing.writing import WAYS, writing

PAGES, PAGE = 5, 4
DIMS = MLADims(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64)
LAYER = LayerSpec(2, AttentionKind.MLA, 4, 4, 192, 128, 1.0, mla=DIMS)
SIZE: dict[str, Any] = {"num_pages": PAGES, "page_size": PAGE}
PACKED: dict[str, Any] = {"dtype": FP8_DS_MLA}
on_every_device = pytest.mark.parametrize("device", DEVICES)
in_every_way = pytest.mark.parametrize("how", WAYS)


def latent(device: str = "cpu") -> MLAPool:
    return MLAPool([LAYER], **SIZE, **PACKED, device=device)


def rows(count: int, width: int, how: str = "cpu") -> Tensor:
    """Rows with very different magnitudes. For Triton's interpreter, which rounds otherwise, all are exact in fp8."""
    random = torch.Generator().manual_seed(count)
    made = torch.randn(count, width, generator=random)
    if how.endswith("by triton"):
        made = (4 * made).round().clamp(-15, 15)
    return (made * torch.linspace(-9, 9, count).round().exp2().unsqueeze(1)).bfloat16().to(how.partition(" ")[0])


def rounded(group: Tensor) -> Tensor:
    """A group as e4m3 with a scale that is a power of two, by float64."""
    largest = max(float(group.abs().max()), 1e-4)
    scale = 2.0 ** torch.tensor(largest / 448.0, dtype=torch.float64).log2().ceil()
    return (group.double() / scale).float().to(torch.float8_e4m3fn).double() * scale


def wanted_latent(row: Tensor) -> Tensor:
    return torch.cat([*(rounded(group) for group in row[:512].split(128)), row[512:].double()])


@in_every_way
def test_a_latent_row_is_values_scales_and_rotated_columns(how: str) -> None:
    """The layout that FlashMLA reads: 512 e4m3, 4 float32, 64 bfloat16."""
    with writing(how) as device:
        pool, given = latent(device), rows(3, 576, how)
        pool.write(2, torch.tensor([5, -1, 18], device=device), given)
    assert pool.rows(2).shape == (PAGES, PAGE, 1, 656) and pool.rows(2).dtype is torch.uint8
    row = pool.rows(2)[1, 1, 0].cpu()
    values, scales = row[:512].view(torch.float8_e4m3fn).double(), row[512:528].view(torch.float32).double()
    found = torch.cat([(values.view(4, 128) * scales.unsqueeze(1)).flatten(), row[528:].view(torch.bfloat16).double()])
    assert torch.equal(found, wanted_latent(given[0].cpu()))
    assert torch.equal(
        pool.read_rows(2, torch.tensor([[18]], device=device))[0, 0].cpu().double(), wanted_latent(given[2].cpu())
    )
    assert pool.rows(2).cpu().flatten(0, 2).any(-1).nonzero().flatten().tolist() == [5, 18]  # and no padding


@in_every_way
def test_a_group_of_zeros_and_one_that_fills_the_range_are_exact(how: str) -> None:
    with writing(how) as device:
        pool, slots = latent(device), torch.arange(3, device=device)
        given = torch.zeros(3, 576, device=device)
        given[1, :128] = 448.0
        given[2, 7] = -448.0 * 2**20
        pool.write(2, slots, given)
        assert torch.equal(pool.read_rows(2, slots), given)


def test_a_nan_stays_one_and_spoils_no_other_row() -> None:
    pool, given = latent(), rows(2, 576)
    given[0, 3] = float("nan")
    pool.write(2, torch.arange(2), given)
    found = pool.read_rows(2, torch.arange(2))
    assert found[0, 3].isnan() and torch.equal(found[1].double(), wanted_latent(given[1]))


@on_every_device
def test_writes_wait_for_no_device(device: str) -> None:
    """They are captured."""
    slots = torch.tensor([1, -1], device=device)
    pool, given = latent(device), rows(2, 576, device)
    pool.write(2, slots, given)
    with nothing_waits(device):
        pool.write(2, slots, given)


@on_every_device
def test_pages_and_rows_move_with_their_scales(device: str) -> None:
    """Copies of pages, and moves after a verify."""
    mla = latent(device)
    pools = KVPools(mla=mla)
    slots = torch.arange(4, 8, device=device)
    mla.write(2, slots, rows(4, 576, device))
    pools.copy_pages([PageCopy(1, 3)])
    moved = torch.tensor([4, 6], device=device)
    pools.move_rows(moved, moved.flip(0))
    assert torch.equal(mla.read_rows(2, slots), mla.read_rows(2, torch.tensor([14, 13, 12, 15], device=device)))
    assert mla.read_rows(2, slots).any()


def test_rows_take_656_bytes() -> None:
    assert FP8_DS_MLA.token_nbytes(LAYER) == 656
    assert latent().nbytes == PAGES * PAGE * 656


def test_pools_over_a_hosts_bytes_are_the_same_memory() -> None:
    """As vLLM has them: ``[pages, tokens, 656]``."""
    given, memory = rows(2, 576), torch.zeros(PAGES, PAGE, 656, dtype=torch.uint8)
    pool = MLAPool.over([LAYER], {2: memory}, "pages tokens dim", page_size=PAGE, **PACKED)
    pool.write(2, torch.tensor([0, 6]), given)
    own = latent()
    own.write(2, torch.tensor([0, 6]), given)
    assert torch.equal(memory, own.rows(2).squeeze(2))


def refused(make: Any, *named: object) -> None:
    with raises_naming(PoolError, *named):
        make()


def test_what_such_rows_cannot_hold_is_refused() -> None:
    size: dict[str, Any] = {**SIZE, "device": "cpu"}
    small = replace(LAYER, mla=MLADims(96, 128, 64))
    refused(lambda: MLAPool([small], **PACKED, **size), 96, 128)
    refused(lambda: MLAPool([LAYER], **PACKED, scales={2: 2.0}, **size), "2.0")
    refused(lambda: latent().write(2, torch.arange(1), torch.zeros(1, 656)), "[tokens, 1, 576]")
    floats = {2: torch.zeros(PAGES, PAGE, 656)}
    refused(
        lambda: MLAPool.over([LAYER], floats, "pages tokens dim", page_size=PAGE, **PACKED),
        "torch.float32",
        "fp8_ds_mla",
        "torch.uint8",
    )


def test_such_rows_are_not_read_by_the_callers_of_by_slot() -> None:
    assert latent().by_slot(2) is None
