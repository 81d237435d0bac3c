"""FlashAttention's functions in plain torch, as strict as the libraries' own. They test planning, not a kernel.

They replace the real ones behind the plugin's adapters and compute in float64. They also take float32, so that no error
hides behind rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import BackendContext, DType
from attnplug_flashattention import kernels
from attnplug_flashattention.backend import FlashAttentionBackend
from attnplug_flashattention.kernels import FA2Kernels, FA4Kernels, FlashAttentionKernels, TorchKernels
from attnplug_flashattention.options import FlashAttentionOptions
from attnplug_flashattention.plugin import fa4_problem
from attnplug_testing.batches import declaring
from attnplug_testing.devices import GPU_MARKS

TYPES = (torch.float32, torch.float16, torch.bfloat16)
KERNELS = ("fa4", "fa2", "torch", "torch before paging")
REAL = ("fa4", "torch")
"""The kernels that a GPU test has the libraries for."""


def on_cpu(case: Any) -> Any:
    """Return the case in float32."""
    return replace(case, dtype=DType.FLOAT32) if case.dtype is DType.BFLOAT16 else case


def reference(name: str) -> FlashAttentionKernels:
    make: dict[str, Callable[[], FlashAttentionKernels]] = {
        "fa4": lambda: FA4Kernels(fa4_varlen_func),
        "fa2": lambda: FA2Kernels(fa2_varlen_func),
        "torch": lambda: TorchKernels(torch_varlen_attn),
        "torch before paging": lambda: TorchKernels(torch_varlen_attn_2_11),
    }
    return make[name]()


def build(name: str = "fa4", processors: int = 132) -> Callable[[BackendContext], FlashAttentionBackend]:
    """Return a factory of backends: real kernels on a GPU, reference kernels on a CPU."""

    def made(context: BackendContext) -> FlashAttentionBackend:
        context = declaring(context, "flashattention")
        if context.device.type == "cpu":
            return FlashAttentionBackend(context, kernels=reference(name), processors=processors)
        if name == "fa4":
            skip_without_fa4()
        given = context.options
        options = given if isinstance(given, FlashAttentionOptions) else FlashAttentionOptions()
        chosen = replace(options, kernel=name)  # type: ignore[arg-type] # of KERNELS, "torch before paging" never is real
        return FlashAttentionBackend(replace(context, options=chosen))

    return made


on_fa4, on_fa2, on_torch, on_torch_before_paging = (
    build(name) for name in ("fa4", "fa2", "torch", "torch before paging")
)
"""Factories for the conformance kit."""


def on_references(context: BackendContext) -> FlashAttentionBackend:
    """Factory, as a spec names one, of the backend on a CPU."""
    return FlashAttentionBackend(context, kernels=reference("fa4"))


def skip_without_fa4() -> None:
    problem = fa4_problem(10 * torch.cuda.get_device_capability()[0], ())
    try:
        kernels.load_fa4()
    except Exception as error:
        problem = f"cannot be imported: {error}"
    if problem is not None:
        pytest.skip(f"flash-attn-4 {problem}")


def on_devices(*names: str) -> pytest.MarkDecorator:
    """Parametrize by kernel and device: references on a CPU, real kernels on a GPU."""
    cases: list[Any] = [(name, "cpu") for name in names]
    cases += [pytest.param(name, "cuda", marks=GPU_MARKS) for name in names if name in REAL]
    return pytest.mark.parametrize(("kernel", "device"), cases)


# ---- what they compute ----


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, left: int | None, right: int | None, cap: float
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence: query i sees keys ``i + keys - queries - left`` to ``i + keys - queries + right``."""
    queries, keys, heads = q.shape[0], k.shape[0], q.shape[1]
    k, v = (rows.double().repeat_interleave(heads // rows.shape[1], 1) for rows in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if cap:
        logits = cap * torch.tanh(logits / cap)
    own = (torch.arange(queries) + keys - queries)[:, None]
    key = torch.arange(keys)
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if left is not None:
        hidden |= key < own - left
    if right is not None:
        hidden |= key > own + right
    logits = logits.masked_fill(hidden, float("-inf"))
    sums = logits.logsumexp(-1) if keys else torch.full((heads, queries), float("-inf"), dtype=torch.float64)
    weights = torch.where(sums[..., None] > float("-inf"), torch.exp(logits - sums[..., None]), 0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), sums.float()


def paged_rows(pages: Tensor, table: Tensor, count: int) -> Tensor:
    """Gather the first ``count`` rows by one row of a page table, and read nothing else."""
    size = pages.shape[1]
    used = table[: -(-count // size)].long()
    assert ((used >= 0) & (used < pages.shape[0])).all(), "a page that is not there"
    return pages[used].flatten(0, 1)[:count]


def check_indptr(indptr: Tensor, rows: int) -> None:
    assert indptr.dtype is torch.int32 and indptr.stride(0) == 1 and indptr.dim() == 1
    assert int(indptr[0]) == 0 and int(indptr[-1]) == rows and (indptr.diff() >= 0).all()


def check_table(table: Tensor, sequences: int) -> None:
    assert table.dtype is torch.int32 and table.stride(-1) == 1 and table.shape[0] == sequences


def check_types(*tensors: Tensor) -> None:
    assert len({tensor.dtype for tensor in tensors}) == 1 and tensors[0].dtype in TYPES
    assert all(tensor.stride(-1) == 1 for tensor in tensors)


# ---- FlashAttention 4 ----


def key_tile(head_dim: int, v_head_dim: int, local: bool) -> tuple[int, ...]:
    """The key tile that page sizes are compared with, on SM 90 and on SM 100."""
    if head_dim <= 64:
        tile = 128
    elif head_dim <= 96:
        return (128, 144)
    elif head_dim <= 128:
        tile = 128
    elif head_dim <= 192:
        tile = 96 if local else (128 if v_head_dim <= 128 else 112)
    else:
        tile = 64 if local else 80
    return (tile, 128)


def fa4_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    num_splits: int = 1,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``flash_attn.cute.flash_attn_varlen_func`` as this plugin may call it on SM 90."""
    assert num_splits == 1, "SplitKV not supported on SM 9.0"
    check_types(q, k, v)
    left, right = window_size
    assert not ((left or 0) < 0 or (right or 0) < 0)
    right = 0 if causal else right
    sequences = len(cu_seqlens_q) - 1 if cu_seqlens_q is not None else q.shape[0]
    assert q.dim() == (4 if cu_seqlens_q is None else 3)
    assert q.shape[-1] == k.shape[-1] <= 256 and q.shape[-2] % k.shape[-2] == 0
    dense = q.flatten(0, 1) if cu_seqlens_q is None else q
    if cu_seqlens_q is None:
        query_indptr = torch.arange(sequences + 1, dtype=torch.int32) * q.shape[1]
    else:
        assert max_seqlen_q is not None and int(cu_seqlens_q.diff().max()) <= max_seqlen_q
        query_indptr = cu_seqlens_q
    check_indptr(query_indptr, dense.shape[0])
    out = q.new_full((*dense.shape[:-1], v.shape[-1]), float("nan"))
    sums = torch.full((q.shape[-2], dense.shape[0]), float("nan"))
    if page_table is not None:
        assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        assert seqused_k is not None and seqused_k.dtype is torch.int32 and seqused_k.shape == (sequences,)
        check_table(page_table, sequences)
        assert q.shape[-1] % 16 == 0, "Paged KV does not support irregular head dim"
        local = left is not None
        assert k.shape[1] not in key_tile(q.shape[-1], v.shape[-1], local), "pages by TMA: rows behind the last count"
        lens = seqused_k.tolist()
    else:
        assert cu_seqlens_k is not None and seqused_k is None and k.shape[0] == v.shape[0]
        check_indptr(cu_seqlens_k, k.shape[0])
        lens = cu_seqlens_k.diff().tolist()
    assert max_seqlen_k is not None and max(lens) <= max_seqlen_k
    for number, length in enumerate(lens):
        rows = slice(*query_indptr[number : number + 2].tolist())
        if page_table is not None:
            keys, values = (paged_rows(pages, page_table[number], length) for pages in (k, v))
        else:
            assert cu_seqlens_k is not None
            span = slice(*cu_seqlens_k[number : number + 2].tolist())
            keys, values = k[span], v[span]
        found, found_sums = attend(dense[rows], keys, values, softmax_scale, left, right, softcap)
        out[rows], sums[:, rows] = found.to(out.dtype), found_sums
    if cu_seqlens_q is not None:
        return out, sums if return_lse else None
    shaped = sums.unflatten(1, (sequences, q.shape[1])).transpose(0, 1)  # [sequences, heads, queries]
    return out.unflatten(0, q.shape[:2]), shaped.contiguous() if return_lse else None


# ---- FlashAttention 2: torch's and the library's ----


def torch_varlen_attn_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    out, sums = _flash_attention_2(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, 0.0, None, None
    )
    return (out, sums) if return_aux is not None and return_aux.lse else out


def torch_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    assert enable_gqa or query.shape[1] == key.shape[-2]
    assert (block_table is None) == (seqused_k is None)
    assert cu_seq_k is not None
    out, sums = _flash_attention_2(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, 0.0, block_table, seqused_k
    )
    return (out, sums) if return_aux is not None and return_aux.lse else out


def fa2_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    assert not dropout_p and alibi_slopes is None
    window = (window_size[0], 0) if causal else window_size
    lens = cu_seqlens_k.diff().int()
    out, sums = _flash_attention_2(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, window, softcap, block_table,
        lens if block_table is not None else None,
    )  # fmt: skip
    return (out, sums, None) if return_attn_probs else out


def _flash_attention_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_indptr: Tensor,
    kv_indptr: Tensor,
    most_queries: int,
    most_keys: int,
    scale: float | None,
    window: tuple[int, int],
    cap: float,
    table: Tensor | None,
    kv_lens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return output, and log-sum-exp ``[heads, rows]``."""
    check_types(q, k, v)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0, "one width for all"
    assert q.shape[1] % k.shape[-2] == 0 and scale is not None
    check_indptr(query_indptr, q.shape[0])
    sequences = len(query_indptr) - 1
    lens = kv_indptr.diff().tolist()
    if table is not None:
        assert kv_lens is not None and kv_lens.tolist() == lens
        check_table(table, sequences)
        assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    else:
        check_indptr(kv_indptr, k.shape[0])
    assert int(query_indptr.diff().max()) <= most_queries and max(lens) <= most_keys
    left, right = (None if size < 0 else size for size in window)
    out = q.new_full(q.shape, float("nan"))
    sums = torch.full((q.shape[1], q.shape[0]), float("nan"))
    for number, length in enumerate(lens):
        assert length > 0, "a sequence without keys has +inf here"
        rows = slice(*query_indptr[number : number + 2].tolist())
        if table is not None:
            keys, values = (paged_rows(pages, table[number], length) for pages in (k, v))
        else:
            span = slice(*kv_indptr[number : number + 2].tolist())
            keys, values = k[span], v[span]
        found, found_sums = attend(q[rows], keys, values, scale, left, right, cap)
        out[rows], sums[:, rows] = found.to(out.dtype), found_sums
    return out, sums
