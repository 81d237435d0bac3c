"""Split of prefill and decode between two backends."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from attnplug.contract.backend import AttentionBackend
from attnplug.contract.batch import ForwardBatch
from attnplug.contract.mode import ForwardMode
from attnplug.contract.plan import Plan
from attnplug.declare.claims import Claims, CombinedClaims, weakest
from attnplug.declare.lengths import LengthRange
from attnplug.declare.model import LayerSpec
from attnplug.declare.problem import GraphLevel, Role
from attnplug.wrappers.forwarding import ForwardingBackend, length_ranges

_DECODE_MODES = (ForwardMode.DECODE, ForwardMode.IDLE)


def role_of_modes(verify: Role) -> dict[ForwardMode, Role]:
    """Map modes to roles: decode and idle to decode, target verify to ``verify``, all others to prefill."""
    if verify not in (Role.PREFILL, Role.DECODE):
        raise ValueError(f"verify goes to {Role.PREFILL} or {Role.DECODE}, not to {verify}")
    found = {mode: Role.DECODE if mode in _DECODE_MODES else Role.PREFILL for mode in ForwardMode}
    return {**found, ForwardMode.TARGET_VERIFY: verify}


def weakest_by_role(claims: Mapping[str, Claims], prefill: Collection[str], decode: Collection[str]) -> CombinedClaims:
    """Combine the weakest claims of children, by label, that prefill or decode.

    A child that only decodes does not limit extends. A child that only prefills does not limit captured decodes.
    """
    decode_level = min(min(claims[label].cuda_graph for label in decode), GraphLevel.DECODE)
    paths = frozenset.intersection(*(claims[label].mla_extend for label in prefill))
    return weakest(
        {
            label: replace(
                own,
                cuda_graph=own.cuda_graph if label in decode else max(own.cuda_graph, decode_level),
                mla_extend=own.mla_extend if label in prefill else paths,
            )
            for label, own in claims.items()
        }
    )


class SplitBackend(ForwardingBackend):
    """Routes a batch by its mode: decode and idle to ``decode``, everything else to ``prefill``.

    Target verify is an extend of a few tokens, and either kind of kernel may be faster for it; ``verify`` is the role
    that runs it. A plan holds one child's plan, so a batch that changes its mode after planning is refused by the child
    that did not plan it. Only the children that take part in a graph limit what can be captured: for a decode, the
    decode child alone.
    """

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend, *, verify: Role = Role.DECODE) -> None:
        super().__init__(
            f"split({prefill.backend_id.name}, {decode.backend_id.name})",
            {Role.PREFILL: prefill, Role.DECODE: decode},
        )
        claims = {label: child.claims for label, child in self.children.items()}
        combined = weakest_by_role(claims, {Role.PREFILL}, {Role.DECODE})
        self.claims, self.limiting_children = combined.claims, combined.limited_by
        self._child_of: dict[ForwardMode, tuple[str]] = {mode: (role,) for mode, role in role_of_modes(verify).items()}

    def route(self, batch: ForwardBatch | None, layer: LayerSpec | None) -> tuple[str, ...]:
        # Without a batch, a layer is run by ``forward_ragged``, which belongs to prefill.
        return (Role.PREFILL,) if batch is None else self._child_of[batch.forward_mode]

    def init_mha_chunk_metadata(
        self, forward_batch: ForwardBatch, disable_flashinfer_ragged: bool = False
    ) -> Plan | None:
        return self.chunk_plan(Role.PREFILL, forward_batch, disable_flashinfer_ragged)

    def length_ranges(
        self, mode: ForwardMode, requests: int, tokens: int, ragged: bool = False
    ) -> tuple[LengthRange, ...]:
        return length_ranges(self.children[self._child_of[mode][0]], mode, requests, tokens, ragged)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for label in self._captured():
            self.required(label, "init_cuda_graph_state")(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the larger of the children's values: a batch is padded once, and every captured child must plan it."""
        return max(int(self.required(label, "get_cuda_graph_seq_len_fill_value")()) for label in self._captured())

    def _captured(self) -> tuple[str, ...]:
        """Return the labels of the children that take part in graphs at the level that this backend claims."""
        return tuple(self.children) if self.claims.cuda_graph > GraphLevel.DECODE else (Role.DECODE,)
