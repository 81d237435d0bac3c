"""Drives SGLang's own classes for sparse MLA with an attnplug backend, and prints a line of JSON.

SGLang cannot start a sparse model on a CPU: its arguments ask CUDA for the compute capability, and its indexer has no
path without a GPU. So this script makes SGLang's calls to an attention backend itself, with SGLang's own classes: the
KV pool of sparse models, the selection of its indexer (over scores that are computed with torch), and its forward
modes. The reference is attention in float64 over rows that SGLang reads back from its cache.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from sglang.kernels.ops.attention.dsa.dequant_k_cache import dequantize_k_cache
from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
from sglang.srt.layers.attention.dsa.paged_mqa_logits_backend import DSAPagedMQALogitsBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from attnplug_sglang.build import build

PAGE, PAGES, TOPK, HEADS, INDEX_HEADS, RANK, ROPE, CONTEXT = 64, 12, 16, 4, 4, 512, 64, 256
SCALE = 0.1
NAME = "attnplug:torch_sparse"
BATCHES = [
    (ForwardMode.EXTEND, [0, 70, 130], [90, 3, 1]),
    (ForwardMode.DECODE, [69, 130], [1, 1]),
    (ForwardMode.TARGET_VERIFY, [69, 130], [3, 3]),
]


class OnDevice(torch.Tensor):
    """A tensor whose ``device`` has an index, as the indexer asserts. Results of operations are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = SimpleNamespace(index=0)  # type: ignore[assignment]


def runner(pool: Any, table: Tensor, layer: Any) -> Any:
    text = SimpleNamespace(model_type="deepseek_v32", index_n_heads=INDEX_HEADS, index_head_dim=128, index_topk=TOPK)
    dims = {"kv_lora_rank": RANK, "qk_nope_head_dim": 128, "qk_rope_head_dim": ROPE, "v_head_dim": 128}
    config = SimpleNamespace(
        num_attention_heads=HEADS, context_len=CONTEXT, hf_config=text, hf_text_config=text, **dims
    )
    arguments = SimpleNamespace(
        speculative_attention_mode="decode",
        speculative_algorithm="EAGLE",
        speculative_num_draft_tokens=3,
        speculative_eagle_topk=1,
        speculative_draft_attention_backend="triton",
        enable_deterministic_inference=False,
        cuda_graph_config=None,
        chunked_prefill_size=128,
        max_prefill_tokens=128,
        disaggregation_mode="null",
        disable_chunked_prefix_cache=True,
        disable_radix_cache=False,
        dsa_topk_backend="torch",
    )
    return SimpleNamespace(
        server_args=arguments,
        model=torch.nn.ModuleList([layer]),
        model_config=config,
        req_to_token_pool=SimpleNamespace(req_to_token=table, size=table.shape[0] - 1),
        token_to_kv_pool=pool,
        page_size=PAGE,
        device="cpu",
        gpu_id=0,
        dtype=torch.bfloat16,
        kv_cache_dtype=pool.dtype,
        is_generation=True,
        is_draft_worker=False,
        use_mla_backend=True,
        prefill_attention_backend_str=NAME,
        decode_attention_backend_str=NAME,
    )


def batch_of(mode: Any, prefixes: list[int], new: list[int], table: Tensor) -> Any:
    lengths = [before + more for before, more in zip(prefixes, new, strict=True)]
    pages = torch.randperm(PAGES - 1)[: sum(-(-length // PAGE) for length in lengths)] + 1
    for row, length in enumerate(lengths, start=1):
        own, pages = pages[: -(-length // PAGE)], pages[-(-length // PAGE) :]
        position = torch.arange(length)
        table[row, :length] = (own[position // PAGE] * PAGE + position % PAGE).int()
    lens = prefixes if mode.is_target_verify() else lengths
    places = [table[row, before:length] for row, (before, length) in enumerate(zip(prefixes, lengths, strict=True), 1)]
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(new),
        req_pool_indices=torch.arange(1, len(new) + 1),
        seq_lens=torch.tensor(lens),
        seq_lens_cpu=torch.tensor(lens),
        out_cache_loc=torch.cat(places).long(),
        extend_seq_lens=torch.tensor(new),
        extend_seq_lens_cpu=new,
        extend_prefix_lens_cpu=prefixes,
        spec_info=SimpleNamespace(draft_token_num=3, tree_topk=1) if mode.is_target_verify() else None,
    )


def indexer() -> Any:
    """SGLang's indexer with the fields that its selection reads. Its constructor requires a GPU."""
    made = Indexer.__new__(Indexer)
    torch.nn.Module.__init__(made)
    made.index_topk, made.n_heads, made.sm_count = TOPK, INDEX_HEADS, 64
    made.num_init_tokens = made.num_local_tokens = 0
    made.paged_mqa_logits_backend = DSAPagedMQALogitsBackend.DEEPGEMM
    made._with_real_sm_count = ExitStack
    return made


def drive(dtype: torch.dtype, mode: Any, prefixes: list[int], new: list[int]) -> dict[str, Any]:
    """Write rows by SGLang, and those of a batch again by the backend; select by SGLang, attend, and compare.

    Returns the largest relative errors of the output and of the rows that the backend wrote, as SGLang reads them, and
    the part of selected rows that an exact selection does not have.
    """
    torch.manual_seed(0)
    fp8, rows = dtype is torch.float8_e4m3fn, sum(new)
    pool = DSATokenToKVPool(
        size=PAGE * (PAGES - 1),
        page_size=PAGE,
        kv_lora_rank=RANK,
        dtype=dtype,
        qk_rope_head_dim=ROPE,
        layer_num=1,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=656 if fp8 else RANK + ROPE,
    )
    layer = RadixAttention(HEADS, RANK + ROPE, SCALE, num_kv_heads=1, layer_id=0, v_head_dim=RANK)
    table = torch.zeros(len(new) + 1, CONTEXT, dtype=torch.int32)
    batch = batch_of(mode, prefixes, new, table)
    backend = build(NAME, runner(pool, table, layer))
    every = torch.arange(PAGE, PAGE * PAGES)
    latent, rope = (torch.randn(len(every), 1, dim, dtype=torch.bfloat16) for dim in (RANK, ROPE))
    pool.set_mla_kv_buffer(layer, every, latent, rope)
    keys = torch.randn(len(every), 128).to(torch.float8_e4m3fn)
    pool.set_index_k_scale_buffer(0, every, keys, torch.rand(len(every), 1) + 0.5)

    backend.init_forward_metadata(batch)
    q_index = torch.randn(rows, INDEX_HEADS, 128).to(torch.float8_e4m3fn)
    weights = torch.rand(rows, INDEX_HEADS, 1)
    selector = indexer()
    with forward_context(ForwardContext(attn_backend=backend)):
        metadata = backend.get_indexer_metadata(0, batch)
        if mode.is_extend_without_speculative():
            found = torch.full((rows, TOPK), -1, dtype=torch.int32)
            numbered = q_index.as_subclass(OnDevice)
            selector._get_topk_ragged(False, batch, 0, numbered, weights, metadata, found)
        else:
            found = selector._get_topk_paged(batch, 0, q_index, weights, metadata)

    q = torch.randn(rows, HEADS, RANK + ROPE, dtype=torch.bfloat16)
    own = torch.cat([latent, rope], -1)[batch.out_cache_loc - PAGE]
    run = backend.forward_decode if mode.is_decode() else backend.forward_extend
    out = run(q, own, own[..., :RANK], layer, batch, topk_indices=found).view(rows, HEADS, RANK)
    values = rows_of(pool)
    written = values[batch.out_cache_loc]
    index = keys.double() * pool_scales(pool, every)
    owners = [request for request, more in enumerate(new) for _ in range(more)]
    seen = [before + number + 1 for before, more in zip(prefixes, new, strict=True) for number in range(more)]
    worst, wrong = 0.0, 0
    for row, (request, length) in enumerate(zip(owners, seen, strict=True)):
        slots = table[1 + request, :length].long()
        scores = torch.relu(q_index[row].double() @ index[slots - PAGE].T)
        best = (scores * weights[row].double()).sum(0).topk(min(TOPK, length)).indices
        chosen = found[row][found[row] >= 0].long()
        wrong += len(set(best.tolist()) ^ set(chosen.tolist()))
        picked = values[slots[chosen]]
        want = torch.softmax(q[row].double() @ picked.T * SCALE, -1) @ picked[:, :RANK]
        worst = max(worst, float((out[row].double() - want).abs().max() / want.abs().max()))
    return {
        "error": worst,
        "misselected": wrong / (2 * sum(min(TOPK, length) for length in seen)),
        "written": float((written - own.squeeze(1)).abs().max() / own.abs().max()),
    }


def rows_of(pool: Any) -> Tensor:
    """All rows of the cache, as SGLang reads them, in float64."""
    cache = pool.get_key_buffer(0)
    if pool.dsa_kv_cache_store_fp8:
        cache = dequantize_k_cache(cache)
    return cache.view(-1, RANK + ROPE).double()


def pool_scales(pool: Any, slots: Tensor) -> Tensor:
    """Scales of index keys as SGLang reads them."""
    page = pool.get_index_k_with_scale_buffer(0)[slots // PAGE]
    scales = page[:, PAGE * 128 :].contiguous().view(torch.float32)
    return scales[torch.arange(len(slots)), slots % PAGE, None].double()


if __name__ == "__main__":
    envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.set(True)
    widths = {"attn_dcp_size": 1, "attn_dcp_rank": 0, "dcp_enabled": False}
    with get_parallel().override(**widths):
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            for mode, prefixes, new in BATCHES:
                found = {"case": f"{dtype} {mode.name}", **drive(dtype, mode, prefixes, new)}
                sys.stdout.write("RESULT " + json.dumps(found) + "\n")
