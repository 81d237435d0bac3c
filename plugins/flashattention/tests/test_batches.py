"""Batches against float64: planning through reference kernels on a CPU, the real kernels on a GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attnplug import BackendContext, DType, ForwardMode, MHAPool, PlanError, PoolError
from attnplug.host import KVPools, PageLayout
from attnplug_flashattention.planner import GatheredCall
from flash_references import KERNELS, build, on_cpu, on_devices
from support.devices import nothing_waits
from support.mha_scene import LAYER, MHACase, MHAScene
from support.mla_scene import relative_error

DECODE, VERIFY, EXTEND, MIXED = (
    ForwardMode.DECODE,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.EXTEND,
    ForwardMode.MIXED,
)
everywhere = on_devices(*KERNELS)
ratios = pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 4), (32, 8), (16, 2), (16, 1)])
widths = pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
pages = pytest.mark.parametrize("page_size", [1, 16, 64, 128, 256])


def tolerance(case: MHACase) -> float:
    return 1e-6 if case.dtype is DType.FLOAT32 else 5e-3


def scene(case: MHACase, kernel: str, device: str) -> MHAScene:
    return MHAScene(on_cpu(case) if device == "cpu" else case, device, build(kernel))


def lengths(count: int, longest: int, new: int | tuple[int, int], seed: int) -> tuple[tuple[int, int], ...]:
    """Prefixes of every kind (none, one row, whole pages, long ones) with new tokens after them."""
    chance = random.Random(seed)
    prefixes = [chance.choice([0, 1, 63, 64, 65, chance.randint(2, longest)]) for _ in range(count)]
    return tuple((p, new if isinstance(new, int) else chance.randint(*new)) for p in prefixes)


def check(case: MHACase, kernel: str, device: str) -> MHAScene:
    stage = scene(case, kernel, device)
    out, lse = stage.run()
    wanted, wanted_lse = stage.wanted()
    tokens = len(wanted)
    assert relative_error(out[:tokens], wanted) <= tolerance(stage.case)
    assert (out[tokens:] == 0).all()
    assert stage.written() == sum(stage.totals)
    assert lse is not None
    assert relative_error(lse[:tokens], wanted_lse) <= tolerance(stage.case)
    assert (lse[tokens:] == float("-inf")).all()
    return stage


@on_devices("fa4", "torch", "torch before paging")
@pytest.mark.parametrize("layout", ["token_major", "head_major"])
@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize(
    ("mode", "some"),
    [(DECODE, ((40, 1), (0, 0), (300, 1), (0, 0))), (VERIFY, ((0, 0), (40, 3), (5, 3))), (EXTEND, ((0, 7), (0, 0)))],
)
def test_padded_requests_between_others(mode, some, page_size, layout, kernel, device):
    """Requests of length 0 have no row, and nothing is read or written for them."""
    check(MHACase(some, mode, page_size, layout=layout, padding=2), kernel, device)


def over_vllms(case: MHACase, kernel: str, device: str) -> MHAScene:
    """A scene over vLLM's memory, one tensor: a token's key and value side by side, the tokens of a head together."""
    pools = []

    def made(context: BackendContext):
        pages, size, heads, dim = context.pools.mha.keys(LAYER).shape
        shape = pages, heads, size, 2 * dim
        caches = {
            layer.layer_id: torch.full(shape, float("nan"), dtype=context.dtype, device=device) for layer in case.layers
        }
        dtype = context.pools.mha.dtype
        pools.append(MHAPool.over(case.layers, caches, "pages heads tokens (kv dim)", page_size=size, dtype=dtype))
        return build(kernel)(replace(context, pools=KVPools(mha=pools[0])))

    stage = MHAScene(on_cpu(case) if device == "cpu" else case, device, made)
    stage.pool = pools[0]
    stage.store([(0, before) for before, _ in case.lengths])
    return stage


@everywhere
@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize(("mode", "some"), [(DECODE, ((300, 1), (0, 1), (40, 1))), (EXTEND, ((300, 9), (0, 4)))])
def test_vllms_cache_is_read_where_it_lies(mode, some, page_size, kernel, device):
    """The kernels get views of it, with strides of pages, tokens and heads. Those without pages get gathered rows."""
    stage = over_vllms(MHACase(some, mode, page_size), kernel, device)
    assert {layout.name for layout in stage.pool.layout(LAYER)} == {"strided"}
    given = []
    over_pages = stage.backend._kernels.over_pages
    stage.backend._kernels.over_pages = lambda *args: given.append(args[1:3]) or over_pages(*args)
    out, lse = stage.run()
    wanted, wanted_lse = stage.wanted()
    assert relative_error(out, wanted) <= tolerance(stage.case)
    assert relative_error(lse, wanted_lse) <= tolerance(stage.case)
    assert stage.written() == sum(stage.totals)
    read = kernel == "fa4" or (page_size == 256 and stage.backend._kernels.reads_pages)
    assert bool(given) is read
    cache = stage.pool.keys(LAYER), stage.pool.values(LAYER)
    assert all(
        (view.data_ptr(), view.stride()) == (own.data_ptr(), own.stride())
        for views in given
        for view, own in zip(views, cache, strict=True)
    )


@pytest.mark.parametrize(
    ("width", "part"),
    [(132, slice(0, 128, 2)), (132, slice(1, 65)), (131, slice(64))],
    ids=["columns apart", "odd address", "odd strides"],
)
def test_a_cache_that_kernels_would_have_to_copy_is_refused(width, part):
    """At every call, and as a whole."""
    case = on_cpu(MHACase(((3, 1),), DECODE, 16))

    def over_parts(context: BackendContext):
        pages, size, heads, _ = context.pools.mha.keys(LAYER).shape
        caches = {layer.layer_id: torch.zeros(2, pages, size, heads, width)[..., part] for layer in case.layers}
        pool = MHAPool.over(case.layers, caches, "kv pages tokens heads dim", page_size=size, dtype=case.dtype)
        return build("fa4")(replace(context, pools=KVPools(mha=pool)))

    with pytest.raises(PoolError, match=r"the keys of layer \d have strides .* at address .*adjacent columns"):
        MHAScene(case, "cpu", over_parts)


class Halves(MHAPool):
    """A pool over a host's memory: keys and values are halves of every page of one tensor, after other memory."""

    def __init__(self, pool: MHAPool, layer: int, *, head_major: bool) -> None:
        pages, size, heads, dim = pool.keys(layer).shape
        shape = (pages, 2, *((heads, size) if head_major else (size, heads)), dim)
        memory = pool.keys(layer).new_full((64 + torch.Size(shape).numel(),), float("nan"))[64:].view(shape)
        self.halves = [half.transpose(1, 2) if head_major else half for half in memory.unbind(1)]
        self.page_size, self.dtype = size, pool.dtype

    def keys(self, layer_id):
        return self.halves[0]

    def values(self, layer_id):
        return self.halves[1]

    def layout(self, layer_id):
        keys, values = (PageLayout(tuple(half.shape), half.stride()) for half in self.halves)
        return keys, values

    def write(self, layer_id, slots, k, v):
        page, offset = slots[slots >= 0] // self.page_size, slots[slots >= 0] % self.page_size
        for half, rows in zip(self.halves, (k, v), strict=True):
            half[page, offset] = rows[slots >= 0]

    def read_keys(self, layer_id, slots):
        return self.halves[0][slots // self.page_size, slots % self.page_size]

    def read_values(self, layer_id, slots):
        return self.halves[1][slots // self.page_size, slots % self.page_size]


@on_devices("fa4", "torch", "torch before paging")
@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize(("mode", "some"), [(DECODE, ((300, 1), (0, 0), (40, 1))), (EXTEND, ((300, 9), (0, 4)))])
def test_keys_and_values_that_are_halves_of_a_hosts_pages(mode, some, head_major, kernel, device):
    """The cache is read with the pool's own strides, from where its memory begins."""
    pools = []

    def over_halves(context: BackendContext):
        pools.append(Halves(context.pools.mha, LAYER, head_major=head_major))
        return build(kernel)(replace(context, pools=KVPools(mha=pools[0])))

    case = MHACase(some, mode, 256)
    stage = MHAScene(on_cpu(case) if device == "cpu" else case, device, over_halves)
    stage.pool = pools[0]
    stage.store([(0, before) for before, _ in some])
    out, _ = stage.run()
    assert relative_error(out, stage.wanted()[0]) <= tolerance(stage.case)
    assert stage.written() == sum(stage.totals)


def test_lengths_that_the_host_does_not_know_are_refused():
    stage = scene(MHACase(lengths(4, 300, (1, 9), 1), EXTEND, 16, exact_lengths=False), "fa4", "cpu")
    assert stage.backend.claims.needs_cpu_seq_lens
    with pytest.raises(PlanError, match=r"the backend needs exact ones"):
        stage.run()


@everywhere
@pytest.mark.parametrize("mode", [DECODE, VERIFY, EXTEND])
def test_planning_and_running_wait_for_nothing(mode, kernel, device):
    new = {DECODE: 1, VERIFY: 3}.get(mode, (1, 40))
    stage = scene(MHACase(lengths(4, 300, new, 1), mode, 16), kernel, device)
    stage.run()  # compiles what there is to compile
    batch = stage.batch()
    with nothing_waits(device):
        out, _ = stage.run(batch)
    assert relative_error(out, stage.wanted()[0]) <= tolerance(stage.case)


@pytest.mark.parametrize(("kernel", "gathers"), [("fa4", False), ("torch", False), ("torch before paging", True)])
def test_pages_are_gathered_where_the_kernel_reads_none(kernel, gathers):
    for page_size, widths in ((256, (64, 64)), (16, (64, 64)), (256, (192, 128))):
        stage = scene(MHACase(((20, 1),), DECODE, page_size, 8, 2, *widths), kernel, "cpu")
        whole = stage.backend.init_forward_metadata(stage.batch()).metadata.cached.whole
        expected = gathers or (kernel == "torch" and (page_size % 256 != 0 or widths[0] != widths[1]))
        assert isinstance(whole, GatheredCall) == expected
