"""Console report of ``mla_h200.py``: tables, and a summary against the goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mla_sides import NEW, PREFIX, Case


def value(row: Mapping[str, Any], path: str, form: str = ".1f") -> str:
    """Format a nested value of a row by its dotted path, or a dash if missing; ``MiB`` formats bytes."""
    found: Any = row
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, int | float):
        return "–"
    return f"{found / 2**20:.1f}" if form == "MiB" else format(found, form)


def print_table(title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]) -> None:
    if not rows:
        return
    print(f"\n{title}")
    print(" " * 22 + " ".join(f"{heading:>9}" for heading in columns))
    for row in rows:
        case = Case(row["heads"], row["requests"], row["length"])
        cells = (value(row, path, form) for path, form in columns.values())
        print(f"{case!s:<22}" + " ".join(f"{cell:>9}" for cell in cells), *errors(row)[:1])


DECODE_COLUMNS = {
    "raw": ("eager.us.raw", ".1f"),
    "ours": ("eager.us.ours", ".1f"),
    "host raw": ("host.us.raw", ".1f"),
    "added": ("host.added_us.ours", ".1f"),
    "+write": ("host.added_us.ours_writing", ".1f"),
    "graph raw": ("graph.us.raw", ".1f"),
    "again": ("graph.ratio.raw_again", ".3f"),
    "ours/raw": ("graph.ratio.ours", ".3f"),
    "calls": ("graph.ratio.ours_calls_only", ".3f"),
    "writing": ("graph.ratio.ours_writing", ".3f"),
    "differ": ("graph.difference.ours", ".0e"),
}
FLASHMLA_COLUMNS = {
    "raw": ("eager.us.raw", ".1f"),
    "ours": ("eager.us.ours", ".1f"),
    "host raw": ("host.us.raw", ".1f"),
    "added": ("host.added_us.ours", ".1f"),
    "FlashInf.": ("flashinfer", ".1f"),
    "graph raw": ("graph.us.raw", ".1f"),
    "again": ("graph.ratio.raw_again", ".3f"),
    "ours/raw": ("graph.ratio.ours", ".3f"),
    "writing": ("graph.ratio.ours_writing", ".3f"),
    "plan": ("plan.us.ours", ".0f"),
    "replay": ("plan.us.ours_replay", ".0f"),
    "differ": ("graph.difference.ours", ".0e"),
}
TRITON_COLUMNS = {
    "FlashInf.": ("graph.us.flashinfer", ".1f"),
    "FlashMLA": ("graph.us.flashmla", ".1f"),
    "triton": ("graph.us.triton", ".1f"),
    "again": ("graph.us.triton_again", ".1f"),
    "room": ("graph.us.triton_room", ".1f"),
    "writing": ("graph.us.triton_writing", ".1f"),
    "invariant": ("graph.us.triton_invariant", ".1f"),
    "bytes": ("graph.floor_us", ".1f"),
    "to best": ("graph.ratio.best", ".3f"),
    "differ": ("graph.difference.triton", ".0e"),
    "host": ("host.us.call", ".1f"),
    "+write": ("host.us.writing", ".1f"),
    "plan": ("host.us.plan", ".1f"),
}
TRITON_GOALS = {
    (16, 1, 1024): 6,
    (16, 1, 4096): 8,
    (16, 1, 16384): 13,
    (16, 1, 65536): 26,
    (16, 4, 4096): 12,
    (16, 16, 4096): 27,
    (128, 1, 1024): 9,
    (128, 1, 4096): 14,
    (128, 1, 16384): 24,
}
"""Microseconds in a graph, by heads, requests and length."""
PLAN_COLUMNS = {
    "stock": ("plan.us.stock", ".0f"),
    "in graph": ("plan.us.stock_in_graph", ".0f"),
    "ours": ("plan.us.ours", ".0f"),
    "replay": ("plan.us.ours_replay", ".0f"),
    "b.stock": ("plan.busy.stock.median_us", ".0f"),
    "b.graph": ("plan.busy.stock_in_graph.median_us", ".0f"),
    "b.ours": ("plan.busy.ours.median_us", ".0f"),
    "b.replay": ("plan.busy.ours_replay.median_us", ".0f"),
    "b.max": ("plan.busy.ours_replay.max_us", ".0f"),
    "busy yet": ("plan.busy.ours_replay.device_still_busy", "d"),
}
PREFILL_COLUMNS = {
    "raw TF/s": ("eager.tflop_per_s.raw", ".0f"),
    "ours TF/s": ("eager.tflop_per_s.ours", ".0f"),
    "ours/raw": ("eager.ratio.ours", ".3f"),
    "again": ("eager.ratio.raw_again", ".3f"),
    "differ": ("eager.difference", ".0e"),
    "plan raw": ("plan.us.stock", ".0f"),
    "ours": ("plan.us.ours", ".0f"),
    "prepare": ("plan.us.ours_prepare", ".0f"),
    "b.raw": ("plan.busy.stock.median_us", ".0f"),
    "b.ours": ("plan.busy.ours.median_us", ".0f"),
    "b.prepare": ("plan.busy.ours_prepare.median_us", ".0f"),
}
MEMORY_COLUMNS = {
    "workspace": ("memory.workspace_bytes", "MiB"),
    "backend": ("memory.backend_bytes", "MiB"),
    "prepared": ("chunked.prepared_bytes", "MiB"),
    "chunked": ("chunked.peak_bytes", "MiB"),
    "one shot": ("one_shot.peak_bytes", "MiB"),
    "calls": ("chunked.calls", "d"),
    "µs": ("time.us.chunked", ".0f"),
    "one µs": ("time.us.one_shot", ".0f"),
    "differ": ("time.difference", ".0e"),
}


def print_report(found: Mapping[str, Any]) -> None:
    decode = found.get("decode", [])
    print_table("Decode: µs on the device and the host, ratios in graphs", decode, DECODE_COLUMNS)
    print_table(
        "Decode by FlashMLA, likewise; raw FlashInfer in its graph beside it",
        beside(found.get("flashmla", []), decode),
        FLASHMLA_COLUMNS,
    )
    triton = found.get("triton", [])
    print_table("triton_mla beside both, µs in graphs with caches out of L2, and on the host", triton, TRITON_COLUMNS)
    for row in triton:
        key = (row["heads"], row["requests"], row["length"])
        if key in TRITON_GOALS:
            print(f"{Case(*key)}: {value(row, 'graph.us.triton')} µs (≤ {TRITON_GOALS[key]})")
    if left_out := found.get("flashmla_left_out"):
        print(f"\n{left_out}")
    print_table("Decode plans: µs on the host, idle and (b.) behind 6 ms of work", decode, PLAN_COLUMNS)
    print_table("Prefill as MHA; plans in µs on the host", found.get("prefill", []), PREFILL_COLUMNS)
    print_table(f"Prefill of {NEW} after {PREFIX}: MiB, and µs on the device", found.get("memory", []), MEMORY_COLUMNS)
    print(f"\ncopy {value(found, 'ceilings.copy_gb_per_s', '.0f')} GB/s, matmul "
          f"{value(found, 'ceilings.matmul_tflop_per_s', '.0f')} TFLOP/s; FlashInfer imported in "
          f"{value(found, 'compile_s.import')} s, its kernels there after {value(found, 'compile_s.decode')} s and "
          f"{value(found, 'compile_s.prefill')} s; {value(found, 'seconds', '.0f')} s in all")  # fmt: skip
    at_64 = [row for row in decode if row["requests"] == 64]
    flashmla = found.get("flashmla", [])
    for name, goal, numbers in (
        ("host µs added to a call", "≤ 15", numbers_at(decode, "host.added_us.ours")),
        ("ratio in a graph", "≤ 1.02", numbers_at(decode, "graph.ratio.ours")),
        ("raw to itself", "noise", numbers_at(decode, "graph.ratio.raw_again")),
        ("µs of a replay's plan at batch 64", "≤ 40", numbers_at(at_64, "plan.us.ours_replay")),
        ("flashmla: host µs added to a call", "≤ 15", numbers_at(flashmla, "host.added_us.ours")),
        ("flashmla: ratio in a graph", "≤ 1.02", numbers_at(flashmla, "graph.ratio.ours")),
        ("flashmla: raw to itself", "noise", numbers_at(flashmla, "graph.ratio.raw_again")),
    ):
        if numbers:
            print(f"{name}: median {statistics.median(numbers):.3f}, worst {max(numbers):.3f} ({goal})")
    complaints = [
        row["plan"]["torch_complains"] for row in (*decode, *flashmla) if "torch_complains" in row.get("plan", {})
    ]
    said = {text for plans in complaints if (text := plans["ours_replay"]) is not None}
    print(f"torch's check of {len(complaints)} replays' plans for synchronising calls: {said or 'no complaint'}")


def beside(rows: Iterable[Mapping[str, Any]], others: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of FlashMLA with the time that raw FlashInfer took in a graph for the same case."""
    times = {Case(row["heads"], row["requests"], row["length"]): row.get("graph", {}).get("us", {}) for row in others}
    return [
        {**row, "flashinfer": times.get(Case(row["heads"], row["requests"], row["length"]), {}).get("raw")}
        for row in rows
    ]


def numbers_at(rows: Iterable[Mapping[str, Any]], path: str) -> list[float]:
    texts = (value(row, path, ".6g") for row in rows)
    return [float(text) for text in texts if text != "–"]


def errors(found: Mapping[str, Any]) -> list[str]:
    """All errors of a case, one line each, with their paths."""
    parts = {f"{name}: ": part for name, part in found.items() if isinstance(part, dict)}
    return [
        prefix + part["error"].partition("\n")[0][:120]
        for prefix, part in {"": found, **parts}.items()
        if "error" in part
    ]
