"""For people who serve models: ask which backend serves a model, then run it in our engine and in transformers.

Needs attnplug-engine and attnplug-transformers, no GPU and no checkpoint. ``docs/getting-started/serve.md`` has the
commands for vLLM and SGLang.
"""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import attnplug_transformers  # noqa: F401 # registers attn_implementation="attnplug:NAME"
from attnplug import Role
from attnplug.host import TINY_CONFIGS
from attnplug_engine import Engine

BACKEND = "torch_native"


def in_our_engine() -> list[int]:
    """Generate with a tiny Llama of random weights; the engine chooses pages, batches and graphs."""
    engine = Engine("tiny:llama", attention_backend=BACKEND, device="cpu", ignore_eos=True)
    print(f"decode runs on {engine.selection.chosen(Role.DECODE).spec.name}")
    (completion,) = engine.generate(["Attention is all you need."], max_tokens=8)
    return list(completion.token_ids)


@torch.no_grad()
def in_transformers(implementation: str) -> list[int]:
    """Generate with transformers, whose attention is the same backend or its own."""
    torch.manual_seed(0)
    settings = {key: value for key, value in TINY_CONFIGS["llama"].items() if key != "model_type"}
    config = AutoConfig.for_model("llama", **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32).eval()
    prompt = torch.tensor([list(b"Attention is all you need.")])
    out = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    return list(map(int, out[0, prompt.shape[1] :]))


def main() -> None:
    print("our engine:  ", in_our_engine())
    ours, theirs = in_transformers(f"attnplug:{BACKEND}"), in_transformers("eager")
    print("transformers:", ours)
    assert ours == theirs, f"transformers' own attention gives {theirs}"
    print("the same tokens as with transformers' own attention")


if __name__ == "__main__":
    main()
