"""What every draft model is, whatever it is made of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from attnplug import ForwardBatch, ModelSpec
from attnplug.host import UsageError
from attnplug_engine.speculation.options import ALGORITHM, DRAFT_MODEL


class DraftError(UsageError):
    """A draft that does not fit what it is asked for: its algorithm, its checkpoint or its target."""

    def __init__(self, message: str, *settings: str) -> None:
        mentioned = [name for name in (ALGORITHM, DRAFT_MODEL) if f"`{name}`" in message]
        super().__init__(message, settings=settings or mentioned or [DRAFT_MODEL])


@dataclass(frozen=True, slots=True)
class HiddenInputs:
    """Which hidden states of the target a draft is given: those after the last norm, or those of inner ``layers``.

    Layers are numbered as ``Decoder.forward`` numbers its ``taps``.
    """

    last: bool = False
    layers: tuple[int, ...] = ()

    def width(self, hidden_size: int) -> int:
        """Columns of one row, for a target with this hidden size; 0 if the draft takes nothing."""
        return hidden_size * (len(self.layers) + self.last)


NOTHING = HiddenInputs()
LAST = HiddenInputs(last=True)


class DraftModel(nn.Module):
    """A model that proposes tokens. Layers find the active ``ModelAttention``, as those of a ``Decoder`` do.

    ``spec`` has this rank's heads, and layer ids of its own from 0. ``hidden_size`` is the width of what ``forward``
    gives. ``models`` says how many models there are, one for each step; 1 is the same model for every step.
    ``target_ids`` ``[draft vocab]`` int64 are the target's tokens that the draft's own stand for; None means that both
    have one vocabulary. ``reads_target`` says that it has no cache: its layers' ids and rows are the target's, and it
    writes none.
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
        """Hidden states ``[rows, hidden_size]`` of tokens of the target's vocabulary.

        ``hidden`` is what the draft ``takes`` of the target, or what this method gave for the step before. None if it
        takes nothing.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """``[rows, draft vocab]`` float32 for what ``forward`` gave for this step, the same on every rank."""
        raise NotImplementedError
