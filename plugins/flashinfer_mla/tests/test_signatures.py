"""Every call of kernels.py to FlashInfer matches FlashInfer's signature, in each version that the plugin claims.

Signatures are taken from FlashInfer itself. Nothing is computed, so nothing here proves that a kernel is right. No GPU
is needed: CUDA events are replaced by stand-ins.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from attnplug_tune.raw_calls import RawScene
from packaging.requirements import Requirement
from torch import Tensor

from attnplug import (
    AttentionKind,
    BackendError,
    DType,
    ExtendPath,
    LayerSpec,
    MLAPool,
    MLAShape,
    ModelSpec,
    Problem,
    RaggedCall,
    Role,
)
from attnplug.host import KVPools, MLADims
from attnplug_flashinfer_mla import jit_modules, kernels
from attnplug_flashinfer_mla.kernels import FlashInferMLAKernels, FlashInferMLALibrary, LatentCache, MLAGraphBuffers
from attnplug_flashinfer_mla.lengths import CallLengths
from attnplug_flashinfer_mla.options import FlashInferMLAOptions, KernelName
from attnplug_flashinfer_mla.planner import MLAPagedCall
from attnplug_flashinfer_mla.raw import calls
from attnplug_flashinfer_mla.work_list import MAX_WORK_ITEMS, TILE_ROWS
from attnplug_testing.errors import raises_naming

ROOT = Path(__file__).resolve().parents[3]
VERSION_VARIABLE = "ATTNPLUG_TEST_FLASHINFER"
PLAIN = [option for plugin in ("cacheprovider", "hypothesispytest") for option in ("-p", f"no:{plugin}")]
"""For a pytest that starts in half the time."""
(UNPACKED,) = re.findall(r"^FLASHINFER := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)

SHAPE = MLAShape(
    pool=None,  # kernels take their rows by the call
    heads=128,
    dims=MLADims(512, 128, 64),
    v_head_dim=128,
    scale=192**-0.5,
    page_size=64,
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
)
PROCESSORS, CLUSTER = 132, 2
WORK_LIST = {
    "q_indptr_offset": "q_indptr",
    "kv_indptr_offset": "kv_indptr",
    "partial_indptr_offset": "partial_indptr",
    "merge_packed_offset_start_offset": "merge_start",
    "merge_packed_offset_end_offset": "merge_end",
    "merge_partial_packed_offset_start_offset": "merge_partial_start",
    "merge_partial_packed_offset_end_offset": "merge_partial_end",
    "merge_partial_stride_offset": "merge_stride",
    "q_len_offset": "q_len",
    "kv_len_offset": "kv_len",
    "q_start_offset": "q_start",
    "kv_start_offset": "kv_start",
    "kv_end_offset": "kv_end",
    "work_indptr_offset": "work_indptr",
}
"""Names of the work list's arrays in FlashInfer's scheduler, and our names for them."""
FLAT = {"qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "cum_seq_lens_q", "block_tables", "seq_lens", "max_q_len"}
SEPARATE = {"q_nope", "q_pe", "ckv_cache", "kpe_cache", "kv_len", "page_table"}


class Call(NamedTuple):
    """A call: how many arguments it gave by position, and all of them by the names of the real signature."""

    method: str
    positional: int
    given: dict[str, Any]


class Recorder:
    """Stands in for a class of FlashInfer: takes a call where the real signature does, and remembers it."""

    def __init__(self, real: type) -> None:
        self.real, self.calls = real, list[Call]()

    def __call__(self, *args: Any, **named: Any) -> Wrapper:
        self.record("__init__", args, named)
        return Wrapper(self)

    def record(self, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        bound = inspect.signature(getattr(self.real, method)).bind("self", *args, **named)
        given = {name: value for name, value in bound.arguments.items() if name != "self"}
        self.calls.append(Call(method, len(args), given))

    def last(self, method: str) -> dict[str, Any]:
        return [call.given for call in self.calls if call.method == method][-1]


class Wrapper:
    """Wrapper made by a recorder, with the members of a planned wrapper of FlashInfer."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def plan(self, *args: Any, **named: Any) -> None:
        self._recorder.record("plan", args, named)
        self._plan_info = list(plan_info().values())
        self._int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)

    def run(self, *args: Any, **named: Any) -> Tensor | tuple[Tensor, Tensor]:
        self._recorder.record("run", args, named)
        out = named["out"] if named["out"] is not None else torch.empty(0)
        return (out, named["lse"]) if named.get("return_lse") else out


class Event:
    """A CUDA event that is always in the past."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FlashInferMLALibrary:
    """The real library, with recorders for its wrappers."""
    real = kernels.load_library()
    recording = replace(real, paged=Recorder(real.paged), ragged=Recorder(real.ragged))
    monkeypatch.setattr(kernels, "load_library", lambda: recording)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return recording


def make(kernel: str = "fa3", **changes: Any) -> FlashInferMLAKernels:
    return FlashInferMLAKernels(replace(SHAPE, **changes), torch.empty(1 << 10, dtype=torch.uint8), kernel)


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def paged_call(*, causal: bool) -> MLAPagedCall:
    """Two requests, of 70 and 5 rows, with three queries or one each."""
    queries = 3 if causal else 1
    lengths = CallLengths(int32(0, queries, 2 * queries), int32(0, 2, 3), int32(70, 5))
    table = torch.tensor([[4, 7], [2, -1]], dtype=torch.int32)
    return MLAPagedCall(slice(0, 2 * queries), SHAPE.heads, causal, lengths, int32(4, 7, 2), table, lengths.kv_lens)


def cache(dtype: torch.dtype = torch.bfloat16) -> LatentCache:
    return LatentCache.of(
        torch.zeros(8, SHAPE.page_size, SHAPE.dims.row_dim, dtype=dtype), SHAPE.dims.kv_lora_rank, 0.5
    )


def queries(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, out and lse of a paged call."""
    shape = (rows, SHAPE.heads)
    q = torch.zeros(*shape, SHAPE.dims.row_dim, dtype=SHAPE.dtype)
    return q, torch.zeros(*shape, SHAPE.dims.kv_lora_rank, dtype=SHAPE.dtype), torch.zeros(shape)


# ---- the paged wrapper ----


@pytest.mark.parametrize("causal", [False, True])
def test_a_paged_plan_is_taken_with_everything_the_call_has(library: FlashInferMLALibrary, causal: bool) -> None:
    """The lengths go in as they are on the host, so that planning copies nothing back from the device."""
    call = paged_call(causal=causal)
    make("fa2").paged(decode=not causal).plan(call)
    assert library.paged.last("__init__")["backend"] == "fa2"
    given = library.paged.last("plan")
    arrays = given if library.metadata is None else vars(given["metadata"])
    assert arrays["qo_indptr"] is call.lengths.qo_indptr
    assert arrays["kv_indptr"] is call.lengths.kv_indptr
    assert arrays["kv_indices"] is call.kv_indices
    assert arrays["kv_len_arr"] is call.lengths.kv_lens
    wanted = {
        "num_heads": SHAPE.heads,
        "head_dim_ckv": 512,
        "head_dim_kpe": 64,
        "page_size": SHAPE.page_size,
        "causal": causal,
        "sm_scale": SHAPE.scale,
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.bfloat16,
    }
    assert {name: given[name] for name in wanted} == wanted


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_a_paged_run_is_taken(library: FlashInferMLALibrary, kv_dtype: torch.dtype, with_lse: bool) -> None:
    """C4: log-sum-exp is asked for in natural logarithms. An fp8 cache comes with its scales, others without."""
    if kv_dtype is torch.float8_e4m3fn and not library.reads_fp8:
        pytest.skip(f"flashinfer {library.version} reads no fp8 cache, and the plugin refuses one")
    kernel = make(kv_dtype=kv_dtype).paged(decode=True)
    kernel.plan(paged_call(causal=False))
    rows = cache(kv_dtype)
    q, out, lse = queries(2)
    kernel.run(q, None, rows, out, lse if with_lse else None)
    assert library.paged.last("plan")["kv_data_type"] is kv_dtype
    given = library.paged.last("run")
    assert given["out"] is out
    assert given["return_lse_base_on_e"] is True
    if with_lse:
        assert given["lse"] is lse and given["return_lse"] is True
    scales = {name: value for name, value in given.items() if name.endswith("_scale")}
    assert scales == ({"ckv_scale": 0.5, "kpe_scale": 0.5} if kv_dtype is torch.float8_e4m3fn else {})


@pytest.mark.parametrize("with_lse", [False, True])
def test_a_run_asks_for_the_log_sum_exp_that_its_plan_announced(library: FlashInferMLALibrary, with_lse: bool) -> None:
    """A plan that announces it makes every run ask for it; other runs ask only if it is wanted."""
    kernel = make().paged(decode=True)
    kernel.plan(paged_call(causal=False))
    q, out, lse = queries(2)
    kernel.run(q, None, cache(), out, lse if with_lse else None)
    given = library.paged.last("run")
    if library.metadata is None:
        assert given["return_lse"] is with_lse
    else:
        assert library.paged.last("plan")["lse_mode"] == "basee"
        assert given["return_lse"] is True
        assert (given["lse"].shape, given["lse"].dtype) == (lse.shape, torch.float32)


def query_of(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Both parts of q, however the version takes them."""
    return given["query"] if "query" in given else (given["q_nope"], given["q_pe"])


def test_a_query_in_parts_is_handed_on_as_it_is(library: FlashInferMLALibrary) -> None:
    """Parts are neither joined nor copied, even with heads before rows or as a slice of a wider tensor."""
    kernel = make().paged(decode=True)
    kernel.plan(paged_call(causal=False))
    _, out, lse = queries(2)
    latent = torch.zeros(SHAPE.heads, 2, 512, dtype=SHAPE.dtype).transpose(0, 1)
    rope = torch.zeros(2, SHAPE.heads, 192, dtype=SHAPE.dtype)[..., 128:]
    kernel.run(latent, rope, cache(), out, lse)
    found = query_of(library.paged.last("run"))
    assert found[0] is latent and found[1] is rope
    if library.metadata is not None:
        assert library.paged.last("plan")["query_layout"] == "split"


def test_a_query_that_is_joined_is_parted_where_it_lies(library: FlashInferMLALibrary) -> None:
    kernel = make().paged(decode=True)
    kernel.plan(paged_call(causal=False))
    q, out, lse = queries(2)
    kernel.run(q, None, cache(), out, lse)
    latent, rope = query_of(library.paged.last("run"))
    assert (latent.shape[2], rope.shape[2]) == (512, 64)
    assert latent.data_ptr() == q.data_ptr() and rope.data_ptr() == q[..., 512:].data_ptr()


@pytest.mark.parametrize("wrong", ["column", "stride", "address"])
def test_a_part_that_the_kernels_cannot_read_is_copied(library: FlashInferMLALibrary, wrong: str) -> None:
    """They copy 16 bytes at once, and do not look at the stride of columns."""
    kernel = make().paged(decode=True)
    kernel.plan(paged_call(causal=False))
    _, out, lse = queries(2)
    numbers = torch.arange(2 * SHAPE.heads * 128, dtype=SHAPE.dtype).view(2, SHAPE.heads, 128)
    odd = numbers.flatten()[: 2 * SHAPE.heads * 68].view(2, SHAPE.heads, 68)[..., :64]
    rope = {"column": numbers[..., ::2], "stride": odd, "address": numbers[..., 1:65]}[wrong]
    kernel.run(torch.zeros(2, SHAPE.heads, 512, dtype=SHAPE.dtype), rope, cache(), out, lse)
    found = query_of(library.paged.last("run"))[1]
    assert found is not rope and found.is_contiguous() and torch.equal(found, rope)


def test_a_captured_call_reserves_its_buffers(library: FlashInferMLALibrary) -> None:
    lengths = CallLengths(int32(0, 1, 2), int32(0, 2, 3), int32(70, 5))
    buffers = MLAGraphBuffers(lengths, torch.zeros(8, dtype=torch.int32))
    make().paged(decode=True, graph=buffers).plan(paged_call(causal=False))
    given = library.paged.last("__init__")
    assert given["use_cuda_graph"] is True
    assert given["qo_indptr"] is lengths.qo_indptr
    assert given["kv_indptr"] is lengths.kv_indptr
    assert given["kv_indices"] is buffers.kv_indices
    assert given["kv_len_arr"] is lengths.kv_lens


def test_the_work_list_is_read_where_the_scheduler_puts_it(library: FlashInferMLALibrary) -> None:
    """Nothing but their order tells the numbers of a plan apart; the C++ in the wheel gives them names and sizes."""
    info = plan_info()
    assert list(info) == ["num_blks_x", "num_blks_y", *WORK_LIST, "partial_o_offset", "partial_lse_offset"]
    kernel = make().paged(decode=False)
    kernel.plan(paged_call(causal=True))
    work_list = kernel.work_list()
    assert (work_list.cluster_size, work_list.clusters) == (CLUSTER, PROCESSORS // CLUSTER)
    room = array_sizes()
    for name, ours in WORK_LIST.items():
        array = getattr(work_list, ours)
        assert array.dtype is torch.int32, ours
        assert array.storage_offset() * array.element_size() == info[name], ours
        wanted = work_list.clusters + 1 if ours == "work_indptr" else room[name]
        assert array.shape[0] == wanted <= room[name], ours


def test_the_scheduler_has_the_constants_that_we_fill_its_list_by(library: FlashInferMLALibrary) -> None:
    assert re.findall(r"max_total_num_works = (\d+);", scheduler()) == [str(MAX_WORK_ITEMS)]
    assert re.findall(r"cta_tile_q = (\d+);", scheduler()) == [str(TILE_ROWS)]


def test_the_private_members_that_are_read_are_there(library: FlashInferMLALibrary) -> None:
    """They are set by the class, or handed up from its backends by name."""
    source = inspect.getsource(importlib.import_module(library.paged.real.__module__))
    for name in ("_int_workspace_buffer", "_plan_info"):
        assert re.search(rf'self\.{name} = |"{name}"', source), name


def scheduler() -> str:
    """The C++ of FlashInfer's planner for MLA, which it compiles where it is used."""
    package = Path(inspect.getsourcefile(importlib.import_module("flashinfer")) or "").parent
    source = (package / "data" / "include" / "flashinfer" / "attention" / "scheduler.cuh").read_text()
    end = source.index("\n}\n", source.index(" MLAPlan("))
    return source[source.index("struct MLAPlanInfo") : end]


def array_sizes() -> dict[str, int]:
    """Capacity of each array of the work list, in memory order."""
    allocation = r"plan_info\.(\w+) =\s+int_allocator\.aligned_alloc_offset\(\s*sizeof\(IdType\) \* (\w+), 16, \"mla_"
    counts = {"max_total_num_works": MAX_WORK_ITEMS, "num_sm": PROCESSORS}
    return {name: counts[count] for name, count in re.findall(allocation, scheduler())}


def plan_info() -> dict[str, int]:
    """The numbers of a plan for 132 multiprocessors in pairs, by the names and in the order of the C++."""
    (names,) = re.findall(r"ToVector\(\) const \{\s*return \{(.*?)\}", scheduler(), re.DOTALL)
    numbers = dict.fromkeys((name.strip() for name in names.split(",")), 0)
    numbers |= {"num_blks_x": CLUSTER, "num_blks_y": PROCESSORS // CLUSTER}
    ends = accumulate((4 * count for count in array_sizes().values()), initial=0)
    return numbers | dict(zip(array_sizes(), ends, strict=False))


# ---- the paged wrapper's CUTLASS kernel ----


def test_cutlass_before_it_was_planned_is_refused(library: FlashInferMLALibrary) -> None:
    """There, every call copied the layer's whole cache."""
    if library.metadata is not None:
        make("cutlass")
        return
    with raises_naming(BackendError, "flashinfer-python 0.7", "0.6"):
        make("cutlass")


def planned_cutlass(library: FlashInferMLALibrary) -> FlashInferMLAKernels:
    if library.metadata is None:
        pytest.skip(f"flashinfer {library.version} does not plan it")
    return make("cutlass")


def test_cutlass_calls_are_taken(library: FlashInferMLALibrary) -> None:
    """It reads the page table itself, in rows of whole blocks of 128 tokens: three pages of 64 become four."""
    factory = planned_cutlass(library)
    call = replace(paged_call(causal=False), page_table=torch.zeros(2, 3, dtype=torch.int32))
    kernel = factory.paged(decode=True)
    kernel.plan(call)
    q, out, _ = queries(2)
    kernel.run(q, None, cache(), out, None)
    assert library.paged.last("__init__")["backend"] == "cutlass"
    given = library.paged.last("run")
    assert given["out"] is out and not given.get("return_lse")
    metadata = library.paged.last("plan")["metadata"]
    assert metadata.cum_seq_lens_q is call.lengths.qo_indptr and metadata.max_q_len == 1
    assert metadata.block_tables.shape == (2, 4)
    assert metadata.seq_lens is call.lengths.kv_lens  # on the host: nothing is read back


def test_cutlass_takes_one_tensor(library: FlashInferMLALibrary) -> None:
    kernel = planned_cutlass(library).paged(decode=True)
    kernel.plan(paged_call(causal=False))
    q, out, _ = queries(2)
    q.normal_()
    kernel.run(q, None, cache(), out, None)
    assert library.paged.last("run")["query"] is q
    kernel.run(q[..., :512], q[..., 512:], cache(), out, None)
    assert torch.equal(library.paged.last("run")["query"], q)


def test_cutlass_refuses_what_its_kernel_lacks(library: FlashInferMLALibrary) -> None:
    kernel = planned_cutlass(library).paged(decode=True)
    q, out, lse = queries(2)
    with raises_naming(BackendError, "kernel=auto"):
        kernel.run(q, None, cache(), out, lse)
    with raises_naming(BackendError, "kernel=auto"):
        kernel.work_list()


def test_with_cutlass_everything_but_decode_is_fa2(library: FlashInferMLALibrary) -> None:
    factory = planned_cutlass(library)
    factory.paged(decode=False)
    factory.ragged()
    assert library.paged.last("__init__")["backend"] == "fa2"
    assert library.ragged.last("__init__")["backend"] == "fa2"


# ---- the ragged wrapper ----


@pytest.mark.parametrize("causal", [False, True])
def test_a_ragged_plan_is_taken(library: FlashInferMLALibrary, causal: bool) -> None:
    call = RaggedCall.of(0, [3, 2], [7, 2], causal=causal, device=torch.device("cpu"))
    make().ragged().plan(call)
    given = library.ragged.last("plan")
    assert given.pop("qo_indptr").tolist() == [0, 3, 5]
    assert given.pop("kv_indptr").tolist() == [0, 7, 9]
    assert given == {
        "num_qo_heads": SHAPE.heads,
        "num_kv_heads": SHAPE.heads,
        "head_dim_qk": 192,
        "head_dim_vo": 128,
        "causal": causal,
        "sm_scale": SHAPE.scale,
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.bfloat16,
    }


@pytest.mark.parametrize("with_lse", [False, True])
def test_a_ragged_run_is_taken(library: FlashInferMLALibrary, with_lse: bool) -> None:
    """C4: a library that cannot be asked for natural logarithms gives powers of two, which are converted."""
    kernel = make().ragged()
    kernel.plan(RaggedCall.of(0, [3], [7], causal=True, device=torch.device("cpu")))
    q, k = torch.zeros(3, SHAPE.heads, 192), torch.zeros(7, SHAPE.heads, 192)
    v, out = torch.zeros(7, SHAPE.heads, 128), torch.zeros(3, SHAPE.heads, 128)
    lse = torch.ones(3, SHAPE.heads)
    kernel.run(q, k, v, out, lse if with_lse else None)
    given = library.ragged.last("run")
    assert given["q"] is q and given["k"] is k and given["v"] is v and given["out"] is out
    assert "args" not in given  # further arguments by position go to a kernel of the user's own
    if not with_lse:
        assert "lse" not in given and "return_lse" not in given
        return
    assert given["lse"] is lse and given["return_lse"] is True
    if library.ragged_natural_log:
        assert given["lse_base"] == "ln"
        assert lse.unique().tolist() == [1.0]
    else:
        torch.testing.assert_close(lse, torch.full_like(lse, 2.0).log())


# ---- versions ----


def test_nothing_deprecated_is_used(library: FlashInferMLALibrary) -> None:
    """Newer versions warn of arrays given flat, of q and cache in pieces, and of arguments by position."""
    if library.metadata is None:
        pytest.skip(f"flashinfer {library.version} has no other way")
    for kernel in ("fa3", "cutlass"):
        paged = make(kernel).paged(decode=True)
        paged.plan(paged_call(causal=False))
        q, out, _ = queries(2)
        paged.run(q, None, cache(), out, None)
    calls = [call for call in library.paged.calls if call.method != "__init__"]
    assert [call.method for call in calls] == ["plan", "run", "plan", "run"]
    for call in calls:
        assert call.positional == 0
        assert not (FLAT | SEPARATE) & set(call.given)
        assert {"metadata"} <= set(call.given) if call.method == "plan" else {"query", "kv_cache"} <= set(call.given)
        if call.method == "plan":
            assert isinstance(call.given["metadata"], library.metadata)


class Requested(Exception):
    """Raised instead of compiling a module, with the arguments of its loader."""


def requesting(*arguments: Any) -> None:
    raise Requested(*arguments)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FlashInfer's wrappers plan without a GPU until they ask for a module."""
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **named: real(*shape, **named))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for references in jit_modules.LOADERS.values():
        for reference in references:
            module, _, name = reference.partition(":")
            with suppress(ImportError, AttributeError):
                monkeypatch.setattr(importlib.import_module(module), name, requesting)


def listed(kind: str, problem: Problem, options: FlashInferMLAOptions) -> tuple[Any, ...]:
    """Arguments of the only listed module of a kind."""
    builds = jit_modules.kernel_builds(problem, frozenset({Role.PREFILL, Role.DECODE}), options)
    (build,) = [build for build in builds if build.name.startswith(kind)]
    with pytest.raises(Requested) as caught:
        build.build()
    return caught.value.args


def problem(sm: int, kv_dtype: DType = DType.BFLOAT16) -> Problem:
    layer = LayerSpec(0, AttentionKind.MLA, 128, 1, 576, 128, SHAPE.scale, mla=SHAPE.dims)
    return Problem(ModelSpec("m", "m", (layer,), 4096), "cuda", sm, DType.BFLOAT16, kv_dtype)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(("sm", "kernel"), [(90, "fa3"), (80, "fa2")])
def test_the_modules_that_planning_asks_for_are_those_that_are_built(sm: int, kernel: str) -> None:
    """E1: FlashInfer's own planning decides, by the arguments of its loaders."""
    options, made = FlashInferMLAOptions(), make(kernel)
    ragged = RaggedCall.of(0, [4], [4], causal=True, device=torch.device("cpu"))
    with pytest.raises(Requested) as asked:
        made.ragged().plan(ragged)
    assert asked.value.args == listed("batch_prefill", problem(sm), options)
    if kernels.load_library().metadata is None:  # newer versions check for a GPU first
        with pytest.raises(Requested) as asked:
            made.paged(decode=True).plan(paged_call(causal=False))
        assert asked.value.args == listed("batch_mla", problem(sm), options)


@pytest.mark.parametrize(("sm", "kernel"), [(80, "auto"), (90, "auto"), (100, "cutlass")])
def test_the_functions_that_build_modules_exist_and_take_these_arguments(
    sm: int, kernel: KernelName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E1: an empty disk cache has none of them, and generating their sources needs neither GPU nor compiler."""
    from flashinfer.jit import core, env

    monkeypatch.setattr(core.current_compilation_context, "TARGET_CUDA_ARCHS", {(sm // 10, "0a")})
    for folder in ("FLASHINFER_GEN_SRC_DIR", "FLASHINFER_JIT_DIR"):
        monkeypatch.setattr(env, folder, tmp_path / folder)
    options = FlashInferMLAOptions(kernel=kernel)
    builds = jit_modules.kernel_builds(problem(sm), frozenset({Role.PREFILL, Role.DECODE}), options)
    assert len(builds) == (3 if kernel == "cutlass" else 2)
    assert not any(build.is_cached() for build in builds)
    for kind, references in jit_modules.LOADERS.items():
        given = next((build.build.args[1:] for build in builds if build.build.args[0] == kind), None)
        if given is not None:
            inspect.signature(jit_modules._resolve(references)).bind(*given)


@pytest.mark.parametrize(
    ("roles", "options", "path", "kinds"),
    [
        ({Role.DECODE}, {}, None, ["batch_mla"]),
        ({Role.PREFILL}, {}, ExtendPath.ABSORBED, ["batch_mla"]),
        ({Role.PREFILL}, {"disable_ragged": True}, None, ["batch_mla"]),
        ({Role.DRAFT}, {}, None, ["batch_mla", "batch_prefill"]),
    ],
)
def test_only_modules_that_a_request_can_reach_are_built(
    roles: set[Role], options: dict[str, Any], path: ExtendPath | None, kinds: list[str]
) -> None:
    """E1: each takes up to a minute."""
    given = replace(problem(90), mla_extend=path)
    builds = jit_modules.kernel_builds(given, frozenset(roles), FlashInferMLAOptions(**options))
    assert [build.name.partition("_fa")[0] for build in builds] == kinds


def test_this_is_the_version_it_should_be() -> None:
    if VERSION_VARIABLE not in os.environ:
        pytest.skip("any version that is installed")
    assert kernels.load_library().version == os.environ[VERSION_VARIABLE]


def test_the_unpacked_versions_are_the_ends_of_what_the_plugin_claims() -> None:
    project = tomllib.loads((ROOT / "plugins/flashinfer_mla/pyproject.toml").read_text())["project"]
    (claimed,) = (Requirement(text) for text in project["dependencies"] if text.startswith("flashinfer-python"))
    oldest, newest = UNPACKED.split()
    assert claimed.specifier.contains(newest)
    assert f">={oldest}" in str(claimed.specifier).split(",")


@pytest.mark.long
@pytest.mark.skipif(VERSION_VARIABLE in os.environ, reason="this is such a version")
@pytest.mark.parametrize("version", UNPACKED.split())
def test_other_versions_take_the_same_calls(version: str) -> None:
    """This file again, against a FlashInfer that ``make test`` unpacked beside the one that is installed."""
    unpacked = Path(sys.prefix) / "flashinfer" / version
    if not unpacked.is_dir():
        pytest.skip(f"there is no {unpacked}; make test unpacks it")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join(filter(None, (str(unpacked), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *PLAIN, __file__],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": path, VERSION_VARIABLE: version},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_a_raw_call_is_one_that_the_library_takes(library: FlashInferMLALibrary) -> None:
    """``attnplug bench --against raw`` measures such calls."""
    layer = LayerSpec(0, AttentionKind.MLA, 128, 128, 192, 128, SHAPE.scale, mla=SHAPE.dims)
    pool = MLAPool([layer], num_pages=4, page_size=64, dtype=DType.BFLOAT16, device="cpu")
    table = torch.tensor([[3, 1], [2, -1]], dtype=torch.int32)
    raw = calls(RawScene((layer,), KVPools(mla=pool), 64, table, (70, 5), 1, False, queries(2)[0], True))
    assert raw is not None
    given = library.paged.last("plan")
    assert given["kv_indices"].tolist() == [3, 1, 2] and given["kv_indptr"].tolist() == [0, 2, 3]
