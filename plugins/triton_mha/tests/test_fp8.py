"""An fp8 cache against float64 over the rows that it holds: interpreted on a CPU, compiled on a GPU.

Scales of keys and values differ from each other and from 1, and all rows that must not be read hold fp8's NaN.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnplug import BackendContext, DType, ForwardMode, MHAPool
from attnplug.host import KVPools
from attnplug_conformance.case import LAYER
from attnplug_testing.devices import DEVICES
from attnplug_testing.kernel_scene import KernelCase, KernelScene, check_stored, mha
from attnplug_triton_mha.configurations import TABLE_FP8, MHAKernelConfig
from interpreted_mha import FP8_TOLERANCE, build, check, on, scene

DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="an fp8 cache is read on SM 89 or newer",
)


def case(mode: ForwardMode, *lengths: tuple[int, int], **changes: object) -> KernelCase:
    given = {"page_size": 16, "heads": 4, "kv_dtype": DType.FLOAT8_E4M3, "kv_scales": (0.37, 1.7)}
    return mha(lengths, mode, **{**given, **changes})


@on_every_device
@pytest.mark.parametrize(("mode", "new", "dim"), [(DECODE, 1, 80), (VERIFY, 3, 64), (EXTEND, 20, 128)])
@pytest.mark.sample(2)
def test_heads_of_every_width(mode, new, dim, device):
    """C4; and new rows are read as the cache holds them."""
    check(case(mode, (40, new), (7, new), head_dim=dim), device)


@on_every_device
def test_window_cap_and_sinks(device):
    check(case(VERIFY, (90, 3), (3, 3), head_dim=32, window=30, cap=2.0, sinks=True), device)


@on_every_device
@pytest.mark.parametrize(
    ("mode", "new", "changes"),
    [(DECODE, 1, {"programs": 15}), (DECODE, 1, {"programs": 9, "single": True}), (EXTEND, 50, {"tile": 64})],
    ids=["many parts", "single steps", "tall tiles"],
)
@pytest.mark.sample(2)
def test_parts_are_merged(mode, new, changes, device):
    cut = replace(MHAKernelConfig(16, 16, 4, 2, programs=9, overlap=False), **changes)
    stage = check(case(mode, (170, new), (0, new), (3, new), head_dim=32), device, lambda *_: cut)
    ((schedule, _),) = stage.backend.init_forward_metadata(stage.batch()).metadata.schedules.values()
    assert int(schedule.records[:, 9].max()) > 1


@on_every_device
def test_float16_queries_are_multiplied_as_they_are(device):
    check(case(DECODE, (40, 1), (7, 1), head_dim=32, dtype=DType.FLOAT16), device)


@on_every_device
def test_small_queries_over_a_large_cache(device):
    """Queries that fp16, in which fp8 rows are multiplied, would hold with a bit or two."""
    stage = scene(case(DECODE, (90, 1), (40, 1), head_dim=32, kv_scales=(1e7, 1.0)), device)
    stage.keys = [keys * 1e7 for keys in stage.keys]
    stage.store(LAYER, [(0, before) for before, _ in stage.case.lengths])
    stage.q *= 1e-7
    assert stage.error() <= FP8_TOLERANCE


def over(shape: str, context: BackendContext, asked: KernelCase) -> tuple[MHAPool, bool]:
    """The scene's pool over a host's memory instead, of the same pages; and whether pairs of columns lie together."""
    made = context.pools.mha
    pages, size, heads, dim = made.keys(LAYER).shape
    tensors: dict[int, Tensor | tuple[Tensor, Tensor]] = {}
    for layer in made.layer_ids:
        if shape == "vllm":
            layout, place = "pages heads tokens (kv dim)", (pages, heads, size, 2 * dim)
            tensors[layer] = torch.full(place, 0x7F, dtype=torch.uint8, device=context.device)
        elif shape == "columns apart":
            layout = "pages tokens heads dim"
            both = torch.full((pages, size, heads, dim, 2), 0x7F, dtype=torch.uint8, device=context.device)
            tensors[layer] = both[..., 0], both[..., 1]
        else:
            layout = "pages tokens heads dim"
            rows = torch.full((2, pages, size, heads, dim + 1), 0x7F, dtype=torch.uint8, device=context.device)
            tensors[layer] = rows[0, ..., 1:], rows[1, ..., 1:]
    scales = {layer: made.scales(layer) for layer in made.layer_ids}
    dtype = DType.FLOAT8_E4M3
    return MHAPool.over(asked.layers, tensors, layout, page_size=size, dtype=dtype, scales=scales), shape == "vllm"


@on_every_device
@pytest.mark.parametrize(
    ("shape", "mode", "new"),
    [("vllm", DECODE, 1), ("vllm", EXTEND, 20), ("columns apart", EXTEND, 20), ("odd addresses", DECODE, 1)],
)
@pytest.mark.sample(2)
def test_a_cache_of_any_strides(mode, new, shape, device):
    pools = []

    def over_a_hosts(context: BackendContext):
        pools.append(over(shape, context, asked))
        return build(replace(context, pools=KVPools(mha=pools[0][0])))

    asked = on(case(mode, (40, new), (7, new), head_dim=32), device)
    stage = KernelScene(asked, device, over_a_hosts)
    pool, pairs = pools[0]
    stage.over(pool)
    assert stage.backend._caches[LAYER].pairs is pairs
    check_stored(stage, FP8_TOLERANCE)


@on_a_gpu
@pytest.mark.parametrize("entry", sorted({entry for *_, entry in TABLE_FP8}, key=str), ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_entry_of_the_table_serves_every_batch(entry, dim, device):
    for given, mode in (
        (((5000, 1), (0, 1), (63, 1), (64, 1), (1700, 1)), DECODE),
        (((2000, 4), (0, 4), (63, 4)), VERIFY),
        (((1999, 300), (0, 1), (64, 0), (1, 77)), EXTEND),
    ):
        check(case(mode, *given, page_size=64, heads=8, head_dim=dim), device, lambda *_: entry)


@on_a_gpu
@pytest.mark.parametrize(("requests", "page_size"), [(1, 1), (7, 16), (60, 64)])
def test_the_same_bits_on_real_batches(requests, page_size, device):
    given = ((3000, 1), *((17 * number % 2500, 1) for number in range(requests - 1)))
    stage = check(case(DECODE, *given, page_size=page_size, heads=32, kv_heads=8, head_dim=128), device)
    first = stage.results()[0]
    assert all(torch.equal(stage.results()[0], first) for _ in range(20))
