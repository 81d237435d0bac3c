"""Tables of the results of ``decode_h200.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from decode_models import MODELS, TFLOPS, limit_us
from decode_trace import GROUPS, REST

Key = tuple[str, int, int]
"""Model, requests, tokens of context."""


def by_point(result: Mapping[str, Any], engine: str) -> dict[Key, dict[str, Any]]:
    points = result["engines"].get(engine, {}).get("points", [])
    return {(point["model"], point["batch"], point["context"]): point for point in points}


def rate(point: Mapping[str, Any] | None) -> float | None:
    """Tokens per second of all requests together."""
    return None if point is None or "step_us" not in point else 1e6 * point["batch"] / point["step_us"]


def rates_table(result: Mapping[str, Any]) -> str:
    """Tokens/s of decode: ours, the others' and the limit by bytes moved."""
    ours, vllm, plain = (by_point(result, engine) for engine in ("ours", "vllm", "transformers"))
    lines = [
        "| requests × context | limit | ours | of the limit | vLLM | ours / vLLM | transformers |",
        "|---|---|---|---|---|---|---|",
    ]
    for key in _keys(ours, vllm, plain):
        model, batch, context = key
        limit = 1e6 * batch / limit_us(MODELS[model], batch, context)
        our_rate, vllm_rate = rate(ours.get(key)), rate(vllm.get(key))
        share = f"{100 * our_rate / limit:.0f} %" if our_rate else ""
        ahead = f"{our_rate / vllm_rate:.2f}" if our_rate and vllm_rate else ""
        cells = [f"{limit:,.0f}", _cell(ours.get(key)), share, _cell(vllm.get(key)), ahead, _cell(plain.get(key))]
        lines.append(f"| {model}, {batch} × {context} | {' | '.join(cells)} |")
    return "\n".join(lines)


def engine_table(result: Mapping[str, Any], context: int = 512) -> str:
    """Tokens/s of decode, one line per model: ours, vLLM's and the share of the limit, by number of requests."""
    ours, vllm = (by_point(result, engine) for engine in ("ours", "vllm"))
    batches = sorted({batch for _, batch, tokens in ours if tokens == context})
    lines = [
        f"| model | {' | '.join(f'{batch} request' + 's' * (batch > 1) for batch in batches)} |",
        "|---" * (len(batches) + 1) + "|",
    ]
    for model in MODELS:
        cells = []
        for batch in batches:
            key = (model, batch, context)
            our_rate, vllm_rate = rate(ours.get(key)), rate(vllm.get(key))
            limit = 1e6 * batch / limit_us(MODELS[model], batch, context)
            cell = f"**{our_rate:,.0f}**, {100 * our_rate / limit:.0f} % of the limit" if our_rate else ""
            cells.append(cell + (f"; vLLM {vllm_rate:,.0f}" if vllm_rate else ""))
        lines.append(f"| `{model}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def steps_table(result: Mapping[str, Any]) -> str:
    """Breakdown of our decode steps in microseconds. Parts come from a trace, which is slightly slower than a step."""
    groups = ["products", "attention", REST, "sampling", "copies", "idle"]
    assert set(groups) == {*GROUPS, REST, "idle"}
    heads = ["requests × context", "limit", "step", *groups, "between replays", "host", "launches"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    ours = by_point(result, "ours")
    for key in _keys(ours):
        point = ours[key]
        if "step_us" not in point:
            continue
        parts = point.get("parts_us", {})
        numbers = [limit_us(MODELS[key[0]], key[1], key[2]), point["step_us"], *(parts.get(group) for group in groups)]
        numbers += [point.get(name) for name in ("between_replays_us", "host_us", "launches")]
        cells = ["" if number is None else f"{number:.0f}" for number in numbers]
        lines.append(f"| {key[0]}, {key[1]} × {key[2]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def prefill_table(result: Mapping[str, Any]) -> str:
    """Prefill of one prompt, in TFLOP/s and as a share of a plain matmul's rate."""
    lines = ["| prefill | tokens | ours | vLLM |", "|---|---|---|---|"]
    found = {engine: result["engines"].get(engine, {}).get("prefill", {}) for engine in ("ours", "vllm")}
    for model in MODELS:
        entries = [found[engine].get(model) for engine in found]
        if tokens := next((entry["tokens"] for entry in entries if entry), None):
            cells = [
                f"{entry['tflops']:.0f} TFLOP/s, {100 * entry['tflops'] / TFLOPS:.0f} %"
                if entry and "tflops" in entry
                else ""
                for entry in entries
            ]
            lines.append(f"| {model} | {tokens} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(point: Mapping[str, Any] | None) -> str:
    found = rate(point)
    if found is not None:
        return f"{found:,.0f}"
    return "" if point is None or "no time" in point.get("error", "") else "failed"


def _keys(*engines: Mapping[Key, object]) -> Iterator[Key]:
    """Points in the order of models, contexts and batches."""
    models = list(MODELS)
    found = {key for engine in engines for key in engine}
    yield from sorted(found, key=lambda key: (models.index(key[0]), key[2], key[1]))
