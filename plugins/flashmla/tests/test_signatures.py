"""Every call of kernels.py to FlashMLA matches the signature in FlashMLA's own sources.

Sources are read and arguments bound, but nothing runs, as FlashMLA loads only with CUDA. So nothing here proves that a
kernel is right.
"""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from attnplug_tune.raw_calls import RawScene
from packaging.requirements import Requirement
from torch import Tensor

from attnplug import AttentionKind, DType, LayerSpec, MLAPool, PlanError
from attnplug.host import KVPools, MLADims
from attnplug_flashmla import kernels, sparse_kernels
from attnplug_flashmla.kernels import FlashMLACall, FlashMLAKernels, FlashMLALibrary, TileSchedule
from attnplug_flashmla.raw import calls
from attnplug_flashmla.sparse_kernels import FlashMLASparseKernels
from attnplug_testing.errors import raises_naming
from attnplug_testing.signatures import read_signature

ROOT = Path(__file__).resolve().parents[3]
(UNPACKED,) = re.findall(r"^FLASHMLA := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
HEADS, QUERIES, REQUESTS = 16, 3, 2


@pytest.fixture(params=UNPACKED.split())
def package(request: pytest.FixtureRequest) -> Path:
    """The unpacked package."""
    folder = ROOT / ".venv" / "flashmla" / request.param / "flash_mla"
    if not folder.exists():
        pytest.skip(f"FlashMLA {request.param} is not unpacked; 'make .venv/installed-dev' does it")
    return folder


def functions(package: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((package / "flash_mla_interface.py").read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


class Schedmeta:
    """Attributes of the library's own class for a schedule; others cannot be set."""

    __slots__ = ("config", "have_initialized", "num_splits", "tile_scheduler_metadata")


class Recorder:
    """Stand-in for FlashMLA. Accepts the calls that the real signature accepts, and records them."""

    def __init__(self, package: Path) -> None:
        self.source, self.calls = package / "flash_mla_interface.py", dict[str, dict[str, Any]]()

    def bind(self, name: str, arguments: dict[str, Any]) -> None:
        self.calls[name] = dict(read_signature(self.source, name).bind(**arguments).arguments)

    def attend(self, **arguments: Any) -> tuple[Tensor, Tensor]:
        self.bind("flash_mla_with_kvcache", arguments)
        q = arguments["q"]
        return q.new_zeros(*q.shape[:3], 512), torch.zeros(len(q), q.shape[2], q.shape[1])

    def attend_rows(self, **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.bind("flash_mla_sparse_fwd", arguments)
        q = arguments["q"]
        sums = torch.zeros(q.shape[:2])
        return q.new_zeros(*q.shape[:2], 512), sums, sums

    def schedule(self, **arguments: Any) -> tuple[Tensor, Tensor]:
        self.bind("get_mla_decoding_metadata", arguments)
        lens = arguments["seqlens_k"]
        return torch.zeros(5, 8, dtype=torch.int32), lens.new_zeros(len(lens) + 1)

    def empty_schedule(self) -> tuple[Schedmeta, None]:
        self.bind("get_mla_metadata", {})
        return Schedmeta(), None


@pytest.fixture
def recorder(package: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder(package)
    library = FlashMLALibrary(made.attend, made.schedule, made.empty_schedule, made.attend_rows)
    monkeypatch.setattr(kernels, "load_library", lambda: library)
    monkeypatch.setattr(sparse_kernels, "load_library", lambda: library)
    return made


def call(queries: int, schedule: TileSchedule) -> FlashMLACall:
    lens = torch.tensor([70, 5], dtype=torch.int32)
    return FlashMLACall(queries, lens, torch.zeros(REQUESTS, 2, dtype=torch.int32), schedule)


@pytest.mark.parametrize("queries", [1, QUERIES])
def test_a_schedule_is_asked_for_as_the_library_takes_it(recorder: Recorder, queries: int) -> None:
    """Its scheduler counts query rows of one KV head, all heads of all tokens; dense decode is a legacy kernel."""
    lens = torch.tensor([70, 5], dtype=torch.int32)
    schedule = FlashMLAKernels(HEADS, 512).schedule(lens, queries)
    given = recorder.calls["get_mla_decoding_metadata"]
    assert given.pop("seqlens_k") is lens
    wanted = {"num_q_tokens_per_head_k": queries * HEADS, "h_k": 1, "h_q": HEADS}
    assert given == wanted | {"is_fp8_kvcache": False, "use_legacy": True}
    assert schedule.tiles.shape == (5, 8) and schedule.splits.shape == (REQUESTS + 1,)


@pytest.mark.parametrize("queries", [1, QUERIES])
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_call_is_made_as_the_library_takes_it(recorder: Recorder, queries: int, contiguous: bool) -> None:
    made = FlashMLAKernels(HEADS, 512)
    planned = call(queries, made.schedule(torch.tensor([70, 5], dtype=torch.int32), queries))
    cache = torch.zeros(4, 64, 1, 576)
    q = torch.randn(REQUESTS * queries, HEADS, 576 if contiguous else 600)[..., :576]
    out, lse = made.attend(q, cache, planned, 0.25)
    given = recorder.calls["flash_mla_with_kvcache"]
    assert torch.equal(given["q"], q.reshape(REQUESTS, queries, HEADS, 576)) and given["q"].is_contiguous()
    assert given["k_cache"] is cache and given["block_table"] is planned.page_table
    assert given["cache_seqlens"] is planned.kv_lens
    assert (given["head_dim_v"], given["softmax_scale"], given["causal"]) == (512, 0.25, queries > 1)
    assert given["is_fp8_kvcache"] is False and given["use_legacy"] is True
    assert given["tile_scheduler_metadata"].tile_scheduler_metadata is planned.schedule.tiles
    assert given["tile_scheduler_metadata"].num_splits is planned.schedule.splits
    assert out.shape == (REQUESTS * queries, HEADS, 512) and lse.shape == (REQUESTS, HEADS, queries)


def test_a_sparse_call_over_packed_rows_is_made_as_the_library_takes_it(recorder: Recorder) -> None:
    """Every row is a request with one token. The schedule is the library's own, and is kept by the caller. There is no
    length of indices: for rows of this kind the kernel refuses it."""
    made = FlashMLASparseKernels()
    q, slots = torch.randn(5, 64, 576), torch.zeros(5, 128, dtype=torch.int32)
    cache, schedule = torch.zeros(4, 64, 1, 656, dtype=torch.uint8), made.schedule()
    out, lse = made.attend_packed(q, cache, slots, 0.25, schedule)
    given = recorder.calls["flash_mla_with_kvcache"]
    assert torch.equal(given.pop("q"), q.unsqueeze(1)) and torch.equal(given.pop("indices"), slots.unsqueeze(1))
    assert given.pop("k_cache") is cache and given.pop("tile_scheduler_metadata") is schedule
    none = {"block_table": None, "cache_seqlens": None}
    assert given == {
        **none,
        "head_dim_v": 512,
        "softmax_scale": 0.25,
        "is_fp8_kvcache": True,
        "use_legacy": True,
    }
    assert out.shape == (5, 64, 512) and lse.shape == (5, 64)


def test_a_sparse_call_over_rows_is_made_as_the_library_takes_it(recorder: Recorder) -> None:
    """Its log-sum-exp is requested in natural logarithms, like that of decode."""
    q, slots = torch.randn(5, 128, 576), torch.zeros(5, 256, dtype=torch.int32)
    cache = torch.zeros(300, 1, 576)
    out, lse = FlashMLASparseKernels().attend_rows(q, cache, slots, 0.25)
    given = recorder.calls["flash_mla_sparse_fwd"]
    assert given.pop("q") is q and given.pop("kv") is cache and torch.equal(given.pop("indices"), slots.unsqueeze(1))
    assert given == {"sm_scale": 0.25, "d_v": 512, "use_legacy": True, "return_log2_lse": None}
    assert out.shape == (5, 128, 512) and lse.shape == (5, 128)


def test_more_than_the_kernel_can_count_is_refused(recorder: Recorder) -> None:
    """Partial results are indexed in 32 bits: (requests + parts) × queries × heads × 512 must stay below 2^31."""
    made, most = FlashMLAKernels(128, 512), 4096 - 1 - 5
    made.schedule(torch.ones(most, dtype=torch.int32), 8)
    with raises_naming(PlanError, most) as caught:
        made.schedule(torch.ones(most + 1, dtype=torch.int32), 8)
    assert caught.value.settings == ("max_batch",)


def test_what_is_imported_is_there(package: Path) -> None:
    """The names that ``load_library`` asks of the package."""
    exported = {
        alias.name
        for node in ast.walk(ast.parse((package / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    source = inspect.getsource(kernels.load_library.__wrapped__)
    asked = set(re.findall(r"flash_mla\.(\w+)", source))
    assert {"has_legacy", "flash_mla_with_kvcache"} < asked <= exported


def test_a_schedule_of_the_library_holds_what_we_put_into_it(package: Path) -> None:
    (schedmeta,) = (
        node
        for node in ast.parse((package / "flash_mla_interface.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "FlashMLASchedMeta"
    )
    fields = {node.target.id for node in schedmeta.body if isinstance(node, ast.AnnAssign)}
    assert fields == set(Schedmeta.__slots__)


def test_a_dense_call_hands_our_schedule_to_the_kernel(package: Path) -> None:
    """The kernel makes its own schedule only if none is given. Compares the arguments of dense decode's operator, in
    order."""
    calls = [
        node
        for node in ast.walk(functions(package)["flash_mla_with_kvcache"])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "dense_decode_fwd"
    ]
    (dense,) = calls
    assert [ast.unparse(argument) for argument in dense.args] == [
        *("q", "k_cache", "head_dim_v", "cache_seqlens", "block_table", "softmax_scale", "causal"),
        *("sched_meta.tile_scheduler_metadata", "sched_meta.num_splits"),
    ]


@pytest.mark.parametrize(
    "stated",
    [
        "Dense decode MLA is only supported on SM90a architecture",
        "Currently page_block_size must be 64",
        "Only head_size_v == 512 is supported",
        "Only head_size_k == 576 or 512 is supported",
        "seqlens_k must have dtype int32",
        "block_table must have contiguous last dimension",
        "query and key must have the same dtype",
        "batch size must be positive",
        "Only head_size_k == 576 or 512 is supported for sparse decoding",
        "V3.2 does not support dynamic topk length",
        "Sparse Attention Forward Kernel is only supported on SM90a and SM100f architectures.",
        "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table, float "
        "softmax_scale, bool is_causal, Tensor(a!)? tile_scheduler_metadata, Tensor(b!)? num_splits)",
        "get_mla_decoding_metadata(Tensor seqlens_k, int num_q_tokens_per_head_k, int h_k, int? h_q, bool "
        "is_fp8_kvcache, int? topk)",
    ],
)
def test_the_compiled_kernels_state_the_limits_that_the_reference_asserts(package: Path, stated: str) -> None:
    (library,) = package.glob("_C_legacy*.so")
    assert stated.encode() in library.read_bytes()


def test_what_is_unpacked_is_what_is_claimed_and_pinned() -> None:
    project = tomllib.loads((ROOT / "plugins" / "flashmla" / "pyproject.toml").read_text())["project"]
    (claimed,) = (Requirement(text) for text in project["dependencies"] if Requirement(text).name == "sgl-flash-mla")
    (pinned,) = re.findall(r"^sgl-flash-mla==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert all(claimed.specifier.contains(version) for version in (pinned, *UNPACKED.split()))
    assert pinned in UNPACKED.split()


@pytest.mark.parametrize("tokens", [1, QUERIES])
def test_a_raw_call_is_one_that_the_library_takes(recorder: Recorder, tokens: int) -> None:
    """``attnplug bench --against raw`` measures such calls."""
    dims = MLADims(512, 128, 64)
    layer = LayerSpec(0, AttentionKind.MLA, HEADS, HEADS, 192, 128, 192**-0.5, mla=dims)
    pool = MLAPool([layer], num_pages=4, page_size=64, dtype=DType.BFLOAT16, device="cpu")
    table, q = torch.zeros(REQUESTS, 2, dtype=torch.int32), torch.zeros(REQUESTS * tokens, HEADS, dims.row_dim)
    raw = calls(RawScene((layer,), KVPools(mla=pool), 64, table, (70, 5), tokens, False, q, True))
    assert raw is not None
    raw.begin()
    assert raw.run(0).shape == (REQUESTS * tokens, HEADS, 512)
    assert recorder.calls["flash_mla_with_kvcache"]["causal"] is (tokens > 1)
    raw.plan()
