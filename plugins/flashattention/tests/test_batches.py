"""Batches against float64: planning through reference kernels on a CPU, the real kernels on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import BackendContext, ForwardMode, MHAPool, PoolError
from attnplug.host import KVPools
from attnplug_conformance.arithmetic import relative_error
from attnplug_conformance.case import LAYER
from attnplug_flashattention.planner import GatheredCall
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelCase, KernelScene, check, mha
from attnplug_testing.references.flashattention import KERNELS, REAL, build, on_cpu, on_devices

DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND
everywhere = on_devices(*KERNELS)
on_a_gpu = pytest.mark.parametrize(
    ("kernel", "device"), [pytest.param(name, "cuda", marks=DEVICES[1].marks) for name in REAL]
)


def scene(case: KernelCase, kernel: str, device: str) -> KernelScene:
    return KernelScene(on_cpu(case) if device == "cpu" else case, device, build(kernel))


@on_devices("fa4", "torch", "torch before paging")
@pytest.mark.parametrize(
    ("mode", "some", "page_size"),
    [
        (DECODE, ((40, 1), (0, 0), (300, 1), (0, 0)), 16),
        (VERIFY, ((0, 0), (40, 3), (5, 3)), 256),
        (EXTEND, ((0, 7), (0, 0)), 16),
    ],
)
@pytest.mark.sample(5)
@pytest.mark.sample(1)
def test_padded_requests_between_others(mode, some, page_size, kernel, device):
    """Requests of length 0 have no row, and nothing is read or written for them."""
    check(scene(mha(some, mode, page_size, padding=2), kernel, device))


def over_vllms(case: KernelCase, kernel: str, device: str) -> KernelScene:
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

    stage = KernelScene(on_cpu(case) if device == "cpu" else case, device, made)
    stage.over(pools[0])
    return stage


@everywhere
@pytest.mark.parametrize(
    ("mode", "some", "page_size"), [(DECODE, ((300, 1), (0, 1), (40, 1)), 256), (EXTEND, ((300, 9), (0, 4)), 16)]
)
def test_vllms_cache_is_read_where_it_lies(mode, some, page_size, kernel, device):
    """The kernels get views of it, with strides of pages, tokens and heads. Those without pages get gathered rows."""
    stage = over_vllms(mha(some, mode, page_size), kernel, device)
    assert {layout.name for layout in stage.pool.layout(LAYER)} == {"strided"}
    given = []
    attend_paged = stage.backend._kernels.attend_paged
    stage.backend._kernels.attend_paged = lambda *args: given.append(args[1:3]) or attend_paged(*args)
    check(stage)
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
    case = on_cpu(mha(((3, 1),), DECODE, 16))

    def over_parts(context: BackendContext):
        pages, size, heads, _ = context.pools.mha.keys(LAYER).shape
        caches = {layer.layer_id: torch.zeros(2, pages, size, heads, width)[..., part] for layer in case.layers}
        pool = MHAPool.over(case.layers, caches, "kv pages tokens heads dim", page_size=size, dtype=case.dtype)
        return build("fa4")(replace(context, pools=KVPools(mha=pool)))

    with raises_naming(PoolError, "keys"):
        KernelScene(case, "cpu", over_parts)


@on_a_gpu
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3), (EXTEND, 40)])
def test_planning_and_running_wait_for_nothing(mode, new, kernel, device):
    stage = scene(mha(((0, new), (65, new), (300, new)), mode, 16), kernel, device)
    stage.results()  # compiles what there is to compile
    batch = stage.batch()
    with nothing_waits(device):
        out = stage.forward(stage.plan(batch))
    assert relative_error(out, stage.wanted()[0]) <= stage.tolerance


@pytest.mark.parametrize(("kernel", "gathers"), [("fa4", False), ("torch", False), ("torch before paging", True)])
def test_pages_are_gathered_where_the_kernel_reads_none(kernel, gathers):
    for page_size, widths in ((256, (64, 64)), (16, (64, 64)), (256, (192, 128))):
        stage = scene(mha(((20, 1),), DECODE, page_size, 8, 2, *widths), kernel, "cpu")
        whole = stage.backend.init_forward_metadata(stage.batch()).metadata.cached.whole
        expected = gathers or (kernel == "torch" and (page_size % 256 != 0 or widths[0] != widths[1]))
        assert isinstance(whole, GatheredCall) == expected
