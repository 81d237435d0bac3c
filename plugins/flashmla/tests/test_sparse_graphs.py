"""Sparse batches around captured graphs: the protocol on a CPU, real captures on a GPU (B2's ground)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import DType, ForwardExtras, IndexInputs
from reference_sparse import DECODE, PACKED, ROWS, VERIFY, build, case
from support.batches import captured, with_plan
from support.devices import DEVICES, nothing_is_zero_by_chance, nothing_waits
from support.sparse_scene import LAYER, NAN, SparseScene
from support.stage import error

on_every_device = pytest.mark.parametrize("device", DEVICES)
REQUESTS, PAGES = 4, 12


class Capture:
    """A captured batch of fixed memory: choice and attention of one layer."""

    def __init__(self, stage: SparseScene, new: int) -> None:
        self.stage, self.backend = stage, stage.backend
        device, made, rows = stage.device, stage.case, REQUESTS * new
        shape: dict[str, Any] = {"dtype": stage.dtype, "device": device}
        self.inputs = {
            "q": torch.zeros(rows, made.heads, made.dims.row_dim, **shape),
            "k": torch.zeros(rows, 1, made.dims.row_dim, **shape),
            "index_q": torch.zeros(rows, made.index_heads, made.index_dim, **shape),
            "index_k": torch.zeros(rows, made.index_dim, **shape),
            "weights": torch.zeros(rows, made.index_heads, device=device),
        }
        self.batch = captured(made.mode, REQUESTS, new, pages=PAGES, page_size=64, device=device, fill=0)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.backend.init_cuda_graph_state(REQUESTS + 1, rows + 3)
        self.plan = self.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        with_plan(self.batch, self.plan)
        if device.type == "cpu":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()

    def run(self) -> None:
        given, layer = self.inputs, self.stage.layer
        with nothing_is_zero_by_chance(self.stage.device):
            self.backend.init_forward_metadata_in_graph(self.batch)
            index = IndexInputs(given["index_q"], given["index_k"], given["weights"])
            extras = ForwardExtras(selected=self.backend.select(index, layer, self.batch))
            forward = self.backend.forward_decode if self.batch.forward_mode.is_decode else self.backend.forward_extend
            self.out = forward(given["q"], given["k"], None, layer, self.batch, extras=extras)

    def replay(self, other: SparseScene) -> Tensor:
        """Another scene's batch, of fewer requests perhaps, with its caches."""
        tokens, real = len(other.q), len(other.totals)
        index = other.index()
        given = {
            "q": other.q,
            "k": other.new_rows(other.rows).unsqueeze(1),
            "index_q": index.q,
            "index_k": index.k,
            "weights": index.weights,
        }
        for name, tensor in given.items():
            self.inputs[name].fill_(NAN)
            self.inputs[name][:tokens] = tensor[:tokens]
        geometry = self.batch.geometry
        geometry.seq_lens.zero_()
        geometry.seq_lens[:real] = torch.tensor(other.totals, dtype=torch.int32, device=geometry.device)
        geometry.page_table.fill_(1 << 30)
        geometry.page_table[:real, : other.page_table.shape[1]] = other.page_table.to(geometry.device)
        mine, theirs = self.stage, other
        for target, source in (
            (mine.mla.rows(LAYER), theirs.mla.rows(LAYER)),
            (mine.keys.keys(LAYER), theirs.keys.keys(LAYER)),
        ):
            target.view(torch.uint8).fill_(0xFF)
            target[: len(source)] = source
        before = mine.mla.rows(LAYER).clone().view(torch.uint8)
        with nothing_waits(geometry.device.type):
            assert self.backend.init_forward_metadata_out_graph(self.batch) is self.plan
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        self.written = int((mine.mla.rows(LAYER).view(torch.uint8) != before).flatten(0, 2).any(-1).sum())
        return self.out


@on_every_device
@pytest.mark.parametrize(("kv_dtype", "mode", "new"), [(ROWS, VERIFY, 3), (PACKED, DECODE, 1)])
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # numpy, of a padded request's queries
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(kv_dtype, mode, new, device):
    """Replays give what an eager run gives; padded requests read and write nothing; NaN is everywhere else."""
    index_dtype = DType.FLOAT8_E4M3 if kv_dtype is PACKED else None
    made = case("decode", kv_dtype, mode=mode, index_dtype=index_dtype, exact_lengths=False)
    prefixes = [[300, 5, 64, 127], [600, 0], [63], [1, 2, 3, 4]]
    others = [
        SparseScene(replace(made, lengths=tuple((prefix, new) for prefix in some), seed=seed), device, build)
        for seed, some in enumerate(prefixes)
    ]
    stage = SparseScene(replace(made, lengths=((650, new),) * REQUESTS), device, build)
    capture = Capture(stage, new)
    for other in others:
        out = capture.replay(other).clone()
        batch = other.planned()
        selected = other.backend.select(other.index(), other.layer, batch)
        alone, _ = other.attend(batch, selected)
        tokens = len(alone)
        assert error(out[:tokens], alone.double()) < 1e-2 and (out[tokens:] == 0).all()
        assert error(alone, other.wanted(other.positions(selected))[0].to(alone.device)) < 1e-2
        assert capture.written == tokens


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("kv_dtype", [ROWS, PACKED])
def test_it_waits_for_queries_of_a_kernel_that_lets_others_start_early(kv_dtype, device):
    from attnplug_flashmla.sparse_kernels import FlashMLASparseKernels
    from support.late_kernel import fill_late

    torch.manual_seed(0)
    kernels = FlashMLASparseKernels()
    queries = torch.randn(3, 64, 576, dtype=torch.bfloat16, device=device)
    slots = torch.randint(0, 512, (3, 128), dtype=torch.int32, device=device)
    if kv_dtype is PACKED:
        stage = SparseScene(case("decode", PACKED), device, build)
        cache = stage.mla.rows(LAYER).zero_()
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
