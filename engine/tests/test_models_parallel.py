"""Tensor parallelism: ranks give the logits of one process, exchange what they must and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from thread_ranks import Threads, in_ranks
from torch.testing import assert_close

from attnplug.host import TINY_CONFIGS
from attnplug.host import load_model as load_spec
from attnplug_engine.models.architectures import load_model
from attnplug_engine.parallel import ParallelError, even_part, kv_head_part, padded_part

DECODED = 8
MODELS = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, an odd vocabulary": {"vocab_size": 131},
    "qwen3": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "deepseek_v3, no query rank": {"q_lora_rank": None},
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", MODELS)
def test_every_rank_gets_the_logits_of_one_process(case, size, make_oracle, make_stage, sequences):
    oracle = make_oracle(case.split(",")[0], **MODELS[case])

    def run(parallel):
        loaded = load_model(str(oracle.folder), dtype=torch.float32, device="cpu", parallel=parallel)
        return make_stage(loaded, len(sequences)).run(sequences, DECODED)

    wanted = [oracle.logits(tokens) for tokens in sequences]
    for found in in_ranks(size, run):
        for logits, expected in zip(found, wanted, strict=True):
            assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_step_reduces_twice_per_layer_and_gathers_once(name, make_stage, sequences):
    def run(parallel):
        loaded = load_model(f"tiny:{name}", dtype=torch.float32, device="cpu", parallel=parallel)
        make_stage(loaded, 1).step(sequences[:1])
        return parallel.calls, len(loaded.spec.layers)

    for calls, layers in in_ranks(2, run):
        assert calls == ["all_reduce"] * 2 * layers + ["all_gather"]


def test_the_layers_that_run_are_those_of_the_ranks_model():
    """What a layer gives to its backend is what the backend was built for."""
    for name in TINY_CONFIGS:
        loaded = load_model(f"tiny:{name}", dtype=torch.float32, device="cpu", parallel=Threads(2).rank(1))
        own = [block.attention.layer for block in loaded.module.layers if hasattr(block.attention, "layer")]
        assert own == list(loaded.spec.layers), name
        whole = load_spec(f"tiny:{name}").layers
        assert [2 * layer.num_heads for layer in own] == [layer.num_heads for layer in whole], name


def test_a_rank_holds_half_of_all_that_is_divided():
    def held(parallel):
        module = load_model("tiny:deepseek_v3", dtype=torch.float32, device="cpu", parallel=parallel).module
        return {name: parameter.numel() for name, parameter in module.named_parameters()}

    (alone,), (half, _) = in_ranks(1, held), in_ranks(2, held)
    whole = ("norm", "embedding", "router", "attention.down")
    for name, size in alone.items():
        assert half[name] == (size if any(part in name for part in whole) else size // 2), name


@pytest.mark.parametrize(
    ("size", "changes", "what"),
    [
        (3, {}, "attention heads"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 16}, "KV heads"),
        (2, {"intermediate_size": 97}, "MLP columns"),
    ],
)
def test_a_model_that_ranks_cannot_divide_is_refused(size, changes, what, make_oracle):
    oracle = make_oracle("llama", **{"hidden_size": 96, **changes})
    with pytest.raises(ParallelError, match=f"{what}.*{size} ranks") as caught:
        load_model(str(oracle.folder), dtype=torch.float32, device="cpu", parallel=Threads(size).rank(0))
    assert (caught.value.what, caught.value.size) == (what, size)


def test_parts_are_neighbours_and_leave_nothing_out():
    four = [Threads(4).rank(rank) for rank in range(4)]
    assert [even_part(8, rank, "heads") for rank in four] == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    assert [kv_head_part(2, rank) for rank in four] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]
    assert [padded_part(10, rank)[0] for rank in four] == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 10)]
    assert [padded_part(4, rank)[0] for rank in [Threads(3).rank(2)]] == [slice(4, 4)]


GLOO = """
import runpy, sys, torch
from attnplug_engine.models.architectures import load_model
from attnplug_engine.parallel import ProcessGroupParallel

conftest, meeting, rank, target = sys.argv[1:]
torch.set_num_threads(1)
parallel = ProcessGroupParallel.join("cpu", rank=int(rank), size=2, init_method="file://" + meeting)
stage = runpy.run_path(conftest)["Stage"]
runs = {}
for name in ("llama", "deepseek_v3"):
    loaded = load_model("tiny:" + name, dtype=torch.float32, device="cpu", parallel=parallel)
    runs[name] = stage(loaded, 2).run([[1, 2, 3, 4, 5, 6], [9, 8, 7]], 2)
torch.save(runs, target)
parallel.close()
"""


def test_two_gloo_processes_give_the_logits_of_one(tmp_path, make_stage):
    conftest = str(Path(__file__).parent / "conftest.py")
    arguments = [[conftest, str(tmp_path / "meeting"), str(rank), str(tmp_path / f"rank{rank}")] for rank in (0, 1)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen([sys.executable, "-c", GLOO, *each], env=environment, stderr=subprocess.PIPE, text=True)
        for each in arguments
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    for rank in (0, 1):
        runs = torch.load(tmp_path / f"rank{rank}", weights_only=True)
        for name, found in runs.items():
            alone = make_stage(load_model(f"tiny:{name}", dtype=torch.float32, device="cpu"), 2)
            for logits, expected in zip(found, alone.run([[1, 2, 3, 4, 5, 6], [9, 8, 7]], 2), strict=True):
                assert_close(logits, expected, atol=1e-4, rtol=0)
