"""Trees of proposed tokens: the rows that a verify runs, what is accepted of them, and what moves; one launch each.

None of these lets the next kernel start early: planning may come next, and attention reads plans, page tables and trees
before it waits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from attnplug_engine.kernels import launch_options


@triton.jit
def _pick(values, place, node):
    """``values`` at ``place``, for each node."""
    return tl.sum(tl.where(place[:, None] == node[None, :], values[None, :], 0), 1)


@triton.jit
def _seen(up, node, DOUBLINGS: tl.constexpr):
    """By bits, each node and its ancestors, where ``up`` is each node's parent and the root is its own."""
    bits = tl.full(node.shape, 1, tl.int64) << node.to(tl.int64)
    for _ in range(DOUBLINGS):
        bits, up = bits | _pick(bits, up, node), _pick(up, up, node)
    return bits


@triton.jit
def _depth(bits, node):
    """How many ancestors a node has, of the bits of ``_seen``."""
    return tl.sum(((bits[:, None] >> node.to(tl.int64)[None, :]) & 1).to(tl.int32), 1) - 1


@triton.jit
def _parents(parents, node, NODES: tl.constexpr):
    """The parent of each node, of a row of ``parents``."""
    up = tl.load(parents + node - 1, mask=(node > 0) & (node < NODES), other=0)
    return tl.maximum(up, 0).to(tl.int32)


@triton.jit
def _relate(
    parents, row, depths, bits, NODES: tl.constexpr, BLOCK: tl.constexpr, DOUBLINGS: tl.constexpr, EARLY: tl.constexpr
):
    if EARLY:
        gdc_wait()
    request, node = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    seen = _seen(_parents(parents + request * row, node, NODES), node, DOUBLINGS)
    tl.store(bits + request * NODES + node, seen, mask=node < NODES)
    tl.store(depths + request * NODES + node, _depth(seen, node).to(tl.int64), mask=node < NODES)


@triton.jit
def _lay_out(
    ids, positions, tree, rows, roots, lengths, proposed, proposed_row, parents, parents_row,
    NODES: tl.constexpr, BLOCK: tl.constexpr, DOUBLINGS: tl.constexpr, TREE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
    request, node = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row, place = tl.load(rows + request).to(tl.int64), request * NODES + node
    depth = node
    if TREE:
        seen = _seen(_parents(parents + row * parents_row, node, NODES), node, DOUBLINGS)
        depth = _depth(seen, node)
        tl.store(tree + place, seen, mask=node < NODES)
    token = tl.load(proposed + row * proposed_row + node - 1, mask=(node > 0) & (node < NODES), other=0)
    token = tl.where(node == 0, tl.load(roots + row), tl.maximum(token, 0))
    tl.store(ids + place, token, mask=node < NODES)
    tl.store(positions + place, tl.load(lengths + row) + depth, mask=node < NODES)


@triton.jit
def _accept(
    tokens, tokens_row, parents, parents_row, chosen, counts, path, found,
    NODES: tl.constexpr, BLOCK: tl.constexpr, DOUBLINGS: tl.constexpr, TREE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program a request."""
    if EARLY:
        gdc_wait()
    request, node = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    first, is_one = request * NODES, node < NODES
    up = tl.maximum(node - 1, 0)
    if TREE:
        up = _parents(parents + request * parents_row, node, NODES)
    token = tl.load(tokens + request * tokens_row + node - 1, mask=(node > 0) & is_one, other=-1)
    target = tl.load(chosen + first + node, mask=is_one, other=-1)
    wanted = tl.load(chosen + first + up, mask=is_one, other=-1)
    matched = (node == 0) | (is_one & (token >= 0) & (token == wanted))
    if TREE:
        bits = _seen(up, node, DOUBLINGS)
        depth = _depth(bits, node)
        one = tl.full([BLOCK], 1, tl.int64) << node.to(tl.int64)
        wrong = tl.sum(tl.where(matched, 0, one), 0)
        # The deepest, of equals the first.
        best = tl.max(tl.where((bits & wrong) == 0, depth * BLOCK + (BLOCK - 1 - node), -1), 0)
        count, last = best // BLOCK + 1, BLOCK - 1 - best % BLOCK
        taken = tl.sum(tl.where(node == last, bits, 0), 0)
        is_on = ((taken >> node.to(tl.int64)) & 1) > 0
    else:
        depth, count = node, tl.min(tl.where(matched, BLOCK, node), 0)
        count = tl.minimum(count, NODES)
        is_on = node < count
    tl.store(counts + request, count.to(tl.int64))
    tl.store(path + first + depth, node.to(tl.int64), mask=is_on)
    tl.store(found + first + depth, target, mask=is_on)
    rest = is_one & (node >= count)
    tl.store(path + first + node, tl.zeros([BLOCK], tl.int64), mask=rest)
    tl.store(found + first + node, tl.full([BLOCK], -1, tl.int64), mask=rest)


@triton.jit(do_not_specialize=["rows"])
def _move(path, counts, slots, sources, targets, rows, NODES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    request, place = row // NODES, row % NODES
    node = tl.load(path + row, mask=there, other=0)
    moved = (place < tl.load(counts + request, mask=there, other=0)) & (node != place)
    tl.store(sources + row, tl.load(slots + request * NODES + node, mask=there, other=0), mask=there)
    own = tl.load(slots + row, mask=there, other=0)
    tl.store(targets + row, tl.where(moved, own, -1), mask=there)


def _sizes(nodes: int, *, tree: bool) -> dict[str, int | bool]:
    """Constants of a kernel with a program a request. Few warps: a tree is small, and its sums stay in one."""
    block = max(triton.next_power_of_2(nodes), 2)
    doublings = max(nodes - 1, 1).bit_length()
    return {"NODES": nodes, "BLOCK": block, "DOUBLINGS": doublings, "num_warps": 4 if tree and block > 16 else 1}


def relate(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Depths and ancestors, as ``attnplug_engine.speculation.tree`` finds them."""
    requests, nodes = parents.shape[0], parents.shape[1] + 1
    depths, bits = torch.empty(2, requests, nodes, dtype=torch.int64, device=parents.device)
    _relate[requests,](
        parents, parents.stride(0), depths, bits, **_sizes(nodes, tree=True), **launch_options(parents.device)
    )
    return depths, bits


def lay_out(
    ids: Tensor,
    positions: Tensor,
    tree: Tensor | None,
    rows: Tensor,
    roots: Tensor,
    lengths: Tensor,
    proposed: Tensor,
    parents: Tensor | None,
) -> None:
    """As ``attnplug_engine.speculation.tree.lay_out``."""
    nodes, is_tree = proposed.shape[1] + 1, tree is not None
    bits, up = (ids, proposed) if tree is None or parents is None else (tree, parents)
    _lay_out[rows.shape[0],](
        ids, positions, bits, rows, roots, lengths, proposed, proposed.stride(0), up, up.stride(0),
        TREE=is_tree, **_sizes(nodes, tree=is_tree), **launch_options(ids.device),
    )  # fmt: skip


def accept(tokens: Tensor, parents: Tensor | None, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, path and tokens, as ``attnplug_engine.speculation.accept`` finds them."""
    requests, nodes = chosen.shape
    counts = torch.empty(requests, dtype=torch.int64, device=chosen.device)
    path, found = torch.empty(2, requests, nodes, dtype=torch.int64, device=chosen.device)
    up, is_tree = tokens if parents is None else parents, parents is not None
    _accept[requests,](
        tokens, tokens.stride(0), up, up.stride(0), chosen.contiguous(), counts, path, found,
        TREE=is_tree, **_sizes(nodes, tree=is_tree), **launch_options(chosen.device),
    )  # fmt: skip
    return counts, path, found


def moves(path: Tensor, counts: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Sources and targets, as ``attnplug_engine.speculation.accept.moves`` finds them."""
    rows, block = slots.numel(), 256
    sources, targets = torch.empty(2, rows, dtype=slots.dtype, device=slots.device)
    _move[triton.cdiv(rows, block),](
        path.contiguous(), counts, slots.contiguous(), sources, targets, rows,
        NODES=slots.shape[1], BLOCK=block, **launch_options(slots.device),
    )  # fmt: skip
    return sources, targets
