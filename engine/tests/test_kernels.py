"""The kernels between attention layers: each against float64, in Triton's interpreter or on a GPU, and compiled ahead.

The interpreter rounds to bfloat16 toward zero, so on a CPU results are float16 or float32.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attnplug.hf.model_config import model_from_config
from attnplug.host import TINY_CONFIGS
from attnplug_engine import kernels
from attnplug_engine.checkpoints.random import RandomCheckpoint
from attnplug_engine.models import experts, grouped_attention, latent_attention
from attnplug_engine.models.architectures import build_model
from attnplug_engine.models.decoder import LoadedModel
from attnplug_engine.models.layers import Linear, relu_squared, silu_and_mul
from attnplug_engine.models.rope import HalfRotation, PairRotation, PartialRotation
from attnplug_testing.devices import DEVICES, INTERPRETED

BY_KERNEL = [pytest.param("cpu", marks=INTERPRETED), DEVICES[1]]
"""Devices on which kernels can run: interpreted where there is no GPU."""
TYPES = {"cpu": torch.float16, "cuda": torch.bfloat16}
BOUNDS = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Allowed error relative to the largest number: a last bit or two of float32, half a step of the short types."""


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels be used on every device."""
    monkeypatch.setattr(kernels, "usable", lambda _: True)


def random(*shape: int, device: str, seed: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, TYPES[device] if dtype is None else dtype)


def error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    assert found.shape == wanted.shape
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def poisoned_rows(rows: int, width: int, device: str, seed: int = 0) -> Tensor:
    """Rows of a wider tensor, with NaN before, after and below them."""
    memory = torch.full((rows + 1, width + 16), torch.nan, dtype=TYPES[device], device=device)
    memory[:rows, 8 : 8 + width] = random(rows, width, device=device, seed=seed)
    return memory[:rows, 8 : 8 + width]


def normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gain.double()


# Products


@pytest.mark.parametrize("device", BY_KERNEL)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "block_k", "gated", "norm"),
    [
        (1, 64, 24, 64, True, True),
        (1, 64, 24, 64, False, False),
        (3, 52, 34, 16, True, False),
        (3, 52, 34, 16, False, True),
        (4, 96, 16, 32, True, True),
        (7, 10, 2, 16, False, True),
    ],
)
@pytest.mark.sample(4)
def test_a_product_of_few_rows_is_float64s(
    rows: int, inputs: int, outputs: int, block_k: int, gated: bool, norm: bool, device: str
) -> None:
    """Sizes do not divide evenly, and every prologue and epilogue is used. Nothing around the rows is read."""
    from attnplug_engine.kernels.gemm_tiles import GemmConfig
    from attnplug_engine.kernels.skinny_gemm import skinny_gemm

    x = poisoned_rows(rows, inputs, device)
    weight = random(outputs, inputs, device=device, seed=1)
    bias = random(outputs, device=device, seed=2)
    gain = random(inputs, device=device, seed=3, dtype=torch.float32)
    onto = poisoned_rows(rows, outputs // 2 if gated else outputs, device, seed=4)
    wanted = normed(x, gain, 1e-3) if norm else x.double()
    wanted = wanted @ weight.double().T + bias.double()
    if gated:
        gate, up = wanted.chunk(2, dim=-1)
        wanted = F.silu(gate) * up
    wanted = wanted + onto.double()
    tiled = (
        GemmConfig(16, max(block_k, 64), 2, tiles=True),
        GemmConfig(32 if gated else 64, block_k, 4, tiles=True, stages=3),
    )
    for cut in (GemmConfig(4, block_k, 4), *tiled):
        pair = (gain, 1e-3) if norm else None
        found = skinny_gemm(x, weight, cut, bias=bias, norm=pair, gated=gated, onto=onto)
        assert found.dtype is x.dtype
        rounded = 2 if cut.tiles and norm else 1  # what is given to tensor cores
        assert error(found, wanted) <= rounded * BOUNDS[x.dtype]


@pytest.mark.parametrize("device", BY_KERNEL)
@pytest.mark.parametrize("stages", [0, 3])
def test_a_row_does_not_depend_on_the_others(stages: int, device: str) -> None:
    """Padding rows of a captured step hold arbitrary values, which must not change a bit of other rows."""
    from attnplug_engine.kernels.gemm_tiles import GemmConfig
    from attnplug_engine.kernels.skinny_gemm import skinny_gemm

    cut = GemmConfig(64, 64, 4, tiles=True, stages=stages) if stages else GemmConfig(16, 256, 4, tiles=True)
    weight, norm = random(24, 64, device=device, seed=1), (random(64, device=device, seed=3), 1e-6)
    x = random(4, 64, device=device)
    first = skinny_gemm(x, weight, cut, norm=norm)[:3]
    x[3] = torch.nan
    assert torch.equal(skinny_gemm(x, weight, cut, norm=norm)[:3], first)
    assert torch.equal(skinny_gemm(x[:3], weight, cut, norm=norm), first)


@pytest.mark.parametrize("device", BY_KERNEL)
def test_rows_may_begin_at_any_place(device: str) -> None:
    """Numbers are loaded in pairs, and these rows begin in the middle of a pair."""
    from attnplug_engine.kernels.gemm_tiles import GemmConfig
    from attnplug_engine.kernels.skinny_gemm import skinny_gemm

    wide, weight, cut = random(3, 65, device=device), random(24, 64, device=device, seed=1), GemmConfig(4, 64, 4)
    assert torch.equal(skinny_gemm(wide[:, 1:], weight, cut), skinny_gemm(wide[:, 1:].contiguous(), weight, cut))


@pytest.mark.parametrize("device", BY_KERNEL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_not_rounded_on_their_way_to_float32(dtype: torch.dtype, device: str) -> None:
    from attnplug_engine.kernels.gemm_tiles import choose
    from attnplug_engine.kernels.skinny_gemm import skinny_gemm

    x, weight = random(2, 64, device=device, dtype=dtype), random(40, 64, device=device, seed=1, dtype=dtype)
    logits = skinny_gemm(x, weight, choose(x, weight), dtype=torch.float32)
    assert logits.dtype is torch.float32
    assert error(logits, x.double() @ weight.double().T) <= BOUNDS[torch.float32]


def test_some_rows_of_short_types_are_multiplied_by_a_kernel() -> None:
    from attnplug_engine.kernels.gemm_tiles import FEW, MANY, MORE, SOME, choose

    weight, tall = (torch.zeros(rows, 16, dtype=torch.bfloat16) for rows in (8, 5000))
    x = torch.zeros(MANY + 1, 16, dtype=torch.bfloat16)
    assert not choose(x[:FEW], weight).tiles and choose(x[: FEW + 1], weight).tiles
    assert not choose(x[:SOME], weight).stages and choose(x[: SOME + 1], weight).stages and choose(x[:MORE], weight)
    assert not choose(x[: MORE + 1], weight) and not choose(x[:0], weight)
    assert choose(x[:FEW].half(), weight.half()) and not choose(x[: FEW + 1].half(), weight.half())
    assert choose(x[:FEW], tall) and not choose(x[: FEW + 1], tall)
    assert not choose(x[:1].float(), weight.float())
    assert not choose(x[:1], torch.zeros(16, 8, dtype=torch.bfloat16).T)
    assert not choose(x[None, :1], weight)
    assert not choose(x[:1, :15], weight[:, :15].contiguous())
    assert not choose(x[:MORE, :12], weight[:, :12].contiguous())


def test_gated_products_of_many_rows_are_those_that_give_all_processors_work() -> None:
    from attnplug_engine.kernels.gemm_tiles import MANY, choose

    x = torch.zeros(MANY + 1, 16, dtype=torch.bfloat16)
    for outputs, chosen in ((8192, True), (2816, False), (11008, False), (16384, True), (16896, True)):
        weight = torch.zeros(2 * outputs, 16, dtype=torch.bfloat16)
        assert (choose(x[:MANY], weight, gated=True) is not None) is chosen, outputs
        assert choose(x, weight, gated=True) is None and choose(x[:MANY], weight) is None


@pytest.mark.parametrize(
    ("room", "gated", "most"), [(99, False, 8), (99, True, 2), (163, False, 16), (163, True, 32), (227, True, 64)]
)
def test_products_that_shared_memory_has_no_room_for_are_a_librarys(
    room: int, gated: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parametrized by KiB of SM 89, 80 and 90: Triton raises if a program needs more."""
    from attnplug_engine.kernels import gemm_tiles

    monkeypatch.setattr(gemm_tiles, "shared_memory", lambda device: room << 10)
    x, weight = torch.zeros(65, 16, dtype=torch.bfloat16), torch.zeros(16384 if gated else 2048, 16).bfloat16()
    rows = [count for count in range(1, 66) if gemm_tiles.choose(x[:count], weight, gated=gated)]
    assert rows == list(range(1, most + 1))


@pytest.mark.parametrize("shape", [(3072, 2048), (2048, 8192), (3072, 1536), (1, 2048), (7, 24), (2048, 28672)])
def test_a_program_loads_a_bounded_part_of_the_matrix_at_once(shape: tuple[int, int]) -> None:
    from attnplug_engine.kernels.gemm_tiles import choose_few

    for tiles in (1, 2):
        cut = choose_few(*shape, tiles)
        assert 1 <= tiles * cut.block_n * cut.block_k <= 16_384
        assert (cut.block_k & (cut.block_k - 1)) == (cut.block_n & (cut.block_n - 1)) == 0


# Linear maps


class Norm(torch.nn.Module):
    """Stand-in with the interface of ``RMSNorm``. Its weights are not read."""

    def __init__(self, gain: Tensor) -> None:
        super().__init__()
        self.weight, self.eps = gain, 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps).to(x.dtype)


@pytest.mark.parametrize("device", BY_KERNEL)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.usefixtures("everywhere")
def test_a_linear_map_is_the_same_for_few_and_many_rows(rows: int, bias: bool, device: str) -> None:
    weight = random(32, 48, device=device, seed=1)
    shift = random(32, device=device, seed=2) if bias else None
    linear, norm = Linear(weight, shift), Norm(random(48, device=device, seed=3))
    x, onto = random(rows, 48, device=device), random(rows, 32, device=device, seed=4)
    plain = normed(x, norm.weight, norm.eps) @ weight.double().T + (0 if shift is None else shift.double())
    gate, up = plain.chunk(2, dim=-1)
    wanted_sum = plain + onto.double()
    bound = 4 * BOUNDS[x.dtype]  # with many rows some steps are rounded by themselves
    assert error(linear(x, norm=norm), plain) <= bound
    assert error(linear(x, norm=norm, activate=silu_and_mul), F.silu(gate) * up) <= bound
    assert error(linear(x, norm=norm, activate=relu_squared), plain.relu().square()) <= 2 * bound
    assert error(linear(x, norm=norm, onto=onto), wanted_sum) <= bound


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("device", BY_KERNEL)
@pytest.mark.usefixtures("everywhere")
def test_a_rank_that_does_not_add_leaves_the_residual_out(rows: int, device: str) -> None:
    weight, x = random(32, 48, device=device, seed=1), random(rows, 48, device=device)
    onto = torch.full((rows, 32), torch.nan, dtype=x.dtype, device=device)
    found = Linear(weight, adds=False)(x, onto=onto)
    assert error(found, x.double() @ weight.double().T) <= BOUNDS[x.dtype]


# Norms and gates of many rows


@pytest.mark.parametrize("device", BY_KERNEL)
@pytest.mark.parametrize("width", [20, 64])
@pytest.mark.parametrize("gain_type", [None, torch.float32])
def test_the_norm_is_float64s(width: int, gain_type: torch.dtype | None, device: str) -> None:
    from attnplug_engine.kernels.elementwise import rms_norm

    x, gain = poisoned_rows(5, width, device), random(width, device=device, seed=1, dtype=gain_type)
    found = rms_norm(x, gain, 1e-5)
    assert found.dtype is x.dtype and found.is_contiguous()
    assert error(found, normed(x, gain, 1e-5)) <= BOUNDS[x.dtype]
    assert rms_norm(x[:0], gain, 1e-5).shape == (0, width)


@pytest.mark.parametrize("device", BY_KERNEL)
@pytest.mark.parametrize("width", [12, 1030])
def test_the_gate_is_float64s(width: int, device: str) -> None:
    from attnplug_engine.kernels.elementwise import silu_and_mul as gate_by_kernel

    x = poisoned_rows(3, 2 * width, device)
    gate, up = x.double().chunk(2, dim=-1)
    assert error(gate_by_kernel(x), F.silu(gate) * up) <= BOUNDS[x.dtype]
    assert gate_by_kernel(x[:0]).shape == (0, width)


# Rotations

POSITIONS = [0, 7, 131_071]
FREQUENCIES = 1e4 ** -(torch.arange(0, 16, 2) / 16)


def turn_and_twin(pairs: bool, device: str, dim: int = 16) -> tuple[Any, Any]:
    """The kernels' rotation of 16 dimensions, and torch's in float64 by the same angles."""
    from attnplug_engine.kernels.rotation import FusedRotation

    positions = torch.tensor(POSITIONS)
    turn = FusedRotation(positions.to(device), FREQUENCIES.to(device), 1.5, pairs=pairs)
    angles = (positions.unsqueeze(1) * FREQUENCIES).double()
    twin = (PairRotation if pairs else HalfRotation)(angles, 1.5, torch.float64)
    return turn, twin if dim == 16 else PartialRotation(twin, 16)


def rotated(twin: Any, x: Tensor) -> Tensor:
    """Reference by torch in float64, on the CPU."""
    if not isinstance(twin, PairRotation):
        return twin.apply(x.cpu().double())
    pairs = torch.view_as_complex(x.cpu().double().contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * twin._turn).flatten(-2)


@pytest.mark.parametrize("device", BY_KERNEL)
@pytest.mark.parametrize(("pairs", "dim"), [(False, 16), (True, 16), (False, 28)])
def test_a_rotation_is_float64s_in_place_and_not(pairs: bool, dim: int, device: str) -> None:
    turn, twin = turn_and_twin(pairs, device, dim)
    wide = random(3, 7, dim, device=device)
    x, around = wide[:, 1:6], wide.clone()
    wanted = rotated(twin, x)
    assert error(turn.apply(x).cpu(), wanted) <= BOUNDS[x.dtype]
    assert torch.equal(wide, around)
    turn.apply_(x)
    assert error(x.cpu(), wanted) <= BOUNDS[x.dtype]
    assert torch.equal(wide[:, 0], around[:, 0]) and torch.equal(wide[:, 6], around[:, 6])
    assert torch.equal(x[..., 16:], around[:, 1:6, 16:])


@pytest.mark.parametrize("device", BY_KERNEL)
@pytest.mark.parametrize("skipped", [0, 5])
@pytest.mark.parametrize("dim", [16, 28])
@pytest.mark.parametrize("with_norms", [False, True])
def test_heads_are_normed_and_rotated_where_they_lie(with_norms: bool, dim: int, skipped: int, device: str) -> None:
    """Queries and keys each by their own norm; gates between them and values after them are left alone."""
    turn, twin = turn_and_twin(False, device, dim)
    qkv = random(3, 5 + skipped + 2 + 2, dim, device=device)
    before = qkv.clone()
    norms = None
    if with_norms:
        norms = tuple(
            SimpleNamespace(weight=random(dim, device=device, seed=seed, dtype=torch.float32), eps=1e-3)
            for seed in (1, 2)
        )
    q, k = turn.heads(qkv, 5, skipped, 2, norms)
    for found, heads, norm in ((q, before[:, :5], 0), (k, before[:, 5 + skipped : 7 + skipped], 1)):
        heads = heads.cpu()
        wanted = heads if norms is None else normed(heads, norms[norm].weight.cpu(), 1e-3)
        assert error(found.cpu(), twin.apply(wanted.double())) <= BOUNDS[qkv.dtype]
    assert q.data_ptr() == qkv.data_ptr()
    assert torch.equal(qkv[:, 5 : 5 + skipped], before[:, 5 : 5 + skipped])
    assert torch.equal(qkv[:, 7 + skipped :], before[:, 7 + skipped :])


# Whole models


class PretendAttention:
    """Replacement for attention whose output depends only on q, k and v of the same token."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *_: object, **_extras: object) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return v * (q * k).sum(-1, keepdim=True).tanh()

    mla = None  # no cache in which a kernel could store rows

    def attend_mla(self, q: Tensor, rows: Tensor, layer: Any, weights: Any, *_: object, **_extras: object) -> Tensor:
        absorbed = weights.absorb(q)
        scores = (absorbed * rows.unsqueeze(1)).sum(-1, keepdim=True).tanh()
        return weights.project_back(scores * rows[:, None, : layer.mla.kv_lora_rank])


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (grouped_attention, latent_attention):
        monkeypatch.setattr(module, "active_attention", PretendAttention)


MODELS: dict[str, dict[str, object]] = {
    "llama": {"attention_bias": True},
    "qwen3": {},
    "deepseek_v2": {},
    "deepseek_v3": {"q_lora_rank": None},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "glm4_moe": {},
    "olmo2": {},
    "gpt_oss": {},
    "phi3": {"partial_rotary_factor": 0.75, "hidden_size": 96},
    "smollm3": {"no_rope_layers": [0, 1]},
}


def tiny(model_type: str, dtype: torch.dtype, device: str) -> LoadedModel:
    keys = {**TINY_CONFIGS.get(model_type, TINY_CONFIGS["llama"]), **MODELS[model_type]}
    keys |= {"model_type": model_type, "num_hidden_layers": 2}
    return build_model(RandomCheckpoint(keys), model_from_config(keys, model_type), dtype=dtype, device=device)


def logits_of(model: LoadedModel, rows: int, device: str) -> Tensor:
    ids, positions = (torch.arange(rows) * 7 % 50).to(device), (torch.arange(rows) * 3 + 1).to(device)
    with torch.inference_mode():
        batch: Any = None
        return model.module.logits(model.module(ids, positions, batch)).cpu().double()


@pytest.mark.parametrize("device", BY_KERNEL)
@pytest.mark.parametrize(("model_type", "rows"), [(name, 9 if index % 2 else 1) for index, name in enumerate(MODELS)])
@pytest.mark.usefixtures("pretend")
@pytest.mark.sample(3)
def test_a_model_by_kernels_is_as_near_to_float64_as_by_torch(
    model_type: str, rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows, with norms and gates fused into GEMMs, and more rows, with separate norms and gates. Interpreted on a
    CPU."""
    wanted = logits_of(tiny(model_type, torch.float64, "cpu"), rows, "cpu")
    model = tiny(model_type, TYPES[device], device)
    monkeypatch.setattr(kernels, "usable", lambda _: False)
    by_torch = float((logits_of(model, rows, device) - wanted).norm() / wanted.norm())
    monkeypatch.setattr(kernels, "usable", lambda _: True)
    assert float((logits_of(model, rows, device) - wanted).norm() / wanted.norm()) <= 3 * by_torch <= 1.0


@pytest.mark.parametrize("device", BY_KERNEL)
@pytest.mark.parametrize("model_type", ["llama", "deepseek_v2"])
@pytest.mark.usefixtures("pretend")
def test_batch_invariant_kernels_of_a_model(model_type: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E3: they are as near to float64 as the default ones; on a GPU rows have the same bits among others."""
    wanted = logits_of(tiny(model_type, torch.float64, "cpu"), 20, "cpu")
    model = tiny(model_type, TYPES[device], device)
    by_torch = float((logits_of(model, 20, device) - wanted).norm() / wanted.norm())
    model.module.batch_invariant = True
    for module in (kernels, experts, latent_attention):
        monkeypatch.setattr(module, "usable", lambda _: True)
    found = logits_of(model, 20, device)
    assert float((found - wanted).norm() / wanted.norm()) <= 3 * by_torch <= 1.0
    if device == "cuda":
        for rows in (1, 3, 17):
            assert torch.equal(logits_of(model, rows, device), found[:rows])
        assert torch.equal(logits_of(model, 300, device)[:20], found)


@INTERPRETED
@pytest.mark.usefixtures("pretend", "everywhere")
def test_a_layer_takes_five_launches_beside_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one row, norms, gate and residuals are parts of products. Angles and the last norm run once per step."""
    from triton.runtime.interpreter import InterpretedFunction

    launched: list[str] = []
    run = InterpretedFunction.run

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        launched.append(self.fn.__name__)
        return run(self, *args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    logits_of(tiny("llama", torch.float16, "cpu"), 1, "cpu")
    layer = ["_skinny_gemm", "_rotate_heads", "_skinny_gemm", "_skinny_gemm", "_skinny_gemm"]
    assert launched == ["_angles", *layer, *layer, "_rms_norm"]
