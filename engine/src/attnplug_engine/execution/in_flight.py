"""A step in flight: launched on the device, with its sampled tokens on their way to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug.kernels import to_device
from attnplug.machine.runtime import runtime_of
from attnplug_engine.execution.sampler import Logprobs
from attnplug_engine.execution.step_output import StepOutput, record_event
from attnplug_engine.request import TokenLogprobs
from attnplug_engine.scheduling.step import PENDING, Step


class StepInFlight:
    """A launched step: its tokens, and log probabilities for the requests that want them.

    ``replayed`` says that a captured graph ran it. ``output`` is given if that graph itself writes the tokens to the
    host.
    """

    def __init__(
        self, step: Step, logits: Tensor, sampled: Tensor, output: StepOutput | None = None, *, replayed: bool
    ) -> None:
        self.replayed = replayed
        self._asking, self._logprobs = [], None
        requests = step.sampled_requests
        asking = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        if asking:
            self._asking = [requests[row] for row in asking]
            count = max(request.params.logprobs or 0 for request in self._asking)
            self._logprobs = Logprobs.of(logits, sampled, asking, count).map(to_host)
        self._done = record_event(sampled.device) if asking else None
        self._output = StepOutput(to_host(sampled), record_event(sampled.device)) if output is None else output

    def tokens(self) -> list[int]:
        """Return one token per request of ``sampled_requests``, -1 where its logits are not finite. Blocks until the
        step has finished."""
        if self._done is not None:
            self._done.synchronize()
        return self._output.tokens()

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Return log probabilities by request id, for requests that want them. Call it after ``tokens``."""
        return {} if self._logprobs is None else self._logprobs.by_request(self._asking)


def to_host(tensor: Tensor) -> Tensor:
    """Start a copy to the host. It is complete when the stream has reached this point."""
    if tensor.is_cpu:
        return tensor.clone()
    pinned = runtime_of(tensor.device).pinned
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor, non_blocking=pinned)


def fill_pending_tokens(ids: Tensor, step: Step, newest: Tensor) -> None:
    """Write the pending tokens of a step to ``ids``. ``newest [rows of the slot table]`` holds them on the device."""
    places, rows, place = [], [], 0
    for row, entry in zip(step.rows, step.entries, strict=True):
        if entry.token_ids[0] == PENDING:
            places.append(place)
            rows.append(row)
        place += len(entry.token_ids)
    if places:
        targets, sources = to_device([places, rows], ids.device).unbind()
        ids.index_copy_(0, targets, newest.index_select(0, sources))
