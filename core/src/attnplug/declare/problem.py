"""Inputs of backend selection, as plain data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from types import MappingProxyType

from attnplug.declare.device import SM, Architecture
from attnplug.declare.errors import Setting, UsageError
from attnplug.declare.model import ModelSpec

LARGEST_PAGE = 1 << 16
DEFAULT_PAGE_SIZE = 64
SM_RANGE = range(10, 1000)
LARGEST_TREE = 64
"""Maximum rows of a draft tree: the rows that one row sees are a 64-bit mask."""
INVARIANCE: Mapping[str, str] = MappingProxyType(
    {
        "run": "repetition of the batch, lane, stream, and process",
        "batch": "the other requests of the batch (number, lengths, order, position), padded requests, page numbers, "
        "page-table width, and bounds instead of exact lengths",
        "graph": "eager execution, capture, and replay at any captured size",
        "chunks": "chunk boundaries of the prompt, the length of a cached prefix, and whether a row was prefilled with "
        "other rows or decoded",
        "verify": "target verify of a chain of drafts or decode, so that speculation changes no token",
    }
)
"""Levels of invariance by name: everything that the bits of a request's output and ``lse`` do not depend on (E3).

Backends claim them and problems request them. A claim holds on one machine with one set of installed versions, for a
backend that was built with the level requested (``BackendContext.invariant``), and for MLA if extends run absorbed
(``Problem.extend_path``). A backend that is never captured keeps ``graph``; one that verifies no drafts keeps
``verify``.
"""


class Role(StrEnum):
    """Role of a backend in a model. Each role can have its own backend."""

    PREFILL = "prefill"
    DECODE = "decode"
    LINEAR = "linear"
    DRAFT = "draft"

    @property
    def setting(self) -> Setting:
        """Setting that requests a backend for this role."""
        return Setting(f"{self.value}_attention_backend")


class ForwardMode(StrEnum):
    """Kind of forward pass that a batch needs."""

    EXTEND = "extend"
    """New tokens of each request, behind a cached prefix (or none)."""
    DECODE = "decode"
    """One new token per request."""
    MIXED = "mixed"
    """Extending and decoding requests in one batch. A decoding request extends by one token."""
    IDLE = "idle"
    """No request: this rank only takes part in collectives."""
    TARGET_VERIFY = "target_verify"
    """The target model verifies the tokens that a draft proposed."""
    DRAFT_EXTEND = "draft_extend"
    """The draft model catches up with the tokens that the target accepted."""

    @property
    def is_decode(self) -> bool:
        """True if ``forward_decode`` runs this mode; ``forward_extend`` runs all others."""
        return self is ForwardMode.DECODE


class DType(StrEnum):
    """Dtypes of activations and cache elements, by torch's names."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3 = "float8_e4m3fn"

    @classmethod
    def spelled(cls, text: str) -> DType | None:
        """Return the dtype that a user's spelling names; ``None`` if it names none."""
        return _SPELLINGS.get(text.lower().removeprefix("torch."))

    @classmethod
    def parse(cls, text: str, setting: str) -> DType:
        """Parse a user's spelling. ``setting`` is the key of the setting, which the UsageError names."""
        if (found := cls.spelled(text)) is None:
            message = f"`{setting}` {text!r} is not a data type; use one of {', '.join(cls)}"
            raise UsageError(message, settings=[setting])
        return found


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
    """Batches that a backend can run inside a captured CUDA graph; a higher level includes the lower ones."""

    NEVER = 0
    DECODE = 1
    """One query token per request."""
    UNIFORM = 2
    """The same number of query tokens for every request (target verify)."""
    ALWAYS = 3
    """Any batch, prefill included."""


class CacheLayout(StrEnum):
    """Memory layout of a cache page. For MLA the first two are equal, because a latent row is one head."""

    TOKEN_MAJOR = "token_major"
    """``[pages, page_size, heads, dim]`` contiguous (NHD)."""
    HEAD_MAJOR = "head_major"
    """``[pages, heads, page_size, dim]`` contiguous (HND)."""
    STRIDED = "strided"
    """Any strides of pages, tokens and heads; the elements of a row are contiguous."""


class ExtendPath(StrEnum):
    """Path of an MLA extend (C1)."""

    ABSORBED = "absorbed"
    """In latent space, over the paged cache."""
    ONE_SHOT = "one_shot"
    """Gather all rows, up-project them, and run one causal MHA call."""
    CHUNKED = "chunked"
    """MHA, causal over the new rows, then chunk by chunk over the prefix, merged by log-sum-exp."""

    @classmethod
    def parse(cls, text: str) -> ExtendPath:
        if text not in list(cls):
            raise UsageError(f"`{Setting.MLA_EXTEND}` {text!r} is unknown; use one of {', '.join(cls)}")
        return cls(text)


@dataclass(frozen=True, slots=True)
class Problem:
    """A model, a device and the serving settings, for which backends are selected.

    ``None`` means undecided, which refuses no backend. ``device`` is a torch device type. ``sm`` is the compute
    capability of a CUDA device as one number (90 for 9.0); other devices have an ``architecture``. ``page_size`` is the
    cache manager's, in tokens; a kernel may divide it. ``Problem(model, device="cuda", sm=90, page_size=64)``.
    """

    model: ModelSpec | None = None
    device: str | None = None
    sm: int | None = None
    dtype: DType | None = None
    kv_dtype: str | None = None
    """Name of the KV cache's format."""
    page_size: int | None = None
    cuda_graph: GraphLevel = GraphLevel.NEVER
    speculative_tokens: int = 0
    tensor_parallel: int = 1
    is_embedding: bool = False
    """Prompts are embedded; no token is decoded."""
    exact_lengths: bool = True
    """The host knows exact lengths on the CPU, not only upper bounds."""
    layout: CacheLayout | None = None
    wants_graphs: bool = False
    """The host captures decode steps if possible. ``auto`` prefers backends that can be captured."""
    wants_prefill_graphs: bool = False
    """The host captures extends, too. If ``auto`` chose the prefill backend, captured extends may use another one."""
    graphs_by_length: bool = True
    """The host captures a batch size once per backend that is the fastest at some length, not once for all lengths."""
    mla_by_host: bool = False
    """The host absorbs, chunks and merges MLA itself, and prefills it with its own kernels unless a prefill backend is
    requested. That backend must be able to run MLA as MHA."""
    drafts_by_host: bool = False
    """The host drafts without a backend. Backends verify ``speculative_tokens`` rows of each request."""
    speculative_topk: int = 1
    """Branches that a draft keeps at every step. With more than 1, drafts are trees of ``speculative_tokens`` rows."""
    is_draft: bool = False
    """The model drafts for another one. One backend, of the role draft, runs all of its layers."""
    index_dtype: str | None = None
    """Name of the format of cached index keys, for sparse models; default: the dtype of the activations."""
    coordinator: str | None = None
    """Name of the coordinator that keeps latent rows outside the pools and loads those that layers read."""
    mla_extend: ExtendPath | None = None
    """Path on which MLA layers must be prefilled; default: any that the backend supports."""
    architecture: Architecture | None = None
    invariant: frozenset[str] = frozenset()
    """Requested levels of ``INVARIANCE``. ``auto`` then uses one backend per role for all batches."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "invariant", frozenset(self.invariant))
        for mistake in self._mistakes():
            raise UsageError(mistake)

    def _mistakes(self) -> Iterator[str]:
        """Yield messages about values that no backend could serve, with settings in backticks."""
        page_size = f"`{Setting.PAGE_SIZE}` {self.page_size}"
        ranks = f"`{Setting.TENSOR_PARALLEL}` {self.tensor_parallel}"
        tokens = f"`{Setting.SPECULATIVE_TOKENS}` {self.speculative_tokens}"
        topk = f"`{Setting.SPECULATIVE_TOPK}` {self.speculative_topk}"
        if self.page_size is not None and not 1 <= self.page_size <= LARGEST_PAGE:
            yield f"{page_size} is not a page size; give a number of tokens from 1 to {LARGEST_PAGE}"
        if self.speculative_tokens < 0:
            yield f"{tokens} is negative; 0 turns speculation off"
        if self.speculative_topk < 1:
            yield f"{topk} is not a number of branches; give 1 or more"
        if self.speculative_topk > 1 and self.speculative_tokens > LARGEST_TREE:
            yield f"{tokens} with {topk} exceed the size of a draft tree; give up to {LARGEST_TREE}, or 1 branch"
        if self.tensor_parallel < 1:
            yield f"{ranks} is not a number of ranks; give 1 or more"
        if self.sm is not None and self.sm not in SM_RANGE:
            yield f"`{Setting.SM}` {self.sm} is not a compute capability; write 9.0 as 90, 10.3 as 103"
        for level in sorted(self.invariant - set(INVARIANCE)):
            yield f"`{Setting.BATCH_INVARIANT}` {level!r} is unknown; use levels of {', '.join(INVARIANCE)}"
        if (model := self.model) is None:
            return
        if self.index_dtype is not None and not model.index_layers:
            index = f"`{Setting.INDEX_DTYPE}` {self.index_dtype}"
            yield f"{index} is given, but {model.name} has no index with a key per token; leave it out"
        if self.tensor_parallel > 1 and model.ranks > 1:
            yield f"{ranks} is given for a model with the heads of one of {model.ranks} ranks; give the whole model"
        if self.page_size is not None and self.page_size % model.page_multiple:
            window = f"a window of {model.page_multiple} tokens that the model makes one entry of"
            yield f"{page_size} ends inside {window}; give a multiple of it"
        dense = next((layer for layer in model.layers if layer.indexer is None), None)
        # With compressed layers, the others read a sliding window.
        if self.coordinator is not None and dense is not None and not model.compressed_layers:
            yield (
                f"`{Setting.ENABLE_HISPARSE}` keeps rows on the host that sparse layers select from, and layer "
                f"{dense.layer_id} of {model.name} ({dense.kind}) has no index; leave it out, or give a model with "
                "sparse attention in all layers"
            )
        # Sparse and compressed layers read selected rows and entries in place.
        in_place = any(layer.indexer is not None or layer.compressed is not None for layer in model.layers)
        path, absorbed = f"`{Setting.MLA_EXTEND}` {self.mla_extend} is given", ExtendPath.ABSORBED
        if self.mla_extend is not None and not any(layer.mla is not None for layer in model.layers):
            yield f"{path}, but {model.name} has no MLA layers; leave it out"
        if self.mla_extend not in (None, self.extend_path):
            yield (
                f"{path} with `{Setting.BATCH_INVARIANT}`, which requires {absorbed}: decode is absorbed, and other "
                "paths depend on the batch; leave one of them out"
            )
        if self.mla_extend not in (None, absorbed) and in_place:
            yield f"{path}, but sparse layers of {model.name} run {absorbed} only; give that one, or none"

    @property
    def device_architecture(self) -> Architecture | None:
        """Architecture with which requirements of backends are compared; ``None`` if it is undecided."""
        if self.device != "cuda":
            return self.architecture
        return None if self.sm is None else SM(self.sm)

    @property
    def extend_path(self) -> ExtendPath | None:
        """Path of all MLA extends; ``None`` if each batch may take its own.

        With levels of invariance beyond ``run`` it is absorbed. The other paths are chosen, and chunked, by the lengths
        of the whole batch, and differ from decode, which is absorbed.
        """
        return ExtendPath.ABSORBED if self.invariant - {"run"} else self.mla_extend

    @property
    def prefilled_by_host(self) -> bool:
        """True if the host prefills every layer by itself."""
        layers = () if self.model is None else self.model.full_layers
        return self.mla_by_host and bool(layers) and all(layer.mla is not None for layer in layers)

    @property
    def absorbed_by_host(self) -> bool:
        """True if the host passes absorbed MLA queries: with ``mla_by_host``, and if its index selects all rows."""
        shared = [] if self.model is None else [each.indexer.shares for each in self.model.layers if each.indexer]
        return self.mla_by_host or (bool(shared) and None not in shared)

    def captured(self, roles: Collection[Role | None]) -> GraphLevel:
        """Return the graph level that these roles require. A backend that only prefills takes no part in decode."""
        only_prefills = set(roles) == {Role.PREFILL}
        return GraphLevel.NEVER if only_prefills and self.cuda_graph is GraphLevel.DECODE else self.cuda_graph

    def roles(self) -> tuple[Role, ...]:
        """Return the roles that need a backend."""
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
    """Return the dtype of a model's config, such as ``DType("bfloat16")``; ``None`` if it has none."""
    found = None if model.dtype is None else DType.spelled(model.dtype)
    if found is None and model.dtype is not None:
        raise UsageError(f"the model's config has dtype {model.dtype!r}; choose one of {', '.join(DType)} with `dtype`")
    return found


def sorted_levels(levels: Collection[str]) -> list[str]:
    """Return levels in the order of their definition."""
    return [level for level in INVARIANCE if level in levels]
