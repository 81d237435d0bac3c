"""Kinds of workspace memory that the kernels need. CuTe DSL kernels overwrite theirs, so they never share (A2)."""

from __future__ import annotations

from attnplug import WorkspaceKind

SEMAPHORES = WorkspaceKind("trtllm-semaphores", zeroed=True)
"""Counters of TRT-LLM's kernels, which leave them zero."""
CUTE_DSL_SCRATCH = WorkspaceKind("cute-dsl-scratch")
"""Partial results of CuTe DSL kernels."""
