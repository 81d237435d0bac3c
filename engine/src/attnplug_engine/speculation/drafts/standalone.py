"""An ordinary small model as a draft: it reads tokens and nothing of the target."""

from __future__ import annotations

from torch import Tensor

from attnplug import ForwardBatch
from attnplug_engine.models.decoder import LoadedModel
from attnplug_engine.speculation.drafts.model import DraftModel


class StandaloneDraft(DraftModel):
    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded.spec, loaded.module.hidden_size)
        self.decoder = loaded.module

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor | None, batch: ForwardBatch, step: int = 0
    ) -> Tensor:
        return self.decoder.forward(input_ids, positions, batch)

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        return self.decoder.logits(hidden)
