"""Backends composed of other backends, on one forwarding base class."""

from attnplug.wrappers.fastest import FastestBackend
from attnplug.wrappers.forwarding import (
    ForwardingBackend,
    Turn,
    captures_extends,
    limited_by,
    merged_turns,
    plan_alike,
    planner_claims,
    turns,
)
from attnplug.wrappers.hybrid import HybridLinearBackend
from attnplug.wrappers.split import SplitBackend

__all__ = [
    "FastestBackend",
    "ForwardingBackend",
    "HybridLinearBackend",
    "SplitBackend",
    "Turn",
    "captures_extends",
    "limited_by",
    "merged_turns",
    "plan_alike",
    "planner_claims",
    "turns",
]
