"""The engine on the CPU against transformers' own generation: same model, same prompts, same run.

A random Llama of about 50M parameters. Decode at batch 1, 8 and 32 and prefill of 2048 tokens, in tokens a second,
against ``generate`` and continuous batching (``generate_batch``, in a process of its own with a time limit); and what a
decode step costs outside the model's own math (scheduling, batch, plan, sampling). Ratios of one run are what counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

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


def prompts(count: int, length: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(count)
    return [torch.randint(0, CONFIG["vocab_size"], (length,), generator=random).tolist() for _ in range(count)]


def ours(engine: Engine, batch: int, new: int, length: int = PROMPT) -> tuple[float, float]:
    """Tokens a second of prefill and decode."""
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
    """Decoded tokens a second of ``generate``: the time of a long run less that of its first token."""
    tokens = torch.tensor(prompts(batch, PROMPT))
    seconds = []
    for count in (1, new):
        started = time.perf_counter()
        model.generate(tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        seconds.append(time.perf_counter() - started)
    return batch * (new - 1) / (seconds[1] - seconds[0])


def by_generate_batch(folder: str, batch: int, new: int) -> float | None:
    """Decoded tokens a second of transformers' continuous batching, likewise; None where it gives no answer in time."""
    code = f"""
import json, time, torch, transformers, warnings
warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
from transformers import AutoModelForCausalLM, GenerationConfig
model = AutoModelForCausalLM.from_pretrained({folder!r}, attn_implementation="sdpa", dtype=torch.float32).eval()
seconds = []
for count in (1, 1, {new}):  # the first warms up
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
    # Starting its threads varies by seconds: where that drowns a short run there is no rate to tell.
    return batch * (new - 1) / (whole - first) if whole - first > 0.2 * first else None


@torch.inference_mode()
def prefill_by_transformers(model: torch.nn.Module, length: int) -> float:
    tokens = torch.tensor(prompts(1, length))
    started = time.perf_counter()
    model(tokens, use_cache=True, logits_to_keep=1)
    return length / (time.perf_counter() - started)


def overhead(engine: Engine, batch: int, new: int) -> dict[str, float]:
    """Median microseconds of a decode step, and of its parts outside the model's math."""
    runner, scheduler, sampler = engine.runner, engine.scheduler, engine.sampler
    for prompt in prompts(batch, PROMPT):
        engine.add(prompt, SamplingParams(max_tokens=new))
    parts: dict[str, list[float]] = {name: [] for name in ("step", "schedule", "batch", "plan", "sample")}
    while scheduler.has_work:
        asked = time.perf_counter()
        step = scheduler.next_step()
        assert step is not None
        t0 = time.perf_counter()
        made = runner._batch(step)
        t1 = time.perf_counter()
        runner.backend.init_forward_metadata(made)
        t2 = time.perf_counter()
        logits = runner.run(step)
        t3 = time.perf_counter()
        sampled = sampler.sample(logits, step.sampled_requests)
        t4 = time.perf_counter()
        scheduler.finish_step(step, sampled)
        t5 = time.perf_counter()
        if step.mode.is_decode and len(step.entries) == batch:
            for name, seconds in (("batch", t1 - t0), ("plan", t2 - t1), ("step", t3 - t2), ("sample", t4 - t3)):
                parts[name].append(1e6 * seconds)
            parts["schedule"].append(1e6 * (t0 - asked + t5 - t4))
    return {name: statistics.median(values) for name, values in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **CONFIG)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()
    parameters = sum(p.numel() for p in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
        engine = Engine(folder, device="cpu", prefix_cache=False, chunked_prefill_size=4096, ignore_eos=True)
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        threads = torch.get_num_threads()
        print(
            f"Llama of {parameters / 1e6:.0f}M parameters, float32, {threads} threads, {versions}, {platform.machine()}"
        )
        rows = []
        for batch in (1, 8, 32):
            ours(engine, batch, 4)
            pairs = [
                (ours(engine, batch, arguments.tokens)[1], by_generate(model, batch, arguments.tokens))
                for _ in range(4)
            ]
            mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
            batched = by_generate_batch(folder, batch, arguments.tokens)
            rows.append({"decode batch": batch, "attnplug": mine, "generate": theirs, "generate_batch": batched})
            line = f"decode batch {batch:>2}: attnplug {mine:7.1f} tok/s, generate {theirs:7.1f} (×{mine / theirs:.2f})"
            print(line + (f", generate_batch {batched:7.1f} (×{mine / batched:.2f})" if batched else ""), flush=True)
    prefill = [(ours(engine, 1, 1, 2048)[0], prefill_by_transformers(model, 2048)) for _ in range(3)]
    mine, theirs = (statistics.median(column) for column in zip(*prefill, strict=True))
    print(f"prefill 2048:    attnplug {mine:7.1f} tok/s, transformers {theirs:7.1f} (×{mine / theirs:.2f})")
    parts = overhead(engine, 32, arguments.tokens)
    outside = sum(parts[name] for name in ("schedule", "batch", "plan", "sample"))
    print(f"decode step at batch 32: {parts['step']:.0f} µs; outside the model's math {outside:.0f} µs: " + ", ".join(
        f"{name} {parts[name]:.0f}" for name in ("schedule", "batch", "plan", "sample")))  # fmt: skip
    if arguments.json:
        result = {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__,
                  "transformers": transformers.__version__, "parameters": parameters, "decode": rows,
                  "prefill_2048": {"attnplug": mine, "transformers": theirs}, "step_us": parts}  # fmt: skip
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
