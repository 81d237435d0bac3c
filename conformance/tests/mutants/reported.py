"""Errors that users of vLLM, SGLang, TensorRT-LLM, FlashInfer, FlashAttention, FlashMLA, transformers, aiter and fla
reported in 2024 to 2026, or that their authors fixed.
"""

from __future__ import annotations

from mutants.mutant import FP8_SCALES, KEEPS_WORK, PAGES, START, WORKSPACE, of, then

ROWS = "keys, values = self.pool.read_keys(layer.layer_id, slots), self.pool.read_values(layer.layer_id, slots)\n"
INT32_ROWS = (
    "keys, values = (m.as_strided((m.untyped_storage().nbytes() // m.element_size(),), (1,), 0)[((slots // m.shape[1])"
    ".int() * m.stride(0) + (slots % m.shape[1]).int() * m.stride(1)).long()[:, None, None] + m.storage_offset() + "
    "torch.arange(m.shape[2])[:, None] * m.stride(2) + torch.arange(m.shape[3])] for m in "
    "(self.pool.keys(layer.layer_id), self.pool.values(layer.layer_id)))\n"
)
WINDOW = "seen = seen & (key > query - layer.sliding_window)"
TOTAL = "total = sums if sinks is None else torch.logaddexp(sums, sinks[:, None].expand_as(sums))"
NO_PREFIX = "bool((self.work.lens == self.work.new).all())"
GROUPED = "keys, values = keys.float().repeat_interleave(group, 1), values.float().repeat_interleave(group, 1)"
ADVANCED = 'states[slot] = after\n        if verify:\n            work["kept"].append((states, lambda slot, rows: self.convolve'

MUTANTS = [
    *of(
        "mha",
        # vllm 47671, 50427; vllm-xpu-kernels 445; aiter 4427; sglang 34025
        ("real_offsets_of_32_bits", ROWS, INT32_ROWS, "mha.strided.wide", "in 64 bits"),
        ("real_offsets_of_32_bits_in_decodes", ROWS, INT32_ROWS, "mha.pages.wide_decode", "in 64 bits"),
        # fla 1080: a row of queries times its stride
        ("real_rows_in_32_bits",
         *then(START, "q = q.as_strided((q.untyped_storage().nbytes() // q.element_size(),), (1,), 0)["
         "(torch.arange(len(q)).int() * q.stride(0)).long()[:, None, None] + q.storage_offset() + "
         "torch.arange(q.shape[1])[:, None] * q.stride(1) + torch.arange(q.shape[2]) * q.stride(2)]"),
         "mha.strides.wide", "use 64 bits"),
        # vllm 53681: the order of dimensions guessed from their sizes
        ("real_square_pages_taken_for_token_major", ROWS,
         ROWS + "        if (m := self.pool.keys(layer.layer_id)).shape[1] == m.shape[2]:\n"
         "            keys = m.as_strided(m.shape, torch.empty(m.shape).stride()).flatten(0, 1)[slots]\n",
         "mha.head_major.square", ""),
        # vllm 34570
        ("real_values_of_narrow_heads_skipped", "weights, values), sums.T",
         "weights, values * (values.shape[-1] // 64 > 0)), sums.T", "mha.width_32.decode", "all zero"),
        # flashinfer 4270: strides and widths of another call
        ("real_strides_of_the_first_call",
         *then(START, "q = q.as_strided(q.shape, self.__dict__.setdefault(q.shape, q.stride()))"), "mha.strides",
         "contiguous after others"),
        ("real_table_of_another_width", PAGES,
         "pages = self.table.flatten()[request * (self.table.shape[1] - 1) + position // self.page_size].long()",
         "mha.decode.many_requests", "it read"),
        # sglang 32087, 31501; transformers 39408; vllm-gaudi 1395; vllm 4405; nntrainer 3989
        ("real_window_one_short_in_decodes", WINDOW, WINDOW.replace(" - layer", " + int(queries == 1) - layer"),
         "mha.window.decode", "one key too few"),
        ("real_window_one_wide_in_extends", WINDOW, WINDOW.replace(" - layer", " - int(queries > 1) - layer"),
         "mha.window.extend", "one key too many"),
        ("real_window_of_whole_pages", WINDOW,
         "seen = seen & (key // 16 > (keys - 1) // 16 - max(1, layer.sliding_window // 16))", "mha.window.decode",
         "in some rows it ignored the sliding window"),
        ("real_window_of_whole_tiles", WINDOW, "seen = seen & (key >= (query - layer.sliding_window + 1) // 64 * 64)",
         "mha.window.extend", "ignored the sliding window"),
        ("real_window_without_the_prefix", WINDOW, WINDOW.replace(" - layer", " - before - layer"), "mha.window.decode",
         "ignored the sliding window"),
        ("real_rows_beyond_the_window_lost", WINDOW,
         WINDOW + "\n            seen = seen & (torch.arange(queries)[:, None] < layer.sliding_window)",
         "mha.window.extend", "NaN"),
        # sglang 33915, 34093: another path without a prefix
        ("real_cap_ignored_without_prefix", "if layer.logit_cap is not None:",
         f"if layer.logit_cap is not None and not {NO_PREFIX}:", "mha.cap.prompt", "ignored the logit cap", KEEPS_WORK),
        ("real_window_ignored_without_prefix", "if layer.sliding_window is not None:",
         f"if layer.sliding_window is not None and not {NO_PREFIX}:", "mha.window.prompt", "ignored the sliding window",
         KEEPS_WORK),
        ("real_sinks_ignored_without_prefix", TOTAL, TOTAL.replace("is None", f"is None or {NO_PREFIX}"),
         "mha.sinks.prompt", "ignored the sinks", KEEPS_WORK),
        ("real_lse_base_2_without_prefix", "extras.lse[rows] = sums",
         "extras.lse[rows] = sums / (0.6931471805599453 if bool((work.lens == work.new).all()) else 1)",
         "mha.lse.prompt", "base 2"),
        # rocm-libraries 12227; composable_kernel 3490; imp 1346; vllm-xpu-kernels 556
        ("real_sink_in_every_split", TOTAL,
         TOTAL.replace("sinks[:", "(sinks + torch.tensor(-(-len(slots) // 512)).log())[:"), "mha.sinks.long_decode",
         "added the sinks"),
        ("real_sink_lost_in_splits", TOTAL, TOTAL.replace("is None", "is None or len(slots) > 256"), "mha.sinks.long",
         "in some rows it ignored the sinks"),
        ("real_sink_capped", TOTAL, TOTAL.replace("sinks[:", "(torch.tanh(sinks / (layer.logit_cap or 1e6)) * (layer.logit_cap or 1e6))[:"),
         "mha.cap_and_sinks.decode", "capped the sinks"),
        ("real_sink_scaled", TOTAL, TOTAL.replace("sinks[:", "(sinks * layer.scale)[:"), "mha.sinks.verify",
         "sinks by the layer's scale"),
        ("real_sink_in_base_2", TOTAL, TOTAL.replace("sinks[:", "(sinks * 0.6931471805599453)[:"), "mha.sinks.extend",
         "base 2"),
        ("real_sink_of_the_group", TOTAL, TOTAL.replace("sinks[:", "sinks[torch.arange(q.shape[1]) // group][:"),
         "mha.sinks.decode", "heads 1, 2, 3"),
        # flashinfer 4450: a finite mask
        ("real_mask_of_minus_10000", 'float("-inf"))\n        sums', "-1e4)\n        sums", "mha.large_inputs",
         "masks logits with a finite number"),
        # sgl-kernel-xpu 487; flashinfer 58
        ("real_lse_of_an_empty_split", "extras.lse[rows] = sums",
         "extras.lse[rows] = sums if layer.sliding_window is None or length <= 256 else float('-inf')",
         "mha.window.lse_decode", "-inf for rows that see keys, first at request 0"),
        ("real_lse_of_all_rows", "weights, values), sums.T", "weights, values), (sums if len(q) > 1 else self.every).T",
         "mha.window.lse_decode", "not of those in the window",
         ("scores = scores.masked_fill(~", "self.every = scores.logsumexp(-1)\n        scores = scores.masked_fill(~")),
        # maxtext 3138; sglang 26852
        ("real_scaled_twice", "keys) * layer.scale", "keys) * layer.scale**2", "mha.decode.one_request", "scale twice"),
        ("real_trees_scaled_twice", "keys) * layer.scale", "keys) * layer.scale ** (1 if tree is None else 2)",
         "mha.trees", "scale twice"),
        ("real_values_by_the_scale_of_keys", ROWS,
         f"{ROWS}        values = values * {FP8_SCALES}[0] / {FP8_SCALES}[1]\n", "mha.float8_e4m3fn.decode",
         "values by the layer's scale of keys"),
        ("real_layer_scales_twice", ROWS,
         f"{ROWS}        keys, values = (x * s for x, s in zip((keys, values), {FP8_SCALES}))\n",
         "mha.float8_e4m3fn.extend", "scales of keys and values twice"),
        ("real_layer_scales_exchanged", ROWS,
         f"{ROWS}        a, b = {FP8_SCALES}; keys, values = keys * b / a, values * a / b\n",
         "mha.float8_e4m3fn.decode", "exchanged"),
        # transformers 45323; vllm 19106; FastDeploy 3223: the longest context of the first replay
        ("real_graph_keeps_the_longest", "        return self.captured[key]\n",
         "        work = self.captured[key].metadata\n        if not in_capture:\n            work.__dict__.setdefault('most', int("
         "forward_batch.geometry.seq_lens.max()))\n        return self.captured[key]\n", "mha.graph.decode",
         "only requests of more than",
         ("slots = work.cache_slots(request, length)", "slots = work.cache_slots(request, min(length, work.__dict__.get('most', 1 << 30)))")),
        # sglang 38187, 24587; vllm-ascend 12040; xllm 1904
        ("real_graph_takes_pages_for_slots", "self.table.copy_(geometry.page_table)\n",
         "self.table.copy_(geometry.page_table * self.page_size)\n", "mha.graph.decode", "raised"),
        ("real_graph_memory_in_pages", "self.lens.copy_(geometry.seq_lens)\n",
         "self.lens.copy_(torch.minimum(geometry.seq_lens, (self.table.numel() - geometry.seq_lens.cumsum(0) + "
         "geometry.seq_lens).clamp(min=0)))\n", "mha.graph.decode", "replay"),
        ("real_graph_keeps_the_tail", "self.lens.copy_(geometry.seq_lens)\n",
         "live = int((geometry.seq_lens > 0).sum()); self.lens[:live] = geometry.seq_lens[:live]\n", "mha.graph.decode",
         "padding"),
        ("real_graph_lse", "extras.lse[rows] = sums", "extras.lse[rows] = sums - int(self.reserved)", "mha.graph.lse",
         "log-sum-exp is wrong"),
        ("real_graph_ignores_the_scale_of_values", ROWS,
         f"{ROWS}        values = values / ({FP8_SCALES}[1] if self.reserved else 1)\n", "mha.graph.float8_e4m3fn",
         "scale of values"),
        # vllm 43810, 41841; flash-attention 1537, 1619
        ("real_slot_of_minus_1_written", "plan.new_slots, k[:rows], v[:rows])",
         "plan.new_slots % (self.pool.num_pages * self.context.page_size), k[:rows], v[:rows])",
         "mha.cache.host_slots", "elsewhere"),
        ("real_one_row_each", "rows = slice(start, start + new)\n",
         "rows = slice(start, start + new) if int(work.new.max()) != 1 else slice(request, request + 1)\n",
         "mha.extend.one_row", "first 2 of 4 requests"),
        ("real_short_extends_as_decodes", "seen = key <= query", "seen = key <= (query if queries > 2 else keys)",
         "mha.extend.prefix_edges", "in some rows it applied no causal mask"),
        ("real_decodes_first", *then(START, "work.new = work.new.sort().values"), "mha.mixed", ""),
        # flashinfer 4347; mojo_opset 266; vllm 40792; FlashMLA-ETAP 2; sglang 32062
        ("real_pages_over_128", *then(PAGES, "pages = pages if self.page_size <= 128 else pages[:1].expand_as(pages)"),
         "mha.page_size_256", "is wrong"),
        ("real_width_of_a_power_of_2", "weights, values), sums.T",
         "weights, values * (torch.arange(values.shape[-1]) < 1 << values.shape[-1].bit_length() - 1)), sums.T",
         "mha.width_80.extend", "is wrong"),
        ("real_tiles_of_16_heads", GROUPED,
         "of = torch.arange(q.shape[1]) // group if group <= 16 else torch.arange(q.shape[1]) // 16 // -(-group // 16)\n"
         "        keys, values = keys.float()[:, of], values.float()[:, of]", "mha.gqa_24.extend", "heads 24"),
        ("real_two_drafted_rows", "out[rows] = result.to(q.dtype)",
         "out[rows] = result.to(q.dtype) * (float('nan') if plan.mode == 'target_verify' and new == 2 else 1)",
         "mha.verify.two", "NaN"),
        ("real_heads_of_the_largest_layer", "group = q.shape[1] // keys.shape[1]",
         "group = max(each.num_heads for each in self.context.model.layers) // keys.shape[1]", "mha.layers.heads.extend",
         "raised"),
        ("real_kv_heads_of_the_smallest_layer", "group = q.shape[1] // keys.shape[1]",
         "group = q.shape[1] // min(each.num_kv_heads for each in self.context.model.layers)",
         "mha.layers.heads.decode", "raised"),
        # FastDeploy 3514; sglang 5318
        ("real_tree_masks_the_last_tile", "return (key < before) | ((tree",
         "return (key < before) | (key // 16 < query // 16) & (key < query) | ((tree", "mha.trees.most", "is wrong"),
        ("real_tree_of_the_first_request", "work.tree[request]", "work.tree[0]", "mha.trees", "first 1 of 2 requests"),
        # vllm 22103, 17652: cascade attention
        ("real_cascade_mixes_pages", PAGES,
         f"{PAGES}\n        same = int((self.table == self.table[:1]).all(0).long().cumprod(0).sum())"
         " * self.page_size * (len(self.table) > 1)\n"
         "        pages = torch.cat([pages[:same], pages[same:].flip(0)]) if same else pages", "mha.pages.shared",
         "is wrong"),
        ("real_cascade_ignores_the_window", "if layer.sliding_window is not None:",
         "if layer.sliding_window is not None and len(set(self.work.table[:, 0].tolist())) > 1:", "mha.window.shared",
         "ignored the sliding window", KEEPS_WORK),
        # SageAttention 392; vllm 50781; flashinfer 3114
        ("real_range_of_the_first_call", 'scores = torch.einsum("qhd,khd->hqk", q.float(), keys)',
         "most = self.__dict__.setdefault('most', q.abs().max())\n"
         '        scores = torch.einsum("qhd,khd->hqk", q.float().clamp(-most, most), keys)', "mha.results_kept", ""),
        ("real_workspace_exceeded", *then(START, f"b = {WORKSPACE}; b.as_strided((64,), (1,), b.numel()).zero_()"),
         "mha.decode.page_edges", "beyond the end"),
        ("real_weights_in_bfloat16", "weights = torch.exp(scores - total.unsqueeze(-1))",
         "weights = torch.exp(scores - total.unsqueeze(-1)).bfloat16().float()", "mha.decode.one_request", "is wrong"),
    ),
    *of(
        "mla",
        # ollama 13893; maxtext 3138; flashinfer 4979; sglang 34765; flashinfer 942
        ("real_scaled_twice", "cached) * layer.scale", "cached) * layer.scale**2", "mla.decode.one_request", "scale twice"),
        ("real_scale_of_values_omitted", "values = cached[:, :rank]",
         "values = cached[:, :rank] / self.pool.scale(layer.layer_id)", "mla.float8_e4m3fn.decode", "scale of values"),
        ("real_next_row_multiplied_by_zero", "values = cached[:, :rank]",
         "values = cached[:, :rank] + 0 * self.pool.read_rows(layer.layer_id, slots[-1:] ^ 1).float()[:, :rank]",
         "mla.decode.page_edges", "it read"),
    ),
    *of(
        "sparse",
        # flash-attention 2755; flashinfer 5095; mlx-lm 1454
        ("real_minus_1_taken_for_row_0", "[selected.positions[row] >= 0].long()]", ".clamp(min=0).long()]",
         "mla.sparse.decode", "for each -1"),
        ("real_rows_of_65_tokens", "[selected.positions[row] >= 0].long()]",
         "[selected.positions[row] >= 0].long() * (len(q) < 65)]", "mla.sparse.extend.many_rows", "is wrong"),
        ("real_newest_of_long_contexts", "scores.topk(min(dims.topk, len(seen)))",
         "(scores if len(seen) < 512 else torch.arange(len(seen)).float()).topk(min(dims.topk, len(seen)))",
         "mla.sparse.decode.long", "fall short of the best"),
    ),
    *of(
        "linear",
        # vllm 22034, 56196, 23279
        ("real_state_of_one_request_lost", "self.advance(inputs, rows, states[slot], layer)\n            if not",
         "self.advance(inputs, rows, states[slot] * (len(work['new']) > 1), layer)\n            if not",
         "gdn.extend.one", "from zeros"),
        ("real_state_of_a_short_chunk", ADVANCED,
         ADVANCED.replace("= after", "= after if rows.stop - rows.start != 2 else states[slot]"), "short_conv.extend.one",
         "was not updated"),
        ("real_chunks_across_requests", "state = state * decay.reshape(heads, -1, 1)",
         "state = state * (decay if token or not rows.start % 64 or decays.dim() == 1 else decay * decays[rows.start - 1])"
         ".reshape(heads, -1, 1)", "mamba2.extend", "is wrong"),
        # fla 1080; vllm 47671
        ("real_states_in_32_bits", "geometry.state_slots.tolist()\n        work = {",
         "((geometry.state_slots.int() * 384) // 384).tolist()\n        work = {", "gdn.slots.wide", "in 64 bits"),
        # tokenspeed 700; TensorRT-LLM 13151; vllm-ascend 12040; xllm 1904
        ("real_slot_of_minus_1_taken_for_slot_0", "if slot >= 0:\n                yield slot,",
         "if True:\n                yield max(slot, 0),", "gdn.graph.decode", "padded request"),
        ("real_graph_keeps_slots", 'work["slots"][:] = geometry.state_slots.tolist()', "pass", "kda.graph.decode", ""),
        ("real_graph_keeps_the_tail", 'work["slots"][:] = geometry.state_slots.tolist()',
         "work[\"slots\"][:] = [new if new >= 0 else max(old, 1) for new, old in zip(geometry.state_slots.tolist(), "
         "work[\"slots\"])]", "short_conv.graph.decode", "padded request"),
        ("real_graph_keeps_new_lens", 'work["new"][:] = geometry.new_lens.tolist()', "pass", "mamba2.graph.extend", ""),
    ),
]  # fmt: skip
