"""Numbers of steps that each backend served."""

from __future__ import annotations

from collections import Counter

from attnplug import ForwardBatch, ForwardMode

_DECODING = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)


class BackendUsage:
    """Numbers of prefill steps and of decode steps, verify included, by the backends that planned them.

    Backends that plan a step together (for linear and other layers, or for two halves) are counted as one. Nothing is
    counted if a single backend serves every step (not ``shared``).
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._steps: dict[str, Counter[tuple[str, ...]]] = {"prefill": Counter(), "decode": Counter()}

    def add(self, *halves: ForwardBatch) -> None:
        """Count a launched step: its batch, or both halves of it."""
        if not self._shared:
            return
        plans = [half.plan.attention for half in halves if half.plan is not None]
        kind = "decode" if halves[0].forward_mode in _DECODING else "prefill"
        self._steps[kind][tuple(dict.fromkeys(name for plan in plans for name in plan.planner_names()))] += 1

    def clear(self) -> None:
        """Forget all steps."""
        for steps in self._steps.values():
            steps.clear()

    def by_backend(self) -> dict[str, dict[str, int]]:
        """Return steps by backend, in descending order, for prefill and decode. A kind that one backend served alone is
        left out."""
        return {
            kind: {" and ".join(names): count for names, count in steps.most_common()}
            for kind, steps in self._steps.items()
            if len(steps) > 1
        }
