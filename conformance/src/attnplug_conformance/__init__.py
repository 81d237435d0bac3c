"""The conformance kit: whether an attention backend is right, and what it does wrong.

``attnplug conform NAME`` and ``pytest --attention-backend NAME --pyargs attnplug_conformance`` run it. A package whose
kernels need a GPU runs it on a CPU over stand-ins for them, with ``conformance_tests(Subject(…))`` in its own tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnplug_conformance.subject import Subject as Subject
    from attnplug_conformance.testing import conformance_tests as conformance_tests

__all__ = ["Subject", "conformance_tests"]


def __getattr__(name: str) -> Any:
    """Nothing heavy is imported with the package: pytest loads its plugin in every run."""
    if name == "Subject":
        from attnplug_conformance.subject import Subject

        return Subject
    if name == "conformance_tests":
        from attnplug_conformance.testing import conformance_tests

        return conformance_tests
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
