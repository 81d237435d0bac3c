"""Layers of a decode step that wait for each other, for ``decode_chain_h200.py``: weights, caches, calls, and float64.

A layer is attention, output projection, norm and gate-up projection. It calls the engine's modules and backends as a
captured step does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from decode_models import BYTES_PER_SECOND, Config
from torch import Tensor
from torch.nn import functional as F

from attnplug import AttentionKind, DType, ForwardBatch, ForwardMode, Geometry, LayerSpec, MHAPool, MLAPool, ModelSpec
from attnplug.hf.config_keys import Config as ModelConfig
from attnplug.host import (
    HostContext,
    KVPools,
    Limits,
    MLADims,
    MLAWeights,
    ModelAttention,
    WorkspaceOwner,
    load_registry,
)
from attnplug_engine.kernels.row_places import row_places
from attnplug_engine.models.latent_attention import multiply_few
from attnplug_engine.models.layers import Linear, RMSNorm, silu_and_mul
from attnplug_engine.models.rope import Rope
from attnplug_triton_mha import configurations as mha
from attnplug_triton_mha.backend import TritonMHABackend
from attnplug_triton_mla import configurations as mla
from attnplug_triton_mla.backend import TritonMLABackend

MAX_CONTEXT, PAGE = 16384, 64
PROGRAMS = (8, 32, 64)
"""Programs of kernels that prefetch on a side stream."""


@dataclass(frozen=True)
class Shape:
    model: str
    requests: int
    context: int = 512

    def __str__(self) -> str:
        return f"{self.model} {self.requests} × {self.context}"


class _Gains:
    """Weights of a norm, in place of a checkpoint's."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._options = {"dtype": dtype, "device": device}

    def take(self, name: str, *shape: int, **_: object) -> Tensor:
        return 1 + 0.1 * torch.randn(*shape, **self._options)


@dataclass(frozen=True, eq=False)
class Layer:
    spec: LayerSpec
    out: Linear
    norm: RMSNorm
    gate_up: Linear
    row_norm: RMSNorm | None = None
    mla: MLAWeights | None = None


class Chain:
    """Layers of a model with random weights and filled caches, and what a step calls of each."""

    def __init__(self, shape: Shape, config: Config, layers: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.shape, self.config, self.device, self.is_cuda = shape, config, device, device.type == "cuda"
        self.dtype = torch.bfloat16 if self.is_cuda else torch.float16  # the interpreter rounds bfloat16 toward zero
        self.page_size, self.max_context = (PAGE, MAX_CONTEXT) if self.is_cuda else (16, 64)
        self.heads, self.hidden_size = config["num_attention_heads"], config["hidden_size"]
        self.dims: MLADims | None = None
        if "kv_lora_rank" in config:
            self.dims = MLADims(config["kv_lora_rank"], config["qk_nope_head_dim"], config["qk_rope_head_dim"])
        self.layers = [self._layer(number) for number in range(layers)]
        pages = -(-shape.context // self.page_size)
        order = torch.randperm(shape.requests * pages).int().view(shape.requests, pages)
        table = torch.zeros(shape.requests, self.max_context // self.page_size, dtype=torch.int32)
        table[:, :pages] = order
        self.pages = order.to(device)
        self.pools = self._pools(shape.requests * pages)
        lens = torch.full((shape.requests,), shape.context, dtype=torch.int32, device=device)
        self.geometry = Geometry(
            ForwardMode.DECODE,
            table.to(device),
            lens,
            self.page_size,
            rows=shape.requests,
            max_seq_len=self.max_context,
            max_new=1,
            captured=True,
        )
        rope = Rope(
            ModelConfig(config, "decode_models", config["model_type"]),
            self.dims.qk_rope_head_dim if self.dims else config["head_dim"],
            dtype=self.dtype,
            device=device,
        )
        self.rotation = rope.at(lens.long() - 1)
        self.hidden = 0.05 * self._random(shape.requests, self.hidden_size)
        """As large as what attention adds, which would otherwise be lost in it."""
        self.first = 0.5 * self._random(shape.requests, config["intermediate_size"])
        self.side = torch.cuda.Stream() if self.is_cuda else None
        self.sums = torch.zeros(max(PROGRAMS), dtype=torch.int32, device=device)
        self.attention, self.batch = self.attention_of(None)

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=self.dtype, device=self.device)

    def _layer(self, number: int) -> Layer:
        config, gains = self.config, _Gains(self.dtype, self.device)
        norm = RMSNorm(gains, self.hidden_size, config["rms_norm_eps"])  # type: ignore[arg-type] # only take() is called
        gate_up = Linear(self._random(2 * config["intermediate_size"], self.hidden_size).mul_(self.hidden_size**-0.5))
        gate_up.long_wait = self.dims is not None
        if self.dims is None:
            width = value = config["head_dim"]
            spec = LayerSpec(
                number, AttentionKind.MHA, self.heads, config["num_key_value_heads"], width, width, width**-0.5
            )
            rest: dict[str, Any] = {}
        else:
            rank, nope, value = self.dims.kv_lora_rank, self.dims.qk_nope_head_dim, config["v_head_dim"]
            width = nope + self.dims.qk_rope_head_dim
            spec = LayerSpec(
                number, AttentionKind.MLA, self.heads, self.heads, width, value, width**-0.5, mla=self.dims
            )
            keys = self._random(self.heads, nope, rank).mul_(nope**-0.5)
            values = self._random(self.heads, value, rank).mul_(rank**-0.5).transpose(1, 2)
            rest = {"row_norm": RMSNorm(gains, rank, 1e-6), "mla": MLAWeights(keys, values, multiply_few)}  # type: ignore[arg-type] # as above
        inputs = self.heads * value
        out = Linear(self._random(self.hidden_size, inputs).mul_(inputs**-0.5))
        return Layer(spec, out, norm, gate_up, **rest)

    def _pools(self, pages: int) -> KVPools:
        specs = tuple(layer.spec for layer in self.layers)
        given: dict[str, Any] = {"num_pages": pages, "page_size": self.page_size, "device": self.device}
        given["dtype"] = self.kv_dtype
        if self.dims is None:
            pool = MHAPool(specs, **given)
            for spec in specs:
                for parts in pool.parts(spec.layer_id):
                    parts[0].normal_()
            return KVPools(mha=pool)
        rows = MLAPool(specs, **given)
        for spec in specs:
            rows.rows(spec.layer_id).normal_()
        return KVPools(mla=rows)

    @property
    def kv_dtype(self) -> DType:
        return DType.BFLOAT16 if self.is_cuda else DType.FLOAT16

    def attention_of(self, config: Any) -> tuple[ModelAttention, ForwardBatch]:
        """A backend with another configuration, or with the table's for ``None``, and a planned batch."""
        name = "triton_mha" if self.dims is None else "triton_mla"
        host = HostContext(
            model=ModelSpec("chain", "chain", tuple(layer.spec for layer in self.layers), self.max_context),
            device=self.device,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            page_size=self.page_size,
            limits=Limits(self.shape.requests, self.shape.requests, self.max_context),
            pools=self.pools,
            workspace=WorkspaceOwner(),
        )
        context = host.for_backend(name, load_registry().get(name).spec.capabilities)
        given: dict[str, Any] = {} if config is None else {"choose": lambda *_, **__: config}
        if not self.is_cuda:
            given = {"multiprocessors": 2, "choose": lambda *_, **__: config or _small(self.dims is not None)}
        backend = (TritonMHABackend if self.dims is None else TritonMLABackend)(context, **given)
        attention, batch = ModelAttention(backend, self.pools), ForwardBatch(self.geometry)
        attention.reserve(batch.batch_size, batch.num_tokens)
        attention.capture(batch, in_capture=True)
        return attention, batch

    @property
    def config_now(self) -> Any:
        """Configuration of attention in the base."""
        table, rows = self.geometry.page_table, self.heads // self.config["num_key_value_heads"]
        if not self.is_cuda:
            return _small(self.dims is not None)
        if self.dims is None:
            return mha.choose(rows, self.shape.requests, self.config["num_key_value_heads"], 0)
        return mla.choose(self.heads, self.shape.requests, table.shape[1] * self.page_size, format="plain")

    # Parts of a layer

    def columns(self, act: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of a layer, or queries and rows before their norm: columns of ``act``."""
        rows, spec = act.shape[0], self.layers[0].spec
        wide = spec.num_heads * spec.head_dim
        q = act[:, :wide].view(rows, spec.num_heads, spec.head_dim)
        if self.dims is not None:
            return q, act[:, wide : wide + self.dims.row_dim]
        narrow = spec.num_kv_heads * spec.head_dim
        k, v = (act[:, start : start + narrow] for start in (wide, wide + narrow))
        return q, *(part.view(rows, spec.num_kv_heads, spec.head_dim) for part in (k, v))

    def attend(self, number: int, act: Tensor, using: tuple[ModelAttention, ForwardBatch] | None = None) -> Tensor:
        """As in ``GroupedAttention`` and ``LatentAttention``: ``[requests, heads * v_head_dim]``."""
        attention, batch = using or (self.attention, self.batch)
        layer = self.layers[number]
        if self.dims is None:
            q, k, v = self.columns(act)
            return attention.attend(q, k, v, layer.spec, batch).flatten(1)
        q, down = self.columns(act)
        assert layer.mla is not None and layer.row_norm is not None
        places, new = None, None
        if self.rotation.absorbs(q):
            places = row_places(attention, layer.spec, batch, q.shape[0], down.dtype)
        if places is None:
            q = q.clone()  # it is rotated in place
            new = self.rotation.latent_rows(q, down, self.dims.qk_nope_head_dim, layer.row_norm)
        else:
            q = self.rotation.absorb(q, down, layer.mla, layer.row_norm, places)
        return attention.attend_mla(q, new, layer.spec, layer.mla, batch).flatten(1)

    def project(self, number: int, attended: Tensor, hidden: Tensor) -> Tensor:
        return self.layers[number].out(attended, onto=hidden)

    def gate_up(self, number: int, hidden: Tensor) -> Tensor:
        layer = self.layers[number]
        return layer.gate_up(hidden, norm=layer.norm, activate=silu_and_mul)

    def floors(self) -> dict[str, float]:
        """Microseconds to read each part's bytes once."""
        layer, rows = self.layers[0], self.shape.requests
        if self.dims is None:
            cache = 2 * layer.spec.num_kv_heads * layer.spec.head_dim
            up = 0
        else:
            assert layer.mla is not None
            cache, up = self.dims.row_dim, layer.mla.w_kc.nbytes + layer.mla.w_vc.nbytes
        moved = {
            "attention": rows * self.shape.context * cache * self.dtype.itemsize + up,
            "output": layer.out.weight.nbytes,
            "norm": 2 * self.hidden.nbytes,
            "gate_up": layer.gate_up.weight.nbytes,
        }
        return {name: 1e6 * nbytes / BYTES_PER_SECOND for name, nbytes in moved.items()}


def _small(latent: bool) -> Any:
    if latent:
        return mla.MLAKernelConfig(16, 16, 4, 2, start_steps=1, merge_columns=512)
    return mha.MHAKernelConfig(16, 16, 4, 2, programs=2, separate_merge=True, overlap=False)


def exact_layer(chain: Chain, act: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First layer in float64, from the rows that the cache had before and the new row; nothing of it is shared with the
    kernels."""
    layer, context = chain.layers[0], chain.shape.context
    slots = chain.pages.long()[:, :, None] * chain.page_size + torch.arange(chain.page_size, device=chain.device)
    slots = slots.flatten(1)[:, :context]
    scale = layer.spec.scale
    if chain.dims is None:
        assert chain.pools.mha is not None
        q, k, v = (part.double() for part in chain.columns(act))
        keys, values = (parts[0].flatten(0, 1).double()[slots] for parts in chain.pools.mha.parts(0))
        keys[:, -1], values[:, -1] = k, v
        group = layer.spec.num_heads // layer.spec.num_kv_heads
        keys, values = (rows.repeat_interleave(group, 2) for rows in (keys, values))
        weights = (torch.einsum("rhd,rthd->rht", q, keys) * scale).softmax(-1)
        attended = torch.einsum("rht,rthd->rhd", weights, values).flatten(1)
    else:
        assert chain.pools.mla is not None and layer.mla is not None and layer.row_norm is not None
        rank, nope = chain.dims.kv_lora_rank, chain.dims.qk_nope_head_dim
        q, down = (part.double() for part in chain.columns(act))
        rows = chain.pools.mla.rows(0).reshape(-1, chain.dims.row_dim).double()[slots]
        half = chain.dims.qk_rope_head_dim // 2
        frequencies = chain.config["rope_theta"] ** -(torch.arange(half, device=chain.device).double() / half)
        angles = (context - 1) * frequencies

        def turned(x: Tensor) -> Tensor:
            a, b = x[..., :half], x[..., half:]
            return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

        rows[:, -1] = torch.cat((_normed(down[:, :rank], layer.row_norm), turned(down[:, rank:])), -1)
        latents = torch.einsum("rhn,hnl->rhl", q[..., :nope], layer.mla.w_kc.double())
        logits = torch.einsum("rhl,rtl->rht", torch.cat((latents, turned(q[..., nope:])), -1), rows) * scale
        seen = torch.einsum("rht,rtl->rhl", logits.softmax(-1), rows[..., :rank])
        attended = torch.einsum("rhl,hlv->rhv", seen, layer.mla.w_vc.double()).flatten(1)
    hidden = hidden.double() + attended @ layer.out.weight.double().t()
    gate, up = (_normed(hidden, layer.norm) @ layer.gate_up.weight.double().t()).chunk(2, -1)
    return attended, hidden, F.silu(gate) * up


def _normed(x: Tensor, norm: RMSNorm) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
