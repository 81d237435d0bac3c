"""Memory of an engine: estimated and refused before weights are read, and small on the host while they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import fp8_blocks, quantized
from safetensors.torch import save_file

from attnplug import PoolError
from attnplug.host import TINY_CONFIGS
from attnplug_engine.checkpoints.safetensors import Checkpoint
from attnplug_engine.engine import Engine
from attnplug_engine.models.architectures import load_model
from attnplug_engine.quantization.scheme import QuantizedWeight
from attnplug_engine.serving import sizing
from attnplug_testing.command import Attnplug
from attnplug_testing.errors import naming

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}


@pytest.fixture
def fp8_folder(shared_oracle, tmp_path) -> Path:
    quantized(shared_oracle("llama").folder, tmp_path / "q", FP8, fp8_blocks(16, 16))
    return tmp_path / "q"


def test_the_estimate_of_weights_is_what_they_take(fp8_folder):
    plans = []
    engine = Engine(str(fp8_folder), device="cpu", dtype="bfloat16", num_pages=32, on_memory=plans.append)
    (plan,) = plans
    module = engine.runner.model
    kept = {tensor.data_ptr(): tensor.nbytes for tensor in module.parameters()}
    for part in module.modules():
        if isinstance(part, QuantizedWeight):
            kept[part.codes.data_ptr()] = part.nbytes
    assert plan.weights == pytest.approx(sum(kept.values()), rel=0.02)
    pools = engine.runner.pools.mha
    caches = sum(cache(layer).nbytes for layer in pools.layer_ids for cache in (pools.keys, pools.values))
    assert (plan.pages, plan.caches, plan.graphs) == (32, caches, 0)


@pytest.mark.parametrize(("free", "named"), [(10_000, "weights"), (200_000, "caches")])
def test_an_engine_that_cannot_fit_is_refused_before_weights_are_read(fp8_folder, monkeypatch, free, named):
    """E5"""
    monkeypatch.setattr(sizing, "available_memory", lambda: free)
    monkeypatch.setattr(Checkpoint, "tensor", lambda *_, **__: pytest.fail("a weight was read"))
    with pytest.raises(PoolError, check=naming(named, "MiB", "cpu")) as caught:
        Engine(str(fp8_folder), device="cpu", dtype="float32", num_pages=4096, page_size=16)
    assert caught.value.settings


def test_graphs_are_estimated_from_their_number_and_the_largest_step(monkeypatch):
    """Within a factor of two of what was measured on an H200: 474 to 728 MiB for 33 graphs of a 1.1B model."""
    config = {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32000}
    planned = sizing.Capacity(1, 16, 256, 4096, 4096)
    found = sizing._graph_bytes(config, 16, sizing.EngineOptions(max_batch=256), planned, torch.bfloat16)
    assert 474 / 2 < found / 2**20 < 728 * 2


@pytest.fixture
def prompts(tmp_path) -> list[str]:
    """A prompt of token ids: the checkpoint has no tokenizer."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt_token_ids": [1, 2]}')
    return ["--prompts", str(path)]


def test_the_command_prints_the_estimate(attnplug: Attnplug, fp8_folder, prompts):
    outcome = attnplug("run", "--model", str(fp8_folder), *prompts, "--num-pages", "32")
    assert "memory: weights " in outcome.err and "32 pages" in outcome.err, outcome.err


def test_the_estimate_includes_a_draft(fp8_folder):
    plans = []
    settings = {"device": "cpu", "dtype": "float32", "num_pages": 32, "on_memory": plans.append}
    Engine(str(fp8_folder), **settings)
    Engine(str(fp8_folder), **settings, speculative_algorithm="standalone", speculative_draft_model=str(fp8_folder))
    assert plans[1].weights == 2 * plans[0].weights


@pytest.mark.parametrize("of_draft", [False, True])
def test_an_unknown_scheme_is_refused_before_the_estimate(attnplug: Attnplug, fp8_folder, prompts, of_draft):
    """E5: only the error is printed."""
    config = json.loads((fp8_folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "awq"
    (fp8_folder / "config.json").write_text(json.dumps(config))
    model = ["--model", str(fp8_folder)]
    if of_draft:
        draft = ["--speculative-algorithm", "standalone", "--speculative-draft-model", str(fp8_folder)]
        model = ["--model", "tiny:llama", *draft]
    outcome = attnplug("run", *model, *prompts)
    assert outcome.code and outcome.err.startswith("error: ") and outcome.err.count("\n") == 1, outcome.err
    assert "'awq'" in outcome.err


def test_random_weights_have_no_estimate_and_say_so(fp8_folder, monkeypatch):
    plans = []
    Engine(str(fp8_folder), device="cpu", num_pages=32, random_weights=True, on_memory=plans.append)
    assert plans[0].weights is None and "random weights of unknown size" in str(plans[0])
    monkeypatch.setattr(sizing, "available_memory", lambda: 200_000)
    with pytest.raises(PoolError, check=naming("unknown")):
        Engine(str(fp8_folder), device="cpu", num_pages=4096, random_weights=True)


def test_every_tensor_is_read_once(fp8_folder, monkeypatch):
    names, read = [], Checkpoint.tensor
    monkeypatch.setattr(
        Checkpoint, "tensor", lambda self, name, *a, **k: names.append(name) or read(self, name, *a, **k)
    )
    load_model(str(fp8_folder), dtype=torch.float32, device="cpu")
    assert len(names) == len(set(names)) > 20


_LOAD = """
import sys, torch
from attnplug_engine.models.architectures import load_model

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

load_model("tiny:llama", dtype=torch.bfloat16, device="cpu")  # imports
assert "triton" not in sys.modules, "triton is imported on a CPU"
open("/proc/self/clear_refs", "w").write("5")  # resets the peak
before = status("VmRSS")
model = load_model(sys.argv[1], dtype=torch.bfloat16, device="cpu").module
print(status("VmHWM") - before - sum(weight.nbytes for weight in model.parameters()))
"""


def test_loading_keeps_no_more_on_the_host_than_the_largest_file(tmp_path):
    """E5. On a CPU the model itself comes on top. Without closing files it is their sum, here 3.9 times the largest.

    The process also shows that loading a model imports no Triton.
    """
    keys = {**TINY_CONFIGS["llama"], "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 4}
    config = keys | {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": False}
    sizes, files = {}, {}
    for layer in range(4):
        prefix = f"model.layers.{layer}"
        shapes = {f"{prefix}.self_attn.{name}_proj.weight": (512, 512) for name in "qkvo"}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (4096, 512) for name in ("gate", "up")}
        shapes |= {f"{prefix}.mlp.down_proj.weight": (512, 4096)}
        shapes |= {f"{prefix}.{name}_layernorm.weight": (512,) for name in ("input", "post_attention")}
        if layer == 0:
            vocab = TINY_CONFIGS["llama"]["vocab_size"]
            shapes |= {"model.embed_tokens.weight": (vocab, 512), "lm_head.weight": (vocab, 512)}
            shapes |= {"model.norm.weight": (512,)}
        file = f"model-{layer}.safetensors"
        save_file({name: torch.rand(shape).bfloat16() for name, shape in shapes.items()}, tmp_path / file)
        files |= dict.fromkeys(shapes, file)
        sizes[file] = (tmp_path / file).stat().st_size
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    command = [sys.executable, "-c", _LOAD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert int(done.stdout) < 1.2 * max(sizes.values())
