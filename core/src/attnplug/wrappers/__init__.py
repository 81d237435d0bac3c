"""Backends made of backends, all on one forwarding base."""

from attnplug.wrappers.forwarding import (
    ForwardingBackend,
    captures_extends,
    length_ranges,
    merge_length_ranges,
    plan_alike,
    planner_claims,
    who_forced,
)
from attnplug.wrappers.hybrid import HybridLinearBackend
from attnplug.wrappers.split import SplitBackend

__all__ = [
    "ForwardingBackend",
    "HybridLinearBackend",
    "SplitBackend",
    "captures_extends",
    "length_ranges",
    "merge_length_ranges",
    "plan_alike",
    "planner_claims",
    "who_forced",
]
