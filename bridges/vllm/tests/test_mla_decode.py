"""Decode steps of MLA: planned when the first layer attends, captured and replayed, by the numbers that vLLM gives."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from attnplug import BackendError, Capabilities, Claims, ForwardMode, GraphLevel, PlanError, Role
from attnplug.auto.fastest import FastestBackend
from attnplug.auto.schedule import BackendSchedule
from attnplug.host import KVPools, ModelAttention, load_registry
from attnplug_vllm.kv_formats import cache_format
from attnplug_vllm.kv_group import GroupAttention, mla_pools
from attnplug_vllm.mla_decode import DecodeGroup, DecodeStep
from attnplug_vllm.selection import choose, forget
from attnplug_vllm.specs import Machine, mla_layer, model_of
from vllm_recorders import MLARecorder
from vllm_stage import Metadata, config, metadata

HEADS, RANK, ROPE, SCALE, BLOCK = 4, 32, 16, 0.2, 16
NAMES = {"model.layers.0.self_attn.attn": 0, "model.layers.1.self_attn.attn": 1}
FIRST, LAST = NAMES


def declared(**fields: Any) -> Capabilities:
    return Capabilities(kinds={"mla"}, devices={"cpu"}, dtypes={"float32"}, **fields)


def serving(*several: Capabilities) -> Any:
    """A selection with as many backends that decode."""
    specs = [SimpleNamespace(name=f"b{number}", capabilities=can) for number, can in enumerate(several)]
    return SimpleNamespace(serving=lambda role: [SimpleNamespace(spec=spec) for spec in specs])


class Group:
    """The part of ``GroupAttention`` that a ``DecodeGroup`` reads."""

    def __init__(self, backend: Any, context: int = 256, needs: bool = True, count: int = 1) -> None:
        dims = {"heads": HEADS, "scale": SCALE, "kv_lora_rank": RANK, "nope": 8, "rope": ROPE, "v_head_dim": 8}
        layers = tuple(mla_layer(number, **dims) for number in NAMES.values())
        self.model = SimpleNamespace(layers=layers, context_length=context)
        self.selection, self.page_size = (
            serving(*[declared(needs_cpu_seq_lens=needs, max_speculative_tokens=4)] * count),
            BLOCK,
        )
        self.attention = ModelAttention(backend, KVPools())

    def ready(self) -> ModelAttention:
        return self.attention


def step_of(group: DecodeGroup, given: Metadata, *, exact: bool = False) -> DecodeStep:
    """Step made by the builder."""
    rows, starts = given.num_actual_tokens, given.query_start_loc
    host = (given.query_start_loc_cpu, given.seq_lens_cpu_upper_bound) if exact else None
    longest = 1 if rows == given.num_reqs else given.max_query_len
    return DecodeStep(
        given.block_table_tensor, given.seq_lens, group, rows, longest, given.max_seq_len, starts, host=host
    )


def parts(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(HEADS, rows, RANK).transpose(0, 1), torch.randn(rows, HEADS, ROPE)


def attend(step: DecodeStep, name: str = FIRST) -> Tensor:
    return step.attend(*parts(step.rows), name, None)


class TestPlans:
    def test_the_first_layer_plans_for_all(self):
        backend = MLARecorder()
        step = step_of(DecodeGroup(Group(backend), NAMES, 0), metadata([(5, 1), (40, 1)]))
        assert not backend.calls, "a step that replays a graph runs no layer"
        attend(step, FIRST), attend(step, LAST)
        assert backend.names() == ["plan", "run", "run"]
        assert [layer_id for _, (layer_id, *_) in backend.calls[1:]] == [0, 1]

    @pytest.mark.parametrize(
        ("lengths", "mode", "ragged"),
        [
            ([(5, 1), (40, 1)], ForwardMode.DECODE, False),
            ([(5, 4), (40, 4)], ForwardMode.TARGET_VERIFY, False),
            ([(5, 4), (40, 2), (7, 1)], ForwardMode.EXTEND, True),
            ([(5, 5), (40, 5)], ForwardMode.EXTEND, False),
        ],
    )
    def test_modes_by_the_numbers_of_new_tokens(self, lengths, mode, ragged):
        backend = MLARecorder()
        attend(step_of(DecodeGroup(Group(backend), NAMES, 0), metadata(lengths)))
        geometry = backend.calls[0][1]
        assert geometry.mode is mode and geometry.host is None
        assert (geometry.new_lens is not None) is ragged
        assert geometry.slots is None, "vLLM writes the rows"
        if ragged:
            assert geometry.new_lens.tolist() == [4, 2, 1]

    def test_a_backend_that_returns_no_tensor_is_named(self):
        backend = MLARecorder()
        backend.forward_decode = lambda *_, **__: None
        with pytest.raises(BackendError, match="forward_decode of backend recorder returned None"):
            attend(step_of(DecodeGroup(Group(backend), NAMES, 0), metadata([(5, 1)])))

    def test_columns_of_the_block_table_that_nobody_can_use_are_left_out(self):
        backend = MLARecorder()
        attend(step_of(DecodeGroup(Group(backend, context=100), NAMES, 0), metadata([(5, 1)], width=64)))
        assert backend.calls[0][1].page_table.shape == (1, 7)

    def test_bounds_past_the_block_table_are_cut(self):
        backend = MLARecorder()
        given = metadata([(5, 1)], width=4).replace(max_seq_len=70)
        attend(step_of(DecodeGroup(Group(backend), NAMES, 0), given))
        assert backend.calls[0][1].max_seq_len == 64

    def test_exact_lengths_leave_padded_requests_out(self):
        """B5: their rows of the result are padding."""
        backend = MLARecorder()
        given = metadata([(5, 1), (40, 1)], padding=(2, 2))
        attend(step_of(DecodeGroup(Group(backend), NAMES, 0), given, exact=True))
        geometry = backend.calls[0][1]
        assert (geometry.requests, geometry.rows) == (2, 2)
        assert (list(geometry.query_lens), list(geometry.kv_lens)) == ([1, 1], [6, 41])

    def test_exact_lengths_of_requests_that_differ(self):
        backend = MLARecorder()
        attend(step_of(DecodeGroup(Group(backend), NAMES, 0), metadata([(5, 3), (40, 1)]), exact=True))
        geometry = backend.calls[0][1]
        assert (list(geometry.query_lens), list(geometry.kv_lens), geometry.rows) == ([3, 1], [8, 41], 4)


class TestQueries:
    def test_both_parts_go_to_a_backend_that_takes_them(self):
        backend = MLARecorder(claims=Claims(extras=frozenset({"q_rope"})))
        attend(step_of(DecodeGroup(Group(backend), NAMES, 0), metadata([(5, 1)])))
        _, shape, extras = backend.calls[1][1]
        assert shape == (1, HEADS, RANK) and extras.q_rope.shape == (1, HEADS, ROPE)

    def test_they_are_joined_for_one_that_does_not(self):
        backend = MLARecorder()
        attend(step_of(DecodeGroup(Group(backend), NAMES, 0), metadata([(5, 1)])))
        _, shape, extras = backend.calls[1][1]
        assert shape == (1, HEADS, RANK + ROPE) and extras is None

    def test_a_backend_that_was_built_without_parts_is_given_them_joined(self):
        """A built backend may claim less than it declared."""
        backend = MLARecorder()
        group = Group(backend)
        group.selection = serving(declared(extras={"q_rope"}))
        attend(step_of(DecodeGroup(group, NAMES, 0), metadata([(5, 1)])))
        assert backend.calls[1][1][1] == (1, HEADS, RANK + ROPE)

    def test_the_log_sum_exp_is_filled_where_vllm_asks_for_it(self):
        backend, lse = MLARecorder(), torch.empty(1, HEADS)
        step = step_of(DecodeGroup(Group(backend), NAMES, 0), metadata([(5, 1)]))
        step.attend(*parts(1), FIRST, lse)
        assert backend.calls[1][1][2].lse is lse


class TestGraphs:
    @pytest.fixture(autouse=True)
    def stream(self, monkeypatch):
        """Simulate a stream that is being captured, or not."""
        self.capturing = True
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def group(self, **given: Any) -> tuple[MLARecorder, DecodeGroup]:
        backend = MLARecorder(**given)
        return backend, DecodeGroup(Group(backend), NAMES, 64)

    def test_what_lengths_decide_comes_first_in_the_graph(self):
        """B2"""
        backend, group = self.group()
        step = step_of(group, metadata([(0, 1)] * 4))
        group.capture(step)
        attend(step, FIRST), attend(step, LAST)
        assert backend.names() == ["reserve", "capture", "refill", "run", "run"]
        assert backend.calls[0][1] == (64, 64)
        geometry = backend.calls[1][1]
        assert geometry.captured and geometry.seq_lens.data_ptr() == step.seq_lens.data_ptr()

    def test_the_capture_refills_after_a_run_that_warmed_up(self):
        backend, group = self.group()
        step = step_of(group, metadata([(0, 1)] * 4))
        group.capture(step)
        self.capturing = False
        attend(step)
        self.capturing = True
        attend(step), attend(step)
        assert backend.names()[2:] == ["refill", "run", "refill", "run", "run"]

    def test_a_replay_is_planned_without_any_layer(self):
        backend, group = self.group()
        captured = metadata([(0, 1)] * 4)
        group.capture(step_of(group, captured))
        group.replay(step_of(group, captured))
        group.replay(step_of(group, metadata([(3, 1)] * 3)))
        assert backend.names() == ["reserve", "capture", "replay"], "nothing of three requests was captured"

    def test_tensors_elsewhere_are_copied_to_where_the_graph_reads(self):
        _, group = self.group()
        captured, elsewhere = metadata([(0, 1)] * 2), metadata([(7, 1), (20, 1)])
        group.capture(step_of(group, captured))
        group.replay(step_of(group, elsewhere))
        assert captured.seq_lens.tolist() == [8, 21]
        assert torch.equal(captured.block_table_tensor, elsewhere.block_table_tensor)

    def test_graphs_over_caches_that_were_bound_before_are_forgotten(self):
        backend, group = self.group()
        given = metadata([(0, 1)] * 2)
        group.capture(step_of(group, given))
        other = MLARecorder()
        group.planner.group.attention = ModelAttention(other, KVPools())
        group.replay(step_of(group, given))
        assert backend.names() == ["reserve", "capture"] and not other.calls
        group.capture(step_of(group, given))
        assert other.names() == ["reserve", "capture"]

    def test_a_backend_that_pads_in_another_way_is_refused(self):
        _, group = self.group(fill=1)
        with pytest.raises(PlanError):
            group.capture(step_of(group, metadata([(0, 1)] * 2)))


class TestByBatch:
    """Two backends that share the role: the first is the faster for one request, and the second for many, if both are
    compared over all lengths. Short requests are the first one's."""

    TIMES: ClassVar = {
        (1, 16, 1): (1.0, 9.0),
        (1, 200, 1): (3.0, 2.0),
        (8, 16, 1): (2.0, 3.0),
        (8, 200, 1): (9.0, 1.0),
    }

    def setup_method(self) -> None:
        with_parts = Claims(cuda_graph=GraphLevel.UNIFORM, needs_cpu_seq_lens=False, extras=frozenset({"q_rope"}))
        self.first, self.second = MLARecorder(with_parts, name="first"), MLARecorder(name="second")
        names = ("first", "second")
        schedule = BackendSchedule(
            {name: {at: each[n] for at, each in self.TIMES.items()} for n, name in enumerate(names)}
        )
        children = {"first": self.first, "second": self.second}
        both = FastestBackend(children, {Role.DECODE: schedule})
        self.group = DecodeGroup(Group(both, needs=False, count=2), NAMES, 64)

    def test_a_graph_goes_to_the_best_one_for_its_requests_at_every_replay(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        alone, together = metadata([(0, 1)]), metadata([(0, 1)] * 8)
        for given in (together, alone):
            step = step_of(self.group, given.replace(max_seq_len=256))
            self.group.capture(step)
            attend(step), attend(step, LAST)
        for before in (3, 150):
            for requests in (1, 8):
                self.group.replay(step_of(self.group, metadata([(before, 1)] * requests, width=16)))
        for backend, requests in ((self.first, 1), (self.second, 8)):
            assert backend.names() == ["reserve", "capture", "refill", "run", "run", "replay", "replay"]
            planned = [geometry.requests for name, geometry in backend.calls if name in ("capture", "replay")]
            assert planned == [requests] * 3

    @pytest.mark.parametrize(
        ("lengths", "who"),
        [([5], "first"), ([199], "second"), ([5] * 8, "first"), ([199] * 8, "second"), ([5] * 5 + [100], "first")],
    )
    def test_without_a_graph_the_mean_length_decides_too(self, lengths, who):
        step = step_of(self.group, metadata([(before, 1) for before in lengths], padding=(2, 2)), exact=True)
        attend(step)
        assert step.planned.batch.plan.attention.planner_names() == [who]
        geometry = getattr(self, who).calls[0][1]
        assert geometry.host is None and geometry.requests == len(lengths) + 2, "nobody needs exact lengths"

    def test_queries_are_in_parts_for_who_takes_them(self):
        """Each backend gets the form that it takes, even if the other backend of the role takes another one."""
        for before, width in ((5, RANK), (199, RANK + ROPE)):
            step = step_of(self.group, metadata([(before, 1)]), exact=True)
            attend(step)
            backend = self.first if before == 5 else self.second
            assert backend.calls[1][1][1] == (1, HEADS, width)

    @pytest.mark.parametrize(
        ("other", "changed"),
        [
            ({"mla_extend": set()}, "extends"),
            ({"max_speculative_tokens": 0}, "max_verified"),
            ({"needs_cpu_seq_lens": True}, "needs_lengths"),
        ],
    )
    def test_only_what_all_declare_is_relied_on(self, other, changed):
        can = declared(mla_extend={"absorbed"}, max_speculative_tokens=4, needs_cpu_seq_lens=False)
        group = Group(MLARecorder())
        found = []
        for several in ((can, can), (can, replace(can, **other))):
            group.selection = serving(*several)
            made = DecodeGroup(group, NAMES, 0)
            found.append({name: getattr(made, name) for name in ("extends", "max_verified", "needs_lengths")})
        assert found[0] == {"extends": True, "max_verified": 4, "needs_lengths": False}
        assert found[1] == {**found[0], changed: not found[0][changed]}


def test_queries_are_never_joined_for_backends_that_share_decode() -> None:
    """Every backend that decodes on a Hopper GPU takes queries in two parts."""
    registry, names = load_registry(), ("triton_mla", "flashinfer_mla", "flashmla")
    children = {
        name: MLARecorder(replace(registry.get(name).spec.capabilities.claims, needs_cpu_seq_lens=False), name=name)
        for name in names
    }
    times = {
        name: {(requests, 200, 1): float(number != fastest) for fastest, requests in enumerate((1, 8, 64))}
        for number, name in enumerate(names)
    }
    both = FastestBackend(children, {Role.DECODE: BackendSchedule(times)})
    group = DecodeGroup(Group(both, needs=False, count=len(names)), NAMES, 0)
    for name, requests in zip(names, (1, 8, 64), strict=True):
        attend(step := step_of(group, metadata([(199, 1)] * requests), exact=True))
        assert step.planned.batch.plan.attention.planner_names() == [name]
        _, shape, extras = children[name].calls[1][1]
        assert shape == (requests, HEADS, RANK) and extras.q_rope.shape == (requests, HEADS, ROPE)


def test_absorbed_attention_over_vllms_blocks() -> None:
    """On torch_native, with three blocks' rows and a verify of two tokens, against float64."""
    forget()
    asked = config({"attnplug": {"backend": "torch_native"}})
    layers = [
        mla_layer(n, heads=HEADS, scale=SCALE, kv_lora_rank=RANK, nope=8, rope=ROPE, v_head_dim=8) for n in (0, 1)
    ]
    model = model_of(asked, layers)
    selection = choose_without_vllm(asked, model)
    assert set(selection.choices) == {Role.DECODE}, "vLLM prefills"
    given = metadata([(37, 2), (3, 2)])
    caches = [torch.randn(8, BLOCK, RANK + ROPE) for _ in layers]
    group = GroupAttention(
        asked,
        torch.device("cpu"),
        model,
        {n: SimpleNamespace(kv_cache=caches[n], _k_scale_float=1.0) for n in (0, 1)},
        selection,
        cache_format("auto", torch.float32),
        BLOCK,
        mla_pools,
        lambda layer: layer._k_scale_float,
    )
    step = step_of(DecodeGroup(group, NAMES, 0), given, exact=True)
    q, rope = parts(4)
    out = step.attend(q, rope, LAST, None)
    joined = torch.cat([q, rope], -1).double()
    for request, (total, first) in enumerate(((39, 0), (5, 2))):
        blocks = given.block_table_tensor[request, : -(-total // BLOCK)].long()
        rows = caches[1][blocks].flatten(0, 1)[:total].double()
        for token in range(2):
            seen = rows[: total - 1 + token]
            weights = torch.softmax(SCALE * torch.einsum("hd,kd->hk", joined[first + token], seen), -1)
            expected = weights @ seen[:, :RANK]
            assert torch.allclose(out[first + token].double(), expected, atol=1e-5)


def choose_without_vllm(asked: Any, model: Any) -> Any:
    """The selection on a CPU in float32. No vLLM is installed, so no version is checked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnplug_vllm.selection.version_refusals", list)
        return choose(asked, replace(model), "auto", Machine("cpu"))
