"""Latent attention: the three ways to run an extend, the policy among them, and the merge of partial results."""

from attnplug.mla.attention import MLAAttention, MLAWeights, attend_mla
from attnplug.mla.merge import merge_partial
from attnplug.mla.plan import MLAExtendPlan, plan_extend
from attnplug.mla.policy import ExtendPolicy

__all__ = [
    "ExtendPolicy",
    "MLAAttention",
    "MLAExtendPlan",
    "MLAWeights",
    "attend_mla",
    "merge_partial",
    "plan_extend",
]
