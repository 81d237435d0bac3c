"""Pools over tensors that a host allocated, laid out as vLLM and SGLang have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from attnplug import DType, LayerSpec, MHAPool, MLAPool, PoolError
from attnplug.host import KVPools, MLADims
from attnplug.kernels import PageCopy, PageLayout, torch_dtype
from attnplug.kv.layout import page_views
from attnplug_testing.devices import DEVICES
from attnplug_testing.errors import raises_naming
from attnplug_testing.writing import BY_TRITON, writing
from support.pools import mha_layer, mla_layer

PAGES, PAGE, HEADS, DIM, ROW = 5, 4, 2, 8, 20
SLOTS = PAGES * PAGE


@dataclass(frozen=True)
class Memory:
    """KV memory of one layer as a host allocates it: tensor shape, names of dimensions, and the positions of K and V.

    ``order`` is the order of the dimensions in memory: a host may pass a permuted view of its allocation. ``parts``
    find slot ``s`` of keys and of values in the tensor by plain indexing, as a reference.
    """

    layout: str
    shape: tuple[int, ...]
    parts: tuple[Callable[[Tensor, int], Tensor], ...]
    order: tuple[int, ...] | None = None
    pair: bool = False

    def tensor(self, dtype: torch.dtype, device: str) -> Tensor:
        order = self.order or tuple(range(len(self.shape)))
        memory = torch.empty([self.shape[place] for place in order], dtype=dtype, device=device)
        return memory.permute([order.index(place) for place in range(len(order))])


P, T = (lambda s: s // PAGE), (lambda s: s % PAGE)
MHA = {
    "vLLM, K and V first": Memory(
        "kv pages tokens heads dim",
        (2, PAGES, PAGE, HEADS, DIM),
        (lambda t, s: t[0, P(s), T(s)], lambda t, s: t[1, P(s), T(s)]),
    ),
    "vLLM, pages first": Memory(
        "pages kv tokens heads dim",
        (PAGES, 2, PAGE, HEADS, DIM),
        (lambda t, s: t[P(s), 0, T(s)], lambda t, s: t[P(s), 1, T(s)]),
    ),
    "vLLM HND, K and V first": Memory(
        "kv pages heads tokens dim",
        (2, PAGES, HEADS, PAGE, DIM),
        (lambda t, s: t[0, P(s), :, T(s)], lambda t, s: t[1, P(s), :, T(s)]),
    ),
    "vLLM HND, pages first": Memory(
        "pages kv heads tokens dim",
        (PAGES, 2, HEADS, PAGE, DIM),
        (lambda t, s: t[P(s), 0, :, T(s)], lambda t, s: t[P(s), 1, :, T(s)]),
    ),
    "vLLM, HND by strides": Memory(
        "kv pages tokens heads dim",
        (2, PAGES, PAGE, HEADS, DIM),
        (lambda t, s: t[0, P(s), T(s)], lambda t, s: t[1, P(s), T(s)]),
        order=(0, 1, 3, 2, 4),
    ),
    "vLLM, heads slowest by strides": Memory(
        "pages kv tokens heads dim",
        (PAGES, 2, PAGE, HEADS, DIM),
        (lambda t, s: t[P(s), 0, T(s)], lambda t, s: t[P(s), 1, T(s)]),
        order=(3, 0, 1, 2, 4),
    ),
    "vLLM 0.32, halves of a row": Memory(
        "pages heads tokens (kv dim)",
        (PAGES, HEADS, PAGE, 2 * DIM),
        (lambda t, s: t[P(s), :, T(s), :DIM], lambda t, s: t[P(s), :, T(s), DIM:]),
    ),
    "vLLM, flat pages": Memory(
        "kv pages (tokens heads dim)",
        (2, PAGES, PAGE * HEADS * DIM),
        (
            lambda t, s: t[0, P(s)].view(PAGE, HEADS, DIM)[T(s)],
            lambda t, s: t[1, P(s)].view(PAGE, HEADS, DIM)[T(s)],
        ),
    ),
    "SGLang": Memory("slots heads dim", (SLOTS, HEADS, DIM), (lambda t, s: t[s],) * 2, pair=True),
}
MLA = {
    "vLLM": Memory("pages tokens dim", (PAGES, PAGE, ROW), (lambda t, s: t[P(s), T(s)],)),
    "SGLang": Memory("slots heads dim", (SLOTS, 1, ROW), (lambda t, s: t[s, 0],)),
    "tokens slowest by strides": Memory(
        "pages tokens dim", (PAGES, PAGE, ROW), (lambda t, s: t[P(s), T(s)],), order=(1, 0, 2)
    ),
}


WAYS = [*DEVICES, BY_TRITON]


class Host:
    """A pool with two layers over a host's memory, and what every slot must hold, by layer, part and slot."""

    def __init__(self, memory: Memory, dtype: DType, device: str, *, as_bytes: bool = False) -> None:
        self.memory, self.stored = memory, torch_dtype(dtype)
        given = torch.uint8 if as_bytes else self.stored
        count = 2 if memory.pair else 1
        self.tensors = {layer_id: tuple(memory.tensor(given, device) for _ in range(count)) for layer_id in (3, 6)}
        for tensors in self.tensors.values():
            for tensor in tensors:
                self.typed(tensor).copy_(torch.tensor(torch.nan))
        mapping = {layer_id: (pair if memory.pair else pair[0]) for layer_id, pair in self.tensors.items()}
        self.pool: MHAPool | MLAPool
        if len(memory.parts) == 2:
            layers = [mha_layer(layer_id, kv_heads=HEADS, head_dim=DIM, v_head_dim=DIM) for layer_id in (3, 6)]
            self.pool = MHAPool.over(layers, mapping, memory.layout, page_size=PAGE, dtype=dtype)
        else:
            self.pool = MLAPool.over([mla_layer(3), mla_layer(6)], mapping, memory.layout, page_size=PAGE, dtype=dtype)
        self.expected: dict[tuple[int, int, int], Tensor] = {}

    def typed(self, tensor: Tensor) -> Tensor:
        return tensor.view(self.stored) if tensor.dtype == torch.uint8 else tensor

    def write(self, slots: list[int], seed: int) -> None:
        """Halves, which every type holds."""
        device = self.tensors[3][0].device
        numbers = torch.tensor(slots, device=device)
        for layer_id in (3, 6):
            shape = (len(slots), HEADS, DIM) if len(self.memory.parts) == 2 else (len(slots), 1, ROW)
            random = torch.Generator().manual_seed(seed + layer_id)
            rows = [torch.randint(-14, 15, shape, generator=random) / 2 for _ in self.memory.parts]
            self.pool.write(layer_id, numbers, *(part.to(device) for part in rows))
            for part, content in enumerate(rows):
                for slot, row in zip(slots, content, strict=True):
                    if slot >= 0:
                        self.expected[layer_id, part, slot] = row

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Move rows of the expectation: all are read before any is written."""
        old = dict(self.expected)
        for source, target in zip(sources, targets, strict=True):
            for layer_id in (3, 6):
                for part in range(len(self.memory.parts)):
                    if target >= 0:
                        self.expected.pop((layer_id, part, target), None)
                        if (layer_id, part, source) in old:
                            self.expected[layer_id, part, target] = old[layer_id, part, source]

    def check(self) -> None:
        """The host's memory has the expected rows at their slots, and NaN everywhere else."""
        for layer_id, tensors in self.tensors.items():
            written = 0
            for part, place in enumerate(self.memory.parts):
                tensor = self.typed(tensors[part if self.memory.pair else 0]).float().cpu()
                for slot in range(SLOTS):
                    row = self.expected.get((layer_id, part, slot))
                    found = place(tensor, slot)
                    assert found.isnan().all() if row is None else torch.equal(found, row.view_as(found))
                    written += 0 if row is None else row.numel()
            assert written == sum(int((~self.typed(tensor).float().isnan()).sum()) for tensor in tensors)


CASES = [*MHA.values(), *MLA.values()]
NAMES = [*MHA, *(f"MLA, {name}" for name in MLA)]
every_memory = pytest.mark.parametrize("memory", CASES, ids=NAMES)


@every_memory
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT8_E4M3])
@pytest.mark.sample(24)
def test_rows_are_written_where_the_host_expects_them(memory: Memory, dtype: DType, how: str) -> None:
    with writing(how) as device:
        host = Host(memory, dtype, device)
        host.check()  # nothing was zeroed
        host.write([19, -1, 0, 7, 4], seed=0)
        host.write([-1, 8, 7], seed=9)
        host.check()


@every_memory
@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_the_host_are_read(memory: Memory, device: str) -> None:
    host = Host(memory, DType.FLOAT32, device)
    host.write([11, 2], seed=4)
    slots = torch.tensor([[2], [11]], device=device)
    read = (
        [host.pool.read_rows(6, slots)]
        if isinstance(host.pool, MLAPool)
        else [host.pool.read_keys(6, slots), host.pool.read_values(6, slots)]
    )
    for part, rows in enumerate(read):
        wanted = torch.stack([host.expected[6, part, slot] for slot in (2, 11)])
        assert torch.equal(rows.cpu(), wanted.view_as(rows.cpu()))


@every_memory
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.FLOAT8_E4M3])
def test_pages_of_the_host_are_copied(memory: Memory, dtype: DType, device: str) -> None:
    host = Host(memory, dtype, device)
    host.write([0, 2, 5, 6, 16], seed=2)
    host.pool.copy_pages([PageCopy(0, 3), PageCopy(1, 0)])
    host.move([*range(4), *range(4, 8)], [*range(12, 16), *range(4)])
    host.check()


MOVES = {
    "apart": ([0, 5], [9, 13]),
    "a source is a target": ([0, 1, 2, 5], [1, 2, 0, 6]),
    "some are skipped, whatever their source": ([5, -1, 1 << 40, 2], [0, -1, -1, 5]),
    "all are skipped": ([5, 0], [-1, -1]),
    "none": ([], []),
    "one to many": ([5, 5, 5], [0, 1, 19]),
}


@every_memory
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT8_E4M3])
@pytest.mark.sample(16)
def test_rows_move_as_if_all_were_read_before_any_is_written(memory: Memory, dtype: DType, device: str) -> None:
    """Accepted rows of a speculation tree, in every layout."""
    host = Host(memory, dtype, device)
    pools = KVPools(mla=host.pool) if isinstance(host.pool, MLAPool) else KVPools(mha=host.pool)
    for seed, (sources, targets) in enumerate(MOVES.values()):
        host.write([0, 1, 2, 5, 18], seed)
        given = (torch.tensor(slots, dtype=torch.int64, device=device) for slots in (sources, targets))
        pools.move_rows(*given)
        host.move(sources, targets)
        host.check()


def test_the_bytes_of_fp8_are_the_hosts() -> None:
    """vLLM allocates an fp8 cache as uint8."""
    host = Host(MHA["vLLM, pages first"], DType.FLOAT8_E4M3, "cpu", as_bytes=True)
    host.write([3, 17], seed=1)
    host.check()
    assert host.pool.keys(3).dtype == torch.float8_e4m3fn


def test_keys_and_values_of_one_row_may_differ_in_width() -> None:
    memory = torch.zeros(PAGES, PAGE, HEADS, 8 + 6)
    pool = MHAPool.over([mha_layer()], {0: memory}, "pages tokens heads (kv dim)", page_size=PAGE, dtype=DType.FLOAT32)
    pool.write(0, torch.tensor([6]), torch.full((1, 2, 8), 1.0), torch.full((1, 2, 6), 2.0))
    assert memory[1, 2].tolist() == [[1.0] * 8 + [2.0] * 6] * 2
    assert memory.sum() == memory[1, 2].sum()


def test_a_row_of_keys_and_values_is_as_wide_as_both() -> None:
    """A wider one has something else in it."""
    with raises_naming(PoolError, "(kv dim)", 15, 14):
        over({0: cache(5, 4, 2, 15)}, "pages tokens heads (kv dim)", mha_layer())


def test_scales_are_those_of_the_hosts_memory() -> None:
    rows = torch.full((1, 2, 8), 3.0)
    memory, layer = cache(2, 5, 4, 2, 8, dtype=torch.float8_e4m3fn), mha_layer(v_head_dim=8)
    pool = MHAPool.over(
        [layer], {0: memory}, "kv pages tokens heads dim", page_size=4, dtype=DType.FLOAT8_E4M3, scales={0: (0.5, 2.0)}
    )
    pool.write(0, torch.tensor([0]), rows, rows)
    assert pool.scales(0) == (0.5, 2.0)
    assert (memory[0, 0, 0].float() == 6).all() and (memory[1, 0, 0].float() == 1.5).all()


def test_one_kv_head_needs_no_dimension() -> None:
    layer = mha_layer(kv_heads=1, v_head_dim=8)
    pool = MHAPool.over([layer], {0: torch.zeros(2, 20, 8)}, "kv slots dim", page_size=PAGE, dtype=DType.FLOAT32)
    assert pool.keys(0).shape == (PAGES, PAGE, 1, 8)


def test_one_latent_row_a_token_has_the_strides_of_a_pool_of_our_own() -> None:
    """FlashMLA describes the cache to the GPU by its strides, and one of a single element is refused there."""
    layer = mla_layer(0)
    own = MLAPool([layer], num_pages=3, page_size=16, dtype=DType.FLOAT32, device="cpu")
    host = torch.zeros(3, 16, own.rows(0).shape[-1])
    pool = MLAPool.over([layer], {0: host}, "pages tokens dim", page_size=16, dtype=DType.FLOAT32)
    assert pool.layout(0).strides == own.layout(0).strides


def test_a_pool_over_memory_says_what_it_has() -> None:
    host = Host(MHA["vLLM HND, pages first"], DType.BFLOAT16, "cpu")
    pool = host.pool
    assert isinstance(pool, MHAPool)
    assert (pool.num_pages, pool.page_size, pool.dtype, pool.layer_ids) == (PAGES, PAGE, DType.BFLOAT16, (3, 6))
    assert pool.nbytes == sum(tensor.nbytes for (tensor,) in host.tensors.values())
    assert pool.keys(3).data_ptr() == host.tensors[3][0].data_ptr()


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("vLLM, K and V first", "token_major"),
        ("vLLM, pages first", "strided"),
        ("vLLM, HND by strides", "head_major"),
        ("vLLM 0.32, halves of a row", "strided"),
        ("SGLang", "token_major"),
    ],
)
def test_a_layout_of_the_host_has_a_name(name: str, keys: str) -> None:
    """A backend that reads only some layouts compares this name."""
    pool = Host(MHA[name], DType.FLOAT32, "cpu").pool
    assert isinstance(pool, MHAPool)
    assert pool.layout(3)[0].name == keys


def test_smaller_pages_can_be_cut_where_a_hosts_tokens_are_evenly_spaced() -> None:
    layouts = {name: Host(MHA[name], DType.FLOAT32, "cpu").pool.layout(3) for name in MHA}
    assert layouts["SGLang"][0].split(2) == PageLayout.named("token_major", 2 * PAGES, 2, HEADS, DIM)
    with raises_naming(PoolError, "kernel pages", 2):
        layouts["vLLM, pages first"][0].split(2)


# What is refused


def over(tensors: dict[int, object], layout: str = "kv pages tokens heads dim", *layers: LayerSpec) -> MHAPool:
    own = layers or [mha_layer(layer_id, v_head_dim=8) for layer_id in (0, 1)]
    return MHAPool.over(own, tensors, layout, page_size=4, dtype=DType.FLOAT32)


def cache(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(*(shape or (2, 5, 4, 2, 8)), dtype=dtype, device=device)


SHARED = torch.zeros(3, 5, 4, 2, 8)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({0: cache(5, 4, 2, 8), 1: cache()}, ["layer 0", [5, 4, 2, 8], 4, 5]),
        ({0: cache(), 1: cache(2, 5, 4, 3, 8)}, ["layer 1", [2, 5, 4, 3, 8], "heads", 3, 2]),
        ({0: cache(2, 5, 4, 2, 7), 1: cache()}, ["dim", 7, 8]),
        ({0: cache(2, 5, 8, 2, 8), 1: cache()}, ["tokens", 8, 4]),
        ({0: cache(3, 5, 4, 2, 8), 1: cache()}, ["kv", 3, 2]),
        ({0: cache(2, 0, 4, 2, 8), 1: cache()}, ["pages", 0]),
        ({0: cache(), 1: cache(2, 6, 4, 2, 8)}, ["keys of layer 0", "keys of layer 1", "5 and 6"]),
        ({0: cache(), 1: cache(device="meta")}, ["keys of layer 1", "cpu and meta"]),
        ({0: cache(), 1: cache(dtype=torch.float16)}, ["keys of layer 1", "torch.float16", "float32"]),
        ({0: cache(dtype=torch.uint8), 1: cache()}, ["torch.uint8", "torch.float32"]),
        ({0: cache()}, ["layers 0;", "MHA", "0, 1"]),
        ({0: cache(), 1: cache(), 2: cache()}, ["0, 1, 2", "MHA", "0, 1"]),
        ({0: SHARED[:2], 1: SHARED[1:]}, ["values of layer 0", "keys of layer 1", "overlap"]),
        ({0: cache(1, 5, 4, 2, 8).expand(2, -1, -1, -1, -1), 1: cache()}, ["keys of layer 0", "values of layer 0"]),
        ({0: cache(2, 1, 4, 2, 8).expand(-1, 5, -1, -1, -1), 1: cache()}, ["(0, ", "overlap"]),
    ],
)
def test_memory_that_does_not_fit_is_refused(tensors: dict[int, object], named: list[object]) -> None:
    with raises_naming(PoolError, *named):
        over(tensors)


@pytest.mark.parametrize(
    "layout",
    [
        "kv pages tokens heads width",
        "kv pages tokens heads",
        "kv pages pages heads dim",
        "kv pages tokens dim",
        "kv pages tokens heads dim dim",
        "kv pages tokens heads dim spare",
        "",
        "pages tokens heads dim",
    ],
)
def test_a_layout_that_says_too_little_is_refused(layout: str) -> None:
    with raises_naming(PoolError, layout, "kv"):
        over({0: cache(), 1: cache()}, layout)


def test_a_pair_has_no_dimension_for_keys_and_values() -> None:
    with raises_naming(PoolError, "kv pages tokens heads dim", "kv"):
        over({0: (cache(), cache())}, "kv pages tokens heads dim", mha_layer(v_head_dim=8))


def test_slots_that_are_not_whole_pages_are_refused() -> None:
    with raises_naming(PoolError, 21, 4):
        over({0: (cache(21, 2, 8), cache(21, 2, 8))}, "slots heads dim", mha_layer(v_head_dim=8))


def test_layers_may_interleave_in_one_allocation() -> None:
    """vLLM can keep all layers of a page together; their memory is disjoint, though not their address ranges."""
    memory = torch.zeros(5, 2, 2, 4, 2, 8)
    pool = over({layer_id: memory[:, layer_id] for layer_id in (0, 1)}, "pages kv tokens heads dim")
    pool.write(1, torch.tensor([19]), torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    assert memory[4, 1, :, 3].eq(1).all() and memory.sum() == 32


@pytest.mark.parametrize("offset", range(0, 40, 4))
def test_overlap_is_found_exactly(offset: int) -> None:
    """Layers are refused exactly if an element of memory belongs to both, by a count per element."""
    memory, counts = torch.zeros(400), torch.zeros(400, dtype=torch.int64)
    shape, strides = (5, 4, 1, 3), (40, 8, 8, 1)
    views = [memory[start:].as_strided(shape, strides) for start in (0, offset)]
    for start in (0, offset):
        counts[start:].as_strided(shape, strides).add_(1)
    tensors = {layer_id: view.squeeze(2) for layer_id, view in enumerate(views)}
    layers = [replace(mla_layer(layer_id), mla=MLADims(2, 8, 1)) for layer_id in tensors]
    if (counts > 1).any():
        with raises_naming(PoolError, "overlap"):
            MLAPool.over(layers, tensors, "pages tokens dim", page_size=4, dtype=DType.FLOAT32)
    else:
        MLAPool.over(layers, tensors, "pages tokens dim", page_size=4, dtype=DType.FLOAT32)


def test_an_overlap_of_a_part_of_an_element_is_found() -> None:
    """A host may carve its caches from bytes."""
    memory = bytearray(2 * 5 * 4 * 3 * 4)
    tensors = {
        layer_id: torch.frombuffer(memory, dtype=torch.float32, count=60, offset=offset).view(5, 4, 3)
        for layer_id, offset in enumerate((0, 238))
    }
    layers = [replace(mla_layer(layer_id), mla=MLADims(2, 8, 1)) for layer_id in tensors]
    with raises_naming(PoolError, "overlap"):
        MLAPool.over(layers, tensors, "pages tokens dim", page_size=4, dtype=DType.FLOAT32)


def test_a_view_is_no_copy() -> None:
    memory = torch.zeros(5, 2, 4, 16)
    keys, values = page_views(memory, "pages heads tokens (kv dim)", 4, 2, (8, 8), "the cache")
    keys.fill_(1)
    values.fill_(2)
    assert memory[..., :8].eq(1).all() and memory[..., 8:].eq(2).all()


@pytest.mark.parametrize(("order", "at_once"), [((0, 2, 1, 3), True), ((0, 1, 2, 3), False), ((1, 0, 2, 3), False)])
def test_rows_that_hold_keys_and_values_are_read_at_once(
    order: tuple[int, ...], at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's "pages heads tokens (kv dim)" in memory by tokens; by heads, a token's row is not contiguous."""
    sizes = (PAGES, HEADS, PAGE, 2 * DIM)
    memory = torch.randn([sizes[place] for place in order])
    tensor = memory.permute([order.index(place) for place in range(4)])
    layout = "pages heads tokens (kv dim)"
    pool = MHAPool.over([mha_layer(v_head_dim=DIM)], {0: tensor}, layout, page_size=PAGE, dtype=DType.FLOAT32)
    slots = torch.tensor([[13, 4, 5], [16, 0, 19]])
    expected = pool.read_keys(0, slots), pool.read_values(0, slots)
    apart = []
    monkeypatch.setattr(MHAPool, "read_keys", lambda *_: apart.append(1) or expected[0])
    for rows, wanted in zip(pool.read(0, slots), expected, strict=True):
        assert torch.equal(rows, wanted)
    assert bool(apart) is not at_once
    with raises_naming(PoolError, "99"):
        pool.read(0, torch.tensor([[99]]))
