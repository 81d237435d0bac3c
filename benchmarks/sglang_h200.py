r"""Tokens of SGLang with our backends and with its own, on random checkpoints, compared with transformers.

python benchmarks/sglang_h200.py OUT.jsonl [SECONDS] [AT_ONCE] [ONLY]
CASE_SECONDS=400 python benchmarks/sglang_h200.py OUT.jsonl 560 5 \
    "attnplug:auto True,attnplug:flashmla True,attnplug:flashinfer True,attnplug:flashinfer_mla True"

The second command runs five engines at a time, with CUDA graphs. CASE_SECONDS limits one configuration: the first use
of FlashInfer compiles for minutes.

Each configuration is an engine in a separate process, with three batches of eight prompts: "none" (nothing cached),
"repeated" (the same prompts, from the prefix cache) and "extended" (each prompt with 40 tokens more). Each batch is a
line of JSON.

A token is right if it is transformers' greedy one in bfloat16 after the same tokens; or a near tie: in float32 its
logit is below the best by no more than twice the largest error that bfloat16 makes in transformers' own logits of that
sequence. Every position is compared given SGLang's own preceding tokens, so one near tie does not end the comparison.

SGLang starts processes that import this file again, so everything is below the guard.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

TOKENS, VOCAB, MORE = 32, 8000, 40
LENGTHS = (5, 17, 64, 130, 33, 7, 259, 400)
EACH = float(os.environ.get("CASE_SECONDS", "150"))
DEVICE = "cuda"
SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
OF_DEEPSEEK = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1}


# checkpoints


def make(name: str) -> Any:
    import transformers as t

    grouped = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**SHARED, **grouped, tie_word_embeddings=False))
    if name == "gemma2":
        return t.Gemma2ForCausalLM(
            t.Gemma2Config(
                **SHARED,
                **grouped,
                sliding_window=64,
                query_pre_attn_scalar=64,
                hidden_act="gelu_pytorch_tanh",
                pad_token_id=0,
            )
        )
    dims = {"kv_lora_rank": 512, "q_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    # All four experts are selected: a near tie of the router would change tokens more than rounding.
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    rest = {"moe_intermediate_size": 256, "first_k_dense_replace": 3, "tie_word_embeddings": False}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return t.DeepseekV3ForCausalLM(
        t.DeepseekV3Config(**SHARED, **dims, **experts, **rest, **heads, rope_parameters=rope)
    )


def save(name: str, folder: Path) -> Path:
    import torch

    torch.manual_seed(0)
    model = make(name)
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1:
            # Scores of about 1: larger ones make bfloat16's errors large, smaller ones make attention an average.
            small = {"down_proj": 0.02, "self_attn.q_proj": 0.03, "self_attn.k_proj": 0.03}
            torch.nn.init.normal_(parameter, std=next((std for part, std in small.items() if part in key), 0.05))
    target = folder / name
    model.to(torch.bfloat16).save_pretrained(target)
    if name == "deepseek":
        config = target / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **OF_DEEPSEEK}))
    return target


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB) for _ in range(count)] for count in LENGTHS]


def batches() -> dict[str, list[list[int]]]:
    rng = random.Random(1)
    longer = [prompt + [rng.randrange(3, VOCAB) for _ in range(MORE)] for prompt in prompts()]
    return {"none": prompts(), "repeated": prompts(), "extended": longer}


# one engine


def serve(folder: str, given: dict[str, Any]) -> None:
    import sglang

    print("STARTING", sglang.__version__, flush=True)
    begun = time.monotonic()
    settings: dict[str, Any] = {
        "model_path": folder,
        "load_format": "auto",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        # max_total_tokens limits the cache. SGLang leaves free the rest of the memory that was free before it loaded
        # the model; other engines take of it meanwhile.
        "mem_fraction_static": 0.85,
        "max_total_tokens": 20032,
        "max_running_requests": 16,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "cuda_graph_max_bs_decode": 8,
        "cuda_graph_backend_prefill": "disabled",
        "log_level": "warning",
        **given,
    }
    if settings["disable_cuda_graph"]:
        settings.pop("cuda_graph_max_bs_decode")
        settings.pop("cuda_graph_backend_prefill")
    engine = sglang.Engine(**settings)
    print("START_SECONDS", round(time.monotonic() - begun, 1), flush=True)
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    for prefix, batch in batches().items():
        begun = time.monotonic()
        answers = engine.generate(input_ids=batch, sampling_params=sampling)
        line = {
            "prefix": prefix,
            "seconds": round(time.monotonic() - begun, 2),
            "tokens": [answer["output_ids"] for answer in answers],
            "cached": [answer["meta_info"].get("cached_tokens") for answer in answers],
        }
        print("RESULT " + json.dumps(line), flush=True)
    engine.shutdown()


# transformers


class Reference:
    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch

        def load(dtype: Any) -> Any:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
            return model.to(DEVICE).eval()

        self.half, self.full = load(torch.bfloat16), load(torch.float32)
        self.greedy = {prefix: [self._generate(prompt) for prompt in batch] for prefix, batch in batches().items()}

    def _generate(self, prompt: list[int]) -> list[int]:
        given = self.torch.tensor([prompt], device=DEVICE)
        out = self.half.generate(
            given,
            attention_mask=self.torch.ones_like(given),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    def check_tokens(self, prefix: str, tokens: list[list[int]]) -> dict[str, Any]:
        torch = self.torch
        ties, wrong, worst, allowed = 0, [], 0.0, 0.0
        for index, (prompt, found) in enumerate(zip(batches()[prefix], tokens, strict=True)):
            if len(found) != TOKENS:
                wrong.append({"prompt": index, "tokens": len(found)})
                continue
            given = torch.tensor([prompt + found[:-1]], device=DEVICE)
            with torch.no_grad():
                half = self.half(given).logits[0, len(prompt) - 1 :].float()
                full = self.full(given).logits[0, len(prompt) - 1 :].float()
            tolerance = 2 * (half - full).abs().max().item()
            chosen = torch.tensor(found, device=DEVICE)
            gap = full.max(-1).values - full.gather(1, chosen[:, None])[:, 0]
            other = half.argmax(-1) != chosen
            allowed = max(allowed, tolerance)
            for place in other.nonzero()[:, 0].tolist():
                worst = max(worst, gap[place].item())
                if gap[place].item() <= tolerance:
                    ties += 1
                else:
                    wrong.append(
                        {
                            "prompt": index,
                            "place": place,
                            "gap": round(gap[place].item(), 4),
                            "tolerance": round(tolerance, 4),
                        }
                    )
        return {
            "equal": tokens == self.greedy[prefix],
            "prompts_equal": sum(one == other for one, other in zip(tokens, self.greedy[prefix], strict=True)),
            "accepted_near_ties": ties,
            "wrong": len(wrong),
            "first_wrong": wrong[:3],
            "worst_gap": round(worst, 4),
            "largest_tolerance": round(allowed, 4),
            "positions": sum(map(len, tokens)),
            "distinct_tokens": len({token for found in tokens for token in found}),
        }


# cases


def cases(only: list[str]) -> list[dict[str, Any]]:
    def case(
        model: str, backend: str, graphs: bool = True, page: int = 1, chunk: int | None = None, **more: Any
    ) -> dict[str, Any]:
        return {"model": model, "backend": backend, "graphs": graphs, "page_size": page, "chunk": chunk, "more": more}

    llama, mla, gemma = "llama", "deepseek", "gemma2"
    torch_kernel = {"env": {"ATTNPLUG_OPTIONS": "flashattention.kernel=torch"}}
    found = [
        case(llama, "attnplug:triton_mha"),
        case(mla, "attnplug:triton_mla"),
        case(llama, "triton"),
        case(mla, "triton"),
        case(llama, "attnplug:triton_mha", page=16, chunk=64),
        case(mla, "attnplug:triton_mla", page=16, chunk=64),
        case(llama, "attnplug:auto"),
        case(mla, "attnplug:auto", page=64),
        case(mla, "attnplug:flashmla", page=64),
        case(llama, "attnplug:flashinfer"),
        case(mla, "attnplug:flashinfer_mla"),
        case(llama, "attnplug:flashattention", **torch_kernel),
        case(llama, "attnplug:triton_mha", graphs=False),
        case(mla, "attnplug:triton_mla", graphs=False),
        case(llama, "fa3"),
        case(llama, "flashinfer"),
        case(mla, "flashinfer"),
        case(mla, "flashmla", page=64),
        case(llama, "attnplug:flashattention", graphs=False, **torch_kernel),
        case(gemma, "attnplug:triton_mha"),
        case(gemma, "triton"),
        case(llama, "attnplug:flashinfer", graphs=False),
        case(mla, "attnplug:flashinfer_mla", graphs=False),
        case(mla, "attnplug:flashmla", graphs=False, page=64),
        case(llama, "attnplug:auto", graphs=False),
        case(mla, "attnplug:auto", graphs=False),
        case(llama, "attnplug:triton_mha", engine={"cuda_graph_backend_prefill": "breakable"}),
        case(mla, "attnplug:triton_mla", env={"SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD": "1"}, chunk=64),
        case(llama, "triton", graphs=False),
        case(mla, "triton", graphs=False),
    ]
    found = [one for one in found if any(part in _text(one) for part in only)]
    if not has_fa3():
        found = [one for one in found if one["backend"] != "fa3"]
    return found


def _text(case: dict[str, Any]) -> str:
    return " ".join(str(case[key]) for key in ("model", "backend", "graphs", "page_size", "chunk"))


def has_fa3() -> bool:
    """True if SGLang's optional FlashAttention 3 is installed; otherwise sgl_kernel has no flash_ops."""
    return any((Path(entry) / "sgl_kernel" / "flash_ops.abi3.so").is_file() for entry in sys.path)


class Running:
    """One engine in a separate session, so that all its processes can be found and ended."""

    def __init__(self, case: dict[str, Any], folder: Path, work: Path, number: int, limit: float) -> None:
        given = {
            "attention_backend": case["backend"],
            "page_size": case["page_size"],
            "disable_cuda_graph": not case["graphs"],
            "port": 31000 + 500 * (number % 40),
            **case["more"].get("engine", {}),
        }
        if case["chunk"]:
            given["chunked_prefill_size"] = case["chunk"]
        self.case, self.begun, self.limit = case, time.monotonic(), limit
        self.log = work / f"{number}.log"
        command = [sys.executable, "-u", __file__, "--serve", str(folder), json.dumps(given)]
        env = {**os.environ, **case["more"].get("env", {})}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ended(self) -> bool:
        return self.process.poll() is not None or self.elapsed() > self.limit

    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    def end(self) -> None:
        end_session(self.process)

    def lines(self, reference: Reference) -> list[dict[str, Any]]:
        text = self.log.read_text(errors="replace")
        case, rows = self.case, []
        shared = {key: case[key] for key in ("model", "backend", "graphs", "page_size", "chunk")}
        if case["more"]:
            shared["more"] = case["more"]
        start = [line.split()[1] for line in text.splitlines() if line.startswith("START_SECONDS")]
        if start:
            shared["start_seconds"] = float(start[0])
        for line in text.splitlines():
            if line.startswith("RESULT "):
                result = json.loads(line[7:])
                verdict = reference.check_tokens(result["prefix"], result["tokens"])
                rows.append(
                    {
                        **shared,
                        "prefix": result["prefix"],
                        "cached": result["cached"],
                        **verdict,
                        "seconds": result["seconds"],
                        "error": None,
                    }
                )
        if len(rows) < len(batches()):
            late = self.elapsed() > self.limit
            error = (f"over {self.limit:.0f} s; " if late else f"rc {self.process.returncode}; ") + reason(text)
            missing = list(batches())[len(rows)]
            rows.append(
                {
                    **shared,
                    "prefix": missing,
                    "equal": None,
                    "accepted_near_ties": None,
                    "seconds": round(self.elapsed(), 1),
                    "error": error,
                }
            )
        return rows


def reason(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("RESULT ")]
    named = [
        at for at, line in enumerate(lines) if ("Error" in line or "Exception" in line) and not line.startswith(" ")
    ]
    first = " | ".join(line.strip()[:300] for line in lines[named[0] : named[0] + 4]) if named else ""
    return (first + " … " + " | ".join(line.strip()[:300] for line in lines[-6:]))[-2500:]


def end_session(leader: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a session."""
    for _ in range(20):
        alive = members(leader.pid)
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        leader.poll()
        if not alive:
            return
        time.sleep(0.25)


def members(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("seconds", type=float, nargs="?", default=1500.0, help="for all configurations")
    parser.add_argument("at_once", type=int, nargs="?", default=1, help="engines that run at a time")
    only = "comma-separated parts of 'model backend graphs page chunk'; matching configurations run"
    parser.add_argument("only", nargs="?", default="", help=only)
    parsed = parser.parse_args()
    out, at_once, end = parsed.out, parsed.at_once, time.monotonic() + parsed.seconds
    work = Path(os.environ.get("BRIDGE_WORK") or tempfile.mkdtemp(prefix="sglang-bridge-"))
    logs = Path(os.environ.get("BRIDGE_LOGS") or work)
    logs.mkdir(parents=True, exist_ok=True)
    waiting = list(enumerate(cases(parsed.only.split(","))))
    folders = {name: save(name, work) for name in dict.fromkeys(case["model"] for _, case in waiting)}
    print("checkpoints in", work, "logs in", logs, flush=True)
    references: dict[str, Reference] = {}
    running: list[Running] = []
    while waiting or running:
        left = end - time.monotonic()
        if left < 5 and not running:
            break
        if waiting and len(running) < at_once and left > 45:
            number, case = waiting.pop(0)
            running.append(Running(case, folders[case["model"]], logs, number, min(EACH, left - 10)))
        elif waiting and not running and left <= 45:
            break
        for name in {one.case["model"] for one in running} - references.keys():
            references[name] = Reference(folders[name])  # while the first engine of that model starts
        for one in [one for one in running if one.ended()]:
            running.remove(one)
            one.end()
            rows = one.lines(references[one.case["model"]])
            with out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            for row in rows:
                keys = (
                    "model",
                    "backend",
                    "graphs",
                    "page_size",
                    "chunk",
                    "prefix",
                    "equal",
                    "prompts_equal",
                    "accepted_near_ties",
                    "wrong",
                    "seconds",
                )
                print({key: row.get(key) for key in keys}, (row["error"] or "")[:300], flush=True)
        time.sleep(0.3)
    with out.open("a") as file:
        for _, case in waiting:
            shared = {key: case[key] for key in ("model", "backend", "graphs", "page_size", "chunk")}
            file.write(
                json.dumps(
                    {
                        **shared,
                        "prefix": None,
                        "equal": None,
                        "accepted_near_ties": None,
                        "seconds": 0,
                        "error": "not run: no time left",
                    }
                )
                + "\n"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main()
