"""Everything that a choice of backend depends on, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from attnplug.declare.errors import UsageError
from attnplug.declare.model import ModelSpec

LARGEST_PAGE = 1 << 16
SM_RANGE = range(10, 1000)


class Role(StrEnum):
    """What a backend is chosen for. Each role can have a backend of its own."""

    PREFILL = "prefill"
    DECODE = "decode"
    LINEAR = "linear"
    DRAFT = "draft"

    @property
    def option(self) -> str:
        """The command-line option that sets this role alone."""
        return f"--{self.value}-attention-backend"


class DType(StrEnum):
    """Element types of activations and caches, by torch's names."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3 = "float8_e4m3fn"

    @classmethod
    def parse(cls, text: str, option: str) -> DType:
        """Read a user's spelling; ``option`` names where it came from, for the error."""
        try:
            return _SPELLINGS[text.lower().removeprefix("torch.")]
        except KeyError:
            known = ", ".join(cls)
            raise UsageError(f"{option} {text!r} is not a data type; use one of {known}") from None


_SPELLINGS: dict[str, DType] = {dtype.value: dtype for dtype in DType} | {
    "fp32": DType.FLOAT32,
    "float": DType.FLOAT32,
    "fp16": DType.FLOAT16,
    "half": DType.FLOAT16,
    "bf16": DType.BFLOAT16,
    "fp8": DType.FLOAT8_E4M3,
    "fp8_e4m3": DType.FLOAT8_E4M3,
    "float8_e4m3": DType.FLOAT8_E4M3,
}


class GraphLevel(IntEnum):
    """Which batches a backend can run inside a captured CUDA graph; a higher level includes the lower."""

    NEVER = 0
    DECODE = 1
    """One query token per request."""
    UNIFORM = 2
    """The same number of query tokens for every request (target verify)."""
    ALWAYS = 3
    """Any batch, prefill included."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be served, where and how. ``None`` means: not decided, so no reason to refuse.

    ``sm`` is the compute capability as one number (90 for 9.0); ``page_size`` is the manager's page size
    in tokens, which a kernel may divide into smaller pages of its own.
    """

    model: ModelSpec | None = None
    device: str | None = None
    sm: int | None = None
    dtype: DType | None = None
    kv_dtype: DType | None = None
    page_size: int | None = None
    cuda_graph: GraphLevel = GraphLevel.NEVER
    speculative_tokens: int = 0
    tensor_parallel: int = 1
    is_embedding: bool = False
    """Prompts are embedded and nothing is generated: no token is ever decoded."""

    def __post_init__(self) -> None:
        if self.page_size is not None and not 1 <= self.page_size <= LARGEST_PAGE:
            raise UsageError(
                f"--page-size {self.page_size} is not a page size; give a number of tokens from 1 to {LARGEST_PAGE}"
            )
        if self.speculative_tokens < 0:
            raise UsageError(f"--speculative-tokens {self.speculative_tokens} is negative; 0 turns speculation off")
        if self.tensor_parallel < 1:
            raise UsageError(f"--tensor-parallel {self.tensor_parallel} is not a number of ranks; give 1 or more")
        if self.sm is not None and self.sm not in SM_RANGE:
            raise UsageError(f"--sm {self.sm} is not a compute capability; write 9.0 as 90, 10.3 as 103")

    def roles(self) -> tuple[Role, ...]:
        """The roles that this problem needs filled."""
        if self.model is None:
            return ()
        needed = []
        if self.model.full_layers:
            needed += [Role.PREFILL] if self.is_embedding else [Role.PREFILL, Role.DECODE]
        if self.model.linear_layers:
            needed.append(Role.LINEAR)
        if self.speculative_tokens and self.model.full_layers:
            needed.append(Role.DRAFT)
        return tuple(needed)
