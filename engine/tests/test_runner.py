"""One step by hand: what is planned where, and in which order things are built."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from thread_ranks import in_ranks

from attnplug import BackendContext, DType, ForwardBatch, PlanError, Serving
from attnplug.host import ExtendPolicy, Limits, Parallel
from attnplug.host import load_model as load_spec
from attnplug_engine import Engine, SamplingParams
from attnplug_engine.runner import Capacity, build_pools, bytes_per_state
from support.command import Package


@pytest.fixture(params=["tiny:llama", "tiny:deepseek_v3"])
def engine(request) -> Engine:
    return Engine(request.param, device="cpu", page_size=4, prefix_cache=False)


def count_plans(engine: Engine) -> list[ForwardBatch]:
    planned: list[ForwardBatch] = []
    original = engine.runner.backend.init_forward_metadata

    def plan(batch):
        planned.append(batch)
        return original(batch)

    engine.runner.backend.init_forward_metadata = plan
    return planned


def test_a_step_planned_ahead_is_marked_and_not_planned_again(engine):
    """B2: every pre-planner marks."""
    planned = count_plans(engine)
    engine.add([1, 2, 3], SamplingParams(max_tokens=2))
    batch = engine.runner.prepare(engine.scheduler.next_step())
    assert not batch.needs_forward_metadata_init()
    engine.runner.forward(batch)
    assert planned == [batch]


def test_a_batch_that_nobody_planned_is_planned_by_the_forward_path(engine):
    """B1, B2"""
    planned = count_plans(engine)
    engine.add([1, 2, 3], SamplingParams(max_tokens=2))
    batch = engine.runner._batch(engine.scheduler.next_step())
    engine.runner.forward(batch)
    assert planned == [batch]


def test_a_shared_page_is_copied_before_it_is_written(engine):
    """The request goes on as if nobody else held its page."""
    prompt, params = [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=6)
    alone = engine.generate([prompt], params)[0].token_ids
    request = engine.add(prompt, params)
    engine.step()
    shared = engine.runner.table.pages(request.row)[-1]
    engine.runner.allocator.share((shared,))  # as a fork of the row would
    engine.step()
    assert engine.runner.table.pages(request.row)[-1] != shared
    while engine.step():
        pass
    assert request.output == alone


@pytest.mark.parametrize("ahead", [True, False], ids=["planned ahead", "planned by the forward path"])
def test_mla_is_prepared_once_and_before_planning(ahead):
    """C2: what runs as MHA needs no plan over the paged cache, so planning must know; B2: a mark without opt-in."""
    engine = Engine("tiny:deepseek_v3", device="cpu", page_size=4, prefix_cache=False)
    runner, order = engine.runner, []
    for owner, name in ((runner.mla, "prepare"), (runner.backend, "init_forward_metadata")):
        original = getattr(owner, name)
        setattr(owner, name, lambda batch, name=name, original=original: order.append(name) or original(batch))
    engine.add([1, 2, 3], SamplingParams(max_tokens=2))
    step = engine.scheduler.next_step()
    batch = runner.prepare(step) if ahead else runner._batch(step)
    assert (batch.plan_record is not None) == ahead
    assert not ahead or not batch.plan_record.replan_equivalent
    runner.forward(batch)
    assert order == ["prepare", "init_forward_metadata"]


def test_steps_planned_ahead_give_the_same_as_steps_run_at_once(engine):
    """B2: a plan belongs to its batch, so that the next may be planned before this one has run."""
    engine.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=2))
    step = engine.scheduler.next_step()
    first, second = engine.runner.prepare(step), engine.runner.prepare(step)
    late, early = engine.runner.forward(second), engine.runner.forward(first)
    assert torch.equal(late, early)


def test_a_batch_that_shrank_after_planning_is_refused(engine):
    """B5"""
    engine.add([1, 2, 3], SamplingParams(max_tokens=2))
    batch = engine.runner.prepare(engine.scheduler.next_step())
    batch.input_ids, batch.positions = batch.input_ids[:2], batch.positions[:2]
    with pytest.raises(PlanError, match="2"):
        engine.runner.forward(batch)


def test_a_backend_cannot_be_built_before_the_pools(engine):
    """A10's order: the context that every backend is built from demands the pools, and has a place for coordinators."""
    parameters = inspect.signature(BackendContext).parameters
    assert parameters["pools"].default is inspect.Parameter.empty
    assert parameters["coordinator"].default is None
    with pytest.raises(TypeError, match="pools"):
        BackendContext(name="x", roles=frozenset(), model=None, device=None, dtype=None, kv_dtype=None, page_size=4,
                       limits=None, workspace=None)  # fmt: skip


@pytest.mark.parametrize("model", ["tiny:kimi_linear", "tiny:qwen3_next", "tiny:mamba2", "tiny:minimax"])
def test_bytes_of_a_linear_state_are_those_of_its_pool(model):
    """What is set aside for states is what they take."""
    spec = load_spec(model)
    capacity, cpu = Capacity(4, 4, 2, 8, 64, 5), torch.device("cpu")
    pools = build_pools(spec, capacity, torch.float16, DType.FLOAT8_E4M3, cpu)
    assert pools.linear.nbytes == 5 * bytes_per_state(spec, torch.float16)


# ---- what backends are told ----

RECORDING = """
from attnplug import CONTRACT_VERSION, BackendSpec, Capabilities, ExtendPath, hookimpl
from attnplug.host import TorchNativeBackend


class Recording(TorchNativeBackend):
    def __init__(self, context):
        super().__init__(context)
        self.context, self.heads, self.rows = context, set(), []

    def forward_extend(self, q, k, v, layer, batch, *, save_kv_cache=True, extras=None):
        self.heads.add(q.shape[1])
        self.rows.append(q.shape[0])
        return super().forward_extend(q, k, v, layer, batch, save_kv_cache=save_kv_cache, extras=extras)

    forward_decode = forward_extend


@hookimpl
def attnplug_backends():
    capabilities = Capabilities(
        kinds={"mha", "mla"}, devices={"cpu"}, dtypes={"float32"}, extras={"lse"}, mla_extend=set(ExtendPath)
    )
    factory = __name__ + ":Recording"
    return [
        BackendSpec(
            name="recording", summary="keeps what it is told", contract=CONTRACT_VERSION, factory=factory,
            capabilities=capabilities,
        )
    ]
"""


@pytest.fixture
def recorded(package: Package):
    """Builds engines on a backend that keeps its context, and the heads and rows of what it runs."""
    package("recording", RECORDING)

    def build(model: str = "tiny:llama", **settings: Any) -> Engine:
        return Engine(model, device="cpu", attention_backend="recording", **settings)

    return build


@pytest.mark.parametrize("model", ["tiny:llama", "tiny:deepseek_v3"])
def test_every_rank_tells_its_backend_where_it_is_and_runs_its_part_of_the_heads(recorded, model):
    """Backends size their buffers by heads and ranks: four heads on two ranks are two on each, MLA's too."""

    def run(parallel):
        engine = recorded(model, parallel=parallel, page_size=4)
        tokens = engine.generate([[1, 2, 3, 4, 5]], max_tokens=3)[0].token_ids
        return engine.runner.backend.context, engine.runner.backend.heads, tokens

    (alone,), both = in_ranks(1, run), in_ranks(2, run)
    assert (alone[0].parallel, alone[1]) == (Parallel(0, 1), {4})
    for rank, (context, heads, tokens) in enumerate(both):
        assert context.parallel == Parallel(rank, 2)
        assert heads == {2}
        assert tokens == alone[2]
        assert context.model == alone[0].model  # of the whole model: ranks divide it themselves


def test_a_backend_is_told_how_prompts_run_and_what_is_kept(recorded):
    """A3, A6: what a backend builds, or leaves out, for it."""
    serving = recorded().runner.backend.context.serving
    assert serving == Serving(chunked_prefill_size=2048, disable_radix_cache=False)
    policy = ExtendPolicy(disable_chunked_prefix_cache=True)
    other = recorded(chunked_prefill_size=-1, prefix_cache=False, extend_policy=policy).runner.backend.context.serving
    assert other == Serving(disable_chunked_prefix_cache=True, chunked_prefill_size=-1, disable_radix_cache=True)


def test_limits_hold_the_largest_prefill_and_a_step_in_which_all_decode(recorded):
    """A step of 16 requests that decode has more rows than a chunk of 4."""
    engine = recorded(chunked_prefill_size=4, max_batch=16, context_length=64, page_size=4, ignore_eos=True)
    assert engine.runner.backend.context.limits == Limits(max_requests=16, max_tokens=16, max_context=64)
    engine.generate([[index + 1] for index in range(16)], max_tokens=24)
    assert max(engine.runner.backend.rows) == 16
    assert recorded(chunked_prefill_size=32, max_batch=2).runner.backend.context.limits.max_tokens == 32
