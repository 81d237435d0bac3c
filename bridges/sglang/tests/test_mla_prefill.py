"""MLA prefill as MHA: which way a batch takes, and the calls that SGLang makes, with stand-ins for its batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnplug import AttentionKind, BackendError, ExtendPath, ForwardBatch, Geometry, LayerSpec
from attnplug.contract.batch import BackendId
from attnplug.host import MLADims
from attnplug.kernels import merge_partial
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug_sglang.mla_prefill import RaggedPrefill, extend_path
from attnplug_sglang.planning import GroupedStep, mode_of
from attnplug_testing.errors import naming
from sglang_fakes import Mode, batch, slots_table

LAYER = LayerSpec(0, AttentionKind.MLA, 2, 2, 12, 8, 12**-0.5, mla=MLADims(16, 8, 4))
ALL = frozenset(ExtendPath)
THRESHOLDS = SimpleNamespace(chunked_prefix_cache_threshold=10, disable_chunked_prefix_cache=False)


class Ragged:
    """Backend with only the ragged calls of ``torch_native`` that records the batches it plans."""

    backend_id = BackendId("ragged")
    forward_ragged = TorchNativeBackend.forward_ragged

    def __init__(self) -> None:
        self.planned: list[ForwardBatch] = []

    def init_mha_chunk_metadata(self, forward_batch: ForwardBatch) -> None:
        self.planned.append(forward_batch)


def extend(prefixes: list[int], new: list[int], **changes: Any) -> Any:
    """Extend batch with the fields that SGLang's own mixin for MHA adds."""
    more = {
        "mha_one_shot": None,
        "mha_return_lse": False,
        "attn_attend_prefix_cache": None,
        "prefix_chunk_idx": None,
        "prefix_chunk_len": None,
        "num_prefix_chunks": None,
        "get_max_chunk_capacity": lambda: 100,
    }
    lengths = [before + count for before, count in zip(prefixes, new, strict=True)]
    return batch(slots_table(lengths, 1), prefixes, new, **{**more, **changes})


def planned(given: Any) -> GroupedStep:
    lengths = [
        before + more for before, more in zip(given.extend_prefix_lens_cpu, given.extend_seq_lens_cpu, strict=True)
    ]
    table = torch.zeros(len(lengths), 64, dtype=torch.int32)
    geometry = Geometry.of_lengths(mode_of(given), table, given.extend_seq_lens_cpu, lengths, 1)
    return GroupedStep(geometry.mode, (ForwardBatch(geometry),))


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One request in float64: its last queries over all its keys."""
    logits = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * LAYER.scale
    hidden = torch.ones(len(q), len(k)).tril(len(k) - len(q)) == 0
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v.double())


@pytest.mark.parametrize(
    ("mode", "prefixes", "new", "path"),
    [
        (Mode.EXTEND, [0, 0], [4, 5], ExtendPath.ONE_SHOT),
        (Mode.EXTEND, [3, 0], [4, 5], ExtendPath.ABSORBED),
        (Mode.EXTEND, [20, 0], [4, 5], ExtendPath.ONE_SHOT),
        (Mode.EXTEND, [200, 0], [4, 5], ExtendPath.CHUNKED),
        (Mode.MIXED, [20, 0], [1, 5], ExtendPath.ABSORBED),
        (Mode.TARGET_VERIFY, [20, 4], [3, 3], ExtendPath.ABSORBED),
    ],
)
def test_the_way_follows_sglangs_thresholds(mode: Mode, prefixes: list[int], new: list[int], path: ExtendPath) -> None:
    """C1: a policy of abilities and thresholds, never of a backend's name."""
    given = SimpleNamespace(
        forward_mode=mode,
        extend_seq_lens_cpu=new,
        extend_prefix_lens_cpu=prefixes,
        get_max_chunk_capacity=lambda: 100,
    )
    assert extend_path(given, THRESHOLDS, ALL, captured=False) is path


def test_no_prefix_is_chunked_where_a_server_turned_that_off() -> None:
    layer = SimpleNamespace(chunked_prefix_cache_threshold=10, disable_chunked_prefix_cache=True)
    assert extend_path(extend([50], [4]), THRESHOLDS, ALL, captured=False) is ExtendPath.ONE_SHOT
    assert extend_path(extend([50], [4]), layer, ALL, captured=False) is ExtendPath.ABSORBED


def test_a_captured_prefill_runs_absorbed() -> None:
    assert extend_path(extend([0], [4]), THRESHOLDS, ALL, captured=True) is ExtendPath.ABSORBED


def test_a_captured_prefill_that_cannot_run_absorbed_is_refused() -> None:
    with pytest.raises(BackendError, check=naming("EXTEND", "one_shot", "--disable-cuda-graph")):
        extend_path(extend([0], [4]), THRESHOLDS, frozenset({ExtendPath.ONE_SHOT}), captured=True)


@pytest.mark.parametrize(("prefixes", "one_shot"), [([0, 0, 0], False), ([5, 0, 9], True)])
def test_one_causal_call_covers_new_rows_or_all_rows(prefixes: list[int], one_shot: bool) -> None:
    torch.manual_seed(0)
    new = [3, 4, 2]
    lengths = [before + more for before, more in zip(prefixes, new, strict=True)]
    given = extend(prefixes, new, mha_one_shot=one_shot)
    q, k, v = torch.randn(sum(new), 2, 12), torch.randn(sum(lengths), 2, 12), torch.randn(sum(lengths), 2, 8)
    out, lse = RaggedPrefill(Ragged()).attend(q, k, v, LAYER, given, planned(given))  # type: ignore[arg-type]
    assert lse is None
    parts = zip(q.split(new), k.split(lengths), v.split(lengths), strict=True)
    torch.testing.assert_close(out.double(), torch.cat([expected(*part) for part in parts]), atol=1e-5, rtol=1e-5)


def test_chunks_merge_to_the_whole_and_no_kernel_sees_an_empty_one() -> None:
    """C3, C4: requests without rows in a chunk give zero and -inf, so that merging them changes nothing."""
    torch.manual_seed(0)
    prefixes, new, chunk = [5, 0, 9], [3, 4, 2], 4
    given = extend(prefixes, new, mha_return_lse=True, num_prefix_chunks=3, prefix_chunk_len=chunk)
    step, backend = planned(given), Ragged()
    prefill = RaggedPrefill(backend)  # type: ignore[arg-type]
    q = torch.randn(sum(new), 2, 12)
    rows = [(torch.randn(n, 2, 12), torch.randn(n, 2, 8)) for n in (8, 4, 11)]
    news = [(k[before:], v[before:]) for (k, v), before in zip(rows, prefixes, strict=True)]
    merged, lse = prefill.attend(q, *(torch.cat(part) for part in zip(*news, strict=True)), LAYER, given, step)
    assert lse is not None
    given.attn_attend_prefix_cache = True
    for index in range(3):
        given.prefix_chunk_idx = index
        spans = [slice(index * chunk, min(before, index * chunk + chunk)) for before in prefixes]
        k, v = (torch.cat([pair[part][span] for pair, span in zip(rows, spans, strict=True)]) for part in (0, 1))
        out, part_lse = prefill.attend(q, k, v, LAYER, given, step)
        assert part_lse is not None
        assert not out[3:7].any() and part_lse[3:7].isneginf().all()
        merged, lse = merge_partial(merged.float(), lse, out, part_lse)
    whole = torch.cat([expected(part, k, v) for part, (k, v) in zip(q.split(new), rows, strict=True)])
    torch.testing.assert_close(merged.double(), whole, atol=1e-5, rtol=1e-5)
    (once,) = backend.planned
    assert [call.kv_lens for call in once.geometry.calls] == [(3, 4, 2), (4, 4), (1, 4), (1,)]


def test_rows_of_padding_give_zero() -> None:
    """B5."""
    given = extend([0], [3])
    q, k, v = torch.randn(5, 2, 12), torch.randn(5, 2, 12), torch.randn(5, 2, 8)
    out, _ = RaggedPrefill(Ragged()).attend(q, k, v, LAYER, given, planned(given))  # type: ignore[arg-type]
    assert out.shape == (5, 2, 8)
    assert not out[3:].any()


def test_a_backend_without_ragged_calls_is_named() -> None:
    backend = SimpleNamespace(backend_id=BackendId("plain"))
    with pytest.raises(BackendError, check=naming("layer 0", "plain")):
        RaggedPrefill(backend).attend(*torch.zeros(3, 1, 1, 1), LAYER, extend([0], [1]), None)  # type: ignore


def test_a_backend_that_returns_no_tensor_is_named() -> None:
    backend = Ragged()
    backend.forward_ragged = lambda q, k, v, layer, call, plan=None, lse=None: None  # type: ignore
    given = extend([0], [3])
    q, k, v = torch.randn(3, 2, 12), torch.randn(3, 2, 12), torch.randn(3, 2, 8)
    with pytest.raises(BackendError, check=naming("forward_ragged of backend ragged", "None", "(3, 2, 8)")):
        RaggedPrefill(backend).attend(q, k, v, LAYER, given, planned(given))  # type: ignore[arg-type]


def test_the_hook_may_take_the_batch_alone() -> None:
    """A8: the hook is called with the arguments that it accepts, and no others."""
    given, backend = extend([0], [3]), Ragged()
    step = planned(given)
    RaggedPrefill(backend).plan(given, step)  # type: ignore[arg-type]
    RaggedPrefill(backend).plan(given, step)  # type: ignore[arg-type]
    assert len(backend.planned) == 1
