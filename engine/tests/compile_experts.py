"""The experts' kernels, compiled for GPUs that may be absent."""

from collections.abc import Iterator

import torch

from attnplug_engine.kernels import experts, routing
from attnplug_testing import ahead

SHAPE = {"HIDDEN": 2048, "WIDTH": 1408}
FOUND = {"EXPERTS": 64, "BOUNDS": 64}
FLOATS = {"eps", "scaling"}
SINGLE = {"topk_weights", "logits", "gate", "bias"}
WHOLE = {"topk_ids", "offsets", "order"}


def compiled(kernel, sm: int, constants: dict[str, object], options: dict[str, object], dtype: str = "bf16"):

    def kind(name: str) -> str:
        if name in FLOATS:
            return "fp32"
        if name.endswith("_row") or name == "count":
            return "i32"
        return "*fp32" if name in SINGLE else "*i32" if name in WHOLE else f"*{dtype}"

    kinds = {name: kind(name) for name in kernel.arg_names}
    return ahead.compiled(kernel, sm, kinds, constants, options, ("x_row", "onto_row", "shared_row"))


def tiled(
    sm: int, spread: experts.ExpertTile, gather: experts.ExpertTile, gated: bool, dtype: str = "bf16", biased=False
):
    """Kernels of both products; ``biased`` ones also clip their gates (gpt-oss)."""
    early = {"EARLY": sm >= 90}
    adds = {"SHARED": True, "ONTO": True}
    for tile, names in ((spread, ("_up_projection", "_up_one")), (gather, ("_down_projection", "_down_one"))):
        name = names[tile.pairs == 1]
        constants = SHAPE | early | {"COLUMNS": tile.columns, "DEPTH": tile.depth}
        constants |= FOUND | {"PAIRS": tile.pairs, "FLIPPED": tile.flipped} if tile.pairs > 1 else {}
        constants |= {"PER_TOKEN": 6} if name != "_down_projection" else {}
        clip = {"LIMIT": 7.0 if biased else 0.0, "ALPHA": 1.702, "OFFSET": 1.0}
        constants |= {"BIAS": biased, **({"GATED": gated, **clip} if tile is spread else {})}
        constants |= {"EVERY": 2} if tile.pairs == 1 else {}
        constants |= adds | {"GATE": True} if name == "_down_one" else {}
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": sm >= 90}
        yield name, compiled(getattr(experts, name), sm, constants, options, dtype)


def every_kernel(sm: int):
    early, options = {"EARLY": sm >= 90}, {"launch_pdl": sm >= 90}
    for tokens in (1, 64, 4096) if sm == 90 else (4096,):
        yield from tiled(sm, *experts.tiles(tokens, 6, 64, torch.bfloat16), gated=True)
    for tokens in (1, 64) if sm == 90 else ():
        yield from tiled(sm, *experts.tiles(tokens, 6, 64, torch.bfloat16), gated=True, biased=True)
    if sm == 80:  # the kernels around the products are the same there
        yield from tiled(sm, *experts.tiles(64, 6, 64, torch.float32), gated=False, dtype="fp32")
        return
    sizes = {"EXPERTS": 64, "BLOCK": 32, "CHUNK": 256}
    yield "_sort_pairs", compiled(experts._sort_pairs, sm, sizes | early, options)
    sizes = {"PER_TOKEN": 6, "HIDDEN": 2048, "COLUMNS": 1024, "SHARED": True, "ONTO": True}
    yield "_combine", compiled(experts._combine, sm, sizes | early, options)
    sizes = {"HIDDEN": 2048, "COUNT": 65, "BLOCK": 2048, "COLUMNS": 4, "NORM": True}
    yield "_score", compiled(routing._score, sm, sizes | early, options)
    sizes = {"EXPERTS": 256, "BLOCK": 256, "PER_TOKEN": 8, "SLOTS": 8, "SIGMOID": True, "BIAS": True}
    sizes |= {"NORMALISED": True, "GROUP": 32, "TAKEN": 4}
    yield "_choose", compiled(routing._choose, sm, sizes | early, options | {"num_warps": 1})


def facts() -> Iterator[tuple[int, str, int]]:
    """SM, kernel and bytes of shared memory of each."""
    for sm in (80, 90):
        for name, made in every_kernel(sm):
            yield sm, name, int(made.metadata.shared)
