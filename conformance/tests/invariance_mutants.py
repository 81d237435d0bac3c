"""Backends that break one level of invariance: small changes to a good one, and the check that catches each."""

from __future__ import annotations

from mutants.mutant import Mutant

_SCHEDULE = "self.rows, self.split = ROWS, SPLIT"
_MERGE = "for other, others, product in parts[1:]:"
_BASE = "base = torch.maximum(largest, other)"
_SCORES = "return q.transpose(0, 1).contiguous() @ keys.transpose(1, 2)"
_READ = "keys, values = self.rows_of(work, request, total, layer)"
_ADVANCE = "out[rows], after = self.advance(inputs, rows, states[slot], layer)"
_COMMIT = "states[slot] = run(slot, slice(rows.start, rows.start + counts[number]))[1]"
_START = "work, start = plan.metadata, 0\n"
_TOPK = "scores.topk(min(dims.topk, len(seen))).indices"


def _split(condition: str) -> tuple[str, str]:
    """A split of another size under a condition on the batch."""
    return _SCHEDULE, f"self.rows, self.split = ROWS, SPLIT // 2 if {condition} else SPLIT"


def _of_layer(condition: str) -> tuple[str, str]:
    """A split of another size under a condition on the layer, in batches of several requests."""
    return _START, f"{_START[:-1]}; work.split = SPLIT // (1 + ({condition} and work.geometry.requests > 3))\n"


def _of(level: str, *rows: tuple[str, str, str]) -> list[Mutant]:
    check = f"mha.invariant.{level}"
    return [Mutant(f"{level}-{name}", "invariant", old, new, check, "other bits") for name, old, new in rows]


_CHOOSE, _ATTEND = "choose(index, layer, dims, plan)\n", "attend(q, layer, plan, new, extras)\n"


def _scaled(given: str, condition: str) -> str:
    """A call with scaled values of an argument's entries under a condition."""
    call = _ATTEND if given == "extras" else _CHOOSE
    values = f"{given}.entries.values * (1.000001 if {condition} else 1)"
    return call.replace(given, f"replace({given}, entries=replace({given}.entries, values={values}))")


def _compressed(*rows: tuple[str, str, str, str, str]) -> list[Mutant]:
    return [
        Mutant(f"{level}-compressed_{name}", "compressed", old, new, f"mla.compressed.invariant.{level}", message)
        for level, name, old, new, message in rows
    ]


MUTANTS = [
    *_of(
        "run",
        ("atomics_in_a_merge", _MERGE, _MERGE.replace("parts[1:]", "sorted(parts[1:], key=lambda _: torch.rand(()))")),
        ("autotuning_while_serving", _START,
         "work, start = plan.metadata, 0; work.split = SPLIT if self.calls % 5 < 3 else SPLIT // 2\n"),
        ("schedule_of_an_earlier_batch", _START,
         "work, start = plan.metadata, 0; work.split = Backend.calls or SPLIT; Backend.calls = 64\n"),
        ("lane", *_split("geometry.lane")),
        ("another_instance", "    calls = 0\n",
         "    calls = 0\n\n    def __init__(self, context):\n        super().__init__(context)\n"
         "        global SPLIT; SPLIT = 48 - SPLIT\n"),
    ),
    *_of(
        "batch",
        ("split_count_from_the_batch_size", *_split("geometry.requests > 3")),
        ("split_count_from_the_longest_request", *_split("geometry.max_seq_len > 250")),
        ("split_count_from_the_sum_of_lengths", *_split("geometry.kv_rows is not None and geometry.kv_rows > 320")),
        ("tile_size_from_the_number_of_rows", _SCHEDULE,
         "self.rows, self.split = 4 * ROWS if geometry.rows > 12 else 1, SPLIT"),
        ("fast_path_for_a_single_request", *_split("geometry.requests == 1")),
        ("first_request_in_the_batch", _READ, f"work.split = SPLIT // (2 - (request == 0)); {_READ}"),
        ("merging_in_completion_order", _MERGE, _MERGE.replace("[1:]", "[1:][:: -1 if request % 2 else 1]")),
        ("reduced_precision_by_size", _SCORES,
         "rows = (x.bfloat16().float() if work.geometry.rows > 12 else x for x in (q, keys)); q, keys = rows\n        "
         + _SCORES),
        ("padded_requests", *_split("not geometry.seq_lens.all()")),
        ("page_table_width", *_split("geometry.page_table.shape[1] % 2")),
        ("page_numbers", *_split("geometry.page_table[0, 0] % 2")),
        ("contiguous_pages", *_split("(geometry.page_table[0, :3].diff() == 1).sum() == 2")),
        ("shared_pages", *_split("geometry.requests > 1 and geometry.page_table[0, 0] == geometry.page_table[1, 0]")),
        ("cascade_over_a_shared_prefix",
         *_split("geometry.requests >= 8 and (geometry.page_table[:, 0] == geometry.page_table[0, 0]).all()")),
        ("bounds", *_split("geometry.host is None")),
        ("typical_lengths", *_split("geometry.typical is not None")),
        ("slot_mapping", *_split("geometry.slots is not None")),
        ("strides_of_queries", _START, f"{_START[:-1]}; work.split = SPLIT // (2 - q.is_contiguous())\n"),
        ("long_prefill_of_another_request", *_split("geometry.max_new > 128")),
        ("many_requests", *_split("geometry.requests > 40")),
        ("more_requests_than_64", *_split("geometry.requests > 64")),
        ("requests_behind_32_others", _READ, f"work.split = SPLIT // (1 + (request >= 32)); {_READ}"),
        ("bound_of_long_requests", *_split("geometry.max_seq_len > 8000")),
        ("width_for_long_requests", *_split("geometry.page_table.shape[1] > 500")),
        ("strides_of_the_page_table", *_split("not geometry.page_table.is_contiguous()")),
        ("one_kv_head", *_of_layer("layer.num_kv_heads == 1")),
        ("another_head_dim", *_of_layer("layer.head_dim == 128")),
        ("as_many_kv_heads", *_of_layer("layer.num_kv_heads == layer.num_heads")),
        ("lengths_of_whole_pages", *_split("not (geometry.seq_lens % 16).any()")),
        ("another_request_of_equal_length_in_front", _READ,
         f"work.split = SPLIT // (1 + (total in work.lens[:request])); {_READ}"),
        ("without_log_sum_exps", _START,
         f"{_START[:-1]}; work.split = SPLIT // (1 + (extras.lse is None and work.geometry.requests > 2))\n"),
    ),
    *_of(
        "graph",
        ("captured", *_split("geometry.captured")),
        ("captured_size", *_split("geometry.captured and geometry.requests > 4")),
        ("captured_decode", *_split("geometry.captured and geometry.mode == 'decode'")),
        ("captured_large_size", *_split("geometry.captured and geometry.requests > 12")),
        ("captured_for_more_than_32_requests", *_split("geometry.captured and geometry.requests > 32")),
        ("captured_for_typical_lengths", *_split("geometry.captured and geometry.typical is not None")),
    ),
    *_of(
        "chunks",
        ("prefix_length_moves_the_grid", _READ, f"work.split = SPLIT // (1 + (total - count > 20)); {_READ}"),
        ("rows_of_the_chunk", *_split("geometry.max_new > 16")),
        ("chunks_of_whole_blocks", _READ, f"work.split = SPLIT // (1 + (count % 64 == 0)); {_READ}"),
        ("rescaling_if_a_row_of_the_tile_needs_it", _BASE,
         f"{_BASE}; base = torch.where((base - largest).max() > 5.5, base, largest)"),
        ("whole_pages_in_the_prefix_cache", _READ,
         f"work.split = SPLIT // (1 + (total - count in range(16, total - 1, 16))); {_READ}"),
        ("decode_of_long_requests", _READ,
         f"work.split = SPLIT // (1 + (work.geometry.mode == 'decode' and total > 200)); {_READ}"),
        ("decode_by_another_kernel", *_split("geometry.mode == 'decode'")),
        ("mixed_by_another_kernel", *_split("geometry.mode == 'mixed'")),
    ),
    *_of(
        "verify",
        ("another_reduction", *_split("geometry.mode == 'target_verify'")),
        ("more_than_one_row", *_split("geometry.mode == 'target_verify' and geometry.max_new > 1")),
        ("more_than_seven_rows", *_split("geometry.mode == 'target_verify' and geometry.max_new > 7")),
        ("tile_of_four_rows", *_split("geometry.mode == 'target_verify' and geometry.max_new in (3, 4)")),
    ),
    Mutant(
        "batch-index_ties_by_position_in_the_batch", "sparse", _TOPK,
        "(scores if row % 2 else scores.flip(0)).argsort(descending=True, stable=True)[: dims.topk]"
        ".sub(0 if row % 2 else len(seen) - 1).abs()", "mla.sparse.invariant.batch", "selected rows",
    ),
    Mutant(
        "chunks-index_ties_by_row_of_the_chunk", "sparse", _TOPK,
        "(scores if row % 2 else scores.flip(0)).argsort(descending=True, stable=True)[: dims.topk]"
        ".sub(0 if row % 2 else len(seen) - 1).abs()", "mla.sparse.invariant.chunks", "selected rows",
    ),
    *_compressed(
        ("batch", "tiles_of_the_batch", "(TorchSparseBackend):\n",
         "(TorchSparseBackend):\n    def __init__(self, context):\n"
         "        super().__init__(replace(context, invariant=frozenset()))\n\n", "other bits"),
        ("chunks", "tiles_of_the_chunk", "(TorchSparseBackend):\n",
         "(TorchSparseBackend):\n    def __init__(self, context):\n"
         "        super().__init__(replace(context, invariant=frozenset()))\n\n", "other bits"),
        ("batch", "entries_by_the_number_of_windows", _ATTEND,
         _scaled("extras", "max(len(each.numbers) for each in plan.metadata.windows.values()) > 30"), "other bits"),
        ("chunks", "entries_of_tokens_of_two_steps", _ATTEND,
         _scaled("extras", "any(each.earlier for each in plan.metadata.windows.values())"), "other bits"),
        ("chunks", "index_keys_of_a_decode", _CHOOSE, _scaled("index", "plan.mode == 'decode'"), "other bits"),
        ("verify", "another_scale", _ATTEND,
         _ATTEND.replace("q,", "q * (1.000001 if plan.mode == 'target_verify' else 1),"), "other bits"),
    ),
    Mutant(
        "chunks-linear_states_rounded_between_chunks", "linear", _ADVANCE, f"{_ADVANCE}; after = after * 1.0000001",
        "gdn.invariant.chunks", "other bits",
    ),
    Mutant(
        "verify-linear_states_of_a_commit", "linear", _COMMIT, f"{_COMMIT} * 1.0000001", "gdn.invariant.verify",
        "other bits",
    ),
    Mutant(
        "batch-linear_by_the_number_of_requests", "linear", _ADVANCE,
        f"{_ADVANCE}; out[rows] *= 1 + 1e-6 * (len(work['new']) > 3)", "gdn.invariant.batch", "other bits",
    ),
]  # fmt: skip
