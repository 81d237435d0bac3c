"""``decode_h200.py`` for vLLM, with its defaults, the same config, and random weights like ours.

The engine is stepped as in ``LLM.generate``. The largest batch of a context is prefilled once; smaller batches remain
after aborting requests.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from decode_models import Config, cache_bytes, prefill_flops
from decode_points import SHORT, Clock, Point, Settings, steps_for

os.environ.update(
    VLLM_USE_FLASHINFER_SAMPLER="0",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine runs in this process, where it can be stepped
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
)

_WARM = 8
_CODES = 100.0
"""Standard deviation of random fp8 codes."""
_MAX_NEW_TOKENS = 736
"""New tokens of a request: it decodes while the others prefill, and through all batches of its context."""
_STEPS = 80
_TOKENS_PER_SECOND = 200_000
"""Prefill rate, to estimate what fits into the remaining time."""


def measure(model: str, config: Config, folder: str, points: Sequence[Point], settings: Settings, clock: Clock) -> None:
    import vllm

    started = time.perf_counter()
    llm = vllm.LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max(settings.prefill, *(point.context for point in points)) + _MAX_NEW_TOKENS + 32,
        max_num_seqs=max(point.batch for point in points),
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=int(
            1.25 * max(cache_bytes(config, p.batch, p.context + _MAX_NEW_TOKENS) for p in points)
        ),
        enable_prefix_caching=False,
        enforce_eager=settings.eager,
        compilation_config={} if settings.eager else {"cudagraph_capture_sizes": _captured(model, points, settings)},
    )
    randomise(llm, config["initializer_range"])
    clock.note(model, start_s=time.perf_counter() - started, version=vllm.__version__)
    clock.lock.acquire()
    if model in settings.prefill_models:
        clock.record_prefill(model, settings.prefill, lambda: prefill(llm, config, settings.prefill))
    for context in sorted({point.context for point in points}):
        runner = Ladder(llm, config["vocab_size"], context)
        for point in sorted((point for point in points if point.context == context), key=lambda point: -point.batch):
            clock.record(point, partial(runner.measure, point, clock))
        runner.end()


def _captured(model: str, points: Sequence[Point], settings: Settings) -> list[int]:
    """Capture sizes: batches, and short prefills up to vLLM's default of 512 tokens."""
    prefills = [tokens for tokens in SHORT if tokens <= 512] if model in settings.prefill_models else []
    return sorted({*prefills, *(point.batch for point in points)})


def randomise(llm: Any, std: float) -> None:
    """Set vLLM's weights in place, with our distribution. Graphs keep reading the same addresses.

    vLLM's dummy weights are within ±0.001, including norms. Tokens would hardly differ and share their experts, and a
    step would read fewer weights.
    """
    import torch

    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
    for module in model.modules():
        plain = "RMSNorm" in type(module).__name__ and "Gemma" not in type(module).__name__  # Gemma's adds 1
        for name, weight in module.named_parameters(recurse=False):
            if weight.dtype.itemsize == 1:  # fp8 codes
                weight.data.copy_(torch.randn(weight.shape, device=weight.device).mul_(_CODES).to(weight.dtype))
            elif "scale" in name:
                weight.data.fill_(std / _CODES)
            elif weight.dim() > 1:
                weight.data.normal_(std=std)
            elif plain and name == "weight":
                weight.data.fill_(1.0)
        for name in ("W_UK_T", "W_UV"):  # computed from kv_b_proj when weights are loaded
            if (part := getattr(module, name, None)) is not None:
                part.normal_(std=std)


class Ladder:
    """Requests of one context length, in decreasing number."""

    def __init__(self, llm: Any, vocabulary: int, context: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._engine = llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._vocabulary, self._context = vocabulary, context
        self._params = SamplingParams(temperature=0.0, max_tokens=_MAX_NEW_TOKENS, ignore_eos=True, detokenize=False)
        self._params.output_kind = RequestOutputKind.FINAL_ONLY  # as LLM.generate has it
        self._running: list[str] = []

    def measure(self, point: Point, clock: Clock) -> dict[str, Any]:
        if not self._running:
            needed = point.batch * point.context / _TOKENS_PER_SECOND
            if needed > 0.7 * clock.left_s:
                raise TimeoutError(f"a prefill of about {needed:.0f} s, with {clock.left_s:.0f} s left")
        self._bring_to(point.batch)
        for _ in range(_WARM):
            self._engine.step()
        guess = self._timed(_WARM)[0] / _WARM
        steps = steps_for(guess, _STEPS)
        seconds, tokens = self._timed(steps)
        distinct = len({request.all_token_ids[-1] for request in self._scheduler.running})
        return {"step_us": 1e6 * seconds * point.batch / tokens, "steps": steps, "distinct_tokens": distinct}

    def _bring_to(self, batch: int) -> None:
        if len(self._running) > batch:
            self._engine.abort_request(self._running[batch:], internal=True)
            del self._running[batch:]
            self._engine.step()
        for number in range(len(self._running), batch):
            tokens = np.random.default_rng(number).integers(self._vocabulary, size=self._context).tolist()
            name = f"{self._context}-{number}"
            self._running.append(self._engine.add_request(name, {"prompt_token_ids": tokens}, self._params) or name)
        while not self._all_decode(batch):
            self._engine.step()
            if not self._engine.has_unfinished_requests():
                raise RuntimeError("all requests ended before they were measured")

    def _all_decode(self, batch: int) -> bool:
        running = self._scheduler.running
        return len(running) == batch and all(request.num_output_tokens > 0 for request in running)

    def _timed(self, steps: int) -> tuple[float, int]:
        """Seconds and tokens of ``steps`` steps."""
        before, started = self._tokens(), time.perf_counter()
        for _ in range(steps):
            self._engine.step()
        seconds = time.perf_counter() - started
        return seconds, max(self._tokens() - before, 1)

    def _tokens(self) -> int:
        return sum(request.num_output_tokens for request in self._scheduler.running)

    def end(self) -> None:
        if self._running:
            self._engine.abort_request(self._running, internal=True)
        for _ in range(3):
            if self._engine.has_unfinished_requests():
                self._engine.step()


def prefill(llm: Any, config: Config, tokens: int) -> dict[str, Any]:
    best = statistics.median(_prefilled(llm, config, tokens, 4)[1:])
    short = [
        {"tokens": length, "us": 1e6 * statistics.median(_prefilled(llm, config, length, 32)[2:])} for length in SHORT
    ]
    return {"seconds": best, "tflops": prefill_flops(config, tokens) / best / 1e12, "short": short}


def _prefilled(llm: Any, config: Config, tokens: int, count: int) -> list[float]:
    """Seconds of each of ``count`` prompts, one after the other."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    seconds = []
    for number in range(count):
        prompt = np.random.default_rng(10_000 + number).integers(config["vocab_size"], size=tokens).tolist()
        request = {"prompt_token_ids": prompt}
        started = time.perf_counter()
        llm.generate([request], params, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
    return seconds
