"""The sampler's kernels, compiled for GPUs that need not be there."""

from collections.abc import Iterator

from attnplug_engine.kernels import sample
from support.ahead import compiled, resources

TYPES = {
    **dict.fromkeys(("logits", "temperature", "top_p", "min_p", "peaks", "scores"), "*fp32"),
    **dict.fromkeys(("top_k", "position", "peak_tokens", "drawn"), "*i32"),
    **dict.fromkeys(("seed", "chosen"), "*i64"),
}
ALIGNED = ("stride", "vocab")


def facts() -> Iterator[tuple[int, str, int]]:
    """SM, kernel and bytes spilled of each."""
    for sm in (80, 90):
        early = sm >= 90
        look = compiled(sample._look, sm, TYPES, {"CHUNK": sample.CHUNK, "EARLY": early}, {"num_warps": 4}, ALIGNED)
        choose = compiled(
            sample._choose,
            sm,
            TYPES,
            {"CHUNKS": 128, "BLOCK": sample.BLOCK, "EARLY": early},
            {"num_warps": sample.WARPS, "launch_pdl": early},
            ALIGNED,
        )
        for kernel, made in (("_look", look), ("_choose", choose)):
            yield sm, kernel, resources(made, sm)[1]
