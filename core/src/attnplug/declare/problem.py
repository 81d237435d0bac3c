"""Everything that a choice of backend depends on, as plain data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from attnplug.declare.errors import UsageError
from attnplug.declare.model import ModelSpec
from attnplug.declare.settings import Setting

LARGEST_PAGE = 1 << 16
DEFAULT_PAGE_SIZE = 64
SM_RANGE = range(10, 1000)
LARGEST_TREE = 64
"""Rows of a request's tree of drafts: what one row sees of the others is 64 bits."""


class Role(StrEnum):
    """What a backend is chosen for. Each role can have a backend of its own."""

    PREFILL = "prefill"
    DECODE = "decode"
    LINEAR = "linear"
    DRAFT = "draft"

    @property
    def setting(self) -> Setting:
        """The setting of this role alone."""
        return Setting(f"{self.value}_attention_backend")


class DType(StrEnum):
    """Element types of activations and caches, by torch's names, and a cache row that has several."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3 = "float8_e4m3fn"
    FP8_DS_MLA = "fp8_ds_mla"
    """A latent row of MLA as FlashMLA's sparse kernels read it: e4m3 values, a float32 scale for every 128 of them, and
    the rotated columns in bfloat16. 656 bytes for a row of 512 + 64."""

    @property
    def is_element(self) -> bool:
        """Whether it is the type of single numbers, which any tensor can have."""
        return self is not DType.FP8_DS_MLA

    @classmethod
    def parse(cls, text: str, setting: str) -> DType:
        """Read a user's spelling. ``setting`` is the key of the setting that it was given for; the error names it."""
        try:
            return _SPELLINGS[text.lower().removeprefix("torch.")]
        except KeyError:
            known = ", ".join(cls)
            raise UsageError(
                f"`{setting}` {text!r} is not a data type; use one of {known}", settings=[setting]
            ) from None


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


LATENT_GROUP = 128
"""Values of a latent row that share a scale, in a cache of ``DType.FP8_DS_MLA``."""
FP8_CACHES = frozenset({DType.FLOAT8_E4M3, DType.FP8_DS_MLA})
"""Types of a cache whose type may differ from the activations'."""


class GraphLevel(IntEnum):
    """Which batches a backend can run inside a captured CUDA graph; a higher level includes the lower."""

    NEVER = 0
    DECODE = 1
    """One query token per request."""
    UNIFORM = 2
    """The same number of query tokens for every request (target verify)."""
    ALWAYS = 3
    """Any batch, prefill included."""


class CacheLayout(StrEnum):
    """How a page of the cache lies in memory. A latent row of MLA is one head, so the first two are the same for it."""

    TOKEN_MAJOR = "token_major"
    """The heads of one token lie together (NHD), pages one after the other."""
    HEAD_MAJOR = "head_major"
    """The tokens of one head lie together within a page (HND), pages one after the other."""
    STRIDED = "strided"
    """Any strides between pages, tokens and heads; the elements of one row lie together."""


class ExtendPath(StrEnum):
    """The ways to run an MLA extend (C1)."""

    ABSORBED = "absorbed"
    """In latent space, over the paged cache."""
    ONE_SHOT = "one_shot"
    """Gather all rows, up-project them, and make one causal call."""
    CHUNKED = "chunked"
    """Causal over the new rows, then chunk by chunk over the prefix, merged by log-sum-exp."""

    @classmethod
    def parse(cls, text: str) -> ExtendPath:
        """The path of that name."""
        if text not in list(cls):
            raise _wrong(Setting.MLA_EXTEND, repr(text), f"is unknown; use one of {', '.join(cls)}")
        return cls(text)


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be served, where and how. ``None`` means: not decided, so no reason to refuse.

    ``sm`` is the compute capability as one number (90 for 9.0). ``page_size`` is the manager's page size in tokens,
    which a kernel may divide into smaller pages of its own.
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
    exact_lengths: bool = True
    """Whether the host knows exact lengths on the CPU; without them it has upper bounds only."""
    layout: CacheLayout | None = None
    wants_graphs: bool = False
    """Whether the host captures decode where it can. ``auto`` then prefers backends that can be captured."""
    wants_prefill_graphs: bool = False
    """Whether it captures extends, too. Where ``auto`` chose who prefills, those of graphs may be another one's."""
    graphs_by_length: bool = True
    """Whether the host captures a batch size again for each backend that is the fastest at some length of it. Otherwise
    one graph of a size serves all lengths."""
    mla_by_host: bool = False
    """Whether the host absorbs, chunks and merges MLA itself. It then prefills MLA by kernels of its own, unless a
    backend is asked for in that role, which must be able to run MLA as MHA."""

    drafts_by_host: bool = False
    """Whether the host drafts by means of its own. Backends then check ``speculative_tokens`` rows of each request at
    once, and none is chosen to draft."""
    speculative_topk: int = 1
    """Branches that a draft keeps at every step. With more than 1, drafts are trees of ``speculative_tokens`` rows."""
    is_draft: bool = False
    """Whether the model drafts for another. One backend, of the role draft, then does all that its layers need."""
    index_dtype: DType | None = None
    """Element type of cached index keys, for sparse models. ``None``: that of the activations."""
    coordinator: str | None = None
    """Name of the coordinator that keeps latent rows outside the pools and loads those that sparse layers select."""
    mla_extend: ExtendPath | None = None
    """The way in which MLA layers must be prefilled. ``None``: any of those that the backend can."""

    def __post_init__(self) -> None:
        if self.page_size is not None and not 1 <= self.page_size <= LARGEST_PAGE:
            raise _wrong(
                Setting.PAGE_SIZE,
                self.page_size,
                f"is not a page size; give a number of tokens from 1 to {LARGEST_PAGE}",
            )
        if self.speculative_tokens < 0:
            raise _wrong(Setting.SPECULATIVE_TOKENS, self.speculative_tokens, "is negative; 0 turns speculation off")
        if self.speculative_topk < 1:
            raise _wrong(Setting.SPECULATIVE_TOPK, self.speculative_topk, "is not a number of branches; give 1 or more")
        if self.speculative_topk > 1 and self.speculative_tokens > LARGEST_TREE:
            why = f"are more than a tree of drafts can have; give up to {LARGEST_TREE}, or 1 branch"
            raise UsageError(
                f"`{Setting.SPECULATIVE_TOKENS}` {self.speculative_tokens} with `{Setting.SPECULATIVE_TOPK}` "
                f"{self.speculative_topk} {why}",
                settings=[Setting.SPECULATIVE_TOKENS, Setting.SPECULATIVE_TOPK],
            )
        if self.index_dtype is not None and self.model is not None and not self.model.index_layers:
            raise UsageError(
                f"`{Setting.INDEX_DTYPE}` {self.index_dtype} is given, but {self.model.name} has no index with a "
                "key for each token; leave it out",
                settings=[Setting.INDEX_DTYPE],
            )
        if self.tensor_parallel < 1:
            raise _wrong(Setting.TENSOR_PARALLEL, self.tensor_parallel, "is not a number of ranks; give 1 or more")
        if self.tensor_parallel > 1 and self.model is not None and self.model.ranks > 1:
            why = f"is given for a model with the heads of one of {self.model.ranks} ranks; give the whole model"
            raise _wrong(Setting.TENSOR_PARALLEL, self.tensor_parallel, why)
        multiple = 1 if self.model is None else self.model.page_multiple
        if self.page_size is not None and self.page_size % multiple:
            why = f"ends inside a window of {multiple} tokens that the model makes one entry of; give a multiple of it"
            raise _wrong(Setting.PAGE_SIZE, self.page_size, why)
        if self.coordinator is not None and self.model is not None:
            self._check_sparse(self.model)
        if self.mla_extend is not None and self.model is not None:
            self._check_extend(self.model, self.mla_extend)
        if self.sm is not None and self.sm not in SM_RANGE:
            raise _wrong(Setting.SM, self.sm, "is not a compute capability; write 9.0 as 90, 10.3 as 103")

    @staticmethod
    def _check_extend(model: ModelSpec, path: ExtendPath) -> None:
        """Refuse a path where no layer has one, or where layers read chosen rows or entries where they lie."""
        if not any(layer.mla is not None for layer in model.layers):
            raise UsageError(
                f"the extend path {path} is asked for, and only MLA layers have one; {model.name} has none: leave "
                f"`{Setting.MLA_EXTEND}` out",
                settings=[Setting.MLA_EXTEND],
            )
        sparse = any(layer.indexer is not None or layer.compressed is not None for layer in model.layers)
        if sparse and path is not ExtendPath.ABSORBED:
            raise UsageError(
                f"the extend path {path} is asked for, and sparse layers of {model.name} run {ExtendPath.ABSORBED} "
                f"only; give that one as `{Setting.MLA_EXTEND}`, or none",
                settings=[Setting.MLA_EXTEND],
            )

    @staticmethod
    def _check_sparse(model: ModelSpec) -> None:
        dense = next((layer for layer in model.layers if layer.indexer is None), None)
        if dense is not None:
            raise UsageError(
                f"`{Setting.ENABLE_HISPARSE}` keeps rows on the host that sparse layers choose from, and layer "
                f"{dense.layer_id} of {model.name} ({dense.kind}) has no index; leave it out, or give a model with "
                "sparse attention in all layers",
                settings=[Setting.ENABLE_HISPARSE],
            )

    @property
    def prefilled_by_host(self) -> bool:
        """Whether no backend is needed to prefill."""
        layers = () if self.model is None else self.model.full_layers
        return self.mla_by_host and bool(layers) and all(layer.mla is not None for layer in layers)

    def captured(self, roles: Collection[Role | None]) -> GraphLevel:
        """What a backend for these roles must be able to capture. One that only prefills takes no part in a decode."""
        only_prefills = set(roles) == {Role.PREFILL}
        return GraphLevel.NEVER if only_prefills and self.cuda_graph is GraphLevel.DECODE else self.cuda_graph

    def roles(self) -> tuple[Role, ...]:
        """The roles that this problem needs a backend for."""
        if self.model is None:
            return ()
        if self.is_draft:
            return (Role.DRAFT,)
        needed = []
        if self.model.full_layers:
            needed += [] if self.prefilled_by_host else [Role.PREFILL]
            needed += [] if self.is_embedding else [Role.DECODE]
        if self.model.linear_layers:
            needed.append(Role.LINEAR)
        if self.speculative_tokens and self.model.full_layers and not self.drafts_by_host:
            needed.append(Role.DRAFT)
        return tuple(needed)


def model_dtype(model: ModelSpec) -> DType | None:
    """The element type that a model's config asks for; ``None`` if it names none."""
    try:
        return None if model.dtype is None else DType.parse(model.dtype, Setting.DTYPE)
    except UsageError:
        message = f"the model's config asks for dtype {model.dtype!r}; choose one of {', '.join(DType)} with `dtype`"
        raise UsageError(message, settings=[Setting.DTYPE]) from None


def _wrong(setting: Setting, value: object, why: str) -> UsageError:
    return UsageError(f"`{setting}` {value} {why}", settings=[setting])
