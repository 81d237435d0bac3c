"""Checks of a KV format without a backend, derived from its declaration: writes, reads, copies and moves in pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnplug import AttentionKind, KVFormat, LayerSpec, MHAPool, MLAPool
from attnplug.declare.errors import AttnplugError, PluginError, describe_error
from attnplug.host import MLADims
from attnplug.kernels import PageCopy, RowFormat, RowPool
from attnplug.kv.buffer import PagedBuffer
from attnplug.kv.layout import LayoutName
from attnplug_conformance.arithmetic import as_bytes
from attnplug_conformance.failure import CheckFailure
from attnplug_conformance.stored_rows import StoredRows

_PAGES = 6
_LAYER = 3
_LARGEST_SCALED = 448
"""Largest value of a layer, as a multiple of its fp8 scale in a checkpoint."""
_EXAGGERATED, _FINE = 10, 0.01
"""A declared error is at most ``_EXAGGERATED`` times the measured one, or at most ``_FINE``."""


class _IndexKeys(RowPool):
    kind, contents = "index key", ("index keys",)

    @classmethod
    def formats(cls, layer: LayerSpec, dtype: KVFormat | str, *scales: float) -> tuple[RowFormat, ...]:
        return (RowFormat.of(dtype, layer.head_dim, scale=scales[0]),)


class FormatScene:
    """A pool in a format with one layer, and random rows that are written to scattered slots.

    Rows of kind ``mha`` have 6 heads: three of keys and three of values. Declarations are tried with two, so that a
    codec for one number of heads is found.
    """

    def __init__(
        self,
        format: KVFormat,
        kind: str,
        device: torch.device,
        layout: LayoutName = "token_major",
        scale: float = 1.0,
        widths: tuple[int, int] = (64, 64),
        pages: int = _PAGES,
    ) -> None:
        self.format, self.kind, self.device, self.scale = format, kind, device, scale
        self.page_size, group = format.page_multiple * -(-4 // format.page_multiple), format.group
        width, self.values = (group * max(1, each // group) for each in widths)
        self.rope, self.heads = 0, 6 if kind == "mha" else 1
        if kind == "mla":
            self.rope = group * -(-16 // group) if format.rope is None else 16
        self.width = width + self.rope
        pool: type[MHAPool | RowPool] = MHAPool if kind == "mha" else MLAPool if kind == "mla" else _IndexKeys
        self.layer = LayerSpec(_LAYER, AttentionKind.MHA, 3, 3, width, self.values, 1.0)
        if kind == "mla":
            dims = MLADims(width, 16, self.rope)
            self.layer = LayerSpec(_LAYER, AttentionKind.MLA, 2, 2, 32, 16, 1.0, mla=dims)
        each = (scale,) * len(pool.contents)
        self.settings: dict[str, Any] = {
            "page_size": self.page_size,
            "dtype": format,
            "scales": {_LAYER: each} if format.layer_scale else None,
        }
        self.pool = pool([self.layer], num_pages=pages, device=device, layout=layout, **self.settings)

    @property
    def stores(self) -> tuple[PagedBuffer, ...]:
        """Memory of keys and of values, or of the only rows."""
        return self.pool._layers[_LAYER]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return tuple(part.pages for rows in self.stores for part in rows.parts)

    def in_host_memory(self) -> tuple[FormatScene, list[Tensor]]:
        """Return the scene over memory of a host, and that memory, which has one page more than the pool."""
        pages = [rows.pages for rows in self.stores]
        memory = [torch.zeros(_PAGES + 1, *each.shape[1:], dtype=each.dtype, device=each.device) for each in pages]
        held = {_LAYER: tuple(pages[:_PAGES] for pages in memory)}
        other = copy(self)
        other.pool = type(self.pool).over([self.layer], held, "pages tokens heads dim", **self.settings)
        return other, memory

    def separate(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return rows ``[tokens, heads, width]`` as the pool takes them: keys and values, or the only rows; views."""
        if self.kind != "mha":
            return (rows,)
        keys, values = rows.chunk(2, 1)
        return keys, values[..., : self.values]

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Write rows ``[tokens, heads, width]``."""
        self.pool.write(_LAYER, slots, *(each.contiguous() for each in self.separate(rows)))

    def read(self, slots: Tensor) -> Tensor:
        """Return rows ``[*slots.shape, heads, width]``."""
        return torch.cat([rows.read(slots) for rows in self.stores], -2)

    @property
    def stored(self) -> StoredRows:
        return StoredRows(self.format, self.width, self.rope)

    def rows(self, count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normally distributed rows ``[count, heads, width]``, in the range of the layer's scale."""
        random = torch.Generator().manual_seed(seed)
        made = torch.randn(count, self.heads, self.width, generator=random) * self.scale
        return made.to(dtype).to(self.device)

    def slots(self, count: int, seed: int = 0) -> Tensor:
        order = torch.randperm(_PAGES * self.page_size, generator=torch.Generator().manual_seed(seed))
        return order[:count].to(self.device)

    def memory(self) -> list[Tensor]:
        return [as_bytes(part).clone() for part in self.parts]

    def changed(self, before: list[Tensor]) -> set[int]:
        """Slots whose bytes differ from an earlier ``memory``."""
        found: set[int] = set()
        for part, old in zip(self.parts, before, strict=True):
            places = (as_bytes(part) != old).flatten(2).any(-1).nonzero().tolist()
            found |= {page * self.page_size + offset for page, offset in places}
        return found


def _error(found: Tensor, wanted: Tensor) -> float:
    """Largest ‖found − wanted‖ / ‖wanted‖ of a row; NaN if there is one."""
    sizes = wanted.double().norm(dim=-1).clamp(min=1e-30)
    return float(((found.double() - wanted.double()).norm(dim=-1) / sizes).max())


@contextmanager
def _failing_as(text: str) -> Iterator[None]:
    """Raise any exception as a CheckFailure: ``text``, then the exception."""
    try:
        yield
    except Exception as error:
        raise CheckFailure(f"{text} {describe_error(error)}") from error


def _round_trip(scene: FormatScene) -> None:
    slots, largest, declared = scene.slots(20), 0.0, scene.format.error
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = scene.rows(20, dtype=dtype)
        scene.write(slots, rows)
        error = _error(scene.read(slots), rows)
        if not error <= declared:
            raise CheckFailure(f"{dtype} rows are read back with an error of {error:.2g}; it declares {declared}")
        largest = max(largest, error)
    if declared > max(_FINE, _EXAGGERATED * largest):
        raise CheckFailure(
            f"rows are read back with an error of {largest:.2g}; it declares {declared}, which tells users nothing"
        )
    zeros = torch.zeros(20, scene.heads, scene.width, device=scene.device)
    scene.write(slots, zeros)
    if scene.read(slots).any() or not scene.read(slots).isfinite().all():
        raise CheckFailure("rows of zeros are not read back as zeros")


def _magnitudes(scene: FormatScene) -> None:
    """Formats with scales of their own hold rows of any magnitude; those without are given the layer's scale.

    Checkpoints have scales for fp8, which divide the largest value of a layer to at most 448.
    """
    slots = scene.slots(20)
    if scene.format.layer_scale:
        rows = scene.rows(20)
        rows *= _LARGEST_SCALED * scene.scale / rows.abs().max()
        scene.write(slots, rows)
        if not (error := _error(scene.read(slots), rows)) <= scene.format.error:
            held = f"rows whose largest value is {_LARGEST_SCALED} times the layer's scale, as those of a checkpoint,"
            raise CheckFailure(f"{held} are read back with an error of {error:.2g}; it declares {scene.format.error}")
    own = any(part.per != 1 for part in scene.format.parts[1:]) and not scene.format.layer_scale
    sizes = torch.tensor([2.0**-10, 1.0, 2.0**10] if own else [1.0]).repeat(20)[:20].view(-1, 1, 1).to(scene.device)
    rows = scene.rows(20) * sizes
    scene.write(slots, rows)
    if not (error := _error(scene.read(slots), rows)) <= scene.format.error:
        held = "rows of magnitudes from 2^-10 to 2^10" if own else "rows"
        raise CheckFailure(f"{held} are read back with an error of {error:.2g}; it declares {scene.format.error}")
    rows = scene.rows(20)
    rows[:, :, ::16] *= 30.0  # outliers
    scene.write(slots, rows)
    if not scene.read(slots).isfinite().all():
        raise CheckFailure("rows with outliers are read back as NaN or infinity")


def _padding(scene: FormatScene) -> None:
    slots, rows = scene.slots(8), scene.rows(8)
    scene.write(slots, rows)
    before = scene.memory()
    scene.write(torch.full_like(slots, -1), scene.rows(8, 1))
    if scene.changed(before):
        raise CheckFailure("a write to slots of -1 alone changes memory")
    padded = slots.clone()
    padded[[0, 3, 7]] = -1
    scene.write(padded, scene.rows(8, 1))
    if extra := scene.changed(before) - set(padded.tolist()):
        raise CheckFailure(
            f"a write to slots {padded.tolist()} changes slots {sorted(extra)}, which are not among them"
        )
    hosted, memory = scene.in_host_memory()
    outside = torch.tensor([-7, _PAGES * scene.page_size], device=scene.device)
    with _failing_as(f"the kernel must skip slots {outside.tolist()}, which are outside the pool, and raises"):
        for store, given in zip(hosted.stores, hosted.separate(scene.rows(2, 1)), strict=True):
            if store.kernel is not None:
                store.kernel.write(outside, given.contiguous())
    if any(as_bytes(pages).any() for pages in memory):
        raise CheckFailure(
            f"the kernel for {scene.device.type} writes slots {outside.tolist()}, which are outside the pool"
        )


def _inputs(scene: FormatScene) -> None:
    slots, rows = scene.slots(12), scene.rows(12)
    fused = torch.cat((rows, rows), 1)
    with _failing_as("rows that are views of wider ones, as of a fused projection, raise"):
        scene.pool.write(_LAYER, slots, *scene.separate(fused[:, : scene.heads]))
    if not torch.equal(fused, torch.cat((rows, rows), 1)):
        raise CheckFailure("a write changes the rows that it is given; encode must not write to them")
    before = scene.memory()
    scene.write(slots, rows)
    if scene.changed(before):
        raise CheckFailure("rows that are views of wider ones, as of a fused projection, are stored differently")
    with _failing_as("a write of no rows raises"):
        scene.write(slots[:0], rows[:0])


class _Waiting(TorchDispatchMode):
    """Note operations that need values on the host, or that copy a constant from it. A GPU would wait for them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operation is torch.ops.aten.index.Tensor:  # by integers, a lookup; by booleans, a selection
            waits = any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
        elif operation is torch.ops.aten.lift_fresh.default:
            waits = args[0].dim() > 0
        else:
            waits = not _WAITING_TAGS.isdisjoint(operation.tags)
        if waits:
            self.found.add(str(operation))
        return operation(*args, **kwargs or {})


_WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _asynchronous(scene: FormatScene) -> None:
    """Codecs run once before, so that constants which they keep have been made."""
    rows = scene.rows(12)
    for name, run in (("encode", partial(scene.stored.encode, rows)), ("decode", scene.stored.decode)):
        given = () if name == "encode" else (scene.stored.encode(rows),)
        run(*given)
        with _Waiting() as waiting:
            run(*given)
        if waiting.found:
            raise CheckFailure(f"{name} waits for the device, or copies constants to it: {', '.join(waiting.found)}")


def _independent(scene: FormatScene) -> None:
    slots, rows = scene.slots(12), scene.rows(12)
    scene.write(slots, rows)
    together = scene.read(slots).clone()
    for index in range(12):
        scene.write(slots[index : index + 1], rows[index : index + 1])
    if not torch.equal(scene.read(slots), together):
        raise CheckFailure("rows written together differ from rows written alone; treat each row independently")
    before = scene.memory()
    scene.write(slots[5:6], scene.rows(1, 9) * 100.0)
    if extra := scene.changed(before) - {int(slots[5])}:
        raise CheckFailure(f"writing slot {int(slots[5])} changes slots {sorted(extra)}")
    others = [index for index in range(12) if index != 5]
    if not torch.equal(scene.read(slots)[others], together[others]):
        raise CheckFailure("writing one row changes what is read for its neighbours: they share a scale")
    for head in range(1, scene.heads):
        other = rows.clone()
        other[:, head] *= 50.0
        scene.write(slots, other)
        if not torch.equal(scene.read(slots)[:, head - 1], together[:, head - 1]):
            raise CheckFailure("writing one head changes what is read for another: they share a scale")
    scene.write(slots, rows.flip(1))
    if not torch.equal(scene.read(slots).flip(1), together):
        raise CheckFailure("a row is read differently as another head's: ranks that share the heads would differ")


def _copies(scene: FormatScene) -> None:
    size = scene.page_size
    page = torch.arange(size, 2 * size, device=scene.device)
    scene.write(page, scene.rows(size))
    wanted = scene.read(page).clone()
    scene.pool.copy_pages([PageCopy(1, 4)])
    if not torch.equal(scene.read(page + 3 * size), wanted):
        raise CheckFailure("a copied page is not read as the page was: its scales did not move")
    scene.pool.move_rows(page.flip(0), page)
    if not torch.equal(scene.read(page), wanted.flip(0)):
        raise CheckFailure("moved rows are not read as before: their scales did not move")


def _prefix(scene: FormatScene) -> None:
    slots, rows = scene.slots(16), scene.rows(16)
    scene.write(slots, rows)
    whole = scene.read(slots).clone()
    bytes_of = scene.memory()
    scene.write(slots[:5], rows[:5])
    scene.write(slots[5:], rows[5:])
    if scene.changed(bytes_of):
        raise CheckFailure("rows written in two steps have other bytes than those written in one")
    again = scene.read(slots.view(4, 4)).flatten(0, 1)
    if not torch.equal(again, whole) or not torch.equal(scene.read(slots.flip(0)).flip(0), whole):
        raise CheckFailure("the same rows are read differently in another order or shape: a prefix hit would differ")
    first, second = (scene.stores[0].read(part) for part in (slots[:8], slots[8:]))
    if not torch.equal(torch.cat((first, second)), whole[:, : first.shape[1]]):
        raise CheckFailure("a second read changes the rows of the first: decode must return a new tensor")


def _bytes(scene: FormatScene) -> None:
    wanted = _PAGES * scene.page_size * scene.heads * scene.format.row_nbytes(scene.width, scene.rope)
    if scene.pool.nbytes != wanted:
        raise CheckFailure(f"its rows take {scene.pool.nbytes} bytes, but it declares {wanted}")


def _layouts(scene: FormatScene) -> None:
    others = {"a host's memory": scene.in_host_memory()[0]}
    if scene.kind == "mha":
        others["the head_major layout"] = FormatScene(scene.format, "mha", scene.device, "head_major", scene.scale)
    slots, rows = scene.slots(12), scene.rows(12)
    for each in (scene, *others.values()):
        each.write(slots, rows)
    for name, other in others.items():
        if not torch.equal(scene.read(slots), other.read(slots)):
            raise CheckFailure(f"rows are read differently in {name}")


def _kernel(scene: FormatScene) -> None:
    """A kernel's rows, on a device that has one, are those of the codec, but for values rounded the other way."""
    if all(rows.kernel is None for rows in scene.stores):
        return
    slots, rows = scene.slots(20), scene.rows(20, dtype=torch.bfloat16)
    scene.write(slots, rows)
    wanted = scene.stored.read_back(rows, scene.scale)
    most = min(scene.format.error / 2, _error(wanted, rows)) + 1e-6
    if not (error := _error(scene.read(slots), wanted)) <= most:
        raise CheckFailure(
            f"the kernel for {scene.device.type} stores rows that differ by {error:.3f} from the codec's"
        )


def _sizes(scene: FormatScene) -> None:
    """A format may refuse a width. Its error may be somewhat larger where more values have one scale."""
    format, kind = scene.format, scene.kind
    for widths in _WIDTHS[kind]:
        try:
            other = FormatScene(format, kind, scene.device, scale=scene.scale, widths=widths, pages=_MANY // 4 + 1)
        except PluginError:
            continue
        slots = torch.randperm(_MANY, generator=torch.Generator().manual_seed(0)).to(scene.device)
        rows = other.separate(other.rows(_MANY, dtype=torch.bfloat16))
        other.pool.write(_LAYER, slots, *(each.contiguous() for each in rows))
        for store, wanted in zip(other.stores, rows, strict=True):
            if not (error := _error(store.read(slots), wanted)) <= 2 * format.error:
                raise CheckFailure(
                    f"{_MANY} rows of {wanted.shape[-1]} values are read back with an error of {error:.2g}; "
                    f"it declares {format.error}"
                )


_MANY = 1100
"""More rows than a launch of a kernel often has in a block, or in a grid of one block per multiprocessor."""
_WIDTHS = {"mha": ((128, 128), (192, 128), (96, 96), (256, 256)), "mla": ((512, 512),), "index": ((128, 128),)}


FORMAT_CHECKS: dict[str, tuple[str, Callable[[FormatScene], None]]] = {
    "bytes": ("a row takes the declared bytes", _bytes),
    "round_trip": ("rows are read back within the declared error", _round_trip),
    "magnitudes": ("rows of any magnitude are held, outliers give no NaN", _magnitudes),
    "sizes": ("many rows are held at once, of the usual widths, of values narrower than keys", _sizes),
    "padding": ("slots of -1, and by kernels those outside the pool, are not written", _padding),
    "inputs": ("rows are written from views, in any number, and stay as they are given", _inputs),
    "asynchronous": ("encode and decode do not wait for the device", _asynchronous),
    "independent": ("rows, heads and their scales do not influence one another", _independent),
    "copies": ("copied pages and moved rows keep their scales", _copies),
    "prefix": ("reused rows are equal bit by bit, however they were written and are read", _prefix),
    "layouts": ("rows are the same in every layout of a page, and in a host's memory", _layouts),
    "kernel": ("what a kernel writes is what the codec writes", _kernel),
}
"""Requirement and function of each check, by name."""


@dataclass(frozen=True)
class FormatResult:
    """Result of one check for rows of one kind; ``message`` is empty if it passed."""

    check: str
    kind: str
    requirement: str
    message: str = ""

    def as_json(self) -> dict[str, object]:
        name = f"{self.kind}.{self.check}"
        return {"check": name, "requirement": self.requirement, "passed": not self.message, "message": self.message}


def check_format(format: KVFormat, device: torch.device) -> Iterator[FormatResult]:
    """Run every check of a format, for each kind of rows that it holds.

    Raises PluginError if its codec contradicts the declaration, or its kernel cannot be made.
    """
    scale = 0.25 if format.layer_scale else 1.0
    for kind in sorted(format.holds):
        try:
            FormatScene(format, kind, device, scale=scale)
        except AttnplugError:
            raise
        except Exception as error:  # of a kernel's ``pair``
            reason = describe_error(error).splitlines()[0]
            raise PluginError(f"KV format {format.name}: pools of {kind} rows: {reason}") from error
        for name, (requirement, run) in FORMAT_CHECKS.items():
            message = ""
            try:
                run(FormatScene(format, kind, device, scale=scale))
            except (CheckFailure, AttnplugError) as error:
                message = str(error)
            except Exception as error:
                message = f"it raised {describe_error(error)}"
            yield FormatResult(name, kind, requirement, message)
