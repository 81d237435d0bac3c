"""Batch invariance inside vLLM on one GPU: results that change when unrelated prompts join, and what the switch costs.

python benchmarks/vllm_invariance_h200.py --out benchmarks/results/vllm_invariance_h200.json
python benchmarks/vllm_invariance_h200.py --smoke --runs attnplug:torch_native   a tiny model on a CPU

A run is a backend as in ``vllm_h200.py``; ``!`` behind its name sets ``VLLM_BATCH_INVARIANT=1``. Each is a process of
its own. They start at the same time and measure one after the other. The model is Llama of ``decode_models.py`` with
random weights.

A schedule is one request that decodes while prompts of other requests join (vLLM issue 51902). Its tokens and log
probabilities are compared with those of the same request alone: ``flips`` counts schedules with another token,
``bits`` those with another log probability. ``step_us`` is the time of a decode step by number of requests, with
contexts of 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from decode_models import MODELS, smaller
from decode_points import Clock, DeviceLock, points_of
from decode_vllm import Ladder, randomise  # sets vLLM's environment, so it comes before vLLM
from gpu_report import Report, describe
from vllm_h200 import options_of

WHAT = "requests that decode while other prompts join, inside vLLM: schedules with other results than alone"
PACKAGES = ("torch", "triton", "vllm", "attnplug-vllm", "attnplug-triton-mha")
RUNS = "FLASH_ATTN,FLASH_ATTN!,attnplug:triton_mha,attnplug:triton_mha!"
SUBJECTS, NEW_TOKENS = (37, 300, 777, 1500), 24
"""Prompts of the requests that are watched, and the tokens they generate."""
CONTEXT, BATCHES = 512, (1, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=RUNS)
    parser.add_argument("--schedules", type=int, default=60)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--one", help="measure this run in this process")
    parser.add_argument("--lock", help="lock file of the processes that share the GPU")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(arguments)))
        return
    facts = {"what": WHAT} if arguments.smoke else describe(WHAT, PACKAGES, arguments.commit)
    report = Report(arguments.out, facts)
    with tempfile.TemporaryDirectory() as folder:
        lock = arguments.lock or str(Path(folder) / "lock")
        processes = {}
        for run in arguments.runs.split(","):
            own = [*sys.argv[1:], "--one", run, "--lock", lock]
            switch = {"VLLM_BATCH_INVARIANT": "1" if run.endswith("!") else "0"}
            with Path(folder, run.replace(":", "-")).open("w") as log:
                processes[run] = (
                    log.name,
                    subprocess.Popen(
                        [sys.executable, __file__, *own],
                        stdout=subprocess.PIPE,
                        stderr=log,
                        env={**os.environ, **switch},
                    ),
                )
        for run, (log, process) in processes.items():
            out = process.communicate()[0].decode().strip().splitlines()
            failed = {"error": Path(log).read_text()[-3000:]}
            report.put(run, failed if process.returncode else json.loads(out[-1]))
            found = report.found[run]
            print(run, found.get("error", "")[-600:] or {key: found[key] for key in ("flips", "bits", "step_us")})


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Results of one run, in this process."""
    import vllm

    started = time.perf_counter()
    smoke = arguments.smoke
    config = smaller(MODELS["llama"]) if smoke else MODELS["llama"]
    subjects = [count // 30 + 2 for count in SUBJECTS] if smoke else SUBJECTS
    context, batches = (20, (1, 2)) if smoke else (CONTEXT, BATCHES)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llm = vllm.LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=config["dtype"],
            max_model_len=256 if smoke else 4096,
            max_num_seqs=max(batches),
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=(64 << 20) if smoke else (4 << 30),
            enable_prefix_caching=False,
            compilation_config={"custom_ops": ["-rotary_embedding"]} if smoke else {},
            **options_of(arguments.one.removesuffix("!")),
        )
    randomise(llm, config["initializer_range"])
    started = time.perf_counter() - started
    lock = DeviceLock(arguments.lock)
    lock.acquire()
    engine, vocabulary = llm.llm_engine, config["vocab_size"]
    alone = [_played(engine, _prompt(number, count, vocabulary), {}) for number, count in enumerate(subjects)]
    flips, bits, longest = 0, 0, max(subjects)
    for seed in range(arguments.schedules):
        rng, number = random.Random(seed), seed % len(subjects)
        joins: dict[int, list[list[int]]] = {}
        for other in range(rng.randint(1, 6)):
            prompt = _prompt(100 + 10 * seed + other, rng.randint(1, 2 * longest), vocabulary)
            joins.setdefault(rng.randrange(NEW_TOKENS - 2), []).append(prompt)
        tokens, values = _played(engine, _prompt(number, subjects[number], vocabulary), joins)
        flips += tokens != alone[number][0]
        bits += (tokens, values) != alone[number]
    points = points_of("llama", list(batches), [context])
    clock, ladder = Clock(120, lambda: None, DeviceLock(None)), Ladder(llm, vocabulary, context)
    for point in sorted(points, key=lambda point: -point.batch):
        clock.record(point, partial(ladder.measure, point, clock))
    ladder.end()
    times = {str(point.batch): round(point.found.get("step_us", float("nan")), 1) for point in points}
    return {"schedules": arguments.schedules, "flips": flips, "bits": bits, "step_us": times, "start_s": started}


def _prompt(number: int, tokens: int, vocabulary: int) -> list[int]:
    rng = random.Random(f"{number} {tokens}")
    return [rng.randrange(vocabulary) for _ in range(tokens)]


def _played(engine: Any, prompt: list[int], joins: dict[int, list[list[int]]]) -> tuple[list[int], list[float]]:
    """Tokens and log probabilities of a request, while others join it before the steps of ``joins``."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=1)
    engine.add_request("watched", {"prompt_token_ids": prompt}, params)
    step, others, done = 0, 0, None
    while engine.has_unfinished_requests():
        for other in joins.get(step, ()):
            engine.add_request(f"other {others}", {"prompt_token_ids": other}, params)
            others += 1
        step += 1
        for output in engine.step():
            if output.finished and output.request_id.startswith("watched"):
                done = output.outputs[0]
    if done is None:
        raise RuntimeError("the request that is watched did not finish")
    tokens = list(done.token_ids)
    return tokens, [each[token].logprob for each, token in zip(done.logprobs, tokens, strict=True)]


if __name__ == "__main__":
    main()
