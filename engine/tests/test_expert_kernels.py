"""Routed experts as kernels: interpreted on a CPU, compiled and captured on a GPU. References are float64."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from attnplug_engine.models.architectures import load_model
from attnplug_engine.models.experts import MixtureOfExperts
from attnplug_engine.models.layers import RMSNorm
from attnplug_testing.devices import DEVICES, nothing_waits

on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])
ONE_PAIR = (1, 32, 32, 1), (1, 32, 16, 1)
BLOCKS = (16, 32, 32, 1, 2), (16, 32, 16, 1, 2)
FLIPPED = (16, 32, 32, 1, 2, True), (16, 32, 16, 1, 2, True)
"""Tiles of both products."""


def kernels(name: str) -> ModuleType:
    """A module of kernels, interpreted without a GPU."""
    pytest.importorskip("triton")
    return import_module(f"attnplug_engine.kernels.{name}")


@dataclass
class Layer:
    """Random experts and tokens; by default, sizes that no tile divides."""

    gated: bool = True
    experts: int = 5
    hidden: int = 40
    width: int = 24
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    clip: tuple[float, float, float] | None = None
    biased: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        parts = 2 if self.gated else 1
        self.gate_up = self.made(self.experts, parts * self.width, self.hidden)
        self.down = self.made(self.experts, self.hidden, self.width)
        self.biases = None
        if self.biased:
            self.biases = self.made(self.experts, parts * self.width), self.made(self.experts, self.hidden)

    def made(self, *shape: int) -> Tensor:
        return (torch.randn(*shape) * shape[-1] ** -0.5).to(self.device, self.dtype)

    def routing(self, tokens: int, per_token: int) -> tuple[Tensor, Tensor]:
        topk_ids = torch.rand(tokens, self.experts).topk(per_token, dim=-1).indices.int()
        return topk_ids.to(self.device), torch.rand(tokens, per_token).to(self.device)

    def wanted(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """In float64, token by token."""
        rows = []
        for row, experts, weights in zip(x.double(), topk_ids.tolist(), topk_weights.double(), strict=True):
            total = torch.zeros_like(row)
            for expert, weight in zip(experts, weights, strict=True):
                inner = self.gate_up[expert].double() @ row
                inner = inner if self.biases is None else inner + self.biases[0][expert].double()
                if self.clip is not None:
                    (gate, up), (limit, alpha, offset) = inner.chunk(2), self.clip
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                    inner = gate * (alpha * gate).sigmoid() * (up + offset)
                elif self.gated:
                    gate, up = inner.chunk(2)
                    inner = gate * gate.sigmoid() * up
                else:
                    inner = inner.clamp(min=0) ** 2
                outer = self.down[expert].double() @ inner
                total += weight * (outer if self.biases is None else outer + self.biases[1][expert].double())
            rows.append(total)
        return torch.stack(rows)

    def fused_experts(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, chosen_tiles=None, **options) -> Tensor:
        experts = kernels("experts")
        chosen_tiles = chosen_tiles and tuple(experts.ExpertTile(*one) for one in chosen_tiles)
        form = {"gated": self.gated, "clip": self.clip, "biases": self.biases}
        return experts.fused_experts(
            x, topk_ids, topk_weights, self.gate_up, self.down, **form, chosen_tiles=chosen_tiles, **options
        )

    def close(self, got: Tensor, wanted: Tensor) -> None:
        tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[self.dtype]
        assert got.dtype == self.dtype
        assert (got.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


def cuts() -> list[dict[str, object]]:
    """Every way to sort and to sum: each pair alone, pairs ranked, pairs sorted, and one of each."""
    return [
        {"chosen_tiles": ONE_PAIR},
        {"chosen_tiles": BLOCKS},
        {"chosen_tiles": FLIPPED},
        {"chosen_tiles": BLOCKS, "ranked": 0},
        {"chosen_tiles": (ONE_PAIR[0], BLOCKS[1]), "ranked": 0},
        {"chosen_tiles": (BLOCKS[0], ONE_PAIR[1])},
    ]


@on_every_device
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.sample(2)
def test_every_cut_gives_the_sum_of_the_chosen_experts(gated, tokens, device):
    layer = Layer(gated, device=device)
    x, (topk_ids, topk_weights) = layer.made(tokens, layer.hidden), layer.routing(tokens, 3)
    wanted = layer.wanted(x, topk_ids, topk_weights)
    for chosen_tiles in cuts():
        layer.close(layer.fused_experts(x, topk_ids, topk_weights, **chosen_tiles), wanted)


@on_every_device
@pytest.mark.parametrize(
    ("clip", "biased", "gated"), [((0.3, 1.702, 1.0), True, True), ((0.3, 1.0, 0.0), False, True), (None, True, False)]
)
@pytest.mark.sample(2)
def test_clipped_gates_and_biases(clip, biased, gated, device):
    """Limits that clip about half of the values: gpt-oss, DeepSeek-V4, and biases alone."""
    layer = Layer(gated, device=device, clip=clip, biased=biased)
    x, (topk_ids, topk_weights) = layer.made(4, layer.hidden), layer.routing(4, 3)
    wanted = layer.wanted(x, topk_ids, topk_weights)
    for chosen_tiles in cuts():
        layer.close(layer.fused_experts(x, topk_ids, topk_weights, **chosen_tiles), wanted)


@on_every_device
@pytest.mark.parametrize("ranked", [4096, 0])
def test_an_expert_may_have_all_tokens_or_none(ranked, device):
    """One expert has several blocks, the last one partly filled. Experts before and after it have no tokens."""
    layer = Layer(device=device)
    x = layer.made(19, layer.hidden)
    topk_weights = torch.rand(19, 2).to(device)
    for experts in ([1, 3], [4, 4]):
        topk_ids = torch.tensor(experts, dtype=torch.int32, device=device).repeat(19, 1)
        layer.close(
            layer.fused_experts(x, topk_ids, topk_weights, chosen_tiles=BLOCKS, ranked=ranked),
            layer.wanted(x, topk_ids, topk_weights),
        )


@on_every_device
def test_sizes_that_tiles_divide_are_read_without_masks(device):
    layer = Layer(hidden=32, width=32, device=device)
    x, (topk_ids, topk_weights) = layer.made(3, 32), layer.routing(3, 2)
    for chosen_tiles in (ONE_PAIR, BLOCKS):
        layer.close(
            layer.fused_experts(x, topk_ids, topk_weights, chosen_tiles=chosen_tiles),
            layer.wanted(x, topk_ids, topk_weights),
        )


@on_every_device
def test_half_precision_is_summed_in_single(device):
    layer = Layer(hidden=64, width=32, dtype=torch.float16, device=device)
    x, (topk_ids, topk_weights) = layer.made(2, 64), layer.routing(2, 2)
    for chosen_tiles in (ONE_PAIR, BLOCKS):
        layer.close(
            layer.fused_experts(x, topk_ids, topk_weights, chosen_tiles=chosen_tiles),
            layer.wanted(x, topk_ids, topk_weights),
        )


@on_every_device
@pytest.mark.parametrize("chosen_tiles", [ONE_PAIR, BLOCKS], ids=["alone", "blocks"])
def test_the_shared_expert_and_the_residual_are_in_the_last_sum(chosen_tiles, device):
    """These and the gates are views of wider tensors, as in the model."""
    layer = Layer(device=device)
    x, (topk_ids, topk_weights) = layer.made(3, layer.hidden), layer.routing(3, 2)
    shared, onto, gates = layer.made(3, 100)[:, :40], layer.made(3, 80)[:, 40:], layer.made(3, 6)
    got = layer.fused_experts(
        x, topk_ids, topk_weights, shared=shared, gate=gates[:, -1], onto=onto, chosen_tiles=chosen_tiles
    )
    extra = gates[:, -1:].double().sigmoid() * shared.double() + onto.double()
    layer.close(got, layer.wanted(x, topk_ids, topk_weights) + extra)
    layer.close(
        layer.fused_experts(x, topk_ids, topk_weights, onto=onto, chosen_tiles=chosen_tiles),
        layer.wanted(x, topk_ids, topk_weights) + onto.double(),
    )


@on_every_device
@pytest.mark.parametrize("gated", [True, False])
def test_a_shared_expert_may_be_some_more_of_the_same(gated, device):
    """Twice as wide as a routed expert, added fully or with a gate."""
    layer = Layer(gated, device=device)
    x, (topk_ids, topk_weights) = layer.made(2, layer.hidden), layer.routing(2, 2)
    wide = layer.made((4 if gated else 2) * layer.width, layer.hidden), layer.made(layer.hidden, 2 * layer.width)
    one = Layer(gated, experts=1, device=device)
    one.gate_up, one.down = wide[0][None], wide[1][None]
    shared = one.wanted(x, torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1, device=device))
    routed, gates = layer.wanted(x, topk_ids, topk_weights), layer.made(2, 1)
    layer.close(layer.fused_experts(x, topk_ids, topk_weights, every=wide, chosen_tiles=ONE_PAIR), routed + shared)
    got = layer.fused_experts(x, topk_ids, topk_weights, every=wide, gate=gates[:, 0], onto=x, chosen_tiles=ONE_PAIR)
    layer.close(got, routed + gates.double().sigmoid() * shared + x.double())


@on_a_gpu
def test_every_load_gives_a_token_the_same_bits(device):
    """E3: tiles for few and for many pairs of an expert use one instruction and one order."""
    layer = Layer(hidden=256, width=192, experts=4, dtype=torch.bfloat16, device=device)
    x, (topk_ids, topk_weights) = layer.made(600, 256), layer.routing(600, 2)
    whole = layer.fused_experts(x, topk_ids, topk_weights, invariant=True)
    for count in (1, 3, 17, 60, 300):
        some = layer.fused_experts(x[:count], topk_ids[:count], topk_weights[:count], invariant=True)
        assert torch.equal(some, whole[:count]), count


@on_every_device
@pytest.mark.parametrize("ranked", [4096, 0])
def test_a_token_has_the_same_bits_whatever_the_other_tokens_do(ranked, device):
    """Padding of a captured batch routes anywhere, even rows of NaN."""
    layer = Layer(device=device)
    x, (topk_ids, topk_weights) = layer.made(5, layer.hidden), layer.routing(5, 2)
    before = layer.fused_experts(x, topk_ids, topk_weights, chosen_tiles=BLOCKS, ranked=ranked)
    x[3:] = float("nan")
    topk_ids[3:] = topk_ids[0]
    with np.errstate(invalid="ignore"):
        after = layer.fused_experts(x, topk_ids, topk_weights, chosen_tiles=BLOCKS, ranked=ranked)
    assert torch.equal(after[:3], before[:3])


def test_no_tokens_give_no_rows():
    layer = Layer()
    x, (topk_ids, topk_weights) = layer.made(0, layer.hidden), layer.routing(0, 2)
    assert layer.fused_experts(x, topk_ids, topk_weights).shape == (0, layer.hidden)


@on_every_device
@pytest.mark.parametrize("normed", [True, False])
def test_scores_are_products_with_the_normed_row(normed, device):
    torch.manual_seed(0)
    x, weight, norm = (torch.randn(*shape, device=device) for shape in ((3, 72), (11, 40), (40,)))
    x = x[:, :40]
    got, logits = kernels("routing").score(x, weight, norm, 1e-3) if normed else kernels("routing").score(x, weight)
    wanted = x.double()
    if normed:
        wanted = wanted * (wanted.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * norm.double()
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits.double(), wanted @ weight.double().t(), atol=1e-4, rtol=1e-5)


@on_every_device
@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("groups", [None, (4, 2)])
@pytest.mark.parametrize("normalised", [True, False])
def test_the_choice_is_that_of_the_torch_router(sigmoid, groups, normalised, device):
    """Logits are a view with one more column, and experts no power of two."""
    torch.manual_seed(0)
    logits = torch.randn(6, 13)[:, :12]
    bias = torch.randn(12) if sigmoid else None
    group, taken = (12 // groups[0], groups[1]) if groups else (0, 0)
    scores = logits.double().sigmoid() if sigmoid else logits.double().softmax(-1)
    judged = scores if bias is None else scores + bias
    if groups:
        inside = judged.unflatten(1, (groups[0], group))
        best = inside.topk(2 if sigmoid else 1).values.sum(-1)
        closed = torch.ones_like(best, dtype=torch.bool).scatter_(1, best.topk(taken).indices, False)
        judged = judged.masked_fill(closed.repeat_interleave(group, 1), float("-inf"))
    wanted = judged.topk(3).indices
    topk_weights = scores.gather(1, wanted)
    topk_weights = (topk_weights / topk_weights.sum(-1, keepdim=True) if normalised else topk_weights) * 1.5
    topk_ids, got = kernels("routing").choose(
        logits.to(device),
        3,
        sigmoid=sigmoid,
        bias=None if bias is None else bias.to(device),
        normalised=normalised,
        scaling=1.5,
        group=group,
        taken=taken,
    )
    assert torch.equal(topk_ids.long().cpu(), wanted)
    torch.testing.assert_close(got.double().cpu(), topk_weights, atol=1e-6, rtol=1e-5)


@on_every_device
def test_a_row_of_nan_chooses_experts_that_exist(device):
    logits = torch.full((1, 5), float("nan"), device=device)
    with np.errstate(invalid="ignore"):
        topk_ids, _ = kernels("routing").choose(logits, 3, sigmoid=False, bias=None, normalised=True, scaling=1.0)
    assert ((topk_ids >= 0) & (topk_ids < 5)).all()


@on_every_device
@pytest.mark.parametrize(
    ("name", "tokens"),
    [("deepseek_v2", 3), ("deepseek_v3", 1), ("qwen3_next", 3), ("gpt_oss", 3), ("minimax", 1), ("nemotron_h", 3)],
)
@pytest.mark.sample(2)
def test_a_model_has_the_same_experts_on_kernels(name, tokens, device, monkeypatch):
    """On a CPU the model is patched to use them."""

    def run(on: str) -> Tensor:
        module = load_model(f"tiny:{name}", dtype=torch.float32, device=on).module
        block = next(one for one in module.modules() if isinstance(one, MixtureOfExperts))
        norm = next(one for one in module.modules() if isinstance(one, RMSNorm) and one.weight.shape[0] == x.shape[1])
        return block(x.to(on), norm=norm, onto=x.to(on)).cpu()

    torch.manual_seed(0)
    x = torch.randn(tokens, 64)
    wanted = run("cpu")
    assert wanted.sub(x).abs().max() > 0.1
    kernels("experts")
    monkeypatch.setattr("attnplug_engine.models.experts.usable", lambda x: True)
    torch.testing.assert_close(run(device), wanted, atol=1e-5, rtol=1e-5)


@on_a_gpu
@pytest.mark.parametrize("tokens", [1, 5, 64, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_capture_serves_every_routing(tokens, dtype, device):
    """No step synchronizes with the GPU, and replays equal eager runs bit by bit."""
    layer = Layer(experts=16, hidden=256, width=96, dtype=dtype, device=device)
    weight = layer.made(17, layer.hidden)

    def step(x: Tensor) -> Tensor:
        logits = kernels("routing").score(x, weight)[1]
        topk_ids, topk_weights = kernels("routing").choose(
            logits[:, :16], 4, sigmoid=True, bias=None, normalised=True, scaling=1.0
        )
        ranked = 0 if tokens == 300 else 4096  # captures torch's sort, too
        return layer.fused_experts(x, topk_ids, topk_weights, shared=x, gate=logits[:, 16], onto=x, ranked=ranked)

    held = layer.made(tokens, layer.hidden)
    step(held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(held)
    for seed in range(3):
        torch.manual_seed(seed)
        x = layer.made(tokens, layer.hidden) + seed * layer.made(1, layer.hidden)
        with nothing_waits(device):
            held.copy_(x)
            graph.replay()
            eager = step(x)
        assert torch.equal(out, eager)
        logits = x.double() @ weight.double().t()
        scores, topk_ids = logits[:, :16].sigmoid().topk(4)
        wanted = layer.wanted(x, topk_ids, scores / scores.sum(-1, keepdim=True))
        layer.close(eager, wanted + x.double() * (1 + logits[:, 16:].sigmoid()))
