"""What FlashMLA reads is there, even if the kernel that makes it lets others start early."""

from __future__ import annotations

import pytest
import torch

from support.devices import DEVICES

pytestmark = [*DEVICES[1].marks]
NAN = float("nan")


@pytest.fixture(scope="module")
def write_late():
    """``write_late(target, source)``: lets the next kernel start at once, and copies a long time after that."""
    triton = pytest.importorskip("triton")
    from late_copy import late_copy

    def write(target: torch.Tensor, source: torch.Tensor) -> None:
        grid = (triton.cdiv(target.numel(), 1024),)
        late_copy[grid](target, source, target.numel(), BLOCK=1024, launch_pdl=True)

    return write


def test_queries_are_waited_for(write_late):
    from attnplug_flashmla.kernels import Call, FlashMLAKernels

    torch.manual_seed(0)
    shape = {"dtype": torch.bfloat16, "device": "cuda"}
    kernels = FlashMLAKernels(16, 512)
    wanted_q, cache = torch.randn(3, 16, 576, **shape), torch.randn(9, 64, 1, 576, **shape)
    lens = torch.tensor([5, 100, 180], dtype=torch.int32, device="cuda")
    table = torch.randperm(9, device="cuda").int().view(3, 3)
    call = Call(1, lens, table, kernels.schedule(lens, 1))
    wanted, _ = kernels.attend(wanted_q, cache, call, 0.1)
    q = torch.full_like(wanted_q, NAN)
    write_late(q, wanted_q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_late(q, wanted_q)
        found, _ = kernels.attend(q, cache, call, 0.1)
    for _ in range(5):
        q.fill_(NAN)
        torch.cuda.synchronize()
        graph.replay()
        assert torch.equal(found, wanted)
