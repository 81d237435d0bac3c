"""Models inside vLLM on one GPU: its own backends against ours, end to end.

python benchmarks/vllm_h200.py --model llama --layers 48 --batches 1,4,16,64,256 --out gqa.json
python benchmarks/vllm_h200.py --model llama --prefill --contexts 512,2048,8192,32768 --out gqa_prefill.json
python benchmarks/vllm_h200.py --model sparse --heads 128 --out sparse.json
python benchmarks/vllm_h200.py --heads 16,128 --backends FLASH_ATTN_MLA,attnplug:triton_mla --out part1.json
python benchmarks/vllm_h200.py --merge part1.json part2.json --out benchmarks/results/vllm_h200.json
python benchmarks/vllm_h200.py --table benchmarks/results/vllm_h200.json

A backend is one of vLLM's (--attention-backend NAME), or one of ours as attnplug:NAME. NAME@64 sets --block-size, which
is otherwise left to vLLM. Each runs in a separate process, with vLLM's defaults: torch.compile, full decode graphs. All
start in parallel, since start-up is mostly compiling on the host; then they measure one at a time. They do so --rounds
times, in alternating order: the host's speed varies, and a step takes the host longer than the GPU. ``step_us`` is the
median of the rounds, ``rounds_us`` are all of them. Models have the shapes of decode_models.py, with random weights:
``mla``, the dense DeepSeek-V3 (16 layers, hidden 2048, latent 512 + 64) with 16 or 128 heads; ``llama``, with 32 heads
of 64 and 8 KV heads; ``sparse``, ``mla`` with DeepSeek-V3.2's indexer. vLLM's host code takes 2 to 4 ms per step,
longer than 16 layers on the GPU: with --layers 48 tokens/s are bound by the GPU, as with production models.

A point is a batch of requests with equal context lengths. The time from step to step is measured while all of them
decode. Contexts are not computed: vLLM's own DecodeBenchConnector gives every request separate blocks and fills them
with random numbers. So no two requests share rows in L2, and the lengths and block tables are those of real requests.
``build_us`` is the median time that a step spends in the metadata builder, on the host. ``device_us`` is the device's
busy time per step, from a trace: on a host that is slower than the GPU it distinguishes backends when tokens/s do not.

With --prefill, a point is one prompt of the given length, computed in one step, and ``step_us`` is its time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from decode_h200 import _rounded, machine_of
from decode_models import MODELS, Config, limit_us, smaller
from decode_points import Clock, DeviceLock, Point, points_of
from decode_vllm import Ladder  # sets vLLM's environment, so it comes before vLLM

BACKENDS = {
    "mla": "FLASH_ATTN_MLA,FLASH_ATTN_MLA@64,FLASHMLA,TRITON_MLA@64,attnplug:triton_mla,attnplug:auto",
    "llama": "FLASH_ATTN,FLASHINFER,attnplug:triton_mha,attnplug:auto",
    "sparse": "FLASHMLA_SPARSE,attnplug:triton_mla,attnplug:auto",
}
_INDEXER = {
    "model_type": "deepseek_v32",
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
_MAX_NEW_TOKENS = 800
"""Maximum number of new tokens of a request."""
_BUILDS = 60
_START_S = 240
"""Seconds of a start if all processes compile at the same time."""


def config_of(model: str, heads: int, layers: int) -> Config:
    """Configuration of a model. Llama keeps its number of KV heads."""
    common = {"num_hidden_layers": layers, "num_attention_heads": heads, "max_position_embeddings": 131072}
    if model == "llama":
        return {**MODELS["llama"], **common}
    own = _INDEXER if model == "sparse" else {}
    return {**MODELS["mla"], **own, **common, "first_k_dense_replace": layers, "num_key_value_heads": heads}


def main() -> None:
    arguments = _parser().parse_args()
    arguments.heads = arguments.heads or {"mla": "16,128", "llama": "32", "sparse": "128"}[arguments.model]
    if arguments.table:
        print(table(json.loads(Path(arguments.table).read_text())))
    elif arguments.merge:
        _save(arguments.out, merged([json.loads(Path(path).read_text()) for path in arguments.merge]))
    elif arguments.one:
        _save(arguments.out, measured(arguments, arguments.one))
    else:
        found = _in_processes(arguments)
        _save(arguments.out, found)
        print(table(found))


def options_of(backend: str) -> dict[str, Any]:
    """vLLM's options for a backend by its name here."""
    name, _, block = backend.partition("@")
    options: dict[str, Any] = {"block_size": int(block)} if block else {}
    if name.startswith("attnplug:"):
        section = {"backend": name.removeprefix("attnplug:")}
        return {**options, "attention_backend": "CUSTOM", "additional_config": {"attnplug": section}}
    return {**options, "attention_backend": name}


def measured(arguments: argparse.Namespace, backend: str) -> dict[str, Any]:
    """All points of one backend with one number of heads, in this process."""
    import vllm

    started = time.perf_counter()
    heads = int(arguments.heads)
    config = config_of(arguments.model, heads, arguments.layers)
    config = smaller(config) if arguments.smoke else config
    if arguments.smoke and arguments.model != "llama":  # limits of vLLM's CPU kernels
        config = {**config, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 2048}
    batches, contexts = _numbers(arguments.batches), _numbers(arguments.contexts)
    if arguments.prefill:
        batches = [1]
    points = points_of(f"{arguments.model}{heads}", batches, contexts)
    entry: dict[str, Any] = {"model": arguments.model, "heads": heads, "layers": arguments.layers, "backend": backend}

    def found() -> dict[str, Any]:
        entries = [_entry(config, backend, point, arguments.prefill) for point in points if point.found]
        return {"machine": machine_of(), "starts": [entry], "points": entries}

    # vLLM cannot fill index keys, which are bytes, with random numbers.
    fill = {"fill_mean": 0.0, "fill_std": 0.0 if arguments.model == "sparse" else 0.5}
    connector = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both", "kv_connector_extra_config": fill}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        try:
            llm = vllm.LLM(
                folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype=config["dtype"],
                max_model_len=max(contexts) + _MAX_NEW_TOKENS,
                max_num_seqs=max(batches),
                # Limits the memory of prefill, if that is not measured.
                max_num_batched_tokens=max(contexts) + 1 if arguments.prefill else 2048,
                gpu_memory_utilization=0.1,
                kv_cache_memory_bytes=_cache_bytes(config, arguments.most_tokens + _MAX_NEW_TOKENS * max(batches)),
                enable_prefix_caching=False,
                enforce_eager=arguments.eager,
                kv_transfer_config=None if arguments.prefill else connector,
                compilation_config=_compilation(arguments, batches),
                **options_of(backend),
            )
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {str(error)[:600]}"
            return found()
        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        builder = runner.attn_groups[0][0].get_metadata_builder()
        entry |= {
            "start_s": time.perf_counter() - started,
            "block_size": builder.kv_cache_spec.block_size,
            "cudagraph_mode": str(runner.compilation_config.cudagraph_mode),
            "chosen": _chosen(runner),
        }
        for number in range(arguments.rounds):
            _wait_for_turn(arguments.turn, number)
            clock = Clock(arguments.budget, lambda: _save(arguments.out, found()), DeviceLock(None))
            trace = number == 0 and not arguments.no_trace
            if arguments.prefill:
                for point in points:
                    clock.record(point, partial(_measure_prefill, llm, config, point, trace))
                _end_turn(arguments.turn, number)
                continue
            for context in sorted(contexts):
                ladder = Ladder(llm, config["vocab_size"], context)
                here = [p for p in points if p.context == context and p.batch * context <= arguments.most_tokens]
                for point in sorted(here, key=lambda p: -p.batch):
                    clock.record(point, partial(_measure, ladder, point, clock, llm, builder, trace))
                ladder.end()
            _end_turn(arguments.turn, number)
    return found()


def _compilation(arguments: argparse.Namespace, batches: list[int]) -> dict[str, Any]:
    if arguments.smoke:
        return {"custom_ops": ["-rotary_embedding"]}
    return {} if arguments.eager else {"cudagraph_capture_sizes": sorted(batches)}


def _chosen(runner: Any) -> list[str]:
    """Our selected backends by role, or the class name of vLLM's."""
    layers = runner.compilation_config.static_forward_context.values()
    impl = next(layer.impl for layer in layers if hasattr(layer, "impl"))
    selection = getattr(impl, "selection", None)
    if selection is None:
        return [type(impl).__name__]
    return [f"{role}: {', '.join(b.spec.name for b in selection.serving(role))}" for role in selection.choices]


def _measure(ladder: Any, point: Point, clock: Clock, llm: Any, builder: Any, trace: bool) -> dict[str, Any]:
    found: dict[str, Any] = ladder.measure(point, clock)
    found["rounds_us"] = [*point.found.get("rounds_us", ()), found["step_us"]]
    found["step_us"] = statistics.median(found["rounds_us"])
    if "build_us" not in point.found:
        found["build_us"] = _build_us(llm, builder)
    if trace:
        from decode_trace import traced

        def steps(count: int) -> float:
            started = time.perf_counter()
            for _ in range(count):
                llm.llm_engine.step()
            return time.perf_counter() - started

        found |= traced(steps, 8, is_cuda=True)
        parts = found.get("parts_us", {})
        found["device_us"] = sum(time for part, time in parts.items() if part != "idle")
    return found


def _measure_prefill(llm: Any, config: Config, point: Point, trace: bool) -> dict[str, Any]:
    """Median time of a prompt, and the device's busy time."""
    from decode_vllm import _prefilled

    seconds = statistics.median(_prefilled(llm, config, point.context, 6)[2:])
    rounds = [*point.found.get("rounds_us", ()), 1e6 * seconds]
    found: dict[str, Any] = {"rounds_us": rounds, "step_us": statistics.median(rounds)}
    if trace:
        from decode_trace import traced

        found |= traced(lambda count: sum(_prefilled(llm, config, point.context, count)), 2, is_cuda=True)
        found["device_us"] = sum(time for part, time in found.get("parts_us", {}).items() if part != "idle")
    return found


def _build_us(llm: Any, builder: Any) -> float:
    """Median time per step in the metadata builder."""
    seconds: list[float] = []
    build = builder.build

    def timed(*given: Any, **named: Any) -> Any:
        started = time.perf_counter()
        made = build(*given, **named)
        seconds.append(time.perf_counter() - started)
        return made

    builder.build = timed
    try:
        for _ in range(_BUILDS):
            llm.llm_engine.step()
    finally:
        del builder.build
    return 1e6 * statistics.median(seconds) if seconds else float("nan")


def _entry(config: Config, backend: str, point: Point, prefill: bool = False) -> dict[str, Any]:
    entry = {"heads": config["num_attention_heads"], "backend": backend, "batch": point.batch, "context": point.context}
    if not prefill and "index_topk" not in config:
        entry["limit_us"] = limit_us(config, point.batch, point.context)
    if "step_us" in point.found:
        entry["tokens_per_s"] = 1e6 * (point.context if prefill else point.batch) / point.found["step_us"]
    made: dict[str, Any] = _rounded({**entry, **point.found})
    return made


def _cache_bytes(config: Config, tokens: int) -> int:
    """Bytes of the cache of ``tokens`` tokens, with a margin for partial blocks."""
    if "kv_lora_rank" in config:
        row = 2 * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    else:
        row = 2 * 2 * config["num_key_value_heads"] * config["head_dim"]
    if "index_topk" in config:
        row += config["index_head_dim"] + 4
    return int(1.05 * row * config["num_hidden_layers"] * tokens) + (1 << 28)


def _wait_for_turn(turn: str | None, number: int) -> None:
    if turn is None:
        return
    Path(f"{turn}.ready").touch()
    while not Path(f"{turn}.{number}").exists():
        time.sleep(0.1)


def _end_turn(turn: str | None, number: int) -> None:
    if turn is not None:
        Path(f"{turn}.{number}.done").touch()


def _in_processes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure each backend in its own process: vLLM frees its memory only when the process ends."""
    end, results = time.perf_counter() + arguments.budget, []
    others = DeviceLock(arguments.turns)
    with tempfile.TemporaryDirectory() as folder:
        processes = {}
        backends = arguments.backends or BACKENDS[arguments.model]
        for heads, backend in product(_numbers(arguments.heads), backends.split(",")):
            turn = Path(folder, f"{heads}-{backend.replace(':', '-')}")
            out = turn.with_suffix(".json")
            # The last of duplicate options counts.
            own = ["--one", backend, "--heads", f"{heads}", "--out", str(out), "--turn", str(turn)]
            given = [*sys.argv[1:], *own, "--budget", f"{arguments.points_s}"]
            processes[turn] = out, subprocess.Popen([sys.executable, __file__, *given])
        latest = min(time.perf_counter() + _START_S, end)
        while time.perf_counter() < latest and any(
            not Path(f"{turn}.ready").exists() and process.poll() is None for turn, (_, process) in processes.items()
        ):
            time.sleep(0.2)
        others.acquire()
        for number in range(arguments.rounds):
            for turn, (_, process) in list(processes.items())[:: 1 - 2 * (number % 2)]:
                if process.poll() is not None:
                    continue
                ready, done = Path(f"{turn}.ready").exists(), Path(f"{turn}.{number}.done")
                Path(f"{turn}.{number}").touch()
                latest = min(time.perf_counter() + arguments.points_s + 15, end) if ready else 0
                while not done.exists() and process.poll() is None and time.perf_counter() < latest:
                    time.sleep(0.1)
                if not done.exists() and process.poll() is None:
                    print(f"{turn.name}: {'not done' if ready else 'not started'} in time", flush=True)
                    process.kill()
        for out, process in processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()
            process.wait()
            if out.exists():
                results.append(json.loads(out.read_text()))
    return merged(results)


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge results of several processes. Of duplicate points the last one that did not fail counts."""
    machine: dict[str, Any] = {}
    starts: dict[tuple[Any, ...], Any] = {}
    points: dict[tuple[Any, ...], Any] = {}
    for result in results:
        machine |= result["machine"]
        starts |= {(one["heads"], one["backend"]): one for one in result["starts"]}
        for point in result["points"]:
            key = point["heads"], point["context"], point["batch"], point["backend"]
            if key not in points or "step_us" in point or "step_us" not in points[key]:
                points[key] = point
    return {"machine": machine, "starts": list(starts.values()), "points": [points[key] for key in sorted(points)]}


def table(result: dict[str, Any], host: str = "vLLM") -> str:
    """Tokens/s by point and backend, and µs of the device; ours relative to the best of the host's own."""
    names = list(dict.fromkeys(point["backend"] for point in result["points"]))
    names.sort(key=lambda name: name.startswith("attnplug"))
    lines = [
        "| heads | context | batch | "
        + " | ".join(names)
        + f" | tokens/s, ours / {host}'s best | device, {host}'s best / ours |",
        "|---" * (len(names) + 5) + "|",
    ]
    shapes = dict.fromkeys((point["heads"], point["context"], point["batch"]) for point in result["points"])
    for heads, context, batch in shapes:
        here = {
            p["backend"]: p
            for p in result["points"]
            if (p["heads"], p["context"], p["batch"]) == (heads, context, batch)
        }
        rates = {name: here[name]["tokens_per_s"] for name in names if "tokens_per_s" in here.get(name, {})}
        # The inverse of a time is a rate.
        inverse = {name: 1 / here[name]["device_us"] for name in names if here.get(name, {}).get("device_us")}
        cells = [_cell(here.get(name, {})) for name in names]
        ratios = f"{_ratios(rates)} | {_ratios(inverse)}"
        lines.append(f"| {heads} | {context} | {batch} | " + " | ".join(cells) + f" | {ratios} |")
    return "\n".join(lines)


def _cell(point: dict[str, Any]) -> str:
    device = f" ({point['device_us']:,.0f} µs)" if point.get("device_us") else ""
    return f"{point['tokens_per_s']:,.0f}{device}" if "tokens_per_s" in point else "–"


def _ratios(rates: dict[str, float]) -> str:
    own = max((rate for name, rate in rates.items() if not name.startswith("attnplug")), default=None)
    ours = {name.removeprefix("attnplug:"): rate for name, rate in rates.items() if name.startswith("attnplug")}
    return ", ".join(f"{name} {rate / own:.3f}" for name, rate in ours.items()) if own else ""


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _save(path: str | None, result: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(_rounded(result), indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(BACKENDS), default="mla")
    parser.add_argument("--heads", help="16,128 for mla; 32 for llama; 128 for sparse")
    parser.add_argument("--layers", type=int, default=MODELS["mla"]["num_hidden_layers"])
    parser.add_argument("--backends", help="separated by commas; each is started once")
    parser.add_argument("--prefill", action="store_true", help="measure prompts of the lengths of --contexts")
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--contexts", default="1024,16384,65536")
    parser.add_argument("--budget", type=float, default=570, help="seconds in all")
    parser.add_argument("--points-s", type=float, default=50, help="seconds for the points of one backend in a round")
    parser.add_argument("--rounds", type=int, default=1, help="how often all points are measured")
    parser.add_argument(
        "--most-tokens",
        type=int,
        default=16 * 65536,
        help="of a batch; others are left out",
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs and no torch.compile")
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--one", metavar="BACKEND", help=argparse.SUPPRESS)
    parser.add_argument("--turn", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--turns", metavar="FILE", help="measure when no other process has a lock on this file")
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--merge", nargs="+", metavar="FILE")
    parser.add_argument("--table", metavar="FILE")
    return parser


os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

if __name__ == "__main__":
    main()
