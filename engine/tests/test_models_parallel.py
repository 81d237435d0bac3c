"""Tensor parallelism: ranks give the logits of one process, with the minimum of collectives."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from quantized_checkpoints import FILE, fp8_blocks, quantized
from safetensors.torch import load_file, save_file
from thread_ranks import Threads, in_ranks
from torch.testing import assert_close

from attnplug import UsageError
from attnplug.host import TINY_CONFIGS
from attnplug.host import load_model as load_spec
from attnplug_engine.engine import Engine
from attnplug_engine.models.architectures import load_model, open_source, rank_counts
from attnplug_engine.models.architectures import load_spec as engine_spec
from attnplug_engine.parallel.collectives import (
    ParallelError,
    ProcessGroupParallel,
    even_part,
    kv_head_part,
    padded_part,
)
from attnplug_testing.errors import having

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
    "glm_moe_dsa": {},
}


@pytest.mark.parametrize(("case", "size"), [*((case, 2) for case in MODELS), ("llama, biases", 4), ("deepseek_v3", 4)])
@pytest.mark.sample(3)
def test_every_rank_gets_the_logits_of_one_process(case, size, make_oracle, make_stage, sequences):
    oracle = make_oracle(case.split(",")[0], **MODELS[case])

    def run(parallel):
        loaded = load_model(str(oracle.folder), dtype=torch.float32, device="cpu", parallel=parallel)
        return make_stage(loaded, len(sequences)).run(sequences, DECODED)

    wanted = [oracle.logits(tokens) for tokens in sequences]
    for found in in_ranks(size, run):
        for logits, expected in zip(found, wanted, strict=True):
            assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "glm_moe_dsa"])
def test_a_step_reduces_twice_per_layer_and_gathers_once(name, make_stage, sequences):
    def run(parallel):
        loaded = load_model(f"tiny:{name}", dtype=torch.float32, device="cpu", parallel=parallel)
        make_stage(loaded, 1).step(sequences[:1])
        return parallel.calls, len(loaded.spec.layers)

    for calls, layers in in_ranks(2, run):
        assert calls == ["all_reduce"] * 2 * layers + ["all_gather"]


def test_the_layers_that_run_are_those_of_the_ranks_model():
    """A layer passes its backend the layer spec that the backend was built for."""
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
    with pytest.raises(ParallelError) as caught:
        load_model(str(oracle.folder), dtype=torch.float32, device="cpu", parallel=Threads(size).rank(0))
    assert (caught.value.what, caught.value.size) == (what, size)


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_rank_counts_are_those_that_can_load_the_model(name):
    reference = f"tiny:{name}"
    counts = rank_counts(open_source(reference, device="cpu"), engine_spec(reference))
    for size in (2, 4, 8):
        try:
            load_model(reference, dtype=torch.float32, device="cpu", parallel=Threads(size).rank(size - 1))
        except UsageError:
            assert size not in counts
        else:
            assert size in counts


# Of 8 heads: attention outputs have 4 blocks of 64 columns, MLPs have 6.
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "hidden_size": 64}


@pytest.mark.parametrize("scheme", ["all", "stored without MLPs"])
def test_rank_counts_of_a_base_model_are_those_that_can_load_it(scheme, make_oracle, tmp_path):
    """E5: tensor names without ``model.``, and weights that are plain although the config does not exclude them."""
    excluded = "lm_head" if scheme == "all" else r"lm_head|mlp"
    folder = make_oracle("llama", intermediate_size=384, **HEADS).folder
    config = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    quantized(folder, tmp_path, config, fp8_blocks(64, 64), excluded)
    tensors = load_file(tmp_path / FILE)
    base = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if not name.startswith("lm_head")}
    save_file(base, tmp_path / FILE)
    source, spec = open_source(str(tmp_path), device="cpu"), engine_spec(str(tmp_path))
    loads = []
    for size in range(1, 9):
        with suppress(UsageError):
            for rank in range(size):
                parallel = Threads(size).rank(rank)
                load_model(str(tmp_path), dtype=torch.float32, device="cpu", parallel=parallel, head=False)
            loads.append(size)
    assert rank_counts(source, spec) == loads == ([1, 2] if scheme == "all" else [1, 2, 4])


def test_the_rank_counts_of_refused_heads_are_those_that_all_weights_allow(make_oracle, tmp_path):
    """E5: 8 heads can be divided over 8 ranks, and 4 blocks of attention outputs cannot."""
    folder = make_oracle("llama", intermediate_size=384, **HEADS).folder
    config = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    quantized(folder, tmp_path, config, fp8_blocks(64, 64))
    with pytest.raises(ParallelError, check=having(size=3, fitting=(1, 2))):
        Engine(str(tmp_path), device="cpu", parallel=Threads(3).rank(0))


def test_parts_are_neighbours_and_leave_nothing_out():
    four = [Threads(4).rank(rank) for rank in range(4)]
    assert [even_part(8, rank, "heads") for rank in four] == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    assert [kv_head_part(2, rank) for rank in four] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]
    assert [padded_part(10, rank)[0] for rank in four] == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 10)]
    assert [padded_part(4, rank)[0] for rank in [Threads(3).rank(2)]] == [slice(4, 4)]


def test_a_device_type_without_collectives_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="privateuseone"):
        ProcessGroupParallel.join("privateuseone", rank=0, size=1, init_method=f"file://{tmp_path / 'meeting'}")
    assert not dist.is_initialized()


def test_a_group_is_joined_where_the_caller_says_and_ends_with_its_owner(tmp_path):
    """A group of one rank; the command's own test has two, each a process."""
    parallel = ProcessGroupParallel.join("cpu", rank=0, size=1, init_method=f"file://{tmp_path / 'meeting'}")
    given = ProcessGroupParallel(dist.group.WORLD)
    assert (parallel.rank, parallel.size) == (given.rank, given.size) == (0, 1)
    assert parallel.all_reduce(torch.arange(4).view(2, 2).T).tolist() == [[0, 2], [1, 3]]
    assert parallel.all_gather(torch.arange(4).view(2, 2), 1).tolist() == [[0, 1], [2, 3]]
    given.close()
    assert dist.is_initialized()
    parallel.close()
    assert not dist.is_initialized()
