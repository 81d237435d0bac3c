"""The engine over KV formats of other packages: tokens, prefix hits, bytes, sparse layers, and refusals (E2)."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from attnplug import KVFormat, RowPart, UsageError
from attnplug.declare.errors import PluginError
from attnplug.kv.buffer import load_codec
from attnplug.registry import registry as registry_module
from attnplug.registry.loading import find_entry_points
from attnplug.registry.registry import installed_format
from attnplug_engine import Engine, SamplingParams
from attnplug_engine import prepare as prepare_module
from attnplug_engine.memory.capacity import bytes_per_page
from attnplug_engine.models.architectures import load_spec
from attnplug_sparse.pools import INDEX_KEYS
from attnplug_testing.errors import raises_naming
from attnplug_testing.plugins import also, entry_point, module

OPTIONS = {"device": "cpu", "page_size": 8, "ignore_eos": True}
PROMPT = "the quick brown fox jumps over the lazy dog"
SAMPLING = SamplingParams(max_tokens=6)
ACME = KVFormat(
    name="acme_int8",
    summary="int8, one float32 scale per row",
    codec="acme_int8",
    parts=(RowPart("int8"), RowPart("float32", per=None)),
    holds=frozenset({"mha", "mla", "index"}),
    error=0.02,
    page_multiple=4,
)
LATENT = replace(ACME, name="acme_latent", holds={"mla"})


def encode(rows):
    scales = (rows.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12)
    return (rows.float() / scales).round().to(torch.int8), scales


def decode(parts):
    return parts[0].float() * parts[1]


@pytest.fixture
def acme(monkeypatch):
    """Codec of a format that a plugin declares. Tests may replace its functions."""
    point, codec = entry_point("acme", "acme_plugin", "acme", "1.0"), ModuleType("acme_int8")
    monkeypatch.setitem(sys.modules, "acme_plugin", also(module(), attnplug_kv_formats=[ACME, LATENT]))
    codec.encode, codec.decode = encode, decode
    monkeypatch.setitem(sys.modules, "acme_int8", codec)
    points, broken = find_entry_points()
    monkeypatch.setattr(registry_module, "find_entry_points", lambda: ([*points, point], broken))
    # The engine's tests, if they run in the same process, keep the plugins that they found.
    monkeypatch.setattr(prepare_module, "load_registry", registry_module.load_registry)
    installed_format.cache_clear()
    yield codec
    installed_format.cache_clear()


@pytest.mark.parametrize("format", ["acme_int8", "fp8_per_token_head", "nvfp4"])
@pytest.mark.parametrize("model", ["tiny:llama", "tiny:deepseek_v3"])
@pytest.mark.sample(2)
def test_the_engine_serves_a_format_and_a_prefix_hit_gives_the_same(acme, model, format):
    engine = Engine(model, **OPTIONS, kv_dtype=format)
    first, again = (engine.generate([PROMPT], SAMPLING)[0] for _ in range(2))
    assert again.token_ids == first.token_ids and again.usage.cached_tokens > 0
    pools, spec = engine.runner.pools, load_spec(model)
    pool = pools.mha or pools.mla
    assert pool.dtype == format
    assert pools.nbytes == pool.num_pages * bytes_per_page(spec, 8, format, torch.float32)


def test_a_fine_format_gives_the_first_token_of_float32(acme):
    """The format rounds; a cache that is read incorrectly would give other tokens."""
    names = ("float32", "acme_int8")
    found = [Engine("tiny:llama", **OPTIONS, kv_dtype=name).generate([PROMPT], SAMPLING)[0] for name in names]
    assert found[0].token_ids[0] == found[1].token_ids[0]


def test_sparse_layers_keep_rows_and_index_keys_in_a_format(acme):
    engine = Engine("tiny:glm_moe_dsa", **OPTIONS, kv_dtype="acme_int8", index_dtype="acme_int8")
    first, again = (engine.generate([PROMPT], SAMPLING)[0] for _ in range(2))
    assert again.token_ids == first.token_ids and engine.runner.pools.cache(INDEX_KEYS).dtype == "acme_int8"


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"kv_dtype": "acme_int4"}, UsageError, ["acme_int4", "acme_int8", "nvfp4"]),
        ({"kv_dtype": "fp8_ds_mla"}, UsageError, ["fp8_ds_mla", "mla"]),
        ({"kv_dtype": "acme_int8", "page_size": 6}, UsageError, ["6", "4", "acme_int8"]),
        ({"kv_dtype": "acme_int8", "attention_backend": "triton_mha"}, Exception, ["triton_mha", "acme_int8"]),
        ({"index_dtype": "nvfp4"}, UsageError, ["index_dtype", "nvfp4", "acme_int8"]),
        (
            {"index_dtype": "acme_int8", "model": "tiny:glm_moe_dsa", "page_size": 6},
            UsageError,
            ["index_dtype", "6", "4"],
        ),
    ],
)
def test_what_cannot_be_served_is_refused_before_weights_are_read(acme, monkeypatch, changes, error, named):
    monkeypatch.setattr(prepare_module, "load_model", lambda *given, **settings: pytest.fail("weights were read"))
    with raises_naming(error, *named):
        Engine(**{"model": "tiny:llama"} | OPTIONS | changes)


@pytest.mark.parametrize(
    ("model", "setting"),
    [("tiny:llama", "kv_dtype"), ("tiny:deepseek_v3", "kv_dtype"), ("tiny:glm_moe_dsa", "index_dtype")],
)
@pytest.mark.parametrize(("function", "named"), [("decode", "NaN"), ("kernel", "no driver")])
def test_a_faulty_codec_or_kernel_is_refused_before_weights_are_read(
    acme, monkeypatch, model, setting, function, named
):
    """E2: of rows and of index keys."""

    def kernel(parts, scale):
        raise RuntimeError("no driver\nand more")

    monkeypatch.setattr(prepare_module, "load_model", lambda *given, **settings: pytest.fail("weights were read"))
    acme.decode, acme.kernel = (lambda parts: decode(parts) * float("nan")) if function == "decode" else decode, kernel
    monkeypatch.setitem(ACME.kernels, "cpu", "acme_int8:kernel")
    load_codec.cache_clear()
    with raises_naming(PluginError, "acme_int8", named) as error:
        Engine(model, **OPTIONS | {setting: "acme_int8"})
    assert "\n" not in str(error.value)


class Writer:
    """Kernel of a row format that a test may give other methods."""

    def write(self, slots, rows):
        pass


@pytest.mark.parametrize(
    ("methods", "named"),
    [
        ({"write": lambda self, rows: None}, "positional arguments"),
        ({"write": lambda self, slots, rows: sys.exit("no\ndevice")}, "SystemExit"),
        ({"pair": lambda self, other: object()}, "'write'"),
        ({"pair": lambda self, other: {}["two\nlines"]}, "KeyError"),
        ({"pair": 3}, "not callable"),
    ],
)
def test_a_kernel_that_cannot_write_is_refused_before_weights_are_read(acme, monkeypatch, methods, named, capsys):
    """E2: in one line, and nothing that its package prints is part of the output."""

    def kernel(parts, scale):
        print("ready")
        return type("Writer", (Writer,), methods)()

    monkeypatch.setattr(prepare_module, "load_model", lambda *given, **settings: pytest.fail("weights were read"))
    monkeypatch.setitem(ACME.kernels, "cpu", "acme_int8:kernel")
    acme.kernel = kernel
    with raises_naming(PluginError, "acme_int8", "cpu", named) as error:
        Engine("tiny:llama", **OPTIONS, kv_dtype="acme_int8")
    assert "\n" not in str(error.value) and not capsys.readouterr().out


def test_what_a_kernel_prints_is_no_output(acme, monkeypatch, capsys):
    """D2"""
    monkeypatch.setitem(ACME.kernels, "cpu", "acme_int8:kernel")
    acme.kernel = lambda parts, scale: print("ready")
    Engine("tiny:llama", **OPTIONS, kv_dtype="acme_int8")
    assert not capsys.readouterr().out


def test_a_draft_whose_rows_do_not_fit_is_named(acme):
    """E2"""
    draft = {"speculative_algorithm": "standalone", "speculative_draft_model": "tiny:llama"}
    with raises_naming(UsageError, "acme_latent", "tiny:llama", "mha") as error:
        Engine("tiny:deepseek_v3", **OPTIONS, kv_dtype="acme_latent", **draft)
    assert "\n" not in str(error.value)
