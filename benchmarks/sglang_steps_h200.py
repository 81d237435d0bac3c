"""Decode steps inside SGLang on one GPU: its own backends against ours, end to end.

python benchmarks/sglang_steps_h200.py --model llama --budget 290 --out llama.json
python benchmarks/sglang_steps_h200.py --model mla --budget 290 --out mla.json
python benchmarks/sglang_steps_h200.py --merge llama.json mla.json --out benchmarks/results/sglang_steps_h200.json
python benchmarks/sglang_steps_h200.py --table benchmarks/results/sglang_steps_h200.json
python benchmarks/sglang_steps_h200.py --smoke --out /tmp/smoke.json

A backend is a name of SGLang's --attention-backend; NAME@64 sets --page-size. Each runs in a separate process, with
CUDA graphs of the measured batches. All start in parallel, since start-up is mostly compiling on the host; then they
measure one at a time. A backend that is not ready after --start-s measures behind the others, if there is time. Models
have the shapes of decode_models.py, with SGLang's dummy weights.

A point is a batch of requests with equal context lengths and random tokens, without the prefix cache. The prompts are
prefilled first. Then ``step_us`` is the time between streamed tokens while all requests decode. SGLang streams every
16th token here, which keeps the cost of streaming out of the time. ``device_us`` is the device's busy time per step,
from a trace of SGLang's profiler behind the measured steps.

--smoke runs tiny models on a CPU. It needs SGLang's CPU environment (make .venv-sglang/installed) with the stand-ins of
bridges/sglang/tests/hosted/stand_ins on PYTHONPATH, SGLANG_USE_CPU_ENGINE=1 and TRITON_INTERPRET=1.

SGLang starts processes that import this file again, so everything is below the guard.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from decode_h200 import machine_of
from decode_models import MODELS, Config, smaller
from decode_points import Clock, DeviceLock, Point, points_of
from decode_trace import analyse
from sglang_h200 import OF_DEEPSEEK, end_session, reason
from vllm_h200 import _entry, _numbers, _save, merged, table

BACKENDS = {
    "llama": "attnplug:auto,attnplug:triton_mha,triton,flashinfer",
    "mla": "attnplug:auto@64,attnplug:triton_mla,attnplug:flashmla@64,triton,flashinfer,flashmla@64",
}
SMOKE = "attnplug:torch_native,torch_native"
_INTERVAL = 16
"""Tokens between two outputs of a request."""
_WARM, _LAST = 32, 256
"""Tokens of a request between which steps are measured."""
_MAX_NEW_TOKENS = 400
"""New tokens of a request. The trace is taken behind the measured ones."""
_TRACED = 12
_POINT_S = 10
"""Limit of a point."""


def config_of(model: str, smoke: bool) -> Config:
    config = {**MODELS[model], **(OF_DEEPSEEK if model == "mla" else {}), "max_position_embeddings": 32768}
    if not smoke:
        return config
    yarn = {"rope_type": "deepseek_yarn", "factor": 1.0, "original_max_position_embeddings": 32768}
    return {**smaller(config), **({"rope_scaling": yarn} if model == "mla" else {})}  # SGLang has no other on a CPU


# one backend


def measured(arguments: argparse.Namespace, backend: str) -> dict[str, Any]:
    """All points of one backend, in this process and those that SGLang starts."""
    import sglang

    started = time.perf_counter()
    config = config_of(arguments.model, arguments.smoke)
    batches, contexts = _numbers(arguments.batches), _numbers(arguments.contexts)
    points = points_of(arguments.model, batches, contexts)
    points = [point for point in points if point.batch * point.context <= arguments.most_tokens]
    heads = config["num_attention_heads"]
    entry: dict[str, Any] = {"model": arguments.model, "heads": heads, "backend": backend}

    def found() -> dict[str, Any]:
        entries = [_entry(config, backend, point) for point in points if point.found]
        return {"machine": machine_of(), "starts": [entry], "points": entries}

    name, _, page = backend.partition("@")
    largest = max(point.batch * (point.context + _MAX_NEW_TOKENS + 128) for point in points)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        engine = sglang.Engine(
            model_path=folder,
            load_format="dummy",
            dtype=config["dtype"],
            skip_tokenizer_init=True,
            attention_backend=name,
            page_size=int(page or 1),
            max_total_tokens=largest,
            max_running_requests=max(batches),
            mem_fraction_static=0.85,  # see sglang_h200.py
            disable_radix_cache=True,
            stream_interval=_INTERVAL,
            sampling_backend="pytorch",
            grammar_backend="none",
            cuda_graph_backend_prefill="disabled",
            port=arguments.port,
            log_level="warning",
            **({"device": "cpu", "disable_cuda_graph": True} if arguments.smoke else {"cuda_graph_bs_decode": batches}),
        )
        for context in contexts:  # compiles the kernels of prefill, before the turn
            warm_up = _decode(engine, config["vocab_size"], Point(arguments.model, 1, context), None)
            engine.loop.run_until_complete(warm_up)
        entry["start_s"] = time.perf_counter() - started
        _save(arguments.out, found())
        _wait_for_turn(arguments.turn)
        activity = None if arguments.no_trace else "CPU" if arguments.smoke else "GPU"
        clock = Clock(arguments.points_s, lambda: _save(arguments.out, found()), DeviceLock(None))
        for point in points:
            clock.record(point, partial(_measure, engine, config, point, activity))
    _save(arguments.out, found())
    if arguments.turn:
        Path(f"{arguments.turn}.done").touch()
    engine.shutdown()
    return found()


def _measure(engine: Any, config: Config, point: Point, activity: str | None) -> dict[str, Any]:
    """Time of a step, and its parts from a trace of ``activity``."""
    with tempfile.TemporaryDirectory() as folder:
        profile = {"output_dir": folder, "num_steps": _TRACED, "with_stack": False, "record_shapes": False}
        work = _decode(engine, config["vocab_size"], point, {**profile, "activities": [activity]} if activity else None)
        try:
            times = engine.loop.run_until_complete(asyncio.wait_for(work, _POINT_S))
        except TimeoutError:
            engine.tokenizer_manager.abort_request(abort_all=True)
            engine.loop.run_until_complete(asyncio.sleep(1))  # until they have ended
            raise TimeoutError(f"more than {_POINT_S} s") from None
        found = _step_us(times)
        if activity:
            found |= _traced(Path(folder), found["step_us"])
    return found


async def _decode(
    engine: Any, vocabulary: int, point: Point, profile: dict[str, Any] | None
) -> list[list[tuple[float, int]]]:
    """For each request, times of its outputs and the number of tokens until then."""
    rng = random.Random(point.batch * point.context)
    prompts = [[rng.randrange(3, vocabulary) for _ in range(point.context)] for _ in range(point.batch)]
    sampling = {"temperature": 0, "max_new_tokens": _MAX_NEW_TOKENS, "ignore_eos": True}
    outputs = await engine.async_generate(input_ids=prompts, sampling_params=sampling, stream=True)
    times: list[list[tuple[float, int]]] = [[] for _ in prompts]
    async for output in outputs:
        reached = times[output.get("index", 0)]
        reached.append((time.perf_counter(), output["meta_info"]["completion_tokens"]))
        if profile is not None and all(one and one[-1][1] > _LAST for one in times):
            await engine.tokenizer_manager.start_profile(**profile)
            profile = None
    return times


def _step_us(times: list[list[tuple[float, int]]]) -> dict[str, Any]:
    """Time of a step while all requests decode: the median over the requests."""
    begin = max(next(second for second, count in one if count > _WARM) for one in times)
    end = min(next(second for second, count in one if count > _LAST) for one in times)
    steps = []
    for one in times:
        inside = [(second, count) for second, count in one if begin <= second <= end]
        if len(inside) > 1:
            (first, before), (last, after) = inside[0], inside[-1]
            steps.append((last - first) / (after - before))
    start = min(one[0][0] for one in times)
    return {"step_us": 1e6 * statistics.median(steps), "prefill_spread_s": max(one[0][0] for one in times) - start}


def _traced(folder: Path, step_us: float) -> dict[str, Any]:
    """Parts of the traced steps: whole ones, from the first kernel of a graph launch to that of another launch."""
    latest = time.perf_counter() + 5
    while not (files := list(folder.glob("*.gz"))) and time.perf_counter() < latest:
        time.sleep(0.05)
    if not files:
        return {"trace_error": "SGLang wrote no trace"}
    for _ in range(20):  # the file may still be written
        with suppress(EOFError, json.JSONDecodeError), gzip.open(files[0], "rt") as file:
            events = json.load(file)["traceEvents"]
            break
        time.sleep(0.1)
    else:
        return {"trace_error": "SGLang wrote no complete trace"}
    return _parts(events, step_us)


def _parts(events: list[dict[str, Any]], step_us: float) -> dict[str, Any]:
    spans = [event for event in events if event.get("ph") == "X"]
    launches = {_correlation(event) for event in spans if "GraphLaunch" in event["name"]}
    first: dict[int, float] = {}
    for event in spans:
        if event.get("cat") == "kernel" and (launch := _correlation(event)) in launches:
            first[launch] = min(first.get(launch, event["ts"]), event["ts"])
    if len(first) < 3:
        return {"trace_error": f"{len(first)} graph launches in the trace"}
    begin, *_, end = sorted(first.values())
    steps = len(first) - 1
    # Calls of the host are kept with their kernels: analyse() uses them for the launches alone.
    inside = [
        event
        for event in spans
        if not str(event.get("cat", "")).startswith(("kernel", "gpu_")) or begin <= event["ts"] < end
    ]
    found = analyse(inside, steps, end - begin)
    found.pop("host_us", None)  # of all traced calls, also of those of the steps left out
    busy = sum(time for part, time in found.get("parts_us", {}).items() if part != "idle")
    return {**found, "traced_steps": steps, "device_us": busy, "device_share": busy / step_us}


def _correlation(event: dict[str, Any]) -> int:
    return int(event.get("args", {}).get("correlation", -1))


def _wait_for_turn(turn: str | None) -> None:
    if turn is None:
        return
    Path(f"{turn}.ready").touch()
    while not Path(f"{turn}.go").exists():
        time.sleep(0.1)


# all backends


class Process:
    """One backend in a session of its own, so that all its processes can be found and ended."""

    def __init__(self, arguments: argparse.Namespace, backend: str, number: int, folder: Path) -> None:
        self.backend, self.turn = backend, folder / backend.replace(":", "-")
        self.out, self.log = Path(f"{self.turn}.json"), Path(f"{self.turn}.log")
        own = ["--one", backend, "--out", str(self.out), "--turn", str(self.turn)]
        own += ["--port", str(arguments.port + 1200 * number)]  # SGLang draws further ports from the next 1000
        command = [sys.executable, "-u", __file__, *sys.argv[1:], *own]  # the last of duplicate options counts
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def ready(self) -> bool:
        return not self.ended() and Path(f"{self.turn}.ready").exists()

    def measure(self, seconds: float) -> None:
        Path(f"{self.turn}.go").touch()
        latest = time.perf_counter() + seconds
        while time.perf_counter() < latest and not self.ended() and not Path(f"{self.turn}.done").exists():
            time.sleep(0.1)

    def end(self) -> None:
        end_session(self._process)

    def result(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """Its results so far, with the end of its log if it did not reach the last point."""
        heads = config_of(arguments.model, arguments.smoke)["num_attention_heads"]
        entry = {"model": arguments.model, "heads": heads, "backend": self.backend}
        found: dict[str, Any] = {"machine": {}, "starts": [entry], "points": []}
        if self.out.exists():
            found = json.loads(self.out.read_text())
        if not Path(f"{self.turn}.done").exists():
            found["starts"][0]["error"] = reason(self.log.read_text(errors="replace"))
        return found


def in_processes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure each backend in its own process, one at a time."""
    started = time.perf_counter()
    end = started + arguments.budget
    backends = (arguments.backends or (SMOKE if arguments.smoke else BACKENDS[arguments.model])).split(",")
    folder = Path(arguments.logs or tempfile.mkdtemp(prefix="sglang-steps-"))
    folder.mkdir(parents=True, exist_ok=True)
    print("logs in", folder, flush=True)
    processes = [Process(arguments, backend, number, folder) for number, backend in enumerate(backends)]

    def found() -> dict[str, Any]:
        return merged([process.result(arguments) for process in processes])

    waiting, others = list(processes), DeviceLock(arguments.turns)
    try:
        while waiting and time.perf_counter() < end:
            for process in [one for one in waiting if one.ended()]:
                waiting.remove(process)
                print(f"{process.backend}: ended before its turn", flush=True)
            ready = [one for one in waiting if one.ready()]
            if not ready or (len(ready) < len(waiting) and time.perf_counter() < started + arguments.start_s):
                time.sleep(0.2)
                continue
            others.acquire()
            waiting.remove(ready[0])
            print(f"{ready[0].backend}: measures, {time.perf_counter() - started:.0f} s after the start", flush=True)
            ready[0].measure(min(arguments.points_s + 15, end - time.perf_counter()))
            ready[0].end()
            _save(arguments.out, found())
        for process in waiting:
            print(f"{process.backend}: not measured in time", flush=True)
    finally:
        for process in processes:
            process.end()
    return found()


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.table:
        print(table(json.loads(Path(arguments.table).read_text()), "SGLang"))
    elif arguments.merge:
        _save(arguments.out, merged([json.loads(Path(path).read_text()) for path in arguments.merge]))
    elif arguments.one:
        _save(arguments.out, measured(arguments, arguments.one))
    else:
        found = in_processes(arguments)
        _save(arguments.out, found)
        for start in found["starts"]:
            print(start)
        print(table(found, "SGLang"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(BACKENDS), default="llama")
    parser.add_argument("--backends", help="separated by commas; each is started once")
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--contexts", default="1024,16384")
    parser.add_argument("--most-tokens", type=int, default=16 * 16384, help="of a batch; others are left out")
    parser.add_argument("--budget", type=float, default=290, help="seconds in all")
    parser.add_argument("--start-s", type=float, default=120, help="seconds to wait for all to be ready")
    parser.add_argument("--points-s", type=float, default=45, help="seconds for the points of one backend")
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--turns", metavar="FILE", help="measure when no other process has a lock on this file")
    parser.add_argument("--port", type=int, default=31000, help="the first port")
    parser.add_argument("--logs", metavar="FOLDER", help="of the processes' output; else a temporary one")
    parser.add_argument("--one", metavar="BACKEND", help=argparse.SUPPRESS)
    parser.add_argument("--turn", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--merge", nargs="+", metavar="FILE")
    parser.add_argument("--table", metavar="FILE")
    return parser


if __name__ == "__main__":
    main()
