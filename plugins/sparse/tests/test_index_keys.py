"""Index keys in fp8: pages of keys and scales, which move along with the latent rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import AttentionKind, DType, LayerSpec, MLAPool, PoolError
from attnplug.host import KVPools, MLADims
from attnplug.kernels import PageCopy
from attnplug.sparse import IndexerDims
from attnplug_sparse.plugin import FP8_DS_MLA
from attnplug_sparse.pools import INDEX_KEYS, IndexKeyPool
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.errors import raises_naming
from attnplug_testing.writing import WAYS, writing

PAGES, PAGE = 5, 4
DIMS = MLADims(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64)
LAYER = LayerSpec(2, AttentionKind.MLA, 4, 4, 192, 128, 1.0, mla=DIMS, indexer=IndexerDims(4, 128, 8))
SIZE: dict[str, Any] = {"num_pages": PAGES, "page_size": PAGE}
on_every_device = pytest.mark.parametrize("device", DEVICES)
in_every_way = pytest.mark.parametrize("how", WAYS)


def index(device: str = "cpu") -> IndexKeyPool:
    return IndexKeyPool([LAYER], **SIZE, dtype=DType.FLOAT8_E4M3, device=device)


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


@in_every_way
def test_a_page_of_index_keys_is_all_keys_and_then_all_scales(how: str) -> None:
    """The layout that DeepGEMM reads."""
    with writing(how) as device:
        pool, given = index(device), rows(PAGE + 1, 128, how)
        pool.write(2, torch.tensor([*range(8, 12), -1], device=device), given)
    assert pool.keys(2).shape == (PAGES, PAGE, 132)
    page = pool.keys(2)[2].flatten().cpu()
    keys, scales = page[: PAGE * 128].view(torch.float8_e4m3fn).double(), page[PAGE * 128 :].view(torch.float32)
    found = keys.view(PAGE, 128) * scales.double().unsqueeze(1)
    assert torch.equal(found, torch.stack([rounded(key) for key in given[:PAGE].cpu()]))
    assert torch.equal(pool.read_keys(2, torch.arange(8, 12, device=device)).cpu().double(), found)
    assert not pool.keys(2)[[0, 1, 3, 4]].any()


@on_every_device
def test_writes_do_not_synchronise(device: str) -> None:
    """They are captured."""
    pool, slots, given = index(device), torch.tensor([1, -1], device=device), rows(2, 128, device)
    pool.write(2, slots, given)
    with nothing_waits(device):
        pool.write(2, slots, given)


@on_every_device
def test_pages_and_rows_move_in_both_caches(device: str) -> None:
    """A10: copies of pages, and moves after a verify, take keys and scales along."""
    mla = MLAPool([LAYER], **SIZE, dtype=FP8_DS_MLA, device=device)
    pools = KVPools(mla=mla, caches={INDEX_KEYS: index(device)})
    keys, slots = pools.cache(INDEX_KEYS), torch.arange(4, 8, device=device)
    mla.write(2, slots, rows(4, 576, device))
    keys.write(2, slots, rows(4, 128, device))
    pools.copy_pages([PageCopy(1, 3)])
    moved = torch.tensor([4, 6], device=device)
    pools.move_rows(moved, moved.flip(0))
    for read in (mla.read_rows, keys.read_keys):
        assert torch.equal(read(2, slots), read(2, torch.tensor([14, 13, 12, 15], device=device)))
        assert read(2, slots).any()


def test_a_key_takes_its_width_and_a_scale() -> None:
    assert LAYER.indexer is not None
    assert IndexKeyPool.key_nbytes(LAYER.indexer, DType.FLOAT8_E4M3) == 132
    assert index().nbytes == PAGES * PAGE * 132


def test_a_pool_over_a_hosts_bytes_is_the_same_memory() -> None:
    """As vLLM has them: ``[pages, tokens, 132]``."""
    keys, memory = rows(2, 128), torch.zeros(PAGES, PAGE, 132, dtype=torch.uint8)
    pool = IndexKeyPool.over([LAYER], {2: memory}, "pages tokens dim", page_size=PAGE, dtype=DType.FLOAT8_E4M3)
    pool.write(2, torch.tensor([0, 6]), keys)
    own = index()
    own.write(2, torch.tensor([0, 6]), keys)
    assert torch.equal(memory, own.keys(2))


def test_types_widths_and_strides_that_cannot_be_kept_are_refused() -> None:
    size: dict[str, Any] = {**SIZE, "device": "cpu"}
    with raises_naming(PoolError, "fp8_ds_mla"):
        IndexKeyPool([LAYER], dtype=FP8_DS_MLA, **size)
    with raises_naming(PoolError, 126):
        IndexKeyPool([replace(LAYER, indexer=IndexerDims(4, 126, 8))], dtype=DType.FLOAT8_E4M3, **size)
    apart = {2: torch.zeros(PAGES, PAGE, 140, dtype=torch.uint8)[..., :132]}
    with raises_naming(PoolError, "contiguous"):
        IndexKeyPool.over([LAYER], apart, "pages tokens dim", page_size=PAGE, dtype=DType.FLOAT8_E4M3)
