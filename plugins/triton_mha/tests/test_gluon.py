"""``gluon_attention`` in an interpreter on a CPU, against float64.

Queries and results are float64. Cache rows are bfloat16, as TMA copies them, and partial results float32.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from attnplug import ForwardMode, Geometry
from attnplug_testing.devices import INTERPRETED
from attnplug_testing.gluon_interpreter import GluonError, interpreted, mutant
from attnplug_triton_mha import attention, gluon_attention
from attnplug_triton_mha.attention import CopiedRows, KVLayerCache, launch_attend
from attnplug_triton_mha.configurations import MHAKernelConfig
from attnplug_triton_mha.planner import SplitKVSchedule, TritonLayerShape
from attnplug_triton_mha.scratch import SplitPartials

pytestmark = INTERPRETED

NAN = float("nan")
CONFIG = MHAKernelConfig(128, 128, 4, 2, programs=1, specialized=True)


@dataclass(frozen=True)
class Case:
    """A batch and a layer. ``requests`` are (cache rows before the new ones, new rows)."""

    requests: tuple[tuple[int, int], ...]
    kv_heads: int = 1
    group: int = 4
    dim: int = 64
    v_dim: int = 64
    page_size: int = 64
    window: int = 0
    cap: float | None = None
    sinks: bool = False
    stages: int = 2
    programs: int = 1
    """Programs that share the work. Tiles are split if there are more of them."""
    uniform: bool = False
    """Plan for one number of new rows per request."""
    separate_merge: bool = False


class Batch:
    """Arguments of a launch. What must not be read is NaN or, in the page table, -1."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, generator = case, torch.Generator().manual_seed(seed)
        width = max(-(-(old + new) // case.page_size) for old, new in case.requests) + 1
        count, heads = len(case.requests) * width, case.kv_heads * case.group
        pages = torch.full(
            (count, 2, case.page_size, case.kv_heads, max(case.dim, case.v_dim)), NAN, dtype=torch.bfloat16
        )
        self.keys, self.values = pages[:, 0, ..., : case.dim], pages[:, 1, ..., : case.v_dim]
        self.table = torch.full((len(case.requests), width), -1, dtype=torch.int32)
        free = torch.randperm(count, generator=generator).tolist()
        self.rows = []
        for request, (old, new) in enumerate(case.requests):
            k = torch.randn(old + new, case.kv_heads, case.dim, generator=generator).bfloat16()
            v = torch.randn(old + new, case.kv_heads, case.v_dim, generator=generator).bfloat16()
            self.rows.append((k.double(), v.double()))
            for number, first in enumerate(range(0, old + new, case.page_size)):
                page = self.table[request, number] = free.pop()
                stop = min(case.page_size, old + new - first)
                self.keys[page, :stop] = k[first : first + stop]
                self.values[page, :stop] = v[first : first + stop]
        rows = sum(new for _, new in case.requests)
        self.q = torch.full((rows, heads + 1, case.dim), NAN, dtype=torch.float64)[:, :heads]
        self.q.copy_(torch.randn(self.q.shape, generator=generator, dtype=torch.float64))
        self.sinks = torch.randn(heads, generator=generator) if case.sinks else None
        self.scale = case.dim**-0.5

    def attend(self, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Launch as a batch's plan does. Return output, log-sum-exp and the maximum number of parts of a tile."""
        case = self.case
        lens, news = [old + new for old, new in case.requests], [new for _, new in case.requests]
        geometry = Geometry(
            mode=ForwardMode.EXTEND,
            page_table=self.table,
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            page_size=case.page_size,
            rows=sum(news),
            max_seq_len=max(lens),
            max_new=max(news),
            new_lens=None if case.uniform else torch.tensor(news, dtype=torch.int32),
        )
        shape = TritonLayerShape(case.kv_heads, case.group, case.dim, case.v_dim, case.window)
        config = replace(
            CONFIG, stages=case.stages, separate_merge=case.separate_merge, overlap=not case.separate_merge
        )  # fmt: skip
        schedule = SplitKVSchedule.reserve(shape, config, geometry, case.programs * case.kv_heads)
        schedule.fill(geometry, None)
        copied = CopiedRows.of(self.keys), CopiedRows.of(self.values)
        cache = KVLayerCache(
            shape, 0, self.keys, self.keys, self.values, self.values, 1.0, 1.0, False, False, copied
        )  # fmt: skip
        rows = schedule.partial_rows * case.kv_heads
        partials = SplitPartials(
            torch.full((rows * case.v_dim,), NAN), torch.full((2 * rows,), NAN), torch.zeros(rows, dtype=torch.int32)
        )
        out = torch.full((sum(news), self.q.shape[1], case.v_dim), NAN, dtype=torch.float64)
        lse = torch.full(out.shape[:2], NAN, dtype=torch.float64)
        monkeypatch.setattr(attention, "attend_extend", kernel)
        launch_attend(
            self.q, cache, self.table, out, lse, self.sinks, partials, schedule, self.scale, case.cap, None
        )  # fmt: skip
        assert not partials.counters.any()
        return out, lse, int(schedule.records[:, 9].max())

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        outs, lses, begin = [], [], 0
        for (old, new), (k, v) in zip(self.case.requests, self.rows, strict=True):
            q = self.q[begin : begin + new].unflatten(1, (self.case.kv_heads, self.case.group))
            begin += new
            logits = torch.einsum("qhgd,khd->qhgk", q, k).flatten(1, 2) * self.scale
            if self.case.cap is not None:
                logits = self.case.cap * torch.tanh(logits / self.case.cap)
            behind = torch.arange(old, old + new)[:, None] - torch.arange(old + new)  # tokens from key to query
            hidden = (behind < 0) | (behind >= (self.case.window or math.inf))
            logits = logits.masked_fill(hidden[:, None], -math.inf)
            sums = logits.logsumexp(-1)
            total = sums if self.sinks is None else torch.logaddexp(sums, self.sinks.double())
            weights = (logits - total[..., None]).exp().unflatten(1, (self.case.kv_heads, self.case.group))
            outs.append(torch.einsum("qhgk,khd->qhgd", weights, v).flatten(1, 2))
            lses.append(sums)
        return torch.cat(outs), torch.cat(lses)


def check(case: Case, monkeypatch: pytest.MonkeyPatch, seed: int = 0, module: Any = gluon_attention) -> int:
    """Compare with float64; return the maximum number of parts of a tile."""
    batch = Batch(case, seed)
    out, lse, parts = batch.attend(interpreted(module.attend_extend, seed), monkeypatch)
    for got, wanted in zip((out, lse), batch.expected(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    return parts


CASES = {
    "one step": (Case(((70, 3),)), 1),
    "many steps, and less than a page behind the last": (Case(((700, 3),), stages=3), 1),
    "a stage": (Case(((400, 40),), stages=1), 1),
    "steps that all rows see, and steps with a mask": (Case(((0, 300),), group=2, kv_heads=2), 1),
    "a prefix of whole steps": (Case(((256, 64),), group=1), 1),
    "lengths": (Case(((0, 1), (128, 1), (127, 1), (0, 130), (5, 0), (0, 0), (300, 7))), 1),
    "no new rows but one": (Case(((500, 0), (300, 0), (9, 1)), programs=4), 1),
    "some split": (Case(((3000, 1), (0, 40), (800, 40)), programs=6), 4),
    "a part without visible rows": (Case(((0, 300),), group=1, programs=20), 3),
    "merged separately": (Case(((900, 3), (10, 3)), kv_heads=2, programs=6, uniform=True, separate_merge=True), 4),
    "a window": (Case(((700, 40),), window=100, page_size=16), 1),
    "a split window": (Case(((600, 3),), window=400, programs=3, sinks=True), 3),
    "a window within a step": (Case(((500, 150),), group=1, window=5), 1),
    "cap": (Case(((200, 30),), cap=2.0), 1),
    "sinks": (Case(((200, 30), (0, 1)), sinks=True), 1),
    "split, cap and sinks": (Case(((700, 5),), kv_heads=2, cap=0.5, sinks=True, programs=4), 3),
    "small pages": (Case(((333, 40),), page_size=16, kv_heads=2), 1),
    "large pages": (Case(((700, 9),), page_size=256, kv_heads=2), 1),
    "wide keys": (Case(((100, 9),), dim=128), 1),
    "wide values": (Case(((500, 9),), v_dim=128, programs=3), 2),
    "wide keys and values": (Case(((200, 30),), dim=128, v_dim=128, page_size=32), 1),
    "a group of two tiles": (Case(((140, 2),), group=256), 1),
}
"""Batches, and the number of parts of the tile that has most."""


@pytest.mark.parametrize("name", CASES)
def test_interpreted_results_are_those_of_float64(name, monkeypatch):
    """C1, C4, B6: everything except visible cache rows is NaN."""
    case, parts = CASES[name]
    assert check(case, monkeypatch) == parts


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_interpreted_results_of_random_batches(seed, monkeypatch):
    numbers = random.Random(seed)
    group, kv_heads = numbers.choice((1, 2, 4, 8, 64)), numbers.choice((1, 2))
    new = min(numbers.choice((1, 3, 40, 150)), 600 // (group * kv_heads) + 1)
    uniform, requests = numbers.random() < 0.3, []
    for _ in range(numbers.randint(1, 4)):
        old = numbers.choice((0, 1, 127, 128, numbers.randint(0, numbers.choice((10, 130, 1500, 4000)))))
        requests.append((old, new if uniform else numbers.choice((0, 1, numbers.randint(1, new)))))
    case = Case(
        (*requests, (numbers.randint(0, 200), new)),
        kv_heads,
        group,
        numbers.choice((64, 128)),
        numbers.choice((64, 128)),
        numbers.choice((16, 32, 64, 128, 256)),
        numbers.choice((0, 0, 0, 5, 100, 300)),
        numbers.choice((None, 2.0)),
        numbers.random() < 0.3,
        numbers.choice((1, 2, 3)),
        numbers.choice((1, 2, 5, 9, 30)),
        uniform,
        uniform and numbers.random() < 0.5,
    )
    check(case, monkeypatch, seed)


STEPS, PARTS, PREFIX = Case(((700, 3),)), Case(((300, 3),), programs=3), Case(((64, 128),), group=1)
ERRORS = {
    "no wait for free key buffers": (STEPS, "        mbarrier.wait(k_empty.index(stage), phase)\n", ""),
    "no wait for free value buffers": (STEPS, "        mbarrier.wait(v_empty.index(stage), phase)\n", ""),
    "no wait for values": (STEPS, "            mbarrier.wait(v_full.index(v_stage), v_phase)\n", ""),
    "values are free before they are read": (
        STEPS,
        "            sums = _wait_for_values(started, V_CHUNKS)\n"
        "            mbarrier.arrive(v_empty.index(v_stage), count=1)\n",
        "            mbarrier.arrive(v_empty.index(v_stage), count=1)\n"
        "            sums = _wait_for_values(started, V_CHUNKS)\n",
    ),
    "logits are used before they are complete": (
        STEPS,
        "warpgroup_mma_wait(V_CHUNKS, deps",
        "warpgroup_mma_wait(V_CHUNKS + 1, deps",
    ),
    "the producer's phase does not change": (
        STEPS,
        "            stage = 0\n            phase ^= 1\n\n",
        "            stage = 0\n\n",
    ),
    "the consumers' phase does not change": (
        STEPS,
        "                stage = 0\n                phase ^= 1\n",
        "                stage = 0\n",
    ),
    "too few bytes": (STEPS, "CHUNKS * BOXES * BOX * CHUNK * 2", "CHUNKS * BOXES * BOX * CHUNK"),
    "too many bytes": (STEPS, "CHUNKS * BOXES * BOX * CHUNK * 2", "CHUNKS * BOXES * BOX * CHUNK * 4"),
    "rows behind the last one are not cleared": (STEPS, "if end - last < STEP:", "if False:"),
    "one unmasked step too many": (PREFIX, "gl.maximum(clear - start, 0) // STEP * STEP", "STEP"),
    "a merge without the last part": (PARTS, "for part in range(parts):", "for part in range(parts - 1):"),
}
"""A batch, and an error in the kernel's source."""


def check_schedules(case: Case, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    for seed in range(6):
        check(case, monkeypatch, seed, module)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_in_the_kernel_are_found(name, tmp_path, monkeypatch):
    """As a wrong result, a race or a deadlock, with one of six schedules."""
    case, correct, wrong = ERRORS[name]
    module = mutant(gluon_attention, correct, wrong, tmp_path)
    with pytest.raises(AssertionError):
        check_schedules(case, monkeypatch, module)


def test_a_deadlock_is_reported_with_its_barriers(tmp_path, monkeypatch):
    module = mutant(gluon_attention, "CHUNKS * BOXES * BOX * CHUNK * 2", "CHUNKS * BOXES * BOX * CHUNK * 4", tmp_path)
    with pytest.raises(GluonError, match=r"_consume_first waits in .*k_full.index\(0\), 0\), barrier 0: 0 phases"):
        check(STEPS, monkeypatch, module=module)


def test_a_seed_repeats_its_schedule(tmp_path, monkeypatch):
    module = mutant(gluon_attention, "        mbarrier.wait(v_empty.index(stage), phase)\n", "", tmp_path)
    found = []
    for _ in range(2):
        with pytest.raises(GluonError) as error:
            check(STEPS, monkeypatch, module=module)
        found.append((str(error.value), error.value.__notes__))
    assert found[0] == found[1]
