"""fp8_per_token_head and nvfp4: bytes, values by hand, errors, and tokens of the engine over both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnplug import AttentionKind, KVFormat, LayerSpec, MHAPool, MLAPool
from attnplug.host import MLADims, load_registry
from attnplug_kv_formats import fp8_per_token_head, nvfp4
from attnplug_kv_formats.plugin import FP8_PER_TOKEN_HEAD, NVFP4

MHA = LayerSpec(0, AttentionKind.MHA, 4, 2, 128, 128, 1.0)
MLA = LayerSpec(0, AttentionKind.MLA, 4, 4, 192, 128, 1.0, mla=MLADims(512, 128, 64))
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def rows(*shape: int, outliers: bool = False) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    if outliers:
        made[..., 3] *= 40.0
    return made


def test_both_are_registered_under_their_names() -> None:
    """D1, E2"""
    found = load_registry().kv_formats
    assert {"fp8_per_token_head", "nvfp4"} <= set(found)
    assert found["nvfp4"].source.distribution == "attnplug-kv-formats"


@pytest.mark.parametrize(
    ("format", "head", "latent"), [(FP8_PER_TOKEN_HEAD, 132, 656), (NVFP4, 72, 416)], ids=["fp8", "nvfp4"]
)
def test_rows_take_the_declared_bytes(format: KVFormat, head: int, latent: int) -> None:
    assert format.token_nbytes(MHA) == 2 * 2 * head and format.token_nbytes(MLA) == latent
    pool = MHAPool([MHA], num_pages=2, page_size=4, dtype=format, device="cpu")
    assert pool.keys(0).shape == (2, 4, 2, head) and pool.nbytes == 8 * format.token_nbytes(MHA)


def test_a_row_in_fp8_is_its_values_and_then_its_scale() -> None:
    """Layout and rounding of vLLM: the scale is the largest magnitude divided by 448, at least 1e-6."""
    memory = torch.zeros(2, 1, 2, 2, 132, dtype=torch.uint8)
    layout = "kv pages tokens heads dim"
    pool = MHAPool.over([MHA], {0: memory}, layout, page_size=2, dtype=FP8_PER_TOKEN_HEAD)
    given = rows(2, 2, 128) * torch.tensor([1.0, 300.0]).view(1, 2, 1)
    given[1, 1] = 0.0
    pool.write(0, torch.tensor([1, 0]), given, given)
    for token, slot in ((0, 1), (1, 0)):
        for head in range(2):
            row = pool.keys(0)[0, slot, head]
            scale = max(float(given[token, head].abs().max()) / 448, 1e-6)
            assert row[128:].view(torch.float32).item() == pytest.approx(scale)
            wanted = (given[token, head] * (1 / row[128:].view(torch.float32))).to(torch.float8_e4m3fn)
            assert torch.equal(row[:128], wanted.view(torch.uint8))


@pytest.mark.parametrize("layout", ["token_major", "head_major"])
@pytest.mark.parametrize("format", [FP8_PER_TOKEN_HEAD, NVFP4], ids=str)
def test_own_memory_keeps_parts_apart_so_that_kernels_load_aligned_vectors(format: KVFormat, layout: str) -> None:
    """E2: every row of codes starts at a multiple of 16 bytes, and a head's scales of a page are contiguous."""
    pool = MHAPool([MHA], num_pages=3, page_size=4, dtype=format, device="cpu", layout=layout)
    for codes, scales in pool.parts(0):
        assert all(stride * codes.element_size() % 16 == 0 for stride in codes.stride()[:3])
        assert codes.data_ptr() % 16 == 0 and scales.stride()[1::2] == (scales.shape[3], 1)
        codes.view(torch.uint8).fill_(1)
        assert not scales.view(torch.uint8).any()
        codes.view(torch.uint8).fill_(0)
    given = rows(12, 2, 128)
    pool.write(0, torch.arange(12), given, given)
    (codes, _), (_, scales) = pool.parts(0)
    assert codes.view(torch.uint8).any(-1).all() and scales.view(torch.uint8).any(-1).all()


def test_a_nan_stays_in_its_row() -> None:
    given = rows(2, 1, 32)
    given[0, 0, 5] = torch.nan
    for codec in (fp8_per_token_head, nvfp4):
        found = codec.decode(codec.encode(given))
        assert found[0].isnan().any() and found[1].isfinite().all()


def test_nvfp4_rounds_to_the_nearest_value_and_halfway_to_even() -> None:
    given = torch.tensor([6.0, -6.0, 0.25, 0.26, 0.75, -1.25, 1.75, 2.5, -3.5, 5.0, 5.1, 0.0, -0.5, 1.0, 4.0, 3.0])
    packed, scales = nvfp4.encode(given.view(1, 1, 16))
    assert scales.float().tolist() == [[[1.0]]]
    wanted = [6.0, -6.0, 0.0, 0.5, 1.0, -1.0, 2.0, 2.0, -4.0, 4.0, 6.0, 0.0, -0.5, 1.0, 4.0, 3.0]
    assert nvfp4.decode((packed, scales)).flatten().tolist() == wanted
    low, high = int(packed[0, 0, 0]) & 15, int(packed[0, 0, 0]) >> 4
    assert (low, high) == (7, 15)  # the first value is in the low bits, the sign in bit 3


def test_nvfp4_has_an_e4m3_scale_per_16_values() -> None:
    given = rows(50, 2, 64) * torch.logspace(-1, 2, 50).view(-1, 1, 1)
    packed, scales = nvfp4.encode(given)
    assert scales.dtype is torch.float8_e4m3fn and scales.shape == (50, 2, 4) and packed.shape == (50, 2, 32)
    largest = given.unflatten(-1, (4, 16)).abs().amax(-1) / 6
    assert torch.equal(scales.float(), largest.to(torch.float8_e4m3fn).float())
    ratio = (nvfp4.decode((packed, scales)).unflatten(-1, (4, 16)) / scales.float().unsqueeze(-1)).abs()
    assert torch.isclose(ratio.unsqueeze(-1), torch.tensor(E2M1), atol=1e-5).any(-1).all()
    huge, tiny = torch.full((1, 1, 16), 1e9), torch.full((1, 1, 16), 1e-6)
    assert nvfp4.decode(nvfp4.encode(huge)).unique().tolist() == [6 * 448.0]
    assert nvfp4.decode(nvfp4.encode(tiny)).unique().tolist() == [0.0]


@pytest.mark.parametrize("outliers", [False, True])
def test_finer_scales_lose_less_than_one_per_layer(outliers: bool) -> None:
    """Attention over 500 keys against float64 over unquantised ones, at equal bits."""
    keys, q = rows(500, 1, 128, outliers=outliers) * 20, rows(1, 1, 128) / 20
    wanted = (q.double() * keys.double()).sum(-1)
    errors = {}
    for name in ("float8_e4m3fn", "fp8_per_token_head"):
        format, layer = load_registry().kv_format(name), LayerSpec(0, AttentionKind.MHA, 1, 1, 128, 128, 1.0)
        pool = MHAPool([layer], num_pages=8, page_size=64, dtype=format, device="cpu")
        slots = torch.arange(500)
        pool.write(0, slots, keys, keys)
        errors[name] = float(((q.double() * pool.read_keys(0, slots).double()).sum(-1) - wanted).norm() / wanted.norm())
    assert errors["fp8_per_token_head"] <= errors["float8_e4m3fn"] < 0.5


def test_a_latent_row_keeps_its_rotary_part() -> None:
    """Same as in SnapMLA: one scale per token for the latent part."""
    for format in (FP8_PER_TOKEN_HEAD, NVFP4):
        pool = MLAPool([MLA], num_pages=1, page_size=2, dtype=format, device="cpu")
        given = rows(2, 576).bfloat16()
        pool.write(0, torch.arange(2), given)
        found = pool.read_rows(0, torch.arange(2))
        assert torch.equal(found[:, 512:], given[:, 512:].float()) and not torch.equal(found, given.float())
