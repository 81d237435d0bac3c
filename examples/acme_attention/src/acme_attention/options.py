"""Options of acme_mha, and what they exclude. Imported with the plugin, so it imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from attnplug import Problem, Refusal, Role


@dataclass(frozen=True)
class AcmeOptions:
    accumulate: Literal["float32", "float64"] = "float32"


def check_options(problem: Problem, role: Role | None, options: AcmeOptions) -> Iterator[Refusal]:
    """Yield what capabilities cannot express: float64 is for a CPU only."""
    if options.accumulate == "float64" and problem.device == "cuda":
        yield Refusal(
            "acme_accumulate",
            "accumulating in float64 is too slow on a GPU",
            value="float64",
            allowed=["float32"],
            setting="acme_mha.accumulate",
        )
