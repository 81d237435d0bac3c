"""Bitwise comparison of the same rows of requests, computed in different batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnplug import ForwardBatch, ForwardExtras, ForwardMode, Geometry
from attnplug_conformance.case import LAYER
from attnplug_conformance.padding import padded
from attnplug_testing.kernel_scene import KernelScene

SCALE = {"cpu": 1, "cuda": 8}
"""Lengths of rows by device: the shortest splits have 16 rows on a CPU, and 128 on a GPU."""


@dataclass(frozen=True)
class Span:
    """Rows ``before … before + new`` of a scene's request, which form one request of a batch."""

    request: int
    before: int
    new: int = 1


def decode_span(request: int, length: int) -> Span:
    """Return the row that is decoded behind ``length - 1`` cached rows."""
    return Span(request, length - 1)


def store_all(stage: KernelScene) -> KernelScene:
    """Write all rows of all requests to the cache, so that any span of them can be computed. Returns the scene."""
    stage.store(LAYER, [(0, total) for total in stage.totals])
    return stage


def rows_of(
    stage: KernelScene,
    spans: Sequence[Span],
    mode: ForwardMode = ForwardMode.DECODE,
    *,
    exact: bool = True,
    padding: int = 0,
    columns: int = 0,
) -> list[tuple[Tensor, Tensor]]:
    """Run a batch of spans; returns output ``[new, heads, dim]`` and log-sum-exp ``[new, heads]`` of each.

    The scene's lengths are ``(0, total)``, so that it has queries of all rows. ``padding`` requests and ``columns``
    unused columns of the page table are added; without ``exact`` the host has upper bounds only.
    """
    table, numbers = stage.page_table, [span.request for span in spans]
    wider = torch.cat([table[numbers], table.new_full((len(spans), columns), stage.poisoned_page)], 1)
    totals = [span.before + span.new for span in spans]
    geometry = Geometry.of_lengths(mode, wider.to(stage.device), [span.new for span in spans], totals, stage.page_size)
    if not exact:
        geometry = replace(geometry, host=None, max_seq_len=wider.shape[1] * stage.page_size)
    if padding:
        geometry = padded(geometry, geometry.requests + padding)
    batch = stage.plan(ForwardBatch(geometry, input_ids=torch.zeros(geometry.rows, dtype=torch.int64)))
    starts = [sum(stage.totals[: span.request]) + span.before for span in spans]
    q = torch.cat([stage.q[start : start + span.new] for start, span in zip(starts, spans, strict=True)])
    q = torch.cat([q, q.new_zeros(geometry.rows - len(q), *q.shape[1:])])
    lse = torch.full((len(q), q.shape[1]), float("nan"), device=stage.device)
    out = stage.forward(batch, (q, None, None), save=False, extras=ForwardExtras(lse=lse))
    news = [span.new for span in spans]
    rows = sum(news)
    return list(zip(out[:rows].split(news), lse[:rows].split(news), strict=True))


def assert_same_bits(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> None:
    """Raise ``AssertionError`` if output or log-sum-exp of the same rows differ."""
    for one, other in zip(first, second, strict=True):
        assert not one.isnan().any()
        assert torch.equal(one, other), f"{int((one != other).sum())} of {one.numel()} elements differ"


def check_decoded_in_every_batch(stage: KernelScene) -> None:
    """Check that a decoded row of the first of two requests, with 300 rows times ``SCALE``, has the same bits: alone,
    with companions in any order, with padded requests, a wider page table, and bounds of lengths."""
    chance = random.Random(3)
    for length in (16, 300):
        own = decode_span(0, length * SCALE[stage.device.type])
        (alone,) = rows_of(stage, [own])
        spans = [own, *(decode_span(request, chance.randint(1, stage.totals[request])) for request in (1, 0))]
        chance.shuffle(spans)
        assert_same_bits(alone, rows_of(stage, spans)[spans.index(own)])
        assert_same_bits(alone, rows_of(stage, [own], exact=False, padding=2, columns=30)[0])


def check_every_mode(stage: KernelScene, first: int, new: int) -> None:
    """Check that rows from ``first`` times ``SCALE`` on of the same request have the same bits prefilled as a chunk, or
    ``new`` of them with another request, verified, and decoded."""
    scale = SCALE[stage.device.type]
    (whole,) = rows_of(stage, [Span(0, first * scale, (300 - first) * scale)], ForwardMode.EXTEND)
    modes = (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY, ForwardMode.DECODE)
    for before, count, mode in zip((first, 255, 299), (new, 3, 1), modes, strict=True):
        found = rows_of(stage, [Span(1, 3, count), Span(0, before * scale, count)], mode)[1]
        rows = slice((before - first) * scale, (before - first) * scale + count)
        assert_same_bits((whole[0][rows], whole[1][rows]), found)
