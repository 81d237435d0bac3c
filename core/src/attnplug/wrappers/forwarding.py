"""The base of every wrapper: nothing of the protocol can be left out (A9)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from attnplug.contract.backend import AttentionBackend, bind_optional_hook, hook_signatures, protocol_methods
from attnplug.contract.batch import ForwardBatch
from attnplug.contract.hooks import Hook
from attnplug.contract.plan import BackendId, Plan, made_plan
from attnplug.declare.claims import Claims, weakest
from attnplug.declare.errors import BackendError


class ForwardingBackend:
    """A backend that hands everything to backends of its own, which it knows by label.

    Subclass contract. A subclass defines every method of the protocol and every optional hook, with the parameters and
    defaults that these have there; one that leaves any out cannot be created as a class. There are no defaults here on
    purpose: a default that silently wins over a child's answer is the bug this base exists against. Claims are the
    weakest of the children's, but for those that ``decided_by`` leaves to one child, and ``forced_by`` says which
    children weakened each. Children's optional hooks are bound once, at construction, by their own signatures (A8).
    A wrapper's plan is its own; the children's are its parts.
    """

    backend_id: BackendId
    claims: Claims
    forced_by: Mapping[str, tuple[str, ...]]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        members = {**protocol_methods(), **hook_signatures()}
        missing = [name for name in members if not _defines(cls, name)]
        if missing:
            raise TypeError(
                f"wrapper {cls.__qualname__} does not forward {', '.join(missing)}; "
                "a wrapper defines every member of the protocol and every optional hook"
            )
        for name, wanted in members.items():
            own = inspect.signature(getattr(cls, name))
            if _shape(own)[1:] != _shape(wanted):
                raise TypeError(f"wrapper {cls.__qualname__} has {name}{own}, but the protocol has {name}{wanted}")

    def __init__(
        self, name: str, children: Mapping[str, AttentionBackend], decided_by: Mapping[str, str] | None = None
    ) -> None:
        self.backend_id = BackendId(name)
        self.children = dict(children)
        combined = weakest({label: child.claims for label, child in children.items()}, decided_by)
        self.claims = combined.claims
        self.forced_by = combined.forced_by
        self._hooks: dict[tuple[str, str], Hook | None] = {
            (label, hook): bind_optional_hook(child, hook)
            for label, child in children.items()
            for hook in hook_signatures()
        }

    def plan_of(self, batch: ForwardBatch, made: Mapping[str, object], hook: str) -> Plan:
        """The wrapper's plan, of what ``hook`` of some children returned, by label: checked, the first one's rows."""
        mode, rows = batch.forward_mode, batch.num_tokens
        parts = tuple(
            made_plan(plan, self.children[label].backend_id, mode, rows, hook) for label, plan in made.items()
        )
        return Plan(self.backend_id, mode, parts[0].query_rows, parts[0].kv_rows, parts=parts)

    def child_hook(self, label: str, hook: str) -> Hook | None:
        """A child's optional hook as a function of everything that is offered; ``None`` if the child has none."""
        return self._hooks[label, hook]

    def required_hook(self, label: str, hook: str) -> Hook:
        """A child's hook that the caller cannot do without."""
        found = self._hooks[label, hook]
        if found is None:
            child = self.children[label].backend_id.name
            raise BackendError(
                f"{self.backend_id.name} needs {hook} of its {label} backend {child}, which has none; "
                f"it claims {self.children[label].claims}"
            )
        return found


def _defines(cls: type, name: str) -> bool:
    """Whether a class itself says what a member does; inheriting the protocol's empty body does not count."""
    member = getattr(cls, name, None)
    return member is not None and member is not getattr(AttentionBackend, name, None)


def _shape(signature: inspect.Signature) -> list[tuple[str, Any, Any]]:
    return [(parameter.name, parameter.kind, parameter.default) for parameter in signature.parameters.values()]
