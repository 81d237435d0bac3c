"""The kernels of speculation, compiled for GPUs that may be absent."""

from collections.abc import Iterator
from typing import Any

from attnplug_engine.kernels import draft_topk, draft_tree, ngram, trees
from attnplug_engine.kernels.sample import CHUNK
from attnplug_testing.ahead import compiled, resources

TYPES = {
    **dict.fromkeys(("parents", "depths", "bits", "ids", "positions", "tree", "rows", "roots", "proposed"), "*i64"),
    **dict.fromkeys(("tokens", "chosen", "counts", "path", "found", "slots", "sources", "targets", "values"), "*i64"),
    **dict.fromkeys(("lengths", "history", "position"), "*i32"),
    **dict.fromkeys(("logits", "temperature", "peaks", "totals", "scores", "logprobs"), "*fp32"),
    **dict.fromkeys(("seed", "target_ids", "children", "numbers", "all_tokens", "all_parents"), "*i64"),
    **dict.fromkeys(("new_numbers", "new_tokens", "new_bits", "new_all_tokens", "new_all_parents"), "*i64"),
    **dict.fromkeys(("gains", "all_scores", "new_scores", "new_all_scores"), "*fp32"),
    **dict.fromkeys(
        ("proposed_parents", "known", "committed", "prompts", "newest", "drafts", "above", "seeds"), "*i64"
    ),
    **dict.fromkeys(("top_p", "min_p", "heats", "ps", "min_ps"), "*fp32"),
    **dict.fromkeys(("top_k", "ks", "places", "seq_lens"), "*i32"),
}
OTHERS = {
    **dict.fromkeys((("_accept", "lengths"), ("_lay_out", "lengths")), "*i64"),
    **dict.fromkeys((("_look", "tokens"), ("_choose", "tokens")), "*i32"),
    **dict.fromkeys((("_move", "rows"), ("_grow", "rows")), "i32"),
}
"""Arguments of another type in some kernels."""
ON_SM_80 = ("_prune", "_search")
"""None of them has instructions of its own there."""


def made(nodes: int, *, tree: bool) -> tuple[dict[str, object], dict[str, object]]:
    """Constants and options of a kernel with a program a request."""
    sizes: dict[str, object] = {**trees._sizes(nodes, tree=tree)}
    return sizes, {"num_warps": sizes.pop("num_warps")}


def each() -> Iterator[tuple[Any, dict[str, object], dict[str, object]]]:
    """Kernels with their constants and options."""
    yield trees._relate, *made(64, tree=True)
    for nodes, tree in ((4, False), (8, True), (64, True)):
        constants, options = made(nodes, tree=tree)
        yield trees._lay_out, {**constants, "TREE": tree}, options
        yield trees._accept, {**constants, "TREE": tree, "COMMIT": nodes < 64}, options
    yield trees._move, {"NODES": 8, "BLOCK": 256}, {}
    topk = 8
    for root in (True, False):
        added = {"TOPK": topk, "ROOT": root, "COUNT": topk if root else topk**2}
        block = topk if root else topk**2
        sizes = {"BLOCK": block, "CHUNK": min(block, draft_tree.CHUNK)}
        yield draft_tree._grow, {**added, **sizes}, {"num_warps": 1 if block <= 16 else 4}
    yield draft_tree._prune, {"NODES": 64, "BLOCK": 512, "CHUNK": draft_tree.CHUNK}, {"num_warps": 8}
    yield ngram._append, {"NODES": 5, "BLOCK": 8}, {"num_warps": 1}
    for topk in (1, 4):
        lengths = {"TOPK": topk, "LENGTHS": ngram.LENGTHS}
        yield ngram._search, {**lengths, "LEAST": 2, "MOST": 5, "BLOCK": ngram.BLOCK}, {"num_warps": 8}
        yield ngram._propose, {**lengths, "STEPS": 5, "VALUES": 64 * topk, "BLOCK": 8}, {"num_warps": 4}
        topped = {"TOPK": topk, "MAPPED": topk > 1}
        yield draft_topk._look, {**topped, "CHUNK": CHUNK}, {"num_warps": 4}
        yield draft_topk._choose, {**topped, "CHUNKS": 128, "FOUND": 128 * topk}, {"num_warps": 4}


def facts() -> Iterator[tuple[int, str, int]]:
    """SM, kernel and bytes spilled of each."""
    for sm in (80, 90):
        early = {"launch_pdl": True} if sm >= 90 else {}
        for kernel, constants, options in each():
            name = kernel.fn.__name__
            if sm == 80 and name not in ON_SM_80:
                continue
            types = {**TYPES, **{argument: kind for (of, argument), kind in OTHERS.items() if of == name}}
            constants = {**constants, "EARLY": sm >= 90}
            found = compiled(kernel, sm, types, constants, {**options, **early}, ("stride", "vocab"))
            yield sm, f"{kernel.fn.__module__.rsplit('.')[-1]}.{name}", resources(found)[1]
