"""Every call to FlashInfer is one that it takes, in each version that the plugin claims: signatures are read from the
sources, and nothing of it is imported. The stand-ins bind all calls of the other tests to the installed one's."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attnplug_tune.raw_calls import RawScene
from packaging.requirements import Requirement

from attnplug import AttentionKind, BackendContext, DType, ForwardMode, LayerSpec, MHAPool, ModelSpec, Problem, Role
from attnplug.host import KVPools
from attnplug_conformance.checks.graphs import Capture
from attnplug_flashinfer import kernels
from attnplug_flashinfer.backend import FlashInferBackend
from attnplug_flashinfer.jit_modules import kernel_builds
from attnplug_flashinfer.options import FlashInferOptions
from attnplug_flashinfer.planner import FlashInferPagedCall
from attnplug_flashinfer.plugin import LIBRARY
from attnplug_flashinfer.raw import calls
from attnplug_flashinfer.shapes import FlashInferLayerShape
from attnplug_flashinfer.work_list import PageCounts, UniformPagedBatch
from attnplug_flashinfer_mla.lengths import CallLengths
from attnplug_testing.batches import declaring
from attnplug_testing.kernel_scene import check, check_replay, mha
from attnplug_testing.signatures import installed, read_signature, unpacked
from paged_reference import reference, scene

ROOT = Path(__file__).resolve().parents[3]
(UNPACKED,) = re.findall(r"^FLASHINFER := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
NEWEST = UNPACKED.split()[-1]
PLAN_NUMBERS = (
    *("padded_batch_size", "total_num_rows", "total_num_rows_offset", "cta_tile_q", "request_indices_offset"),
    *("qo_tile_indices_offset", "kv_tile_indices_offset", "merge_indptr_offset", "o_indptr_offset"),
    *("kv_chunk_size_ptr_offset", "v_offset", "s_offset", "block_valid_mask_offset", "enable_cuda_graph", "split_kv"),
)


@pytest.fixture(params=["installed", "newest"])
def home(request: pytest.FixtureRequest) -> Path:
    """The folder that holds a version's package."""
    if request.param == "installed":
        return installed("flashinfer")
    folder = unpacked("flashinfer", NEWEST)
    if folder is None:
        pytest.skip(f"there is no FlashInfer {NEWEST} beside the installed one; make test unpacks it")
    return folder


def over(home: Path, context: BackendContext) -> FlashInferBackend:
    own = declaring(context, "flashinfer")
    return FlashInferBackend(own, kernels=reference(own, home))


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_eager_calls_are_taken(home: Path, mode: ForwardMode) -> None:
    lengths = ((70, 1), (3, 1)) if mode.is_decode else ((3, 70), (0, 66))
    check(scene(mha(lengths, mode, window=50, cap=3.0), "cpu", partial(over, home)))


@pytest.mark.parametrize(("mode", "new"), [(ForwardMode.DECODE, 1), (ForwardMode.TARGET_VERIFY, 3)])
def test_captured_calls_are_taken(home: Path, mode: ForwardMode, new: int) -> None:
    stage = scene(mha(((300, new), (3, new)), mode), "cpu", partial(over, home))
    check_replay(Capture(stage).reserve().capture(), stage)


@pytest.mark.parametrize("captured", [False, True])
def test_raw_calls_are_taken(home: Path, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``attnplug bench --against raw`` measures such calls."""
    given: dict[str, dict[str, Any]] = {}

    class Bound:
        def __init__(self, *args: Any, **named: Any) -> None:
            self._bind("__init__", args, named)

        def _bind(self, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            name = f"BatchDecodeWithPagedKVCacheWrapper.{method}"
            signature = read_signature(home / "flashinfer" / "decode.py", name)
            given[method] = dict(signature.bind(self, *args, **named).arguments)

        def plan(self, *args: Any, **named: Any) -> None:
            self._bind("plan", args, named)

        def run(self, *args: Any, **named: Any) -> torch.Tensor:
            self._bind("run", args, named)
            return torch.zeros(2, 8, 64)

    monkeypatch.setattr(kernels, "load_library", lambda: kernels.FlashInferLibrary(None, Bound, None))
    layer = LayerSpec(0, AttentionKind.MHA, 8, 2, 64, 64, 0.125)
    pool = MHAPool([layer], num_pages=4, page_size=64, dtype=DType.BFLOAT16, device="cpu")
    table = torch.tensor([[3, 1], [2, -1]], dtype=torch.int32)
    q = torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    made = RawScene((layer,), KVPools(mha=pool), 64, table, (70, 5), 1, False, q, captured)
    raw = calls(made)
    assert raw is not None and calls(replace(made, tokens=2)) is None
    raw.begin()
    raw.run(0)
    assert given["plan"]["indices"].tolist() == [3, 1, 2] and given["plan"]["indptr"].tolist() == [0, 2, 3]
    assert given["plan"]["last_page_len"].tolist() == [6, 5]
    assert given["run"]["paged_kv_cache"][0] is not None


class Requested(Exception):
    """Raised instead of compiling a module, with the arguments of its loader."""


def requesting(*arguments: Any) -> None:
    raise Requested(*arguments)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (50, 3.0)])
def test_the_modules_that_planning_asks_for_are_those_that_are_built(
    window: int | None, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E1: the installed FlashInfer's planning decides, eager and captured, by the arguments of its loader."""
    from flashinfer import decode, prefill

    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **named: real(*shape, **named))
    for module in (decode, prefill):
        monkeypatch.setattr(module, "get_batch_prefill_module", requesting)
    library = replace(kernels.load_library(), event=lambda: None)
    layer = LayerSpec(0, AttentionKind.MHA, 8, 2, 64, 64, 0.125, window, cap)
    shape, scratch = FlashInferLayerShape.of(layer), torch.empty(1 << 10, dtype=torch.uint8)
    dtypes = kernels.KernelDTypes(64, torch.bfloat16, torch.float8_e4m3fn)
    kv_lens, counts = torch.tensor([70], dtype=torch.int32), PageCounts(*torch.zeros(2, 2, dtype=torch.int32))
    indices = torch.zeros(2, dtype=torch.int32)
    lengths = CallLengths(torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32), kv_lens)
    call = FlashInferPagedCall(True, False, lengths, kv_lens - 64, indices, 3)
    asked = []
    eager = kernels.FlashInferEager(library, shape, dtypes, scratch, kernels.FA2)
    with pytest.raises(Requested) as caught:
        eager.plan(call)
    asked.append(caught.value.args)
    buffers = kernels.PagedGraphBuffers(PageCounts(counts.kv_indptr, counts.last_page_lens[:1]), indices)
    batch = UniformPagedBatch(1, 1, 4, 64, shape.window_left)
    captured = kernels.FlashInferCaptured(library, shape, dtypes, scratch, batch, buffers)
    with pytest.raises(Requested) as caught:
        captured.plan(kv_lens)
    asked.append(caught.value.args)
    spec = ModelSpec("m", "m", (layer,), 4096)
    problem = Problem(spec, "cuda", 90, DType.BFLOAT16, DType.FLOAT8_E4M3)
    (build,) = kernel_builds(problem, frozenset({Role.PREFILL, Role.DECODE}), FlashInferOptions())
    with pytest.raises(Requested) as caught:
        build.build()
    assert asked == [caught.value.args] * 2


def test_long_extends_have_a_module_of_their_own_on_hopper() -> None:
    """E1: fa3 for prefill over a 16-bit cache; decode alone never reaches it."""
    layer = LayerSpec(0, AttentionKind.MHA, 8, 2, 64, 64, 0.125)
    problem = Problem(ModelSpec("m", "m", (layer,) * 2, 4096), "cuda", 90, DType.BFLOAT16, DType.BFLOAT16)
    for roles, used in (({Role.PREFILL, Role.DECODE}, ["fa2", "fa3"]), ({Role.DECODE}, ["fa2"])):
        builds = kernel_builds(problem, frozenset(roles), FlashInferOptions())
        assert [build.name.split("_")[2] for build in builds] == used


def test_the_numbers_of_a_plan_are_in_the_order_that_we_read_them_in(home: Path) -> None:
    """The numbers are distinguished only by their order; the C++ source in the wheel names them."""
    source = (home / "flashinfer/data/include/flashinfer/attention/scheduler.cuh").read_text()
    source = source[source.index("struct PrefillPlanInfo") :]
    (names, *_) = re.findall(r"ToVector\(\) const \{\s*return \{(.*?)\}", source, re.DOTALL)
    assert tuple(name.strip() for name in names.split(",")) == PLAN_NUMBERS


def test_the_private_members_that_are_read_are_there(home: Path) -> None:
    source = (home / "flashinfer/decode.py").read_text()
    for name in ("_int_workspace_buffer", "_plan_info"):
        assert f"self.{name} = " in source, name


def test_a_row_without_parts_is_merged_to_zero(home: Path) -> None:
    """Padded requests rely on it: they have no work items."""
    source = (home / "flashinfer/data/include/flashinfer/attention/cascade.cuh").read_text()
    kernel = source[source.index("PersistentVariableLengthMergeStatesKernel(") :]
    empty = kernel[kernel.index("num_index_sets == 0") :][:400]
    assert "v.fill(DTypeO(0.f))" in empty and "= -math::inf" in empty


def test_the_range_begins_at_the_pinned_version_and_holds_the_newest() -> None:
    project = tomllib.loads((ROOT / "plugins/flashinfer/pyproject.toml").read_text())["project"]
    assert LIBRARY in project["dependencies"]
    claimed = Requirement(LIBRARY).specifier
    pinned = re.search(r"^flashinfer-python==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and f">={pinned[1]}" in str(claimed).split(",")
    assert claimed.contains(NEWEST)
