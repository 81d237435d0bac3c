"""How many steps each backend served."""

from __future__ import annotations

from collections import Counter

from attnplug import ForwardBatch, ForwardMode

_DECODING = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)


class Served:
    """Steps by the backends that planned them: those of prefill, and those of decode, verify included.

    Backends that serve a step together are counted as one: for its linear layers and the others, or for two halves.
    Where one backend serves all, and none is ``shared`` with others, nothing is counted.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._steps: dict[str, Counter[tuple[str, ...]]] = {"prefill": Counter(), "decode": Counter()}

    def add(self, *halves: ForwardBatch) -> None:
        """A step that was launched: its batch, or both halves of it."""
        if not self._shared:
            return
        plans = [half.plan.attention for half in halves if half.plan is not None]
        kind = "decode" if halves[0].forward_mode in _DECODING else "prefill"
        self._steps[kind][tuple(dict.fromkeys(name for plan in plans for name in plan.planner_names()))] += 1

    def told(self) -> dict[str, dict[str, int]]:
        """Steps by backend, the busiest first, of prefill and of decode, where more than one served."""
        return {
            kind: {" and ".join(names): count for names, count in steps.most_common()}
            for kind, steps in self._steps.items()
            if len(steps) > 1
        }
