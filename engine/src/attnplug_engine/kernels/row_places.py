"""Cache memory in which a kernel stores the new rows of an MLA layer itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import ForwardBatch, LayerSpec
from attnplug.host import ModelAttention


@dataclass(frozen=True, slots=True, eq=False)
class RowPlaces:
    """Destination of a layer's new rows: the caller stores the row of token ``i`` in ``cache[slots[i]]``.

    Tokens with a negative slot, and tokens behind the last slot, are padding: nothing is stored for them.
    """

    cache: Tensor
    """``[slots, row_dim]``: the layer's memory. Rows may have any stride; each is contiguous."""
    slots: Tensor
    """``[rows]`` integers, with any stride."""


def row_places(
    attention: ModelAttention, layer: LayerSpec, batch: ForwardBatch, tokens: int, dtype: torch.dtype
) -> RowPlaces | None:
    """Return where the kernel that computes an MLA layer's ``tokens`` new rows, in ``dtype``, can store them.

    ``attend_mla`` then takes absorbed queries and no rows. That saves a launch per layer, and absorbing does not wait
    for the rotation. ``None`` if ``attend_mla`` needs the rows: in a batch that runs as MHA, for sparse layers, for
    caches of another dtype or on the host, and for a plan without a slot mapping.
    """
    if attention.mla is None or batch.plan is None or batch.plan.extend is not None:
        return None
    if layer.indexer is not None or layer.compressed is not None:
        return None
    # Checked here already: a stale plan would store rows in slots that belong to other requests by now (B5).
    slots = batch.plan_for(attention.backend.backend_id, tokens).row_slots()
    cache = attention.mla.by_slot.get(layer.layer_id)
    if slots is None or cache is None or cache.dtype is not dtype:
        return None
    return RowPlaces(cache, slots)
