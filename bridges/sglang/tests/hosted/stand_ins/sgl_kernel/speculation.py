"""Speculative decoding: what SGLang calls of its compiled CPU kernels around a draft and its verification.

Slots, rows and the attention of a draft with torch; trees by SGLang's own Triton kernels, which it has for other
devices.
"""

import ctypes

import torch


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Copy rows of every buffer. Both may overlap: all rows are read before the first is written."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for start, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(start + source * stride, stride) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(start + target * stride, row, stride)


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Slots of positions ``start`` to ``end`` of each request, one request behind the other."""
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    slots = torch.cat([req_to_token[row, start:end] for row, start, end in spans])
    out_cache_loc[: slots.shape[0]] = slots


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Write the slots of positions ``start`` to ``end`` of each request to the slot table."""
    first = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[first : first + end - start]
        first += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, speculative_num_steps
):
    """Slots of the ``topk × steps`` positions behind each request."""
    ends = seq_lens + topk * speculative_num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len)


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """Slots of accepted rows, in front; ``accept_index`` is -1 behind the accepted ones of a request."""
    accepted = accept_index.flatten()
    slots = out_cache_loc[accepted[accepted >= 0].long()]
    accept_out_cache_loc[: slots.shape[0]] = slots


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """Last accepted token of each request."""
    last = torch.arange(accept_lens.shape[0]) * accept_stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last.long()])


def build_tree_kernel_efficient_cpu(*given):
    from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton

    sgl_build_tree_kernel_triton(*given)


def verify_tree_greedy_cpu(**given):
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton

    verify_tree_greedy_triton(**{name.replace("retrive", "retrieve"): value for name, value in given.items()})


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """Slot table of every branch ``[requests × topk, pool_len]``: the request's rows, then the branch's own."""
    table = req_to_token[req_pool_indices].repeat_interleave(topk, 0)
    for row, length in enumerate(seq_lens.repeat_interleave(topk).tolist()):
        first = length + row % topk * num_steps
        table[row, length : length + num_steps] = table[row, first : first + num_steps].clone()
    return table


def _attend(q, k, v, scale, cap):
    """Last queries ``[rows, heads, dim]`` of a request over its keys ``[keys, kv_heads, dim]``."""
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    if cap > 0:
        logits = cap * torch.tanh(logits / cap)
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v)


def extend_attention_cpu(
    q, k, v, out, keys, values, k_scale, v_scale, table, requests, seq_lens, new_lens, starts, longest, scale, cap, *_
):
    """Rows in front of the new ones are in the cache; the new ones are arguments, or in the cache too."""
    lengths = zip(requests.tolist(), seq_lens.tolist(), new_lens.tolist(), starts.tolist(), strict=True)
    for request, length, new, start in lengths:
        slots, part = table[request, :length].long(), slice(start, start + new)
        if k is None:
            rows = keys[slots], values[slots]
        else:
            rows, before = (k[part], v[part]), slots[: length - new]
            if length > new:  # without a prefix, MLA is up-projected and runs as MHA
                rows = torch.cat([keys[before], rows[0]]), torch.cat([values[before], rows[1]])
        out[part] = _attend(q[part], *rows, scale, cap)


def decode_attention_cpu(
    q, keys, values, k_scale, v_scale, out, k, v, slots, logits, table, requests, seq_lens, scale, cap, *_
):
    """Write the new row of each request, unless it is there, and attend."""
    if k is not None:
        keys[slots] = k.view(-1, *keys.shape[1:])
        if values.data_ptr() != keys.data_ptr():  # values of MLA are a part of the keys
            values[slots] = v.view(-1, *values.shape[1:])
    for row, (request, length) in enumerate(zip(requests.tolist(), seq_lens.tolist(), strict=True)):
        own = table[request, :length].long()
        out[row] = _attend(q[row : row + 1], keys[own], values[own], scale, cap)[0]
