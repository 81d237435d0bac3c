"""First and last kernels of a captured step, compiled for a GPU that may be absent."""

from collections.abc import Iterator

from attnplug_engine.graphs.mailbox import SLOTS
from attnplug_engine.kernels import step_io
from attnplug_testing.ahead import compiled

TYPES = {
    **dict.fromkeys(("page_table", "positions", "input_slots", "memory", "slot_index", "mirror"), "*i32"),
    **dict.fromkeys(("ids", "tokens", "sampled", "rows", "chosen", "output_slots"), "*i64"),
}
BEGIN = {"BLOCK": 64, "COPIED": 256}
END = {"SLOTS": SLOTS, "BLOCK": 256, "EARLY": True}


def facts() -> Iterator[dict[str, object]]:
    """Number of each kernel's loads that bypass the caches and read host memory."""
    for kernel, constants, options in ((step_io._begin, BEGIN, {}), (step_io._end, END, {"launch_pdl": True})):
        ptx = compiled(kernel, 90, TYPES, constants, {"num_warps": 4, **options}).asm["ptx"]
        yield {"kernel": kernel.__name__, "uncached": ptx.count("ld.global.cv"), "waits": "griddepcontrol.wait" in ptx}
