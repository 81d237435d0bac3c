"""SGLang's protocol around CUDA graphs with real kernels: ``triton_mha`` in Triton's interpreter, against float64.

Nothing is captured on a CPU: the graph's content runs directly, on the tensors of the capture.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnplug import AttentionKind, LayerSpec
from attnplug.host import ModelAttention, load_registry
from attnplug_sglang.kv_pools import PageTable
from attnplug_sglang.planning import CapturedGroups, PlannedGroup
from sglang_fakes import Mode, batch, caches, reference, slots_table

LAYER = LayerSpec(0, AttentionKind.MHA, 4, 2, 16, 16, 0.25)
PAGES, PAGE = 20, 4


def triton_attention() -> tuple[ModelAttention, dict[int, Any]]:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, for which Triton compiles: nothing is interpreted beside it in one process")
    from attnplug_triton_mha.backend import TritonMHABackend
    from attnplug_triton_mha.configurations import MHAKernelConfig

    context, found = caches((LAYER,), PAGES, PAGE)
    spec = load_registry().get("triton_mha").spec
    own = context.for_backend(spec.name, spec.capabilities)
    small = MHAKernelConfig(16, 16, 4, 2, programs=2, single=False, overlap=False)
    backend = TritonMHABackend(own, choose=lambda *_: small, multiprocessors=2)
    return ModelAttention(backend, context.pools), found


@pytest.mark.parametrize(("mode", "new"), [(Mode.DECODE, 1), (Mode.TARGET_VERIFY, 3)])
def test_a_replay_attends_to_the_requests_of_its_own_step(mode: Mode, new: int) -> None:
    """Three requests are captured as padding; two steps of two requests are replayed, the second with other pages."""
    torch.manual_seed(0)
    ours, cache = triton_attention()
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
