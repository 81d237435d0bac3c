"""The planner of FlashInfer's MLA wrapper: C++ that FlashInfer compiles at its first use."""

from __future__ import annotations

import importlib
import inspect
import re
from itertools import accumulate
from pathlib import Path

from attnplug_flashinfer_mla.work_list import MAX_WORK_ITEMS

PROCESSORS, CLUSTER = 132, 2


def scheduler() -> str:
    """The C++ source of FlashInfer's planner for MLA, which is compiled at its first use."""
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
