"""Batch in which every field has a non-default value."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from attnplug import ForwardBatch, ForwardMode, Geometry, Plan, RaggedCall
from attnplug.contract.batch import BackendId, BatchPlan, PlanRecord
from attnplug.host import HostLengths, TypicalLens


def value_of(field: dataclasses.Field[Any]) -> Any:
    """Return a recognizable non-default value, by the field's name or type, so that new fields get one, too."""
    requests, tokens = 3, 6
    known: dict[str, Any] = {
        "page_table": torch.arange(12, dtype=torch.int32).view(requests, 4),
        "new_lens": torch.tensor([2, 1, 3], dtype=torch.int32),
        "host": HostLengths([2, 1, 3], [7, 8, 9]),
        "rows": tokens,
        "max_new": 3,
        "calls": (RaggedCall.of(0, [6], [6], causal=True, device=torch.device("cpu")),),
        "mode": ForwardMode.EXTEND,
    }
    if field.name in known:
        return known[field.name]
    if "Tensor" in str(field.type):
        rows = tokens if field.metadata["split"] == "token" else requests
        return torch.arange(100, 100 + rows, dtype=torch.int32)
    if field.name == "geometry":
        return extend_geometry()
    if field.name == "plan":
        return BatchPlan(Plan(BackendId("whole"), ForwardMode.EXTEND, tokens, None))
    more = {"PlanRecord | None": PlanRecord(3, 6, False), "TypicalLens | None": TypicalLens(8, 9), "object": "rows"}
    return {"int": 9, "int | None": 9, "bool": True, **more}[str(field.type)]


def extend_geometry() -> Geometry:
    return Geometry(**{field.name: value_of(field) for field in dataclasses.fields(Geometry)})


GEOMETRY, FIELDS = dataclasses.fields(Geometry), dataclasses.fields(ForwardBatch)


def extend_batch() -> ForwardBatch:
    """Return a batch of three requests with 2, 1 and 3 new tokens; every field has a non-default value."""
    return ForwardBatch(**{field.name: value_of(field) for field in FIELDS})


DIVIDED = {
    **dict.fromkeys(("mode", "page_size", "max_seq_len", "max_new", "captured", "step", "typical"), "shared"),
    **dict.fromkeys(("input_ids", "positions", "slots"), "token"),
    **dict.fromkeys(("page_table", "seq_lens", "new_lens", "state_slots", "host", "tree", "table_rows"), "request"),
    **dict.fromkeys(("plan", "plan_record", "passed_on"), "reset"),
}
"""How each field is split between the halves of a batch."""
