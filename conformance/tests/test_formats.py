"""The kit catches every broken KV format by the intended check; the installed ones pass."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from attnplug import KVFormat, RowPart, UsageError
from attnplug.cli.app import parse, run
from attnplug.declare.errors import PluginError
from attnplug.declare.kv_format import BUILT_IN
from attnplug.host import load_registry
from attnplug.kv.buffer import CodedRows, PagedBuffer
from attnplug_conformance.case import Case
from attnplug_conformance.format_checks import FORMAT_CHECKS, check_format
from attnplug_conformance.subject import Subject, Unclaimed

CPU = torch.device("cpu")
GOOD = KVFormat(
    name="good_int8",
    summary="int8 with a scale per row",
    codec="good_int8",
    parts=(RowPart("int8"), RowPart("float32", per=None)),
    error=0.02,
)


def encode(rows):
    scales = (rows.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12)
    return (rows.float() / scales).round().to(torch.int8), scales


def decode(parts):
    return parts[0].float() * parts[1]


def codec(name, **functions):
    module = ModuleType(name)
    module.__dict__.update({"encode": encode, "decode": decode, **functions})
    return module


def failures(format):
    return {(result.kind, result.check): result.message for result in check_format(format, CPU) if result.message}


@pytest.fixture(autouse=True)
def codecs(monkeypatch):
    for name, functions in {"good_int8": {}, **CODECS}.items():
        monkeypatch.setitem(sys.modules, name, codec(name, **functions))


def of_batch(rows):
    """One scale for all rows of a call."""
    scales = (rows.float().abs().amax() / 127).expand(*rows.shape[:2], 1)
    return (rows.float() / scales.clamp(min=1e-12)).round().clamp(-127, 127).to(torch.int8), scales.contiguous()


def of_heads(rows):
    """One scale for all heads of a token."""
    scales = (rows.float().abs().amax((-1, -2), keepdim=True) / 127).clamp(min=1e-12).expand(*rows.shape[:2], 1)
    return (rows.float() / scales).round().to(torch.int8), scales.contiguous()


def truncated(rows):
    scales = encode(rows)[1]
    return (rows.float() / scales / 8).trunc().to(torch.int8) * 8, scales


def of_all(rows):
    """A constant scale."""
    return (rows.float() * 31).round().clamp(-127, 127).to(torch.int8), torch.full((*rows.shape[:2], 1), 1 / 31)


def at_random(rows):
    values, scales = encode(rows)
    noise = torch.randint(0, 2, values.shape, generator=_noise)
    return (values.int() + noise).clamp(-127, 127).to(torch.int8), scales


def by_order(parts):
    return decode(parts) * (1 + 1e-5 * torch.arange(len(parts[0])).view(-1, 1, 1))


def in_place(rows):
    scales = encode(rows)[1]
    return rows.div_(scales).round().to(torch.int8), scales


def of_contiguous(rows):
    values, scales = encode(rows.view(-1, rows.shape[-1]))
    return values.view(rows.shape), scales.view(*rows.shape[:2], 1)


def of_some(rows):
    rows.max()
    return encode(rows)


def of_two_heads(rows):
    assert rows.shape[1] <= 2, "two heads at most"
    return encode(rows)


def by_head(rows):
    return encode(rows * (1 + 1e-2 * torch.arange(rows.shape[1]).view(1, -1, 1)))


def of_128_values(rows):
    return encode(rows[..., :128].repeat(1, 1, 2)[..., : rows.shape[-1]])


def of_narrow_rows(rows):
    assert rows.shape[-1] <= 64, "rows are too wide"
    return encode(rows)


def by_value(rows):
    if rows.numel() and rows.max().item() > 1e30:
        rows = rows.clamp(max=1e30)
    return encode(rows)


def with_table(parts):
    return torch.tensor([*range(-128, 128)])[parts[0].int() + 128].float() * parts[1]


def with_mask(parts):
    rows = decode(parts)
    rows[rows.isnan()] = 0.0  # this does not wait
    return torch.where(rows.abs() > 1e30, rows[rows == 0].sum(), rows)


def in_a_buffer(parts):
    rows = decode(parts)
    return _buffers.setdefault(rows.shape, rows).copy_(rows)


_buffers: dict[torch.Size, torch.Tensor] = {}
_noise = torch.Generator().manual_seed(0)
CODECS = {
    "of_batch": {"encode": of_batch},
    "of_heads": {"encode": of_heads},
    "of_all": {"encode": of_all},
    "truncated": {"encode": truncated},
    "at_random": {"encode": at_random},
    "by_order": {"decode": by_order},
    "in_place": {"encode": in_place},
    "of_contiguous": {"encode": of_contiguous},
    "of_some": {"encode": of_some},
    "of_two_heads": {"encode": of_two_heads},
    "by_head": {"encode": by_head},
    "by_value": {"encode": by_value},
    "of_128_values": {"encode": of_128_values},
    "of_narrow_rows": {"encode": of_narrow_rows},
    "with_table": {"decode": with_table},
    "with_mask": {"decode": with_mask},
    "in_a_buffer": {"decode": in_a_buffer},
    "no_zeros": {"decode": lambda parts: decode(parts) + (parts[0] == 0).float() * 1e-6},
}
MUTANTS = [
    ("of_batch", "independent", "written alone"),
    ("of_batch", "prefix", "two steps"),
    ("of_heads", "independent", "one head"),
    ("truncated", "round_trip", "declares 0.02"),
    ("of_all", "magnitudes", "2^-10"),
    ("no_zeros", "round_trip", "zeros"),
    ("in_place", "inputs", "must not write"),
    ("of_contiguous", "inputs", "view size"),
    ("of_some", "inputs", "no rows"),
    ("of_two_heads", "round_trip", "two heads"),
    ("by_head", "independent", "another head's"),
    ("of_128_values", "sizes", "1100 rows of 192 values"),
    ("by_value", "asynchronous", "_local_scalar_dense"),
    ("with_table", "asynchronous", "lift_fresh"),
    ("with_mask", "asynchronous", "index.Tensor"),
    ("by_order", "prefix", "prefix hit"),
    ("at_random", "prefix", "other bytes"),
]


@pytest.mark.parametrize(("name", "check", "message"), MUTANTS)
def test_a_broken_codec_is_caught(name, check, message):
    """E2"""
    assert message in failures(replace(GOOD, codec=name))["mha", check]


def test_a_broken_format_fails_no_backend_that_claims_any(monkeypatch):
    """D2: the kit refuses its cases by the format's name. A backend that claims it by name is checked."""
    made = {name: replace(GOOD, name=name, codec=name) for name in ("good_int8", "of_batch", "no_such_codec")}
    monkeypatch.setattr("attnplug_conformance.stored_rows._formats", lambda: BUILT_IN | made)
    native = Subject.installed(load_registry().backends["torch_native"], "cpu")
    case = replace(Case(((3, 1),)), kv_dtype="good_int8")
    assert native.fit(case).kv_dtype == "good_int8"
    for name in ("of_batch", "no_such_codec"):
        with pytest.raises(Unclaimed, match=f"attnplug conform --kv-format {name}"):
            native.fit(replace(case, kv_dtype=name))
    spec = native.registered.spec
    spec = replace(spec, capabilities=replace(spec.capabilities, kv_dtypes={"of_batch"}))
    named = replace(native, registered=replace(native.registered, spec=spec))
    assert named.fit(replace(case, kv_dtype="of_batch")).kv_dtype == "of_batch"


def test_a_good_format_passes():
    assert failures(GOOD) == {}


def test_a_format_may_refuse_a_width():
    """E2: it is refused for models with wider rows, so these are no failure of it."""
    assert failures(replace(GOOD, codec="of_narrow_rows", holds={"mha"})) == {}


def test_a_decode_that_returns_its_buffer_again_is_caught():
    """E2: of latent rows, too, which are read one after another."""
    _buffers.clear()
    assert "second read" in failures(replace(GOOD, codec="in_a_buffer", holds={"mla"}))["mla", "prefix"]


def test_a_layers_scale_is_one_for_fp8(monkeypatch):
    """E2: those of checkpoints are, so a format that clips values above 5 does not hold their rows."""
    monkeypatch.setattr(sys.modules["good_int8"], "encode", lambda rows: (of_all(rows * 0.8)[0],))
    monkeypatch.setattr(sys.modules["good_int8"], "decode", lambda parts: parts[0].float() / (31 * 0.8))
    format = replace(GOOD, parts=(RowPart("int8"),), layer_scale=True, error=0.05)
    assert {check for _, check in failures(format)} == {"magnitudes"}
    assert "448" in failures(format)["mla", "magnitudes"]


def test_an_error_that_is_declared_far_too_large_is_caught():
    """E2: by itself, and a kernel is compared with the codec, not with the declaration."""
    assert "declares 0.99" in failures(replace(GOOD, error=0.99))["mla", "round_trip"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codec": "no_such_module"}, "no_such_module"),
        ({"codec": "of_nan"}, "NaN"),
        ({"kernels": {"cpu": "good_int8:no_kernel"}}, "no_kernel"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_one_line(changes, message, monkeypatch):
    """E2: not one for each check."""
    monkeypatch.setitem(sys.modules, "of_nan", codec("of_nan", decode=lambda parts: decode(parts) * float("nan")))
    with pytest.raises(PluginError, match=message) as error:
        failures(replace(GOOD, **changes))
    assert "\n" not in str(error.value)


class Writer:
    """Kernel that writes rows times ``factor``, by torch operations."""

    def __init__(self, parts, factor=1.0, slots=lambda slots, count: slots[(slots >= 0) & (slots < count)]):
        self.parts, self.factor, self.slots = parts, factor, slots

    def write(self, slots, rows):
        count, size = len(self.parts[0]) * self.parts[0].shape[1], self.parts[0].shape[1]
        live = torch.isin(slots, self.slots(slots, count))
        for part, cells in zip(self.parts, encode(rows * self.factor), strict=True):
            part[slots[live] // size, slots[live] % size] = cells[live]


@pytest.mark.parametrize(
    ("pair", "message"), [(3, "not callable"), (lambda self, values: {}["two\nlines"], "KeyError")]
)
def test_a_kernel_without_a_usable_pair_is_one_line(pair, message, monkeypatch):
    """E2"""
    kernel = type("Paired", (Writer,), {"pair": pair})
    monkeypatch.setattr(sys.modules["good_int8"], "make", lambda parts, scale: kernel(parts), raising=False)
    with pytest.raises(PluginError, match=rf"good_int8.*mha.*{message}") as error:
        failures(replace(GOOD, kernels={"cpu": "good_int8:make"}))
    assert "\n" not in str(error.value)


class Pair:
    def __init__(self, keys, values):
        self.keys, self.values = keys, values

    def write(self, slots, keys, values):
        self.keys.write(slots, keys)
        self.values.write(slots, values)


def other_values(parts, scale):
    keys = Writer(parts)
    keys.pair = lambda values: Pair(keys, Writer(values.parts, 0.5))
    return keys


WRITERS = {
    "good": (lambda parts, scale: Writer(parts), None, ""),
    "padding": (lambda parts, scale: Writer(parts, slots=lambda slots, count: slots[slots < count]), "padding", "-1"),
    "behind": (
        lambda parts, scale: Writer(parts, slots=lambda slots, count: slots[slots >= 0]),
        "padding",
        "IndexError",
    ),
    "before": (
        lambda parts, scale: Writer(parts, slots=lambda slots, count: slots[(slots != -1) & (slots < count)]),
        "padding",
        "outside the pool",
    ),
    "first_rows": (
        lambda parts, scale: Writer(
            parts, slots=lambda slots, count: slots[:64][(slots[:64] >= 0) & (slots[:64] < count)]
        ),
        "sizes",
        "1100 rows",
    ),
    "factor": (lambda parts, scale: Writer(parts, 1.4), "kernel", "differ by 0.4"),
    "other_values": (other_values, "kernel", "differ by 0.5"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_broken_kernel_is_caught(name, monkeypatch):
    """E2: a kernel is caught even if only its values are wrong, and even if a large error is declared."""
    make, check, message = WRITERS[name]
    monkeypatch.setattr(sys.modules["good_int8"], "make", make, raising=False)
    found = failures(replace(GOOD, error=0.99 if check == "kernel" else 0.02, kernels={"cpu": "good_int8:make"}))
    assert message in found["mha", check] if check else not found


@pytest.mark.parametrize("name", load_registry().kv_formats)
def test_the_installed_formats_pass(name):
    """E2"""
    assert failures(load_registry().kv_formats[name].value) == {}


@pytest.mark.parametrize(
    ("method", "check", "change"),
    [
        ("move_pages", "copies", lambda self, *places: None),
        ("move_rows", "copies", lambda self, *places: None),
        ("_without_padding", "padding", lambda self, slots, cells: (slots.clamp(min=0), cells)),
    ],
)
def test_pools_that_leave_a_scale_behind_are_caught(method, check, change, monkeypatch):
    """E2: the part with the scales, 4 bytes per element, is not copied, moved or protected from padding."""
    right = getattr(PagedBuffer, method)

    def broken(self, *given):
        return (change if self.pages.element_size() == 4 else right)(self, *given)

    monkeypatch.setattr(PagedBuffer, method, broken)
    assert ("mha", check) in failures(GOOD)


def test_a_declaration_of_other_bytes_is_caught(monkeypatch):
    """E2"""
    monkeypatch.setattr(CodedRows, "nbytes", property(lambda self: 7, lambda self, value: None), raising=False)
    assert "declares" in failures(GOOD)["mha", "bytes"]


def test_rows_that_depend_on_the_layout_are_caught(monkeypatch):
    """E2"""
    right = PagedBuffer.read
    monkeypatch.setattr(PagedBuffer, "read", lambda self, slots: right(self, slots).roll(int(self._flat is None), -1))
    assert "head_major" in failures(GOOD)["mha", "layouts"]


def test_every_check_has_a_mutant():
    assert {check for _, check, _ in MUTANTS} | {"copies", "padding", "kernel", "bytes", "layouts"} == {*FORMAT_CHECKS}


def test_the_command_checks_a_format_without_a_backend(capsys, monkeypatch):
    """E2"""
    on_cpu = ["conform", "--kv-format", "fp8_ds_mla", "--device", "cpu"]
    assert run(parse(on_cpu)) == 0
    assert "fp8_ds_mla" in capsys.readouterr().out
    monkeypatch.setattr("attnplug_sparse.pools.scaled_rows.decode", torch.zeros_like)
    assert run(parse(on_cpu)) == 1
    assert "FAILED mla.round_trip" in capsys.readouterr().out


def test_the_command_prints_nothing_of_a_codec(capsys, monkeypatch):
    """D2"""
    encode = sys.modules["attnplug_sparse.pools.scaled_rows"].encode

    def printing(rows):
        print("encoding")
        return encode(rows)

    monkeypatch.setattr("attnplug_sparse.pools.scaled_rows.encode", printing)
    assert run(parse(["conform", "--kv-format", "fp8_ds_mla", "--device", "cpu", "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "fp8_ds_mla"


@pytest.mark.parametrize(
    "words", ["--kv-format nvfp5", "torch_native --kv-format bf16", "--kv-format bf16 --quick", ""]
)
def test_a_wrong_use_of_the_command_is_one_line(words):
    with pytest.raises(UsageError) as error:
        run(parse(["conform", *words.split()]))
    assert "\n" not in str(error.value)
