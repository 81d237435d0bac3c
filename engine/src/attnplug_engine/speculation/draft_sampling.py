"""Draft tokens for requests that sample: top-k with the noise by which the target will choose."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from attnplug_engine import kernels
from attnplug_engine.execution.sampler import gumbel_of, top_tokens
from attnplug_engine.kernels.sampling_metadata import SamplingMetadata


def gumbel_topk(
    logits: Tensor, batch: SamplingMetadata, topk: int, target_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the ``topk`` best tokens of each row, int64, and their log probabilities, float32, both ``[rows, topk]``.

    Greedy rows are ranked by ``logits [rows, vocab]``, others by ``logits / temperature`` plus the sampler's Gumbel
    noise. The noise depends on seed, position and token only, so a draft that is like the target chooses alike. Of
    equals the first is better. Log probabilities are those of the softmax of the ranked values. Top-k, top-p and min-p
    are ignored.

    A draft with its own vocabulary has ``target_ids [vocab]``: the target's tokens, which determine the noise and are
    returned. NaN and +inf count as -inf.
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
    best = top_tokens(scores, topk)
    logprobs = scores.log_softmax(1).gather(1, best).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    return best if target_ids is None else target_ids.long()[best], logprobs
