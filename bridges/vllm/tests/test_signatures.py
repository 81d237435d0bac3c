"""Calls in both directions, checked against vLLM's sources at both ends of the range of versions.

vLLM is read, not imported: it is large. ``make bridge-test`` runs 0.32, the newest for a CPU.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from attnplug_vllm.host import HOST
from vllm_sources import OURS, VERSIONS, Sources, ours, takes_what_is_given, tree

BACKEND = "vllm.v1.attention.backend"
BASES = {
    "AttnplugBackend": ("AttentionBackend",),
    "AttnplugImpl": ("AttentionImpl", "AttentionImplBase"),
    "AttnplugBuilder": ("AttentionMetadataBuilder",),
}


@pytest.fixture(params=VERSIONS)
def vllm(request: pytest.FixtureRequest) -> Sources:
    return Sources.of(request.param)


def test_the_versions_read_are_the_ends_of_the_range_and_the_one_that_runs():
    assert all(SpecifierSet(HOST.versions).contains(version) for version in VERSIONS)
    assert [version.split(".")[1] for version in VERSIONS] == ["26", "32", "33"]
    assert not SpecifierSet(HOST.versions).contains("0.25.9") and not SpecifierSet(HOST.versions).contains("0.34")


@pytest.mark.parametrize("name", BASES)
def test_our_methods_take_what_vllm_gives(vllm, name):
    mine = ours("mha", name).methods
    common = set()
    for base in BASES[name]:
        theirs = vllm.klass(BACKEND, base).methods
        for method in mine.keys() & theirs.keys():
            takes_what_is_given(mine[method], theirs[method])
            common.add(method)
    assert len(common) >= 3, "methods of vLLM's that we define"


def imports_of_vllm(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
            for alias in node.names:
                yield node.module, alias.name


@pytest.mark.parametrize("path", sorted(OURS.glob("*.py")), ids=lambda path: path.stem)
def test_what_we_import_is_there(vllm, path):
    for module, name in imports_of_vllm(path):
        if (module, name) == ("vllm.v1.attention.backends.utils", "get_kv_cache_layout"):
            continue  # asked for by versions that have it: see below
        if module == "vllm" and name == "__version__":
            assert "__version__" in vllm.names("vllm")
        else:
            assert name in vllm.names(module), f"{module} has no {name}"


def test_the_layout_is_asked_for_by_versions_that_have_the_hook_for_shapes(vllm):
    hook = "get_kv_cache_shape" in vllm.klass(BACKEND, "AttentionBackend").methods
    assert hook == ("get_kv_cache_layout" in vllm.names("vllm.v1.attention.backends.utils"))
    assert hook or "supported_kv_cache_layouts" in vllm.klass(BACKEND, "AttentionBackend").methods


METADATA = (
    "query_start_loc",
    "query_start_loc_cpu",
    "seq_lens",
    "num_reqs",
    "num_actual_tokens",
    "max_query_len",
    "max_seq_len",
    "block_table_tensor",
    "slot_mapping",
    "causal",
    "seq_lens_cpu_upper_bound",
    "replace",
)
CONFIGS = {
    ("vllm.config.parallel", "ParallelConfig"): (
        "tensor_parallel_size",
        "rank",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "use_ubatching",
    ),
    ("vllm.config.cache", "CacheConfig"): ("block_size", "user_specified_block_size", "kv_sharing_fast_prefill"),
    ("vllm.config.scheduler", "SchedulerConfig"): ("max_num_seqs", "max_num_batched_tokens", "async_scheduling"),
    ("vllm.config.compilation", "CompilationConfig"): (
        "cudagraph_mode",
        "max_cudagraph_capture_size",
        "static_forward_context",
    ),
    ("vllm.config.compilation", "CUDAGraphMode"): ("has_full_cudagraphs",),
    ("vllm.config.attention", "AttentionConfig"): ("backend", "use_non_causal"),
    ("vllm.config.speculative", "SpeculativeConfig"): ("num_speculative_tokens",),
    ("vllm.config.model", "ModelConfig"): (
        "model",
        "dtype",
        "max_model_len",
        "hf_text_config",
        "is_mm_prefix_lm",
        "use_mla",
        "rswa_window",
    ),
    ("vllm.config.vllm", "VllmConfig"): (
        "additional_config",
        "attention_config",
        "compilation_config",
        "speculative_config",
    ),
    ("vllm.model_executor.layers.attention.attention", "Attention"): (
        "kv_cache",
        "impl",
        "head_size_v",
        "kv_cache_dtype",
    ),
    ("vllm.platforms.interface", "Platform"): ("is_cuda", "is_cpu", "get_device_capability", "device_name"),
    ("vllm.platforms.interface", "DeviceCapability"): ("major", "minor"),
    ("vllm.v1.attention.backends.registry", "AttentionBackendEnum"): ("get_path", "is_overridden"),
}


def test_a_steps_metadata_has_what_we_read(vllm):
    assert set(METADATA) <= vllm.klass(BACKEND, "CommonAttentionMetadata").members


@pytest.mark.parametrize(("module", "name"), CONFIGS, ids=lambda part: part.split(".")[-1])
def test_configurations_and_layers_have_what_we_read(vllm, module, name):
    assert not set(CONFIGS[module, name]) - vllm.klass(module, name).members


def test_scales_of_a_layer_are_numbers_on_the_host(vllm):
    text = vllm.file("vllm.model_executor.layers.attention.attention").read_text()
    assert "layer._k_scale_float = 1.0" in text and "layer._v_scale_float = 1.0" in text


def test_our_calls_bind_to_vllms_functions(vllm):
    builder = vllm.klass(BACKEND, "AttentionMetadataBuilder").methods
    builder["__init__"].bind(..., ..., ..., ...)
    builder["_init_reorder_batch_threshold"].bind(..., supports_spec_as_decode=...)
    levels = {"NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH"}
    body = vllm.klass(BACKEND, "AttentionCGSupport").node.body
    assert levels <= {target.id for node in body if isinstance(node, ast.Assign) for target in node.targets}


def test_vllm_gives_a_layers_constructor_ten_values_by_place_and_the_rest_by_name(vllm):
    text = vllm.file("vllm.model_executor.layers.attention.attention").read_text()
    call = text[text.index("self.impl = impl_cls(") :].partition("**extra_impl_args")[0]
    given = [line.strip(" ,") for line in call.splitlines()[1:] if line.strip()]
    assert given == list(ours("mha", "AttnplugImpl").methods["__init__"].parameters)[: len(given)]


def test_members_that_the_cpu_platform_takes_are_in_the_registry(vllm):
    members = vllm.names("vllm.v1.attention.backends.registry")
    assert {"CUSTOM", "CPU_ATTN"} <= members
