"""Stand-ins for the objects that SGLang passes to a backend, for tests without SGLang."""

from __future__ import annotations

from enum import IntEnum, auto
from types import SimpleNamespace
from typing import Any

import torch

from attnplug import AttentionKind, DType, LayerSpec, MHAPool, ModelSpec, Problem
from attnplug.host import (
    BackendRequest,
    HostContext,
    KVPools,
    Limits,
    ModelAttention,
    WorkspaceOwner,
    build_selection,
    load_registry,
    select,
)


class Mode(IntEnum):
    """The members of SGLang's ``ForwardMode``; test_signatures.py compares them with the real one."""

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND_V2 = auto()
    PREBUILT = auto()
    SPLIT_PREFILL = auto()
    DLLM_EXTEND = auto()

    def is_extend_without_speculative(self) -> bool:
        return self in (Mode.EXTEND, Mode.MIXED)


def module(layer_id: int = 0, **changes: Any) -> Any:
    """A ``RadixAttention``'s attributes."""
    values: dict[str, Any] = {
        "tp_q_head_num": 4,
        "tp_k_head_num": 2,
        "tp_v_head_num": 2,
        "head_dim": 8,
        "qk_head_dim": 8,
        "v_head_dim": 8,
        "scaling": 0.25,
        "layer_id": layer_id,
        "logit_cap": 0.0,
        "sliding_window_size": -1,
        "is_cross_attention": False,
        "use_irope": False,
        "attn_type": SimpleNamespace(value="decoder"),
        "pos_encoding_mode": "NONE",
        "logit_capping_method": "tanh",
        "xai_temperature_len": -1,
    }
    return Module(**{**values, **changes})


class Module(SimpleNamespace):
    """Compared by identity, as torch's modules are."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def slots_table(lengths: list[int], page_size: int, *, context: int = 64) -> torch.Tensor:
    """``req_to_token`` with SGLang's padding in row 0. Pages of requests are scattered, and page 0 belongs to none."""
    table = torch.zeros(len(lengths) + 1, context, dtype=torch.int32)
    pages = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).tolist()
    for row, (length, count) in enumerate(zip(lengths, pages, strict=True), start=1):
        own, order = [1 + page for page in order[:count]], order[count:]
        for position in range(length):
            table[row, position] = own[position // page_size] * page_size + position % page_size
    return table


def batch(table: torch.Tensor, prefixes: list[int], new: list[int], mode: Mode = Mode.EXTEND, **changes: Any) -> Any:
    """A ``ForwardBatch`` of requests in rows 1, 2, … of the table."""
    rows = range(1, len(new) + 1)
    total = [before + more for before, more in zip(prefixes, new, strict=True)]
    places = [table[row, before:length] for row, before, length in zip(rows, prefixes, total, strict=True)]
    lens = prefixes if mode is Mode.TARGET_VERIFY else total
    values: dict[str, Any] = {
        "forward_mode": mode,
        "batch_size": len(new),
        "req_pool_indices": torch.tensor(list(rows)),
        "seq_lens": torch.tensor(lens),
        "seq_lens_cpu": torch.tensor(lens),
        "out_cache_loc": torch.cat(places).long(),
        "extend_seq_lens": torch.tensor(new),
        "extend_seq_lens_cpu": new,
        "extend_prefix_lens_cpu": prefixes,
        "spec_info": SimpleNamespace(draft_token_num=new[0]) if mode is Mode.TARGET_VERIFY else None,
    }
    return SimpleNamespace(**{**values, **changes})


def mha_layer(layer_id: int = 0, window: int | None = None) -> LayerSpec:
    return LayerSpec(layer_id, AttentionKind.MHA, 4, 2, 8, 8, 0.25, sliding_window=window)


def caches(layers: tuple[LayerSpec, ...], pages: int, page_size: int) -> tuple[HostContext, dict[int, Any]]:
    """A context over caches as SGLang has them, ``[slots, heads, dim]``, and the caches."""
    model = ModelSpec("test", "llama", layers, 64)
    shape = (pages * page_size, 2, layers[0].head_dim)
    found = {layer.layer_id: (torch.randn(shape), torch.randn(shape)) for layer in layers}
    pool = MHAPool.over(layers, found, "slots heads dim", page_size=page_size, dtype=DType.FLOAT32)
    context = HostContext(
        model=model,
        device=torch.device("cpu"),
        dtype=torch.float32,
        kv_dtype=DType.FLOAT32,
        page_size=page_size,
        limits=Limits(8, 256, 64),
        pools=KVPools(mha=pool),
        workspace=WorkspaceOwner(),
    )
    return context, found


def attention(layers: tuple[LayerSpec, ...], pages: int, page_size: int) -> Any:
    """``torch_native`` over such caches, and the caches."""
    context, found = caches(layers, pages, page_size)
    problem = Problem(context.model, device="cpu", dtype=DType.FLOAT32, kv_dtype=DType.FLOAT32, page_size=page_size)
    selection = select(load_registry(), BackendRequest("torch_native"), problem)
    return ModelAttention(build_selection(selection, context), context.pools), found


def reference(q: torch.Tensor, cache: Any, slots: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
    """One request's attention in float64: its last queries over all its rows."""
    keys, values = (part[slots.long()].double().repeat_interleave(2, dim=1) for part in cache)
    logits = torch.einsum("qhd,khd->hqk", q.double(), keys) * layer.scale
    position, key = torch.arange(len(slots) - len(q), len(slots))[:, None], torch.arange(len(slots))
    seen = key <= position
    if layer.sliding_window is not None:
        seen &= key > position - layer.sliding_window
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(~seen, -torch.inf).softmax(-1), values)
