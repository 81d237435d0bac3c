"""A good backend of sparse layers alone, in plain torch, with HiSparse too. Mutants are small changes of its text."""

from __future__ import annotations

import torch

from attnplug import AttentionKind, BackendSpec, Capabilities, DType, Feature, Plan, Refusal, RefusalCode
from attnplug.sparse import SelectedPositions, SelectedSlots
from attnplug_sparse.attention import SparseAttention


def sparse_only(problem, role, options):
    if any(layer.indexer is None for layer in problem.model.layers):
        yield Refusal(
            RefusalCode.FEATURE, "it attends to what an index chooses, and there are layers without one", None
        )


SPEC = BackendSpec(
    name="good_sparse",
    summary="good",
    contract="1.0",
    factory="good_sparse:Backend",
    check=sparse_only,
    capabilities=Capabilities(
        kinds=frozenset({AttentionKind.MLA}),
        devices=frozenset({"cpu"}),
        dtypes=frozenset({DType.FLOAT32, DType.BFLOAT16}),
        kv_dtypes=frozenset({DType.FLOAT32, DType.BFLOAT16, "fp8_ds_mla"}),
        index_dtypes=frozenset({DType.FLOAT32, DType.BFLOAT16, DType.FLOAT8_E4M3}),
        features=frozenset({Feature.SPARSE}),
        max_speculative_tokens=8,
        extras=frozenset({"lse", "out", "selected"}),
        coordinators=frozenset({"hisparse"}),
        trees=True,
        invariant=frozenset({"run", "batch", "chunks", "verify"}),
    ),
)


class Backend(SparseAttention):
    def plan(self, geometry):
        slots = [geometry.cache_slots([r])[0] if geometry.kv_lens[r] else None for r in range(geometry.requests)]
        seen = [
            (slots[request], self.seen(total - new, row, None if geometry.tree is None else geometry.tree[request]))
            for request, (new, total) in enumerate(zip(geometry.query_lens, geometry.kv_lens))
            for row in range(new)
        ]
        return Plan.of(self.backend_id, geometry, seen, geometry.new_slots())

    def seen(self, before, row, tree):
        """The positions that a new row sees: with a tree, the prefix and its ancestors."""
        rows = torch.arange(row + 1)
        if tree is not None:
            rows = rows[((tree[row] >> rows) & 1).bool()]
        return torch.cat([torch.arange(before), before + rows])

    def choose(self, index, layer, dims, plan):
        chosen = torch.full((len(index.q), dims.topk), -1, dtype=torch.int32)
        for row, (slots, seen) in enumerate(plan.metadata):
            keys = self.index_keys.read_keys(layer.layer_id, slots[seen]).float()
            scores = index.weights[row] @ torch.relu(index.q[row].float() @ keys.T * dims.scale)
            best = seen[scores.topk(min(dims.topk, len(seen))).indices]
            chosen[row, : len(best)] = best
        return SelectedPositions(chosen)

    def attend(self, q, layer, plan, new, extras):
        pool, rank, selected = self.context.pools.mla, layer.mla.kv_lora_rank, extras.selected
        out = q.new_zeros(*q.shape[:2], rank)
        for row, (slots, seen) in enumerate(plan.metadata):  # noqa: B007 # broken variants use it
            if isinstance(selected, SelectedSlots):
                where = selected.slots[row][selected.slots[row] >= 0].long()
            else:
                where = slots[selected.positions[row][selected.positions[row] >= 0].long()]
            rows = pool.read_rows(layer.layer_id, where).float()
            scores = q[row].float() @ rows.T * layer.scale
            out[row] = scores.softmax(-1) @ rows[:, :rank]
            if extras.lse is not None:
                extras.lse[row] = scores.logsumexp(-1)
        return out
