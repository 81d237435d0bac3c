"""Caches in coded formats against float64 over the rows that they hold: interpreted on a CPU, compiled on a GPU.

A layer's scales of keys and values differ from each other and from 1, and rows that must not be read hold NaN.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnplug import BackendContext, DType, ForwardMode, MHAPool
from attnplug.host import KVPools, load_registry
from attnplug_conformance.case import LAYER
from attnplug_testing.devices import DEVICES
from attnplug_testing.kernel_scene import KernelCase, KernelScene, check_stored, mha
from attnplug_triton_mha.configurations import TABLES, MHAKernelConfig
from attnplug_triton_mha.triton_rows import NVFP4_BITS, NVFP4_FACTORS
from interpreted_mha import CODED_TOLERANCE, build, check, on, scene

DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND
FP8, ROWS, NVFP4 = "float8_e4m3fn", "fp8_per_token_head", "nvfp4"
FORMATS = [FP8, ROWS, NVFP4]
in_every_format = pytest.mark.parametrize("format", FORMATS)
in_new_formats = pytest.mark.parametrize("format", FORMATS[1:])
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="an fp8 cache is read on SM 89 or newer",
)
ROW_FORMATS = {name: provided.value for name, provided in load_registry().kv_formats.items()}


def case(mode: ForwardMode, *lengths: tuple[int, int], **changes: object) -> KernelCase:
    given = {"page_size": 16, "heads": 4, "kv_dtype": FP8, "kv_scales": (0.37, 1.7)}
    return mha(lengths, mode, **{**given, **changes})


@on_every_device
@in_every_format
@pytest.mark.parametrize(("mode", "new", "dim"), [(DECODE, 1, 80), (VERIFY, 3, 64), (EXTEND, 20, 128)])
@pytest.mark.sample(3)
def test_heads_of_every_width(mode, new, dim, format, device):
    """C4; and new rows are read as the cache holds them."""
    check(case(mode, (40, new), (7, new), head_dim=dim, kv_dtype=format), device)


@on_every_device
@in_every_format
def test_values_narrower_than_keys(format, device):
    check(case(DECODE, (40, 1), (7, 1), head_dim=64, v_head_dim=16, kv_dtype=format), device)


@on_every_device
@in_every_format
def test_window_cap_and_sinks(format, device):
    check(case(VERIFY, (90, 3), (3, 3), head_dim=32, window=30, cap=2.0, sinks=True, kv_dtype=format), device)


@on_every_device
@pytest.mark.parametrize(
    ("mode", "new", "changes"),
    [(DECODE, 1, {"programs": 15}), (DECODE, 1, {"programs": 9, "single": True}), (EXTEND, 50, {"tile": 64})],
    ids=["many parts", "single steps", "tall tiles"],
)
@pytest.mark.sample(6)
@pytest.mark.parametrize("format", [FP8, *(pytest.param(name, marks=pytest.mark.long) for name in FORMATS[1:])])
def test_parts_are_merged(mode, new, changes, format, device):
    cut = replace(MHAKernelConfig(16, 16, 4, 2, programs=9, overlap=False), **changes)
    stage = check(case(mode, (170, new), (0, new), (3, new), head_dim=32, kv_dtype=format), device, lambda *_: cut)
    ((schedule, _),) = stage.backend.init_forward_metadata(stage.batch()).metadata.schedules.values()
    assert int(schedule.records[:, 9].max()) > 1


@on_every_device
def test_float16_queries_are_multiplied_as_they_are(device):
    check(case(DECODE, (40, 1), (7, 1), head_dim=32, dtype=DType.FLOAT16), device)


@on_every_device
@in_new_formats
def test_rows_of_any_magnitude(format, device):
    """Scales of rows differ by orders of magnitude, or all values are so small that fp16 cannot hold their weights."""
    for keys, values, various in ((1.0, 1e-5, False), (1e-3, 1e4, True)):
        stage = scene(case(DECODE, (90, 1), (40, 1), head_dim=32, kv_dtype=format, kv_scales=(keys, values)), device)
        spread = torch.logspace(-1, 1, 91, device=device).view(-1, 1, 1)
        stage.keys = [rows * keys * (spread[: len(rows)] if various else 1.0) for rows in stage.keys]
        stage.values = [rows * values * spread[: len(rows)] for rows in stage.values]
        stage.store(LAYER, [(0, before) for before, _ in stage.case.lengths])
        stage.q /= keys
        assert stage.error() <= CODED_TOLERANCE


@on_every_device
@in_new_formats
def test_rows_that_were_never_written_are_zeros(format, device):
    """A scale of zero divides nothing."""
    stage = scene(case(DECODE, (40, 1), (20, 1), head_dim=32, kv_dtype=format), device)
    for memory in (part for parts in stage.contents(LAYER) for part in parts):
        memory.view(torch.uint8).zero_()
    assert stage.results()[0].isfinite().all()


@on_every_device
def test_nvfp4_without_fp8_instructions(device):
    """GPUs before SM 89 convert codes and scales by integer operations, to numbers of another magnitude."""
    stage = scene(case(DECODE, (40, 1), (7, 1), head_dim=32, kv_dtype=NVFP4), device)
    cache = stage.backend._caches[LAYER]
    by = NVFP4_FACTORS[NVFP4_BITS.value] / NVFP4_FACTORS[cache.format]
    stage.backend._caches[LAYER] = replace(
        cache, format=NVFP4_BITS.value, key_factor=cache.key_factor * by, value_factor=cache.value_factor * by
    )
    assert stage.error() <= CODED_TOLERANCE


@on_every_device
def test_small_queries_over_a_large_cache(device):
    """Queries that are so small that fp16, in which fp8 rows are multiplied, would keep only a bit or two."""
    stage = scene(case(DECODE, (90, 1), (40, 1), head_dim=32, kv_scales=(1e7, 1.0)), device)
    stage.keys = [keys * 1e7 for keys in stage.keys]
    stage.store(LAYER, [(0, before) for before, _ in stage.case.lengths])
    stage.q *= 1e-7
    assert stage.error() <= CODED_TOLERANCE


def over(format: str, shape: str, context: BackendContext, asked: KernelCase) -> tuple[MHAPool, bool]:
    """The scene's pool over a host's memory with the same pages, and whether pairs of columns are adjacent."""
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
    dtype = ROW_FORMATS.get(format, format)
    scales = None if format == ROWS else {layer: made.scales(layer) for layer in made.layer_ids}
    return MHAPool.over(asked.layers, tensors, layout, page_size=size, dtype=dtype, scales=scales), shape == "vllm"


@on_every_device
@pytest.mark.parametrize(
    ("format", "shape", "mode", "new"),
    [
        (FP8, "vllm", DECODE, 1),
        (FP8, "vllm", EXTEND, 20),
        (FP8, "columns apart", EXTEND, 20),
        (FP8, "odd addresses", DECODE, 1),
        (ROWS, "vllm", DECODE, 1),
        (NVFP4, "vllm", EXTEND, 20),
        (NVFP4, "odd addresses", DECODE, 1),
    ],
)
@pytest.mark.sample(3)
def test_a_cache_of_any_strides(mode, new, format, shape, device):
    pools = []

    def over_a_hosts(context: BackendContext):
        pools.append(over(format, shape, context, asked))
        return build(replace(context, pools=KVPools(mha=pools[0][0])))

    asked = on(case(mode, (40, new), (7, new), head_dim=32, kv_dtype=format), device)
    stage = KernelScene(asked, device, over_a_hosts)
    pool, pairs = pools[0]
    stage.over(pool)
    assert stage.backend._caches[LAYER].pairs is pairs
    check_stored(stage, CODED_TOLERANCE)


@on_a_gpu
@pytest.mark.parametrize(
    ("format", "entry", "dim"),
    [
        (format, entry, dim)
        for number, format in enumerate(FORMATS, 1)
        for entry in sorted({entry for *_, entry in TABLES[number]}, key=str)
        for dim in ((64, 128, 256) if format == FP8 else (128,))
    ],
    ids=str,
)
def test_every_entry_of_the_table_serves_every_batch(format, entry, dim, device):
    for given, mode in (
        (((5000, 1), (0, 1), (63, 1), (64, 1), (1700, 1)), DECODE),
        (((2000, 4), (0, 4), (63, 4)), VERIFY),
        (((1999, 300), (0, 1), (64, 0), (1, 77)), EXTEND),
    ):
        check(case(mode, *given, page_size=64, heads=8, head_dim=dim, kv_dtype=format), device, lambda *_: entry)


@on_a_gpu
@pytest.mark.parametrize(("requests", "page_size"), [(1, 1), (7, 16), (60, 64)])
@in_every_format
def test_the_same_bits_on_real_batches(requests, page_size, format, device):
    given = ((3000, 1), *((17 * number % 2500, 1) for number in range(requests - 1)))
    asked = case(DECODE, *given, page_size=page_size, heads=32, kv_heads=8, head_dim=128, kv_dtype=format)
    stage = check(asked, device)
    first = stage.results()[0]
    assert all(torch.equal(stage.results()[0], first) for _ in range(20))
