"""An MLA backend on a scene: scattered pages, NaN in all that must not be read, and the float64 result.

The model has a layer in front of the one under test, whose cache is all NaN, and is one rank's of two: whoever takes
another layer's cache, or divides a rank's heads once more, is found by every test.
Made for kernels: wide rows, many heads, long requests. Whatever runs in float64 runs on the case's device, in pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attnplug import (
    AttentionBackend,
    AttentionKind,
    BackendContext,
    DType,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    LayerSpec,
    MLAPool,
    ModelSpec,
    Role,
    Serving,
)
from attnplug.host import (
    ExtendPolicy,
    KVPools,
    Limits,
    MLADims,
    MLAWeights,
    ModelAttention,
    Parallel,
    WorkspaceOwner,
    plan_forward,
    torch_dtype,
)
from support.batches import capabilities, geometry, padded
from support.devices import nothing_is_zero_by_chance
from support.trees import Parents, tree_attention, tree_bits

DEEPSEEK = MLADims(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64)
FIRST_LAYER, LAYER = 1, 3
"""The layer that nobody runs, and the one under test."""
RANKS = 2
NAN = float("nan")


@dataclass(frozen=True)
class MLACase:
    """One batch on one layer of a rank. Lengths are (rows in the cache before, new tokens) of each request."""

    lengths: tuple[tuple[int, int], ...]
    mode: ForwardMode = ForwardMode.EXTEND
    page_size: int = 64
    heads: int = 16
    dims: MLADims = DEEPSEEK
    v_head_dim: int = 128
    dtype: DType = DType.BFLOAT16
    kv_dtype: DType | None = None
    kv_scale: float = 1.0
    pages: str = "permuted"
    padding: int = 0
    exact_lengths: bool = True
    """Whether the host knows them, or upper bounds only."""
    trees: tuple[Parents, ...] | None = None
    """The tree of each request's new rows; ``None``: chains."""
    lanes: int = 1
    lse: bool = True
    seed: int = 0
    serving: Serving = field(default_factory=Serving)
    options: Any = None

    @property
    def layer(self) -> LayerSpec:
        width, heads = self.dims.qk_nope_head_dim + self.dims.qk_rope_head_dim, self.heads
        return LayerSpec(LAYER, AttentionKind.MLA, heads, heads, width, self.v_head_dim, width**-0.5, mla=self.dims)

    @property
    def layers(self) -> tuple[LayerSpec, LayerSpec]:
        return replace(self.layer, layer_id=FIRST_LAYER), self.layer


class MLAScene:
    """A backend with a poisoned pool that holds the prefixes of the case's requests, and the rows they bring."""

    def __init__(self, case: MLACase, device: str, build: Callable[[BackendContext], AttentionBackend]) -> None:
        self.case, self.device, self.layer = case, torch.device(device), case.layer
        self.random = torch.Generator(self.device).manual_seed(case.seed)
        self.dtype = torch_dtype(case.dtype)
        kv_dtype = case.kv_dtype or case.dtype
        self.new = [new for _, new in case.lengths]
        self.totals = [before + new for before, new in case.lengths]
        self.page_table, pages = self._page_table()
        scales = {LAYER: case.kv_scale, FIRST_LAYER: 2.0} if kv_dtype is DType.FLOAT8_E4M3 else None
        self.pool = MLAPool(
            case.layers, num_pages=pages, page_size=case.page_size, dtype=kv_dtype, device=self.device, scales=scales
        )
        for layer_id in self.pool.layer_ids:
            self.pool.rows(layer_id).copy_(torch.tensor(NAN))
        self.workspace = WorkspaceOwner()
        longest = self.page_table.shape[1] * case.page_size
        self.backend = build(
            BackendContext(
                name="under_test",
                roles=frozenset({Role.PREFILL, Role.DECODE}),
                model=ModelSpec("test", "test", case.layers, 1 << 20),
                device=self.device,
                dtype=self.dtype,
                kv_dtype=kv_dtype,
                page_size=case.page_size,
                limits=Limits(max(len(self.new), 1), max(sum(self.new), 1), max(4096, longest), case.lanes),
                pools=KVPools(mla=self.pool),
                workspace=self.workspace,
                parallel=Parallel(RANKS - 1, RANKS),
                serving=case.serving,
                declared=capabilities("torch_native"),
                options=case.options,
            )
        )
        tokens, dims = sum(self.new), case.dims
        # Latents that a norm has been over, and absorbed queries whose logits have a spread of about one.
        self.rows = [self.normal(total, dims.row_dim) for total in self.totals]
        self.q = self.normal(tokens, case.heads, dims.row_dim) * (self.layer.head_dim / dims.row_dim) ** 0.5
        self.store(self.rows, [(0, before) for before, _ in case.lengths])

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, device=self.device).to(self.dtype)

    def _page_table(self) -> tuple[Tensor, int]:
        """``[requests, width]``, and how many pages there are; behind a request's last page it leads nowhere."""
        needed = [-(-total // self.case.page_size) for total in self.totals]
        requests, width = len(needed), max([*needed, 1]) + 1
        pages = requests * width + 3
        order = {
            "permuted": lambda: torch.randperm(pages, generator=self.random, device=self.device),
            "interleaved": lambda: torch.arange(requests * width).view(width, requests).T.flatten(),
            "descending": lambda: torch.arange(pages).flip(0),
        }[self.case.pages]()
        table = order[: requests * width].view(requests, width).int().cpu()
        for request, count in enumerate(needed):
            table[request, count:] = 1 << 30
        return table, pages

    def store(self, rows: list[Tensor], spans: list[tuple[int, int]]) -> None:
        """Write rows ``start … stop`` of every request straight into the memory, by the page table."""
        memory = self.pool.rows(LAYER)
        as_bytes = memory.dtype is torch.float8_e4m3fn  # torch has no index operations for it on the CPU
        for request, (start, stop) in enumerate(spans):
            position = torch.arange(start, stop)
            pages = self.page_table[request, position // self.case.page_size].long().to(self.device)
            cells = kept(rows[request][start:stop], self.case.kv_scale, memory.dtype)
            target, cells = (t.view(torch.uint8) if as_bytes else t for t in (memory, cells))
            target[pages, (position % self.case.page_size).to(self.device), 0] = cells

    def stored(self, request: int) -> Tensor:
        """The request's rows as a cache in its type holds them, in float64."""
        dtype = torch_dtype(self.case.kv_dtype or self.case.dtype)
        return kept(self.rows[request], self.case.kv_scale, dtype).double() * self.case.kv_scale

    def batch(self) -> ForwardBatch:
        case = self.case
        made = geometry(
            case.mode,
            self.page_table,
            self.new,
            self.totals,
            case.page_size,
            exact=case.exact_lengths,
            device=self.device,
        )
        if case.trees is not None:
            made = replace(made, tree=tree_bits(case.trees, self.device))
        return padded(ForwardBatch(made), case.padding)

    def padded(self, tensor: Tensor) -> Tensor:
        tail = torch.full((self.case.padding, *tensor.shape[1:]), NAN, dtype=tensor.dtype, device=self.device)
        return torch.cat([tensor, tail])

    def new_rows(self) -> Tensor:
        return torch.cat([rows[before:] for rows, (before, _) in zip(self.rows, self.case.lengths, strict=True)])

    def absorbed(self, batch: ForwardBatch | None = None, **arguments: Any) -> tuple[Tensor, Tensor | None]:
        """Plan (unless the batch is) and run in latent space; output and log-sum-exp, padding rows included."""
        batch = batch or self.batch()
        q, k = self.padded(self.q), self.padded(self.new_rows()).unsqueeze(1)
        lse = torch.full(q.shape[:2], NAN, device=self.device) if self.case.lse else None
        extras = ForwardExtras(lse=lse) if self.case.lse else None
        forward = self.backend.forward_decode if self.case.mode.is_decode else self.backend.forward_extend
        with nothing_is_zero_by_chance(self.device):
            if batch.plan is None:
                plan_forward(self.backend, batch)
            return forward(q, k, None, self.layer, batch, extras=extras, **arguments), lse

    def wanted_absorbed(self) -> tuple[Tensor, Tensor]:
        """What ``absorbed`` must give for the rows that are not padding."""
        rank = self.case.dims.kv_lora_rank
        outs = []
        for request, q in enumerate(self.q.split(self.new)):
            rows = self.stored(request)[:, None].expand(-1, self.case.heads, -1)
            if self.case.trees is None:
                outs.append(attention(q, rows, rows[..., :rank], self.layer.scale))
            else:
                outs.append(tree_attention(q, rows, rows[..., :rank], self.layer.scale, self.case.trees[request]))
        return torch.cat([out for out, _ in outs]), torch.cat([lse for _, lse in outs])


class MLAModel:
    """One layer with random up-projections on a scene: what the three extend paths must agree on."""

    def __init__(self, scene: MLAScene) -> None:
        self.scene, case = scene, scene.case
        rank, nope = case.dims.kv_lora_rank, case.dims.qk_nope_head_dim
        self.weights = MLAWeights(
            scene.normal(case.heads, nope, rank) * rank**-0.5,
            scene.normal(case.heads, rank, case.v_head_dim) * rank**-0.5,
        )
        self.q = scene.normal(sum(scene.new), case.heads, scene.layer.head_dim)

    def run(self, policy: ExtendPolicy, batch: ForwardBatch | None = None) -> Tensor:
        scene = self.scene
        attention = ModelAttention(scene.backend, KVPools(mla=scene.pool), policy)
        self.batch = batch = batch or scene.batch()
        q, rows = scene.padded(self.q), scene.padded(scene.new_rows())
        with nothing_is_zero_by_chance(scene.device):
            attention.plan(batch)
            return attention.attend_mla(q, rows, scene.layer, self.weights, batch)

    def wanted(self) -> Tensor:
        """By the model's equations: up-project every row, then plain attention."""
        scene, rank = self.scene, self.scene.case.dims.kv_lora_rank
        w_kc, w_vc = self.weights.w_kc.double(), self.weights.w_vc.double()
        outs = []
        for request, q in enumerate(self.q.split(scene.new)):
            latent, rope = scene.stored(request).split([rank, scene.case.dims.qk_rope_head_dim], -1)
            keys = torch.einsum("rl,hnl->rhn", latent, w_kc)
            keys = torch.cat([keys, rope[:, None].expand(-1, keys.shape[1], -1)], -1)
            outs.append(attention(q, keys, torch.einsum("rl,hlv->rhv", latent, w_vc), scene.layer.scale)[0])
        return torch.cat(outs)


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Causal attention of one request in float64: the last of q ``[queries, heads, dim]`` sees the last of k."""
    q, k, v = q.double(), k.double().transpose(0, 1), v.double().transpose(0, 1)
    outs, lses = [], []
    last = k.shape[1] - q.shape[0] + torch.arange(q.shape[0], device=q.device)
    piece = max(1, (1 << 26) // max(1, q.shape[1] * k.shape[1]))
    for part, sees in zip(q.split(piece), last.split(piece), strict=True):
        logits = torch.matmul(part.transpose(0, 1), k.transpose(1, 2)) * scale
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        position = torch.arange(k.shape[1], device=q.device)
        hidden = position > sees[:, None]
        if window is not None:
            hidden |= position <= sees[:, None] - window
        logits.masked_fill_(hidden, float("-inf"))
        lses.append(logits.logsumexp(-1).T)
        outs.append(torch.matmul(logits.softmax(-1), v).transpose(0, 1))
    if not outs:
        return q.new_zeros(0, q.shape[1], v.shape[-1]), q.new_zeros(q.shape[:2])
    return torch.cat(outs), torch.cat(lses)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖; NaN if anything found is NaN, so that it fails every comparison.

    Of outputs ``[tokens, heads, dim]`` the largest over the tokens: an average over many rows is far smaller than one
    over few, and beside those its error would not show.
    """
    difference = found.double() - wanted
    if wanted.dim() < 3 or not len(wanted):
        return float(difference.norm() / wanted.norm())
    sizes = wanted.flatten(1).norm(dim=1)
    return float((difference.flatten(1).norm(dim=1) / torch.where(sizes > 0, sizes, 1.0)).max())


def kept(rows: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Rows as a cache stores them. A tensor is divided by: on a GPU torch multiplies by a number's inverse instead, and
    where that is not the quotient, one fp8 number in a hundred rounds the other way."""
    return (rows.float() / torch.tensor(scale, device=rows.device)).to(dtype)
