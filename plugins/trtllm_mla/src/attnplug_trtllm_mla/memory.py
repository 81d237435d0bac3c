"""Workspace kinds of the kernels. CuTe DSL kernels overwrite their scratch, so it is never shared (A2)."""

from __future__ import annotations

from attnplug import WorkspaceKind

SEMAPHORES = WorkspaceKind("trtllm-semaphores", zeroed=True)
"""Counters of TRT-LLM's kernels: zero before and after each call."""
CUTE_DSL_SCRATCH = WorkspaceKind("cute-dsl-scratch")
"""Partial results of CuTe DSL kernels."""
