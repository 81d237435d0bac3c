"""``fa_skip_kv_cache``: the cache is written and read, or neither (A6)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from attnplug import BackendError, ExtendPath, ForwardMode, GraphLevel, PlanError, Serving
from attnplug.host import ExtendPolicy, plan_forward
from attnplug_conformance.arithmetic import relative_error
from attnplug_conformance.checks.mla_paths import UpProjected
from attnplug_flashattention.backend import FlashAttentionBackend
from attnplug_testing.devices import DEVICES
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelCase, KernelScene, mha, mla
from attnplug_testing.references.flashattention import build, on_cpu, on_devices

EMBEDDING = Serving(is_embedding=True, chunked_prefill_size=-1, disable_radix_cache=True)
SERVINGS = [
    Serving(is_embedding=embedding, chunked_prefill_size=chunk, disable_radix_cache=no_radix)
    for embedding, chunk, no_radix in product([False, True], [None, -1, 2048], [False, True])
]
KINDS = {"plain": {}, "window": {"window": 7}, "cap": {"cap": 5.0}, "192-128": {"head_dim": 192, "v_head_dim": 128}}
PROMPTS = ((0, 40), (0, 1), (0, 17))


class Watch:
    """Counter of a backend's cache accesses: writes to the pool, and reads by page or by slot."""

    def __init__(self, backend: FlashAttentionBackend, pool: object, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes = self.reads = 0
        for target, name, counter in (
            (pool, "write", "writes"),
            (pool, "read_keys", "reads"),
            (backend._kernels, "attend_paged", "reads"),
        ):
            monkeypatch.setattr(target, name, self._counting(getattr(target, name), counter))

    def _counting(self, function, counter):
        def counted(*arguments, **named):
            setattr(self, counter, getattr(self, counter) + 1)
            return function(*arguments, **named)

        return counted


def ident(serving: Serving) -> str:
    return f"{serving.is_embedding}/{serving.chunked_prefill_size}/{serving.disable_radix_cache}"


def scene(case: KernelCase, kernel: str, device: str) -> KernelScene:
    return KernelScene(on_cpu(case) if device == "cpu" else case, device, build(kernel))


@on_devices("fa4", "torch", "torch before paging")
@pytest.mark.parametrize(
    ("serving", "kind"),
    [*((serving, "plain") for serving in SERVINGS), *((EMBEDDING, kind) for kind in KINDS if kind != "plain")],
    ids=lambda value: value if isinstance(value, str) else ident(value),
)
@pytest.mark.sample(25)
def test_both_or_neither(serving, kind, kernel, device, monkeypatch):
    """A6: prompts over a cache full of NaN. With the fast path nothing is written and nothing read, now or by the next
    token, which is refused; without it all rows are there afterwards, and the next token is decoded from them."""
    if kind == "cap" and kernel != "fa4":
        pytest.skip("torch's kernel has no cap, and is refused for such layers")
    stage = scene(mha(PROMPTS, page_size=16, serving=serving, **KINDS[kind]), kernel, device)
    watch = Watch(stage.backend, stage.pool, monkeypatch)
    out, lse = stage.results()
    wanted, wanted_lse = stage.wanted()
    assert relative_error(out, wanted) <= stage.tolerance
    assert relative_error(lse, wanted_lse) <= stage.tolerance
    skips = serving == EMBEDDING
    assert stage.backend.fa_skip_kv_cache == skips
    assert watch.writes == (0 if skips else 1)
    assert stage.written() == (0 if skips else sum(stage.totals))
    add_a_token(stage)
    if skips:
        with raises_naming(PlanError, "fa_skip_kv_cache"):
            stage.run()
        assert (watch.writes, watch.reads) == (0, 0)
        return
    assert stage.error() <= stage.tolerance
    assert watch.writes == 2 and watch.reads >= 1


def add_a_token(stage: KernelScene) -> None:
    """Let each request of the scene decode one more, for which its last page has room."""
    stage.case = replace(stage.case, mode=ForwardMode.DECODE, lengths=tuple((total, 1) for total in stage.totals))
    stage.new, stage.totals, stage.with_lse = [1] * len(stage.totals), [total + 1 for total in stage.totals], False
    stage.q = stage.normal(len(stage.new), stage.layer.num_heads, stage.layer.head_dim)
    stage.keys, stage.values = (
        [torch.cat([rows, stage.normal(1, *rows.shape[1:])]) for rows in every] for every in (stage.keys, stage.values)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("serving", [SERVINGS[0], EMBEDDING], ids=ident)
def test_mla_always_keeps_its_rows(serving, device):
    """A6: ``fa_skip_kv_cache`` stays off for MLA, whatever else is set, since core's chunked prefill reads the rows
    back."""
    stage = scene(mla(((30, 9), (0, 5)), page_size=16, serving=serving, heads=4), "fa4", device)
    assert not stage.backend.fa_skip_kv_cache
    layer = UpProjected(stage)
    out = layer.run(ExtendPolicy(forced=ExtendPath.ONE_SHOT))
    assert relative_error(out, layer.wanted()) <= 4 * stage.tolerance
    assert stage.written() == sum(stage.totals)


@pytest.mark.parametrize("lengths", [((5, 3),), ((0, 4), (64, 1))])
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY])
def test_a_prefix_cannot_be_in_a_cache_that_is_not_used(mode, lengths):
    """A6: a stale row is never read, because a batch that has rows in the cache is not planned."""
    stage = scene(mha(lengths, mode, 16, serving=EMBEDDING), "fa4", "cpu")
    with raises_naming(PlanError, "fa_skip_kv_cache"):
        stage.run()


@pytest.mark.parametrize("save", [True, False])
def test_without_a_cache_keys_and_values_must_be_given(save):
    """A6: ``save_kv_cache=False`` reads no cache either."""
    stage = scene(mha(PROMPTS, page_size=16, serving=EMBEDDING), "fa4", "cpu")
    batch = stage.batch()
    plan_forward(stage.backend, batch)
    with raises_naming(BackendError, "k=None, v=None"):
        stage.backend.forward_extend(stage.q, None, None, stage.layer, batch, save_kv_cache=save)
    out = stage.forward(batch, save=save)
    assert relative_error(out, stage.wanted()[0]) <= stage.tolerance
    assert stage.written() == 0


def test_nothing_is_decoded_so_nothing_is_captured():
    stage = scene(mha(PROMPTS, page_size=16, serving=EMBEDDING), "fa4", "cpu")
    assert stage.backend.claims.cuda_graph is GraphLevel.NEVER
