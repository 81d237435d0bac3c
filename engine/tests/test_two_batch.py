"""Two-batch overlap: split of a batch, execution of its halves, and equality with the whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import in_ranks
from torch import Tensor

from attnplug import ExtendPath, ForwardBatch, ForwardMode, Geometry, Role, UsageError
from attnplug.host import ExtendPolicy
from attnplug_conformance.padding import pad_batch, padded
from attnplug_engine import Engine, SamplingParams
from attnplug_engine.execution.two_batch import LEAST_SHARE, BatchSplit, TwoBatch, split_point, split_request
from attnplug_engine.options import EngineOptions
from attnplug_sparse.pools import INDEX_KEYS
from attnplug_testing.command import Package
from attnplug_testing.errors import having
from attnplug_testing.trees import tree_bits

pytestmark = pytest.mark.long

EXTEND, DECODE, VERIFY, MIXED = (
    ForwardMode.EXTEND,
    ForwardMode.DECODE,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.MIXED,
)


def lengths(mode: ForwardMode, new: Sequence[int], *, exact: bool = True, states: bool = False) -> Geometry:
    """A batch of requests with these new tokens, after none."""
    made = Geometry.of_lengths(mode, torch.zeros(len(new), 8, dtype=torch.int32), list(new), list(new), 16)
    made = replace(made, state_slots=torch.arange(len(new)) if states else None)
    return made if exact else replace(made, host=None)


class TestPlaceToCut:
    @pytest.mark.parametrize("mode", [DECODE, VERIFY, ForwardMode.DRAFT_EXTEND])
    @pytest.mark.parametrize("exact", [True, False])
    def test_batches_of_equal_requests_in_the_middle_of_them(self, mode, exact):
        rows = 1 if mode is DECODE else 3
        for requests, first in ((2, 1), (5, 2), (8, 4)):
            assert split_point(lengths(mode, [rows] * requests, exact=exact)) == BatchSplit(first)

    @pytest.mark.parametrize(
        ("new", "cut"),
        [
            ([4, 4], BatchSplit(1)),
            ([10, 20, 30, 1], BatchSplit(2, 0)),
            ([50, 1, 49], BatchSplit(1)),
            ([1, 100], BatchSplit(1, 49)),
            ([100, 1], BatchSplit(0, 50)),
            ([10, 100, 10], BatchSplit(1, 50)),
            ([7], BatchSplit(0, 3)),
            ([2], BatchSplit(0, 1)),
            ([1, 1, 1], BatchSplit(1)),
            ([1, 2], BatchSplit(1)),
            ([3, 3, 3], BatchSplit(1, 1)),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("mode", [EXTEND, MIXED])
    def test_others_where_the_rows_are_most_equal_inside_a_request_if_need_be(self, mode, new, cut):
        assert split_point(lengths(mode, new)) == cut

    @pytest.mark.parametrize(
        "whole",
        [
            lengths(DECODE, [1]),
            lengths(VERIFY, [4]),
            lengths(EXTEND, [1]),
            lengths(EXTEND, []),
            lengths(ForwardMode.IDLE, []),
            lengths(EXTEND, [3, 4], exact=False),
            lengths(VERIFY, [3, 3], states=True),
            replace(lengths(DECODE, [1] * 4, exact=False), captured=True),
        ],
        ids=[
            "decode of one",
            "verify of one",
            "one row",
            "none",
            "idle",
            "rows that the device knows",
            "states",
            "graph",
        ],
    )
    def test_what_stays_in_one_piece(self, whole):
        assert split_point(whole) is None

    def test_padded_requests_count_for_nothing(self):
        assert split_point(padded(lengths(DECODE, [1] * 4), 9)) == BatchSplit(2)
        assert split_point(padded(lengths(EXTEND, [4, 4]), 9)) == BatchSplit(1)
        assert split_point(padded(lengths(DECODE, [1]), 2)) is None

    @given(st.lists(st.integers(1, 60), min_size=1, max_size=9))
    @settings(max_examples=16, deadline=None)
    def test_halves_are_alike(self, new):
        """Every half has rows, and none less than its share, but for the odd row."""
        geometry = lengths(EXTEND, [min(rows, 100) for rows in new])
        split = split_point(geometry)
        if sum(new) < 2:
            assert split is None
            return
        halves = split_request(geometry, split, (0, 1)) if split.rows else geometry.split(split.requests)
        least = min(half.rows for half in halves)
        assert sum(half.rows for half in halves) == sum(new) and least >= 1
        assert least >= LEAST_SHARE * sum(new) or least == sum(new) // 2


# ---- nestings ----

OTHER = """
from dataclasses import replace

from attnplug import BackendSpec, Capabilities, ExtendPath, hookimpl
from attnplug.declare.version import CONTRACT_VERSION
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug_sparse.torch_sparse import TorchSparseBackend


class Other(TorchNativeBackend):
    pass


class OtherSparse(TorchSparseBackend):
    pass


@hookimpl
def attnplug_backends():
    can = Capabilities(kinds={"mha", "mla"}, devices={"cpu"}, dtypes={"float32"}, extras={"lse"},
                       mla_extend=set(ExtendPath), max_speculative_tokens=8)
    sparse = replace(can, kinds={"mla"}, extras={"lse", "selected"}, features={"sparse"}, mla_extend={"absorbed"})
    return [BackendSpec(name="other", summary="another one", contract=CONTRACT_VERSION, factory=__name__ + ":Other",
                        capabilities=can),
            BackendSpec(name="other_sparse", summary="another one", contract=CONTRACT_VERSION,
                        factory=__name__ + ":OtherSparse", capabilities=sparse)]
"""


class Driver:
    """An engine's runner, run by batches that are made by hand."""

    def __init__(self, model: str, requests: int = 3, **options: Any) -> None:
        settings = {"device": "cpu", "max_batch": 8, "num_pages": 512, "context_length": 256, **options}
        self.runner = Engine(model, EngineOptions(**settings)).runner
        self.rows = [self.runner.table.admit() for _ in range(requests)]
        states = self.runner.states
        self.slots = None
        if states is not None:
            self.slots = torch.tensor([states.allocate() for _ in range(requests)], device=self.runner.device)
        self.planned: list[Geometry] = []
        plan = self.runner.backend.init_forward_metadata

        def recorded(batch: ForwardBatch) -> Any:
            self.planned.append(batch.geometry)
            return plan(batch)

        self.runner.backend.init_forward_metadata = recorded

    def batch(self, mode: ForwardMode, new: Sequence[int], seed: int = 0) -> ForwardBatch:
        """The next new tokens of each request; one without any takes no part."""
        table = self.runner.table
        part = [number for number, count in enumerate(new) if count]
        rows, counts = [self.rows[number] for number in part], [new[number] for number in part]
        positions = []
        for row, count in zip(rows, counts, strict=True):
            positions += range(table.length(row), table.length(row) + count)
            table.extend(row, count)
        page_table, seq_lens = table.batch(rows)
        slots = None if self.slots is None else self.slots[part]
        geometry = Geometry.of_lengths(
            mode, page_table, counts, seq_lens.tolist(), table.page_size, seq_lens=seq_lens, state_slots=slots
        )
        ids = torch.randint(0, 128, (sum(counts),), generator=torch.Generator().manual_seed(seed))
        return ForwardBatch(geometry, ids, torch.tensor(positions))

    def memory(self) -> list[Tensor]:
        """All KV caches, linear states and index keys that the model has."""
        pools = self.runner.pools
        found = [] if pools.mla is None else [pools.mla.rows(layer) for layer in pools.mla.layer_ids]
        if pools.mha is not None:
            found += [read(layer) for layer in pools.mha.layer_ids for read in (pools.mha.keys, pools.mha.values)]
        if pools.linear is not None:
            states = [read(id) for id in pools.linear.layer_ids for read in (pools.linear.recurrent, pools.linear.conv)]
            found += [state for state in states if state is not None]
        if INDEX_KEYS in pools.caches:
            keys = pools.cache(INDEX_KEYS)
            found += [keys.keys(layer) for layer in keys.layer_ids]
        return found


SCRIPT = [
    (EXTEND, [37, 3, 2]),  # cut in the first request
    (EXTEND, [5, 20, 9]),  # cut in the second, after a prefix
    (DECODE, [1, 1, 1]),
    (MIXED, [1, 11, 1]),
    (EXTEND, [6, 0, 6]),  # cut between two
    (VERIFY, [3, 3, 3]),
    (EXTEND, [0, 2, 0]),
    (DECODE, [1, 0, 1]),
    (DECODE, [0, 1, 0]),  # too small
]


TOLERANCE = 1e-5
"""Rounding of float32: products of other numbers of rows are summed in another order. Run one by one, without halves,
requests of these models differ by up to 6e-6 too."""


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest one, as a share of the largest number."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def check_script(model: str, **options: Any) -> None:
    """Every step gives the same hidden states, and leaves the same in every cache and state."""
    plain, halved = Driver(model, **options), Driver(model, two_batch_overlap=True, **options)
    for number, (mode, new) in enumerate(SCRIPT):
        batches = [driver.batch(mode, new, seed=number) for driver in (plain, halved)]
        whole = batches[1].geometry
        del plain.planned[:], halved.planned[:]
        expected, found = plain.runner.forward(batches[0]), halved.runner.forward(batches[1])
        assert difference(found, expected) < TOLERANCE
        for ours, theirs in zip(halved.memory(), plain.memory(), strict=True):
            assert difference(ours, theirs) < TOLERANCE
        lanes = [0] if split_point(whole) is None else [0, 1]
        assert [geometry.lane for geometry in halved.planned] == lanes, "each half is planned once, in its lane"
        assert sum(geometry.rows for geometry in halved.planned) == whole.rows and len(plain.planned) == 1


MODELS = ["tiny:llama", "tiny:deepseek_v3", "tiny:qwen3_next", "tiny:kimi_linear", "tiny:glm_moe_dsa"]
NESTINGS = [
    ("tiny:llama", False, 1),
    *((model, split, 16 if split else 4) for model in MODELS for split in (False, True)),
]


@pytest.mark.parametrize(("model", "split", "page_size"), NESTINGS, ids=str)
def test_every_nesting_gives_what_a_plain_forward_gives(package: Package, model, split, page_size):
    """A9, B4: halves × a split of prefill and decode × hybrids of full and linear layers × pages, in every mode."""
    roles = {}
    if split:
        package("other", OTHER)
        roles = {Role.PREFILL: "torch_native", Role.DECODE: "other"}
        if model == "tiny:glm_moe_dsa":
            roles = {Role.PREFILL: "torch_sparse", Role.DECODE: "other_sparse"}
    check_script(model, page_size=page_size, role_backends=roles)


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        *(("tiny:deepseek_v3", ExtendPolicy(forced=path, chunk_capacity=7)) for path in ExtendPath),
        ("tiny:deepseek_v3", ExtendPolicy(chunk_capacity=16, disable_chunked_prefix_cache=True)),
        ("tiny:kimi_linear", ExtendPolicy(forced=ExtendPath.CHUNKED, chunk_capacity=7)),
    ],
    ids=[*ExtendPath, "no chunks of a prefix", "hybrid"],
)
def test_every_path_of_an_mla_extend_gives_what_a_plain_forward_gives(model, policy):
    """C1, C2, B4: both halves run by the path of the whole batch."""
    check_script(model, page_size=4, extend_policy=policy)


def test_a_half_with_a_longer_prefix_runs_by_the_path_of_the_whole():
    """C1: by itself the second half of a request would be absorbed, because it has a prefix."""
    driver = Driver("tiny:deepseek_v3", page_size=4, two_batch_overlap=True)
    first, second = driver.runner._two_batch.halves(driver.batch(EXTEND, [40, 0, 0]))
    assert second.geometry.kv_lens == [40] and second.geometry.query_lens == [20]
    assert first.geometry.calls and second.geometry.calls and not second.needs_forward_metadata_init()


@pytest.mark.parametrize("model", ["tiny:llama", "tiny:deepseek_v3", "tiny:glm_moe_dsa"])
@pytest.mark.parametrize("mode", [VERIFY, ForwardMode.DRAFT_EXTEND], ids=["a verify of trees", "a draft's extend"])
def test_steps_of_a_draft_give_what_a_plain_forward_gives(model, mode):
    """B4: trees go with their requests."""
    plain, halved = Driver(model, page_size=4), Driver(model, page_size=4, two_batch_overlap=True)
    found = []
    for driver in (plain, halved):
        driver.runner.forward(driver.batch(EXTEND, [9, 4, 5]))
        batch = driver.batch(mode, [4, 4, 4], seed=1)
        if mode is VERIFY:
            trees = tree_bits([(-1, 0, 0, 1), (-1, 0, 1, 2), (-1, 0, 0, 0)])
            batch.geometry = replace(batch.geometry, tree=trees)
        found.append(driver.runner.forward(batch))
    assert difference(found[1], found[0]) < TOLERANCE
    assert [(geometry.requests, geometry.lane) for geometry in halved.planned[-2:]] == [(1, 0), (2, 1)]


@pytest.mark.parametrize(
    ("model", "halves"), [*((model, True) for model in MODELS), ("tiny:llama", False), ("tiny:kimi_linear", False)]
)
def test_a_padded_batch_gives_what_it_gives_without_padding(model, halves):
    """B1, B4, B5: rows and requests of padding, linear states included, in every mode, in halves or not."""
    plain, other = Driver(model, page_size=4), Driver(model, page_size=4, two_batch_overlap=halves)
    for number, (mode, new) in enumerate(SCRIPT):
        expected = plain.runner.forward(plain.batch(mode, new, seed=number))
        batch = other.batch(mode, new, seed=number)
        rows = batch.num_tokens
        pad_batch(batch, 5, rows + 4)
        found = other.runner.forward(batch)
        assert found.shape[0] == rows + 4 and difference(found[:rows], expected) < TOLERANCE
        for ours, theirs in zip(other.memory(), plain.memory(), strict=True):
            assert difference(ours, theirs) < TOLERANCE


# ---- how halves run ----


def test_both_halves_are_planned_before_the_first_layer_and_layers_alternate():
    """B2: in every layer, the second half of a divided request reads the rows that its first half wrote."""
    driver = Driver("tiny:llama", page_size=4, two_batch_overlap=True)
    events: list[str] = []
    plan = driver.runner.backend.init_forward_metadata
    driver.runner.backend.init_forward_metadata = lambda batch: events.append("plan") or plan(batch)
    for number, layer in enumerate(driver.runner.model.layers):
        layer.register_forward_hook(
            lambda _m, given, _o, number=number: events.append(f"{number}:{given[2].geometry.lane}")
        )
    driver.runner.forward(driver.batch(EXTEND, [40, 0, 0]))
    layers = range(len(driver.runner.model.layers))
    assert events == ["plan", "plan", *(f"{number}:{lane}" for number in layers for lane in (0, 1))]


def test_a_batch_that_was_planned_as_a_whole_runs_as_a_whole():
    """B1: the marker alone decides, here too."""
    driver = Driver("tiny:llama", page_size=4, two_batch_overlap=True)
    batch = driver.batch(EXTEND, [4, 4, 4])
    driver.runner.attention.plan(batch)
    batch.mark_forward_metadata_ready()
    driver.runner.forward(batch)
    assert [geometry.requests for geometry in driver.planned] == [3]


def test_small_batches_stay_whole_where_weights_would_be_read_twice():
    driver = Driver("tiny:llama", page_size=4, two_batch_overlap=True)
    driver.runner._two_batch.least_rows = 8  # as it is on a GPU, where it is more
    for new, pieces in (([7, 0, 0], 1), ([1, 1, 1], 1), ([8, 0, 0], 2)):
        del driver.planned[:]
        driver.runner.forward(driver.batch(EXTEND, new))
        assert len(driver.planned) == pieces


class Streams:
    """Fake CUDA streams that record their events in a list."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.current = "main"
        main = SimpleNamespace(wait_stream=lambda other: self.events.append("main waits for side"))
        self.side = SimpleNamespace(wait_stream=lambda other: self.events.append("side waits for main"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
        monkeypatch.setattr(torch.cuda, "stream", self._on_side)

    @contextmanager
    def _on_side(self, stream: object) -> Iterator[None]:
        assert stream is self.side
        self.current = "side"
        try:
            yield
        finally:
            self.current = "main"


@pytest.fixture
def on_streams(monkeypatch: pytest.MonkeyPatch) -> tuple[Driver, Streams]:
    driver, streams = Driver("tiny:llama", page_size=4, two_batch_overlap=True), Streams(monkeypatch)
    two_batch = driver.runner._two_batch
    two_batch._module, two_batch._stream = torch.cuda, streams.side
    for number, layer in enumerate(driver.runner.model.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: streams.events.append(f"{streams.current} {number}"))
    return driver, streams


def test_on_two_streams_a_layer_of_the_second_half_waits_for_that_of_the_first(on_streams):
    """It may run concurrently with the first half's next layer, and the result waits for both."""
    driver, streams = on_streams
    driver.runner.forward(driver.batch(EXTEND, [40, 0, 0]))
    layers = range(len(driver.runner.model.layers))
    turns = [word for layer in layers for word in (f"main {layer}", "side waits for main", f"side {layer}")]
    assert streams.events == ["side waits for main", *turns, "main waits for side"]


def test_after_an_error_the_streams_are_joined(on_streams):
    """Memory that the second half still reads is not reused before it is done."""
    driver, streams = on_streams
    driver.runner.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        driver.runner.forward(driver.batch(EXTEND, [40, 0, 0]))
    assert streams.events[-1] == "main waits for side"


# ---- the engine ----


def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(3)
    drawn = [torch.randint(0, 128, (length,), generator=random).tolist() for length in (70, 1, 9, 33)]
    drawn[3][:8] = drawn[0][:8]
    return drawn


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("tiny:llama", {}),
        *((model, {"chunked_prefill_size": 16, "overlap": True, "page_size": 16}) for model in MODELS),
        ("tiny:deepseek_v3", {"num_pages": 35, "prefix_cache": False}),
        ("tiny:qwen3_next", {"num_pages": 35, "prefix_cache": False}),
        ("tiny:kimi_linear", {"chunked_prefill_size": -1}),
    ],
    ids=str,
)
def test_the_same_tokens_with_and_without(model, options):
    settings = {"device": "cpu", "page_size": 4, "max_batch": 4, "context_length": 128, "ignore_eos": True, **options}
    plain, halved = (Engine(model, **settings, two_batch_overlap=on) for on in (False, True))
    params = [SamplingParams(max_tokens=9, temperature=heat, seed=4) for heat in (0.0, 0.8, 0.0, 0.0)]
    expected = [one.token_ids for one in plain.generate(prompts(), params)]
    assert [one.token_ids for one in halved.generate(prompts(), params)] == expected
    assert bool(halved.scheduler.preemptions) is ("num_pages" in options)


def test_ranks_make_their_collectives_in_one_order():
    """Tensor parallelism: both halves reduce, one after the other, on every rank."""
    settings = {"device": "cpu", "page_size": 4, "ignore_eos": True, "max_batch": 4}
    expected = [one.token_ids for one in Engine("tiny:llama", **settings).generate(prompts(), max_tokens=5)]

    def run(parallel: Any) -> list[list[int]]:
        engine = Engine("tiny:llama", parallel=parallel, two_batch_overlap=True, **settings)
        return [one.token_ids for one in engine.generate(prompts(), max_tokens=5)]

    assert in_ranks(2, run) == [expected, expected]


def test_backends_are_built_for_two_lanes_only_if_asked():
    for on, lanes in ((False, 1), (True, 2)):
        runner = Engine("tiny:llama", device="cpu", two_batch_overlap=on).runner
        assert runner.backend.context.limits.lanes == lanes and (runner._two_batch is not None) is on


def test_the_option_is_true_or_false():
    with pytest.raises(UsageError, check=having("yes", settings=("two_batch_overlap",))):
        EngineOptions(two_batch_overlap="yes")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("model", MODELS)
def test_the_same_hidden_states_on_two_streams_of_a_gpu(model):
    """Again and again: a race would not show every time."""
    options = {"device": "cuda", "page_size": 16, "disable_cuda_graph": True, "dtype": "float32"}
    plain, halved = Driver(model, **options), Driver(model, two_batch_overlap=True, **options)
    assert isinstance(halved.runner._two_batch, TwoBatch)
    halved.runner._two_batch.least_rows = 0
    for number, new in enumerate([[101, 3, 2], [5, 90, 9]] + [[1, 40, 1]] * 3):
        expected, found = (
            driver.runner.forward(_to_cuda(driver.batch(EXTEND, new, seed=number))) for driver in (plain, halved)
        )
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def _to_cuda(batch: ForwardBatch) -> ForwardBatch:
    assert batch.input_ids is not None and batch.positions is not None
    batch.input_ids, batch.positions = batch.input_ids.cuda(), batch.positions.cuda()
    return batch
