"""The kernel that writes rows against the codecs, bit by bit: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import AttentionKind, KVFormat, LayerSpec, MHAPool, MLAPool
from attnplug.host import MLADims
from attnplug_kv_formats.plugin import FP8_PER_TOKEN_HEAD, NVFP4
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.triton_mode import compiled_by

MHA = LayerSpec(0, AttentionKind.MHA, 4, 2, 48, 16, 1.0)
MLA = LayerSpec(0, AttentionKind.MLA, 4, 4, 48, 32, 1.0, mla=MLADims(96, 32, 16))
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, of the interpreter: inf * 0
on_every_device = pytest.mark.parametrize("device", DEVICES)
formats = pytest.mark.parametrize("format", [FP8_PER_TOKEN_HEAD, NVFP4], ids=str)


def pools(kind: Any, layer: LayerSpec, format: KVFormat, device: str, **sizes: Any) -> Any:
    scales = {0: 0.37 if kind is MLAPool else (0.37, 2.5)} if format.layer_scale else None
    return kind([layer], num_pages=4, page_size=3, dtype=format, device=device, scales=scales, **sizes)


def rows(*shape: int, device: str) -> Tensor:
    """Rows of many magnitudes, with zeros, infinities, and numbers halfway between two codes."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    made = made * torch.logspace(-9, 6, shape[0]).view(-1, *[1] * (len(shape) - 1))
    made[1] = 0.0
    made[2, ..., 5] = torch.inf
    made[3] = made[3].sign() * torch.tensor([0.25, 0.75, 1.25, 6.0]).repeat(shape[-1] // 4) * 0.37
    made[4] = -made[4] * torch.arange(shape[-1])
    return made.bfloat16().to(device)


def check_equal(parts: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for found, reference in zip(parts, wanted, strict=True):
        both_nan = found.float().isnan() & reference.float().isnan()
        same = found.contiguous().view(torch.uint8) == reference.contiguous().view(torch.uint8)
        assert bool((same.view(*both_nan.shape, -1).all(-1) | both_nan).all())


@on_every_device
@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_latent_rows_are_those_of_the_codec(format: KVFormat, dtype: torch.dtype, device: str) -> None:
    """Rows with the slots -1 and behind the last are not written, and neither is any other."""
    from attnplug_kv_formats.triton_rows import RowWriter

    coded, written = (pools(MLAPool, MLA, format, device) for _ in range(2))
    given = rows(8, 1, 112, device=device).to(dtype)
    slots = torch.tensor([3, 11, 0, 7, 5, 10, -1, 12], device=device)
    for pool in (coded, written):
        pool.rows(0).fill_(90)
    coded._layers[0][0].kernel = None
    coded.write(0, slots[:6], given[:6])
    early = device != "cpu" and torch.cuda.get_device_capability() >= (9, 0)
    RowWriter(written.parts(0), written.scale(0), early=early).write(slots, given)
    check_equal(written.parts(0), coded.parts(0))


@on_every_device
@formats
@pytest.mark.parametrize("layout", ["token_major", "head_major"])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.sample(7)
def test_keys_and_values_are_those_of_the_codec(format: KVFormat, layout: Any, together: bool, device: str) -> None:
    from attnplug_kv_formats.triton_rows import RowWriter

    coded, written = (pools(MHAPool, MHA, format, device, layout=layout) for _ in range(2))
    slots = torch.tensor([3, 11, -1, 0, 5, 8], device=device)
    keys, values = rows(6, 2, 48, device=device), rows(6, 2, 96, device=device)[..., ::6]
    for each in coded._layers[0]:
        each.kernel = None
    coded._kernels[0] = None
    coded.write(0, slots, keys, values)
    writers = [RowWriter(*each, early=False) for each in zip(written.parts(0), written.scales(0), strict=True)]
    if together:
        writers[0].pair(writers[1]).write(slots, keys, values)
    else:
        for writer, given in zip(writers, (keys, values), strict=True):
            writer.write(slots, given)
    for found, wanted in zip(written.parts(0), coded.parts(0), strict=True):
        check_equal(found, wanted)


@pytest.mark.parametrize("device", DEVICES[1:])
@formats
def test_pools_on_a_gpu_write_by_the_kernel(format: KVFormat, device: str) -> None:
    pool = pools(MLAPool, MLA, format, device)
    assert type(pool._layers[0][0].kernel).__name__ == "RowWriter"


@pytest.mark.cross_compile
def test_it_compiles_for_gpus() -> None:
    """From SM 80 on, also where Triton cannot convert to e4m3."""
    found = compiled_by(Path(__file__).with_name("cross_compile.py"), "80", "90", "120")
    assert found == [[sm, str(format)] for sm in (80, 90, 120) for format in (FP8_PER_TOKEN_HEAD, NVFP4)]


@pytest.mark.parametrize("device", DEVICES[1:])
@formats
def test_rows_are_written_and_read_without_waiting(format: KVFormat, device: str) -> None:
    """Also with the codec, which writes if Triton is missing, and always reads."""
    pool, given = pools(MLAPool, MLA, format, device), rows(8, 1, 112, device=device)
    slots = torch.arange(8, device=device)
    for kernel in (pool._layers[0][0].kernel, None):
        pool._layers[0][0].kernel = kernel
        pool.write(0, slots, given)
        pool.read_rows(0, slots)
        with nothing_waits(device):
            pool.write(0, slots, given)
            pool.read_rows(0, slots)
