"""MLA as a model calls it: absorbed, one-shot and chunked extends, the policy that chooses, and the LSE merge."""

from attnplug.mla.attention import MLAAttention, RowPlaces
from attnplug.mla.merge import merge_partial
from attnplug.mla.policy import ExtendPolicy
from attnplug.mla.weights import MLAWeights

__all__ = ["ExtendPolicy", "MLAAttention", "MLAWeights", "RowPlaces", "merge_partial"]
