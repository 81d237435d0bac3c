"""Errors in a region of the space that no fixed case reaches. Only the first failing case is looked for."""

from __future__ import annotations

from mutants.mutant import FP8_SCALES, KEEPS_MODE, PAGES, PLANNED, of, then

MUTANTS = [
    *of(
        "mha",
        ("random_more_than_3_kv_heads",
         *then("group = q.shape[1] // keys.shape[1]", "keys = torch.cat([keys[:, :3], keys[:, 3:] * 0.5], 1)"),
         "mha.random", ""),
        ("random_groups_of_more_than_16",
         *then("group = q.shape[1] // keys.shape[1]", "q = q if group < 17 else q * 0.5"), "mha.random", ""),
        ("random_more_than_256_rows_of_a_request", *then("out[rows] = result.to(q.dtype)", "out[rows][256:] *= 0.5"),
         "mha.random", ""),
        ("random_more_than_512_rows_of_a_batch", "return out\n\n    def write",
         "out[512:] *= 0.5\n        return out\n\n    def write", "mha.random", ""),
        ("random_more_than_128_requests", "in enumerate(zip(work.lens.tolist(), work.new.tolist())):",
         "in enumerate(zip(work.lens.tolist()[:128], work.new.tolist())):", "mha.random", ""),
        ("random_windows_of_64_and_more", "key > query - layer.sliding_window)",
         "key > query - layer.sliding_window - int(layer.sliding_window >= 64))", "mha.random", ""),
        ("random_one_row_and_a_long_prefix", "slots = work.cache_slots(request, length)",
         "slots = work.cache_slots(request, length)[-100 if plan.mode == 'mixed' and new == 1 else 0 :]", "mha.random", ""),
        ("random_shared_pages", *then(PAGES, "pages = pages if not request or "
         "self.table[request, 0] != self.table[request - 1, 0] else pages.flip(0)"), "mha.random", ""),
        ("random_unused_entries_of_minus_1", PAGES,
         f"assert (self.table >= 0).all(); {PAGES}", "mha.random", ""),
        ("random_rows_and_queries_of_two_dtypes", "k[:rows], v[:rows])",
         "k[:rows], v[:rows] * (1.0 if self.pool.dtype in (str(v.dtype)[6:], 'float8_e4m3fn') else 1.3))",
         "mha.random", ""),
        ("random_fp8_in_a_verify", "self.pool.read_values(layer.layer_id, slots)\n",
         f"self.pool.read_values(layer.layer_id, slots) / ({FP8_SCALES}[1] if self.mode == 'target_verify' else 1)\n",
         "mha.random", "", KEEPS_MODE),
        ("random_fp8_and_a_window", "self.pool.read_keys(layer.layer_id, slots), self",
         f"self.pool.read_keys(layer.layer_id, slots) / ({FP8_SCALES}[0] if layer.sliding_window else 1), self",
         "mha.random", ""),
        ("random_fp8_and_sinks", "self.pool.read_values(layer.layer_id, slots)\n",
         f"self.pool.read_values(layer.layer_id, slots) / ({FP8_SCALES}[1] if layer.sinks else 1)\n",
         "mha.random", ""),
        ("random_fp8_and_lse", "extras.lse[rows] = sums",
         f"extras.lse[rows] = sums + {FP8_SCALES}[0] - 1", "mha.random", ""),
        ("random_bfloat16_over_4000_rows",
         *then("weights = torch.exp(scores - total.unsqueeze(-1))", "weights[..., 4000 if q.dtype is torch.bfloat16 else "
         "1 << 20 :] = 0"), "mha.random", ""),
        ("random_ranks", "keys) * layer.scale", "keys) * layer.scale / self.context.parallel.size", "mha.random", ""),
        ("random_second_shape_forgets_the_first", "self.captured[key] = self.plan(forward_batch.geometry)",
         "self.captured = {k: v for k, v in self.captured.items() if k[0] != key[0]} | {"
         "key: self.plan(forward_batch.geometry)}", "mha.random", ""),
        ("random_tree_read_when_planned", "self.tree = geometry.tree  #",
         "self.tree = geometry.tree if geometry.captured or geometry.tree is None else geometry.tree.clone()  #",
         "mha.random", ""),
        ("random_state_left_by_a_refused_batch", PLANNED,
         f"self.calls = getattr(self, 'calls', 0) + 1; {PLANNED}; q = q / self.calls; self.calls -= 1", "mha.random", ""),
    ),
    *of(
        "mla",
        ("random_rank_512", "values = cached[:, :rank]", "values = cached[:, :rank] * (0.5 if rank == 512 and self.pool.dtype == 'float32' else 1)",
         "mla.random", ""),
        ("random_chunks", "if call.causal:", "if call.causal or len(queries) > 4:", "mla.random", ""),
    ),
    *of(
        "sparse",
        ("random_topk_over_16", "return SelectedPositions(chosen)", "return SelectedPositions(chosen[:, :16])",
         "mla.random", ""),
    ),
    *of(
        "linear",
        ("random_more_than_9_heads", *then("heads = v.shape[1]", "v = torch.cat([v[:, :9], v[:, 9:] * 0.5], 1)"),
         "gdn.random", ""),
    ),
]  # fmt: skip

SEEDS = {
    "mha-random_more_than_256_rows_of_a_request": 2,
    "mha-random_more_than_512_rows_of_a_batch": 2,
    "mha-random_fp8_in_a_verify": 5,
}
"""Seeds of random cases that catch a mutant early. Any seed catches it sooner or later."""

SEEDS_OF_SMALL_CASES = {
    "mha-random_bfloat16_over_4000_rows": 8,
    "mha-random_windows_of_64_and_more": 37,
    "mha-random_rows_and_queries_of_two_dtypes": 6,
    "mha-random_second_shape_forgets_the_first": 31,
    "mha-random_shared_pages": 11,
    "mha-random_state_left_by_a_refused_batch": 12,
    "mha-random_tree_read_when_planned": 31,
    "mla-random_chunks": 31,
    "mla-random_rank_512": 28,
}
"""The same for cases that are drawn for a budget of 2 s, which are smaller."""
