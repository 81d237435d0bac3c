"""The pools: what is written at a slot is read back from it, in every layout and type, and nothing else moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.errors import PoolError
from attnplug.kv import KVPools, LayoutName, LinearStatePool, MHAPool, MLAPool, PageCopy, PageLayout, torch_dtype
from attnplug.model import AttentionKind, LayerSpec, LinearDims, MLADims
from attnplug.problem import DType

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")],
    ),
]
LAYOUTS: list[LayoutName] = ["token_major", "head_major"]
PLAIN = [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16]


def mha_layer(layer_id: int = 0, *, kv_heads: int = 2, head_dim: int = 8, v_head_dim: int = 6) -> LayerSpec:
    return LayerSpec(layer_id, AttentionKind.MHA, 4 * kv_heads, kv_heads, head_dim, v_head_dim, 1.0)


def mla_layer(layer_id: int = 0) -> LayerSpec:
    return LayerSpec(layer_id, AttentionKind.MLA, 4, 4, 12, 8, 1.0, mla=MLADims(16, 8, 4))


def linear_layer(layer_id: int = 0, *, heads: int = 2, conv_width: int = 3) -> LayerSpec:
    dims = LinearDims(heads=heads, key_heads=1, key_dim=4, value_dim=5, conv_channels=6, conv_width=conv_width)
    return LayerSpec(layer_id, AttentionKind.GDN, 2, 2, 4, 5, 1.0, linear=dims)


def mha_pool(
    *layers: LayerSpec,
    dtype: DType = DType.FLOAT32,
    device: str = "cpu",
    layout: LayoutName = "token_major",
    scales: dict[int, tuple[float, float]] | None = None,
) -> MHAPool:
    return MHAPool(
        layers or [mha_layer()], num_pages=5, page_size=4, dtype=dtype, device=device, layout=layout, scales=scales
    )


def mla_pool(dtype: DType = DType.FLOAT32, device: str = "cpu", scales: dict[int, float] | None = None) -> MLAPool:
    return MLAPool([mla_layer()], num_pages=5, page_size=4, dtype=dtype, device=device, scales=scales)


def random_rows(tokens: int, heads: int, dim: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(seed)).to(device)


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
@pytest.mark.parametrize("dtype", list(DType))
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
@pytest.mark.parametrize("dtype", list(DType))
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
    assert head_major.layout(0) == (PageLayout.head_major(5, 4, 2, 8), PageLayout.head_major(5, 4, 2, 6))


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
@pytest.mark.parametrize("dtype", list(DType))
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


@settings(deadline=None, max_examples=60)
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
    assert mla_pool().layout(0).split(1) == PageLayout.token_major(20, 1, 1, 20)


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


@settings(deadline=None, max_examples=150)
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
    with pytest.raises(PoolError, match="scale"):
        mla_pool(DType.FLOAT8_E4M3, scales={0: scale})


def test_a_scale_without_fp8_is_refused() -> None:
    with pytest.raises(PoolError, match=r"float16 takes no scale, 2\.0"):
        mla_pool(DType.FLOAT16, scales={0: 2.0})


def test_scales_for_layers_of_others_are_refused() -> None:
    with pytest.raises(PoolError, match="layers 7; the pool has 0"):
        mla_pool(DType.FLOAT8_E4M3, scales={7: 2.0})


# Copies of pages


def filled(pool: MHAPool) -> MHAPool:
    """Page p of every layer holds the number p."""
    for layer_id in pool.layer_ids:
        pages = torch.arange(20, device=pool.keys(layer_id).device)
        numbers = (pages // 4).float().view(20, 1, 1)
        pool.write(layer_id, pages, numbers.expand(20, 2, 8), numbers.expand(20, 2, 6))
    return pool


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], [0, 1, 2, 3, 4]),
        ([(0, 3), (1, 4)], [0, 1, 2, 0, 1]),
        ([(0, 1), (0, 2)], [0, 0, 0, 3, 4]),
        ([(1, 2), (0, 1)], [0, 0, 1, 3, 4]),
        ([(0, 1), (1, 2)], [0, 0, 0, 3, 4]),
        ([(0, 3), (1, 3)], [0, 1, 2, 1, 4]),
    ],
    ids=["none", "apart", "one source", "a source is written later", "a target is read later", "the last one counts"],
)
def test_pages_are_copied_in_every_layer_one_after_another(
    pairs: list[tuple[int, int]], expected: list[int], dtype: DType, layout: LayoutName, device: str
) -> None:
    pool = filled(mha_pool(mha_layer(0), mha_layer(3), dtype=dtype, layout=layout, device=device))
    pool.copy_pages([PageCopy(source, target) for source, target in pairs])
    for layer_id in (0, 3):
        for cache in (pool.keys(layer_id), pool.values(layer_id)):
            content = cache.float().cpu().flatten(1)
            assert torch.equal(content, torch.tensor(expected).float().view(5, 1).expand_as(content))


@pytest.mark.parametrize("copy", [PageCopy(0, 5), PageCopy(-1, 0)])
def test_a_copy_outside_the_pool_is_refused(copy: PageCopy) -> None:
    pool = filled(mha_pool())
    before = pool.keys(0).clone()
    with pytest.raises(PoolError, match="0 to 4"):
        pool.copy_pages([PageCopy(0, 1), copy])
    assert torch.equal(pool.keys(0), before)


def test_the_pools_of_a_model_copy_and_count_together() -> None:
    mha, mla = filled(mha_pool()), mla_pool()
    linear = LinearStatePool([linear_layer()], num_slots=2, dtype=DType.BFLOAT16, device="cpu")
    mla.write(0, torch.arange(4), torch.ones(4, 20))
    pools = KVPools(mha, mla, linear)
    pools.copy_pages([PageCopy(0, 4)])
    assert not mha.keys(0)[4].any()
    assert (mla.rows(0)[4] == 1).all()
    assert mha.nbytes == 5 * 4 * 2 * (8 + 6) * 4
    assert mla.nbytes == 5 * 4 * 20 * 4
    assert linear.nbytes == 2 * (2 * 4 * 5 * 4 + 6 * 3 * 2)
    assert pools.nbytes == mha.nbytes + mla.nbytes + linear.nbytes


def test_a_model_without_pools_has_nothing_to_copy() -> None:
    KVPools().copy_pages([PageCopy(0, 1)])
    assert KVPools().nbytes == 0


def test_an_fp8_cache_takes_a_byte_per_number() -> None:
    assert mla_pool(DType.FLOAT8_E4M3).nbytes * 4 == mla_pool(DType.FLOAT32).nbytes


# What is refused


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("k", "v", "named"),
    [
        (zeros(3, 2, 8), zeros(2, 2, 6), r"keys of shape \[3, 2, 8\].*slots of shape \[2\]"),
        (zeros(2, 1, 8), zeros(2, 2, 6), r"keys of shape \[2, 1, 8\].*\[tokens, 2, 8\]"),
        (zeros(2, 2, 6), zeros(2, 2, 6), r"keys of shape \[2, 2, 6\].*\[tokens, 2, 8\]"),
        (zeros(2, 16), zeros(2, 2, 6), r"keys of shape \[2, 16\]"),
        (zeros(2, 2, 8) + 1, zeros(1, 2, 6), r"values of shape \[1, 2, 6\].*\[tokens, 2, 6\]"),
    ],
)
def test_rows_of_the_wrong_shape_are_refused(k: torch.Tensor, v: torch.Tensor, named: str, layout: LayoutName) -> None:
    pool = mha_pool(layout=layout)
    with pytest.raises(PoolError, match=named):
        pool.write(0, torch.tensor([0, 1]), k, v)
    assert not pool.keys(0).any()


@pytest.mark.parametrize("rows", [zeros(1, 20), zeros(2, 19), zeros(2, 2, 20), zeros(40)])
def test_latent_rows_of_the_wrong_shape_are_refused(rows: torch.Tensor) -> None:
    with pytest.raises(PoolError, match=r"slots of shape \[2\].*\[tokens, 1, 20\]"):
        mla_pool().write(0, torch.tensor([0, 1]), rows)


def test_slots_of_more_than_one_dimension_cannot_be_written() -> None:
    with pytest.raises(PoolError, match=r"slots of shape \[1, 2\]"):
        mla_pool().write(0, torch.tensor([[0, 1]]), zeros(2, 20))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slot", [-1, 20])
def test_slots_outside_the_pool_are_refused(layout: LayoutName, slot: int) -> None:
    pool = mha_pool(layout=layout)
    slots = torch.tensor([0, slot])
    with pytest.raises(PoolError, match=rf"{slot}.*holds 0 to 19"):
        pool.write(0, slots, zeros(2, 2, 8) + 1, zeros(2, 2, 6))
    assert not pool.keys(0).any()
    with pytest.raises(PoolError, match="holds 0 to 19"):
        pool.read_values(0, slots)


def test_slots_on_another_device_are_refused() -> None:
    with pytest.raises(PoolError, match="slots on meta cannot index a cache on cpu"):
        mha_pool().read_keys(0, torch.zeros(2, dtype=torch.int64, device="meta"))


MISSING: dict[str, Callable[[], object]] = {
    "keys": lambda: mha_pool(mha_layer(1), mha_layer(3)).keys(2),
    "values": lambda: mha_pool(mha_layer(1), mha_layer(3)).values(2),
    "layout": lambda: mha_pool(mha_layer(1), mha_layer(3)).layout(2),
    "read": lambda: mha_pool(mha_layer(1), mha_layer(3)).read_values(2, torch.tensor([0])),
    "write": lambda: mha_pool(mha_layer(1), mha_layer(3)).write(2, torch.tensor([0]), zeros(1, 2, 8), zeros(1, 2, 6)),
}


@pytest.mark.parametrize("call", MISSING.values(), ids=MISSING.keys())
def test_a_layer_the_pool_lacks_is_refused_with_those_it_has(call: Callable[[], object]) -> None:
    with pytest.raises(PoolError, match="MHA pool has no layer 2; it has 1, 3"):
        call()


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_that_holds_nothing_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(PoolError, match=f"{num_pages} pages of {page_size} tokens"):
        MHAPool([mha_layer()], num_pages=num_pages, page_size=page_size, dtype=DType.FLOAT32, device="cpu")
    with pytest.raises(PoolError, match=f"{num_pages} pages of {page_size} tokens"):
        MLAPool([mla_layer()], num_pages=num_pages, page_size=page_size, dtype=DType.FLOAT32, device="cpu")


def test_a_pool_takes_only_layers_of_its_kind() -> None:
    layers = [mha_layer(0), mla_layer(1), linear_layer(2)]
    assert mha_pool(*layers).layer_ids == (0,)
    assert MLAPool(layers, num_pages=1, page_size=1, dtype=DType.FLOAT32, device="cpu").layer_ids == (1,)
    assert LinearStatePool(layers, num_slots=1, dtype=DType.FLOAT32, device="cpu").layer_ids == (2,)


def test_a_pool_without_layers_is_refused() -> None:
    with pytest.raises(PoolError, match="no MHA layer"):
        mha_pool(mla_layer())


def test_a_layer_id_that_repeats_is_refused() -> None:
    with pytest.raises(PoolError, match=r"\[4, 4\]"):
        mha_pool(mha_layer(4), mha_layer(4))


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(PoolError, match="'dim_major' is not a cache layout"):
        mha_pool(layout="dim_major")  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_ranks_divide_the_heads_and_keep_at_least_one(ranks: int, heads: int) -> None:
    pool = MHAPool(
        [mha_layer(kv_heads=4)], num_pages=1, page_size=2, dtype=DType.FLOAT32, device="cpu", tensor_parallel=ranks
    )
    assert pool.keys(0).shape == (1, 2, heads, 8)


@pytest.mark.parametrize("ranks", [0, 3, 6])
def test_ranks_that_cannot_divide_the_heads_are_refused(ranks: int) -> None:
    with pytest.raises(PoolError, match=f"4 KV heads cannot be divided over {ranks} ranks"):
        MHAPool(
            [mha_layer(kv_heads=4)], num_pages=1, page_size=2, dtype=DType.FLOAT32, device="cpu", tensor_parallel=ranks
        )


# Linear states


def linear_pool(*layers: LayerSpec, num_slots: int = 3, device: str = "cpu") -> LinearStatePool:
    return LinearStatePool(layers or [linear_layer()], num_slots=num_slots, dtype=DType.BFLOAT16, device=device)


def state(pool: LinearStatePool, layer_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    recurrent, conv = pool.recurrent(layer_id), pool.conv(layer_id)
    assert recurrent is not None
    assert conv is not None
    return recurrent, conv


def test_states_have_a_slot_per_request() -> None:
    recurrent, conv = state(linear_pool())
    assert (recurrent.shape, recurrent.dtype) == ((3, 2, 4, 5), torch.float32)
    assert (conv.shape, conv.dtype) == ((3, 6, 3), torch.bfloat16)


def test_a_state_the_layer_lacks_is_none() -> None:
    pool = linear_pool(linear_layer(0, heads=0), linear_layer(1, conv_width=0))
    assert pool.recurrent(0) is None
    assert pool.conv(1) is None
    assert pool.conv(0) is not None
    assert pool.recurrent(1) is not None


@pytest.mark.parametrize("device", DEVICES)
def test_an_allocated_slot_is_zero_in_every_layer_and_others_stay(device: str) -> None:
    pool = linear_pool(linear_layer(0), linear_layer(1, heads=0), linear_layer(2, conv_width=0), device=device)
    states = [pool.recurrent(0), pool.conv(0), pool.conv(1), pool.recurrent(2)]
    for each in states:
        assert each is not None
        each.fill_(torch.nan)
    slot = pool.allocate()
    for each in states:
        assert each is not None
        assert not each[slot].any()
        assert each[[s for s in range(3) if s != slot]].isnan().all()


def test_one_slot_too_many_names_their_number_and_the_option() -> None:
    pool = linear_pool(num_slots=2)
    pool.allocate()
    pool.allocate()
    with pytest.raises(PoolError, match=r"all 2 linear-state slots.*--max-batch"):
        pool.allocate()


def test_a_shared_slot_is_free_only_after_its_last_release() -> None:
    pool = linear_pool()
    slot = pool.allocate()
    pool.share(slot)
    pool.release(slot)
    assert (pool.references(slot), pool.free_slots) == (1, 2)
    pool.release(slot)
    assert (pool.free_slots, pool.num_slots) == (3, 3)


def test_a_slot_is_not_released_twice() -> None:
    pool = linear_pool()
    slot = pool.allocate()
    pool.release(slot)
    with pytest.raises(PoolError, match="slots released more often"):
        pool.release(slot)


@pytest.mark.parametrize("device", DEVICES)
def test_a_copied_state_is_a_snapshot(device: str) -> None:
    pool = linear_pool(device=device)
    source, target = pool.allocate(), pool.allocate()
    recurrent, conv = state(pool)
    recurrent[source], conv[source] = 3.0, 4.0
    pool.copy(source, target)
    recurrent[source], conv[source] = torch.nan, torch.nan
    assert (recurrent[target] == 3).all()
    assert (conv[target] == 4).all()


def test_a_shared_slot_can_be_copied_from_and_not_to() -> None:
    pool = linear_pool()
    shared, other = pool.allocate(), pool.allocate()
    pool.share(shared)
    pool.copy(shared, other)
    state(pool)[0][other] = 1.0
    with pytest.raises(PoolError, match=rf"slot {other} \(1 references\) cannot be copied to slot {shared} \(2\)"):
        pool.copy(other, shared)
    assert not state(pool)[0][shared].any()


def test_free_slots_are_not_copied() -> None:
    pool = linear_pool()
    slot = pool.allocate()
    free = next(s for s in range(3) if s != slot)
    for source, target in ((free, slot), (slot, free), (slot, 3)):
        with pytest.raises(PoolError):
            pool.copy(source, target)


def test_a_linear_layer_the_pool_lacks_is_refused() -> None:
    with pytest.raises(PoolError, match="linear pool has no layer 9; it has 0"):
        linear_pool().recurrent(9)


def test_convolution_states_in_fp8_are_refused() -> None:
    with pytest.raises(PoolError, match="float8_e4m3fn"):
        LinearStatePool([linear_layer()], num_slots=1, dtype=DType.FLOAT8_E4M3, device="cpu")


@pytest.mark.parametrize("dtype", list(DType))
def test_every_type_has_its_torch_type_by_name(dtype: DType) -> None:
    assert str(torch_dtype(dtype)) == f"torch.{dtype.value}"
