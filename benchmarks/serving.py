"""Engines behind one interface for ``arrivals_h200.py`` and ``ttft_h200.py``: ours and vLLM, stepped by one thread.

Both have dummy weights, the same config, the same limits on context and running requests, steps of up to 8192 tokens
and no prefix cache. Each runs in a process of its own: vLLM frees its memory only when the process ends.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from decode_h200 import machine_of
from decode_models import MODELS, Config, cache_bytes, smaller
from decode_points import DeviceLock, error_text

ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"max_num_batched_tokens": 8192},  # default of its server on an H200
    "ours": {},
    "ours-before": {"chunked_prefill_size": 2048, "inter_token_latency": math.inf},
}
"""Engines and their settings. ``ours-before`` has no bound on inter-token latency, and the chunk size before it."""
_REQUEST_TOKENS = 2560
"""Average cache rows per running request. vLLM gets a fixed cache size, so that several processes start at a time."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Most tokens of a request, most running requests, and the device. A CPU runs tiny models."""

    context: int
    max_batch: int
    device: str = "cuda"

    @property
    def is_smoke(self) -> bool:
        """True if this only tries the benchmark's code."""
        return self.device == "cpu"

    def config(self, model: str) -> Config:
        """Config of a model; tiny for a CPU."""
        config = smaller(MODELS[model]) if self.is_smoke else MODELS[model]
        return {**config, "max_position_embeddings": max(self.context, config["max_position_embeddings"])}


class Server(Protocol):
    """An engine that is stepped: requests are numbered by the caller, decode greedily and ignore the end of text."""

    notes: dict[str, Any]
    """Facts about the engine to record with its results."""

    def add(self, number: int, prompt: Sequence[int], max_tokens: int) -> None: ...

    def step(self) -> Sequence[int]:
        """Run a step; return the numbers of requests that got a token."""

    @property
    def has_work(self) -> bool:
        """True if a request is unfinished."""

    def note_late_compilations(self) -> None:
        """Note what was compiled since start-up, if the engine knows."""


class OurServer:
    """Our engine."""

    def __init__(self, folder: str, limits: Limits, settings: Mapping[str, Any]) -> None:
        from attnplug_engine import Engine, SamplingParams

        self._params = SamplingParams
        self._engine = engine = Engine(
            folder,
            random_weights=True,
            device=limits.device,
            max_batch=limits.max_batch,
            context_length=limits.context,
            prefix_cache=False,
            ignore_eos=True,
            **settings,
        )
        self._numbers: dict[int, int] = {}
        self.notes = {
            "backends": {str(role): choice.chosen_name for role, choice in engine.selection.choices.items()},
            "graphs": str(engine.graphs),
            "mixed_steps": str(engine.scheduler.mixed_steps),
            "settings": {name: str(value) for name, value in settings.items()},
            "start_s": engine.start_up.seconds,
            "compiled": [each.name for each in engine.start_up.compiled if not each.cached],
        }

    def note_late_compilations(self) -> None:
        """Note the kernels that were compiled or loaded since start-up."""
        self.notes["late"] = [each.name for each in self._engine.compilations_since_start]

    def add(self, number: int, prompt: Sequence[int], max_tokens: int) -> None:
        self._numbers[self._engine.add(prompt, self._params(max_tokens=max_tokens)).id] = number

    def step(self) -> Sequence[int]:
        result = self._engine.step()
        return [] if result is None else [self._numbers[request] for request in result.tokens]

    @property
    def has_work(self) -> bool:
        return self._engine.scheduler.has_work


class VllmServer:
    """vLLM's engine, in this process."""

    def __init__(self, folder: str, limits: Limits, settings: Mapping[str, Any]) -> None:
        from decode_vllm import randomise  # first: it sets vLLM's environment variables

        config = json.loads((Path(folder) / "config.json").read_text())
        import vllm
        from vllm.sampling_params import RequestOutputKind

        self._params, self._delta = vllm.SamplingParams, RequestOutputKind.DELTA
        llm = vllm.LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=config["dtype"],
            max_model_len=limits.context,
            max_num_seqs=limits.max_batch,
            gpu_memory_utilization=0.1,  # only checked: the next setting decides
            kv_cache_memory_bytes=int(1.25 * cache_bytes(config, limits.max_batch, _REQUEST_TOKENS)),
            enable_prefix_caching=False,
            enforce_eager=limits.is_smoke,
            **settings,
        )
        randomise(llm, config["initializer_range"])
        self._engine = llm.llm_engine
        scheduling = self._engine.vllm_config.scheduler_config
        self.notes = {
            "version": vllm.__version__,
            "async_scheduling": bool(scheduling.async_scheduling),
            "settings": dict(settings),
        }

    def add(self, number: int, prompt: Sequence[int], max_tokens: int) -> None:
        params = self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        params.output_kind = self._delta
        self._engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, params)

    def step(self) -> Sequence[int]:
        outputs = self._engine.step()
        return [int(output.request_id) for output in outputs for _ in output.outputs[0].token_ids]

    def note_late_compilations(self) -> None:
        """vLLM does not count compilations."""

    @property
    def has_work(self) -> bool:
        return bool(self._engine.has_unfinished_requests())


def start(engine: str, config: Config, limits: Limits, more: Mapping[str, Any]) -> Server:
    """Start an engine. ``more`` are further settings of ours."""
    build = VllmServer if engine == "vllm" else OurServer
    settings = {**ENGINES[engine], **({} if engine == "vllm" else more)}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        server = build(folder, limits, settings)
    server.notes["start_s"] = round(time.perf_counter() - started, 1)
    return server


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def commit() -> str:
    """Commit of the working tree; empty outside of a repository, unless the environment names it."""
    found = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or os.environ.get("ATTNPLUG_COMMIT", "")


def record(path: str | None, engine: str, model: str, found: Mapping[str, Any]) -> None:
    """Add an engine's results of a model to a file of results."""
    result = read(path)
    result["machine"] |= machine_of()
    result["commit"] = commit()
    result["models"].setdefault(model, {})[engine] = dict(found)
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")


def read(path: str | None) -> dict[str, Any]:
    """Read a file of results; an empty one if there is none yet."""
    if path and Path(path).exists():
        result: dict[str, Any] = json.loads(Path(path).read_text())
        return result
    return {"machine": {}, "commit": "", "models": {}}


def in_processes(script: str, engines: Sequence[str], models: Sequence[str], out: str, timeout: float) -> None:
    """Run a benchmark's script once per engine and model, and collect the results in ``out``.

    vLLM takes one to two minutes to start, so its processes start together and then measure one at a time. Ours follow
    one by one, each with the whole GPU.
    """
    batches = [[(engine, model)] for engine in engines if engine != "vllm" for model in models]
    if "vllm" in engines:
        batches.insert(0, [("vllm", model) for model in models])
    for batch in batches:
        with tempfile.TemporaryDirectory() as folder:
            lock, running = f"{folder}/lock", []
            for engine, model in batch:
                part = f"{out}.{engine}-{model}"
                Path(part).unlink(missing_ok=True)
                own = ["--engine", engine, "--models", model, "--out", part, "--results", out, "--lock", lock]
                process = subprocess.Popen([sys.executable, script, *sys.argv[1:], *own])  # the last of options counts
                running.append((engine, model, part, process))
            end = time.monotonic() + timeout
            for engine, model, part, process in running:
                try:
                    process.wait(max(end - time.monotonic(), 1))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                error = {"error": f"ended with status {process.returncode}, without results"}
                found = read(part)["models"].get(model, {}).get(engine, error)
                record(out, engine, model, found)
                Path(part).unlink(missing_ok=True)


def measure_in_process(
    engine: str,
    model: str,
    limits: Limits,
    more: Mapping[str, Any],
    lock: str | None,
    out: str | None,
    measure: Callable[[Server, dict[str, Any], Callable[[], None]], None],
) -> None:
    """Start an engine, wait for the GPU, and record ``measure``'s results, or the reason if a model is refused."""
    turn = DeviceLock(lock)
    found: dict[str, Any] = {}
    try:
        server = start(engine, limits.config(model), limits, more)
        found["engine"] = server.notes
        print(f"{engine} {model}: {server.notes}", flush=True)
        turn.acquire()
        measure(server, found, lambda: record(out, engine, model, found))
    except Exception as error:
        traceback.print_exc()
        found["error"] = error_text(error)
    record(out, engine, model, found)
    if lock is not None:  # frees the GPU for the next process at once
        sys.stdout.flush()
        os._exit(0)
