"""Conformance kit for attention backends: correctness checks against float64, with a diagnosis of each failure.

``attnplug conform NAME`` and ``pytest --attention-backend NAME --pyargs attnplug_conformance`` run it. A package whose
kernels need a GPU runs it on a CPU over reference kernels, with ``conformance_tests(Subject(…))`` in its own tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnplug_conformance.subject import Subject as Subject
    from attnplug_conformance.testing import conformance_tests as conformance_tests

__all__ = ["Subject", "conformance_tests"]


def __getattr__(name: str) -> Any:
    """Import public names lazily: pytest loads the kit's plugin in every run."""
    if name == "Subject":
        from attnplug_conformance.subject import Subject

        return Subject
    if name == "conformance_tests":
        from attnplug_conformance.testing import conformance_tests

        return conformance_tests
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
