"""Stand-ins for real backends that record their calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnplug import Claims, ForwardBatch, GraphLevel, Plan
from attnplug.contract.batch import BackendId


@dataclass
class MHARecorder:
    """MHA backend that records its calls. Its result is the number of the call."""

    name: str = "recorder"
    claims: Claims = field(
        default_factory=lambda: Claims(
            cuda_graph=GraphLevel.ALWAYS, needs_cpu_seq_lens=False, extras=frozenset({"out"})
        )
    )
    fill: int = 0
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.backend_id = BackendId(self.name)

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        self.calls.append(("plan", batch.geometry.mode))
        return Plan.of(self.backend_id, batch.geometry)

    def forward_extend(
        self, q: Tensor, k: Any, v: Any, layer: Any, batch: Any, *, save_kv_cache: bool = True, extras: Any = None
    ) -> Tensor:
        batch.plan_for(self.backend_id, q.shape[0])
        self.calls.append(("run", q.shape[0]))
        out = torch.full_like(q, float(len(self.calls)))
        return out if extras is None or extras.out is None else extras.out.copy_(out)

    forward_decode = forward_extend

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.calls.append(("reserve", (max_bs, max_num_tokens)))

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        self.calls.append(("capture" if in_capture else "replay", forward_batch.geometry.mode))
        return Plan.of(self.backend_id, forward_batch.geometry)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        self.calls.append(("refill", forward_batch.geometry.rows))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.fill


@dataclass
class MLARecorder:
    """MLA backend that records its calls."""

    claims: Claims = field(default_factory=lambda: Claims(cuda_graph=GraphLevel.UNIFORM, needs_cpu_seq_lens=False))
    fill: int = 0
    name: str = "recorder"
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.backend_id = BackendId(self.name)

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        self.calls.append(("plan", batch.geometry))
        return Plan.of(self.backend_id, batch.geometry)

    def forward_extend(
        self, q: Tensor, k: Any, v: Any, layer: Any, batch: Any, *, save_kv_cache: bool = True, extras: Any = None
    ) -> Tensor:
        assert k is None and v is None and not save_kv_cache
        batch.plan_for(self.backend_id, q.shape[0])
        self.calls.append(("run", (layer.layer_id, tuple(q.shape), extras)))
        return q[..., : layer.mla.kv_lora_rank]

    forward_decode = forward_extend

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.calls.append(("reserve", (max_bs, max_num_tokens)))

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        self.calls.append(("capture" if in_capture else "replay", forward_batch.geometry))
        return Plan.of(self.backend_id, forward_batch.geometry)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        self.calls.append(("refill", forward_batch.geometry.rows))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.fill

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]
