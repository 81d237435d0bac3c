"""Settings of speculation. Nothing here imports torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum

from attnplug import UsageError
from attnplug.hf.config_keys import show

MAX_NODES = 64
"""Most rows of a request that are verified together: a tree's visibility mask has 64 bits."""
DEFAULT_STEPS = 3

ALGORITHM = "speculative_algorithm"
DRAFT_MODEL = "speculative_draft_model"
STEPS = "speculative_num_steps"
TOPK = "speculative_topk"
NODES = "speculative_num_draft_tokens"


class Algorithm(StrEnum):
    """Source of proposed tokens."""

    MTP = "mtp"
    """The target's own layers for multi-token prediction, or an assistant that reads the target's cache."""
    EAGLE = "eagle"
    """A small model that reads the target's last hidden states."""
    EAGLE3 = "eagle3"
    """A small model that reads hidden states of several of the target's layers."""
    STANDALONE = "standalone"
    """An ordinary small model."""
    NGRAM = "ngram"
    """No model: tokens that followed an earlier occurrence of the newest ones."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Shape of a draft: ``steps`` deep, ``topk`` branches wide, ``nodes`` rows to verify, the root included."""

    algorithm: Algorithm
    draft_model: str | None
    steps: int
    topk: int = 1
    nodes: int = 0
    """0 means: as many as a chain has, or a tree with ``topk`` nodes per step."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "algorithm", _algorithm(self.algorithm))
        _check_draft(self.algorithm, self.draft_model)
        _check_whole(STEPS, self.steps, 1, MAX_NODES - 1, "a number of draft steps")
        _check_whole(TOPK, self.topk, 1, MAX_NODES - 1, "a number of branches")
        if self.topk > 1 and self.has_model and self.tail - 1 > MAX_NODES:
            raise UsageError(
                f"`{TOPK}` {self.topk} with `{STEPS}` {self.steps} makes a draft run {self.tail - 1} rows of a request "
                f"in its last step; branches times one less than steps may be up to {MAX_NODES}",
                settings=[TOPK, STEPS],
            )
        most = self._most_nodes()
        if self.nodes == 0:
            object.__setattr__(self, "nodes", min(1 + self.topk * self.steps, most))
        _check_whole(NODES, self.nodes, 2, MAX_NODES, "rows to verify, the newest token's included,")
        if self.topk == 1 and self.nodes != self.steps + 1:
            raise UsageError(
                f"`{NODES}` {self.nodes} does not fit `{STEPS}` {self.steps}: a chain has {self.steps + 1}, one more "
                f"than steps; leave it out, or give a `{TOPK}` above 1",
                settings=[NODES, STEPS, TOPK],
            )
        if self.nodes > most:
            raise UsageError(
                f"`{NODES}` {self.nodes} is more than the {most} nodes of {self.steps} steps with {self.topk} "
                f"branches; give up to {most}, or raise `{STEPS}` or `{TOPK}`",
                settings=[NODES, STEPS, TOPK],
            )

    @property
    def has_model(self) -> bool:
        return self.algorithm is not Algorithm.NGRAM

    @property
    def tail(self) -> int:
        """Cache rows behind the committed ones that drafting writes: the newest token's, and those of further steps."""
        return 1 + self.topk * (self.steps - 1) if self.has_model else 0

    @property
    def most_draft_rows(self) -> int:
        """Most rows of a request in one of the draft's batches."""
        return max(self.nodes, self.topk * (self.steps - 1))

    @property
    def room(self) -> int:
        """Cache rows, behind those committed before a round, that the round may write: verified rows, then the
        draft's."""
        return self.nodes + self.tail

    def _most_nodes(self) -> int:
        each = self.topk**2 if self.has_model else self.topk  # candidates per step
        return min(1 + self.topk + each * (self.steps - 1), MAX_NODES)


def read_speculation(
    algorithm: str | None,
    draft_model: str | os.PathLike[str] | None,
    steps: int | None,
    topk: int | None,
    nodes: int | None,
) -> Speculation | None:
    """Return the settings; None if none was given. Raises UsageError."""
    if algorithm is None:
        given = {DRAFT_MODEL: draft_model, STEPS: steps, TOPK: topk, NODES: nodes}
        for name, value in given.items():
            if value is not None:
                raise UsageError(
                    f"`{name}` {show(value)} is given without `{ALGORITHM}`; choose one of {', '.join(Algorithm)}",
                    settings=[name, ALGORITHM],
                )
        return None
    if nodes is not None:  # it may imply the number of steps
        _check_whole(NODES, nodes, 2, MAX_NODES, "rows to verify, the newest token's included,")
    if steps is None:
        steps = DEFAULT_STEPS if topk not in (None, 1) or nodes is None else nodes - 1
    draft = os.fspath(draft_model) if isinstance(draft_model, os.PathLike) else draft_model
    return Speculation(_algorithm(algorithm), draft, steps, 1 if topk is None else topk, nodes or 0)


def _algorithm(value: object) -> Algorithm:
    if value not in list(Algorithm):
        raise UsageError(
            f"`{ALGORITHM}` {show(value)} is unknown; use one of {', '.join(Algorithm)}", settings=[ALGORITHM]
        )
    return Algorithm(str(value))


def _check_draft(algorithm: Algorithm, draft_model: str | None) -> None:
    if draft_model is not None and not isinstance(draft_model, str):
        raise UsageError(
            f"`{DRAFT_MODEL}` {show(draft_model)} is not allowed; give the folder of a checkpoint, or tiny:NAME",
            settings=[DRAFT_MODEL],
        )
    if algorithm is Algorithm.NGRAM and draft_model is not None:
        raise UsageError(
            f"`{DRAFT_MODEL}` {draft_model} is given, but `{ALGORITHM}` ngram has no model; leave it out",
            settings=[DRAFT_MODEL, ALGORITHM],
        )
    if algorithm not in (Algorithm.NGRAM, Algorithm.MTP) and draft_model is None:
        raise UsageError(
            f"`{ALGORITHM}` {algorithm} needs a draft model; give the folder of its checkpoint by `{DRAFT_MODEL}`",
            settings=[ALGORITHM, DRAFT_MODEL],
        )


def _check_whole(name: str, value: object, lowest: int, highest: int, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise UsageError(
            f"`{name}` {show(value)} is not allowed; give {what} from {lowest} to {highest}", settings=[name]
        )
