"""Every call to flash-linear-attention is one that its functions take, by name, in the version that CI has unpacked.

Their sources judge the calls and nothing is computed. The library itself stays out of this process: transformers'
models, which are the oracle of other tests, would run on it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from attnplug import AttentionKind
from attnplug.linear import LinearDims, LinearInputs
from attnplug_hybrid_linear.fla_kernels import CHUNK, FlaChunks, FlaKernels
from attnplug_hybrid_linear.varlen import split_blocks
from attnplug_testing.signatures import read_signature, unpacked
from linear_inputs import RECURRENT, random_inputs

ROOT = Path(__file__).resolve().parents[3]
(VERSION,) = re.findall(r"^FLA := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
FOLDER = unpacked("fla", VERSION)
OPS = (FOLDER or Path()) / "fla" / "ops"
FUNCTIONS = {
    "chunk_gated_delta_rule": "gated_delta_rule/chunk.py",
    "chunk_kda": "kda/chunk.py",
    "chunk_simple_gla": "simple_gla/chunk.py",
}
pytestmark = pytest.mark.skipif(FOLDER is None, reason="no fla unpacked in .venv; make test does it")
DIMS = LinearDims(4, 2, 16, 24)
LENS = [70, 0, 3, 130]


class Recorder:
    """Takes a call where the real signature does; what would vanish in its ``**kwargs`` is no argument."""

    def __init__(self, name: str) -> None:
        self.signature, self.calls = read_signature(OPS / FUNCTIONS[name], name), list[dict[str, Any]]()

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = self.signature.bind(*args, **kwargs).arguments
        assert not given.get("kwargs")
        self.calls.append(given)
        return torch.zeros_like(given["v"]), torch.zeros_like(given["initial_state"])


@pytest.mark.parametrize(
    ("kind", "called"),
    [
        (AttentionKind.GDN, "chunk_gated_delta_rule"),
        (AttentionKind.KDA, "chunk_kda"),
        (AttentionKind.LIGHTNING, "chunk_simple_gla"),
        (AttentionKind.MAMBA2, "chunk_simple_gla"),
    ],
)
def test_planning_each_kind_calls_a_function_as_it_is(kind, called) -> None:
    assert kind in RECURRENT
    kernels = FlaKernels.__new__(FlaKernels)
    functions = [Recorder(name) for name in FUNCTIONS]
    kernels._gdn, kernels._kda, kernels._simple = functions
    rows = sum(LENS)
    inputs: LinearInputs = random_inputs(kind, DIMS, rows + 5, torch.Generator().manual_seed(0), normalize=True)
    chunks = FlaChunks.of(LENS, split_blocks(LENS, CHUNK, torch.device("cpu")), torch.tensor([2, -1, 0]))
    states = torch.zeros(3, 4, 16, 24)
    out, after = kernels.chunked(inputs, 0.3, chunks, states)
    assert out.shape == (rows, 4, 24) and after.shape == states.shape
    (call,) = [call for name, function in zip(FUNCTIONS, functions, strict=True) for call in function.calls]
    assert [bool(function.calls) for function in functions] == [name == called for name in FUNCTIONS]
    heads = 4 if called == "chunk_simple_gla" else 2
    assert call["q"].shape == call["k"].shape == (1, rows, heads, 16) and call["v"].shape == (1, rows, 4, 24)
    assert call["scale"] == 0.3 and call["output_final_state"] is True
    assert call["cu_seqlens"].tolist() == call["cu_seqlens_cpu"].tolist() == [0, 70, 73, 203]
    assert call["g"].shape == (1, rows, 4) + (16,) * (called == "chunk_kda")
    if called != "chunk_simple_gla":
        assert call["use_qk_l2norm_in_kernel"] is True
    if called == "chunk_gated_delta_rule":
        assert call["chunk_indices"].tolist() == [[0, 0], [0, 1], [1, 0], [2, 0], [2, 1], [2, 2]]
