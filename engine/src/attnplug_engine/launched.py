"""A step that was asked of the device: what it will have sampled, on its way to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug_engine.letters import Delivery, recorded
from attnplug_engine.request import Step, TokenLogprobs
from attnplug_engine.sampler import Logprobs


class Launched:
    """The tokens of a step, and log probabilities for the requests that ask. ``replayed``: a captured graph ran it,
    which may have brought its tokens to the host itself."""

    def __init__(
        self, step: Step, logits: Tensor, sampled: Tensor, delivery: Delivery | None = None, *, replayed: bool
    ) -> None:
        self.replayed = replayed
        self._asking, self._logprobs = [], None
        requests = step.sampled_requests
        asking = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        if asking:
            self._asking = [requests[row] for row in asking]
            count = max(request.params.logprobs or 0 for request in self._asking)
            self._logprobs = Logprobs.of(logits, sampled, asking, count).map(to_host)
        self._done = recorded(sampled.device) if asking else None
        self._delivery = Delivery(to_host(sampled), recorded(sampled.device)) if delivery is None else delivery

    def tokens(self) -> list[int]:
        """A token for each of the step's ``sampled_requests``, -1 where its logits are not finite. Waits."""
        if self._done is not None:
            self._done.synchronize()
        return self._delivery.tokens()

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """By request id, for those that ask. Call it after ``tokens``."""
        return {} if self._logprobs is None else self._logprobs.told(self._asking)


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, complete when the device has come this far."""
    if tensor.is_cpu:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
