"""Every call of kernels.py to a library matches the signature of the library's function.

Signatures are taken from the libraries themselves. Only references compute, so nothing here proves that a kernel is
right. flash-attn-4 cannot be imported without the CuTe DSL, nor flash-attn 2 without a compiled extension: their
sources are read. torch's function is the installed one.
"""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attnplug_tune.raw_calls import RawScene
from torch import Tensor

from attnplug import AttentionKind, BackendError, DType, LayerSpec, MHAPool, RaggedCall
from attnplug.host import KVPools
from attnplug_flashattention import kernels
from attnplug_flashattention.kernels import (
    FA2Kernels,
    FA4Kernels,
    SoftmaxParams,
    TorchKernels,
    choose_kernels,
    key_tiles,
)
from attnplug_flashattention.planner import PagedCall
from attnplug_flashattention.raw import calls
from attnplug_testing.errors import raises_naming
from attnplug_testing.references.flashattention import (
    fa2_varlen_func,
    fa4_varlen_func,
    key_tile,
    torch_varlen_attn,
    torch_varlen_attn_2_11,
)

ROOT = Path(__file__).resolve().parents[3]
(VERSIONS,) = re.findall(r"^FLASH_ATTENTION := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
FA4, FA2 = (ROOT / ".venv" / "flashattention" / version for version in VERSIONS.split())
INTERFACE = FA4 / "flash_attn" / "cute" / "interface.py"
LAYER = LayerSpec(0, AttentionKind.MHA, 8, 2, 64, 64, 0.125)


@pytest.fixture(autouse=True)
def unpacked() -> None:
    if not INTERFACE.exists():
        pytest.skip(f"{INTERFACE} is not there; make test unpacks it")


def function(path: Path, name: str) -> ast.FunctionDef:
    (found,) = (
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return found


def signature(path: Path, name: str) -> inspect.Signature:
    """Signature of a function that cannot be imported."""
    bare = ast.FunctionDef(name, function(path, name).args, [ast.Pass()], [], type_params=[])
    for argument in [*bare.args.args, *bare.args.kwonlyargs]:
        argument.annotation = None
    made: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(ast.Module([bare], [])), str(path), "exec"), made)
    return inspect.signature(made[name])


def varlen() -> Any:
    """torch's ``varlen`` module, imported only when a test runs, as it imports all of dynamo."""
    from torch.nn.attention import varlen

    return varlen


SIGNATURES: dict[str, Callable[[], inspect.Signature]] = {
    "fa4": lambda: signature(INTERFACE, "flash_attn_varlen_func"),
    "fa2": lambda: signature(FA2 / "flash_attn" / "flash_attn_interface.py", "flash_attn_varlen_func"),
    "torch": lambda: inspect.signature(varlen().varlen_attn),
}
REFERENCES = {"fa4": fa4_varlen_func, "fa2": fa2_varlen_func, "torch": torch_varlen_attn}
ADAPTERS: dict[str, Callable[..., Any]] = {"fa4": FA4Kernels, "fa2": FA2Kernels, "torch": TorchKernels}


@dataclass
class Recorder:
    """Accepts a call that the real signature accepts, records it, and returns the reference's result."""

    name: str

    def __post_init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.real, self.__signature__ = SIGNATURES[self.name](), inspect.signature(REFERENCES[self.name])

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls.append(dict(self.real.bind(*arguments, **named).arguments))
        return REFERENCES[self.name](*arguments, **named)


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def ragged(queries: tuple[int, ...], keys: tuple[int, ...], causal: bool = True) -> RaggedCall:
    return RaggedCall.of(0, queries, keys, causal=causal, device=torch.device("cpu"))


def rows(count: int, heads: int, dim: int) -> Tensor:
    return torch.randn(count, heads, dim, generator=torch.Generator().manual_seed(count)).bfloat16()


def pages(size: int) -> Tensor:
    return rows(4 * size, 2, 64).unflatten(0, (4, size))


def paged(queries: tuple[int, ...], keys: tuple[int, ...]) -> PagedCall:
    table = torch.tensor([[2, 1], [0, 3]], dtype=torch.int32)[: len(keys)]
    even = queries[0] if len(set(queries)) == 1 else None
    causal = queries != (1,) * len(queries)
    return PagedCall(table, int32(*keys), max(keys), even, causal, ragged(queries, keys, causal))


@pytest.mark.parametrize("name", REFERENCES)
def test_references_take_what_the_library_takes(name):
    """Parameters have the same names, order and defaults, and there are no others."""
    real = SIGNATURES[name]().parameters
    own = inspect.signature(REFERENCES[name]).parameters
    assert [parameter for parameter in real if parameter in own] == list(own)
    for parameter, mine in own.items():
        if mine.default is not inspect.Parameter.empty:
            assert mine.default == real[parameter].default, parameter


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize(
    "softmax", [SoftmaxParams(0.1), SoftmaxParams(0.1, window=3), SoftmaxParams(0.1, cap=5.0)], ids=str
)
@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.sample(6)
def test_ragged_calls_are_taken(name, softmax, lse):
    if name == "torch" and softmax.cap is not None:
        softmax = replace(softmax, cap=None)
    recorder = Recorder(name)
    call = ragged((3, 2), (5, 2))
    out, sums = ADAPTERS[name](recorder).attend_ragged(
        rows(5, 8, 64), rows(7, 2, 64), rows(7, 2, 64), call, softmax, lse
    )
    assert out.shape == (5, 8, 64)
    assert (sums.shape == (5, 8)) if lse else sums is None
    (given,) = recorder.calls
    for indptr in (call.query_indptr, call.kv_indptr):
        assert any(value is indptr for value in given.values())


@pytest.mark.parametrize("queries", [(1, 1), (3, 3), (3, 2)], ids=["decode", "verify", "extend"])
@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.sample(3)
def test_paged_calls_are_taken(name, queries):
    recorder = Recorder(name)
    call, cache = paged(queries, (300, 5)), pages(256)
    out, sums = ADAPTERS[name](recorder).attend_paged(
        rows(sum(queries), 8, 64), cache, cache, call, SoftmaxParams(0.1), True
    )
    assert out.shape == (sum(queries), 8, 64) and sums.shape == (sum(queries), 8)
    (given,) = recorder.calls
    tables = {"fa4": "page_table", "fa2": "block_table", "torch": "block_table"}
    assert given[tables[name]] is call.page_table
    if name == "fa4":
        assert given["seqused_k"] is call.kv_lens and "cu_seqlens_k" not in given
        assert ("cu_seqlens_q" in given) == (queries == (3, 2))
        assert given["num_splits"] == 1


def test_values_narrower_than_keys_are_padded_for_one_width_and_cut_again():
    recorder = Recorder("torch")
    out, _ = TorchKernels(recorder).attend_ragged(
        rows(3, 4, 192), rows(3, 4, 192), rows(3, 4, 128), ragged((3,), (3,)), SoftmaxParams(0.1), False
    )
    assert recorder.calls[0]["value"].shape[-1] == 192 and out.shape == (3, 4, 128)
    wanted, _ = FA4Kernels(fa4_varlen_func).attend_ragged(
        rows(3, 4, 192), rows(3, 4, 192), rows(3, 4, 128), ragged((3,), (3,)), SoftmaxParams(0.1), False
    )
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("softmax", "causal", "window"),
    [
        (SoftmaxParams(0.1), True, (-1, 0)),
        (SoftmaxParams(0.1), False, (-1, -1)),
        (SoftmaxParams(0.1, window=1), True, (0, 0)),
        (SoftmaxParams(0.1, window=7), True, (6, 0)),
    ],
)
def test_windows_as_flash_attention_2_counts_them(softmax, causal, window):
    """Ours counts the query itself, theirs the keys before it."""
    for name in ("torch", "fa2"):
        recorder = Recorder(name)
        ADAPTERS[name](recorder).attend_ragged(
            rows(3, 8, 64), rows(5, 2, 64), rows(5, 2, 64), ragged((3,), (5,), causal), softmax, False
        )
        assert recorder.calls[0]["window_size"] == window


class TestTorch:
    def test_before_paging_nothing_new_is_asked_of_it(self):
        """torch 2.11 has no ``enable_gqa``, no ``block_table``, no ``seqused_k``."""
        adapter = TorchKernels(torch_varlen_attn_2_11)
        assert adapter.page_size(256, [LAYER]) is None
        out, _ = adapter.attend_ragged(
            rows(3, 8, 64), rows(3, 2, 64), rows(3, 2, 64), ragged((3,), (3,)), SoftmaxParams(0.1), False
        )
        assert out.shape == (3, 8, 64)

    @pytest.mark.parametrize(("page_size", "kernel_page"), [(64, None), (128, None), (256, 256), (512, 512)])
    def test_pages_that_it_reads(self, page_size, kernel_page):
        assert TorchKernels(torch_varlen_attn).page_size(page_size, [LAYER]) == kernel_page

    def test_log_sum_exps_are_asked_for_in_torchs_way(self):
        assert varlen().AuxRequest(lse=True).lse is True


class TestFlashAttention4:
    def tile(self) -> Callable[..., Any]:
        """The library's own choice of tiles on SM 90, run from its source."""
        made: dict[str, Any] = {"FwdConfig": lambda m, n, *_: SimpleNamespace(m=m, n=n)}
        source = ast.unparse(function(INTERFACE, "_tile_size_fwd_sm90"))
        exec(source, made)
        chosen: Callable[..., Any] = made["_tile_size_fwd_sm90"]
        return chosen

    @pytest.mark.parametrize("window", [None, 100])
    def test_no_page_is_ever_a_whole_key_tile(self, window):
        """TMA would load such a page together with arbitrary data behind a request's last row."""
        tile, adapter = self.tile(), FA4Kernels(fa4_varlen_func)
        for dim in range(16, 257, 16):
            for v_dim in {dim, min(dim, 128)}:
                layer = replace(LAYER, head_dim=dim, v_head_dim=v_dim, sliding_window=window)
                tiles = {tile(dim, v_dim, causal, window is not None).n for causal in (False, True)}
                assert tiles <= key_tiles(layer) and tiles <= set(key_tile(dim, v_dim, window is not None))
                for page_size in (1, 16, 32, 48, 64, 80, 96, 112, 128, 144, 256, 288):
                    page = adapter.page_size(page_size, [layer])
                    assert page_size % page == 0 and page not in tiles and page != 128

    def test_pages_stay_whole_where_they_can(self):
        adapter = FA4Kernels(fa4_varlen_func)
        assert [adapter.page_size(size, [LAYER]) for size in (1, 16, 64, 128, 256)] == [1, 16, 64, 64, 256]
        wide = replace(LAYER, head_dim=256, v_head_dim=256)
        assert adapter.page_size(64, [wide]) == 64
        assert adapter.page_size(64, [wide, replace(wide, sliding_window=9)]) == 32

    def test_what_the_page_rule_rests_on(self):
        """A page that is no key tile is loaded row by row, on SM 90 and SM 100 alike; on SM 90 nothing is divided."""
        source = INTERFACE.read_text()
        assert source.count("paged_kv_non_tma=page_size not in [None, tile_n]") == 2
        assert 'assert not is_split_kv, "SplitKV not supported on SM 9.0"' in source
        assert 'assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"' in source

    @pytest.mark.parametrize(
        ("sm", "dims", "problem"),
        [
            (90, (256, 256), None),
            (90, (192, 128), None),
            (100, (128, 128), None),
            (103, (192, 128), None),
            (100, (192, 192), "(192, 192)"),
            (80, (64, 64), "SM 80"),
            (120, (64, 64), "SM 120"),
        ],
    )
    def test_gpus_and_heads_that_it_is_for(self, sm, dims, problem):
        found = kernels.fa4_problem(sm, [replace(LAYER, head_dim=dims[0], v_head_dim=dims[1])])
        assert found is None if problem is None else problem in found


class TestChoice:
    """Choice of kernels by the installed libraries."""

    @pytest.fixture(autouse=True)
    def fresh_import(self):
        kernels.load_fa4.cache_clear()
        yield
        kernels.load_fa4.cache_clear()

    def fails(self, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        def load() -> Any:
            raise error

        monkeypatch.setattr(kernels, "load_fa4", load)

    def test_auto_takes_fa4_where_it_is(self, monkeypatch):
        monkeypatch.setattr(kernels, "load_fa4", lambda: fa4_varlen_func)
        assert choose_kernels("auto", 90, [LAYER]).name == "fa4"
        assert choose_kernels("auto", 80, [LAYER]).name == "torch"
        assert choose_kernels("torch", 90, [LAYER]).name == "torch"

    def test_auto_is_torch_where_fa4_is_not_installed(self, monkeypatch):
        """There is no warning, since the library is optional."""
        self.fails(monkeypatch, ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn"))
        assert choose_kernels("auto", 90, [LAYER]).name == "torch"

    @pytest.mark.parametrize(
        "error",
        [
            ModuleNotFoundError("No module named 'cutlass'", name="cutlass"),
            AssertionError("Torch not compiled with CUDA enabled"),
            OSError("libcudart.so.13: cannot open shared object file"),
            SystemExit("no GPU, no library"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_auto_says_why_an_installed_fa4_is_not_used(self, monkeypatch, error):
        self.fails(monkeypatch, error)
        with pytest.warns(RuntimeWarning, match=re.escape(str(error))):
            assert choose_kernels("auto", 90, [LAYER]).name == "torch"
        with warnings.catch_warnings(action="error"):  # once per process, not for every backend
            assert choose_kernels("auto", 90, [LAYER]).name == "torch"

    def test_a_torch_whose_kernel_takes_no_scale_is_refused_when_built(self, monkeypatch):
        """Same as in torch 2.10, where the first step would raise a TypeError."""

        def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None): ...

        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
        with raises_naming(BackendError, "torch>=2.11"):
            choose_kernels("torch", 90, [LAYER])

    @pytest.mark.parametrize(
        ("name", "sm", "message"),
        [
            ("fa4", 90, "OSError: libcudart"),
            ("fa4", 80, "SM 80"),
            ("fa2", 90, "ModuleNotFoundError"),
        ],
    )
    def test_asked_for_by_name_it_is_that_or_an_error(self, monkeypatch, name, sm, message):
        self.fails(monkeypatch, OSError("libcudart.so.13"))
        with raises_naming(BackendError, message) as caught:
            choose_kernels(name, sm, [LAYER])
        assert caught.value.settings == ("flashattention.kernel",)

    def test_capped_logits_are_not_left_to_torch(self, monkeypatch):
        self.fails(monkeypatch, ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn"))
        monkeypatch.setattr(kernels, "load_fa2", kernels.load_fa4)
        with raises_naming(BackendError, "layer 0", "pip install"):
            choose_kernels("auto", 90, [replace(LAYER, logit_cap=30.0)])

    @pytest.mark.parametrize("sm", [80, 90])
    def test_capped_logits_are_left_to_fa2_where_it_is(self, monkeypatch, sm):
        self.fails(monkeypatch, ModuleNotFoundError("No module named 'flash_attn.cute'", name="flash_attn.cute"))
        monkeypatch.setattr(kernels, "load_fa2", lambda: fa4_varlen_func)
        assert choose_kernels("auto", sm, [LAYER, replace(LAYER, logit_cap=30.0)]).name == "fa2"
        assert choose_kernels("auto", sm, [LAYER]).name == "torch"


def test_a_raw_call_is_one_that_the_library_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """``attnplug bench --against raw`` measures such calls."""
    recorder = Recorder("fa4")
    monkeypatch.setattr(kernels, "load_fa4", lambda: recorder)
    pool = MHAPool([LAYER], num_pages=4, page_size=64, dtype=DType.BFLOAT16, device="cpu")
    table, q = torch.tensor([[1, 3], [2, 0]], dtype=torch.int32), torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    scene = RawScene((LAYER,), KVPools(mha=pool), 64, table, (70, 5), 1, False, q, True)
    raw = calls(scene)
    assert raw is not None and raw.run(0).shape == (2, 8, 64)
    assert recorder.calls[0]["max_seqlen_k"] == 70
    assert calls(replace(scene, prefill=True)) is None
