"""Sparse MLA on an H200: triton_mla's index, top-k and attention, separately and as a whole layer, compared with direct
calls of FlashMLA's sparse kernels and with triton_mla's own dense decode.

A layer has 128 heads, and an index of 64 heads of 128 that selects 2048 rows. Everything is captured; calls in a graph
cycle over enough layers that none finds its rows in L2. ``step`` is all that a sparse layer adds to
its projections: new rows and keys written, scores, top-k, attention. ``dense`` is the same without an index. FlashMLA
reads 656-byte fp8 rows (``flash_mla_with_kvcache`` with indices) or the rows of our cache (``flash_mla_sparse_fwd``).

A case that fails is reported with its error. Results are written as soon as they are available.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_clock import capture, device_us
from gpu_report import Report, attempt, describe
from torch import Tensor

from attnplug import (
    AttentionKind,
    DType,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    Geometry,
    LayerSpec,
    MLAPool,
    ModelSpec,
    Role,
)
from attnplug.contract.batch import BatchPlan
from attnplug.host import HostContext, KVPools, Limits, MLADims, WorkspaceOwner, load_registry
from attnplug.sparse import IndexerDims, IndexInputs, SelectedSlots
from attnplug_sparse.index import IndexPlan, SparseIndex
from attnplug_sparse.pools import INDEX_KEYS, IndexKeyPool
from attnplug_triton_mla.backend import TritonMLABackend

WHAT = (
    "sparse MLA decode in CUDA graphs, µs a layer: 128 heads, kv_lora 512 + rope 64, bf16, pages of 64, index of 64 × "
    "128 in bf16, top 2048; medians"
)
PACKAGES = ("torch", "triton", "sgl-flash-mla", "attnplug", "attnplug-triton-mla")
PAGE, HEADS, TOPK = 64, 128, 2048
DIMS = MLADims(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64)
INDEX = IndexerDims(64, 128, TOPK)
QK_DIM = DIMS.qk_nope_head_dim + DIMS.qk_rope_head_dim
SCALE = QK_DIM**-0.5
COLD_BYTES = 80 << 20
"""Bytes read between two reads of a row; more than L2 holds."""
MOST_LAYERS, CALLS, ROUNDS = 32, 8, 20
BYTES_PER_US, FLOP_PER_US = 4.2e6, 700e6
"""Rates of an H200 with a large copy and a large matmul."""
PACKED_ROWS = 1 << 20


@dataclass(frozen=True)
class Case:
    """Requests of equal length."""

    requests: int
    length: int

    def __str__(self) -> str:
        return f"{self.requests:>2} × {self.length:<6}"

    @property
    def chosen(self) -> int:
        return self.requests * min(TOPK, self.length)

    @property
    def layers(self) -> int:
        """Number of layers, such that no call finds its rows and keys in L2."""
        least = min(self.chosen * DIMS.row_dim, self.requests * self.length * INDEX.head_dim) * 2
        return min(max(-(-COLD_BYTES // least), 2), MOST_LAYERS)

    def limits_us(self) -> dict[str, float]:
        """Lower bounds by bytes, each read once; for attention also by operations, if these take longer."""
        rows, row, width = self.requests * self.length, DIMS.row_dim * 2, DIMS.row_dim + DIMS.kv_lora_rank
        moved = {"index": rows * INDEX.head_dim * 2, "topk": rows * 4, "attend": self.chosen * row, "dense": rows * row}
        found = {name: count / BYTES_PER_US for name, count in moved.items()}
        flop = {"attend_flop": self.chosen, "dense_flop": rows}
        found |= {name: 2 * HEADS * width * count / FLOP_PER_US for name, count in flop.items()}
        return found | {"index_flop": 2 * INDEX.heads * INDEX.head_dim * rows / FLOP_PER_US}


CASES = tuple(Case(requests, length) for length in (8192, 32768, 131072) for requests in (1, 16, 64))


def layer_spec(number: int, indexer: IndexerDims | None) -> LayerSpec:
    return LayerSpec(
        number, AttentionKind.MLA, HEADS, HEADS, QK_DIM, DIMS.qk_nope_head_dim, SCALE, mla=DIMS, indexer=indexer
    )


class Side:
    """triton_mla over some layers, with a captured batch in which every request decodes its last row."""

    def __init__(self, case: Case, layers: tuple[LayerSpec, ...], pools: KVPools, page_table: Tensor) -> None:
        self.layers, device = layers, page_table.device
        host = HostContext(
            model=ModelSpec("benchmark", "benchmark", layers, case.length),
            device=device,
            dtype=torch.bfloat16,
            kv_dtype=DType.BFLOAT16,
            page_size=PAGE,
            limits=Limits(case.requests, case.requests, case.length),
            pools=pools,
            workspace=WorkspaceOwner(),
        )
        declared = load_registry().backends["triton_mla"].spec.capabilities
        roles = frozenset({Role.PREFILL, Role.DECODE})
        self.backend = TritonMLABackend(host.for_backend("triton_mla", declared, roles=roles))
        self.backend.init_cuda_graph_state(case.requests, case.requests)
        lens = [case.length] * case.requests
        geometry = Geometry.of_lengths(ForwardMode.DECODE, page_table, [1] * case.requests, lens, PAGE)
        self.batch = ForwardBatch(replace(geometry, host=None, captured=True))
        self.batch.plan = BatchPlan(self.backend.init_forward_metadata_out_graph(self.batch, in_capture=True))
        self.backend.init_forward_metadata_in_graph(self.batch)


class Sparse:
    """One case: all sides over the same caches."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        pages = -(-case.length // PAGE)
        layers = tuple(layer_spec(number, INDEX) for number in range(case.layers))
        size: dict[str, Any] = {"num_pages": case.requests * pages, "page_size": PAGE, "device": device}
        self.mla = MLAPool(layers, dtype=DType.BFLOAT16, **size)
        self.keys = IndexKeyPool(layers, dtype=DType.BFLOAT16, **size)
        for layer in range(case.layers):
            self.mla.rows(layer).normal_()
            self.keys.keys(layer).normal_()
        table = torch.randperm(case.requests * pages, device=device).view(case.requests, pages).int()
        self.sparse = Side(case, layers, KVPools(mla=self.mla, caches={INDEX_KEYS: self.keys}), table)
        self.dense = Side(
            case, tuple(layer_spec(layer.layer_id, None) for layer in layers), KVPools(mla=self.mla), table
        )
        self.q, self.index_q = (self._random(heads, width) for heads, width in ((HEADS, DIMS.row_dim), (64, 128)))
        self.k, self.index_k = self._random(1, DIMS.row_dim), self._random(1, 128).squeeze(1)
        self.weights = self._random(64, 1).squeeze(2).float()
        self.table = table
        self.selected = [self._select(layer) for layer in layers]

    def _random(self, heads: int, width: int) -> Tensor:
        return torch.randn(self.case.requests, heads, width, dtype=torch.bfloat16, device=self.device)

    def _select(self, layer: LayerSpec, keys: Tensor | None = None) -> SelectedSlots:
        """Select rows; they differ per layer, as the keys do."""
        index = IndexInputs(self.index_q, keys, self.weights)
        selected = self.sparse.backend.select(index, layer, self.sparse.batch)
        assert isinstance(selected, SelectedSlots)
        return selected

    # Ours

    @property
    def _index(self) -> tuple[SparseIndex, IndexPlan, Any]:
        """Time the index, its plan, and one block of it."""
        assert self.sparse.backend._sparse is not None
        plan = self.sparse.batch.plan.attention.metadata.sparse.index
        (block,) = plan.blocks
        return self.sparse.backend._sparse.index, plan, block

    def index(self, number: int) -> None:
        index, plan, block = self._index
        index._fill_scores(plan, block, self.sparse.layers[number], self.index_q, self.weights)

    def topk(self, number: int) -> None:
        index, plan, block = self._index
        index._select_best(plan, block, TOPK, torch.empty_like(self.selected[number].slots))

    def attend(self, number: int) -> Tensor:
        extras = ForwardExtras(selected=self.selected[number])
        return self._forward(self.sparse, number, None, extras)

    def step(self, number: int) -> Tensor:
        selected = self._select(self.sparse.layers[number], self.index_k)
        return self._forward(self.sparse, number, self.k, ForwardExtras(selected=selected))

    def dense_step(self, number: int) -> Tensor:
        return self._forward(self.dense, number, self.k, None)

    def _forward(self, side: Side, number: int, k: Tensor | None, extras: ForwardExtras | None) -> Tensor:
        layer, saved = side.layers[number], k is not None
        return side.backend.forward_decode(self.q, k, None, layer, side.batch, save_kv_cache=saved, extras=extras)

    # FlashMLA

    def flashmla(self) -> dict[str, Callable[[int], Tensor]]:
        """Both of its kernels, over the same slots of a cache of at most a million rows."""
        import flash_mla

        every = self.mla.rows(0).flatten(0, 1)
        count = min(PACKED_ROWS, len(every))
        rows, packed = every[:count], packed_rows(every[:count]).view(-1, PAGE, 1, 656)
        indices = [(selected.slots % count).unsqueeze(1) for selected in self.selected]
        schedule, _ = flash_mla.get_mla_metadata()
        q = self.q.unsqueeze(1)

        def fp8(number: int) -> Tensor:
            out: Tensor = flash_mla.flash_mla_with_kvcache(
                *(q, packed, None, None, DIMS.kv_lora_rank, schedule),
                softmax_scale=SCALE,
                is_fp8_kvcache=True,
                indices=indices[number],
                use_legacy=True,
            )[0]
            return out

        def bf16(number: int) -> Tensor:
            out: Tensor = flash_mla.flash_mla_sparse_fwd(self.q, rows, indices[number], SCALE, use_legacy=True)[0]
            return out

        return {"flashmla_fp8": fp8, "flashmla_bf16": bf16}

    # Checking

    def errors(self) -> dict[str, float]:
        """Errors of the last request: attention against float64, and selected scores that differ from torch's."""
        slots = self.selected[0].slots[-1].long()
        rows = self.mla.rows(0).flatten(0, 2)[slots].double()
        weights = (self.q[-1].double() @ rows.T * SCALE).softmax(-1)
        wanted, found = weights @ rows[:, : DIMS.kv_lora_rank], self.attend(0)[-1].double()
        self.index(0)
        _, _, block = self._index
        scores = block.memory.scores[-1, : self.case.length]
        places = torch.full((self.mla.num_pages,), -1, device=self.device)
        places[self.table[-1].long()] = torch.arange(self.table.shape[1], device=self.device)
        chosen = scores[places[slots // PAGE] * PAGE + slots % PAGE].sort().values
        keys = self.keys.keys(0)[self.table[-1].long()].flatten(0, 1)[: self.case.length].double()
        exact = self.weights[-1].double() @ torch.relu(self.index_q[-1].double() @ keys.T * INDEX.scale)
        return {
            "attend": float((found - wanted).norm() / wanted.norm()),
            "scores": float((scores.double() - exact).norm() / exact.norm()),
            "chosen_differently": int((chosen != scores.topk(len(slots)).values.sort().values).sum()),
        }

    # Measuring

    def measure(self) -> dict[str, Any]:
        calls: dict[str, Callable[[int], Any]] = {
            "index": self.index,
            "topk": self.topk,
            "attend": self.attend,
            "step": self.step,
            "dense": self.dense_step,
        }
        errors = attempt(self.errors)  # before a step writes other rows
        missing = attempt(self.flashmla)
        if "error" not in missing:
            calls |= missing
        us, failed = {}, {}
        for name, call in calls.items():
            found = attempt(lambda call=call: self._us(call))
            (failed if isinstance(found, dict) else us)[name] = found
        limits = self.case.limits_us()
        shares = {name: limits[name] / us[name] for name in ("index", "topk", "attend", "dense") if name in us}
        result: dict[str, Any] = {"us": us, "limit_us": limits, "share_of_bytes": shares}
        result["errors"] = errors
        result["parts_us"] = sum(us.get(name, 0.0) for name in ("index", "topk", "attend"))
        ratios = {
            "attend / flashmla_fp8": ("attend", "flashmla_fp8"),
            "attend / flashmla_bf16": ("attend", "flashmla_bf16"),
            "dense / step": ("dense", "step"),
        }
        result["ratios"] = {name: us[a] / us[b] for name, (a, b) in ratios.items() if a in us and b in us}
        if "error" in missing:
            failed["flashmla"] = missing
        return result | ({"failed": failed} if failed else {})

    def _us(self, call: Callable[[int], Any]) -> float:
        count = max(CALLS, self.case.layers)

        def body() -> Tensor:
            for number in range(count):
                call(number % self.case.layers)
            return self.q

        graph, _ = capture(body)
        return device_us({"graph": graph.replay}, ROUNDS, lambda: torch.cuda._sleep(200_000))["graph"] / count


def packed_rows(rows: Tensor) -> Tensor:
    """``[rows, 656]`` bytes, as FlashMLA reads them: 512 fp8 numbers, 4 scales of 128 each, 64 bf16 numbers."""
    rows = rows.squeeze(1)
    latent = rows[:, :512].unflatten(1, (4, 128)).float()
    scales = latent.abs().amax(-1).clamp(min=1e-4) / 448
    fp8 = (latent / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(1)
    parts = (fp8, scales, rows[:, 512:].contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", metavar="FILE", type=Path)
    parser.add_argument("--quick", action="store_true", help="one case of each length")
    parser.add_argument("--commit", metavar="TEXT", help="what was measured")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which no further case begins")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("sparse_h200 measures kernels of an NVIDIA Hopper GPU, and torch sees none here")
    torch.manual_seed(0)
    report = Report(arguments.out, describe(WHAT, PACKAGES, arguments.commit))
    cases, rows = CASES[1::3] if arguments.quick else CASES, []
    with torch.inference_mode():
        for case in cases:
            if report.seconds > arguments.limit:
                print(f"{case}: left out, {report.seconds:.0f} s are over", flush=True)
                continue
            found = attempt(lambda case=case: Sparse(case, torch.device("cuda", 0)).measure())
            rows.append({**asdict(case), **found})
            report.put("cases", rows)
            shown = {**found.get("us", {}), **found.get("ratios", {})}
            words = ", ".join(f"{name} {value:.2f}" for name, value in shown.items())
            print(f"[{report.seconds:4.0f} s] {case} {words}; errors {found.get('errors')}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
