"""The sampler's kernels, compiled for GPUs that may be absent."""

from collections.abc import Iterator

from attnplug_engine.kernels import sample
from attnplug_testing.ahead import compiled, resources

TYPES = {
    **dict.fromkeys(("logits", "temperature", "top_p", "min_p", "peaks", "scores"), "*fp32"),
    **dict.fromkeys(("top_k", "position", "peak_tokens", "drawn"), "*i32"),
    **dict.fromkeys(("seed", "chosen"), "*i64"),
}
ALIGNED = ("stride", "vocab")


def facts() -> Iterator[tuple[int, str, int]]:
    """SM, kernel and bytes spilled of each."""
    look = sample._look, {"CHUNK": sample.CHUNK}, {"num_warps": 4}
    choose = sample._choose, {"CHUNKS": 128, "BLOCK": sample.BLOCK}, {"num_warps": sample.WARPS, "launch_pdl": True}
    for sm, (kernel, constants, options) in ((80, look), (90, look), (90, choose)):
        made = compiled(kernel, sm, TYPES, {**constants, "EARLY": sm >= 90}, options, ALIGNED)
        yield sm, kernel.__name__, resources(made)[1]
