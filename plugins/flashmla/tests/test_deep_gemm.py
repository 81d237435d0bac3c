"""DeepGEMM's scores: the call against the signature in its sources, the use of its result, and refusals."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import AttentionKind, DType, LayerSpec, ModelSpec, Problem, Refusal, Role
from attnplug.host import MLADims
from attnplug.sparse import IndexerDims
from attnplug_flashmla import deep_gemm_index
from attnplug_flashmla.deep_gemm_index import DeepGEMM, score_in_fp8
from attnplug_flashmla.options import SparseOptions
from attnplug_flashmla.plugin import attnplug_backends
from attnplug_sparse.index import ScoreInputs
from attnplug_sparse.pools import IndexKeyPool
from attnplug_testing.libraries import install_library

ROOT = Path(__file__).resolve().parents[3]
(UNPACKED,) = re.findall(r"^DEEPGEMM := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
PAGES, HEADS, DIM, LONGEST = 9, 32, 128, 256
MODEL = ModelSpec(
    "test",
    "test",
    (
        LayerSpec(
            0, AttentionKind.MLA, 4, 4, 192, 128, 1.0, mla=MLADims(512, 128, 64), indexer=IndexerDims(HEADS, DIM, 8)
        ),
    ),
    1 << 17,
)
FP8 = DType.FLOAT8_E4M3


class Strict:
    """Stand-in for DeepGEMM: accepts only what its SM 90 kernel accepts, and leaves arbitrary scores past the last
    key."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def scores(self, **given: Any) -> Tensor:
        self.given = given
        q, cache, weights = given["q"], given["kv_cache"], given["weights"]
        lens, table = given["context_lens"], given["block_table"]
        rows = len(q)
        assert q.shape == (rows, 1, HEADS, DIM) and q.dtype is torch.float8_e4m3fn and q.is_contiguous()
        assert cache.shape == (PAGES, 64, 1, DIM + 4) and cache.dtype is torch.uint8 and cache.is_contiguous()
        assert weights.shape == (rows, HEADS) and weights.dtype is torch.float32
        assert lens.shape == (rows, 1) and lens.dtype is torch.int32 and lens.is_contiguous()
        assert len(table) == rows and table.dtype is torch.int32 and table.stride(1) == 1
        assert torch.equal(given["schedule_meta"], lens + 132)
        page = cache.view(PAGES, -1)
        keys = page[:, : 64 * DIM].reshape(PAGES, 64, DIM).view(torch.float8_e4m3fn).float()
        keys = keys * page[:, 64 * DIM :].contiguous().view(torch.float32).unsqueeze(-1)
        found = torch.full((rows, given["max_context_len"]), 1e30)
        for row, seen in enumerate(lens.flatten().tolist()):
            used = keys[table[row, : -(-seen // 64)].long()].flatten(0, 1)[:seen]
            found[row, :seen] = torch.relu(q[row, 0].float() @ used.T).T @ weights[row]
        return found

    def schedule(self, context_lens: Tensor, block_kv: int, num_sms: int) -> Tensor:
        assert block_kv == 64
        return context_lens + num_sms


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Strict:
    made = Strict()
    monkeypatch.setattr(deep_gemm_index, "load_deep_gemm", lambda: DeepGEMM(made.scores, made.schedule, lambda: 132))
    return made


TABLE = [[3, 5, 1, 1 << 30], [8, 2, 0, 4]]
OWNERS, SEEN = [0, 0, 1, 1], [0, 150, 1, 256]


def inputs() -> tuple[ScoreInputs, IndexKeyPool]:
    random = torch.Generator().manual_seed(0)
    pool = IndexKeyPool(MODEL.layers, num_pages=PAGES, page_size=64, dtype=FP8, device="cpu")
    pool.write(0, torch.arange(PAGES * 64), torch.randn(PAGES * 64, DIM, generator=random))
    q, weights = torch.randn(4, HEADS, DIM, generator=random).bfloat16(), torch.randn(4, HEADS, generator=random)
    owners, seen = torch.tensor([OWNERS, SEEN], dtype=torch.int32).T.contiguous().unbind(1)
    table = torch.tensor(TABLE, dtype=torch.int32)
    return ScoreInputs(q, weights, pool.keys(0), 0.25, table, owners, seen, LONGEST), pool


def test_scores_are_those_of_the_keys_but_for_queries_in_fp8(strict: Strict) -> None:
    given, pool = inputs()
    found = score_in_fp8(given)
    for row, (owner, seen) in enumerate(zip(OWNERS, SEEN, strict=True)):
        slots = torch.tensor([TABLE[owner][place // 64] * 64 + place % 64 for place in range(seen)], dtype=torch.int64)
        wanted = given.weights[row] @ torch.relu(given.q[row].float() @ pool.read_keys(0, slots).T * 0.25)
        if seen:
            assert float((found[row, :seen] - wanted).abs().max() / wanted.abs().max()) < 0.05


@pytest.mark.parametrize("version", UNPACKED.split())
def test_the_calls_are_as_the_library_takes_them(strict: Strict, version: str) -> None:
    folder = ROOT / ".venv" / "deepgemm" / version / "deep_gemm"
    if not folder.exists():
        pytest.skip(f"DeepGEMM {version} is not unpacked; 'make .venv/installed-dev' does it")
    score_in_fp8(inputs()[0])
    text = (folder / "__init__.py").read_text()
    arguments = {
        node.name: [argument.arg for argument in node.args.args]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    }
    assert arguments["fp8_fp4_paged_mqa_logits"] == [*strict.given, "indices"]
    assert arguments["get_paged_mqa_logits_metadata"] == ["context_lens", "block_kv", "num_sms", "indices"]
    assert "get_num_sms = _C.get_num_sms" in text


def refusals(installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[Refusal]:
    install_library(tmp_path, "sgl-flash-mla", "1.0.0", {"flash_mla": ""})
    if installed:
        install_library(tmp_path, "sgl-deep-gemm", "0.2.5", {"deep_gemm": ""})
    monkeypatch.syspath_prepend(tmp_path)
    problem = Problem(MODEL, "cuda", 90, DType.BFLOAT16, "fp8_ds_mla", 64, index_dtype=FP8)
    return attnplug_backends()[1].refusals(replace(problem, **changes), Role.DECODE, SparseOptions("deep_gemm"))


def test_it_is_refused_by_name_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D3"""
    (reason,) = refusals(False, tmp_path, monkeypatch)
    assert reason.code == "requirement" and reason.advice == "pip install 'sgl-deep-gemm>=0.2.5'"


def test_what_it_reads_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusals(True, tmp_path, monkeypatch) == []


@pytest.mark.parametrize(
    ("changes", "code", "value"),
    [
        ({"index_dtype": None}, "index_dtype", "bfloat16"),
        ({"page_size": 128}, "page_size", 128),
        (
            {"model": replace(MODEL, layers=(replace(MODEL.layers[0], indexer=IndexerDims(16, 128, 8)),))},
            "heads",
            [16, 128],
        ),
    ],
)
def test_what_it_does_not_read_is_refused(
    changes: dict[str, Any], code: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D3"""
    (reason,) = refusals(True, tmp_path, monkeypatch, **changes)
    assert (reason.code, reason.value) == (code, value)
