"""Memory as data: KV cache formats, which are parts of a row and their codec (E2), and kinds of scratch memory (A2)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from attnplug.declare.device import DEVICE_NAME
from attnplug.declare.errors import PluginError, Setting, UsageError
from attnplug.declare.installed import DOTTED
from attnplug.declare.model import LayerSpec, ModelSpec
from attnplug.declare.problem import LARGEST_PAGE, DType
from attnplug.declare.reading import boolean, dictionary, names, several

ROW_KINDS = frozenset({"mha", "mla", "index"})
"""Rows that a format may hold: keys and values of heads, latent rows, and index keys of sparse layers."""
_NBYTES = {"float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
           "float8_e8m0fnu": 1, "int8": 1, "uint8": 1}  # fmt: skip
_COPIED = 16  # bytes that kernels copy at a time: latent rows and their rotary columns start at multiples of it


@dataclass(frozen=True, slots=True)
class RowPart:
    """Part of a stored row: elements of one dtype, e.g. values or scales.

    ``dtype`` is torch's name. There is one element per ``per`` values of the row. With ``per=None`` there is one per
    row of a head, e.g. its scale. ``RowPart("uint8", per=2)`` are packed 4-bit values.
    """

    dtype: str
    per: int | None = 1

    def elements(self, width: int) -> int:
        return 1 if self.per is None else width // self.per


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Declaration of a KV cache format, returned by a plugin's ``attnplug_kv_formats`` hook.

    ::

        parts = (RowPart("uint8", per=2), RowPart("float16", per=32))
        KVFormat("int4_groups", "4-bit integers in groups of 32", parts, error=0.1, codec="attnplug_acme.int4_groups")

    A row is the key or value of one token and head, a token's latent row or its index key. In a host's memory and in
    latent rows its parts follow one another, aligned as ``placed`` says; ``MHAPool`` keeps the parts of keys and values
    apart. All parts move with the row when pages are copied. Raises :class:`PluginError` with every mistake.

    - ``codec``: a module with ``encode(rows)``, which takes rows ``[tokens, heads, width]`` and returns one tensor
      ``[tokens, heads, elements]`` per part, and ``decode(parts)``, which returns rows ``[tokens, heads, width]`` in
      float32 or bfloat16. Both are torch code for any device, do not synchronise, and treat each row independently.
      The module is imported when a pool is built. Without a codec, the only part holds values in float32 or 16 bits.
    - ``error``: largest ‖read − written‖ / ‖written‖ of a row of normally distributed values.
    - ``holds``: a subset of ``mha`` (keys and values), ``mla`` (latent rows) and ``index`` (index keys).
    - ``rope``: dtype of activations in which the rotary columns of latent rows follow the parts; ``None``: encoded too.
    - ``layer_scale``: rows are divided by a scale per layer before ``encode`` and multiplied after ``decode``.
    - ``page_multiple``: page sizes must be multiples of it.
    - ``kernels``: ``"package.module:attribute"`` by device type: a function of (parts, scale) that returns a
      ``RowKernel``, or ``None`` if it cannot serve this device. ``parts`` are views ``[pages, page_size, heads,
      elements]``. With a method ``pair(other)``, it returns one whose ``write(slots, k, v)`` is a single launch.
    """

    name: str
    summary: str
    parts: tuple[RowPart, ...]
    error: float
    codec: str | None = None
    holds: frozenset[str] = frozenset({"mha", "mla"})
    rope: str | None = None
    layer_scale: bool = False
    page_multiple: int = 1
    kernels: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, read in (("parts", several), ("holds", names), ("kernels", dictionary)):
            object.__setattr__(self, name, read(f"{name} of KV format {self.name!r}", getattr(self, name)))
        boolean(f"layer_scale of KV format {self.name!r}", self.layer_scale)
        if problems := list(self._problems()):
            raise PluginError(f"KV format {self.name!r}: " + "; ".join(problems))

    def _problems(self) -> Iterator[str]:
        if not isinstance(self.name, str) or not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", self.name):
            yield "name must be at most 64 lower-case letters, digits and underscores, starting with a letter"
        elif DType.spelled(self.name) not in (None, self.name):
            yield f"users write {self.name!r} for {DType.spelled(self.name)}; choose another name"
        if not isinstance(self.summary, str) or not self.summary or not self.summary.isprintable():
            yield f"summary {self.summary!r} must be one line of text"
        if not self.parts or not all(type(part) is RowPart for part in self.parts):
            yield f"parts {self.parts!r} must be one or more RowPart(dtype, per)"
            return
        dtypes, pers = [part.dtype for part in self.parts], [part.per for part in self.parts if part.per is not None]
        if unknown := set(map(str, dtypes)) - set(_NBYTES):
            yield f"dtypes {unknown} are unknown; known are {', '.join(_NBYTES)}"
        if self.rope is not None and str(self.rope) not in PLAIN_FORMATS:
            yield f"rope {self.rope!r} must be one of {', '.join(sorted(PLAIN_FORMATS))}, or None"
        if wrong := [per for per in (*pers, self.page_multiple) if type(per) is not int or not 0 < per <= LARGEST_PAGE]:
            yield f"per (None: one element per row) and page_multiple must be from 1 to {LARGEST_PAGE}, not {wrong}"
        if not isinstance(self.error, float | int) or not 0 <= self.error < 1:
            yield f"error {self.error!r} must be a relative error from 0, below 1"
        if not self.holds or not self.holds <= ROW_KINDS:
            yield f"holds {set(self.holds)}; give some of {', '.join(sorted(ROW_KINDS))}"
        plain = self.parts in [(RowPart(each),) for each in PLAIN_FORMATS] and self.rope is None
        if self.codec is None and (self.layer_scale or not plain):
            yield f"without a codec it is one part of {', '.join(sorted(PLAIN_FORMATS))}, no more; give the codec"
        if self.codec is not None and (type(self.codec) is not str or not re.fullmatch(DOTTED, self.codec)):
            yield f"codec {self.codec!r} must be a module, 'package.module'"
        for device, target in self.kernels.items():
            if not (DEVICE_NAME.fullmatch(str(device)) and re.fullmatch(rf"{DOTTED}:{DOTTED}", str(target))):
                yield f"kernels has {device!r}: {target!r}; give a device type: 'package.module:attribute'"

    def __str__(self) -> str:
        return self.name

    @property
    def group(self) -> int:
        """The width of a row must be a multiple of this many values."""
        return math.lcm(*(part.per for part in self.parts if part.per is not None))

    @property
    def in_bytes(self) -> bool:
        """True if rows mix parts, so that their memory is uint8; False if it has the dtype of the only part."""
        return len(self.parts) > 1 or self.rope is not None

    def placed(self, width: int, rope: int = 0) -> list[tuple[str, int, int]]:
        """Return dtype, first byte and last byte + 1 of every part of a row of ``width`` values.

        The last ``rope`` of them are rotary columns, aligned to 16 bytes. Others are aligned to their element size.
        """
        coded = width - rope if self.rope is not None else width
        sizes = [(part.dtype, part.elements(coded), _NBYTES[part.dtype]) for part in self.parts]
        sizes += [(self.rope, rope, _COPIED)] if self.rope is not None and rope else []
        placed, end = [], 0
        for dtype, elements, align in sizes:
            start = -(-end // align) * align
            end = start + elements * _NBYTES[dtype]
            placed.append((dtype, start, end))
        return placed

    def row_nbytes(self, width: int, rope: int = 0) -> int:
        """Return the bytes of a row of one head, a multiple of the largest alignment of its parts."""
        placed = self.placed(width, rope)
        align = max(_NBYTES[dtype] for dtype, _, _ in placed) if len(placed) == len(self.parts) else _COPIED
        return -(-placed[-1][2] // align) * align

    def token_nbytes(self, layer: LayerSpec) -> int:
        """Return the bytes of one token's rows in a full-attention layer of this rank."""
        if layer.mla is not None:
            return self.row_nbytes(layer.mla.row_dim, layer.mla.qk_rope_head_dim)
        return layer.num_kv_heads * (self.row_nbytes(layer.head_dim) + self.row_nbytes(layer.v_head_dim))

    def misfit(self, layer: LayerSpec, *, index: bool = False) -> str | None:
        """Return why the format cannot hold a full-attention layer's rows, or its index keys; ``None`` if it can."""
        kind, widths = "mha", {layer.head_dim, layer.v_head_dim}
        if index and layer.indexer is not None:
            kind, widths = "index", {layer.indexer.head_dim}
        elif layer.mla is not None:
            kind, widths = "mla", {layer.mla.row_dim if self.rope is None else layer.mla.kv_lora_rank}
        if kind not in self.holds:
            return f"it holds {' and '.join(sorted(self.holds))} rows; layer {layer.layer_id} has {kind} rows"
        if wrong := sorted(width for width in widths if width % self.group):
            return f"its rows are in groups of {self.group} values; layer {layer.layer_id} has rows of {wrong[0]}"
        return None

    def check(self, model: ModelSpec, page_size: int | None, setting: Setting = Setting.KV_DTYPE) -> None:
        """Raise UsageError if the format, given by ``setting``, cannot hold a model's rows, or not in these pages."""
        index = setting is Setting.INDEX_DTYPE
        misfits = (self.misfit(layer, index=index) for layer in (model.index_layers if index else model.full_layers))
        if (misfit := next(filter(None, misfits), None)) is not None:
            raise UsageError(f"`{setting}` {self.name} cannot hold rows of {model.name}: {misfit}; use another")
        if page_size is not None and page_size % self.page_multiple:
            needs = f"is not a multiple of {self.page_multiple}, as `{setting}` {self.name} requires"
            raise UsageError(f"`{Setting.PAGE_SIZE}` {page_size} {needs}; give one that is")


PLAIN_FORMATS = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
"""Formats that store values in a dtype of activations."""
BUILT_IN = {each.name: each for each in (
    KVFormat("float32", "IEEE single precision", (RowPart("float32"),), 0.0, holds=ROW_KINDS),
    KVFormat("float16", "IEEE half precision", (RowPart("float16"),), 1e-3, holds=ROW_KINDS),
    KVFormat("bfloat16", "bfloat16", (RowPart("bfloat16"),), 4e-3, holds=ROW_KINDS),
    KVFormat("float8_e4m3fn", "e4m3 with one scale per layer, saturating at 448", (RowPart("float8_e4m3fn"),), 0.05,
             "attnplug.kv.float8", ROW_KINDS, layer_scale=True, kernels={"cuda": "attnplug.kv.float8:row_writer"}),
)}  # fmt: skip
"""Formats that core declares, by name."""


def as_format(format: KVFormat | str) -> KVFormat:
    """Return a format, or core's by its name: ``as_format("bfloat16")``. Registries know those of other packages."""
    if isinstance(format, KVFormat):
        return format
    if format not in BUILT_IN:
        raise UsageError(f"KV format {format!r} is not one of core's, {', '.join(BUILT_IN)}; give the KVFormat itself")
    return BUILT_IN[format]


_NAME = re.compile(r"[a-z0-9]+([-_.][a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class WorkspaceKind:
    """Contract of an allocation, e.g. ``WorkspaceKind("acme", zeroed=True)``. Backends share those of equal kinds.

    ``zeroed`` memory is zero on first use, and its users leave it zero (semaphores); other memory may hold anything.
    Kernels that overwrite memory which others expect to be zero need a kind with its own name. A plugin declares its
    kinds with the hook ``attnplug_workspace_kinds``.
    """

    name: str
    zeroed: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise PluginError(f"workspace kind {self.name!r} must be named in lower case, such as 'acme-counters'")
        boolean(f"zeroed of workspace kind {self.name!r}", self.zeroed)


SCRATCH = WorkspaceKind("scratch")
"""Scratch memory shared by all backends, the only kind of core: ``request(name, device, SCRATCH, nbytes)``."""
