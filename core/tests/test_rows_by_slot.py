"""MLA pools by slot, for hosts whose own kernels store new rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import DType, MLAPool
from attnplug.host import MLADims
from support.pools import PLAIN, mla_layer, mla_pool


@pytest.mark.parametrize("dtype", PLAIN)
def test_a_pool_is_seen_by_slots(dtype):
    pool = mla_pool(dtype)
    pool.by_slot(0)[7] = torch.arange(20)
    assert torch.equal(pool.rows(0)[1, 3, 0].float(), torch.arange(20.0)) and int(pool.rows(0).count_nonzero()) == 19


def test_rows_with_scales_are_stored_by_the_pool_alone():
    layer = replace(mla_layer(), mla=MLADims(512, 128, 64))
    assert MLAPool([layer], num_pages=5, page_size=4, dtype=DType.FLOAT8_E4M3, device="cpu").by_slot(0) is None


def test_rows_of_a_hosts_memory_may_lie_apart():
    memory = torch.zeros(5, 4, 32)
    pool = MLAPool.over([mla_layer()], {0: memory[..., 8:28]}, "pages tokens dim", page_size=4, dtype=DType.FLOAT32)
    pool.by_slot(0)[7] = 1.0
    assert (memory[1, 3, 8:28] == 1).all() and int(memory.count_nonzero()) == 20


def test_pages_that_one_stride_does_not_lead_to_are_the_pools_affair():
    """``by_slot`` returns None if a page holds all layers, because slots of a layer then have no common stride."""
    memory = torch.zeros(5, 2, 4, 20)
    pool = MLAPool.over([mla_layer()], {0: memory[:, 0]}, "pages tokens dim", page_size=4, dtype=DType.FLOAT32)
    assert pool.by_slot(0) is None
