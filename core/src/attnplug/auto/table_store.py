"""Measured times of backends as plain data, strict reading of their files, and the lookup of those that apply here.

Tables are JSON with a schema version; attnplug-tune writes them. The user's own precede those shipped with plugins.
Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from attnplug.declare.device import Processor
from attnplug.declare.errors import AttnplugError, PluginError
from attnplug.declare.installed import installed_version
from attnplug.declare.model import AttentionKind, LayerSpec
from attnplug.declare.problem import DType, ExtendPath, Role
from attnplug.declare.reading import format_names, integer, members_of, of_type, several
from attnplug.declare.spec import Provided, Registered
from attnplug.hf.config_keys import read_json_object

_MOST = 1 << 40
"""Exclusive upper bound of counts and microseconds."""


@dataclass(frozen=True, slots=True)
class MeasuredShape:
    """Layer shape of a measurement on one rank, ``[heads, head_dim]`` and more. With the batch it determines the time.

    ``head_dim`` is the width of a cached key row; for MLA, of the latent row that all heads share. ``value_dim`` is the
    width of a value row; for MLA, ``kv_lora_rank``. ``window`` and ``topk`` are 0 if a layer attends to all rows.
    ``hosted``: MLA whose host absorbs the queries in two parts, caches new rows, and makes the selection of ``topk``.
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
        given = self.versions
        texts = [*given, *given.values()] if isinstance(given, Mapping) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            problem = f"versions={given!r}; say what was measured: {{'torch': '2.11.0'}}"
            raise PluginError(f"the table of {self.title} has {problem}")
        object.__setattr__(self, "versions", dict(given))

    @property
    def title(self) -> str:
        """Backend, role, device and shape. No two tables in use have the same title."""
        return f"{self.backend} {self.role} on {self.device} (SM {self.sm}), {self.shape}"


def _rows(title: str, rows: Iterable[Any]) -> Iterable[Measurement]:
    shapes = set()
    for row in rows:
        numbers = (*row[:3], *row[4:]) if isinstance(row, tuple | list) and len(row) == 7 else ()
        if not numbers or not all(type(number) in (int, float) and 0 < number < _MOST for number in numbers):
            names = "(requests, length, tokens, ragged, microseconds, low, high)"
            problem = f"write {names}, all numbers above 0 and below {_MOST}"
        elif not all(type(count) is int for count in row[:3]):
            problem = "requests, length and tokens are whole numbers"
        elif type(row[3]) is not bool or (row[3] and row[0] == 1):
            problem = "ragged is true or false, and false of one request"
        elif not row[5] <= row[4] <= row[6]:
            problem = "the median must be between low and high"
        elif tuple(row[:4]) in shapes:
            problem = "its (requests, length, tokens, ragged) come twice; keep one"
        else:
            shapes.add(tuple(row[:4]))
            yield Measurement(*row[:4], *map(float, row[4:]))
            continue
        raise PluginError(f"the table of {title} has row {row!r}; {problem}")


CACHE_VARIABLE = "ATTNPLUG_CACHE_DIR"
TABLES_VARIABLE = "ATTNPLUG_TABLES"
"""``off`` disables all measured tables."""
DRIVER = "driver"
"""Key of the GPU driver in a table's versions. The other keys are distributions."""
_PLATFORM = ("torch", "triton")
"""Distributions whose releases rarely change the order of backends, like those of the backend's own package. Shipped
tables apply until their major version changes. The user's own tables apply to exactly what was measured."""
SCHEMA = 5
_KEYS = ("schema", "device", "sm", "tables")
_TABLE_KEYS = ("backend", "role", "shape", "measured", "versions")
_SHAPE_KEYS = tuple(each.name for each in fields(MeasuredShape))


class TableError(AttnplugError):
    """Raised if a file of measured tables cannot be read or written. The message is one line that names the file."""


class TableFile(NamedTuple):
    """Contents of a file: measured tables of one device."""

    device: str
    sm: int
    tables: tuple[MeasuredTable, ...]


def read_tables(path: Path) -> TableFile:
    """Read a file of tables. Raises only :class:`TableError`, whatever is wrong with the file."""
    try:
        found = read_json_object(path)
    except AttnplugError as error:
        raise TableError(error.message) from error
    try:
        if found.get("schema") != SCHEMA:
            raise PluginError(f"it has schema {found.get('schema')!r}, and this attnplug reads {SCHEMA}")
        _, device, sm, tables = _values(found, _KEYS, "the file")
        read = [_table(device, sm, table) for table in of_type("tables", tables, list, "a list")]
        for title, count in Counter(table.title for table in read).items():
            if count > 1:
                raise PluginError(f"it has two tables of {title}")
        return TableFile(of_type("device", device, str, "a text"), integer("sm", sm), tuple(read))
    except PluginError as error:
        raise TableError(f"{path} is not a file of measured tables: {' '.join(error.message.split())}") from error


def _table(device: Any, sm: Any, value: object) -> MeasuredTable:
    last = "failed" if "failed" in of_type("a table", value, dict, "an object") else "rows"
    backend, role, shape, measured, versions, found = _values(value, (*_TABLE_KEYS, last), "a table")
    own = MeasuredShape(*_values(shape, _SHAPE_KEYS, "a shape"))
    rows, failed = ((), found) if last == "failed" else (found, "")
    return MeasuredTable(device, sm, backend, role, own, rows, versions, measured, failed)


def _values(value: object, names: Iterable[str], title: str) -> list[Any]:
    """Values of an object that must have exactly these keys."""
    found = of_type(title, value, dict, "an object")
    missing, unknown = set(names) - set(found), set(found) - set(names)
    if missing or unknown:
        wrong = f"lacks {', '.join(sorted(missing))}" if missing else f"has unknown keys {', '.join(sorted(unknown))}"
        raise PluginError(f"{title} {wrong}")
    return [found[name] for name in names]


class Plugins(Protocol):
    """Installed backends by name, folders of tables that plugins ship, and devices. The registry implements it."""

    @property
    def backends(self) -> Mapping[str, Registered]: ...

    @property
    def table_folders(self) -> Sequence[Provided[Path]]: ...

    def processors(self, device: str | None) -> Sequence[Processor]: ...


class Origin(NamedTuple):
    """Origin of a table, in a few words, and the path of its file."""

    words: str
    path: str
    own: bool = False
    """True if it was measured on this machine."""
    distribution: str | None = None
    """Distribution that ships it, and vouches for its own version."""


class FoundTable(NamedTuple):
    """A measured table that applies here."""

    table: MeasuredTable
    origin: Origin


class Tables(NamedTuple):
    """Tables that apply to a processor, each title once, and one line for each that cannot be used."""

    found: tuple[FoundTable, ...]
    faults: tuple[str, ...] = ()


def cache_folder() -> Path:
    """Folder of this user's measured tables. It may not exist. Raises TableError if the user has no home folder."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own) / "tables"
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "attnplug" / "tables"
    try:
        return Path.home() / ".cache" / "attnplug" / "tables"
    except RuntimeError:
        raise TableError(
            f"this user has no home folder; set {CACHE_VARIABLE} to a folder for measured tables"
        ) from None


def cache_folders() -> dict[str, Path]:
    """Return the folders in which kernels, measured tables and models are cached."""
    home, variable = Path(os.path.expanduser("~")), os.environ.get  # Path.home() raises without a home folder
    return {
        "flashinfer": Path(variable("FLASHINFER_WORKSPACE_BASE", home)) / ".cache" / "flashinfer",
        "triton": Path(variable("TRITON_CACHE_DIR", Path(variable("TRITON_HOME", home)) / ".triton" / "cache")),
        "attnplug": cache_folder(),
        "hugging face": Path(variable("HF_HOME", home / ".cache" / "huggingface")),
    }


def table_path(processor: Processor) -> Path:
    """File for this user's own measurements on a processor."""
    return cache_folder() / f"{_file_name(processor)}.json"


def table_files(folders: Iterable[Provided[Path]], processor: Processor) -> Iterator[Origin]:
    """Files named after a processor: the user's own first, then those in the plugins' ``folders``."""
    with suppress(TableError):  # a user without a home folder has no tables
        for path in _named_after(processor, cache_folder()):
            yield Origin("measured on this machine", str(path), own=True)
    for provided in folders:
        for path in _named_after(processor, provided.value):
            yield Origin(f"shipped for {processor.name}", str(path), distribution=provided.source.distribution)


def _named_after(processor: Processor, folder: Path) -> Iterator[Path]:
    """``NAME.json`` and ``NAME.*.json`` in a folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError:
        yield folder  # reading it will report why it cannot be read
        return
    name = _file_name(processor)
    more = re.compile(rf"{re.escape(name)}\..*\.json")
    found = [f"{name}.json"] * (f"{name}.json" in names) + sorted(filter(more.fullmatch, names))
    yield from (folder / each for each in found)


def load_tables(plugins: Plugins, processor: Processor) -> Tables:
    """Read the tables of installed backends that apply to a processor.

    The user's own tables take precedence. If two plugins ship tables with the same title, neither is used (D2).
    """
    if os.environ.get(TABLES_VARIABLE, "").strip().lower() == "off":
        return Tables(())
    found: dict[str, FoundTable] = {}
    faults: dict[str, None] = {}
    tables: list[FoundTable] = []
    for origin in table_files(plugins.table_folders, processor):
        try:
            file = read_tables(Path(origin.path))
        except TableError as error:
            faults[f"{error}; it is not used: {'remove it' if origin.own else 'update its package'}"] = None
            continue
        if (file.device, file.sm) == (processor.name, processor.sm):
            tables += [FoundTable(table, origin) for table in file.tables]
        else:
            other = Processor(file.device, file.sm)
            faults[f"{origin.path} is not used: it was measured on {other}, and this is {processor}"] = None
    shipped = Counter(each.table.title for each in tables if not each.origin.own)
    for each in tables:
        table, origin = each.table, each.origin
        if table.backend not in plugins.backends:
            continue
        kind, are = ("a failure", "is") if table.failed else ("times", "are")
        unused = f"{origin.path}: {kind} of {table.backend} {are} not used"
        if table.failed and not origin.own:
            faults[f"{unused}: it was not on this machine"] = None
            continue
        if not origin.own and shipped[table.title] > 1:
            files = [other.origin.path for other in tables if other.table.title == table.title and not other.origin.own]
            faults[f"{unused}: {' and '.join(files)} have the table of {table.title}; uninstall one"] = None
            continue
        outdated = _outdated(each, plugins.backends[table.backend], processor)
        if outdated is None:
            found.setdefault(table.title, each)
        elif outdated:
            again = "; 'attnplug tune' measures again" if origin.own else ""
            faults[f"{unused}: {outdated}{again}"] = None
    return Tables(tuple(found.values()), tuple(faults))


def _outdated(found: FoundTable, backend: Registered, processor: Processor) -> str | None:
    """Reason why a table no longer applies; None if it applies, empty if a measured distribution is not installed."""
    table, origin = found.table, found.origin
    known = {backend.source.distribution: backend.source.version, DRIVER: processor.driver}
    here = {name: known[name] if name in known else installed_version(name) for name in table.versions}
    for name in backend.spec.uses:
        measured, installed = table.versions.get(name), installed_version(name)
        if (measured is None) != (installed is None):
            here_too = f"measured with {name} {measured or 'missing'}, and it is {installed or 'missing'} here"
            return here_too if origin.own else ""  # shipped tables cannot fit every installation
    if not all(here.values()):
        return ""
    loosely = () if origin.own else (backend.source.distribution, *_PLATFORM)
    for name, measured in table.versions.items():
        if (name == DRIVER and not origin.own) or name == origin.distribution:
            continue
        parts = 1 if name in loosely else None  # of the version: its major one, or all
        if measured.split(".")[:parts] != str(here[name]).split(".")[:parts]:
            return f"measured with {name} {measured}, and {here[name]} is here"
    return None


def _file_name(processor: Processor) -> str:
    return re.sub(r"[^a-z0-9]+", "-", processor.name.lower()).strip("-") or "unnamed"
