"""Trees of proposed tokens: rows of a verify, accepted nodes, and moved rows; one launch each.

None of these lets the next kernel start early: planning may follow, and attention reads plans, page tables and trees
before it waits. Tensors are small, and many are views: no kernel is specialized for their alignment, which would
compile it again while requests wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from attnplug_engine.kernels import launch_options
from attnplug_engine.kernels.sampling_metadata import SamplingMetadata


@triton.jit
def _pick(values, place, node):
    """Return ``values`` at ``place``, for each node."""
    return tl.sum(tl.where(place[:, None] == node[None, :], values[None, :], 0), 1)


@triton.jit
def _seen(up, node, DOUBLINGS: tl.constexpr):
    """Return masks of each node and its ancestors; ``up`` is each node's parent, and the root is its own."""
    bits = tl.full(node.shape, 1, tl.int64) << node.to(tl.int64)
    for _ in range(DOUBLINGS):
        bits, up = bits | _pick(bits, up, node), _pick(up, up, node)
    return bits


@triton.jit
def _depth(bits, node):
    """Return the number of a node's ancestors, from the masks of ``_seen``."""
    return tl.sum(((bits[:, None] >> node.to(tl.int64)[None, :]) & 1).to(tl.int32), 1) - 1


@triton.jit
def _parents(parents, node, NODES: tl.constexpr):
    """Return the parent of each node, from a row of ``parents``."""
    up = tl.load(parents + node - 1, mask=(node > 0) & (node < NODES), other=0)
    return tl.maximum(up, 0).to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=range(4))
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
def _repeat(values, target, request, place, is_one):
    tl.store(target + place, tl.load(values + request), mask=is_one)


@triton.jit(do_not_specialize_on_alignment=range(28))
def _lay_out(
    rows, known, committed, prompts, tokens, lengths, proposed, proposed_row, parents, parents_row,
    temperature, top_k, top_p, min_p, seed,
    found, seq_lens, ids, positions, bits, drafts, above, heats, ks, ps, min_ps, seeds, places,
    NODES: tl.constexpr, BLOCK: tl.constexpr, DOUBLINGS: tl.constexpr, TREE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request."""
    if EARLY:
        gdc_wait()
    request, node = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row, place = tl.load(rows + request).to(tl.int64), request * NODES + node
    is_one, is_draft = node < NODES, (node > 0) & (node < NODES)
    draft = request * (NODES - 1) + node - 1
    root, length = tl.load(known + request), tl.load(lengths + row)
    length = tl.where(root < 0, length, tl.load(committed + request))
    root = tl.where(root < 0, tl.load(tokens + row), root)
    tl.store(found + request, length)
    tl.store(seq_lens + request, (length + NODES).to(tl.int32))
    token = tl.load(proposed + row * proposed_row + node - 1, mask=is_draft, other=-1)
    tl.store(drafts + draft, token, mask=is_draft)
    tl.store(ids + place, tl.where(node == 0, root, tl.maximum(token, 0)), mask=is_one)
    depth = node
    if TREE:
        up = _parents(parents + row * parents_row, node, NODES)
        seen = _seen(up, node, DOUBLINGS)
        depth = _depth(seen, node)
        tl.store(bits + place, seen, mask=is_one)
        tl.store(above + draft, up.to(tl.int64), mask=is_draft)
    position = length + depth
    tl.store(positions + place, position, mask=is_one)
    tl.store(places + place, (position + 1 - tl.load(prompts + request)).to(tl.int32), mask=is_one)
    _repeat(temperature, heats, request, place, is_one)
    _repeat(top_k, ks, request, place, is_one)
    _repeat(top_p, ps, request, place, is_one)
    _repeat(min_p, min_ps, request, place, is_one)
    _repeat(seed, seeds, request, place, is_one)


@triton.jit(do_not_specialize_on_alignment=range(12))
def _accept(
    tokens, tokens_row, parents, parents_row, chosen, counts, path, found, rows, committed, lengths, newest,
    NODES: tl.constexpr, BLOCK: tl.constexpr, DOUBLINGS: tl.constexpr, TREE: tl.constexpr, COMMIT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program per request."""
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
        # The deepest node; of equals the first.
        best = tl.max(tl.where((bits & wrong) == 0, depth * BLOCK + (BLOCK - 1 - node), -1), 0)
        count, last = best // BLOCK + 1, BLOCK - 1 - best % BLOCK
        taken = tl.sum(tl.where(node == last, bits, 0), 0)
        is_on = ((taken >> node.to(tl.int64)) & 1) > 0
    else:
        depth, count = node, tl.min(tl.where(matched, BLOCK, node), 0)
        count = tl.minimum(count, NODES)
        last, is_on = count - 1, node < count
    tl.store(counts + request, count.to(tl.int64))
    tl.store(path + first + depth, node.to(tl.int64), mask=is_on)
    tl.store(found + first + depth, target, mask=is_on)
    rest = is_one & (node >= count)
    tl.store(path + first + node, tl.zeros([BLOCK], tl.int64), mask=rest)
    tl.store(found + first + node, tl.full([BLOCK], -1, tl.int64), mask=rest)
    if COMMIT:
        row = tl.load(rows + request).to(tl.int64)
        tl.store(lengths + row, tl.load(committed + request) + count)
        tl.store(newest + row, tl.maximum(tl.sum(tl.where(node == last, target, 0), 0), 0))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=range(6))
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
    """Constants of a kernel with one program per request. Few warps: a tree is small, and its sums stay within one
    warp."""
    block = max(triton.next_power_of_2(nodes), 2)
    doublings = max(nodes - 1, 1).bit_length()
    return {"NODES": nodes, "BLOCK": block, "DOUBLINGS": doublings, "num_warps": 4 if tree and block > 16 else 1}


def relate(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return depths and ancestors, like ``attnplug_engine.speculation.tree``."""
    requests, nodes = parents.shape[0], parents.shape[1] + 1
    depths, bits = torch.empty(2, requests, nodes, dtype=torch.int64, device=parents.device)
    _relate[requests,](
        parents, parents.stride(0), depths, bits, **_sizes(nodes, tree=True), **launch_options(parents.device)
    )
    return depths, bits


def lay_out(
    rows: Tensor,
    known: Tensor,
    committed: Tensor,
    prompts: Tensor,
    sampling: SamplingMetadata,
    tokens: Tensor,
    lengths: Tensor,
    proposed: Tensor,
    parents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None, SamplingMetadata]:
    """Return the fields of ``attnplug_engine.speculation.verify_rows.VerifyRows`` in their order, the proposal's as
    two."""
    requests, nodes, device = rows.shape[0], proposed.shape[1] + 1, rows.device
    found = torch.empty(requests, dtype=torch.int64, device=device)
    seq_lens = torch.empty(requests, dtype=torch.int32, device=device)
    ids, positions, bits, seed = torch.empty(4, requests * nodes, dtype=torch.int64, device=device)
    drafts, above = torch.empty(2, requests, nodes - 1, dtype=torch.int64, device=device)
    heat, top_p, min_p = torch.empty(3, requests * nodes, dtype=torch.float32, device=device)
    top_k, place = torch.empty(2, requests * nodes, dtype=torch.int32, device=device)
    up, is_tree = proposed if parents is None else parents, parents is not None
    _lay_out[requests,](
        rows, known, committed, prompts, tokens, lengths, proposed, proposed.stride(0), up, up.stride(0),
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed,
        found, seq_lens, ids, positions, bits, drafts, above, heat, top_k, top_p, min_p, seed, place,
        TREE=is_tree, **_sizes(nodes, tree=is_tree), **launch_options(device),
    )  # fmt: skip
    tree, own = (bits.view(requests, nodes), above) if is_tree else (None, None)
    return found, seq_lens, ids, positions, tree, drafts, own, SamplingMetadata(heat, top_k, top_p, min_p, seed, place)


def accept(
    tokens: Tensor,
    parents: Tensor | None,
    chosen: Tensor,
    commit: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return counts, path and tokens, like ``attnplug_engine.speculation.acceptance``.

    ``commit`` are the rows, committed lengths, and all lengths and newest tokens of ``accept_and_commit``.
    """
    requests, nodes = chosen.shape
    counts = torch.empty(requests, dtype=torch.int64, device=chosen.device)
    path, found = torch.empty(2, requests, nodes, dtype=torch.int64, device=chosen.device)
    up, is_tree = tokens if parents is None else parents, parents is not None
    _accept[requests,](
        tokens, tokens.stride(0), up, up.stride(0), chosen.contiguous(), counts, path, found,
        *(commit or (counts,) * 4),
        TREE=is_tree, COMMIT=commit is not None, **_sizes(nodes, tree=is_tree), **launch_options(chosen.device),
    )  # fmt: skip
    return counts, path, found


def moves(path: Tensor, counts: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return sources and targets, like ``attnplug_engine.speculation.acceptance.moves``."""
    rows, block = slots.numel(), 256
    sources, targets = torch.empty(2, rows, dtype=slots.dtype, device=slots.device)
    _move[triton.cdiv(rows, block),](
        path.contiguous(), counts, slots.contiguous(), sources, targets, rows,
        NODES=slots.shape[1], BLOCK=block, **launch_options(slots.device),
    )  # fmt: skip
    return sources, targets
