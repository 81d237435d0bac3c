"""Engines whose captured prefills run the same calls again, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import refilled_native
from refilled_native import RefilledDelta

from attnplug import ForwardBatch, GraphLevel
from attnplug.host import HostLengths
from attnplug_engine import Engine

MODELS = ["tiny:llama", "tiny:deepseek_v3", "tiny:glm_moe_dsa"]
HYBRIDS = ["tiny:qwen3_next", "tiny:minimax"]
"""Models with and without a convolution's state beside the recurrent one."""
FURTHER = [
    pytest.param(name, marks=pytest.mark.long) for name in ("tiny:kimi_linear", "tiny:mamba2", "tiny:nemotron_h")
]
SIZES = (2, 4)
PREFILLS = (4, 9, 22)


class AnyLinear(RefilledDelta):
    """Linear attention that captures extends, too."""

    def __init__(self, pool):
        super().__init__(pool)
        self.claims = replace(self.claims, cuda_graph=GraphLevel.ALWAYS)

    def _rows(self, batch):
        geometry = batch.geometry
        if geometry.host is None and geometry.new_lens is not None:
            lens = geometry.new_lens.tolist()
            assert sum(lens) <= geometry.rows
            geometry = replace(geometry, rows=sum(lens), host=HostLengths(lens, geometry.seq_lens.tolist()))
            batch = ForwardBatch(geometry)
        yield from super()._rows(batch)


def engine(model: str = MODELS[0], **settings: Any) -> Engine:
    common = {"page_size": 4, "max_batch": 5, "prefix_cache": False, "ignore_eos": True, "chunked_prefill_size": 24}
    return Engine(model, device="cpu", **{**common, **settings})


def captured(one: Engine, prefills: tuple[int, ...] = PREFILLS) -> Engine:
    return refilled_native.captured(one, SIZES, prefills)


def prompts(count: int = 12, longest: int = 30) -> list[list[int]]:
    random = Random(5)
    return [[random.randrange(128) for _ in range(random.randint(1, longest))] for _ in range(count)]


def tokens(one: Engine, texts: list[list[int]], each: Any) -> list[list[int]]:
    return [completion.token_ids for completion in one.generate(texts, each)]
