"""Measured times of backends as plain data. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import date
from typing import NamedTuple

from attnplug.declare.errors import PluginError
from attnplug.declare.model import AttentionKind, LayerSpec
from attnplug.declare.problem import DType, ExtendPath, Role
from attnplug.declare.reading import format_names, integer, members_of, several

_MOST = 1 << 40
"""Exclusive upper bound of counts and microseconds."""


@dataclass(frozen=True, slots=True)
class MeasuredShape:
    """Layer shape of a measurement per rank, ``[heads, head_dim]`` and more: what a time depends on beside the batch.

    ``head_dim`` is the width of a cached key row; for MLA, of the latent row that all heads share. ``value_dim`` is the
    width of a value row; for MLA, ``kv_lora_rank``. ``window`` and ``topk`` are 0 if a layer attends to all rows.
    ``hosted``: MLA whose host absorbs the queries. They come in two parts, and new rows are cached before the call.
    ``path``: the path of MLA extends, up-projections included; None if ``ExtendPolicy`` chose it batch by batch.
    """

    kind: AttentionKind
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: DType
    kv_dtype: str
    page_size: int
    window: int = 0
    topk: int = 0
    hosted: bool = False
    path: ExtendPath | None = None

    def __post_init__(self) -> None:
        enums = {"kind": AttentionKind, "dtype": DType, "path": ExtendPath}
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            if name in enums and (name != "path" or value is not None):
                object.__setattr__(self, name, *members_of(enums[name])(name, [value]))
            elif name == "kv_dtype":
                object.__setattr__(self, name, *format_names(name, [value]) or ())
            elif name == "hosted":
                if type(value) is not bool or ((value or self.path) and self.kind is not AttentionKind.MLA):
                    raise PluginError(f"hosted={value!r} must be a bool; it and path={self.path!r} are for mla alone")
            elif name != "path" and not 0 <= integer(name, value) < _MOST:
                raise PluginError(f"{name}={value!r} must not be negative, and below {_MOST}")

    @classmethod
    def of(
        cls, layer: LayerSpec, types: tuple[DType, str], page_size: int, hosted: bool, path: ExtendPath | None = None
    ) -> MeasuredShape:
        """Shape of a layer as one rank has it (``LayerSpec.for_rank``), with the types of activations and cache."""
        mla, topk = layer.mla, 0 if layer.indexer is None else layer.indexer.topk
        row = layer.num_kv_heads, layer.head_dim, layer.v_head_dim
        if mla is not None:
            row = 1, mla.row_dim, mla.kv_lora_rank
        window, (hosted, path) = layer.sliding_window or 0, (False, None) if mla is None else (hosted, path)
        return cls(layer.kind, layer.num_heads, *row, *types, page_size, window, topk, hosted, path)

    def __str__(self) -> str:
        heads = f"{self.num_heads}" if self.kind is AttentionKind.MLA else f"{self.num_heads}/{self.num_kv_heads}"
        more = f", window {self.window}" * bool(self.window) + f", {self.topk} rows chosen" * bool(self.topk)
        more += ", absorbed by a host" * self.hosted + (f", extended {self.path}" if self.path else "")
        types = self.dtype if self.dtype == self.kv_dtype else f"{self.dtype}, cache {self.kv_dtype}"
        return f"{self.kind} {heads} heads of {self.head_dim}, {types}, pages of {self.page_size}{more}"


class Measurement(NamedTuple):
    """Time of one layer's call: number of requests, KV length and new tokens of each, and microseconds.

    ``ragged``: KV lengths are spread evenly from half to one and a half times ``length``. ``microseconds`` is the
    median of the repetitions, ``low`` and ``high`` are their quartiles. A decode of 32 requests:
    ``Measurement(32, 4096, 1, ragged=False, microseconds=81.5, low=80.9, high=82.0)``.
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
    """Measured times of one backend for one layer shape in one role on one device.

    ``device`` is the GPU's name as reported by its driver and ``sm`` its compute capability; for a CPU, its name and 0.
    ``versions`` maps distributions, and ``driver``, to the versions that were measured. ``measured`` is the date, such
    as 2026-11-16. Rows may come in any order, each (requests, length, tokens, ragged) once. The table of a backend that
    failed has no rows but a one-line reason, ``failed``. Failures count only on the machine where they were measured.
    A plugin's hook ``attnplug_rankings()`` returns folders of tables.
    """

    device: str
    sm: int
    backend: str
    role: Role
    shape: MeasuredShape
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
        if not isinstance(self.shape, MeasuredShape):
            raise PluginError(f"a measured table's shape={self.shape!r} must be a MeasuredShape")
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
        """Backend, role, device and shape. No two tables in use have the same title."""
        return f"{self.backend} {self.role} on {self.device} (SM {self.sm}), {self.shape}"


def _rows(title: str, rows: Iterable[object]) -> Iterable[Measurement]:
    shapes = set()
    for row in rows:
        if not isinstance(row, tuple | list) or len(row) != 7 or not all(map(_is_positive, (*row[:3], *row[4:]))):
            names = "(requests, length, tokens, ragged, microseconds, low, high)"
            problem = f"write {names}, all numbers above 0 and below {_MOST}"
        elif not all(type(count) is int for count in row[:3]):
            problem = "requests, length and tokens are whole numbers"
        elif type(row[3]) is not bool or (row[3] and row[0] == 1):
            problem = "ragged is true or false, and false of one request"
        elif not row[5] <= row[4] <= row[6]:
            problem = "the median lies between low and high"
        elif tuple(row[:4]) in shapes:
            problem = "its (requests, length, tokens, ragged) come twice; keep one"
        else:
            shapes.add(tuple(row[:4]))
            yield Measurement(*row[:4], *map(float, row[4:]))
            continue
        raise PluginError(f"the table of {title} has row {row!r}; {problem}")


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < _MOST  # type: ignore[operator] # a number


def _versions(title: str, versions: object) -> Mapping[str, str]:
    if isinstance(versions, Mapping) and versions and all(isinstance(t, str) for two in versions.items() for t in two):
        return dict(versions)
    raise PluginError(f"the table of {title} has versions={versions!r}; say what was measured: {{'torch': '2.11.0'}}")
