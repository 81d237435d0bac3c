"""Kernels of batches that are not captured: a warm-up without long prefixes runs all that requests can reach (E1)."""

from __future__ import annotations

import random

import pytest
import torch

from attnplug import ForwardMode, Geometry
from attnplug_testing.devices import INTERPRETED
from attnplug_triton_mha.configurations import INVARIANT, MHAKernelLimits, choose, fit_config, fit_invariant

DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND
CONTEXT, STEP_TOKENS, MAX_BATCH, PAGE = 1 << 15, 8192, 32, 64
POWERS = [1 << power for power in range(STEP_TOKENS.bit_length())]


class Engine:
    """Keys of the kernels of an H200 for one layer shape: KV heads, query heads of each, columns."""

    def __init__(self, heads: tuple[int, int, int], window: int, invariant: bool) -> None:
        from attnplug_triton_mha.planner import TritonLayerShape

        kv_heads, group, dim = heads
        self.shape = TritonLayerShape(kv_heads, group, dim, dim, window)
        self.limits = MHAKernelLimits(90, 227 << 10, dim, dim, 0, copied=True)
        self.fixed = fit_invariant(INVARIANT, self.limits) if invariant else ()

    def key(self, mode: ForwardMode, requests: int, new: int, cached: int = 0, differ: bool = False) -> object:
        """The key of a batch whose longest request has ``cached`` and ``new`` tokens."""
        from attnplug_triton_mha.planner import BatchSizes, SplitKVSchedule

        table = torch.zeros(requests, -(-(cached + new) // PAGE), dtype=torch.int32)
        lens, rows = table[:, 0], new + requests - 1 if differ else new * requests
        batch = Geometry(
            mode, table, lens, PAGE, rows=rows, max_seq_len=cached + new, max_new=new, new_lens=lens if differ else None
        )
        sizes = BatchSizes.rounded(batch, CONTEXT)
        per_request = sizes.new * self.shape.group
        config = choose(per_request, sizes.requests, self.shape.kv_heads, 0)
        if self.fixed:
            config = next((each for each in self.fixed if per_request <= each.tile), self.fixed[-1])
        made = SplitKVSchedule.reserve(self.shape, fit_config(config, self.limits), batch, 132, 1 << 20, sizes)
        merge = None if made.separate_merge is None else made.separate_merge.config
        return made.configuration, merge, made.merge_rows, made.tile_rows, made.queries > 0, sizes.requests

    def warm(self) -> set[object]:
        """Keys of a warm-up: single prompts, and as many requests as powers of two with few tokens and a full step."""
        found = {self.key(EXTEND, 1, new) for new in POWERS}
        for requests in (power for power in POWERS if 1 < power <= MAX_BATCH):
            full = STEP_TOKENS // (requests // 2 + 1)
            found |= {self.key(EXTEND, requests, new) for new in (*POWERS[:7], full)}
            found |= {self.key(EXTEND, requests, new, differ=True) for new in (*POWERS[1:8], STEP_TOKENS - requests)}
        for requests in (power for power in POWERS if power <= MAX_BATCH):
            found |= {self.key(DECODE, requests, 1), self.key(VERIFY, requests, 5)}
        return found


@INTERPRETED
@pytest.mark.parametrize("invariant", [False, True], ids=["by work", "invariant"])
@pytest.mark.parametrize("window", [0, 512])
@pytest.mark.parametrize(
    "heads", [(8, 4, 128), (1, 4, 128), (8, 4, 64), (2, 3, 128), (32, 1, 64), (2, 8, 256)], ids=str
)
def test_requests_launch_what_a_warm_up_launched(heads, window, invariant):
    engine, drawn = Engine(heads, window, invariant), random.Random(0)
    warm = engine.warm()
    for _ in range(300):
        mode, requests = drawn.choice([DECODE, VERIFY, EXTEND, EXTEND]), drawn.randint(1, MAX_BATCH)
        requests = drawn.choice([1, requests])
        differ = mode is EXTEND and requests > 1 and drawn.random() < 0.5
        most = (STEP_TOKENS - requests if differ else STEP_TOKENS // requests).bit_length() - 1
        new = {DECODE: 1, VERIFY: 5}.get(mode) or int(2 ** drawn.uniform(1, most))
        cached = int(2 ** drawn.uniform(0, 14))
        asked = mode, requests, new, cached, differ
        assert engine.key(*asked) in warm, asked
