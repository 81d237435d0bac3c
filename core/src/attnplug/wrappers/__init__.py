"""Backends composed of other backends, on one forwarding base class."""

from attnplug.wrappers.forwarding import (
    ForwardingBackend,
    captures_extends,
    length_ranges,
    limited_by,
    merge_length_ranges,
    plan_alike,
    planner_claims,
)
from attnplug.wrappers.hybrid import HybridLinearBackend
from attnplug.wrappers.split import SplitBackend

__all__ = [
    "ForwardingBackend",
    "HybridLinearBackend",
    "SplitBackend",
    "captures_extends",
    "length_ranges",
    "limited_by",
    "merge_length_ranges",
    "plan_alike",
    "planner_claims",
]
