"""Time breakdown of traced decode steps: kernels by purpose, gaps, and host waits."""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

GROUPS = {
    "copies": r"^memcpy|^memset",
    "sampling": r"^_look|sampl|argmax|gumbel|multinomial|arg_?min_?max",
    "attention": r"attend|attention|attn|flash|fmha|mla|paged|decodewithkv|merge|sdpa|split_?kv|combine"
    r"|delta|_decode|recurr|convol|conv1d|gdn|chunk_|_advance|_write_rows|_write_pairs|_fill_|_plan\b|_keep|_copy_states|_clear|kv_?cache",
    "products": r"gemm|gemv|gemvx|matmul|matvec|linear|product|cutlass|nvjet|xmma|cublas|splitk|split_k|grouped|expert"
    r"|_mm\b|moe|_spread|_gather|_by_head|_score|_choose|_rank|_join|dot_kernel|reduce_1block",
}
"""Group by pattern of the kernel's name; the first match counts, others are REST."""
REST = "norms, rope, elementwise"
_PATTERNS = {group: re.compile(pattern, re.IGNORECASE) for group, pattern in GROUPS.items()}
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LISTED = 16


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel or a copy on the device, in microseconds. ``launch`` identifies the call that launched it."""

    name: str
    start: float
    end: float
    launch: int
    is_copy: bool


def group_of(name: str) -> str:
    return next((group for group, pattern in _PATTERNS.items() if pattern.search(name)), REST)


def own_times(work: Sequence[Work]) -> list[float]:
    """Time that each kernel adds to the device's busy time.

    If a kernel is launched early and waits for the previous one, the overlap belongs to the previous one.
    """
    times, busy_until = [], float("-inf")
    for one in work:
        times.append(max(0.0, one.end - max(one.start, busy_until)))
        busy_until = max(busy_until, one.end)
    return times


def gaps_between(work: Sequence[Work], launches: Sequence[int]) -> list[float]:
    """From the last kernel of each graph launch to the first of the next; 0 where they overlap."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for one in work:
        if not one.is_copy:
            first[one.launch] = min(first.get(one.launch, one.start), one.start)
            last[one.launch] = max(last.get(one.launch, one.end), one.end)
    ran = sorted((launch for launch in launches if launch in first), key=lambda launch: first[launch])
    return [max(0.0, first[after] - last[before]) for before, after in pairwise(ran)]


def analyse(events: Sequence[dict[str, Any]], steps: int, wall_us: float) -> dict[str, Any]:
    """A Chrome trace of ``steps`` steps in ``wall_us`` as microseconds per step."""
    spans = [event for event in events if event.get("ph") == "X"]
    work, launches, waited = [], [], 0.0
    for event in spans:
        kind, name = event.get("cat"), event["name"]
        start, launch = float(event["ts"]), int(event.get("args", {}).get("correlation", -1))
        if kind in _ON_DEVICE:
            work.append(Work(name, start, start + float(event["dur"]), launch, kind != "kernel"))
        elif kind in ("cuda_runtime", "cuda_driver"):
            waited += float(event["dur"]) if "Synchronize" in name else 0.0
            if "GraphLaunch" in name:
                launches.append(launch)
    work.sort(key=lambda one: one.start)
    found: dict[str, Any] = {
        "traced_step_us": wall_us / steps,
        "host_us": (wall_us - waited) / steps,
        "launches": len(work) / steps,
        "graph_launches": len(launches) / steps,
    }
    if not work:
        return found
    groups: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for one, own in zip(work, own_times(work), strict=True):
        groups["copies" if one.is_copy else group_of(one.name)] += own / steps  # type: ignore[assignment] # of floats
        names[one.name] += own / steps  # type: ignore[assignment] # of floats
    span = max(one.end for one in work) - work[0].start
    found["parts_us"] = {**groups, "idle": span / steps - sum(groups.values())}
    found["kernels_us"] = [[name[:120], group_of(name), time] for name, time in names.most_common(_LISTED)]
    if gaps := gaps_between(work, launches):
        found["between_replays_us"] = statistics.median(gaps)
        found["between_replays_most_us"] = max(gaps)
    return found


def recorded(run: Callable[[int], float], steps: int, *, is_cuda: bool) -> tuple[list[dict[str, Any]], float]:
    """Events of a Chrome trace of ``run(steps)``, and the seconds that it returns.

    On a GPU only device activity and CUDA calls are traced: tracing torch's operators would take longer than they do.
    """
    import torch  # not at the top: reports need no torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as trace:
        seconds = run(steps)
        if is_cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"], seconds


def traced(run: Callable[[int], float], steps: int, *, is_cuda: bool) -> dict[str, Any]:
    """Trace ``run(steps)``, which returns its seconds, as microseconds per step."""
    events, seconds = recorded(run, steps, is_cuda=is_cuda)
    return analyse(events, steps, 1e6 * seconds)
