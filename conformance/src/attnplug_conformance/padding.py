"""Data-parallel padding: requests and rows appended to a batch, up to a size that ranks have in common (B1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from attnplug import ForwardBatch, Geometry
from attnplug.host import HostLengths

_FILLERS = {"page_table": 0, "seq_lens": 0, "new_lens": 0, "tree": 0, "slots": -1, "state_slots": -1, "table_rows": -1}
"""Values of padded requests and rows, by field of a geometry."""


def pad_batch(batch: ForwardBatch, requests: int, tokens: int) -> None:
    """Append padded requests and input rows, ``requests`` and ``tokens`` in total. The plan and its mark stay."""
    geometry, rows = padded(batch.geometry, requests), tokens - batch.num_tokens
    assert tokens >= geometry.rows and rows >= 0
    if batch.input_ids is not None:
        batch.input_ids = _longer(batch.input_ids, rows)
    if batch.positions is not None:
        batch.positions = _longer(batch.positions, rows)
    batch.geometry = geometry


def padded(geometry: Geometry, requests: int) -> Geometry:
    """Return a geometry with padded requests appended, ``requests`` in total. It has no calls: plan it anew.

    Without exact lengths, a padded request has as many rows as the others, and length 0. With them it has no rows.
    """
    more, host = requests - geometry.requests, geometry.host
    assert more >= 0 and not geometry.captured
    if not more:
        return geometry
    rows = more * geometry.max_new if host is None and geometry.new_lens is None else 0
    made: dict[str, Any] = {
        name: _longer(tensor, rows if name == "slots" else more, filler)
        for name, filler in _FILLERS.items()
        if (tensor := getattr(geometry, name)) is not None
    }
    if host is not None:
        made["host"] = HostLengths([*host.query_lens, *[0] * more], [*host.kv_lens, *[0] * more])
        if geometry.new_lens is None:
            made["new_lens"] = _longer(geometry.seq_lens.new_full((geometry.requests,), geometry.max_new), more)
    return replace(geometry, **made, rows=geometry.rows + rows, calls=())


def _longer(tensor: Tensor, rows: int, filler: int = 0) -> Tensor:
    """Append ``rows`` rows of ``filler``: ``[n, …]`` → ``[n + rows, …]``."""
    longer = tensor.new_full((tensor.shape[0] + rows, *tensor.shape[1:]), filler)
    longer[: tensor.shape[0]] = tensor
    return longer
