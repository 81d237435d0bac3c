"""Overhead of a bound hook over a direct call. Goal: at most 100 ns.

The direct call passes exactly the hook's parameters; the bound one gets everything that the caller offers. Both are
timed alternately in one process, and the median of the differences is reported.
"""

from __future__ import annotations

import statistics
import timeit

from attnplug.contract.backend import bind_hook

OFFERED = ("forward_batch", "disable_flashinfer_ragged")
CALLS = 200_000
ROUNDS = 15


class Backend:
    def whole(self, forward_batch, disable_flashinfer_ragged=False):
        return None

    def one(self, forward_batch):
        return None

    def keyword(self, forward_batch, *, disable_flashinfer_ragged=False):
        return None

    def anything(self, *args, **kwargs):
        return None


DIRECT = {
    "whole": "hook(batch, True)",
    "one": "hook(batch)",
    "keyword": "hook(batch, disable_flashinfer_ragged=True)",
    "anything": "hook(batch, disable_flashinfer_ragged=True)",
}


def nanoseconds(statement: str, names: dict[str, object]) -> float:
    return timeit.timeit(statement, globals=names, number=CALLS) / CALLS * 1e9


def main() -> None:
    backend = Backend()
    print(f"{'hook':<10}{'direct ns':>11}{'bound ns':>11}{'more ns':>10}   (medians of {ROUNDS} rounds, goal ≤ 100)")
    for name, call in DIRECT.items():
        hook, bound = getattr(backend, name), bind_hook(backend, name, OFFERED, OFFERED[1:])
        pairs = [
            (
                nanoseconds(call, {"hook": hook, "batch": 0}),
                nanoseconds("bound(batch, True)", {"bound": bound, "batch": 0}),
            )
            for _ in range(ROUNDS)
        ]
        direct, through = (statistics.median(column) for column in zip(*pairs, strict=True))
        more = statistics.median(b - a for a, b in pairs)
        print(f"{name:<10}{direct:>11.0f}{through:>11.0f}{more:>10.0f}   {'ok' if more <= 100 else 'OVER'}")


if __name__ == "__main__":
    main()
