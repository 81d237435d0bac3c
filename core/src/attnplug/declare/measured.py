"""Measured speeds of backends, as data: tables that a ranking can read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import date
from typing import NamedTuple

from attnplug.declare.errors import PluginError
from attnplug.declare.model import AttentionKind, LayerSpec
from attnplug.declare.problem import DType, Role
from attnplug.declare.reading import integer, members_of, several

_MOST = 1 << 40
"""Above every count and every number of microseconds that can be."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the time of an attention call depends on, beside its batch: one sort of layer, as one rank has it.

    ``head_dim`` is the width of a cached key row: of MLA that of the latent row, which all heads share. ``value_dim``
    is the width of a value row, of MLA the latent's. ``window`` and ``topk`` are 0 where all rows are seen. ``hosted``
    is MLA that a host absorbs itself: queries come in two parts, and new rows are in the cache before the call.
    """

    kind: AttentionKind
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: DType
    kv_dtype: DType
    page_size: int
    window: int = 0
    topk: int = 0
    hosted: bool = False

    def __post_init__(self) -> None:
        enums = {"kind": AttentionKind, "dtype": DType, "kv_dtype": DType}
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            if name in enums:
                object.__setattr__(self, name, *members_of(enums[name])(name, [value]))
            elif name == "hosted":
                if type(value) is not bool or (value and self.kind is not AttentionKind.MLA):
                    raise PluginError(f"hosted={value!r} must be true or false, and is false of {self.kind}")
            elif not 0 <= integer(name, value) < _MOST:
                raise PluginError(f"{name}={value!r} must not be negative, and below {_MOST}")

    @classmethod
    def of(
        cls, layer: LayerSpec, dtype: DType, kv_dtype: DType, page_size: int, *, mla_by_host: bool = False
    ) -> LayerShape:
        """The shape of a rank's layer (``LayerSpec.for_rank``)."""
        if layer.mla is not None:
            heads, head_dim, value_dim = 1, layer.mla.row_dim, layer.mla.kv_lora_rank
        else:
            heads, head_dim, value_dim = layer.num_kv_heads, layer.head_dim, layer.v_head_dim
        topk = 0 if layer.indexer is None else layer.indexer.topk
        return cls(
            layer.kind,
            layer.num_heads,
            heads,
            head_dim,
            value_dim,
            dtype,
            kv_dtype,
            page_size,
            window=layer.sliding_window or 0,
            topk=topk,
            hosted=mla_by_host and layer.mla is not None,
        )

    def __str__(self) -> str:
        heads = (
            f"{self.num_heads} heads"
            if self.kind is AttentionKind.MLA
            else f"{self.num_heads}/{self.num_kv_heads} heads"
        )
        more = f", window {self.window}" * bool(self.window) + f", {self.topk} rows chosen" * bool(self.topk)
        more += ", absorbed by a host" * self.hosted
        types = self.dtype if self.dtype is self.kv_dtype else f"{self.dtype}, cache {self.kv_dtype}"
        return f"{self.kind} {heads} of {self.head_dim}, {types}, pages of {self.page_size}{more}"


class Measurement(NamedTuple):
    """One call of one layer: the number of requests, each request's cache rows and new tokens, and the time.

    ``ragged`` says that requests differ, evenly from half to one and a half of these rows. ``microseconds`` is the
    median; half of the repetitions took between ``low`` and ``high``.
    """

    requests: int
    length: int
    tokens: int
    ragged: bool
    microseconds: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """How long one backend takes for one shape of layer in one role, measured on one device.

    ``device`` is the GPU's name as its driver gives it, ``sm`` its compute capability; on a CPU, its name and 0.
    ``versions`` says what was measured: versions by distribution, and the driver's. ``measured`` is the day, such as
    2026-11-16. Rows are given in any order, each (requests, length, tokens, ragged) once. A table of a backend that
    failed has no rows, and in one line why: ``failed``. Only who measures on a machine can tell of failures there.
    """

    device: str
    sm: int
    backend: str
    role: Role
    shape: LayerShape
    rows: tuple[Measurement, ...]
    versions: Mapping[str, str]
    measured: str
    failed: str = ""

    def __post_init__(self) -> None:
        for name in ("device", "backend", "measured"):
            if not isinstance(value := getattr(self, name), str) or not value.strip():
                raise PluginError(f"a measured table's {name}={value!r} must be a text")
        try:
            date.fromisoformat(self.measured)
        except ValueError:
            raise PluginError(f"a measured table's measured={self.measured!r} must be a day: 2026-11-16") from None
        integer("sm", self.sm)
        object.__setattr__(self, "role", *members_of(Role)("role", [self.role]))
        if not isinstance(self.shape, LayerShape):
            raise PluginError(f"a measured table's shape={self.shape!r} must be a LayerShape")
        if not isinstance(self.failed, str) or not self.failed.isprintable():
            raise PluginError(f"the table of {self.title} has failed={self.failed!r}; say in one line what failed")
        rows = tuple(sorted(_rows(self.title, several("rows", self.rows))))
        if bool(rows) == bool(self.failed):
            wrong = "rows, and says that the backend failed; keep one" if rows else "no rows"
            raise PluginError(f"the table of {self.title} has {wrong}")
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "versions", _versions(self.title, self.versions))

    @property
    def title(self) -> str:
        """What was measured where. Two tables with one title contradict each other."""
        return f"{self.backend} {self.role} on {self.device} (SM {self.sm}), {self.shape}"


def _rows(title: str, rows: Iterable[object]) -> Iterable[Measurement]:
    shapes = set()
    for row in rows:
        if not isinstance(row, tuple | list) or len(row) != 7 or not all(map(_is_positive, (*row[:3], *row[4:]))):
            raise PluginError(
                f"the table of {title} has row {row!r}; write (requests, length, tokens, ragged, microseconds, low, "
                f"high), all numbers above 0 and below {_MOST}"
            )
        requests, length, tokens, ragged, *times = row
        if not all(type(count) is int for count in (requests, length, tokens)):
            raise PluginError(f"the table of {title} has row {row!r}; requests, length and tokens are whole numbers")
        if type(ragged) is not bool or (ragged and requests == 1):
            raise PluginError(
                f"the table of {title} has row {row!r}; ragged is true or false, and false of one request"
            )
        median, low, high = times
        if not low <= median <= high:
            raise PluginError(f"the table of {title} has row {row!r}; the median lies between low and high")
        if (shape := (requests, length, tokens, ragged)) in shapes:
            raise PluginError(f"the table of {title} has (requests, length, tokens, ragged) {shape} twice; keep one")
        shapes.add(shape)
        yield Measurement(requests, length, tokens, ragged, *map(float, times))


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < _MOST  # type: ignore[operator] # a number


def _versions(title: str, versions: object) -> Mapping[str, str]:
    if isinstance(versions, Mapping) and versions and all(isinstance(t, str) for two in versions.items() for t in two):
        return dict(versions)
    raise PluginError(f"the table of {title} has versions={versions!r}; say what was measured: {{'torch': '2.11.0'}}")
