"""What begins and ends a captured step, compiled for a GPU that need not be there."""

from collections.abc import Iterator

from attnplug_engine.kernels import steps
from attnplug_engine.letters import LETTERS
from attnplug_testing.ahead import compiled

TYPES = {
    **dict.fromkeys(("page_table", "positions", "inbox", "memory", "turn", "mirror"), "*i32"),
    **dict.fromkeys(("ids", "tokens", "sampled", "rows", "chosen", "outbox"), "*i64"),
}
BEGIN = {"BLOCK": 64, "COPIED": 256}
END = {"LETTERS": LETTERS, "BLOCK": 256, "EARLY": True}


def facts() -> Iterator[dict[str, object]]:
    """How many of the loads of each go past the caches, to the host's memory."""
    for kernel, constants, options in ((steps._begin, BEGIN, {}), (steps._end, END, {"launch_pdl": True})):
        ptx = compiled(kernel, 90, TYPES, constants, {"num_warps": 4, **options}).asm["ptx"]
        yield {"kernel": kernel.__name__, "uncached": ptx.count("ld.global.cv"), "waits": "griddepcontrol.wait" in ptx}
