"""The forward context: which backend is active, and planning by the batch's own marker (B1, B6)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from attnplug.contract.backend import AttentionBackend
from attnplug.contract.batch import ForwardBatch, apply_skip_attn_backend_init
from attnplug.contract.plan import Plan, made_plan
from attnplug.declare.errors import BackendError


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What the layers of a running model find: the backend, and what runs its MLA and its linear layers."""

    backend: AttentionBackend
    mla: Any = None
    linear: Any = None


_active: ContextVar[ForwardContext] = ContextVar("attnplug_forward_context")


@contextmanager
def forward_context(backend: AttentionBackend, mla: Any = None, linear: Any = None) -> Iterator[AttentionBackend]:
    """Make ``backend`` the active one for the code inside, in this thread or task. Contexts nest.

    ``mla`` is the ``attnplug.mla.MLAAttention`` of the model and ``linear`` its ``LinearAttention``, if
    it has such layers.
    """
    token = _active.set(ForwardContext(backend, mla, linear))
    try:
        yield backend
    finally:
        _active.reset(token)


def active_backend() -> AttentionBackend:
    """The backend of the innermost forward context."""
    return _context().backend


def active_mla() -> Any:
    """What runs MLA layers in the innermost forward context."""
    mla = _context().mla
    if mla is None:
        raise BackendError("an MLA layer runs, but its context has none; use 'forward_context(backend, mla)'")
    return mla


def active_linear() -> Any:
    """What runs linear-attention layers in the innermost forward context."""
    linear = _context().linear
    if linear is None:
        raise BackendError(
            "a linear-attention layer runs, but its context has none; use 'forward_context(backend, mla, linear)'"
        )
    return linear


def _context() -> ForwardContext:
    try:
        return _active.get()
    except LookupError:
        raise BackendError("no backend is active; run the model inside 'with forward_context(backend):'") from None


def plan_forward(
    backend: AttentionBackend, batch: ForwardBatch, *, skip_attn_backend_init: bool | None = None
) -> Plan | None:
    """Plan a batch unless whoever planned it already said so; returns the plan that is now in force.

    ``skip_attn_backend_init`` is the old flag, kept for callers that have not moved to the marker (B3).
    """
    apply_skip_attn_backend_init(batch, skip_attn_backend_init)
    if batch.needs_forward_metadata_init():
        plan = backend.init_forward_metadata(batch)
        hook = "init_forward_metadata"
        batch.plan = made_plan(plan, backend.backend_id, batch.forward_mode, batch.num_tokens, hook)
    return batch.plan
