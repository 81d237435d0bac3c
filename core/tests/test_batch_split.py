"""Batches in two, between requests: what each half has of every field."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attnplug import ForwardBatch, ForwardMode, PlanError
from attnplug.host import HostLengths
from attnplug_testing.batches import geometry, padded
from attnplug_testing.errors import raises_naming
from attnplug_testing.full_batch import DIVIDED, FIELDS, GEOMETRY, extend_batch


def make(requests: int = 2, tokens: int | None = None, mode: ForwardMode = ForwardMode.DECODE) -> ForwardBatch:
    """A batch of one new token a request, and padding rows up to ``tokens``."""
    table = torch.arange(requests * 4, dtype=torch.int32).view(requests, 4)
    made = ForwardBatch(geometry(mode, table, [1] * requests, [5] * requests, 8))
    return made if tokens is None else padded(made, tokens - requests)


class TestSplit:
    @pytest.mark.parametrize(
        "field",
        [f for f in (*FIELDS, *GEOMETRY) if f.name not in ("geometry", "rows", "calls", "lane")],
        ids=lambda f: f.name,
    )
    def test_every_field_goes_where_it_says(self, field):
        """B4: fields by token or request are divided, shared fields go to both halves, plans and marks to neither."""
        batch = extend_batch()
        first, second = batch.split(2)
        if field in GEOMETRY:
            batch, first, second = batch.geometry, first.geometry, second.geometry
        value, halves = getattr(batch, field.name), (getattr(first, field.name), getattr(second, field.name))
        how = DIVIDED.get(field.name)
        assert how is not None, f"say here how {field.name} is divided"
        if field.name == "host":
            assert halves == (HostLengths([2, 1], [7, 8]), HostLengths([3], [9]))
        elif how in ("token", "request"):
            at = 3 if how == "token" else 2
            assert torch.equal(halves[0], value[:at]) and torch.equal(halves[1], value[at:])
        else:
            assert halves == ((value, value) if how == "shared" else (None, None))

    def test_rows_are_counted_calls_are_planned_anew_and_lanes_are_the_callers(self):
        """B4"""
        halves = [half.geometry for half in extend_batch().split(2)]
        assert [(half.rows, half.calls, half.lane) for half in halves] == [(3, (), 9), (3, (), 9)]
        assert [half.geometry.lane for half in extend_batch().split(1, lanes=(0, 1))] == [0, 1]

    def test_without_exact_lengths_only_a_uniform_batch_can_be_split(self):
        """Without exact lengths, the host does not know the row at which a ragged batch is divided."""
        uniform = make(3)
        uniform.geometry = dataclasses.replace(uniform.geometry, host=None)
        assert [half.num_tokens for half in uniform.split(1)] == [1, 2]
        two_each = dataclasses.replace(uniform.geometry, rows=6, max_new=2)
        assert [half.rows for half in two_each.split(1)] == [2, 4]
        ragged = extend_batch()
        ragged.geometry = dataclasses.replace(ragged.geometry, host=None)
        with raises_naming(PlanError, "exact"):
            ragged.split(1)

    def test_both_children_start_unplanned(self):
        """B4"""
        batch = extend_batch()
        assert all(child.needs_forward_metadata_init() for child in batch.split(1))
        assert not batch.needs_forward_metadata_init(), "the parent keeps its own plan"

    def test_field_that_nobody_can_divide_is_refused_by_name(self):
        """B4: … or refuses by name."""

        @dataclasses.dataclass(slots=True, eq=False)
        class Extended(ForwardBatch):
            mrope_positions: torch.Tensor | None = None

        fields = {field.name: getattr(extend_batch(), field.name) for field in dataclasses.fields(ForwardBatch)}
        first, _ = Extended(**fields).split(1)
        assert isinstance(first, Extended)
        with raises_naming(PlanError, "mrope_positions"):
            Extended(**fields, mrope_positions=torch.zeros(6)).split(1)

    def test_undeclared_field_cannot_be_smuggled_in(self):
        """B4, B6: a batch rejects undeclared attributes, and no field of it is a pool, a coordinator or a backend."""
        with pytest.raises(AttributeError):
            extend_batch().hisparse_coordinator = object()
        names = {field.name for field in (*FIELDS, *GEOMETRY)}
        assert not {name for name in names if "pool" in name or "coordinator" in name or "backend" in name}

    @pytest.mark.parametrize("requests", [0, 3])
    def test_one_half_may_be_empty(self, requests):
        first, second = extend_batch().split(requests)
        assert (first.batch_size, second.batch_size) == (requests, 3 - requests)
        assert first.num_tokens + second.num_tokens == 6

    def test_decode_batch_splits_by_request(self):
        first, second = make(3).split(1)
        assert (first.num_tokens, second.num_tokens) == (1, 2)

    def test_padding_stays_at_the_end(self):
        """Padding belongs to the second half, so that rows keep their order when the halves are joined again."""
        batch = make(2, tokens=5)
        batch.input_ids = torch.arange(5)
        first, second = batch.split(1)
        assert (first.input_ids.tolist(), second.input_ids.tolist()) == ([0], [1, 2, 3, 4])
        assert [half.geometry.rows for half in (first, second)] == [1, 1]

    def test_split_point_outside_is_refused(self):
        with raises_naming(PlanError, 3, 4):
            extend_batch().split(4)
