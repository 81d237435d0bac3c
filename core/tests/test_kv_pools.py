"""The pools as a whole: copies of pages, the memory they take, and everything they refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, assert_type

import pytest
import torch

from attnplug import BackendError, DType, KVFormat, MHAPool, MLAPool, ModelSpec, PoolError, RowPart, UsageError
from attnplug.host import HostContext, KVPools, Limits, ModelAttention, WorkspaceOwner
from attnplug.kernels import CacheKey, PageCopy
from attnplug.kv.layout import LayoutName
from attnplug.linear import LinearStatePool
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.errors import raises_naming
from support.pools import ELEMENTS, LAYOUTS, linear_layer, mha_layer, mha_pool, mla_layer, mla_pool
from support.recorder import Hookless

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
@pytest.mark.parametrize("dtype", ELEMENTS)
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
    with raises_naming(PoolError, "0 to 4"):
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


# Caches that a layer kind brings


class IndexKeys:
    """One number per token, which moves with the pages."""

    num_pages, page_size = 5, 4

    def __init__(self) -> None:
        self.numbers = torch.arange(20)
        self.nbytes = self.numbers.nbytes

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        for copy in copies:
            self.numbers.view(5, 4)[copy.target] = self.numbers.view(5, 4)[copy.source]

    def move_rows(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        live = targets >= 0
        self.numbers[targets[live]] = self.numbers[sources[live]]


class Entries(IndexKeys):
    pass


INDEX_KEYS = CacheKey("index keys", IndexKeys)
ENTRIES = CacheKey("entries", Entries)


def test_a_cache_is_found_by_its_key_and_counted() -> None:
    index_keys, entries = IndexKeys(), Entries()
    pools = KVPools(mla=mla_pool(), caches={INDEX_KEYS: index_keys, ENTRIES: entries})
    assert_type(pools.cache(INDEX_KEYS), IndexKeys)
    assert pools.cache(INDEX_KEYS) is index_keys and pools.cache(ENTRIES) is entries
    assert pools.nbytes == mla_pool().nbytes + 2 * 160


def test_every_cache_moves_with_the_pages() -> None:
    """A prefix that is shared and copied takes its index keys along."""
    keys, mha, mla = IndexKeys(), filled(mha_pool()), mla_pool()
    pools = KVPools(mha, mla, caches={INDEX_KEYS: keys})
    pools.copy_pages([PageCopy(1, 0)])
    assert keys.numbers[:4].tolist() == [4, 5, 6, 7] and (mha.keys(0)[0] == 1).all()
    mla.write(0, torch.tensor([8]), torch.full((1, 20), 2.0))
    pools.move_rows(torch.tensor([8, 3]), torch.tensor([19, -1]))
    assert keys.numbers[-2:].tolist() == [18, 8]
    assert (mha.keys(0)[4, 3] == 2).all() and (mha.values(0)[4, :3] == 4).all()
    assert (mla.rows(0)[4, 3] == 2).all()


def test_slots_of_rows_that_move_may_be_int32() -> None:
    pool = filled(mha_pool())
    pool.move_rows(*(torch.tensor([slot], dtype=torch.int32) for slot in (8, 19)))
    assert (pool.keys(0)[4, 3] == 2).all()


@pytest.mark.parametrize("key", [ENTRIES, CacheKey("index keys", Entries)])
def test_a_cache_that_is_not_held_is_refused(key: CacheKey[Entries]) -> None:
    with raises_naming(PoolError, key.name, "Entries", "'index keys'"):
        KVPools(caches={INDEX_KEYS: IndexKeys()}).cache(key)
    with raises_naming(PoolError, key.name, "none"):
        KVPools().cache(key)


def test_a_cache_of_another_class_than_its_key_is_refused() -> None:
    with raises_naming(PoolError, "'entries'", "IndexKeys", "Entries"):
        KVPools(caches={ENTRIES: IndexKeys()})


def test_a_cache_of_other_pages_than_the_rows_is_refused() -> None:
    """One page table addresses both."""
    wider = MLAPool([mla_layer()], num_pages=6, page_size=4, dtype=DType.FLOAT32, device="cpu")
    with raises_naming(PoolError, "index keys", "5 pages of 4", "6 of 4"):
        HostContext(
            model=ModelSpec("m", "test", (mla_layer(),), 24),
            device=torch.device("cpu"),
            dtype=torch.float32,
            kv_dtype=DType.FLOAT32,
            page_size=4,
            limits=Limits(1, 1, 24),
            pools=KVPools(mla=wider, caches={INDEX_KEYS: IndexKeys()}),
            workspace=WorkspaceOwner(),
        )


def test_a_cache_may_need_a_hook_of_the_backend() -> None:
    """Found when the attention is built, not in the middle of a forward."""
    key = CacheKey("entries", Entries, "select")
    with raises_naming(BackendError, "entries", "plain", "select"):
        ModelAttention(Hookless("plain"), KVPools(caches={key: Entries()}))


# Rows that move; what they hold afterwards is in test_kv_foreign.py


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("sources", "targets", "named"),
    [
        ([0, 20], [1, 2], ["0 to 20", "0 to 19"]),
        ([0, -1], [1, 2], ["-1 to 0", "0 to 19"]),
        ([0, 1], [1, 20], ["1 to 20", "0 to 19", -1]),
        ([0, 1], [1, -2], ["-2 to 1", "0 to 19", -1]),
        ([0], [1, 2], ["[1]", "[2]"]),
        ([[0]], [[1]], ["[1, 1]"]),
    ],
)
def test_rows_move_only_within_the_pool(sources: Any, targets: Any, named: list[object], layout: LayoutName) -> None:
    pool = filled(mha_pool(layout=layout))
    before = pool.keys(0).clone()
    with raises_naming(PoolError, *named):
        KVPools(mha=pool).move_rows(torch.tensor(sources), torch.tensor(targets))
    assert torch.equal(pool.keys(0), before)


@pytest.mark.parametrize("slots", ["sources", "targets"])
def test_rows_move_by_slots_on_the_device_of_the_pool(slots: str) -> None:
    devices = {"sources": "cpu", "targets": "cpu", slots: "meta"}
    both = {name: torch.zeros(1, dtype=torch.int64, device=device) for name, device in devices.items()}
    with raises_naming(PoolError, "slots", "meta"):
        mla_pool().move_rows(**both)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT8_E4M3])
def test_moving_rows_waits_for_nothing_and_can_be_captured(dtype: DType, layout: LayoutName, device: str) -> None:
    """B2's ground: which rows move where, and which are skipped, is decided at each replay."""
    pool = filled(mha_pool(dtype=dtype, layout=layout, device=device))
    sources, targets = (torch.tensor(slots, device=device) for slots in ([4, 8], [0, -1]))
    with nothing_waits(device):
        pool.move_rows(sources, targets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.move_rows(sources, targets)
    filled(pool)
    sources.copy_(torch.tensor([12, 16]))
    targets.copy_(torch.tensor([-1, 3]))
    graph.replay()
    expected = torch.arange(20) // 4
    expected[3] = 4
    assert pool.keys(0).float().cpu().flatten(0, 1)[:, 0, 0].tolist() == expected.tolist()
    assert pool.values(0).float().cpu().flatten(0, 1)[:, 1, 5].tolist() == expected.tolist()


def test_an_fp8_cache_takes_a_byte_per_number() -> None:
    assert mla_pool(DType.FLOAT8_E4M3).nbytes * 4 == mla_pool(DType.FLOAT32).nbytes


# What is refused


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("k", "v", "named"),
    [
        (zeros(3, 2, 8), zeros(2, 2, 6), ["keys", "[3, 2, 8]", "[2]"]),
        (zeros(2, 1, 8), zeros(2, 2, 6), ["keys", "[2, 1, 8]", "[tokens, 2, 8]"]),
        (zeros(2, 2, 6), zeros(2, 2, 6), ["keys", "[2, 2, 6]", "[tokens, 2, 8]"]),
        (zeros(2, 16), zeros(2, 2, 6), ["keys", "[2, 16]"]),
        (zeros(2, 2, 8) + 1, zeros(1, 2, 6), ["values", "[1, 2, 6]", "[tokens, 2, 6]"]),
    ],
)
def test_rows_of_the_wrong_shape_are_refused(
    k: torch.Tensor, v: torch.Tensor, named: list[str], layout: LayoutName
) -> None:
    pool = mha_pool(layout=layout)
    with raises_naming(PoolError, *named):
        pool.write(0, torch.tensor([0, 1]), k, v)
    assert not pool.keys(0).any()


@pytest.mark.parametrize("rows", [zeros(1, 20), zeros(2, 19), zeros(2, 2, 20), zeros(40)])
def test_latent_rows_of_the_wrong_shape_are_refused(rows: torch.Tensor) -> None:
    with raises_naming(PoolError, [2], "[tokens, 1, 20]"):
        mla_pool().write(0, torch.tensor([0, 1]), rows)


def test_slots_of_more_than_one_dimension_cannot_be_written() -> None:
    with raises_naming(PoolError, [1, 2]):
        mla_pool().write(0, torch.tensor([[0, 1]]), zeros(2, 20))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slot", [-2, 20])
def test_slots_outside_the_pool_are_refused(layout: LayoutName, slot: int) -> None:
    pool = mha_pool(layout=layout)
    slots = torch.tensor([0, slot])
    with raises_naming(PoolError, slot, 19, -1):
        pool.write(0, slots, zeros(2, 2, 8) + 1, zeros(2, 2, 6))
    assert not pool.keys(0).any()
    with raises_naming(PoolError, slot, "0 to 19"):
        pool.read_values(0, slots)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_marks_padding_cannot_be_read(layout: LayoutName) -> None:
    """Slot -1 is refused: indexing with it would return the last row."""
    with raises_naming(PoolError, "-1 to 3", "0 to 19"):
        mha_pool(layout=layout).read_keys(0, torch.tensor([3, -1]))


def test_slots_on_another_device_are_refused() -> None:
    with raises_naming(PoolError, "meta", "cpu"):
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
    with raises_naming(PoolError, "layer 2", "1, 3"):
        call()


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_that_holds_nothing_is_refused(num_pages: int, page_size: int) -> None:
    with raises_naming(PoolError, num_pages, page_size):
        MHAPool([mha_layer()], num_pages=num_pages, page_size=page_size, dtype=DType.FLOAT32, device="cpu")
    with raises_naming(PoolError, num_pages, page_size):
        MLAPool([mla_layer()], num_pages=num_pages, page_size=page_size, dtype=DType.FLOAT32, device="cpu")


def test_a_pool_takes_only_layers_of_its_kind() -> None:
    layers = [mha_layer(0), mla_layer(1), linear_layer(2)]
    assert mha_pool(*layers).layer_ids == (0,)
    assert MLAPool(layers, num_pages=1, page_size=1, dtype=DType.FLOAT32, device="cpu").layer_ids == (1,)
    assert LinearStatePool(layers, num_slots=1, dtype=DType.FLOAT32, device="cpu").layer_ids == (2,)


def test_a_pool_without_layers_is_refused() -> None:
    with raises_naming(PoolError, "MHA"):
        mha_pool(mla_layer())


def test_a_layer_id_that_repeats_is_refused() -> None:
    with raises_naming(PoolError, [4, 4]):
        mha_pool(mha_layer(4), mha_layer(4))


def test_an_unknown_layout_is_refused() -> None:
    with raises_naming(PoolError, "'dim_major'"):
        mha_pool(layout="dim_major")


def test_a_format_of_another_package_is_given_as_an_object() -> None:
    sizes: dict[str, Any] = {"num_pages": 2, "page_size": 4, "device": "cpu"}
    with raises_naming(UsageError, "fp8_ds_mla", "bfloat16"):
        MLAPool([mla_layer()], dtype="fp8_ds_mla", **sizes)
    latent = KVFormat("latent_only", "latent rows", (RowPart("bfloat16"),), 0.01, holds={"mla"})
    assert MLAPool([mla_layer()], dtype=latent, **sizes).dtype == "latent_only"
    with raises_naming(PoolError, "latent_only", "mla"):
        MHAPool([mha_layer()], dtype=latent, **sizes)
