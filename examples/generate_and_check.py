"""Generates on an attnplug backend and checks the tokens against Hugging Face transformers: what ``make run`` does.

Makes a tiny random DeepSeek-V3 checkpoint (MLA, mixture of experts, yarn) with transformers, runs ``attnplug run`` on
it, and lets transformers generate from the same weights. The exit code is 0 only if every token is the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from attnplug.host import TINY_CONFIGS

PROMPTS = ("Attention is all you need.", "Attention is a plan and a run.", "A page, a prefix, a chunk")
NEW_TOKENS = 48


def make_checkpoint(folder: Path) -> torch.nn.Module:
    """A random model with logits far from uniform, and a tokenizer whose tokens are ASCII characters."""
    settings = {key: value for key, value in TINY_CONFIGS["deepseek_v3"].items() if key != "model_type"}
    torch.manual_seed(0)
    config = AutoConfig.for_model("deepseek_v3", **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


@torch.no_grad()
def by_transformers(model: torch.nn.Module, prompt: str) -> list[int]:
    tokens = torch.tensor([list(prompt.encode())])
    out = model.generate(tokens, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None)
    return out[0, tokens.shape[1] :].tolist()


def by_attnplug(folder: Path) -> list[list[int]]:
    """What the command gives; what it tells people goes to the terminal as it comes."""
    lines = folder / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    command = [sys.executable, "-m", "attnplug", "run", "--model", str(folder), "--prompts", str(lines)]
    command += ["--max-tokens", str(NEW_TOKENS), "--page-size", "16", "--ignore-eos", "--json", *sys.argv[1:]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return [json.loads(line)["token_ids"] for line in done.stdout.splitlines()]


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_checkpoint(folder)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(
            f"a random DeepSeek-V3 of {parameters:,} parameters, {len(PROMPTS)} prompts, {NEW_TOKENS} new tokens each"
        )
        ours = by_attnplug(folder)
        theirs = [by_transformers(model, prompt) for prompt in PROMPTS]
    same = 0
    for prompt, mine, wanted in zip(PROMPTS, ours, theirs, strict=True):
        agree = sum(a == b for a, b in zip(mine, wanted, strict=False))
        same += mine == wanted
        print(f"{prompt!r}: {agree} of {NEW_TOKENS} tokens as transformers")
    print(f"{same} of {len(PROMPTS)} generations are the same as transformers'")
    sys.exit(0 if same == len(PROMPTS) else 1)


if __name__ == "__main__":
    main()
