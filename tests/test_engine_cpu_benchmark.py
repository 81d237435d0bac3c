"""``benchmarks/engine_cpu.py`` with a tiny model: the engine runs a model that has everything but the math."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attnplug_engine import Engine

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import engine_cpu


def test_parts_of_a_step_are_timed_without_the_models_math(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine("tiny:llama", device="cpu", prefix_cache=False, ignore_eos=True)
    monkeypatch.setitem(engine_cpu.CONFIG, "vocab_size", engine.vocab_size)
    monkeypatch.setattr(engine_cpu, "PROMPT", 5)
    model = engine.runner.model
    found = engine_cpu.overhead_warm(engine, batch=2, new=12)
    assert found.keys() >= {"outside", "rest", *engine_cpu.PARTS} and found["outside"] > 0
    assert engine.runner.model is model
