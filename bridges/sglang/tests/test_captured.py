"""SGLang's protocol around CUDA graphs with real kernels: ``triton_mha`` in Triton's interpreter, against float64.

Nothing is captured on a CPU: the graph's content runs directly, on the tensors of the capture.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnplug import AttentionBackend, AttentionKind, LayerSpec, Role
from attnplug.auto.fastest import FastestBackend
from attnplug.auto.schedule import BackendSchedule
from attnplug.host import KVPools, ModelAttention, load_registry
from attnplug_sglang.kv_pools import PageTable
from attnplug_sglang.planning import CapturedGroups, PlannedGroup
from sglang_fakes import Mode, batch, caches, reference, slots_table

LAYER = LayerSpec(0, AttentionKind.MHA, 4, 2, 16, 16, 0.25)
PAGES, PAGE = 20, 4


def triton_backends(count: int) -> tuple[list[AttentionBackend], KVPools, dict[int, Any]]:
    """Backends over the same caches, their pools, and the caches."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, for which Triton compiles: nothing is interpreted beside it in one process")
    from attnplug_triton_mha.backend import TritonMHABackend
    from attnplug_triton_mha.configurations import MHAKernelConfig

    context, found = caches((LAYER,), PAGES, PAGE)
    spec = load_registry().get("triton_mha").spec
    own = context.for_backend(spec.name, spec.capabilities)
    small = MHAKernelConfig(16, 16, 4, 2, programs=2, single=False, overlap=False)
    backends = [TritonMHABackend(own, choose=lambda *_: small, multiprocessors=2) for _ in range(count)]
    return backends, context.pools, found


def test_a_graph_goes_to_the_best_backend_for_its_requests() -> None:
    """A9: one graph serves all lengths, so neither capture nor replay chooses by them."""
    torch.manual_seed(0)
    (first, second), pools, cache = triton_backends(2)
    times = {"one": {(1, 16, 1): 1.0, (2, 16, 1): 9.0}, "two": {(1, 16, 1): 9.0, (2, 16, 1): 1.0}}
    both = FastestBackend({"one": first, "two": second}, {Role.DECODE: BackendSchedule(times)})
    table = slots_table([13, 6], PAGE)
    attention = ModelAttention(both, pools)
    steps = CapturedGroups([PlannedGroup(attention, PageTable(table, PAGE), by_batch=True)], 2, 2, 64)
    for requests, backend in ((1, first), (2, second)):
        lengths = [13, 6][:requests]
        static = batch(table, [length - 1 for length in lengths], [1] * requests, Mode.DECODE)
        step = steps.capture(static)
        q, k, v = torch.randn(requests, 4, 16), torch.randn(requests, 2, 16), torch.randn(requests, 2, 16)
        assert steps.replay(static) is step and step.batches[0].plan.attention.parts[0].planner == backend.backend_id
        steps.refill(step, static)
        out = attention.attend(q, k, v, LAYER, step.batches[0])
        for number, length in enumerate(lengths):
            wanted = reference(q[number : number + 1], cache[0], table[number + 1, :length], LAYER)
            torch.testing.assert_close(out[number : number + 1].double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("mode", "new"), [(Mode.DECODE, 1), (Mode.TARGET_VERIFY, 3)])
def test_a_replay_attends_to_the_requests_of_its_own_step(mode: Mode, new: int) -> None:
    """Three requests are captured as padding; two steps of two requests are replayed, the second with other pages."""
    torch.manual_seed(0)
    (backend,), pools, cache = triton_backends(1)
    ours = ModelAttention(backend, pools)
    table = slots_table([13, 6, 22], PAGE)
    steps = CapturedGroups([PlannedGroup(ours, PageTable(table, PAGE))], 4, 4 * new, 64)
    rows = 3 * new
    static = batch(
        table,
        [1] * 3,
        [new] * 3,
        mode,
        req_pool_indices=torch.zeros(3, dtype=torch.int64),
        seq_lens=torch.ones(3, dtype=torch.int64),
        seq_lens_cpu=torch.ones(3, dtype=torch.int64),
        out_cache_loc=torch.zeros(rows, dtype=torch.int64),
    )
    step = steps.capture(static)
    q, k, v = torch.randn(rows, 4, 16), torch.randn(rows, 2, 16), torch.randn(rows, 2, 16)

    def graph() -> torch.Tensor:
        steps.refill(step, static)
        return ours.attend(q, k, v, LAYER, step.batches[0])

    graph()
    for requests in ([1, 2], [3, 1]):
        lengths = [{1: 13, 2: 6, 3: 22}[request] for request in requests]
        before = [length - new for length in lengths]
        lens = lengths if mode is Mode.DECODE else before
        static.seq_lens.copy_(torch.tensor([*lens, 1]))
        static.req_pool_indices.copy_(torch.tensor([*requests, 0]))
        places = [table[request, start:end] for request, start, end in zip(requests, before, lengths, strict=True)]
        static.out_cache_loc.copy_(torch.cat([*places, torch.zeros(new)]))
        static.seq_lens_cpu.copy_(static.seq_lens)
        assert steps.replay(static) is step
        out = graph()
        for number, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            part = slice(number * new, number * new + new)
            expected = reference(q[part], cache[0], table[request, :length], LAYER)
            torch.testing.assert_close(out[part].double(), expected, atol=1e-5, rtol=1e-5)
