"""Sparse batches around captured graphs: the protocol on a CPU, real captures on a GPU (B2's ground)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnplug import DType
from attnplug_conformance.arithmetic import NAN
from attnplug_conformance.case import LAYER
from attnplug_testing.devices import DEVICES
from attnplug_testing.sparse_scene import SparseStage, check_replays
from reference_sparse import DECODE, PACKED, ROWS, VERIFY, build, case


@pytest.mark.parametrize(
    ("kv_dtype", "mode", "new", "device"),
    # On a CPU the conformance kit captures rows of bfloat16.
    [(PACKED, DECODE, 1, "cpu"), *(pytest.param(*each, "cuda", marks=DEVICES[1].marks) for each in (
        (ROWS, VERIFY, 3), (PACKED, DECODE, 1)))],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy, of a padded request's queries
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(kv_dtype, mode, new, device):
    """Replays give float64's result; padded requests read and write nothing; NaN is everywhere else."""
    index_dtype = DType.FLOAT8_E4M3 if kv_dtype is PACKED else None
    made = case((), mode, kv_dtype, index_dtype=index_dtype, exact=False)
    prefixes = [[300, 5, 64, 127], [600, 0], [63], [1, 2, 3, 4]]
    others = [
        SparseStage(replace(made, lengths=tuple((prefix, new) for prefix in some), seed=seed), device, build)
        for seed, some in enumerate(prefixes)
    ]
    check_replays(SparseStage(replace(made, lengths=((650, new),) * 4), device, build), others, exact=False)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("kv_dtype", [ROWS, PACKED])
def test_it_waits_for_queries_of_a_kernel_that_lets_others_start_early(kv_dtype, device):
    from attnplug_flashmla.sparse_kernels import FlashMLASparseKernels
    from attnplug_testing.late_kernel import fill_late

    torch.manual_seed(0)
    kernels = FlashMLASparseKernels()
    queries = torch.randn(3, 64, 576, dtype=torch.bfloat16, device=device)
    slots = torch.randint(0, 512, (3, 128), dtype=torch.int32, device=device)
    if kv_dtype is PACKED:
        stage = SparseStage(case(((140, 1), (7, 1), (290, 1)), DECODE, PACKED), device, build)
        cache = stage.pool.rows(LAYER).zero_()
        cache.view(torch.float8_e4m3fn)[..., :512] = torch.randn(*cache.shape[:3], 512, device=device).to(
            torch.float8_e4m3fn
        )
        cache[..., 512:528].view(torch.float32).fill_(1.0)
        schedule = kernels.schedule()

        def attend(q: Tensor) -> Tensor:
            return kernels.attend_packed(q, cache, slots, 0.1, schedule)[0]
    else:
        cache = torch.randn(512, 1, 576, dtype=torch.bfloat16, device=device)

        def attend(q: Tensor) -> Tensor:
            return kernels.attend_rows(q, cache, slots, 0.1)[0]

    wanted = attend(queries)
    late = torch.full_like(queries, NAN)
    fill_late(late.flatten(), queries.flatten(), 1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill_late(late.flatten(), queries.flatten(), 1)
        found = attend(late)
    for _ in range(5):
        late.fill_(NAN)
        torch.cuda.synchronize()
        graph.replay()
        assert torch.equal(found, wanted)
