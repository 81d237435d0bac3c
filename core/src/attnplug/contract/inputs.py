"""Inputs of layers beyond q, k and v.

Ragged calls of an MLA prefill as MHA have rows as arguments instead of cache rows. Linear layers have inputs of their
own, sparse and compressed ones those of index and compressor, and selected rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from attnplug.declare.errors import BackendError, PlanError
from attnplug.declare.model import LayerSpec
from attnplug.machine.runtime import to_device


@dataclass(frozen=True, slots=True, eq=False)
class RaggedCall:
    """Lengths of one call, prepared once per batch and equal in every layer.

    Sequence i has ``query_lens[i]`` query rows and ``kv_lens[i]`` key rows, neither zero; rows of all sequences are
    concatenated. With ``causal``, the last query attends to all keys of its sequence, and each query to one key less
    than the next. ``index`` is the number of the call within its batch, by which a backend finds its plan.
    ``query_indptr`` and ``kv_indptr`` ``[sequences + 1]`` int32 are on the device. ``lane`` is the batch's. A backend
    without a plan finds its scratch memory by it.

    ``padded_rows`` are the rows of q, k and v in a captured call. Only the device knows its lengths: those on the host
    are empty. Sequences may have no rows, and rows behind the last sequence are padding, whose output is zero.
    """

    index: int
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    causal: bool
    query_indptr: Tensor
    kv_indptr: Tensor
    lane: int = 0
    padded_rows: int | None = None

    @classmethod
    def captured(cls, requests: int, rows: int, *, device: torch.device, lane: int = 0) -> RaggedCall:
        """A captured call over the new rows of an extend without prefixes. ``refill`` gives it their lengths."""
        indptr = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        return cls(0, (), (), True, indptr, indptr, lane, rows)

    def refill(self, new_lens: Tensor) -> None:
        """Update a captured call by ``new_lens`` ``[requests]`` on the device."""
        torch.cumsum(new_lens, 0, dtype=torch.int32, out=self.query_indptr[1:])

    @classmethod
    def of(
        cls,
        index: int,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        *,
        causal: bool,
        device: torch.device,
        lane: int = 0,
    ) -> RaggedCall:
        if len(query_lens) != len(kv_lens):
            raise PlanError(
                f"a call has {len(query_lens)} query lengths and {len(kv_lens)} key lengths; give equally many"
            )
        query_indptr, kv_indptr = (
            to_device(list(accumulate(lens, initial=0)), device, np.int32) for lens in (query_lens, kv_lens)
        )
        return cls(index, tuple(query_lens), tuple(kv_lens), causal, query_indptr, kv_indptr, lane)

    @property
    def query_rows(self) -> int:
        return sum(self.query_lens) if self.padded_rows is None else self.padded_rows

    @property
    def kv_rows(self) -> int:
        return sum(self.kv_lens) if self.padded_rows is None else self.padded_rows

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise PlanError unless q, k and v have the rows of this call. Kernels do not check lengths."""
        rows = (q.shape[0], k.shape[0], v.shape[0])
        if rows != (self.query_rows, self.kv_rows, self.kv_rows):
            raise PlanError(
                f"call {self.index} has {self.query_rows} query rows and {self.kv_rows} key and value rows, but q, k "
                f"and v have {rows[0]}, {rows[1]} and {rows[2]}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One ragged call of an MLA extend.

    ``slots`` ``[rows]`` are the slots of the cache rows to read and up-project; ``None`` means the new rows, which are
    passed as arguments. ``rows`` ``[queries]`` are the participating query rows; ``None`` means all of them.
    """

    call: RaggedCall
    slots: Tensor | None
    rows: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class CompressorWeights:
    """Weights of a layer's compressor behind its projections. All are float32."""

    bias: Tensor
    """``[ratio, series * dim]``, added to the gates by the token's position in its window."""
    norm: Tensor
    """``[dim]``: the weight of an entry's root-mean-square norm."""
    eps: float
    frequencies: Tensor
    """``[rope / 2]``: an entry's last ``rope`` columns, in pairs ``(2 i, 2 i + 1)``, are rotated by these frequencies
    times the position of its window's first token."""


@dataclass(frozen=True, slots=True, eq=False)
class CompressorInputs:
    """Outputs of a layer's compressor for the new tokens. Rows behind the planned ones are padding.

    An entry of a window, with the weights, in float32::

        weights = softmax(gate + bias)             over the window's tokens, for each column
        entry = rms_norm(sum(weights * values))    over the window's tokens, then times ``norm``
        entry = rotated by the position of the window's first token

    With ``overlap`` the columns are two series. An entry takes the first series of the window before it and the second
    series of its own window, with one softmax over the tokens of both. The first window has none before it.
    """

    values: Tensor
    """``[tokens, series * dim]``."""
    gates: Tensor
    """``[tokens, series * dim]``."""
    weights: CompressorWeights

    def first(self, tokens: int) -> CompressorInputs:
        """Return the inputs of the first ``tokens`` tokens."""
        return CompressorInputs(self.values[:tokens], self.gates[:tokens], self.weights)


@dataclass(frozen=True, slots=True, eq=False)
class IndexInputs:
    """Outputs of a layer's indexer for the new tokens. Rows behind the planned ones are padding.

    The score of a row s for a token t is the sum over heads of ``weights[t, h] * relu(scale * q[t, h] · k[s])``, in
    float32, where ``scale`` is that of ``IndexerDims``. A weight may be negative.
    """

    q: Tensor
    """``[tokens, heads, head_dim]``, rotated."""
    k: Tensor | None
    """``[tokens, head_dim]``: the new tokens' index keys, rotated, to be cached; ``None`` if they are cached."""
    weights: Tensor
    """``[tokens, heads]`` float32."""
    entries: CompressorInputs | None = None
    """Given instead of ``k`` for a ``compressed`` layer, whose index has a key for each entry."""


@dataclass(frozen=True, slots=True, eq=False)
class SelectedPositions:
    """Selected rows by position in the token's own request; for a ``compressed`` layer, entries by number.

    ``positions`` ``[tokens, width]`` int32 are distinct, in any order, and none is behind the token's own. If fewer
    were selected, the rest of the row is -1. Rows of padding are -1.
    """

    positions: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SelectedSlots:
    """Selected rows by slot of the cache; entries by slot of the cache of entries.

    ``slots`` ``[tokens, width]`` int32 are ``page * page_size + offset``, with -1 as in ``SelectedPositions``.
    """

    slots: Tensor


SelectedRows: TypeAlias = SelectedPositions | SelectedSlots
"""Rows ``[tokens, topk]`` that each token attends to. Two types, so that a tensor never has two meanings."""


def selected_tensor(selected: SelectedRows) -> Tensor:
    """Return the tensor ``[tokens, width]`` of either type."""
    return selected.positions if isinstance(selected, SelectedPositions) else selected.slots


def first_rows(selected: SelectedRows, tokens: int) -> SelectedRows:
    """Return the rows that the first ``tokens`` tokens attend to."""
    return type(selected)(selected_tensor(selected)[:tokens])


def check_selected(selected: SelectedRows | None, layer: LayerSpec, tokens: int, backend: str) -> None:
    """Raise BackendError unless ``selected`` fits the layer: given for layers with an indexer, and for no others."""
    if selected is None:
        if layer.indexer is not None:
            raise BackendError(
                f"layer {layer.layer_id} attends to rows that an index chooses, but backend {backend} was given no "
                "extras.selected; give what `select` returned for this batch"
            )
        return
    if layer.indexer is None:
        raise BackendError(
            f"layer {layer.layer_id} attends to all rows, but extras.selected were given; leave them out"
        )
    given = selected_tensor(selected)
    if given.dim() != 2 or given.shape[0] != tokens or given.dtype is not torch.int32:
        raise BackendError(
            f"layer {layer.layer_id}: extras.selected is {given.dtype} of shape {tuple(given.shape)}; give torch.int32 "
            f"of shape [{tokens}, rows chosen]"
        )


@dataclass(frozen=True, slots=True, eq=False)
class LinearInputs:
    """Inputs of a layer's recurrence, one row per new token.

    A request's state S ``[heads, key_dim, value_dim]`` is updated token by token. For each token and head, with
    ``d = exp(log_decay)``::

        S = d S                                     d scales all of S, or each of its key channels (KDA)
        S = S + k (v - k S) beta     with ``beta``: the delta rule (GDN, KDA)
        S = S + k v                  without        (Lightning, Mamba2)
        out = scale q S              scale is the layer's

    q and k are ``[tokens, key_heads, key_dim]``, v is ``[tokens, heads, value_dim]``; head h uses key head
    ``h * key_heads // heads``. ``log_decay``, float32 and never above 0, is ``[tokens, heads]``, or ``[tokens, heads,
    key_dim]``, or ``[heads]`` if it is equal for all tokens. ``beta`` is ``[tokens, heads]``. With ``normalize``,
    q and k are L2-normalised first (divided by the root of their sum of squares plus 1e-6). Rows may have any stride.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None = None
    normalize: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """Weights of a delta-rule layer between its input and output projections.

    ``conv`` ``[conv_channels, conv_width]``; ``rate``, negative, ``[heads]`` or ``[heads, 1]``; ``bias`` ``[heads]`` or
    ``[heads, key_dim]``; ``norm`` ``[value_dim]``. All but ``conv`` are float32. The activation of
    the output gate is SiLU if ``silu``, else sigmoid.
    """

    conv: Tensor
    rate: Tensor
    bias: Tensor
    norm: Tensor
    eps: float
    silu: bool


@dataclass(frozen=True, slots=True, eq=False)
class DeltaInputs:
    """Inputs of a whole delta-rule layer: the outputs of its input projections.

    ``rows`` ``[tokens, conv_channels]`` are q, k and v concatenated, before the convolution. ``decay`` ``[tokens,
    heads]`` or ``[tokens, heads, key_dim]``, ``beta`` ``[tokens, heads]`` and ``gate`` ``[tokens, heads, value_dim]``
    are raw projections too. With the layer's weights, in float32, the input of the output projection is::

        q, k, v = silu(convolution(rows))                  rounded to the dtype of the rows
        log_decay = rate * softplus(decay + bias)
        beta = sigmoid(beta)                               rounded to the dtype of the rows
        out = recurrence(q, k, v, log_decay, beta)         as ``LinearInputs`` with ``normalize``; rounded too
        out = rms_norm(out, eps) * norm * activation(gate)
    """

    rows: Tensor
    decay: Tensor
    beta: Tensor
    gate: Tensor
    weights: DeltaWeights
