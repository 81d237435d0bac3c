"""Latent attention: the three ways to run an extend, the policy among them, and the merge of partial results."""

from attnplug.mla.attention import MLAAttention, RowPlaces
from attnplug.mla.merge import merge_partial
from attnplug.mla.policy import ExtendPolicy
from attnplug.mla.weights import MLAWeights

__all__ = ["ExtendPolicy", "MLAAttention", "MLAWeights", "RowPlaces", "merge_partial"]
