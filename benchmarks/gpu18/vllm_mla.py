"""vLLM 0.26.0 on the H200, MLA (16 heads): ours against vLLM's own backends; logprobs close, PASS or FAIL.

python benchmarks/gpu18/vllm_mla.py [--cases own,graphs,eager,...] [--jobs 3]
Each case is a process (40 to 90 s a start); by default the first five, three at a time: about two and a half minutes.
All: own own_fp8 graphs eager chunks fa_prefill fp8 spec flashinfer flashmla auto
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

OUT = Path(os.environ.get("OUT", "/tmp/vllm_mla"))
MODEL = Path("/tmp/vllm_mla_model")
CASES = {
    "own": {"attention_backend": "FLASH_ATTN_MLA"},
    "own_fp8": {"attention_backend": "TRITON_MLA", "kv_cache_dtype": "fp8"},
    "graphs": {"ours": {"backend": "triton_mla"}},
    "eager": {"ours": {"backend": "triton_mla"}, "enforce_eager": True},
    "chunks": {"ours": {"backend": "triton_mla", "prefill": "flashinfer_mla"}, "max_num_batched_tokens": 256, "max_num_seqs": 16},
    "fa_prefill": {"ours": {"backend": "triton_mla", "prefill": "flashattention"}, "max_num_batched_tokens": 512},
    "fp8": {"ours": {"backend": "triton_mla"}, "kv_cache_dtype": "fp8"},
    "spec": {
        "ours": {"backend": "triton_mla"},
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    },
    "flashinfer": {"ours": {"backend": "flashinfer_mla"}},
    "flashmla": {"ours": {"backend": "flashmla"}},
    "auto": {"ours": {"backend": "auto"}},
}
DEFAULT = "own,graphs,eager,chunks,fp8,own_fp8"
NEW = 40
TOLERANCE = {"fp8": 0.35}
ENV = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
}


def make_model() -> None:
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=4096, hidden_size=1024, intermediate_size=2048, moe_intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512, q_lora_rank=768, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=8, n_shared_experts=1, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=4, max_position_embeddings=8192, initializer_range=0.06,
        tie_word_embeddings=False,
    )  # fmt: skip
    DeepseekV3ForCausalLM(config).to(torch.bfloat16).save_pretrained(MODEL)


def prompts() -> list[list[int]]:
    import random

    r = random.Random(1)
    first = [[r.randrange(4096) for _ in range(n)] for n in (5, 17, 33, 64, 129, 300, 777, 1500)]
    shared = [r.randrange(4096) for _ in range(600)]
    again = [shared + [r.randrange(4096) for _ in range(n)] for n in (3, 10, 64, 1)]
    repeating = [[r.randrange(4096) for _ in range(9)] * 12 for _ in range(4)]
    return first + again + again + repeating


def run(case: str) -> None:
    options = dict(CASES[case])
    ours = options.pop("ours", None)
    if ours:
        options |= {"attention_backend": "CUSTOM", "additional_config": {"attnplug": ours}}
    import torch
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    llm = LLM(
        str(MODEL), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048, gpu_memory_utilization=0.2, seed=0,
        kv_cache_memory_bytes=4 << 30, **{"max_num_seqs": 16, **options},
    )  # fmt: skip
    found: dict = {"start_s": round(time.perf_counter() - started, 1)}
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    builder = runner.attn_groups[0][0].get_metadata_builder()
    found["builder"], found["block_size"] = type(builder).__name__, builder.kv_cache_spec.block_size
    found["cudagraph_mode"] = str(runner.compilation_config.cudagraph_mode)
    found["captured"] = len(getattr(getattr(builder, "_decode", None), "_batches", ()))
    layer = next(l for l in runner.compilation_config.static_forward_context.values() if hasattr(l, "impl"))
    found["impl"], found["prefill"] = type(layer.impl).__name__, type(builder._prefill_backend).__name__
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=2)
    given = prompts()
    outs = []
    for part in (given[:8], given[8:12], given[12:16], given[16:]):
        outs += llm.generate([{"prompt_token_ids": p} for p in part], params, use_tqdm=False)
    found["tokens"] = [list(o.outputs[0].token_ids) for o in outs]
    found["logprobs"] = [
        [sorted(((t, v.logprob) for t, v in step.items()), key=lambda one: -one[1])[:2] for step in o.outputs[0].logprobs]
        for o in outs
    ]
    # time of steady decode, and of the builder
    long = [{"prompt_token_ids": given[7]}] * 1
    llm.generate(long, params, use_tqdm=False)
    torch.cuda.synchronize()
    seconds, build = [], builder.build

    def timed(*a, **k):
        t = time.perf_counter()
        made = build(*a, **k)
        seconds.append(time.perf_counter() - t)
        return made

    builder.build = timed
    t = time.perf_counter()
    llm.generate(long, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, detokenize=False), use_tqdm=False)
    found["step_us"] = round(1e6 * (time.perf_counter() - t) / 400, 1)
    found["build_us"] = round(1e6 * sorted(seconds)[len(seconds) // 2], 1)
    (OUT / f"vllm_mla.{case}.json").write_text(json.dumps(found))


def compare(case: str, mine: dict, own: dict) -> tuple[bool, str]:
    """Chosen tokens' logprobs while both follow one path; where they part, both must have been nearly equal."""
    tolerance = next((t for key, t in TOLERANCE.items() if key in case), 0.12)
    worst, parted, wrong = 0.0, 0, []
    for number, (a, b) in enumerate(zip(mine["logprobs"], own["logprobs"], strict=True)):
        for place, (x, y) in enumerate(zip(a, b, strict=True)):
            if x[0][0] != y[0][0]:
                parted += 1
                margin = y[0][1] - y[1][1]
                if margin > tolerance:
                    wrong.append(f"request {number} token {place}: margin {margin:.3f}")
                break
            worst = max(worst, abs(x[0][1] - y[0][1]))
    good = worst <= tolerance and not wrong
    return good, f"largest difference {worst:.4f}, {parted} of {len(mine['tokens'])} part at near ties {wrong[:3] or ''}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=DEFAULT)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--one")
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    os.environ.update(ENV)
    if arguments.one:
        try:
            run(arguments.one)
        except BaseException:
            (OUT / f"vllm_mla.{arguments.one}.json").write_text(json.dumps({"error": traceback.format_exc()[-3000:]}))
            raise
        return
    if not MODEL.exists():
        make_model()
    cases = list(CASES) if arguments.cases == "all" else arguments.cases.split(",")
    waiting, running = list(cases), {}
    while waiting or running:
        while waiting and len(running) < arguments.jobs:
            case = waiting.pop(0)
            log = (OUT / f"vllm_mla.{case}.log").open("w")
            running[case] = subprocess.Popen([sys.executable, __file__, "--one", case], stdout=log, stderr=log)
            time.sleep(3)
        for case, process in list(running.items()):
            if process.poll() is not None:
                del running[case]
                print(f"{case}: ended with {process.returncode}", flush=True)
        time.sleep(0.5)
    read = lambda case: json.loads(path.read_text()) if (path := OUT / f"vllm_mla.{case}.json").exists() else {"error": "no result"}
    found = {case: read(case) for case in cases}
    summary = {}
    for case, mine in found.items():
        own = found.get("own_fp8" if case in ("fp8", "own_fp8") else "own", {})
        if "error" in mine:
            print(f"FAIL {case}: {mine['error'].strip().splitlines()[-1][:300]}")
            summary[case] = {"error": mine["error"]}
            continue
        told = {k: v for k, v in mine.items() if k not in ("tokens", "logprobs")}
        if "tokens" not in own:
            print(f"---- {case}: nothing to compare with {told}")
        else:
            good, text = compare(case, mine, own)
            if case in ("graphs", "fp8", "spec", "flashinfer", "flashmla") and not mine["captured"]:
                good, text = False, text + "; nothing was captured"
            print(f"{'PASS' if good else 'FAIL'} {case}: {text}; {told}")
            told |= {"pass": good, "text": text}
        summary[case] = told
    (OUT / "vllm_mla.json").write_text(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
