"""Single steps run by hand: places where batches are planned, and the order of construction."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from thread_ranks import in_ranks

from attnplug import DType, ExtendPath, ForwardBatch, ForwardMode, PlanError, RefusalCode, Serving
from attnplug.host import ExtendPolicy, HostContext, Limits, Parallel, SelectionError
from attnplug.host import load_model as load_spec
from attnplug_conformance.padding import pad_batch
from attnplug_engine import Engine, SamplingParams
from attnplug_engine.memory.capacity import Capacity, bytes_per_state
from attnplug_engine.memory.pools import build_pools
from attnplug_engine.request import Request
from attnplug_engine.scheduling.step import PENDING, Step, StepEntry
from attnplug_testing.command import Package
from attnplug_testing.errors import naming, refusing


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
    """B1, B2: without a mark, the forward path plans."""
    planned = count_plans(engine)
    engine.add([1, 2, 3], SamplingParams(max_tokens=2))
    batch = engine.runner.batch(engine.scheduler.next_step())
    engine.runner.forward(batch)
    assert planned == [batch]


def test_a_shared_page_is_copied_before_it_is_written(engine):
    """The request's tokens are the same as if its page had not been shared."""
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


def test_a_token_that_the_host_does_not_know_is_put_in_its_place(engine):
    """This holds at every position of the unknown token among known ones."""
    rows, entries = [], []
    for number, (position, token_ids) in enumerate([(0, (7, 8, 9)), (5, (PENDING,)), (2, (4,)), (3, (PENDING,))]):
        rows.append(engine.runner.table.admit())
        engine.runner.table.extend(rows[-1], position + len(token_ids))
        engine.runner.tokens[rows[-1]] = 20 + number
        entries.append(StepEntry(Request(number, (1, 2), SamplingParams(max_tokens=9)), position, token_ids, True))
    batch = engine.runner.batch(Step(ForwardMode.EXTEND, tuple(entries), (), tuple(rows)))
    assert batch.input_ids.tolist() == [7, 8, 9, 21, 4, 23]
    assert batch.positions.tolist() == [0, 1, 2, 5, 2, 3]


def test_nothing_beside_the_marker_decides_on_planning(engine):
    """B1: a batch that is marked is not planned, not even one that has no plan."""
    planned = count_plans(engine)
    engine.add([1, 2, 3], SamplingParams(max_tokens=2))
    batch = engine.runner.batch(engine.scheduler.next_step())
    batch.mark_forward_metadata_ready()
    with pytest.raises(PlanError, check=naming("torch_native")):
        engine.runner.forward(batch)
    assert planned == []


def test_a_step_that_runs_as_mha_is_planned_once_and_marked_for_its_shapes_alone():
    """C2: the backend plans the calls that it will run. B2: the mark does not allow planning again for other shapes."""
    engine = Engine("tiny:deepseek_v3", device="cpu", page_size=4, prefix_cache=False)
    planned = count_plans(engine)
    engine.add([1, 2, 3], SamplingParams(max_tokens=2))
    batch = engine.runner.prepare(engine.scheduler.next_step())
    assert batch.geometry.calls and batch.plan.extend is not None
    assert not batch.plan_record.replan_equivalent
    engine.runner.forward(batch)
    assert planned == [batch]


@pytest.mark.parametrize(("model", "first"), [("deepseek_v3", 2), ("kimi_linear", 2), ("glm_moe_dsa", 0), ("llama", 0)])
def test_only_mla_layers_that_read_rows_alone_run_decodes_apart(model, first):
    """C1: sparse layers read their caches in place, and MHA has one path."""
    engine = Engine(f"tiny:{model}", device="cpu", page_size=4)
    assert engine.runner.attention.decodes_apart([1, 1, 2048], [9, 64, 2048]) == first


@pytest.mark.parametrize("model", ["kimi_linear", "ring_linear"])
def test_linear_layers_run_a_batch_whole_whose_mla_layers_run_decodes_apart(model):
    """C1, A7: states and cache rows advance as in a batch that runs absorbed, step by step."""
    prompts = [list(range(3, 3 + length)) for length in (5, 61, 9, 33)]
    tokens, halves = [], []
    for policy in (ExtendPolicy(forced=ExtendPath.ABSORBED), ExtendPolicy(split_threshold=0, query_threshold=0)):
        engine = Engine(f"tiny:{model}", device="cpu", page_size=4, max_batch=4, chunked_prefill_size=16)
        engine.runner.attention.mla.policy = policy
        run, seen = engine.runner.model.forward, []
        engine.runner.model.forward = lambda ids, at, batch, run=run, seen=seen: (
            seen.append(batch) or run(ids, at, batch)
        )
        completions = engine.generate(prompts, SamplingParams(max_tokens=12, temperature=0.0))
        tokens.append([completion.token_ids for completion in completions])
        halves.append([len(batch.plan.halves) for batch in seen])
    assert tokens[0] == tokens[1]
    assert set(halves[0]) == {0} and set(halves[1]) == {0, 2}


def test_linear_layers_of_a_mixed_batch_are_planned_with_its_calls(monkeypatch):
    """C1: a backend that extends as MHA alone has nothing to plan for a batch without ragged calls."""
    engine = Engine("tiny:kimi_linear", device="cpu", page_size=4, max_batch=4, chunked_prefill_size=16)
    planned, backend = count_plans(engine), engine.runner.backend
    as_mha = frozenset({ExtendPath.ONE_SHOT, ExtendPath.CHUNKED})
    monkeypatch.setattr(backend, "claims", replace(backend.claims, mla_extend=as_mha))
    engine.generate([[*range(3, 3 + length)] for length in (5, 61, 9)], SamplingParams(max_tokens=8))
    assert {batch.forward_mode for batch in planned} == {ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE}
    assert all(batch.geometry.calls for batch in planned if not batch.forward_mode.is_decode)


@pytest.mark.parametrize("padding", [(0, 3), (2, 0), (2, 3)], ids=["rows", "requests", "both"])
@pytest.mark.sample(2)
def test_a_decode_planned_ahead_may_be_padded_and_is_planned_again(engine, padding):
    """B1, B2: prepare() marks it as equivalent when planned again. An extend is marked for its shapes alone."""
    engine.add([1, 2, 3], SamplingParams(max_tokens=4))
    assert not engine.runner.prepare(engine.scheduler.next_step()).plan_record.replan_equivalent
    engine.scheduler.drop_steps()
    engine.step()
    step, planned = engine.scheduler.next_step(), count_plans(engine)
    expected = engine.runner.forward(engine.runner.prepare(step))
    batch = engine.runner.prepare(step)
    assert batch.plan_record.replan_equivalent and len(planned) == 2
    pad_batch(batch, 1 + padding[0], 1 + sum(padding))
    found = engine.runner.forward(batch)
    assert found.shape[0] == 1 + sum(padding) and planned == [planned[0], batch, batch]
    torch.testing.assert_close(found[:1], expected, rtol=1e-5, atol=1e-5)


def test_the_old_flag_is_taken_for_the_mark_and_warned_about_where_it_is_given(engine, monkeypatch):
    """B3: once per process, and at the caller of the entry point."""
    monkeypatch.setattr("attnplug.declare.version._warned", set())
    planned = count_plans(engine)
    engine.add([1, 2, 3], SamplingParams(max_tokens=2))
    batch = engine.runner.batch(engine.scheduler.next_step())
    engine.runner.attention.plan(batch)
    with pytest.warns(DeprecationWarning, match="skip_attn_backend_init") as caught:
        engine.runner.forward(batch, skip_attn_backend_init=True)
    assert planned == [batch] and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.runner.forward(batch, skip_attn_backend_init=True)
    assert planned == [batch]


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
    with pytest.raises(PlanError, check=naming(2, 3)):
        engine.runner.forward(batch)


def test_a_backend_cannot_be_built_before_the_pools(engine):
    """A10's order: the context that every backend is built from demands the pools, and has a place for coordinators."""
    parameters = inspect.signature(HostContext).parameters
    assert parameters["pools"].default is inspect.Parameter.empty
    assert parameters["coordinator"].default is None
    with pytest.raises(TypeError, check=naming("pools")):
        HostContext(model=None, device=None, dtype=None, kv_dtype=None, page_size=4, limits=None, workspace=None)


@pytest.mark.parametrize("model", ["tiny:kimi_linear", "tiny:qwen3_next", "tiny:mamba2", "tiny:minimax"])
def test_bytes_of_a_linear_state_are_those_of_its_pool(model):
    """The bytes reserved for states equal the bytes that they take."""
    spec = load_spec(model)
    capacity, cpu = Capacity(4, 4, 2, 8, 64, 5), torch.device("cpu")
    pools = build_pools(spec, capacity, torch.float16, DType.FLOAT8_E4M3, cpu)
    assert pools.linear.nbytes == 5 * bytes_per_state(spec, torch.float16)


# ---- what backends receive ----

RECORDING = """
from attnplug import BackendSpec, Capabilities, ExtendPath, hookimpl
from attnplug.declare.version import CONTRACT_VERSION
from attnplug.torch_native.backend import TorchNativeBackend


class Recording(TorchNativeBackend):
    def __init__(self, context):
        super().__init__(context)
        self.context, self.ran, self.rows, self.exact = context, set(), [], set()

    def plan(self, geometry):
        if geometry.host is not None:
            self.exact.add(geometry.mode)
        return super().plan(geometry.with_host_lengths())  # which checks the bounds

    def attend(self, q, layer, plan, new, extras):
        self.ran.add(layer)
        self.rows.append(q.shape[0])
        return super().attend(q, layer, plan, new, extras)


def spec(name, needs_cpu_seq_lens, paths):
    can = Capabilities(
        kinds={"mha", "mla"}, devices={"cpu"}, dtypes={"float32"}, extras={"lse"}, mla_extend=paths,
        needs_cpu_seq_lens=needs_cpu_seq_lens,
    )
    factory = __name__ + ":Recording"
    return BackendSpec(name=name, summary="keeps what it is told", contract=CONTRACT_VERSION, factory=factory,
                       capabilities=can)


@hookimpl
def attnplug_backends():
    return [
        spec("recording", True, {"absorbed"}),
        spec("bounded", False, {"absorbed"}),
        spec("choosing", False, set(ExtendPath)),
    ]
"""


@pytest.fixture
def recorded(package: Package):
    """Build engines on a backend that records its context, its batches and its calls."""
    package("recording", RECORDING)

    def build(model: str = "tiny:llama", backend: str = "recording", **settings: Any) -> Engine:
        return Engine(model, device="cpu", attention_backend=backend, **settings)

    return build


@pytest.mark.parametrize("model", ["tiny:llama", "tiny:deepseek_v3"])
def test_every_rank_has_its_rank_in_the_context_and_runs_its_part_of_the_heads(recorded, model):
    """Backends size their buffers by this rank's heads: four heads on two ranks are two on each, MLA's too."""

    def run(parallel):
        engine = recorded(model, parallel=parallel, page_size=4)
        tokens = engine.generate([[1, 2, 3, 4, 5]], max_tokens=3)[0].token_ids
        return engine.runner.backend.context, engine.runner.backend.ran, tokens

    (alone,), both = in_ranks(1, run), in_ranks(2, run)
    assert (alone[0].parallel, alone[0].model) == (Parallel(0, 1), load_spec(model))
    for rank, (context, layers, tokens) in enumerate(both):
        assert context.parallel == Parallel(rank, 2)
        assert {layer.num_heads for layer in context.model.layers} == {2}
        assert layers == set(context.model.layers)
        assert tokens == alone[2]


@pytest.mark.parametrize(
    ("model", "backend", "exact"),
    [
        ("tiny:llama", "recording", {ForwardMode.EXTEND, ForwardMode.DECODE}),
        ("tiny:llama", "choosing", set()),
        ("tiny:deepseek_v3", "bounded", set()),
        ("tiny:deepseek_v3", "choosing", {ForwardMode.EXTEND}),
    ],
    ids=["claimed", "not claimed", "MLA that is always absorbed", "the path of an MLA extend is chosen by them"],
)
@pytest.mark.sample(1)
def test_exact_lengths_on_the_host_are_made_only_where_they_are_needed(recorded, model, backend, exact):
    """A9: ``needs_cpu_seq_lens``. Others have upper bounds, and the same tokens."""
    prompts = [[1, 2, 3, 4, 5], [6, 7], list(range(8, 20))]
    engine = recorded(model, backend, page_size=4)
    found = [completion.token_ids for completion in engine.generate(prompts, max_tokens=4)]
    assert engine.runner.backend.exact == exact
    native = Engine(model, device="cpu", attention_backend="torch_native", page_size=4)
    assert found == [completion.token_ids for completion in native.generate(prompts, max_tokens=4)]


def test_the_context_says_how_prompts_run_and_what_is_kept(recorded):
    """A3, A6: a backend decides by this context which of its parts to build."""
    serving = recorded().runner.backend.context.serving
    assert serving == Serving(chunked_prefill_size=2048, disable_radix_cache=False)
    policy = ExtendPolicy(disable_chunked_prefix_cache=True)
    other = recorded(chunked_prefill_size=-1, prefix_cache=False, extend_policy=policy).runner.backend.context.serving
    assert other == Serving(disable_chunked_prefix_cache=True, chunked_prefill_size=-1, disable_radix_cache=True)


def test_an_extend_path_that_a_backend_does_not_declare_is_refused_before_weights_are_read(recorded, monkeypatch):
    """C1, D3"""
    monkeypatch.setattr("attnplug_engine.prepare.load_model", None)
    with pytest.raises(SelectionError, check=refusing("recording", RefusalCode.FEATURE)):
        recorded("tiny:deepseek_v3", extend_policy=ExtendPolicy(forced=ExtendPath.ONE_SHOT))


def test_limits_hold_the_largest_prefill_and_a_step_in_which_all_decode(recorded):
    """A step of 16 requests that decode has more rows than a chunk of 4."""
    engine = recorded(chunked_prefill_size=4, max_batch=16, context_length=64, page_size=4, ignore_eos=True)
    assert engine.runner.backend.context.limits == Limits(max_requests=16, max_tokens=16, max_context=64)
    engine.generate([[index + 1] for index in range(16)], max_tokens=24)
    assert max(engine.runner.backend.rows) == 16
    assert recorded(chunked_prefill_size=32, max_batch=2).runner.backend.context.limits.max_tokens == 32
