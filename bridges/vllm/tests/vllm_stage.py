"""Hand-made vLLM objects: a configuration, a step's metadata, layers with caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug.host import SelectionError
from attnplug_vllm import selection
from attnplug_vllm.host import HOST, refuse

NULL_BLOCK = 0


class Compilation(SimpleNamespace):
    """Compilation config that supports weak references, as vLLM's does."""


def config(additional: Mapping[str, Any] | None = None, **changes: Any) -> SimpleNamespace:
    """A ``VllmConfig``, as far as the bridge reads it; changes are ``section__name=value``."""
    found = SimpleNamespace(
        additional_config=dict(additional or {}),
        model_config=SimpleNamespace(
            model="tiny",
            dtype=torch.float32,
            max_model_len=256,
            hf_text_config=SimpleNamespace(model_type="llama"),
            is_mm_prefix_lm=False,
            use_mla=False,
            rswa_window=None,
        ),
        cache_config=SimpleNamespace(
            block_size=16, user_specified_block_size=False, kv_sharing_fast_prefill=False, calculate_kv_scales=False
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            rank=0,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            prefill_context_parallel_size=1,
            use_ubatching=False,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=True),
        compilation_config=Compilation(cudagraph_mode=None, max_cudagraph_capture_size=None),
        attention_config=SimpleNamespace(backend=None, backend_per_kind={}, use_non_causal=False),
        speculative_config=None,
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        here: Any = found
        for part in path:
            here = getattr(here, part)
        setattr(here, last, value)
    return found


def run_sparse_layers_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the refusal of sparse models on a CPU. Classes are driven directly, without vLLM's CPU platform."""
    found = replace(HOST, refuse=lambda problem: refuse(replace(problem, device=None)))
    monkeypatch.setattr(selection, "HOST", found)


@dataclass
class Metadata:
    """A ``CommonAttentionMetadata``, as far as the bridge reads it."""

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: bool = True
    seq_lens_cpu_upper_bound: Tensor | None = None

    def replace(self, **changes: Any) -> Metadata:
        return replace(self, **changes)


def metadata(
    lengths: Sequence[tuple[int, int]], *, block_size: int = 16, width: int = 16, padding: tuple[int, int] = (0, 0)
) -> Metadata:
    """Metadata of a step from (cached rows, new tokens) of each request. Requests have separate blocks; block 0 is
    unused.

    ``padding`` are requests and tokens that a graph is padded with, as vLLM pads: no new tokens, length 0, slot -1.
    """
    requests, tokens = padding
    new = torch.tensor([count for _, count in lengths] + [0] * requests, dtype=torch.int32)
    seq_lens = torch.tensor([before + count for before, count in lengths] + [0] * requests, dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), new.cumsum(0, dtype=torch.int32)])
    table = torch.full((len(seq_lens), width), NULL_BLOCK, dtype=torch.int32)
    free, slots = 1, []
    for request, (before, count) in enumerate(lengths):
        blocks = -(-(before + count) // block_size)
        table[request, :blocks] = torch.arange(free, free + blocks)
        free += blocks
        slots += [
            int(table[request, position // block_size]) * block_size + position % block_size
            for position in range(before, before + count)
        ]
    slots += [-1] * tokens
    return Metadata(
        starts,
        starts.clone(),
        seq_lens,
        len(seq_lens),
        len(slots),
        int(new.max()),
        int(seq_lens.max()),
        table,
        torch.tensor(slots, dtype=torch.int64),
        seq_lens_cpu_upper_bound=seq_lens.clone(),
    )


LAYOUTS = {
    # vLLM 0.26: shape (blocks, heads, tokens, 2 * dim), by the order of its dimensions in memory
    "HND": (1, (0, 1, 2, 3, 4)),
    "NHD": (1, (0, 1, 3, 2, 4)),
    # vLLM 0.32: views of one buffer of layers, blocks, heads, tokens and content
    "LBHNC": (3, (0, 1, 2, 3, 4)),
    "LBNHC": (3, (0, 1, 3, 2, 4)),
    "LHBNC": (3, (0, 2, 1, 3, 4)),
    "BLHNC": (3, (1, 0, 2, 3, 4)),
    "BLNHC": (3, (1, 0, 3, 2, 4)),
    "BHLNC": (3, (1, 2, 0, 3, 4)),
}


def caches(layout: str, *, layers: int, blocks: int, heads: int, block_size: int, content: int) -> list[Tensor]:
    """Views ``[blocks, heads, tokens, content]`` of layers, as vLLM lays them out in memory."""
    together, order = LAYOUTS[layout]
    sizes = (layers if together > 1 else 1, blocks, heads, block_size, content)
    back = [order.index(dim) for dim in range(5)]

    def make() -> Tensor:
        return torch.zeros([sizes[dim] for dim in order]).permute(back)

    whole = [make() for _ in range(layers if together == 1 else 1)]
    return [whole[0][layer] if together > 1 else whole[layer][0] for layer in range(layers)]


def layer(cache: Tensor) -> SimpleNamespace:
    """A layer of vLLM's that has its cache."""
    return SimpleNamespace(kv_cache=cache, _k_scale_float=1.0, _v_scale_float=1.0)


def codes(error: BaseException, backend: str) -> set[str]:
    """Codes of the refusals of one backend, from the selection that failed."""
    failed = getattr(error, "error", None) or error.__cause__
    assert isinstance(failed, SelectionError)
    candidates = (candidate for choice in failed.selection.choices.values() for candidate in choice.candidates)
    return {reason.code for each in candidates if each.backend.spec.name == backend for reason in each.refusals}
