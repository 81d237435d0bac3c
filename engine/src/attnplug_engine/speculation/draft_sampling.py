"""The tokens that a draft proposes for requests that sample: with the noise that the target will choose by."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from attnplug_engine import kernels
from attnplug_engine.execution.sampler import gumbel_of, largest
from attnplug_engine.kernels.sampling_metadata import SamplingMetadata


def gumbel_topk(
    logits: Tensor, batch: SamplingMetadata, topk: int, target_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The ``topk`` best tokens of each row, int64, and their log-probabilities, float32, both ``[rows, topk]``.

    A greedy row is judged by ``logits [rows, vocab]``, others by ``logits / temperature`` plus the sampler's noise: the
    noise depends on seed, place and token alone, so a draft that is like the target chooses alike. Of equals the first
    is better. Log-probabilities are those of the softmax of what was judged. Top-k, top-p and min-p are ignored.

    A draft with a vocabulary of its own has ``target_ids [vocab]``: the target's tokens, whose noise it is, and which
    are returned. NaN and +inf count as -inf.
    """
    if kernels.usable(logits):
        from attnplug_engine.kernels.draft_topk import launch_draft_topk

        return launch_draft_topk(logits, batch, topk, target_ids)
    scores = logits.float().nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
    heat = batch.temperature.unsqueeze(1)
    if (heat > 0).any():
        ids = (
            np.arange(logits.shape[1], dtype=np.uint32) if target_ids is None else target_ids.numpy().astype(np.uint32)
        )
        peak = scores.amax(1, keepdim=True).nan_to_num(neginf=0.0)
        drawn = (scores - peak) / torch.where(heat > 0, heat, 1) + gumbel_of(ids, batch.seed, batch.position)
        scores = torch.where(heat > 0, drawn, scores)
    best = largest(scores, topk)
    logprobs = scores.log_softmax(1).gather(1, best).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    return best if target_ids is None else target_ids.long()[best], logprobs
