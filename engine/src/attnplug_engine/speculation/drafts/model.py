"""Base class of draft models."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from attnplug import ForwardBatch, ModelSpec, UsageError
from attnplug_engine.settings.speculation import ALGORITHM, DRAFT_MODEL


class DraftError(UsageError):
    """A draft that does not fit its algorithm, its checkpoint or its target."""

    def __init__(self, message: str, *settings: str) -> None:
        mentioned = [name for name in (ALGORITHM, DRAFT_MODEL) if f"`{name}`" in message]
        super().__init__(message, settings=settings or mentioned or [DRAFT_MODEL])


@dataclass(frozen=True, slots=True)
class HiddenInputs:
    """Hidden states of the target that a draft reads: those behind the last norm, or those of inner ``layers``.

    Layers are numbered like the ``taps`` of ``Decoder.forward``.
    """

    last: bool = False
    layers: tuple[int, ...] = ()

    def width(self, hidden_size: int) -> int:
        """Return the columns of one row, for a target with this hidden size; 0 if the draft reads nothing."""
        return hidden_size * (len(self.layers) + self.last)


NOTHING = HiddenInputs()
LAST = HiddenInputs(last=True)


class DraftModel(nn.Module):
    """A model that proposes tokens. Layers find the active ``ModelAttention``, like those of a ``Decoder``.

    ``spec`` has this rank's heads, and layer ids from 0. ``hidden_size`` is the width of the output of ``forward``.
    ``models`` is the number of models, one per step; 1 means the same model for every step. ``target_ids [draft
    vocab]`` int64 maps draft tokens to target tokens; None if they share a vocabulary. ``reads_target`` is True for a
    draft without a cache: its layers' ids and rows are the target's, and it writes none.
    """

    hidden_inputs: HiddenInputs = NOTHING
    models: int = 1
    target_ids: Tensor | None = None
    reads_target: bool = False

    def __init__(self, spec: ModelSpec, hidden_size: int) -> None:
        super().__init__()
        self.spec = spec
        self.hidden_size = hidden_size

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor | None, batch: ForwardBatch, step: int = 0
    ) -> Tensor:
        """Return hidden states ``[rows, hidden_size]`` of tokens of the target's vocabulary.

        ``hidden`` are the target's states named by ``hidden_inputs``, or the output of this method for the previous
        step. None if the draft reads none.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Return logits ``[rows, draft vocab]`` float32 of the output of ``forward`` for this step, the same on every
        rank."""
        raise NotImplementedError
