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

from attnplug import AttentionKind, BackendContext, DType, ForwardMode, LayerSpec, MHAPool
from attnplug.host import KVPools
from attnplug_conformance.checks.graphs import Capture
from attnplug_flashinfer import kernels
from attnplug_flashinfer.backend import FlashInferBackend
from attnplug_flashinfer.plugin import LIBRARY
from attnplug_flashinfer.raw import calls
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


def test_the_numbers_of_a_plan_are_in_the_order_that_we_read_them_in(home: Path) -> None:
    """Nothing but their order tells them apart; the C++ in the wheel gives them names."""
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
