"""Test cases as data: one batch on one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from attnplug import AttentionKind, CacheLayout, DType, ForwardMode, GraphLevel, LayerSpec, ModelSpec, Problem, Role
from attnplug.declare.device import Architecture
from attnplug.host import MLADims
from attnplug.linear import LinearDims
from attnplug.sparse import CompressedDims, IndexerDims
from attnplug_conformance.reference import Parents

FIRST, LAYER, LAST = 1, 3, 5
"""Layer ids: the layer before the layer under test, the layer under test, and the one following it."""
SCALE = 1.3
"""Ratio of a layer's scale to ``head_dim ** -0.5``. Backends must not assume that they are equal."""


@dataclass(frozen=True)
class Case:
    """One batch. ``lengths`` has (cached prefix rows, new tokens) of each request.

    If ``dims``, ``mla``, ``dtype`` or ``page_size`` is ``None``, it is chosen from the backend's claims.
    """

    lengths: tuple[tuple[int, int], ...]
    mode: ForwardMode = ForwardMode.EXTEND
    kind: AttentionKind = AttentionKind.MHA
    page_size: int | None = None
    kv_heads: int = 2
    group: int = 2
    """Query heads per KV head."""
    dims: tuple[int, int] | None = None
    """Head dimensions of keys and values."""
    unequal_dims: bool = False
    """True if the head dimensions of keys and values must differ."""
    mla: MLADims | None = None
    v_head_dim: int = 16
    """Value head dimension of MLA run as MHA."""
    mla_heads: int | None = None
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    dtype: DType | None = None
    kv_dtype: str | None = None
    """Name of the cache's format; ``None``: the dtype of the activations."""
    kv_scales: tuple[float, float] = (1.0, 1.0)
    layout: CacheLayout = CacheLayout.TOKEN_MAJOR
    pages: str = "shuffled"
    unused: int | None = None
    """Page table entries behind a request's last page; ``None``: a poisoned page. The engine's are -1."""
    shared: tuple[int, ...] = ()
    """Leading pages that each request shares with the request in front of it, as with a prefix cache."""
    ranks: int = 1
    """Number of tensor-parallel ranks. The heads of the case are those of one rank."""
    padding: int = 0
    """Padding rows of q, k and v."""
    padded_requests: int = 0
    exact: bool = True
    """True if the host knows exact lengths, False if it knows only upper bounds."""
    trees: tuple[Parents, ...] | None = None
    lanes: int = 1
    extras: frozenset[str] = frozenset()
    """Extras that the backend must claim for this case."""
    ragged: bool = False
    """MLA as MHA, over rows passed as arguments."""
    graph: GraphLevel = GraphLevel.NEVER
    at_limits: bool = False
    """True if the batch reaches the limits of the backend's context."""
    magnitude: float = 1.0
    layers_alike: bool = False
    """All layers have the same shape and scale, as the backend requires."""
    plain_first: bool = False
    """The first layer has no window and no logit cap."""
    other_heads: int | None = None
    """Number of heads and KV heads of the first layer, if different. The last one then has three heads and one KV head:
    no minimum or maximum over the layers fits the layer under test."""
    other_widths: int = 1
    """Ratio of the other layers' head dimensions to this layer's."""
    index: IndexerDims | None = None
    """Indexer of sparse layers. It selects the rows that a token attends to."""
    index_dtype: str | None = None
    """Format of cached index keys; ``None``: that of the activations."""
    hisparse: bool = False
    """True if the rows are in host memory and HiSparse swaps in the selected ones."""
    compressed: CompressedDims | None = None
    """Dimensions of layers that attend to compressed entries and to a window."""
    linear: LinearDims | None = None
    """Dimensions of a linear layer. A request without cached rows starts from a state of zeros."""
    silu: bool = True
    bias: bool = True
    """True if the convolution has a bias."""
    forced_role: Role | None = None
    """Role that the backend is built for; ``None``: the mode's role."""
    invariant: frozenset[str] = frozenset()
    """Requested levels of invariance."""
    seed: int = 0

    @property
    def is_mla(self) -> bool:
        return self.kind is AttentionKind.MLA

    @property
    def role(self) -> Role:
        if self.forced_role is not None:
            return self.forced_role
        if self.kind.is_linear:
            return Role.LINEAR
        if self.mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
            return Role.DECODE
        return Role.DRAFT if self.mode is ForwardMode.DRAFT_EXTEND else Role.PREFILL

    @property
    def layer(self) -> LayerSpec:
        if self.mla is not None:
            width = self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
            heads, scale = self.mla_heads or 1, SCALE * width**-0.5
            return LayerSpec(
                LAYER,
                self.kind,
                heads,
                heads,
                width,
                self.v_head_dim,
                scale,
                sliding_window=self.window,
                logit_cap=self.cap,
                sinks=self.sinks,
                mla=self.mla,
                indexer=self.index,
                compressed=self.compressed,
            )
        if self.linear is not None:
            dims, scale = self.linear, SCALE * max(self.linear.key_dim, 1) ** -0.5
            return LayerSpec(
                LAYER, self.kind, dims.heads, dims.key_heads, dims.key_dim, dims.value_dim, scale, linear=dims
            )
        assert self.dims is not None
        key, value = self.dims
        return LayerSpec(
            LAYER,
            AttentionKind.MHA,
            self.kv_heads * self.group,
            self.kv_heads,
            key,
            value,
            SCALE * key**-0.5,
            sliding_window=self.window,
            logit_cap=self.cap,
            sinks=self.sinks,
        )

    @property
    def layers(self) -> tuple[LayerSpec, LayerSpec, LayerSpec]:
        layer = self.layer
        first = replace(layer, layer_id=FIRST, scale=layer.scale if self.layers_alike else 2 * layer.scale)
        if self.plain_first:
            first = replace(first, sliding_window=None, logit_cap=None)
        if self.other_heads is not None:
            first = replace(first, num_heads=self.other_heads, num_kv_heads=self.other_heads)
        first = replace(
            first, head_dim=self.other_widths * first.head_dim, v_head_dim=self.other_widths * first.v_head_dim
        )
        last = replace(first, layer_id=LAST)
        if self.other_heads is not None:
            last = replace(last, num_heads=3, num_kv_heads=1)
        if self.index is not None and self.compressed is None:
            last = replace(layer, layer_id=LAST, indexer=replace(self.index, shares=LAYER))
        return first, layer, last

    def problem(self, device: str, sm: int | None, architecture: Architecture | None = None) -> Problem:
        """Problem that a backend must serve to run this case."""
        tokens = max((new for _, new in self.lengths), default=0)
        return Problem(
            ModelSpec("conformance", "conformance", self.layers, 1 << 20),
            device,
            sm,
            self.dtype,
            self.kv_dtype or self.dtype,
            self.page_size,
            cuda_graph=self.graph,
            speculative_tokens=tokens if self.mode is ForwardMode.TARGET_VERIFY else 0,
            speculative_topk=1 if self.trees is None else 2,
            exact_lengths=self.exact,
            layout=self.layout,
            is_draft=self.role is Role.DRAFT,
            index_dtype=self.index_dtype,
            coordinator="hisparse" if self.hisparse else None,
            architecture=architecture,
            invariant=self.invariant,
        )

    def describe(self) -> str:
        """Describe the case in one line, for reports."""
        shape = f"{self.kv_heads * self.group}/{self.kv_heads} heads, dims {self.dims}"
        if self.mla is not None:
            shape = f"{self.mla_heads} heads, latent {self.mla.kv_lora_rank}+{self.mla.qk_rope_head_dim}"
        if self.linear is not None:
            shape = f"{self.kind}, {self.linear.heads}/{self.linear.key_heads} heads"
        lens = ", ".join(f"{before}+{new}" for before, new in self.lengths[:8]) + ", …" * (len(self.lengths) > 8)
        kv = "" if self.kv_dtype in (None, self.dtype) else f", cache {self.kv_dtype}"
        kv += "" if self.index_dtype is None else f", index keys {self.index_dtype}"
        more = "".join(f"; {name} {value}" for name in _DESCRIBED if (value := getattr(self, name)) != _DEFAULTS[name])
        return (
            f"{self.mode} of {lens} rows; {shape}; pages of {self.page_size}; {self.dtype}{kv}{more}; seed {self.seed}"
        )


_DESCRIBED = (
    "window",
    "cap",
    "sinks",
    "kv_scales",
    "layout",
    "pages",
    "unused",
    "shared",
    "ranks",
    "padding",
    "padded_requests",
    "exact",
    "trees",
    "lanes",
    "graph",
    "at_limits",
    "magnitude",
    "plain_first",
    "other_heads",
    "other_widths",
)
"""Fields that are described if they differ from their defaults."""
_DEFAULTS = {each.name: each.default for each in fields(Case)}

Shape = Callable[[int, int], Case]
"""Function from page size and longest context to a case."""


def always(case: Case) -> Shape:
    """Return the same case for all page sizes and contexts."""
    return lambda p, longest: case
