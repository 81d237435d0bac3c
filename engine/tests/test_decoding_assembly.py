"""Assembly that decodes 4-bit codes, executed by a small emulator: the interpreter of Triton has none."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from attnplug_engine.quantization.mxfp4 import VALUES

WORD = (1 << 32) - 1
NUMBERS = {
    "int4": [float(code - 8) for code in range(16)],
    "mxfp4": [*VALUES, *(-value for value in VALUES)],
}


def assembly() -> dict[str, str]:
    """Return the instructions of ``_nibbles`` by format, in the order of its branches."""
    spec = find_spec("attnplug_engine.kernels")
    assert spec is not None and spec.submodule_search_locations is not None
    text = (Path(spec.submodule_search_locations[0]) / "quantized_tiles.py").read_text()
    blocks = re.findall(r'"""\s*\{(.*?)\}\s*"""', text, re.DOTALL)
    assert len(blocks) == len(NUMBERS)
    return dict(zip(NUMBERS, blocks, strict=True))


def halves(word: int) -> torch.Tensor:
    """Two bfloat16 of a word, the lower one first."""
    bits = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.uint16)
    return bits.view(torch.bfloat16)


def joined(values: torch.Tensor) -> int:
    low, high = values.bfloat16().view(torch.uint16).tolist()
    return low | high << 16


def permuted(first: int, second: int, selector: int) -> int:
    """``prmt``: bytes 0 to 3 are those of the first operand, 4 to 7 those of the second."""
    both = first | second << 32
    assert not selector & 0x8888, "replicates signs"
    return sum((both >> 8 * (selector >> 4 * place & 7) & 0xFF) << 8 * place for place in range(4))


def looked_up(a: int, b: int, c: int, table: int) -> int:
    """``lop3``: the result's bits by those of three operands."""
    found = 0
    for case in range(8):
        if table >> case & 1:
            found |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    return found & WORD


def run(text: str, word: int) -> list[int]:
    """Execute instructions on the input ``$4``. Return ``$0`` to ``$3``."""
    values = {"$4": word}
    for line in filter(None, (part.strip() for part in text.split(";"))):
        if line.startswith(".reg"):
            continue
        name, rest = line.split(None, 1)
        target, *given = (part.strip() for part in rest.split(","))
        at = [values[part] if part in values else int(part, 0) for part in given]
        match name.split("."):
            case ["mov", _]:
                found = at[0]
            case ["and", _]:
                found = at[0] & at[1]
            case ["shr", "u32"]:
                found = at[0] >> at[1]
            case ["shl", _]:
                found = at[0] << at[1] & WORD
            case ["prmt", _]:
                found = permuted(*at)
            case ["lop3", _]:
                found = looked_up(*at)
            case ["fma", "rn", "bf16x2"]:
                a, b, c = (halves(part).double() for part in at)
                found = joined(a * b + c)
            case _:
                raise AssertionError(line)
        values[target] = found
    return [values[f"${place}"] for place in range(4)]


@pytest.mark.parametrize("form", NUMBERS)
def test_every_byte_is_decoded_in_every_place(form):
    """``$0`` and ``$1`` are the lower codes of four bytes, ``$2`` and ``$3`` the upper ones."""
    text, numbers = assembly()[form], NUMBERS[form]
    for byte in range(256):
        every = [byte, byte ^ 0xFF, byte * 7 & 0xFF, byte + 91 & 0xFF]
        found = [halves(word) for word in run(text, sum(each << 8 * place for place, each in enumerate(every)))]
        assert torch.cat(found[:2]).tolist() == [numbers[each & 15] for each in every], byte
        assert torch.cat(found[2:]).tolist() == [numbers[each >> 4] for each in every], byte
