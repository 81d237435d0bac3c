"""``benchmarks/arrivals_h200.py`` and ``ttft_h200.py``: workload, statistics, tables, and a run on a CPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import arrivals_h200
import serving
import ttft_h200
from arrivals_h200 import SMOKE, Arrival, Workload, arrivals, serve, summary


def test_engines_and_loads_get_the_same_requests():
    slow, fast, at_once = (arrivals(Workload(), rate, 40) for rate in (8.0, 16.0, None))
    assert [each.prompt for each in slow] == [each.prompt for each in fast[:40]] == [each.prompt for each in at_once]
    assert [2 * each.at for each in fast[:40]] == pytest.approx([each.at for each in slow])
    assert (len(slow), len(fast)) == (40, 80) and {each.at for each in at_once} == {0.0}


def test_prompts_are_log_uniform_and_arrivals_poisson():
    drawn = arrivals(Workload(), 100.0)
    lengths, outputs = [len(each.prompt) for each in drawn], [each.max_tokens for each in drawn]
    assert (min(lengths) >= 32, max(lengths) <= 8192, min(outputs) >= 32, max(outputs) <= 128) == (True,) * 4
    assert np.median(lengths) == pytest.approx(512, rel=0.2)  # the geometric mean of both ends
    gaps = np.diff([each.at for each in drawn])
    assert np.mean(gaps) == pytest.approx(0.01, rel=0.1) and np.std(gaps) == pytest.approx(0.01, rel=0.15)


class Waiting:
    """A server whose steps take 5 ms and give every request a token."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}
        self._left: dict[int, int] = {}

    def add(self, number: int, prompt: Any, max_tokens: int) -> None:
        self._left[number] = max_tokens

    def step(self) -> list[int]:
        time.sleep(0.005)
        got = list(self._left)
        self._left = {number: left - 1 for number, left in self._left.items() if left > 1}
        return got

    @property
    def has_work(self) -> bool:
        return bool(self._left)


def test_ttft_counts_from_the_arrival():
    """The second request arrives while a step runs, and waits for it; the third finds the server idle."""
    requests = [Arrival(0.0, [1] * 3, 2), Arrival(0.001, [1], 1), Arrival(0.03, [1], 1)]
    found = summary(requests, serve(Waiting(), requests))
    assert found["requests"] == 3 and found["output_tokens"] == 4 and found["prompt_tokens"] == 5
    assert found["ttft_ms"]["p100"] > 8.9 and found["ttft_ms"]["p50"] > 4.9 and found["inter_token_ms"]["p50"] > 4.9
    assert found["seconds"] > 0.034


def test_percentiles_are_those_of_all_gaps():
    found = summary([Arrival(1.0, [1], 3), Arrival(2.0, [1], 2)], [[1.5, 1.6, 1.8], [2.25, 2.75]])
    assert (found["ttft_ms"]["p50"], found["ttft_ms"]["p100"]) == pytest.approx((375, 500))
    assert (found["inter_token_ms"]["p50"], found["inter_token_ms"]["p100"]) == pytest.approx((200, 500))
    assert found["output_tokens_per_s"] == pytest.approx(5 / 2.75)


def test_a_request_that_loses_tokens_is_an_error():
    class Losing(Waiting):
        def step(self) -> list[int]:
            return super().step()[1:]

    with pytest.raises(RuntimeError):
        serve(Losing(), [Arrival(0.0, [1], 3)])


def test_our_engine_serves_at_the_loads_of_vllm(tmp_path, monkeypatch):
    """The whole benchmark on a CPU: loads are fractions of vLLM's saturation in the file of results."""
    monkeypatch.setattr(ttft_h200, "_RUNS", 2)
    out = tmp_path / "found.json"
    vllm = {"saturation": summary([Arrival(0.0, [1], 2)], [[0.5, 1 / 60]])}
    serving.record(str(out), "vllm", "llama", vllm)
    arrivals_h200.main(["--engine", "ours", "--models", "llama", "--smoke", "--ttft", "--out", str(out)])
    found = json.loads(out.read_text())
    ours = found["models"]["llama"]["ours"]
    assert "error" not in ours, ours["error"]
    assert ours["base_requests_per_s"] == pytest.approx(60) and ours["saturation"]["requests"] == SMOKE.at_once
    assert [load["requests"] for load in ours["loads"].values()] == [2, 4, 6]
    assert [(point["prompts"], point["tokens"]) for point in ours["ttft"]] == [(3, 5), (1, 9)]
    assert found["machine"]["torch"] and found["commit"] and ours["engine"]["backends"]["decode"]
    assert "| llama, 0.7 | ours |" in arrivals_h200.table(found) and "| llama, 3 × 5 |" in ttft_h200.ttft_table(found)


@pytest.mark.parametrize("model", ["mla", "moe", "hybrid"])
@pytest.mark.sample(1)
def test_every_model_runs_on_a_cpu(model, tmp_path):
    """Without vLLM's results, loads are fractions of our own saturation."""
    out = tmp_path / "found.json"
    arrivals_h200.main(["--engine", "ours", "--models", model, "--smoke", "--out", str(out)])
    ours = json.loads(out.read_text())["models"][model]["ours"]
    assert "error" not in ours, ours["error"]
    assert ours["base_requests_per_s"] == ours["saturation"]["requests_per_s"] and list(ours["loads"]) == [
        str(load) for load in arrivals_h200.LOADS
    ]
    for load in ours["loads"].values():
        assert load["output_tokens"] >= 2 * load["requests"] and load["ttft_ms"]["p99"] >= load["ttft_ms"]["p50"] > 0


def test_loads_are_ours_if_vllm_refuses_the_model():
    """Both variants of our engine then run at the same loads."""
    ours = {"saturation": {"requests_per_s": 7.0}}
    assert arrivals_h200.base_rate({"vllm": {"error": "refused"}, "ours": ours}, "ours-before") == 7.0
    assert arrivals_h200.base_rate({"vllm": {"error": "refused"}, "ours": ours}, "ours") is None


def test_a_model_that_an_engine_refuses_is_reported_with_the_reason(tmp_path, monkeypatch):
    def refuse(*_: object) -> serving.Server:
        raise ValueError("linear layers are not supported")

    monkeypatch.setattr(serving, "start", refuse)
    out = tmp_path / "found.json"
    arrivals_h200.main(["--engine", "vllm", "--models", "hybrid", "--out", str(out)])
    found = json.loads(out.read_text())
    assert "linear layers are not supported" in found["models"]["hybrid"]["vllm"]["error"]
    for table in (arrivals_h200.table, ttft_h200.ttft_table):
        assert "linear layers are not supported" in table(found)


def test_tables_give_ratios_to_vllm():
    run = {"requests_per_s": 1.0, "total_tokens_per_s": 9.0, "ttft_ms": {"p50": 1, "p99": 2}}
    run["inter_token_ms"] = {"p50": 3, "p99": 4}
    engines = {
        name: {
            "saturation": {**run, "output_tokens_per_s": rate},
            "ttft": [
                {"prompts": 1, "tokens": 8, "median_ms": 60 / rate, "first_ms": 3, "tenth_ms": 2, "tokens_per_s": 9}
            ],
        }
        for name, rate in (("vllm", 20.0), ("ours", 30.0))
    }
    result = {"models": {"llama": engines}}
    assert "| llama, saturation | ours | 1.0 | 1.0, 2.0 | 3.0, 4.0 | 30 | 9 | 1.50 |" in arrivals_h200.table(result)
    assert "| llama, 1 × 8 | 3.0 | 2.0 | 1.50 | 1.50 | 9 |" in ttft_h200.ttft_table(result)


def test_unknown_engines_are_refused(capsys):
    for main in (arrivals_h200.main, ttft_h200.main):
        with pytest.raises(SystemExit):
            main(["--engine", "sglang"])
        assert "sglang" in capsys.readouterr().err
