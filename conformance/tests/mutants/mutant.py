"""One broken backend, and statements of the good ones that several lists of mutants change."""

from __future__ import annotations

from dataclasses import dataclass

Change = tuple[str, str]
"""A text that occurs exactly once in the good backend, and the text in its place."""


@dataclass(frozen=True)
class Mutant:
    """``message`` is a key phrase of the diagnosis. Some mutants need a second change to run at all, ``prepared``."""

    name: str
    good: str
    old: str
    new: str
    caught_by: str
    message: str
    prepared: Change | None = None


def then(statement: str, more: str) -> Change:
    """More statements behind one of the good backend."""
    return statement, f"{statement}; {more}"


def of(good: str, *rows: tuple[str, str, str, str, str] | tuple[str, str, str, str, str, Change]) -> list[Mutant]:
    """Mutants of a good backend: name, old, new, check, message and, in some rows, the second change."""
    return [Mutant(f"{good}-{name}", good, *row) for name, *row in rows]


START = "work, start = plan.metadata, 0"
PLANNED = "plan = batch.plan_for(self.backend_id, q.shape[0], decode=False)"
PAGES = "pages = self.table[request, position // self.page_size].long()"
WORKSPACE = "self.context.workspace.request('it', q.device, __import__('attnplug').SCRATCH, 1 << 20).buffer"
FP8_SCALES = "self.pool.scales(layer.layer_id)"
UNSCALED_ROWS = "torch.cat([part.float().flatten(0, 2)[slots] for part in self.pool.parts(layer.layer_id)[::2]], -1)"

KEEPS_MODE = then(START, "self.mode = plan.mode")
KEEPS_WORK = then(START, "self.work = work")
