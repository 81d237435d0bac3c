"""Host overhead per step of choosing a backend per batch. Goal: at most 2 µs.

The schedule is queried by the engine, to choose the graph of a step, or by the wrapper, to choose the planner of a
batch. Also measured: the wrapper's overhead over its child, for planning a batch and for each layer. All are timed
alternately in one process. The fastest round is reported, because other processes may keep the machine busy.
"""

from __future__ import annotations

import argparse
import json
import platform
import timeit
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engine_cpu import commit, cpu_name

from attnplug import AttentionKind, Claims, ForwardBatch, ForwardMode, Geometry, GraphLevel, LayerSpec, Plan, Role
from attnplug.auto.fastest import FastestBackend
from attnplug.auto.schedule import BackendSchedule
from attnplug.contract.batch import BackendId, BatchPlan
from attnplug.host import TypicalLens
from attnplug_engine import SamplingParams
from attnplug_engine.graphs.dispatcher import GraphDispatcher
from attnplug_engine.graphs.length_ranges import length_ranges
from attnplug_engine.request import Request
from attnplug_engine.scheduling.step import StepEntry

LIMIT_US = 2.0
REQUESTS = (1, 8, 64, 256)
CONTEXT = 131_072
CALLS, ROUNDS = 20_000, 15
LAYER = LayerSpec(0, AttentionKind.MHA, 1, 1, 8, 8, 1.0)


class Idle:
    """A backend that does nothing, so that only the code around it takes time."""

    def __init__(self, name: str) -> None:
        self.backend_id, self.claims = BackendId(name), Claims(cuda_graph=GraphLevel.DECODE, needs_cpu_seq_lens=False)

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        return Plan(self.backend_id, batch.geometry.mode, batch.geometry.rows, None)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.plan: Plan | None = None

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        self.plan = self.plan or self.init_forward_metadata(forward_batch)
        return self.plan

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        pass

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 0

    def forward_extend(self, q, k, v, layer, batch, *, save_kv_cache=True, extras=None):
        batch.plan_for(self.backend_id, q.shape[0])
        return q

    forward_decode = forward_extend


def schedule() -> BackendSchedule:
    """Three backends over a grid as ``attnplug tune`` measures it, each the fastest somewhere for every batch."""
    lengths = [64 << step for step in range(12)]
    grid = [(requests, length, 1) for requests in (1, 2, 4, 8, 16, 32, 64, 128, 256) for length in lengths]
    fixed_and_each = {"short": (5.0, 1.0), "middle": (8.0, 0.5), "long": (20.0, 0.3)}  # µs, and µs for 1000 rows
    return BackendSchedule(
        {
            name: {(requests, length, 1): fixed + each * requests * length / 1000 for requests, length, _ in grid}
            for name, (fixed, each) in fixed_and_each.items()
        }
    )


def entries(lengths: Sequence[int]) -> tuple[StepEntry, ...]:
    request = Request(0, (1,), SamplingParams(4))
    return tuple(StepEntry(request, length - 1, (7,), True) for length in lengths)


def statements(requests: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Statements to time for a step of ``requests`` requests, with their namespaces."""
    backend = FastestBackend({name: Idle(name) for name in ("short", "middle", "long")}, {Role.DECODE: schedule()})
    lengths = [200 + 37 * number % 5000 for number in range(requests)]
    table = torch.zeros(requests, CONTEXT // 64, dtype=torch.int32)
    known = Geometry.of_lengths(ForwardMode.DECODE, table, [1] * requests, lengths, 64)
    unknown = Geometry(
        ForwardMode.DECODE,
        table,
        known.seq_lens,
        64,
        rows=requests,
        max_seq_len=CONTEXT,
        max_new=1,
        typical=TypicalLens.of(lengths),
    )
    graphs = GraphDispatcher(
        lambda ragged: length_ranges(backend, ForwardMode.DECODE, requests, 1, ragged), CONTEXT, lambda typical: typical
    )
    batch, q = ForwardBatch(unknown), torch.zeros(requests, 1, 8)
    backend.init_cuda_graph_state(requests, requests)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    batch.plan = BatchPlan(backend.init_forward_metadata(batch))
    alone = ForwardBatch(unknown)
    child = backend.children[backend.fastest(unknown)]
    alone.plan = BatchPlan(child.init_forward_metadata(alone))
    names = {"graphs": graphs, "entries": entries(lengths), "backend": backend, "child": child, "batch": batch}
    names |= {"alone": alone, "known": known, "unknown": unknown, "q": q, "layer": LAYER}
    calls = {
        "choose a graph": "graphs.fitting(entries)",
        "choose a planner, lengths on the host": "backend.fastest(known)",
        "choose a planner, typical length": "backend.fastest(unknown)",
        "plan, by the wrapper": "backend.init_forward_metadata(batch)",
        "plan, by the child": "child.init_forward_metadata(batch)",
        "plan a replay, by the wrapper": "backend.init_forward_metadata_out_graph(batch)",
        "plan a replay, by the child": "child.init_forward_metadata_out_graph(batch)",
        "a layer, by the wrapper": "backend.forward_decode(q, None, None, layer, batch)",
        "a layer, by the child": "child.forward_decode(q, None, None, layer, alone)",
    }
    return {what: (call, names) for what, call in calls.items()}


def measure(requests: int) -> dict[str, float]:
    """Microseconds of the fastest round."""
    timed = statements(requests)
    rounds: dict[str, list[float]] = {what: [] for what in timed}
    for _ in range(ROUNDS):
        for what, (call, names) in timed.items():
            rounds[what].append(timeit.timeit(call, globals=names, number=CALLS) / CALLS * 1e6)
    return {what: min(times) for what, times in rounds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {requests: measure(requests) for requests in REQUESTS}
    print(f"{'µs':<40}" + "".join(f"{requests:>8}" for requests in REQUESTS) + "   requests")
    for what in rows[1]:
        print(f"{what:<40}" + "".join(f"{rows[requests][what]:>8.2f}" for requests in REQUESTS))
    worst = max(time for row in rows.values() for what, time in row.items() if what.startswith("choose"))
    print(f"choosing takes at most {worst:.2f} µs; goal ≤ {LIMIT_US}: {'ok' if worst <= LIMIT_US else 'OVER'}")
    if arguments.json:
        report = {
            "what": "host time of choosing, of planning and of a layer where backends share a role by batch, in µs",
            "device": f"{cpu_name()} ({platform.machine()})",
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "commit": commit(),
            "limit_us": LIMIT_US,
            "choosing_us": worst,
            "rows": [{"requests": requests, **row} for requests, row in rows.items()],
        }
        Path(arguments.json).write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
