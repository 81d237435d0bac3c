"""Embeddings on this backend: the way by which ``fa_skip_kv_cache`` is reached (A6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attnplug_engine import Embedder
from attnplug_testing.command import Package
from attnplug_testing.devices import DEVICES
from attnplug_testing.references.flashattention import skip_without_fa4
from attnplug_testing.rounded_oracle import DEEPSEEK_V3

GQA = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.06,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": GQA,
    "qwen3": {**GQA, "head_dim": 128},
    "mistral": {**GQA, "sliding_window": 20},
    "deepseek_v3": DEEPSEEK_V3,
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], list(range(1, 101)), [9] * 33]


ON_CPU = """
from dataclasses import replace
from attnplug import DType, hookimpl
from attnplug_flashattention import plugin as on_a_gpu

@hookimpl
def attnplug_backends():
    (spec,) = on_a_gpu.attnplug_backends()
    float32 = frozenset({DType.FLOAT32})
    can = replace(spec.capabilities, devices=frozenset({"cpu", "cuda"}), dtypes=float32, kv_dtypes=float32)
    factory = "attnplug_testing.references.flashattention:on_references"
    return [replace(spec, name="flash_on_cpu", factory=factory, check=None, capabilities=can)]
"""


@pytest.fixture
def on_cpu(package: Package) -> str:
    """The backend under another name, installed like the real one, but on reference kernels and the CPU."""
    package("flash_on_cpu", ON_CPU)
    return "flash_on_cpu"


@pytest.mark.parametrize(
    ("model", "chunk", "skips"),
    [
        ("tiny:llama", -1, True),
        ("tiny:qwen3_next", -1, True),
        ("tiny:llama", 16, False),
        ("tiny:deepseek_v3", -1, False),
    ],
)
@pytest.mark.sample(1)
def test_an_embedding_keeps_nothing_in_the_cache_unless_prompts_are_cut(on_cpu, model, chunk, skips):
    """A6: on for whole prompts, off for pieces, which find their prefix in the cache, and off for MLA."""
    embedder = Embedder(model, device="cpu", attention_backend=on_cpu, chunked_prefill_size=chunk)
    backend = embedder.runner.backend
    backend = getattr(backend, "children", {"full": backend})["full"]
    assert backend.fa_skip_kv_cache is skips
    pools = embedder.runner.pools
    caches = [] if pools.mha is None else [pools.mha.keys(layer) for layer in pools.mha.layer_ids]
    for cache in caches:
        cache.fill_(float("nan"))
    found = embedder.embed(PROMPTS)
    for cache in caches:
        assert bool(cache.isnan().all()) is skips
    for ours, native in zip(found, Embedder(model, device="cpu").embed(PROMPTS), strict=True):
        assert_close(ours.vector, native.vector, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensor]]:
    """Folder of a saved random transformers model, and its float32 outputs on the CPU for the prompts."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(1)
    config = AutoConfig.for_model(request.param, **MODELS[request.param])
    model = AutoModel.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():  # values of bfloat16; buffers, which hold the rotary frequencies, stay
            weight.copy_(weight.bfloat16())
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    with torch.inference_mode():
        return folder, [model(torch.tensor([tokens])).last_hidden_state[0, -1] for tokens in PROMPTS]


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("chunk", [-1, 48])
@pytest.mark.parametrize("checkpoint", MODELS, indirect=True)
def test_embeddings_point_where_those_of_transformers_do(checkpoint, chunk, kernel, device):
    """A6: real kernels in bfloat16 against float32."""
    if kernel == "auto":
        skip_without_fa4()
    folder, states = checkpoint
    embedder = Embedder(
        str(folder),
        device=device,
        dtype="bfloat16",
        attention_backend="flashattention",
        backend_options={"flashattention": {"kernel": kernel}},
        chunked_prefill_size=chunk,
    )
    assert embedder.runner.backend.fa_skip_kv_cache == (chunk == -1 and "deepseek" not in str(folder))
    for embedding, state in zip(embedder.embed(PROMPTS), states, strict=True):
        assert float(torch.cosine_similarity(embedding.vector, state, dim=0)) > 0.999
