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
from attnplug_hybrid_linear.varlen import CapturedVarlen, split_blocks
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
PARTS = {
    "chunk_local_cumsum": "utils/cumsum.py",
    "prepare_chunk_offsets": "utils/index.py",
    "chunk_fwd_kernel_h": "common/chunk_h.py",
    "chunk_fwd_o": "common/chunk_o.py",
}
"""Functions that ``chunk_simple_gla`` calls."""
TUNED = {"BK", "BV", "USE_INITIAL_STATE", "STORE_FINAL_STATE", "IS_VARLEN"}
"""Parameters of ``chunk_fwd_kernel_h`` that its decorators fill in."""
pytestmark = pytest.mark.skipif(FOLDER is None, reason="no fla unpacked in .venv; make test does it")
DIMS = LinearDims(4, 2, 16, 24)
LENS = [70, 0, 3, 130]


class Recorder:
    """Accept the calls that the real signature accepts, without arguments that its ``**kwargs`` would ignore."""

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
    chunks = FlaChunks.of(LENS, split_blocks(LENS, CHUNK, torch.device("cpu")))
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


class Part:
    """Accept a call or a kernel launch that the real signature accepts; return its argument ``gives``."""

    def __init__(self, name: str, gives: str) -> None:
        self.signature, self.gives, self.calls = read_signature(OPS / PARTS[name], name), gives, list[dict[str, Any]]()
        self.left_out = TUNED if name == "chunk_fwd_kernel_h" else set[str]()

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self.signature.bind_partial(*args, **kwargs).arguments
        required = {name for name, one in self.signature.parameters.items() if one.default is one.empty}
        required -= {name for name, one in self.signature.parameters.items() if one.kind is one.VAR_KEYWORD}
        assert required - set(given) == self.left_out and not given.get("kwargs")
        self.calls.append(given)
        return given[self.gives]

    def __getitem__(self, grid: Any) -> Part:
        assert grid({"BK": 16, "BV": 16}) == (1 * 2 * 5 * 4,)  # key and value blocks, sequences, heads
        return self


@pytest.mark.parametrize("kind", RECURRENT)
def test_planning_a_captured_batch_of_each_kind_calls_functions_as_they_are(kind) -> None:
    """Nothing of it may depend on lengths of the host."""
    kernels = FlaKernels.__new__(FlaKernels)
    kernels._gdn, kernels._kda, kernels._simple = (Recorder(name) for name in FUNCTIONS)
    parts = [Part(name, gives) for name, gives in zip(PARTS, ("g", "cu_seqlens", "h", "v"), strict=True)]
    kernels._cumsum, kernels._offsets, kernels._states, kernels._output = parts
    kernels._log2_e = 1.4
    varlen = CapturedVarlen(4, 220, CHUNK, torch.device("cpu"))
    varlen.refill(torch.tensor(LENS, dtype=torch.int32), torch.tensor([2, -1, 0, 1]))
    chunks = FlaChunks.captured(varlen)
    inputs = random_inputs(kind, DIMS, 220, torch.Generator().manual_seed(0), normalize=True)
    states = torch.zeros(5, 4, 16, 24)
    out, after = kernels.chunked(inputs, 0.3, chunks, states)
    assert out.shape == (220, 4, 24) and after.shape == states.shape
    calls = [call for part in (kernels._gdn, kernels._kda, *parts) for call in part.calls]
    assert not kernels._simple.calls and len(calls) == (4 if inputs.beta is None else 1)
    assert all(call.get("cu_seqlens_cpu") is None for call in calls)
    assert all(call["cu_seqlens"].tolist() == [0, 70, 70, 73, 203, 220] for call in calls)
    for call in kernels._kda.calls:
        assert call["use_graph"] is True
    for call in kernels._gdn.calls + kernels._output.calls:
        live = [[0, 0], [0, 1], [2, 0], [3, 0], [3, 1], [3, 2], [4, 0]]
        assert call["chunk_indices"].tolist() == live + [[4, 1]] * (len(varlen.indices) - len(live))


def test_each_run_of_a_capture_has_row_offsets_of_its_own() -> None:
    """The library caches derived values by the identity of the offsets. A new object makes each graph compute them
    itself."""
    varlen = CapturedVarlen(2, 100, CHUNK, torch.device("cpu"))
    chunks = FlaChunks.captured(varlen)
    seen = [chunks.cu_seqlens]
    for _ in range(2):
        chunks.renew()
        assert all(chunks.cu_seqlens is not before for before in seen)
        assert chunks.cu_seqlens.data_ptr() == varlen.cu_seqlens.data_ptr()
        seen.append(chunks.cu_seqlens)
