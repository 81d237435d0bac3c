"""Batches against float64: planning through the reference kernels on a CPU, FlashMLA itself on a GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from attnplug import BackendContext, ForwardMode, MLAPool, PlanError
from attnplug.host import KVPools
from attnplug_conformance.arithmetic import relative_error
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelScene, check, lengths, mla
from attnplug_testing.references.flashmla import build, on, scene

DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
INF = float("inf")
on_every_device = pytest.mark.parametrize("device", DEVICES)


@on_every_device
def test_a_cache_of_a_host_that_has_no_dimension_of_heads(device):
    """Same as vLLM's. The GPU gets the strides, and accepts no stride of one element."""
    pools = []

    def over_a_hosts(context: BackendContext):
        layers, made = context.model.layers, context.pools.mla
        memory = {layer.layer_id: made.rows(layer.layer_id).flatten(2).clone() for layer in layers}
        dtype = context.kv_dtype
        pools.append(MLAPool.over(layers, memory, "pages tokens dim", page_size=made.page_size, dtype=dtype))
        return build(replace(context, pools=KVPools(mla=pools[0])))

    stage = KernelScene(on(mla(lengths(5, 150, 1, seed=3), DECODE), device), device, over_a_hosts)
    stage.over(pools[0])
    check(stage)


class TestBatches:
    @on_every_device
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3)])
    def test_a_managers_page_of_three_of_the_kernels(self, mode, new, device):
        """B5, C4; NaN in every row that must not be read, and in q and k of padding."""
        check(scene(mla(lengths(5, 500, new, seed=192), mode, 192, 24, padding=2), device))

    @pytest.mark.parametrize("device", DEVICES[1:])
    @pytest.mark.parametrize("seed", range(6))
    def test_random_batches(self, seed, device):
        chance = random.Random(seed)
        new = chance.choice([1, 1, 2, 5, 8])
        case = mla(
            lengths(chance.randint(1, 130), chance.choice([100, 3000, 9000]), new, seed),
            DECODE if new == 1 else VERIFY,
            heads=chance.choice([16, 32, 64, 126, 128]),
            page_size=chance.choice([64, 128]),
            seed=seed,
        )
        check(scene(case, device))


class TestPlans:
    @on_every_device
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3)])
    def test_a_plan_needs_no_length_on_the_host(self, mode, new, device):
        """``needs_cpu_seq_lens`` is false, and planning and running wait for nothing."""
        stage = scene(mla(((90, new), (5, new)), mode, exact=False), device)
        assert not stage.backend.claims.needs_cpu_seq_lens
        stage.results()  # compiles
        batch = stage.batch()
        with nothing_waits(device):
            out = stage.forward(stage.plan(batch))
        assert (batch.plan.attention.query_rows, batch.plan.attention.kv_rows) == (2 * new, None)
        assert relative_error(out, stage.wanted()[0]) <= stage.tolerance

    @on_every_device
    def test_a_plan_keeps_lengths_and_pages_of_its_own(self, device):
        """B5: a plan is a value. Neither a later plan nor a change of the batch's tensors alters it."""
        stage = scene(mla(((100, 1), (30, 1)), DECODE, exact=False), device)
        first, second = stage.plan(stage.batch()), stage.batch()
        first.geometry.seq_lens.fill_(1)
        first.geometry.page_table.fill_(0)
        second.geometry.seq_lens.sub_(7)
        stage.backend.init_forward_metadata(second)
        assert stage.error(first) <= stage.tolerance

    @on_every_device
    def test_a_request_of_length_0_gives_zero(self, device):
        """C4: FlashMLA's log-sum-exp of +inf becomes -inf. The length is only on the device, since the host would
        refuse it."""
        stage = scene(mla(((100, 1), (30, 1), (70, 1)), DECODE, exact=False), device)
        batch = stage.batch()
        batch.geometry.seq_lens[1] = 0
        batch.geometry.page_table[1] = 1 << 30
        out, lse = stage.results(batch)
        assert relative_error(out[::2], stage.wanted()[0][::2]) <= stage.tolerance
        assert (out[1] == 0).all() and (lse[1] == -INF).all() and lse[::2].isfinite().all()
        assert stage.written() == sum(stage.totals) - 1


class TestWrongUse:
    @pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
    def test_prefill_is_another_backends(self, mode):
        """D3 refuses prefills at selection. A caller that plans one nevertheless gets an error, too."""
        stage = scene(mla(((20, 1), (9, 1)), mode), "cpu")
        with raises_naming(PlanError, mode):
            stage.backend.init_forward_metadata(stage.batch())

    def test_new_tokens_must_be_equally_many(self):
        stage = scene(mla(((20, 2), (9, 3)), VERIFY), "cpu")
        with raises_naming(PlanError, "new_lens"):
            stage.backend.init_forward_metadata(stage.batch())
