"""``decode_h200.py`` for transformers' ``generate`` with a static cache, which it compiles on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from decode_models import Config
from decode_points import Clock, Point, Settings
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, __version__

_TOKENS = 48
_LARGEST_BATCH = 16


class Times:
    """Streamer that records when each step's tokens arrived."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, _tokens: object) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        pass


def measure(model: str, config: Config, folder: str, points: Sequence[Point], settings: Settings, clock: Clock) -> None:
    started = time.perf_counter()
    device = settings.device or "cuda"
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=getattr(torch, config["dtype"]), attn_implementation="sdpa"
        ).eval()
    clock.note(model, start_s=time.perf_counter() - started, version=__version__)
    own = [point for point in points if point.batch <= _LARGEST_BATCH]
    for point in own:  # compiles
        decode(made, config["vocab_size"], point, device)
    clock.note(model, compiled_s=time.perf_counter() - started)
    clock.lock.acquire()
    for point in own:
        clock.record(point, partial(timed, made, config["vocab_size"], point, device))


def timed(model: Any, vocabulary: int, point: Point, device: str) -> dict[str, Any]:
    """``decode`` without its tokens, for a record."""
    return {name: value for name, value in decode(model, vocabulary, point, device).items() if name != "tokens"}


@torch.inference_mode()
def decode(model: Any, vocabulary: int, point: Point, device: str) -> dict[str, Any]:
    """Time per step of one ``generate``, and its new tokens ``[batch, tokens]``."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (point.batch, point.context), generator=random).to(device)
    settings = GenerationConfig(
        max_new_tokens=_TOKENS,
        min_new_tokens=_TOKENS,
        do_sample=False,
        cache_implementation="static",
        pad_token_id=0,
        eos_token_id=None,
    )
    times = Times()
    mask = torch.ones_like(tokens)
    made = model.generate(tokens, attention_mask=mask, generation_config=settings, streamer=times)
    steps = [after - before for before, after in zip(times.at[8:], times.at[9:], strict=False)]
    new = made[:, point.context :].cpu()
    return {"step_us": 1e6 * statistics.median(steps), "steps": len(steps), "tokens": new}
