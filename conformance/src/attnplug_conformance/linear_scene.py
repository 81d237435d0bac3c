"""Test scenes of linear layers: states in scattered slots of a poisoned pool, and float64 results.

Slots that belong to no request and the states of other layers are NaN, and must stay NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from attnplug import AttentionBackend, AttentionKind, ForwardBatch, Geometry, LayerSpec, ModelSpec
from attnplug.host import KVPools, Limits, ModelAttention
from attnplug.kernels import torch_dtype
from attnplug.linear import LinearInputs, LinearStatePool
from attnplug_conformance.arithmetic import NAN, as_bytes, pad_rows, relative_error, tolerance, uninitialized_as_nan
from attnplug_conformance.case import FIRST, LAST, LAYER, Case
from attnplug_conformance.diagnosis import check_tensor
from attnplug_conformance.failure import CheckFailure
from attnplug_conformance.reference import convolution, recurrence
from attnplug_conformance.scene_pools import WideStates
from attnplug_conformance.subject import Subject

DELTA = (AttentionKind.GDN, AttentionKind.KDA)
PAGE = 16


class LinearScene:
    """Requests with their states, and the inputs of one batch."""

    def __init__(self, subject: Subject, case: Case, backend: AttentionBackend | None = None) -> None:
        assert case.linear is not None and case.dtype is not None
        self.subject, self.case, self.dims, self.device = subject, case, case.linear, subject.device
        self.dtype, self.layer = torch_dtype(case.dtype), case.layer
        self.random = torch.Generator().manual_seed(case.seed)
        self.new = [new for _, new in case.lengths]
        requests = len(self.new)
        made = WideStates if case.pages == "wide" else LinearStatePool
        self.pool = made(case.layers, num_slots=requests + 3, dtype=case.dtype, device=self.device)
        first = self.first = self.pool.num_slots - requests - 3
        # No request has the last slot: indexing with slot -1 would hit it.
        self.slots = (first + torch.randperm(requests + 2, generator=self.random)[:requests]).tolist()
        for layer_id in (FIRST, LAYER, LAST):
            for states in self.states(layer_id):
                states[first:] = NAN
        for states in self.states(LAYER):
            for (before, _), slot in zip(case.lengths, self.slots, strict=True):
                states[slot] = self.normal(*states.shape[1:]).to(states.dtype) if before else 0.0
        self.before = [[states[slot].clone() for slot in self.slots] for states in self.states(LAYER)]
        model = ModelSpec("conformance", "conformance", case.layers, 4096)
        self.pools = KVPools(linear=self.pool)
        limits = Limits(max(requests + case.padded_requests, 1), max(sum(self.new) + 64, 1024), 4096, case.lanes)
        problem = replace(case.problem(self.device.type, subject.sm, subject.architecture), page_size=PAGE)
        self.backend = backend or subject.build(model, problem, case.role, self.pools, limits)
        self.weight = (self.normal(self.dims.conv_channels, self.dims.conv_width) * 0.5).to(self.dtype)
        self.bias = self.normal(self.dims.conv_channels) if case.bias else None
        rows = self.rows = sum(self.new)
        self.x = self.normal(rows, self.dims.conv_channels) if self.dims.conv_width else None
        self.inputs = self._inputs(rows) if self.dims.heads else None

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype).to(self.device)

    def _inputs(self, tokens: int) -> LinearInputs:
        dims, kind = self.dims, self.case.kind
        q, k = (self.normal(tokens, dims.key_heads, dims.key_dim) for _ in "qk")
        if kind not in DELTA:
            k = (k * dims.key_dim**-0.5).to(self.dtype)
        decays = {AttentionKind.LIGHTNING: (dims.heads,), AttentionKind.KDA: (tokens, dims.heads, dims.key_dim)}
        log_decay = -torch.rand(*decays.get(kind, (tokens, dims.heads)), generator=self.random)
        beta = torch.rand(tokens, dims.heads, generator=self.random) if kind in DELTA else None
        return LinearInputs(
            q,
            k,
            self.normal(tokens, dims.heads, dims.value_dim),
            log_decay.to(self.device),
            None if beta is None else beta.to(self.device),
            normalize=kind in DELTA,
        )

    def states(self, layer_id: int) -> tuple[Tensor, ...]:
        """States of a layer: recurrent and convolution, if it has them."""
        both = self.pool.recurrent(layer_id), self.pool.conv(layer_id)
        return tuple(states for states in both if states is not None)

    @property
    def others(self) -> list[int]:
        """Slots of no request."""
        return [slot for slot in range(self.first, self.pool.num_slots) if slot not in self.slots]

    def batch(self, *, lane: int = 0) -> ForwardBatch:
        case = self.case
        padded = case.padded_requests
        new = [*self.new, *[0] * padded]
        lens = [before + count for before, count in case.lengths] + [0] * padded
        slots = torch.tensor([*self.slots, *[-1] * padded], dtype=torch.int64, device=self.device)
        table = torch.zeros(len(new), 256, dtype=torch.int32, device=self.device)
        geometry = Geometry.of_lengths(case.mode, table, new, lens, PAGE, state_slots=slots, lane=lane)
        ids = torch.zeros(self.rows + case.padding, dtype=torch.int64, device=self.device)
        return ForwardBatch(geometry, input_ids=ids)

    def attention(self) -> ModelAttention:
        return ModelAttention(self.backend, self.pools)

    def run(self, batch: ForwardBatch | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Plan the batch if necessary and run it; returns the outputs of convolution and recurrence."""
        attention, batch = self.attention(), batch or self.batch()
        with uninitialized_as_nan(self.device):
            if batch.plan is None:
                attention.plan(batch)
            return self.forward(attention, batch)

    def forward(
        self, attention: ModelAttention, batch: ForwardBatch, layer: LayerSpec | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        rows, conv, out, layer = batch.num_tokens, None, None, layer or self.layer
        if self.x is not None:
            x = pad_rows(self.x, rows)
            conv = attention.convolve(x, self.weight, self.bias, layer, batch, silu=self.case.silu)
        if self.inputs is not None:
            out = attention.attend_linear(padded_inputs(self.inputs, rows), layer, batch)
        return conv, out

    # Expected results

    def spans(self) -> Iterator[tuple[int, slice]]:
        for request, (start, stop) in enumerate(pairwise(accumulate(self.new, initial=0))):
            yield request, slice(start, stop)

    def wanted(
        self, accepted: list[int] | None = None, mistake: str | None = None
    ) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Return outputs and final states of the recurrence and of the convolution, per request.

        States follow the ``accepted`` rows, or all rows. ``mistake`` is a key of ``MISTAKES``.
        """
        outs: list[list[Tensor]] = [[], []]
        after: list[list[Tensor]] = [[], []]
        for request, rows in self.spans():
            kept = rows if accepted is None else slice(rows.start, rows.start + accepted[request])
            starts = iter(states[request].double() for states in self.before)
            if self.inputs is not None:
                state = next(starts).cpu() * (0 if mistake == "state" else 1)
                both = [
                    _apply_mistake(tokens_of(self.inputs, part), self.layer.scale, mistake) for part in (rows, kept)
                ]
                out, final = recurrence(both[0][0], state, both[0][1])
                outs[0].append(out)
                after[0].append(final if accepted is None else recurrence(both[1][0], state, both[1][1])[1])
            if self.x is not None:
                state = next(starts).cpu() * (0 if mistake == "conv_state" else 1)
                bias = None if mistake == "bias" else self.bias
                weight = self.weight.flip(1) if mistake == "reversed" else self.weight
                silu = self.case.silu != (mistake == "silu")
                cpu = (self.x.cpu(), weight.cpu(), None if bias is None else bias.cpu())
                outs[1].append(convolution(cpu[0][rows], cpu[1], cpu[2], state, silu=silu)[0])
                after[1].append(convolution(cpu[0][kept], cpu[1], cpu[2], state, silu=silu)[1])
        return outs, after

    @property
    def tolerance(self) -> float:
        return 4 * tolerance(self.case, self.dims.key_dim + max(self.new, default=1))

    def check_results(self, conv: Tensor | None, out: Tensor | None, accepted: list[int] | None = None) -> float:
        """Return the largest error; raises :class:`CheckFailure` if it exceeds rounding or if states are wrong."""
        outs, after = self.wanted(accepted)
        worst = 0.0
        for found, right, what in ((out, outs[0], "the recurrence"), (conv, outs[1], "the convolution")):
            if found is None:
                continue
            shape = (self.rows + self.case.padding, *(right[0] if right else found).shape[1:])
            check_tensor(
                found, shape, self.weight, f"the result of {what}", "rows, then heads and value_dim, or channels"
            )
            wanted = torch.cat(right) if right else found.new_zeros(0, *found.shape[1:]).double()
            error = relative_error(_heads(found[: self.rows]), _heads(wanted))
            if not error <= self.tolerance:
                raise CheckFailure(self._explain(what, found, wanted, error))
            if not (found[self.rows :] == 0).all():
                raise CheckFailure(f"padding rows are not zero in the result of {what}")
            worst = max(worst, error)
        self._check_states(after)
        return worst

    def check_states(self, accepted: list[int] | None = None) -> None:
        self._check_states(self.wanted(accepted)[1])

    def _check_states(self, wanted_after: list[list[Tensor]]) -> None:
        after = [states for states in wanted_after if states]
        names = [name for name, has in (("recurrent", self.dims.heads), ("convolution", self.dims.conv_width)) if has]
        for states, right, name in zip(self.states(LAYER), after, names, strict=True):
            if not states[self.others].isnan().all():
                raise CheckFailure(f"it wrote to the {name} state of a slot that no request of the batch has")
            for request, (slot, wanted) in enumerate(zip(self.slots, right, strict=True)):
                error = relative_error(states[slot], wanted)
                if not error <= self.tolerance:
                    old = relative_error(states[slot], self.before[names.index(name)][request].double())
                    kept = "; it was not updated" if old <= self.tolerance else ""
                    raise CheckFailure(
                        f"the {name} state of request {request} is wrong by {error:.1e} after the batch{kept}"
                    )
        for layer_id in (FIRST, LAST):
            if not all(states[self.first :].isnan().all() for states in self.states(layer_id)):
                raise CheckFailure(f"it wrote to the states of layer {layer_id} while it ran layer {LAYER}")

    def _explain(self, what: str, found: Tensor, wanted: Tensor, error: float) -> str:
        part = 0 if what == "the recurrence" else 1
        if error != error:
            return f"{what} gives NaN: it read a state or row that belongs to no request; states are at state_slots"
        for mistake, message in MISTAKES.items():
            outs = self.wanted(mistake=mistake)[0][part]
            other = torch.cat(outs)
            if relative_error(_heads(other), _heads(wanted)) <= self.tolerance:
                continue  # this mistake makes no difference in this case
            if relative_error(_heads(found[: self.rows]), _heads(other)) <= self.tolerance:
                return f"{what}: {message}"
        right = wanted.to(found.device)
        away = _heads(found[: self.rows].double() - right).norm(dim=-1) / _heads(right).norm(dim=-1).clamp(min=1e-3)
        bad = ~(away <= self.tolerance).all(-1)
        wrong = [request for request, rows in self.spans() if bad[rows].any()]
        where = f"; requests {', '.join(map(str, wrong))} of {len(self.new)} are wrong" if wrong else ""
        return f"{what} is wrong by {error:.2e}; {self.tolerance:.2e} is allowed{where}"

    def snapshot(self) -> list[Tensor]:
        return [as_bytes(states).clone() for layer in (FIRST, LAYER, LAST) for states in self.states(layer)]

    def unchanged(self, before: list[Tensor]) -> bool:
        return all(torch.equal(old, new) for old, new in zip(before, self.snapshot(), strict=True))


MISTAKES = {
    "state": "it started from zeros, not from the request's state",
    "beta": "it ignored beta, the write strength of the delta rule",
    "normalize": "it did not L2-normalize q and k",
    "scale": "it ignored the layer's scale",
    "decay": "it ignored the decay",
    "interleaved": "head h used key head h % key_heads, not h * key_heads // heads",
    "conv_state": "it ignored the rows of earlier steps in the state",
    "bias": "it ignored the bias",
    "silu": "it applied SiLU although not requested, or did not although requested",
    "reversed": "it reversed the weight; its last column applies to the newest row",
}


def _apply_mistake(inputs: LinearInputs, scale: float, mistake: str | None) -> tuple[LinearInputs, float]:
    """Inputs and scale as a mistake changes them."""
    if mistake == "beta" and inputs.beta is not None:
        inputs = replace(inputs, beta=torch.ones_like(inputs.beta))
    if mistake == "normalize":
        inputs = replace(inputs, normalize=not inputs.normalize)
    if mistake == "decay":
        inputs = replace(inputs, log_decay=torch.zeros_like(inputs.log_decay))
    if mistake == "interleaved":
        heads, key_heads = inputs.v.shape[1], inputs.q.shape[1]
        order = torch.arange(heads) % key_heads
        inputs = replace(inputs, q=inputs.q[:, order], k=inputs.k[:, order])
    return inputs, 1.0 if mistake == "scale" else scale


def tokens_of(inputs: LinearInputs, rows: slice, device: torch.device | str = "cpu") -> LinearInputs:
    """Inputs of some rows, on the host unless ``device`` is given."""
    decay, beta = inputs.log_decay, inputs.beta
    return LinearInputs(
        inputs.q[rows].to(device),
        inputs.k[rows].to(device),
        inputs.v[rows].to(device),
        (decay if decay.dim() == 1 else decay[rows]).to(device),
        None if beta is None else beta[rows].to(device),
        inputs.normalize,
    )


def padded_inputs(inputs: LinearInputs, rows: int) -> LinearInputs:
    """Copy of the inputs, padded with NaN to ``rows`` rows."""
    decay, beta = inputs.log_decay, inputs.beta
    return LinearInputs(
        pad_rows(inputs.q, rows),
        pad_rows(inputs.k, rows),
        pad_rows(inputs.v, rows),
        decay.clone() if decay.dim() == 1 else pad_rows(decay, rows),
        None if beta is None else pad_rows(beta, rows),
        inputs.normalize,
    )


def _heads(rows: Tensor) -> Tensor:
    """View rows as ``[tokens, heads, dim]``; convolution rows get one head."""
    return rows if rows.dim() == 3 else rows.unsqueeze(1)
