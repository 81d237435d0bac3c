"""``attnplug:auto`` in SGLang: measured tables choose the backend of each batch, over one cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attnplug import Role
from attnplug.auto.ranking import Ranking
from attnplug.auto.table_store import FoundTable, MeasuredShape, MeasuredTable, Origin
from attnplug.host import ModelAttention, load_registry
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug_sglang import selection
from attnplug_sglang.kv_pools import PageTable
from attnplug_sglang.planning import PlannedGroup, eager_step
from sglang_fakes import Mode, batch, mha_layer, reference, slots_table
from sglang_stand_in import Radix, sglang
from test_backend import PAGE, mla_runner, pool, rows, runner
from test_captured import triton_backends

AUTO = "attnplug:auto"
DECODES = {"near": {(1, 8): 1.0, (1, 32): 9.0, (8, 8): 1.0}, "far": {(1, 8): 9.0, (1, 32): 1.0, (8, 8): 9.0}}
EXTENDS = {"near": {(1, 8): 1.0, (1, 32): 9.0}, "far": {(1, 8): 9.0, (1, 32): 1.0}}
"""Microseconds of two backends by requests and length."""


@pytest.fixture(scope="module")
def ours() -> Iterator[SimpleNamespace]:
    with sglang() as found:
        yield found


@pytest.fixture(autouse=True)
def measured(ours: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two backends with times for the layers of these tests: one for short requests, one for long ones."""
    found, tables = load_registry(), list[FoundTable]()
    native, types = found.get("torch_native"), {"dtype": "float32", "kv_dtype": "float32", "page_size": PAGE}
    shapes = (MeasuredShape("mha", 4, 2, 8, 8, **types), MeasuredShape("mla", 4, 1, 20, 16, **types))
    for role, times in ((Role.DECODE, DECODES), (Role.PREFILL, EXTENDS)):
        for name, points in times.items():
            for shape in shapes:
                new = {(1, 8): 8, (1, 32): 32} if role is Role.PREFILL else dict.fromkeys(points, 1)
                lines = [(*at, new[at], False, us, us, us) for at, us in points.items()]
                table = MeasuredTable("a CPU", 0, name, role, shape, lines, {"torch": "2"}, "2026-11-19")
                tables.append(FoundTable(table, Origin("shipped", "")))
    backends = {name: replace(native, spec=replace(native.spec, name=name)) for name in ("near", "far")}
    monkeypatch.setattr(ours.build, "load_registry", lambda: replace(found, backends=backends))
    monkeypatch.setattr(selection, "default_ranking", lambda *_, per_batch: Ranking(tables, per_batch=per_batch))


def test_each_batch_runs_on_the_fastest_backend_for_its_lengths(ours: SimpleNamespace) -> None:
    """A9: a request moves between backends, which read each other's rows."""
    torch.manual_seed(0)
    table, module, kv = slots_table([33], PAGE), Radix(0), pool(0)
    names = dict.fromkeys(("prefill_attention_backend_str", "decode_attention_backend_str"), AUTO)
    backend = ours.build.build(AUTO, runner([module], table, kv, **names))
    for mode, before, new, name in [
        (Mode.EXTEND, 0, 6, "near"),
        (Mode.DECODE, 6, 1, "near"),
        (Mode.EXTEND, 7, 25, "far"),
        (Mode.DECODE, 32, 1, "far"),
    ]:
        given = batch(table, [before], [new], mode)
        backend.init_forward_metadata(given)
        run = backend.forward_decode if mode is Mode.DECODE else backend.forward_extend
        q, k, v = rows(new)
        out = run(q.flatten(1), k, v, module, given)
        (planned,) = backend.forward_metadata.batches
        assert planned.plan.attention.planner_names() == [name]
        cache = kv.get_key_buffer(0), kv.get_value_buffer(0)
        wanted = reference(q, cache, table[1, : before + new], mha_layer(0)).flatten(1)
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


def test_an_mla_prefill_as_mha_runs_on_the_backend_that_planned_it(ours: SimpleNamespace, monkeypatch) -> None:
    """C2: the plan of its calls names the backend."""
    ran, forward_ragged = [], TorchNativeBackend.forward_ragged

    def watched(self, *given):
        ran.append(self.backend_id.name)
        return forward_ragged(self, *given)

    monkeypatch.setattr(TorchNativeBackend, "forward_ragged", watched)
    made, _, as_mha = mla_runner(slots_table([32], PAGE), AUTO)
    backend = ours.build.build(AUTO, made)
    chunks = {"mha_one_shot": False, "attn_attend_prefix_cache": None, "num_prefix_chunks": 0, "mha_return_lse": False}
    for new in (6, 32):
        given = batch(slots_table([32], PAGE), [0], [new], **chunks)
        backend.init_forward_metadata(given)
        backend.init_mha_chunk_metadata(given)
        q, k, v = torch.randn(new, 4, 12), torch.randn(new, 4, 12), torch.randn(new, 4, 8)
        out = backend.forward_extend(q, k, v, as_mha, given, save_kv_cache=False)
        torch.testing.assert_close(out[:1], v[:1].flatten(1))
    assert ran == ["near", "far"]


@pytest.mark.parametrize(("mode", "new"), [(Mode.DECODE, 1), (Mode.TARGET_VERIFY, 3)])
def test_the_mean_length_of_a_decode_decides(mode: Mode, new: int) -> None:
    """Backends that plan on the device get no exact lengths. SGLang's lengths of a verify exclude its new tokens."""
    (backend,), pools, _ = triton_backends(1)
    table, attention = slots_table([7, 33], PAGE), ModelAttention(backend, pools)
    given = batch(table, [7 - new, 33 - new], [new, new], mode)
    for by_batch, typical in ((True, (20, 33)), (False, None)):
        step = eager_step(given, [PlannedGroup(attention, PageTable(table, PAGE), by_batch)], 64)
        assert step.batches[0].geometry.typical == typical and step.batches[0].geometry.host is None


def test_the_log_names_all_backends_of_a_role(ours: SimpleNamespace, monkeypatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(ours.build.logger, "info", lambda text, *values: lines.append(text % values))
    names = dict.fromkeys(("prefill_attention_backend_str", "decode_attention_backend_str"), AUTO)
    ours.build.build(AUTO, runner([Radix(0)], slots_table([9], PAGE), pool(0), **names))
    assert "decode by near or far" in lines[-1] and "prefill by far or near" in lines[-1]
