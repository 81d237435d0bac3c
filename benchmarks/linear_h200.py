"""Linear attention on an H200: the fla backend against flash-linear-attention called directly, in the same run.

Gated DeltaNet and Kimi's delta attention with 32 heads and states of 128 x 128: prefill by chunks, and decode. Decode
reads and writes the states of several layers in place, more than the L2 cache holds. Everything runs inside CUDA graphs
and is timed on the device; the host time of a call is measured too.

``raw`` is the library's public function, which writes new states beside the old ones. ``raw_in_place`` is its inner
function, which takes slots. They alternate with ours, and ``raw_again`` shows the noise.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_clock import capture, device_us, host_us, medians
from gpu_report import Report, attempt, describe
from torch import Tensor

from attnplug import (
    AttentionKind,
    BackendContext,
    DType,
    ForwardBatch,
    ForwardMode,
    Geometry,
    LayerSpec,
    ModelSpec,
    Role,
)
from attnplug.contract.batch import BatchPlan
from attnplug.host import KVPools, Limits, WorkspaceOwner
from attnplug.linear import LinearDims, LinearInputs, LinearStatePool
from attnplug_hybrid_linear.fla_backend import FlaLinearBackend
from attnplug_hybrid_linear.plugin import attnplug_backends

HEADS, DIM = 32, 128
SCALE = DIM**-0.5
STATE_BYTES = HEADS * DIM * DIM * 4
BEYOND_L2 = 160 << 20
REPLAYS = 30
MOST_DIFFERENCE = 1e-2
WHAT = "fla backend against fla-core called directly; bf16, 32 heads, 128 x 128 float32 states; medians, in CUDA graphs"
PACKAGES = ("torch", "triton", "fla-core", "attnplug", "attnplug-hybrid-linear")
GDN, KDA = AttentionKind.GDN, AttentionKind.KDA


@dataclass(frozen=True)
class Case:
    """Requests with the same number of new tokens, on one kind of layer."""

    kind: str
    requests: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.kind} {self.requests} x {self.tokens}"


CASES = [
    *(Case(kind, requests, tokens) for kind in (GDN, KDA) for requests, tokens in ((1, 8192), (8, 4096))),
    *(Case(kind, requests, 1) for kind in (GDN, KDA) for requests in (1, 4, 16, 64, 256)),
]


class Sides:
    """Both sides of a case on the same inputs."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.decode = case.tokens == 1
        self.count = max(2, min(64, BEYOND_L2 // (case.requests * STATE_BYTES))) if self.decode else 1
        dims = LinearDims(HEADS, HEADS, DIM, DIM)
        self.layers = tuple(
            LayerSpec(number, AttentionKind(case.kind), HEADS, HEADS, DIM, DIM, SCALE, linear=dims)
            for number in range(self.count)
        )
        self.pool = LinearStatePool(self.layers, num_slots=case.requests, dtype=DType.BFLOAT16, device=device)
        for layer in self.layers:
            self._states(layer.layer_id).normal_()
        self.slots = torch.randperm(case.requests, device=device)
        self.inputs = self._random_inputs()
        self.backend = FlaLinearBackend(
            BackendContext(
                name="fla",
                roles=frozenset({Role.LINEAR}),
                model=ModelSpec("bench", "bench", self.layers, 1 << 20),
                device=device,
                dtype=torch.bfloat16,
                kv_dtype=DType.BFLOAT16,
                page_size=64,
                limits=Limits(case.requests, case.requests * case.tokens, 1 << 20),
                pools=KVPools(linear=self.pool),
                workspace=WorkspaceOwner(),
                declared=next(spec.capabilities for spec in attnplug_backends() if spec.name == "fla"),
                options=None,
            )
        )
        self.batch = self._batch()
        self.plan()

    def _states(self, number: int) -> Tensor:
        states = self.pool.recurrent(number)
        assert states is not None
        return states

    def _random_inputs(self) -> LinearInputs:
        rows = self.case.requests * self.case.tokens
        q, k, v = (torch.randn(rows, HEADS, DIM, dtype=torch.bfloat16, device=self.device) for _ in range(3))
        channels = (DIM,) if self.case.kind == KDA else ()
        decay = -0.1 * torch.rand(rows, HEADS, *channels, device=self.device)
        beta = torch.rand(rows, HEADS, device=self.device).to(torch.bfloat16)
        return LinearInputs(q, k, v, decay, beta, normalize=True)

    def _batch(self) -> ForwardBatch:
        requests, tokens = self.case.requests, self.case.tokens
        mode = ForwardMode.DECODE if self.decode else ForwardMode.EXTEND
        table = torch.zeros(requests, -(-tokens // 64), dtype=torch.int32, device=self.device)
        lens = [tokens] * requests
        return ForwardBatch(Geometry.of_lengths(mode, table, lens, lens, 64, state_slots=self.slots))

    def plan(self) -> None:
        self.batch.plan = BatchPlan(self.backend.init_forward_metadata(self.batch))

    def ours(self, number: int) -> Tensor:
        return self.backend.forward_linear(self.inputs, self.layers[number % self.count], self.batch)

    def raw(self) -> Callable[[int], Tensor]:
        """The library's public function, called as a user would."""
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
        from fla.ops.kda import chunk_kda, fused_recurrent_kda

        inputs, requests, tokens = self.inputs, self.case.requests, self.case.tokens
        public = {
            (GDN, True): fused_recurrent_gated_delta_rule,
            (KDA, True): fused_recurrent_kda,
            (GDN, False): chunk_gated_delta_rule,
            (KDA, False): chunk_kda,
        }[AttentionKind(self.case.kind), self.decode]
        given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "g": inputs.log_decay, "beta": inputs.beta}
        if self.decode:
            given = {name: tensor.unsqueeze(1) for name, tensor in given.items() if tensor is not None}
            lengths: dict[str, Tensor] = {}
        else:
            given = {name: tensor.unsqueeze(0) for name, tensor in given.items() if tensor is not None}
            lengths = {"cu_seqlens": torch.arange(0, requests * tokens + 1, tokens, device=self.device)}

        def call(number: int) -> Tensor:
            out, _ = public(
                **given,
                scale=SCALE,
                initial_state=self._states(number % self.count),
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                **lengths,
            )
            return out.flatten(0, 1)

        return call

    def raw_in_place(self) -> Callable[[int], Tensor]:
        """The library's inner function for decode, which it does not export. GDN's decay is repeated for every
        channel."""
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

        inputs = self.inputs
        assert inputs.beta is not None
        q, k, v, beta = (tensor.unsqueeze(1) for tensor in (inputs.q, inputs.k, inputs.v, inputs.beta))

        def call(number: int) -> Tensor:
            decay = inputs.log_decay
            if decay.dim() == 2:
                decay = decay.unsqueeze(-1).expand(-1, -1, DIM).contiguous()
            out, _ = fused_recurrent_kda_fwd(
                q=q,
                k=k,
                v=v,
                g=decay.unsqueeze(1),
                beta=beta,
                scale=SCALE,
                initial_state=self._states(number % self.count),
                inplace_final_state=True,
                ssm_state_indices=self.slots,
                use_qk_l2norm_in_kernel=True,
            )
            return out.flatten(0, 1)

        return call

    # ---- measurements ----

    def in_graphs(self) -> dict[str, Any]:
        calls = {"raw": self.raw(), "ours": self.ours}
        if self.decode:
            calls["raw_in_place"] = self.raw_in_place()
        calls["raw_again"] = calls["raw"]
        repeats = max(20, self.count) if self.decode else 2

        def repeated(call: Callable[[int], Tensor]) -> Callable[[], Tensor]:
            def body() -> Tensor:
                for number in range(repeats):
                    out = call(number)
                return out

            return body

        graphs = {name: capture(repeated(call))[0].replay for name, call in calls.items()}
        times = device_us(graphs, REPLAYS, lambda: torch.cuda._sleep(400_000))
        us = {name: value / repeats for name, value in times.items()}
        found: dict[str, Any] = {"us": us, "ratio": {n: t / us["raw"] for n, t in us.items() if n != "raw"}}
        if self.decode:
            moved = 2 * self.case.requests * STATE_BYTES
            found["state_tb_per_s"] = {name: moved / value / 1e6 for name, value in us.items()}
        return found

    def host(self) -> dict[str, Any]:
        times = host_us({"raw": self.raw(), "ours": self.ours}, 10, 20)
        plans = host_us({"plan": lambda _: self.backend.init_forward_metadata(self.batch)}, 10, 20)
        return medians({**times, **plans})

    def difference(self) -> float:
        """‖ours − raw‖ / ‖raw‖ from equal states. raw leaves them as they are; ours does not."""
        self.slots.copy_(torch.arange(self.case.requests, device=self.device))
        self.plan()  # the plan reads the slots
        raw = self.raw()(0).float()
        ours = self.ours(0).float()
        found = float((ours - raw).norm() / raw.norm())
        if not found <= MOST_DIFFERENCE:
            raise RuntimeError(f"the two sides differ by {found:.1e}: they do not compute the same, so no time counts")
        return found


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    sides = Sides(case, device)
    return {"difference": sides.difference(), "graph": sides.in_graphs(), "host_us": sides.host()}


def line(case: Case, row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{case!s:<18} {row['error']}"
    us, ratio, host = row["graph"]["us"], row["graph"]["ratio"], row["host_us"]
    text = f"{case!s:<18} raw {us['raw']:8.1f} µs  ours {us['ours']:8.1f}  ours/raw {ratio['ours']:.3f}"
    text += (
        f"  again {ratio['raw_again']:.3f}  host raw {host['raw']:.0f} ours {host['ours']:.0f} plan {host['plan']:.0f}"
    )
    if "state_tb_per_s" in row["graph"]:
        rate = row["graph"]["state_tb_per_s"]
        text += f"  in place {us['raw_in_place']:.1f}  TB/s {rate['ours']:.2f} (raw {rate['raw']:.2f})"
    return text + f"  differ {row['difference']:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--commit", metavar="TEXT", help="what was measured; .gpu/commit has it otherwise")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("linear_h200 measures kernels of an NVIDIA GPU, and torch sees no CUDA device here")
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    report = Report(arguments.json, describe(WHAT, PACKAGES, arguments.commit))
    rows = []
    with torch.inference_mode():
        for case in CASES:
            row = attempt(partial(measure, case, device))
            rows.append({**asdict(case), **row})
            report.put("cases", rows)
            print(line(case, row), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    print(f"{report.seconds:.0f} s in all")


if __name__ == "__main__":
    main()
