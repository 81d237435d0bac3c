"""Children of wrappers: one with every member of the protocol, and one with the required members only.

The first is made from the protocol itself, so a parameter or a hook that the protocol gains is recorded too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from attnplug import Claims, ForwardBatch, ForwardMode, Geometry, GraphLevel, Plan
from attnplug.contract.backend import AttentionBackend, hook_signatures, methods
from attnplug.contract.batch import BackendId

MEMBERS = {**methods(AttentionBackend), **hook_signatures()}
PLANNERS = ("init_forward_metadata", "init_forward_metadata_out_graph", "init_mha_chunk_metadata")
GRAPHS = Claims(cuda_graph=GraphLevel.ALWAYS)


class Recorder:
    """``calls`` holds each call's member and its arguments by name, defaults included. Planning hooks return a plan,
    ``get_cuda_graph_seq_len_fill_value`` returns ``fill``, what has no result ``None``, and everything else an object
    that is ``result``."""

    def __init__(self, name: str, claims: Claims = GRAPHS, fill: int = 0) -> None:
        self.backend_id, self.claims, self.fill, self.result = BackendId(name), claims, fill, object()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def given(self, member: str) -> list[dict[str, Any]]:
        """The arguments of every call of a member."""
        return [arguments for called, arguments in self.calls if called == member]

    def _answer(self, member: str, arguments: dict[str, Any]) -> Any:
        self.calls.append((member, arguments))
        if member in PLANNERS:
            batch = arguments.get("batch", arguments.get("forward_batch"))
            return Plan(self.backend_id, batch.forward_mode, batch.num_tokens, None)
        if member == "get_cuda_graph_seq_len_fill_value":
            return self.fill
        return None if MEMBERS[member].return_annotation == "None" else self.result


def _recording(member: str, signature: inspect.Signature) -> Callable[..., Any]:
    def method(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self._answer(member, bound.arguments)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
    return method


for _member, _signature in MEMBERS.items():
    setattr(Recorder, _member, _recording(_member, _signature))


class Hookless:
    """Backend with the required members only and no optional hook, like FlashAttention."""

    def __init__(self, name: str = "hookless") -> None:
        self.backend_id, self.claims = BackendId(name), Claims()

    def init_forward_metadata(self, batch):
        return Plan.of(self.backend_id, batch.geometry)

    def forward_extend(self, q, k, v, layer, batch, *, save_kv_cache=True, extras=None):
        batch.plan_for(self.backend_id, q.shape[0], decode=False)
        return q

    def forward_decode(self, q, k, v, layer, batch, *, save_kv_cache=True, extras=None):
        batch.plan_for(self.backend_id, q.shape[0], decode=True)
        return q


def batch_in(mode: ForwardMode) -> ForwardBatch:
    """Two requests with one new token each."""
    return ForwardBatch(Geometry.of_lengths(mode, torch.zeros(2, 1, dtype=torch.int32), [1, 1], [1, 1], 16))
