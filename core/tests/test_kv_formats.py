"""KV formats of plugins: declaration, registration, selection, and pools over their codecs (E2)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import KVFormat, LayerSpec, MHAPool, MLAPool, ModelSpec, PoolError, Problem, Role, RowPart, UsageError
from attnplug.cli.plugins import _other
from attnplug.declare.errors import PluginError
from attnplug.host import BackendRequest, KVPools, explain, load_registry, select
from attnplug.kernels import PageCopy, RowFormat
from attnplug.sparse import IndexerDims
from attnplug_testing.errors import raises_naming
from attnplug_testing.plugins import EMBEDDED, Install, also, module
from support.pools import mha_layer, mla_layer, random_rows

GOOD: dict[str, Any] = {
    "name": "acme_int8",
    "summary": "int8, one float16 scale per 4 values",
    "codec": "acme_int8",
    "parts": (RowPart("int8"), RowPart("float16", per=4)),
    "error": 0.02,
}
ACME = KVFormat(**GOOD)
LAYER = mha_layer(v_head_dim=4)
SIZE: dict[str, Any] = {"num_pages": 3, "page_size": 4, "device": "cpu"}


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    groups = rows.float().unflatten(-1, (-1, 4))
    scales = (groups.abs().amax(-1) / 127).clamp(min=1e-6).half()
    return (groups / scales.float().unsqueeze(-1)).round().flatten(-2).to(torch.int8), scales


def decode(parts: tuple[Tensor, Tensor]) -> Tensor:
    return (parts[0].float().unflatten(-1, (-1, 4)) * parts[1].float().unsqueeze(-1)).flatten(-2)


Codec = Callable[..., KVFormat]


@pytest.fixture
def codec(monkeypatch: pytest.MonkeyPatch) -> Codec:
    """Return the format with functions of its codec replaced."""

    def make(**functions: Any) -> KVFormat:
        name = f"codec_{len(made)}"
        found = made[name] = ModuleType(name)
        found.__dict__.update({"encode": encode, "decode": decode, **functions})
        monkeypatch.setitem(sys.modules, name, found)
        return replace(ACME, codec=name)

    made: dict[str, ModuleType] = {}
    monkeypatch.setitem(sys.modules, "acme_int8", ModuleType("acme_int8"))
    sys.modules["acme_int8"].__dict__.update(encode=encode, decode=decode)
    return make


# ---- declaration ----


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"name": "Acme 8"}, ["Acme 8"]),
        ({"name": "fp8"}, ["fp8", "float8_e4m3fn"]),
        ({"summary": ""}, ["summary"]),
        ({"parts": ()}, ["parts"]),
        ({"parts": (("int8", 1),)}, ["RowPart"]),
        ({"parts": (RowPart("int7"),)}, ["int7", "int8"]),
        ({"parts": (RowPart("int8", per=0),)}, ["per", "0"]),
        ({"error": 2}, ["error 2"]),
        ({"holds": {"keys"}}, ["keys", "mha"]),
        ({"holds": set()}, ["holds"]),
        ({"codec": None}, ["codec"]),
        ({"codec": "acme int8"}, ["acme int8"]),
        ({"rope": "bf16"}, ["bf16", "bfloat16"]),
        ({"layer_scale": 1}, ["layer_scale", "1"]),
        ({"codec": True}, ["codec True"]),
        ({"page_multiple": 0}, ["page_multiple"]),
        ({"page_multiple": 65537}, ["page_multiple", "65537", "1 to 65536"]),
        ({"rope": "int8"}, ["rope", "int8", "bfloat16"]),
        ({"codec": None, "parts": (RowPart("float8_e5m2"),)}, ["codec", "bfloat16, float16, float32"]),
        ({"codec": None, "parts": (RowPart("int8"),)}, ["codec"]),
        ({"kernels": {"cuda": "acme"}}, ["kernels", "acme"]),
        ({"kernels": {"cuda:0": "acme:kernel"}}, ["kernels", "cuda:0"]),
        ({"kernels": ["acme:kernel"]}, ["kernels", "acme:kernel", "dict"]),
    ],
    ids=str,
)
def test_a_declaration_that_contradicts_itself_is_one_line(change: dict[str, Any], named: list[str]) -> None:
    with raises_naming(PluginError, "KV format" if "name" not in change else "format", *named) as error:
        KVFormat(**{**GOOD, **change})
    assert "\n" not in str(error.value)


def test_the_parts_of_a_row_are_aligned_and_counted() -> None:
    """E2: as in a C struct, with scales per row and head, and rotary columns unscaled."""
    assert ACME.placed(8) == [("int8", 0, 8), ("float16", 8, 12)] and ACME.row_nbytes(8) == 12
    uneven = replace(ACME, parts=(RowPart("int8"), RowPart("float32", per=None)), rope="bfloat16")
    assert uneven.placed(13, 4) == [("int8", 0, 9), ("float32", 12, 16), ("bfloat16", 16, 24)]
    assert uneven.row_nbytes(9) == 16
    assert ACME.token_nbytes(LAYER) == 2 * (12 + 6) and uneven.token_nbytes(mla_layer()) == uneven.row_nbytes(20, 4)


# ---- registration ----


def test_a_plugin_brings_formats(install: Install) -> None:
    """D1, E2: by its hook alone; core's own come by the same one."""
    registry = load_registry([EMBEDDED, install(also(module(), attnplug_kv_formats=[ACME]))], {})
    assert registry.broken == () and str(registry.kv_formats["acme_int8"].source) == "fast-attention 1.2.3"
    assert registry.kv_format("acme_int8") is ACME
    assert registry.kv_format("fp8").name == "float8_e4m3fn" == registry.kv_formats["float8_e4m3fn"].value.name
    with raises_naming(UsageError, "acme_int4", "acme_int8", "bfloat16") as error:
        registry.kv_format("acme_int4")
    assert error.value.settings == ("kv_dtype",) and "\n" not in str(error.value)
    assert [(item.kind, item.name) for item in _other(registry)] == [("KV format", "acme_int8")]
    with raises_naming(UsageError, "index_dtype", "acme_int8", "bfloat16"):
        registry.kv_format("acme_int8", "index_dtype", "index")


def test_two_packages_with_the_same_name_are_both_named(install: Install) -> None:
    """D2, E2"""
    plugins = [
        install(also(module(), attnplug_kv_formats=[ACME]), name=name, distribution=name) for name in ("one", "two")
    ]
    registry = load_registry([EMBEDDED, *plugins], {})
    assert "acme_int8" not in registry.kv_formats
    with raises_naming(PluginError, "acme_int8", "one", "two") as error:
        registry.kv_format("acme_int8")
    assert "\n" not in str(error.value)
    assert error.value.settings == ("kv_dtype",)  # which commands show as --kv-dtype


def test_core_keeps_its_own_names(install: Install) -> None:
    """D2"""
    registry = load_registry(
        [EMBEDDED, install(also(module(), attnplug_kv_formats=[replace(ACME, name="bfloat16")]))], {}
    )
    assert registry.kv_format("bfloat16").codec is None and "bfloat16" in registry.broken[0].name


@pytest.mark.parametrize("result", [ACME, [7], "acme_int8"])
def test_a_wrong_result_of_the_hook_is_reported(install: Install, result: object) -> None:
    """D2"""
    registry = load_registry([EMBEDDED, install(also(module(), attnplug_kv_formats=result))], {})
    (broken,) = registry.broken
    assert "KVFormat" in broken.error and "float32" in registry.kv_formats
    with raises_naming(UsageError, "acme_int8", "attnplug plugins"):  # this command shows the fault
        registry.kv_format("acme_int8")


# ---- selection ----


def problem(layer: LayerSpec = LAYER, **changes: Any) -> Problem:
    model = ModelSpec("acme", "llama", (layer,), 1024)
    return Problem(model, "cpu", **{"dtype": "float32", "kv_dtype": "acme_int8", **changes})


def test_torch_native_is_selected_for_any_format(install: Install) -> None:
    """E2: and pages have a size that the format's groups divide."""
    format = replace(ACME, page_multiple=48)
    registry = load_registry([EMBEDDED, install(also(module(), attnplug_kv_formats=[format]))], {})
    selection = select(registry, BackendRequest(), problem())
    assert selection.chosen(Role.DECODE).spec.name == "torch_native" and selection.page_size == 192
    for wrong, named in (
        (problem(page_size=64), ["64", "48", "acme_int8"]),
        (problem(mha_layer(v_head_dim=6)), ["acme_int8", "4", "6"]),
        (problem(kv_dtype="acme_int4"), ["acme_int4", "acme_int8"]),
    ):
        with raises_naming(UsageError, *named) as error:
            select(registry, BackendRequest(), wrong)
        assert "\n" not in str(error.value)
    registry = load_registry(
        [EMBEDDED, install(also(module(), attnplug_kv_formats=[replace(ACME, holds={"mla"})]))], {}
    )
    with raises_naming(UsageError, "acme_int8", "mla", "mha"):
        select(registry, BackendRequest(), problem())


def test_a_format_of_index_keys_is_checked_like_one_of_rows(install: Install) -> None:
    """E2: its groups and its pages, naming the option that requests it."""
    format = replace(ACME, holds={"index"}, page_multiple=48)
    registry = load_registry([EMBEDDED, install(also(module(), attnplug_kv_formats=[format]))], {})
    for width, page_size, named in ((16, 64, ["64", "48"]), (6, 48, ["4", "6"])):
        layer = replace(mla_layer(), indexer=IndexerDims(2, width, 8))
        wrong = problem(layer, kv_dtype="float32", index_dtype="acme_int8", page_size=page_size)
        with raises_naming(UsageError, "index_dtype", "acme_int8", *named) as error:
            explain(registry, BackendRequest(), wrong)
        assert "\n" not in str(error.value)


# ---- pools ----


@pytest.mark.parametrize("layout", ["token_major", "head_major"])
def test_rows_are_written_read_copied_and_moved_with_their_scales(codec: Codec, layout: Any) -> None:
    """E2"""
    pool = MHAPool([LAYER], **SIZE, dtype=ACME, layout=layout)
    assert pool.keys(0).shape == (3, 4, 2, 12) and pool.dtype == "acme_int8"
    assert [part.shape[-1] for part in pool.parts(0)[0]] == [8, 2] and pool.nbytes == 12 * ACME.token_nbytes(LAYER)
    k, v, slots = random_rows(3, 2, 8), random_rows(3, 2, 4), torch.tensor([1, -1, 6])
    pool.write(0, slots, k, v)
    torch.testing.assert_close(pool.read_keys(0, slots[[0, 2]]), decode(encode(k[[0, 2]])), rtol=0, atol=0)
    torch.testing.assert_close(pool.read_values(0, slots[[0, 2]]), v[[0, 2]], rtol=0.02, atol=0.02)
    assert not pool.read_keys(0, torch.tensor([0, 2, 3, 4, 5, 7, 11])).any()
    KVPools(mha=pool).copy_pages([PageCopy(1, 2)])
    KVPools(mha=pool).move_rows(torch.tensor([1]), torch.tensor([3]))
    assert torch.equal(pool.read_keys(0, torch.tensor([3, 10])), pool.read_keys(0, slots[[0, 2]]))


def test_latent_rows_keep_their_rotary_columns(codec: Codec) -> None:
    """E2"""
    format = codec()
    pool = MLAPool([mla_layer()], **SIZE, dtype=replace(format, rope="float32"))
    rows, dims = random_rows(2, 1, 20).squeeze(1), mla_layer().mla
    assert dims is not None
    pool.write(0, torch.tensor([5, 2]), rows)
    found = pool.read_rows(0, torch.tensor([5, 2]))
    assert torch.equal(found[:, dims.kv_lora_rank :], rows[:, dims.kv_lora_rank :])
    torch.testing.assert_close(found, rows, rtol=0.02, atol=0.02)
    assert pool.by_slot(0) is None


def test_a_scale_of_the_layer_divides_what_is_encoded(codec: Codec) -> None:
    seen: list[Tensor] = []

    def watched(rows: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(rows)
        return encode(rows)

    format = replace(codec(encode=watched), layer_scale=True)
    pool, rows = MHAPool([LAYER], **SIZE, dtype=format, scales={0: (4.0, 2.0)}), random_rows(1, 2, 8)
    pool.write(0, torch.tensor([0]), rows, rows[..., :4])
    assert torch.equal(seen[-2], rows / 4) and torch.equal(seen[-1], rows[..., :4] / 2)
    torch.testing.assert_close(pool.read_keys(0, torch.tensor([0])), rows, rtol=0.02, atol=0.02)
    with raises_naming(PoolError, "acme_int8", "2.0"):
        RowFormat.of(codec(), 8, scale=2.0)


def no_scales(rows: Tensor) -> tuple[Tensor]:
    return (encode(rows)[0],)


@pytest.mark.parametrize(
    ("functions", "named"),
    [
        ({"encode": no_scales}, ["encode", "float16"]),
        ({"encode": lambda rows: (encode(rows)[0][..., :-1], encode(rows)[1])}, ["[3, 2, 7]", "[3, 2, 8]"]),
        ({"encode": lambda rows: (encode(rows)[0], encode(rows)[1].float())}, ["float32", "float16"]),
        ({"decode": lambda parts: decode(parts)[..., :-1]}, ["decode", "[3, 2, 7]"]),
        ({"decode": lambda parts: decode(parts).half()}, ["decode", "torch.float16"]),
        ({"decode": lambda parts: decode(parts) / decode(parts)}, ["decode", "NaN"]),
        ({"decode": lambda parts: parts[2]}, ["IndexError"]),
        ({"encode": None}, ["TypeError"]),
        ({"encode": lambda rows: sys.exit(3)}, ["SystemExit"]),
        ({"encode": lambda rows: sys.exit("first\nsecond")}, ["first"]),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[0],
)
def test_a_codec_that_contradicts_its_declaration_is_one_line_before_memory_is_allocated(
    codec: Codec, functions: dict[str, Any], named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """E2"""
    format = codec(**functions)
    monkeypatch.setattr("attnplug.kv.row_pool.PageLayout", None)  # pools need it to allocate memory
    for make in (lambda: MHAPool([LAYER], **SIZE, dtype=format), lambda: MHAPool.all_formats([LAYER], format)):
        with raises_naming(PluginError, "acme_int8", *named) as error:
            make()
        assert "\n" not in str(error.value)


def test_a_codec_that_cannot_be_imported_is_named() -> None:
    with raises_naming(PluginError, "acme_int8", "no_such_module"):
        MHAPool([LAYER], **SIZE, dtype=replace(ACME, codec="no_such_module"))


def test_a_kernel_of_the_device_writes_rows(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """E2: one launch for keys and values, if the kernel can."""
    written: list[object] = []

    class Pair:
        def write(self, *given: object) -> None:
            written.append(len(given))

    class Kernel:
        def pair(self, values: object) -> Pair:
            return Pair()

        def write(self, *given: object) -> None:
            written.append(len(given))

    format = codec()
    sys.modules[format.codec or ""].__dict__["make"] = lambda parts, scale: Kernel()
    sys.modules[format.codec or ""].__dict__["none"] = lambda parts, scale: None
    sys.modules[format.codec or ""].__dict__["no_kernel"] = lambda parts, scale: "a\nkernel"
    rows, slots = random_rows(1, 2, 8), torch.tensor([0])
    MHAPool([LAYER], **SIZE, dtype=replace(format, kernels={"cpu": f"{format.codec}:make"})).write(
        0, slots, rows, rows[..., :4]
    )
    MLAPool([mla_layer()], **SIZE, dtype=replace(format, kernels={"cpu": f"{format.codec}:make"})).write(
        0, slots, random_rows(1, 1, 20)
    )
    assert written == [3, 2]
    for other in ("none", "make"):  # none for this device
        kernels = {"cpu" if other == "none" else "cuda": f"{format.codec}:{other}"}
        pool = MHAPool([LAYER], **SIZE, dtype=replace(format, kernels=kernels))
        pool.write(0, slots, rows, rows[..., :4])
        assert pool.read_keys(0, slots).any()
    sys.modules[format.codec or ""].__dict__["returned"] = lambda parts, scale: Kernel
    sys.modules[format.codec or ""].__dict__["no_method"] = lambda parts, scale: SimpleNamespace(write=None)
    wrongs = [(name, "write(slots, rows)") for name in ("no_kernel", "returned", "no_method")]
    for wrong, named in (("missing", "missing"), ("__name__", format.codec), *wrongs):
        with raises_naming(PluginError, "acme_int8", named or "") as error:
            MHAPool([LAYER], **SIZE, dtype=replace(format, kernels={"cpu": f"{format.codec}:{wrong}"}))
        assert "\n" not in str(error.value)
