"""Rows in the pools: in every layout and type, a written slot reads back its row and no other slot changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug import AttentionKind, DType, LayerSpec, MHAPool, MLAPool, PoolError
from attnplug.host import MLADims
from attnplug.kernels import PageCopy, PageLayout, torch_dtype
from attnplug.kv.layout import LayoutName
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.errors import raises_naming
from attnplug_testing.writing import BY_TRITON, WAYS, writing
from support.pools import ELEMENTS, LAYOUTS, PLAIN, mha_layer, mha_pool, mla_layer, mla_pool, random_rows

# What is written is read back


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", PLAIN)
def test_rows_are_read_back_as_stored(dtype: DType, layout: LayoutName, device: str) -> None:
    pool = mha_pool(dtype=dtype, layout=layout, device=device)
    slots = torch.tensor([19, 0, 7, 4], device=device)
    k, v = random_rows(4, 2, 8, device), random_rows(4, 2, 6, device, seed=1)
    pool.write(0, slots, k, v)
    assert torch.equal(pool.read_keys(0, slots), k.to(torch_dtype(dtype)))
    assert torch.equal(pool.read_values(0, slots), v.to(torch_dtype(dtype)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_a_row_lies_at_its_page_and_offset_and_nowhere_else(dtype: DType, layout: LayoutName, device: str) -> None:
    pool = mha_pool(dtype=dtype, layout=layout, device=device)
    ones = torch.ones(1, 2, 8, device=device)
    pool.write(0, torch.tensor([2 * 4 + 3], device=device), ones, ones[..., :6])
    for cache in (pool.keys(0), pool.values(0)):
        assert cache.dtype == torch_dtype(dtype)
        content = cache.float().cpu()
        assert (content[2, 3] == 1).all()
        assert content.sum() == content[2, 3].sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_layouts_differ_in_memory_and_agree_in_content(dtype: DType, device: str) -> None:
    token_major = mha_pool(dtype=dtype, layout="token_major", device=device)
    head_major = mha_pool(dtype=dtype, layout="head_major", device=device)
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(3))[:13].to(device)
    k, v = random_rows(13, 2, 8, device), random_rows(13, 2, 6, device, seed=1)
    for pool in (token_major, head_major):
        pool.write(0, slots, k, v)
        pool.copy_pages([PageCopy(0, 4), PageCopy(2, 1)])
    assert torch.equal(token_major.keys(0).float(), head_major.keys(0).float())
    assert torch.equal(token_major.values(0).float(), head_major.values(0).float())
    assert token_major.keys(0).stride() == token_major.layout(0)[0].strides
    assert head_major.keys(0).stride() == head_major.layout(0)[0].strides
    assert head_major.layout(0) == (
        PageLayout.named("head_major", 5, 4, 2, 8),
        PageLayout.named("head_major", 5, 4, 2, 6),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 0), (1, 2, 2)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_reads_keep_the_shape_of_the_slots(layout: LayoutName, shape: tuple[int, ...], index: torch.dtype) -> None:
    pool = mha_pool(layout=layout)
    every = torch.arange(20)
    k, v = random_rows(20, 2, 8), random_rows(20, 2, 6, seed=1)
    pool.write(0, every, k, v)
    slots = torch.randint(20, shape, generator=torch.Generator().manual_seed(1)).to(index)
    assert torch.equal(pool.read_keys(0, slots), k[slots.long()])
    assert torch.equal(pool.read_values(0, slots), v[slots.long()])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_and_slots_need_not_be_contiguous(layout: LayoutName) -> None:
    pool = mha_pool(layout=layout)
    packed = random_rows(2, 6, 14).transpose(0, 1)
    slots = torch.arange(20)[::3][:6]
    pool.write(0, slots, packed[..., :8], packed[..., 8:])
    assert torch.equal(pool.read_keys(0, slots), packed[..., :8])
    assert torch.equal(pool.read_values(0, slots.view(2, 3).t()), packed[..., 8:][torch.arange(6).view(2, 3).t()])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_only_the_slots_asked_for_are_read(dtype: DType, layout: LayoutName) -> None:
    pool = mha_pool(dtype=dtype, layout=layout)
    every, written = torch.arange(20), torch.tensor([6, 17])
    pool.write(0, every, torch.full((20, 2, 8), torch.nan), torch.full((20, 2, 6), torch.nan))
    pool.write(0, written, torch.ones(2, 2, 8), torch.ones(2, 2, 6))
    assert (pool.read_keys(0, written) == 1).all()
    assert (pool.read_values(0, written) == 1).all()
    assert pool.read_keys(0, every).isnan().sum() == 18 * 2 * 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rows_can_be_written(layout: LayoutName) -> None:
    pool = mha_pool(layout=layout)
    pool.write(0, torch.empty(0, dtype=torch.int64), torch.empty(0, 2, 8), torch.empty(0, 2, 6))
    assert not pool.keys(0).any()


def test_layers_do_not_share_memory() -> None:
    pool = mha_pool(mha_layer(1), mha_layer(5, kv_heads=1, head_dim=4, v_head_dim=4))
    pool.write(5, torch.tensor([0]), torch.ones(1, 1, 4), torch.ones(1, 1, 4))
    assert not pool.keys(1).any()
    assert pool.layer_ids == (1, 5)


def test_a_kernel_with_smaller_pages_sees_the_same_rows() -> None:
    pool = mha_pool()
    k, v = random_rows(20, 2, 8), random_rows(20, 2, 6)
    pool.write(0, torch.arange(20), k, v)
    kernel_layout = pool.layout(0)[0].split(2)
    kernel_pages = pool.keys(0).as_strided(kernel_layout.shape, kernel_layout.strides)
    assert torch.equal(kernel_pages[7], k[14:16])


@settings(deadline=None, max_examples=12)
@given(st.data(), st.sampled_from(LAYOUTS), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_any_sequence_of_writes_reads_back_like_a_flat_array(
    data: st.DataObject, layout: LayoutName, num_pages: int, page_size: int, heads: int
) -> None:
    layer = mha_layer(kv_heads=heads, head_dim=2, v_head_dim=3)
    pool = MHAPool([layer], num_pages=num_pages, page_size=page_size, dtype=DType.FLOAT32, device="cpu", layout=layout)
    size = num_pages * page_size
    keys, values = torch.zeros(size, heads, 2), torch.zeros(size, heads, 3)
    for seed in range(data.draw(st.integers(1, 3))):
        slots = torch.tensor(data.draw(st.lists(st.integers(0, size - 1), unique=True)), dtype=torch.int64)
        k, v = random_rows(len(slots), heads, 2, seed=seed), random_rows(len(slots), heads, 3, seed=seed + 9)
        pool.write(0, slots, k, v)
        keys[slots], values[slots] = k, v
    assert torch.equal(pool.read_keys(0, torch.arange(size)), keys)
    assert torch.equal(pool.values(0).reshape(size, heads, 3), values)


# MLA


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("shape", [(3, 20), (3, 1, 20)])
def test_latent_rows_are_read_back_as_stored(dtype: DType, shape: tuple[int, ...], device: str) -> None:
    pool = mla_pool(dtype, device)
    slots = torch.tensor([19, 0, 7], device=device)
    rows = random_rows(3, 1, 20, device).view(shape)
    pool.write(0, slots, rows)
    assert pool.rows(0).shape == (5, 4, 1, 20)
    assert torch.equal(pool.read_rows(0, slots.view(3, 1)), rows.view(3, 1, 20).to(torch_dtype(dtype)))
    assert torch.equal(pool.rows(0)[4, 3, 0], rows.view(3, 20)[0].to(torch_dtype(dtype)))


def test_latent_rows_are_cut_into_kernel_pages() -> None:
    assert mla_pool().layout(0).split(1) == PageLayout.named("token_major", 20, 1, 1, 20)


# Padding


SLOTS = [[-1, 6, -1, 17, 3], [6, -1], [-1, -1, 19], [-1], [-1] * 4, [], [19, 0, 7]]


def test_the_kernel_asks_amd_for_nothing_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """On AMD, a capability of 9.4 is not Hopper, and Triton refuses options of other GPUs."""
    options = pytest.importorskip("triton.backends.amd.compiler").HIPOptions
    from attnplug.kv import triton_rows

    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 4))
    layout = PageLayout.named("token_major", 5, 4, 1, 20)
    asked: dict[str, object] = {}

    class Launch:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            return lambda *_, **constants: asked.update(constants)

    names = set(triton_rows._write_rows.arg_names)
    monkeypatch.setattr(triton_rows, "_write_rows", Launch())
    pages = layout.view(torch.zeros(layout.elements))
    triton_rows.RowWriter(pages, layout, 1.0).write(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, 20))
    assert asked["EARLY"] is False
    assert set(asked) - names <= set(options.__dataclass_fields__)


def bits(cache: torch.Tensor) -> torch.Tensor:
    """A cache's memory, NaN included, in the order of slots ``[slots, bytes of a row]``."""
    return cache.cpu().contiguous().flatten(0, 1).flatten(1).view(torch.uint8)


@pytest.mark.parametrize("device", [DEVICES[1], BY_TRITON])
@pytest.mark.parametrize(
    "layout", [PageLayout.named("token_major", 5, 4, 3, 20), PageLayout.named("head_major", 5, 4, 3, 20)]
)
def test_the_kernel_writes_nothing_before_or_behind_the_pages(layout: PageLayout, device: str) -> None:
    """B5: slot -1 is skipped, and so is a slot past the pool, which only the device can detect."""
    from attnplug.kv.triton_rows import RowWriter

    guard, slots = layout.elements // layout.num_pages, torch.tensor([-1, 0, 19, 20, -2, 3, 4])
    with writing(device) as where:
        memory = torch.full((guard + layout.elements + guard,), torch.nan, device=where)
        pages = layout.view(memory[guard : guard + layout.elements])
        RowWriter(pages, layout, 1.0).write(slots.to(where), random_rows(len(slots), 3, 20, where))
    assert memory[:guard].isnan().all() and memory[-guard:].isnan().all()
    written = (~pages.isnan()).flatten(2).all(2)
    assert written.flatten().nonzero().flatten().tolist() == [0, 3, 4, 19]
    assert int((~memory.isnan()).sum()) == 4 * 3 * 20


@pytest.mark.parametrize("how", [BY_TRITON, DEVICES[1]])
def test_keys_and_values_are_written_by_one_launch(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnplug.kv import triton_rows

    launched = []
    for name in ("_write_rows", "_write_pairs"):
        kernel = getattr(triton_rows, name)

        class Launch:
            def __getitem__(self, grid: tuple[int, int], name: str = name, kernel: object = kernel) -> object:
                launched.append(name)
                return kernel[grid]  # type: ignore[index] # triton.jit makes it so

        monkeypatch.setattr(triton_rows, name, Launch())
    with writing(how) as device:
        pool = mha_pool(mha_layer(kv_heads=13, head_dim=128, v_head_dim=96), device=device)
        k, v = random_rows(2, 13, 128, device), random_rows(2, 13, 96, device)
        pool.write(0, torch.tensor([3, 11], device=device), k, v)
        assert torch.equal(pool.read_values(0, torch.tensor([3, 11], device=device)), v)
    assert launched == ["_write_pairs"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("dtype", "layout"), list(itertools.product(ELEMENTS, LAYOUTS)))
@pytest.mark.parametrize("numbers", SLOTS, ids=str)
@pytest.mark.sample(74)
def test_rows_without_a_slot_are_not_written(numbers: list[int], dtype: DType, layout: LayoutName, how: str) -> None:
    """B5: rows of padding are not written. In particular, slot -1 does not mean the last slot."""
    index = torch.int32 if (len(numbers) % 2) == (layout == "token_major") else torch.int64
    with writing(how) as device:
        pool = mha_pool(dtype=dtype, layout=layout, device=device)
        for cache in (pool.keys(0), pool.values(0)):
            cache.copy_(torch.tensor(torch.nan))
        slots = torch.tensor(numbers, dtype=index)
        # Multiples of one half, which every type represents: the interpreter's rounding differs.
        k, v = (
            (2 * random_rows(len(numbers), 2, dim, device, seed=dim)).round().clamp(-7, 7) / 2 + 0.5 for dim in (8, 6)
        )
        k[slots < 0], v[slots < 0] = 96.0, 96.0
        expected = [bits(cache).clone() for cache in (pool.keys(0), pool.values(0))]
        for wanted, rows in zip(expected, (k, v), strict=True):
            for slot, row in zip(numbers, rows.cpu(), strict=True):
                if slot >= 0:
                    wanted[slot] = row.to(torch_dtype(dtype)).flatten().view(torch.uint8)
        ready = slots.to(device)
        pool.write(0, ready, k, v)  # compiles
        with nothing_waits(device):
            pool.write(0, ready, k, v)
        assert torch.equal(bits(pool.keys(0)), expected[0])
        assert torch.equal(bits(pool.values(0)), expected[1])


@pytest.mark.parametrize("how", [way for way in WAYS if way is not BY_TRITON])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fp8_rows_beside_padding_are_the_nearest_to_float64(dtype: torch.dtype, how: str) -> None:
    """The width is that of a DeepSeek row. Rows are divided in float64, saturated, and keep NaN; the scale is not a
    power of two."""
    layer = LayerSpec(0, AttentionKind.MLA, 4, 4, 192, 128, 1.0, mla=MLADims(512, 128, 64))
    with writing(how) as device:
        pool = MLAPool([layer], num_pages=3, page_size=16, dtype=DType.FLOAT8_E4M3, device=device, scales={0: 0.40625})
        rows = (100 * random_rows(5, 1, 576, device)).to(dtype)
        rows[0, 0, :4] = torch.tensor([1e4, -1e4, torch.nan, 0.40625 * 448])
        slots = torch.tensor([47, -1, 0, -1, 18])
        pool.write(0, slots.to(device), rows)
        wanted = torch.zeros(48, 576, dtype=torch.float64)
        for slot, row in zip(slots.tolist(), rows.cpu().double().squeeze(1), strict=True):
            if slot >= 0:
                wanted[slot] = (row / 0.40625).clamp(-448, 448)
        assert (wanted == 448).sum() > 2
        written = bits(pool.rows(0))
        written[(written & 127) == 127] = 127  # a NaN of either sign: processors differ
        assert torch.equal(written, nearest_float8(wanted))


def nearest_float8(x: torch.Tensor) -> torch.Tensor:
    """The bits of the nearest number of float8_e4m3fn, of two equally near the even one; NaN without a sign."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # ascending; 127 is NaN
    above = torch.searchsorted(numbers, x.abs()).clamp(max=126)
    below = (above - 1).clamp(min=0)
    up, down = numbers[above] - x.abs(), x.abs() - numbers[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    code = torch.where(x.isnan(), 127, code) + torch.where(x < 0, 128, 0)
    return code.to(torch.uint8)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_beside_padding_need_not_be_contiguous(layout: LayoutName, how: str) -> None:
    """Pools accept sliced and transposed rows, every other element of a slot tensor, and heads that are not
    adjacent."""
    with writing(how) as device:
        pool = mha_pool(layout=layout, device=device)
        packed = random_rows(2, 6, 14, device).transpose(0, 1)
        slots = torch.tensor([4, 0, -1, 0, 9, 0, 2, 0, -1, 0, 19, 0], device=device)[::2]
        pool.write(0, slots, packed[..., :8], packed[..., 8:])
        live = torch.tensor([0, 2, 3, 5], device=device)
        assert torch.equal(pool.read_keys(0, slots[live]), packed[live][..., :8])
        assert torch.equal(pool.read_values(0, slots[live]), packed[live][..., 8:])
        wide = random_rows(6, 8, 2, device, seed=4).transpose(1, 2)
        pool.write(0, slots, wide, wide[..., 2:])
        assert torch.equal(pool.read_keys(0, slots[live]), wide[live])
        assert pool.keys(0).count_nonzero() == 4 * 2 * 8


@pytest.mark.parametrize("how", WAYS)
def test_rows_wider_than_a_block_are_written_whole(how: str) -> None:
    with writing(how) as device:
        pool = mha_pool(mha_layer(kv_heads=13, head_dim=128, v_head_dim=96), device=device, layout="head_major")
        slots = torch.tensor([3, -1, 11], device=device)
        k, v = random_rows(3, 13, 128, device), random_rows(3, 13, 96, device)
        pool.write(0, slots, k, v)
        assert torch.equal(pool.read_keys(0, slots[::2]), k[::2])
        assert torch.equal(pool.read_values(0, slots[::2]), v[::2])
        assert pool.keys(0).count_nonzero() == 2 * 13 * 128


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_slot_behind_the_last_writes_nothing_on_a_gpu(device: str) -> None:
    """The CPU refuses such a slot. A GPU would need a synchronization to report it, so it drops the row."""
    pool = mla_pool(device=device)
    pool.write(0, torch.tensor([20, 1 << 40], device=device), torch.ones(2, 20, device=device))
    assert not pool.rows(0).any()


@pytest.mark.parametrize("device", DEVICES[1:])
def test_writing_can_be_captured(device: str) -> None:
    """B2's ground: which rows are padding is decided at each replay."""
    pool = mla_pool(device=device)
    slots, rows = torch.tensor([3, -1], device=device), torch.ones(2, 20, device=device)
    pool.write(0, slots, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.write(0, slots, rows)
    pool.rows(0).zero_()
    slots.copy_(torch.tensor([-1, 7]))
    graph.replay()
    assert pool.rows(0).flatten(0, 1).sum((1, 2)).nonzero().tolist() == [[7]]


# fp8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_rows_come_back_within_half_a_step(layout: LayoutName, device: str) -> None:
    scales = {0: (0.25, 3.0)}
    pool = mha_pool(dtype=DType.FLOAT8_E4M3, layout=layout, device=device, scales=scales)
    slots = torch.arange(20, device=device)
    k, v = random_rows(20, 2, 8, device), random_rows(20, 2, 6, device, seed=1)
    pool.write(0, slots, k, v)
    assert pool.scales(0) == (0.25, 3.0)
    for read, written, scale in ((pool.read_keys(0, slots), k, 0.25), (pool.read_values(0, slots), v, 3.0)):
        assert read.dtype == torch.float32
        # Three bits of mantissa: half a step is 2^-4 of the number, and 2^-10 below the smallest normal one.
        bound = torch.maximum(written.abs() * 2**-4, torch.tensor(scale * 2**-10, device=device))
        assert ((read - written).abs() <= bound).all()
    assert torch.equal(pool.keys(0).float() * 0.25, pool.read_keys(0, slots).view(5, 4, 2, 8))


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.floats(-(2**20), 2**20, width=32), min_size=1, max_size=20),
    st.floats(2**-8, 2**8, width=32),
)
def test_fp8_error_is_bounded_for_any_number_and_scale(numbers: list[float], scale: float) -> None:
    pool = MLAPool([mla_layer()], num_pages=1, page_size=1, dtype=DType.FLOAT8_E4M3, device="cpu", scales={0: scale})
    row = torch.zeros(1, 20)
    row[0, : len(numbers)] = torch.tensor(numbers)
    pool.write(0, torch.tensor([0]), row)
    read = pool.read_rows(0, torch.tensor([0])).double()
    expected = row.double().clamp(-448 * scale, 448 * scale)
    bound = torch.maximum(expected.abs() * 2**-4, torch.tensor(scale * 2**-10)) * (1 + 1e-5)
    assert ((read - expected).abs() <= bound).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", PLAIN)
def test_fp8_saturates_and_keeps_nan(dtype: DType, device: str) -> None:
    pool = mla_pool(DType.FLOAT8_E4M3, device, scales={0: 2.0})
    row = torch.zeros(1, 20, dtype=torch_dtype(dtype), device=device)
    row[0, :6] = torch.tensor([1e4, -1e4, torch.inf, -torch.inf, torch.nan, 896.0])
    pool.write(0, torch.tensor([3], device=device), row)
    read = pool.read_rows(0, torch.tensor(3, device=device))
    assert read[:4].tolist() == [896.0, -896.0, 896.0, -896.0]
    assert read[4].isnan()
    assert read[5] == 896.0


def test_fp8_writing_does_not_change_what_was_handed_in() -> None:
    pool = mla_pool(DType.FLOAT8_E4M3)
    rows = torch.full((1, 20), 1e4)
    pool.write(0, torch.tensor([0]), rows)
    assert (rows == 1e4).all()


def test_a_scale_is_one_unless_given() -> None:
    pool = mha_pool(mha_layer(0), mha_layer(1), dtype=DType.FLOAT8_E4M3, scales={1: (2.0, 4.0)})
    assert (pool.scales(0), pool.scales(1)) == ((1.0, 1.0), (2.0, 4.0))
    assert mla_pool().scale(0) == 1.0


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_cannot_be_divided_by_is_refused(scale: float) -> None:
    with raises_naming(PoolError, "scale", scale):
        mla_pool(DType.FLOAT8_E4M3, scales={0: scale})


def test_a_scale_without_fp8_is_refused() -> None:
    with raises_naming(PoolError, "float16", "2.0"):
        mla_pool(DType.FLOAT16, scales={0: 2.0})


@pytest.mark.parametrize("scale", [2.0, (2.0,), (1.0, 2.0, 3.0)])
def test_keys_and_values_have_a_scale_each(scale: Any) -> None:
    with raises_naming(PoolError, "layer 0", str(scale), "keys, values"):
        mha_pool(dtype=DType.FLOAT8_E4M3, scales={0: scale})


def test_scales_for_layers_of_others_are_refused() -> None:
    with raises_naming(PoolError, 7, 0):
        mla_pool(DType.FLOAT8_E4M3, scales={7: 2.0})


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_every_type_has_its_torch_type_by_name(dtype: DType) -> None:
    assert str(torch_dtype(dtype)) == f"torch.{dtype.value}"
