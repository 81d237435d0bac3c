"""Tables of the README and of docs/measurements.md, generated from the committed benchmark results."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from attnplug_tune.charts import COLORS, as_svg, spec_of

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
sys.path.append(str(RESULTS.parent))

from decode_models import TFLOPS  # noqa: E402 # the benchmarks' own constants and tables
from decode_report import engine_table, rates_table, steps_table  # noqa: E402

MLA_CASES = [
    *((16, *case) for case in ((1, 1024), (1, 16384), (16, 4096), (128, 8192))),
    *((128, *case) for case in ((1, 4096), (1, 16384), (16, 4096), (128, 8192))),
]
"""Heads, requests, tokens."""
GQA_CASES = [(1, 16384), (16, 4096), (64, 8192)]


def decode_times() -> str:
    """Decode times of one layer in a CUDA graph in µs, for MLA and for GQA."""
    mla = {(case["heads"], case["requests"], case["length"]): case for case in _read("triton_mla_h200")["triton"]}
    gqa = {(case["requests"], case["length"]): case for case in _read("flashattention_h200")["decode"]}
    lines = ["| MLA, requests × tokens | `triton_mla` | FlashInfer | FlashMLA |", "|---|---|---|---|"]
    for heads, requests, length in MLA_CASES:
        us = mla[heads, requests, length]["graph"]["us"]
        cells = _fastest(us["triton"], us["flashinfer"], us["flashmla"])
        lines.append(f"| {heads} heads, {requests} × {length} | {cells} |")
    lines += ["", "| GQA 32/8, requests × tokens | `flashattention` | FlashInfer | flash-attn-4 |", "|---|---|---|---|"]
    for requests, length in GQA_CASES:
        case = gqa[requests, length]
        cells = _fastest(case["graph"]["us"]["ours"], case["flashinfer"]["us"], case["graph"]["us"]["raw"])
        lines.append(f"| {requests} × {length} | {cells} |")
    return "\n".join(lines)


def decode_plot() -> str:
    """Speed-up of our backends over the best library, for one layer's decode on an H200: SVG."""
    import altair as alt

    panels = []
    for heads in (16, 128):
        cases = [case for case in _read("triton_mla_h200")["triton"] if case["heads"] == heads]
        found = [(case, case["graph"]["us"]) for case in cases]
        values = [_speed_up(case, us["triton"], us["flashinfer"], us["flashmla"]) for case, us in found]
        panels.append(
            _bars(f"triton_mla, {heads} heads, over the faster of FlashInfer and FlashMLA", values, COLORS[0])
        )
    cases = [case for case in _read("flashattention_h200")["decode"] if "flashinfer" in case]
    found = [(case, case["graph"]["us"]) for case in cases]
    values = [_speed_up(case, us["ours"], us["raw"], case["flashinfer"]["us"]) for case, us in found]
    title = "flashattention, GQA 32/8 heads of 128, over the faster of flash-attn-4 and FlashInfer"
    panels.append(_bars(title, values, COLORS[1]))
    return as_svg(spec_of(alt.vconcat(*panels))) + "\n"


def _speed_up(case: Mapping[str, Any], ours: float, *libraries: float) -> dict[str, Any]:
    label = f"{case['requests']} × {_short(case['length'])}"
    return {"case": label, "order": (case["requests"], case["length"]), "ratio": round(min(libraries) / ours, 3)}


def _bars(title: str, values: Sequence[Mapping[str, Any]], color: str) -> Any:
    """Bar chart with one bar per batch. The line at 1 is the best library."""
    import altair as alt

    ordered = sorted(values, key=lambda value: value["order"])
    rows = [{"case": value["case"], "ratio": value["ratio"]} for value in ordered]
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("case:N", sort=None, title="requests × tokens in the cache of each", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("ratio:Q", title="times as fast"),
    )
    labels = base.mark_text(dy=-9, color="#fff", fontWeight="bold").encode(
        y=alt.datum(0), text=alt.Text("ratio:Q", format=".2f")
    )
    best = alt.Chart(alt.Data(values=[{"y": 1}])).mark_rule(strokeDash=[5, 4], color="#1d2430").encode(y="y:Q")
    bars = base.mark_bar(color=color, opacity=0.85, width=34)
    return alt.layer(bars, labels, best).properties(title=title, width=620, height=150)


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def cost_of_wrapping() -> str:
    """Overhead of each backend over its library called directly: median and maximum over all cases."""
    mla, attention, linear = (_read(f"{name}_h200") for name in ("mla", "flashattention", "linear"))
    rows = [
        ("`flashinfer_mla`, decode", mla["decode"], "ours", "ours_writing"),
        ("`flashmla`, decode", mla["flashmla"], "ours", "ours_writing"),
        ("`flashinfer_mla`, MLA prefill as MHA", mla["prefill"], "ours", None),
        ("`flashattention`, GQA decode", attention["decode"], "ours", None),
        ("`flashattention`, GQA prefill", attention["prefill"], None, "ours"),
        ("`flashattention`, MLA prefill as MHA", attention["mla_prefill"], "ours", None),
        ("`fla`, prefill and decode", linear["cases"], "ours", None),
    ]
    lines = [
        "| median, most | in a graph | and writing its rows | eager | and writing its rows |",
        "|---|---|---|---|---|",
    ]
    for name, cases, plain, writing in rows:
        cells = [_added(cases, mode, side) for mode in ("graph", "eager") for side in (plain, writing)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cost_of_invariance() -> str:
    """Decode times of one layer in µs, without and with all levels of invariance."""
    points: dict[tuple[int, int], dict[str, str]] = {}
    for case in _read("invariance_h200")["decode"]:
        cell = f"{case['default']:.1f} → {case['invariant']:.1f} ({case['ratio']:.2f} ×)"
        points.setdefault((case["requests"], case["length"]), {})[case["shape"]] = cell
    shapes = ("GQA 32/8", "MLA 16 heads", "MLA 128 heads")
    lines = [f"| requests × tokens | {' | '.join(shapes)} |", "|---|---|---|---|"]
    for (requests, length), cells in sorted(points.items()):
        lines.append(f"| {requests} × {length} | {' | '.join(cells.get(shape, '–') for shape in shapes)} |")
    return "\n".join(lines)


def kv_formats() -> str:
    """Decode times of one layer by KV format, µs."""
    cases = _read("kv_formats_h200")["cases"]
    names = list(cases[0]["formats"])
    lines = [f"| | {' | '.join(f'`{name}`' for name in names)} |", "|---" * (len(names) + 1) + "|"]
    for case in cases:
        cells = [f"{found['layer_us']:.0f} ({found['ratio']:.2f} ×)" for found in case["formats"].values()]
        shape = f"GQA {case['heads']}/{case['kv_heads']}" if case["kind"] == "mha" else f"MLA {case['heads']} heads"
        lines.append(f"| {shape}, {case['requests']} × {case['length']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cost_of_levels() -> str:
    """Time with all levels of invariance over that without, on one CPU core."""
    found = _read("invariance_cpu")
    lines = ["| on one CPU core, float32 | decode | extend |", "|---|---|---|"]
    for shape in dict.fromkeys(case["shape"] for case in found["torch_native"]):
        cases = [case for case in found["torch_native"] if case["shape"] == shape]
        parts = [[case["ratio"] for case in cases if key in case] for key in ("requests", "new")]
        cells = " | ".join(f"{min(ratios):.1f} to {max(ratios):.1f} ×" for ratios in parts)
        lines.append(f"| `torch_native`, a layer of {shape} | {cells} |")
    for model, points in found["engine"].items():
        decodes = ", ".join(f"{one['ratio']:.1f} × with {one['requests']}" for one in points if "requests" in one)
        (extend,) = (f"{one['ratio']:.1f} ×" for one in points if "prompt" in one)
        lines.append(f"| engine, 2 layers of `{model}` | {decodes} | {extend} |")
    return "\n".join(lines)


def decode_rates() -> str:
    """Tokens/s of whole models in our engine and in others."""
    return rates_table(_read("decode_h200"))


def engine_rates() -> str:
    """Tokens/s with contexts of 512 tokens, one row per model. vLLM's rates are the best of all hosts."""
    result, best = _read("decode_h200"), dict[tuple[str, int, int], float]()
    seen = [[*host["points"], *host.get("vllm_alone", ())] for host in _read("decode_hosts_h200")["hosts"]]
    for point in (point for host in seen for point in host):
        key = (point["model"], point["batch"], point["context"])
        best[key] = min(best.get(key, math.inf), point["vllm_us"])
    for point in result["engines"]["vllm"]["points"]:
        key = (point["model"], point["batch"], point["context"])
        if key in best:
            point["step_us"] = min(point["step_us"], best[key])
    return engine_table(result)


def decode_steps() -> str:
    """Breakdown of a whole model's step time."""
    return steps_table(_read("decode_h200"))


def hosts() -> str:
    """Speed-up of decode steps over vLLM, on each host."""
    found = [
        {(one["model"], one["batch"], one["context"]): one["vllm_us"] / one["ours_us"] for one in host["points"]}
        for host in _read("decode_hosts_h200")["hosts"]
    ]
    points = [(batch, context) for context in (512, 8192) for batch in (1, 16, 64)]
    lines = [f"| ours / vLLM | {' | '.join(f'{b} × {c}' for b, c in points)} |", "|---" * (len(points) + 1) + "|"]
    for model in dict.fromkeys(key[0] for host in reversed(found) for key in host):
        cells = [[f"{host[model, *point]:.2f}" for host in found if (model, *point) in host] for point in points]
        lines.append(f"| {model} | {' | '.join(', '.join(cell) for cell in cells)} |")
    return "\n".join(lines)


def short_prefills() -> str:
    """Milliseconds of one short prompt, launched and captured, and the GPU's busy time."""
    found = _read("prefill_graphs_h200")
    by = {
        (who, model, each["tokens"]): each
        for who in ("eager", "captured", "vllm")
        for model, parts in found[who]["models"].items()
        for each in parts
    }
    lines = ["| one prompt | GPU busy | launched | captured | vLLM |", "|---|---|---|---|---|"]
    for (_, model, tokens), each in [item for item in by.items() if item[0][0] == "captured"]:
        times = [each["busy_us"], *(by[who, model, tokens]["us"] for who in ("eager", "captured", "vllm"))]
        lines.append(f"| {model}, {tokens} tokens | {' | '.join(f'{time / 1e3:.1f} ms' for time in times)} |")
    return "\n".join(lines)


def arrivals() -> str:
    """Tokens/s and TTFT while requests arrive and finish."""
    lines = ["| prompts | launched | captured | ratio | first token |", "|---|---|---|---|---|"]
    for model, found in _read("prefill_graphs_h200")["arrivals"]["models"].items():
        for point in found["points"]:
            rates = [point[how]["tokens_s"] for how in ("eager", "captured")]
            first = " → ".join(f"{point[how]['first_token_us'] / 1e3:.1f}" for how in ("eager", "captured"))
            cells = f"{rates[0]:,.0f} | {rates[1]:,.0f} | {rates[1] / rates[0]:.2f} | {first} ms"
            lines.append(f"| {model}, {point['prompt']} tokens | {cells} |")
    return "\n".join(lines)


def first_tokens() -> str:
    """TTFT of one prompt in ms and requests/s at saturation, one row per model."""
    rows = ["| model | 512 tokens | 2048 | 8184 | 32000 | requests/s |", "|---" * 6 + "|"]
    for model, found in _read("arrivals_h200")["models"].items():
        single = [point for point in _first_tokens(model, found) if point[0]["prompts"] == 1]
        cells = [_beside(*(_ms(side["median_ms"]) for side in point)) for point in single]
        rates = _beside(*(f"{found[side]['saturation']['requests_per_s']:.0f}" for side in _sides(found)))
        rows.append(f"| `{model}` | {' | '.join(cells)} | {rates} |")
    return "\n".join(rows)


def times_to_first_token() -> str:
    """TTFT in ms and prefill rates, as shares of a plain product's."""
    share = f"of {TFLOPS} TFLOP/s (vLLM)"
    rows = [f"| model, prompts | ours | vLLM | vLLM / ours | first / tenth request | {share} |", "|---" * 6 + "|"]
    for model, found in _read("arrivals_h200")["models"].items():
        for ours, *vllm in _first_tokens(model, found):
            other = [f"{side['median_ms']:.1f} | {side['median_ms'] / ours['median_ms']:.2f}" for side in vllm]
            shares = [f"{side['tflops'] / TFLOPS * 100:.0f} %" for side in (ours, *vllm) if "tflops" in side]
            cells = f"{ours['median_ms']:.1f} | {other[0] if other else ' | '}"
            rate = f"{ours['first_ms'] / ours['tenth_ms']:.2f} | {_beside(*shares)}"
            rows.append(f"| {model}, {ours['prompts']} × {ours['tokens']} | {cells} | {rate} |")
    return "\n".join(rows)


def loads() -> str:
    """Requests/s, TTFT and inter-token latency at saturation and with Poisson arrivals."""
    rows = [
        "| model, load | requests/s | TTFT p50 (ms) | TTFT p99 | inter-token p50 | inter-token p99 |",
        "|---" * 6 + "|",
    ]
    for model, found in _read("arrivals_h200")["models"].items():
        for load in ("all at once", *found["ours"]["loads"]):
            points = [found[side]["loads"].get(load, found[side]["saturation"]) for side in _sides(found)]
            cells = [_beside(*(f"{point['requests_per_s']:.1f}" for point in points))]
            for what, digits in (("ttft_ms", 0), ("inter_token_ms", 1)):
                cells += [_beside(*(f"{point[what][q]:.{digits}f}" for point in points)) for q in ("p50", "p99")]
            rows.append(f"| {model}, {load} | {' | '.join(cells)} |")
    return "\n".join(rows)


def cpu_rates() -> str:
    """Tokens/s on a CPU, for our engine and vLLM."""
    lines = ["| requests | prefill | vLLM | ratio | decode | vLLM | ratio |", "|---|---|---|---|---|---|---|"]
    for point in _read("engine_cpu_vllm_arm")["vllm"]["batches"]:
        cells = [
            f"{point[what]:,.0f} | {point[f'{what}_vllm']:,.0f} | {point[f'{what}_ratio']:.2f}"
            for what in ("prefill", "decode")
        ]
        lines.append(f"| {point['batch']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _sides(found: Mapping[str, Any]) -> list[str]:
    """Return the engines that ran a model, ours first."""
    return [side for side in ("ours", "vllm") if side in found]


def _first_tokens(model: str, found: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return the TTFT points of a model: ours, and vLLM's where it ran. Later ones replace those in ``found``."""
    found = _read("ttft_vllm_h200")["models"].get(model, found)
    return list(zip(*(found[side]["ttft"] for side in _sides(found)), strict=True))


def _ms(time: float) -> str:
    return f"{time:.0f}" if time >= 100 else f"{time:.1f}"


def _beside(ours: str = "", *vllm: str) -> str:
    """Format our value, with vLLM's in parentheses."""
    return ours + "".join(f" ({value})" for value in vllm)


def _added(cases: Iterable[dict[str, Any]], mode: str, side: str | None) -> str:
    added = [100 * (case[mode]["ratio"][side] - 1) for case in cases if side is not None and mode in case]
    return f"{median(added):.1f} %, {max(added):.1f} %" if added else ""


def _fastest(*times: float) -> str:
    """Format the cells of a row, the smallest in bold."""
    return " | ".join(f"**{time:.0f}**" if time == min(times) else f"{time:.0f}" for time in times)
