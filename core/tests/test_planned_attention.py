"""``PlannedAttention``, the base class for authors: its behaviour is tested here, not in each plugin."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from attnplug import (
    BackendContext,
    BackendError,
    DType,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    Geometry,
    GraphLevel,
    LayerSpec,
    MLAShape,
    NewRows,
    Plan,
    PlanError,
    PlannedAttention,
    PoolError,
)
from attnplug.host import KVPools, Limits, MLADims, plan_forward
from attnplug.kernels import check_lse
from attnplug.sparse import SelectedPositions
from attnplug_conformance.arithmetic import NAN
from attnplug_testing.batches import captured, padded, with_plan
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelCase
from attnplug_testing.stage import Stage, small

DIMS = MLADims(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8)


class Sevens(PlannedAttention):
    """Backend that returns 7 for every row and records its calls."""

    def __init__(self, context: BackendContext) -> None:
        declared = replace(
            context.declared,
            cuda_graph=GraphLevel.UNIFORM,
            extras=frozenset({"lse", "out", "q_rope", "sinks"}),
        )
        super().__init__(replace(context, declared=declared, limits=replace(context.limits, lanes=2)))
        self.seen: list[tuple[Tensor, NewRows | None, ForwardExtras]] = []
        self.refilled: list[int] = []

    def plan(self, geometry: Geometry) -> Plan:
        return Plan.of(self.backend_id, geometry, "eager", geometry.new_slots())

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        self.seen.append((q, new, extras))
        if extras.lse is not None:
            extras.lse.fill_(2.0)
        return q.new_full((*q.shape[:2], layer.v_head_dim), 7.0)

    def reserve(self, limits: object) -> list[object]:
        return [limits]

    def capture(self, geometry: Geometry, memory: list[object]) -> Plan:
        return Plan.of(self.backend_id, geometry, memory)

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        plan.metadata.append(int(geometry.seq_lens.sum()))


class Narrowed(Sevens):
    """Claims less than its spec declares."""

    def __init__(self, context: BackendContext) -> None:
        claims = replace(context.declared.claims, cuda_graph=GraphLevel.DECODE, extras=frozenset({"out"}))
        PlannedAttention.__init__(self, context, claims)


def stage(case: KernelCase | None = None) -> Stage:
    return Stage(case or small(((5, 3), (0, 2))), "cpu", Sevens)


def planned(on: Stage, padding: int = 0) -> ForwardBatch:
    batch = padded(on.batch(), padding)
    plan_forward(on.backend, batch)
    return batch


def inputs(on: Stage, padding: int = 0) -> list[Tensor]:
    rows = (on.q, on.new_rows(on.keys), on.new_rows(on.values))
    return [torch.cat([t, torch.full((padding, *t.shape[1:]), NAN)]) for t in rows]


class TestPadding:
    @pytest.mark.parametrize("padding", [0, 3])
    @pytest.mark.parametrize("own", [False, True])
    def test_rows_past_the_plan_are_zero_and_nothing_is_written_for_them(self, padding, own):
        """B5: also in memory of the host."""
        on = stage()
        q, k, v = inputs(on, padding)
        lse = torch.full(q.shape[:2], NAN)
        out = torch.full((*q.shape[:2], 16), NAN) if own else None
        found = on.backend.forward_extend(
            q, k, v, on.layer, planned(on, padding), extras=ForwardExtras(lse=lse, out=out)
        )
        assert (found[:5] == 7).all() and (found[5:] == 0).all()
        assert (lse[:5] == 2).all() and (lse[5:] == float("-inf")).all()
        assert found is out or not own
        ((seen, new, _),) = on.backend.seen
        assert len(seen) == len(new[0]) == len(new[1]) == 5
        assert int((~on.pools.mha.keys(3).isnan()).all(-1).all(-1).sum()) == sum(on.totals)

    @pytest.mark.parametrize("padding", [0, 2])
    def test_a_batch_without_rows_runs_no_kernel(self, padding):
        """B5: an idle rank, and one whose requests have no new tokens."""
        on = stage(small(((5, 0),)))
        q = torch.full((padding, 4, 16), NAN)
        out = on.backend.forward_extend(q, None, None, on.layer, planned(on, padding))
        assert out.shape == (padding, 4, 16) and (out == 0).all() and not on.backend.seen

    def test_a_kernel_writes_into_the_hosts_memory_with_padding_too(self):
        on = stage()
        out = torch.full((8, 4, 16), NAN)
        on.backend.forward_extend(*inputs(on, 3), on.layer, planned(on, 3), extras=ForwardExtras(out=out))
        ((_, _, extras),) = on.backend.seen
        assert extras.out.shape == (5, 4, 16) and extras.out.data_ptr() == out.data_ptr()

    def test_without_padding_the_kernels_own_result_is_returned(self):
        """A layer without padding rows causes no copy."""
        on = stage()
        q, k, v = inputs(on)
        on.backend.attend = lambda q, *_: q
        assert on.backend.forward_extend(q, k, v, on.layer, planned(on)) is q


class TestResults:
    @pytest.mark.parametrize("padding", [0, 3])
    @pytest.mark.parametrize("result", [None, torch.zeros(5, 1, 16), torch.zeros(16)], ids=["none", "heads", "row"])
    def test_one_that_is_copied_to_the_hosts_memory_has_its_shape(self, padding, result):
        """D2: torch would broadcast it."""
        on = stage()
        on.backend.attend = lambda *_: result
        out = torch.zeros(5 + padding, 4, 16)
        with raises_naming(BackendError, f"attend of backend {on.backend.context.name}", "(5, 4, 16)"):
            on.backend.forward_extend(
                *inputs(on, padding), on.layer, planned(on, padding), extras=ForwardExtras(out=out)
            )

    @pytest.mark.parametrize("name", ["plan", "attend"])
    def test_a_method_that_is_none_is_an_error_when_the_backend_is_built(self, name):
        """D2: Python takes it for a definition of the abstract method."""
        with raises_naming(BackendError, f"{name} of backend", "None"):
            Stage(small(((5, 3),)), "cpu", type("Without", (Sevens,), {name: None}))


class TestRows:
    def test_new_rows_are_in_the_cache_before_the_kernel_runs(self):
        on = stage()
        q, k, v = inputs(on)
        cached = []
        attend = on.backend.attend
        on.backend.attend = lambda *given: cached.append(on.pools.mha.keys(3).clone()) or attend(*given)
        on.backend.forward_extend(q, k, v, on.layer, planned(on))
        assert int((~cached[0].isnan()).all(-1).all(-1).sum()) == sum(on.totals)

    def test_rows_that_are_in_the_cache_are_not_written_again(self):
        on = stage()
        q, _, _ = inputs(on)
        before = on.pools.mha.keys(3).clone()
        on.backend.forward_extend(q, None, None, on.layer, planned(on), save_kv_cache=False)
        torch.testing.assert_close(on.pools.mha.keys(3), before, rtol=0, atol=0, equal_nan=True)
        assert on.backend.seen[0][1] is None

    def test_a_backend_that_takes_rows_anyway_does_not_write_them_again(self):
        """A backend that attends to rows passed as arguments gets them even if they are already in the cache."""
        on = stage()
        q, k, v = inputs(on)
        on.backend.takes_rows = lambda plan, save_kv_cache: True
        before = on.pools.mha.keys(3).clone()
        on.backend.forward_extend(q, k, v, on.layer, planned(on), save_kv_cache=False)
        torch.testing.assert_close(on.pools.mha.keys(3), before, rtol=0, atol=0, equal_nan=True)
        assert on.backend.seen[0][1] == (k, v)

    @pytest.mark.parametrize("missing", ["k", "v", "both"])
    def test_nothing_to_write_must_be_said(self, missing):
        on = stage()
        q, k, v = inputs(on)
        given = {"k": (None, v), "v": (k, None), "both": (None, None)}[missing]
        with raises_naming(BackendError, "mha", "k", "v", "save_kv_cache=False"):
            on.backend.forward_extend(q, *given, on.layer, planned(on))

    def test_fewer_rows_of_k_or_v_than_planned(self):
        on = stage()
        q, k, v = inputs(on)
        with raises_naming(BackendError, "4 rows of k", "5 of v"):
            on.backend.forward_extend(q, k[:4], v, on.layer, planned(on))
        with raises_naming(BackendError, "5 rows of k", "4 of v"):
            on.backend.forward_extend(q, k, v[:4], on.layer, planned(on))

    def test_an_mla_layer_brings_no_v(self):
        on = Stage(small(((5, 3),), mla=DIMS), "cpu")
        k = on.new_rows(on.keys)
        with raises_naming(BackendError, "mla", "k", "v"):
            on.backend.forward_extend(on.q, k, k, on.layer, planned(on))

    @pytest.mark.parametrize(("dims", "kind"), [(None, "MHA"), (DIMS, "MLA")])
    def test_a_layer_whose_pool_is_missing(self, dims, kind):
        case = small(((5, 3),), mla=dims)
        on = Stage(case, "cpu", lambda context: Sevens(replace(context, pools=KVPools())))
        v = None if dims else on.new_rows(on.values)
        with raises_naming(PoolError, "layer 3", "under_test", kind):
            on.backend.forward_extend(on.q, on.new_rows(on.keys), v, on.layer, planned(on))


class TestCalls:
    def test_a_layer_of_another_model(self):
        on = stage()
        q, k, v = inputs(on)
        with raises_naming(PoolError, "layer 2"):
            on.backend.forward_extend(q, k, v, replace(on.layer, layer_id=2), planned(on))

    @pytest.mark.parametrize("shape", [(5, 8, 16), (5, 4, 15)], ids=["heads", "width"])
    def test_queries_of_another_shape(self, shape):
        """For example, the heads of the whole model instead of this rank's part."""
        on = stage()
        with raises_naming(BackendError, *shape[1:], (4, 16)):
            on.backend.forward_extend(torch.zeros(shape), None, None, on.layer, planned(on), save_kv_cache=False)

    def test_queries_whose_heads_are_not_apart(self):
        on = stage()
        q, k, v = inputs(on)
        with raises_naming(BackendError, "[rows, heads, width]"):
            on.backend.forward_extend(q.flatten(1), k, v, on.layer, planned(on))

    def test_extras_that_it_does_not_declare(self):
        """Nothing is dropped silently."""
        on = stage()
        selected = SelectedPositions(torch.zeros(5, 1, dtype=torch.int32))
        with raises_naming(BackendError, "selected", "lse, out"):
            on.backend.forward_extend(*inputs(on), on.layer, planned(on), extras=ForwardExtras(selected=selected))

    def test_sinks_are_given_for_layers_that_have_them_and_for_no_others(self):
        on = stage()
        q, k, v = inputs(on)
        with raises_naming(BackendError, "sinks=False", "extras.sinks"):
            on.backend.forward_extend(q, k, v, on.layer, planned(on), extras=ForwardExtras(sinks=torch.zeros(4)))
        with_sinks = replace(on.layer, sinks=True)
        for extras in (None, ForwardExtras(lse=torch.zeros(5, 4))):
            with raises_naming(BackendError, "sinks=True", "extras.sinks"):
                on.backend.forward_extend(q, k, v, with_sinks, planned(on), extras=extras)
        with raises_naming(BackendError, "extras.sinks", (3,), 4):
            on.backend.forward_extend(q, k, v, with_sinks, planned(on), extras=ForwardExtras(sinks=torch.zeros(3)))

    @pytest.mark.parametrize(
        ("latent", "rope", "dtype"),
        [
            ((5, 4, 40), (5, 4, 8), torch.float32),
            ((5, 4, 32), (5, 4, 16), torch.float32),
            ((5, 4, 32), (3, 4, 8), torch.float32),
            ((5, 4, 32), (5, 4, 8), torch.float16),
        ],
        ids=["latent", "rope", "rows", "type"],
    )
    def test_absorbed_queries_whose_parts_are_not_those_of_the_layer(self, latent, rope, dtype):
        on = stage(small(((5, 3), (0, 2)), mla=DIMS, v_head_dim=32))
        extras = ForwardExtras(q_rope=torch.zeros(rope, dtype=dtype))
        with raises_naming(BackendError, "[rows, heads, 32]", 8):
            on.backend.forward_extend(
                torch.zeros(latent), None, None, on.layer, planned(on), save_kv_cache=False, extras=extras
            )

    def test_queries_in_two_parts_are_refused_by_a_backend_that_does_not_claim_them(self):
        on = Stage(small(((5, 3), (0, 2)), mla=DIMS, v_head_dim=32), "cpu", Narrowed)
        extras = ForwardExtras(q_rope=torch.zeros(5, 4, 8))
        with raises_naming(BackendError, "q_rope", "out"):
            on.backend.forward_extend(
                torch.zeros(5, 4, 32), None, None, on.layer, planned(on), save_kv_cache=False, extras=extras
            )

    def test_padding_is_cut_off_both_parts_of_absorbed_queries(self):
        """B5"""
        on = stage(small(((5, 3), (0, 2)), mla=DIMS, v_head_dim=32))
        extras = ForwardExtras(q_rope=torch.zeros(7, 4, 8))
        on.backend.forward_extend(
            torch.zeros(7, 4, 32), None, None, on.layer, planned(on, 2), save_kv_cache=False, extras=extras
        )
        ((q, _, given),) = on.backend.seen
        assert (q.shape[0], given.q_rope.shape[0]) == (5, 5)

    @pytest.mark.parametrize("out", [torch.zeros(5, 4, 15), torch.zeros(5, 4, 16, dtype=torch.float16)])
    def test_memory_that_the_result_does_not_fit(self, out):
        on = stage()
        with raises_naming(BackendError, "extras.out", "torch.float32", (5, 4, 16)):
            on.backend.forward_extend(*inputs(on), on.layer, planned(on), extras=ForwardExtras(out=out))

    @pytest.mark.parametrize(
        "lse",
        [torch.zeros(2, 5), torch.zeros(2, 4, dtype=torch.float64), torch.zeros(4, 2).T],
        ids=["shape", "type", "strides"],
    )
    def test_a_log_sum_exp_that_kernels_would_fill_wrongly_is_refused(self, lse):
        """C4: they take it for a plain block of memory."""
        with raises_naming(BackendError, "lse", "float32", (2, 4)):
            check_lse(lse, torch.zeros(2, 4, 16))

    def test_a_call_refuses_such_a_log_sum_exp(self):
        """C4"""
        on = stage()
        with raises_naming(BackendError, "lse", "float32", (5, 4)):
            on.backend.forward_extend(*inputs(on), on.layer, planned(on), extras=ForwardExtras(lse=torch.zeros(4, 5)))

    def test_extras_that_narrowed_claims_leave_out(self):
        """A built backend may honour less than its spec declares."""
        on = Stage(small(((5, 3),)), "cpu", Narrowed)
        with raises_naming(BackendError, "lse", "out"):
            on.results(on.batch())

    @pytest.mark.parametrize(("mode", "entry"), [(ForwardMode.DECODE, "extend"), (ForwardMode.EXTEND, "decode")])
    def test_the_wrong_entry(self, mode, entry):
        on = stage(small(((5, 1),), mode))
        with raises_naming(PlanError, f"forward_{entry}", "under_test"):
            getattr(on.backend, f"forward_{entry}")(*inputs(on), on.layer, planned(on))


class TestGraphs:
    def batch(self, requests: int = 2, lane: int = 0, pages: int = 4, page_size: int = 16) -> ForwardBatch:
        cpu = torch.device("cpu")
        made = captured(ForwardMode.DECODE, requests, 1, pages=pages, page_size=page_size, device=cpu, fill=0)
        made.geometry = replace(made.geometry, lane=lane)
        return made

    def test_a_captured_plan_is_refilled_in_its_own_lane(self):
        backend = stage().backend
        backend.init_cuda_graph_state(4, 8)
        plans = [backend.init_forward_metadata_out_graph(self.batch(lane=lane), in_capture=True) for lane in (0, 1)]
        replayed = self.batch(lane=1)
        replayed.geometry.seq_lens.fill_(3)
        assert backend.init_forward_metadata_out_graph(replayed) is plans[1]
        backend.init_forward_metadata_in_graph(replayed)
        assert [plan.metadata[1:] for plan in plans] == [[], [6]]

    def test_memory_is_for_the_longest_context(self):
        backend = stage().backend
        backend.init_cuda_graph_state(4, 8)
        with raises_naming(PlanError, 257, 256):
            backend.init_forward_metadata_out_graph(self.batch(pages=257), in_capture=True)

    def test_a_last_page_that_is_not_full_counts(self):
        backend = stage(small(((5, 3),), page_size=5)).backend
        backend.init_cuda_graph_state(4, 8)
        assert (
            backend.init_forward_metadata_out_graph(self.batch(pages=820, page_size=5), in_capture=True).query_rows == 2
        )

    def test_a_shape_is_captured_only_in_a_capture(self):
        """A replay must not plan what no graph holds."""
        backend = stage().backend
        backend.init_cuda_graph_state(4, 8)
        with raises_naming(PlanError, "captured", "lane 0"):
            backend.init_forward_metadata_out_graph(self.batch())

    def test_only_modes_of_the_claimed_level_are_captured(self):
        backend = Stage(small(((5, 3),)), "cpu", Narrowed).backend
        backend.init_cuda_graph_state(4, 8)
        verify = captured(ForwardMode.TARGET_VERIFY, 2, 2, pages=4, page_size=16, device=torch.device("cpu"), fill=0)
        with raises_naming(PlanError, "target_verify", "decode"):
            backend.init_forward_metadata_out_graph(verify, in_capture=True)

    def test_padded_requests_of_a_graph_have_no_rows(self):
        assert stage().backend.get_cuda_graph_seq_len_fill_value() == 0

    def test_one_that_claims_none_says_so(self):
        with raises_naming(BackendError, "CUDA graphs"):
            Stage(small(((5, 3),)), "cpu").backend.init_cuda_graph_state(4, 8)

    def test_a_claim_of_graphs_without_the_methods_that_capture_is_refused_at_construction(self):
        class Boasting(Sevens):
            capture = PlannedAttention.capture
            refill = PlannedAttention.refill

        with raises_naming(BackendError, "cuda_graph", "UNIFORM", "capture(", "refill("):
            Stage(small(((5, 3),)), "cpu", Boasting)

    @pytest.mark.parametrize("hook", ["init_forward_metadata", "init_forward_metadata_out_graph"])
    def test_a_lane_that_it_was_not_built_for(self, hook):
        backend = stage().backend
        with raises_naming(PlanError, "lane 2", "2 lanes", "Limits(lanes=3)"):
            getattr(backend, hook)(self.batch(lane=2))


class TestLanes:
    def test_two_plans_of_one_instance_interleave(self):
        """B5: same shape, both alive, run in either order."""
        on = Stage(small(((5, 3), (0, 4))), "cpu", lambda context: _two_lanes(context))
        alone, _ = on.results()
        halves = on.batch().split(1, lanes=(0, 1))
        for half in halves:
            plan_forward(on.backend, half)
        late = on.backend.forward_extend(on.q[3:], None, None, on.layer, halves[1], save_kv_cache=False)
        early = on.backend.forward_extend(on.q[:3], None, None, on.layer, halves[0], save_kv_cache=False)
        torch.testing.assert_close(torch.cat([early, late]), alone, rtol=1e-6, atol=1e-6)


def _two_lanes(context: BackendContext) -> PlannedAttention:
    from attnplug.torch_native.backend import TorchNativeBackend

    return TorchNativeBackend(replace(context, limits=Limits(16, 4096, 4096, lanes=2)))


def test_an_mla_shape_needs_a_model_and_a_pool_with_such_layers():
    with raises_naming(PoolError, "under_test", "MLA"):
        Stage(small(((1, 1),)), "cpu", MLAShape.of)


def test_an_mla_shape_is_that_of_the_layers_and_their_cache():
    case = small(((1, 1),), mla=DIMS, v_head_dim=12, kv_dtype=DType.FLOAT8_E4M3)
    on = Stage(case, "cpu")
    shape = MLAShape.of(on.backend.context)
    assert (shape.heads, shape.dims, shape.scale, shape.page_size) == (4, DIMS, on.layer.scale, 16)
    assert (shape.dtype, shape.kv_dtype, shape.pool) == (torch.float32, torch.float8_e4m3fn, on.pools.mla)
    assert shape.ragged_dims == (16 + 8, 12)


def test_a_plan_of_another_backend_is_refused():
    """B5"""
    on, other = stage(), stage()
    batch = on.batch()
    with_plan(batch, other.backend.init_forward_metadata(batch))
    with raises_naming(PlanError, "instance"):
        on.backend.forward_extend(*inputs(on), on.layer, batch)


def test_a_plan_of_a_geometry_that_was_replaced_is_refused():
    """B5: by its shape alone it would run, on the pages and lengths of another step."""
    on = stage()
    batch = planned(on)
    batch.geometry = on.batch().geometry
    with raises_naming(PlanError, 5, 2, "geometry"):
        on.backend.forward_extend(*inputs(on), on.layer, batch)


def test_pages_of_another_size_are_refused():
    on = stage()
    table = torch.zeros(1, 4, dtype=torch.int32)
    batch = ForwardBatch(Geometry.of_lengths(ForwardMode.EXTEND, table, [3], [3], 2 * on.case.page_size))
    for plan in (on.backend.init_forward_metadata, on.backend.init_forward_metadata_out_graph):
        with raises_naming(PlanError, "under_test", 32, 16):
            plan(batch)


def test_fewer_input_ids_than_rows_are_the_hosts_mistake():
    on = stage()
    batch = on.batch()
    batch.input_ids = torch.zeros(3, dtype=torch.int64)
    with raises_naming(PlanError, "input ids", 3, 5):
        plan_forward(on.backend, batch)


def test_claims_are_the_specs_unless_narrowed():
    on = Stage(small(((1, 1),)), "cpu")
    assert on.backend.claims == on.backend.context.declared.claims


def test_options_come_with_their_type_and_their_defaults():
    @dataclass(frozen=True)
    class Options:
        split: int = 3

    context = Stage(small(((1, 1),)), "cpu").backend.context
    assert context.options_of(Options) == Options()
    assert replace(context, options=Options(5)).options_of(Options).split == 5
    with raises_naming(BackendError, "under_test", 7, "Options"):
        replace(context, options=7).options_of(Options)


def test_a_plan_without_slots_for_the_rows_to_write_is_refused():
    class Forgetful(Sevens):
        def plan(self, geometry: Geometry) -> Plan:
            return Plan.of(self.backend_id, geometry, "eager")

    on = Stage(small(((5, 3), (0, 2))), "cpu", Forgetful)
    with raises_naming(PlanError, "layer 3", "new_slots()"):
        on.backend.forward_extend(*inputs(on), on.layer, planned(on))
